"""Small dense scenarios for tests: one to change by hand, and a strategy that draws legal ones."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

from op_graphs.overlap.registry import OVERLAP_POINTS
from tracesim.scenario import Scenario, load_scenario

SMALL: dict[str, Any] = {
    "name": "small",
    "model": {
        "name": "small",
        "layers": 4,
        "hidden_size": 256,
        "ffn_size": 512,
        "heads": 8,
        "kv_heads": 4,
        "head_size": 32,
        "vocab_size": 1024,
    },
    "hardware": "h100-sxm",
    "parallel": {},
    "training": {"seq_len": 128, "micro_batch_size": 2, "num_microbatches": 2},
}


def dense_mapping(**changes: Any) -> dict[str, Any]:
    """SMALL with some keys replaced; a key of a section is written ``section__key``."""
    mapping = copy.deepcopy(SMALL)
    for path, value in changes.items():
        *sections, key = path.split("__")
        inner = mapping
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[key] = value
    return mapping


@st.composite
def dense_scenarios(draw: st.DrawFn, **fixed: Any) -> Scenario:
    """A legal dense scenario of up to 64 ranks; ``fixed`` as in :func:`dense_mapping`.

    The vocabulary needs no padding and every rank has key-value heads of its own, so sizes divide evenly.
    """
    flag = st.booleans()
    tp = draw(st.sampled_from([1, 2, 4]))
    pp = draw(st.sampled_from([1, 2, 3, 4]))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    dp = draw(st.sampled_from([1, 2, 4]))
    unfused = draw(flag)
    kv_heads = tp * draw(st.integers(1, 2))
    is_gpt = draw(flag)
    sp = draw(flag)
    policies = {
        name: st.sampled_from(OVERLAP_POINTS[name].names())
        for name in ("grad_reduce", "param_gather", "p2p", "tp")
    }
    if vpp > 1:
        policies["p2p"] = st.sampled_from(["ahead", "in-place"])
    if not sp:
        policies["tp"] = st.sampled_from(["beside-weights", "in-place", "gathered-once"])
    recompute = draw(st.sampled_from(["none", "none", "full", {"modules": ["core_attn"]}]))
    changes: dict[str, Any] = {
        "model__layers": pp * vpp * draw(st.integers(1, 2)),
        "model__hidden_size": 64 * draw(st.integers(1, 4)),
        "model__ffn_size": 32 * draw(st.integers(1, 6)),
        "model__heads": kv_heads * draw(st.integers(1, 3)),
        "model__kv_heads": kv_heads,
        "model__head_size": draw(st.sampled_from([16, 32])),
        "model__vocab_size": 128 * tp * draw(st.integers(1, 5)),
        "model__activation": "gelu" if is_gpt else draw(st.sampled_from(["swiglu", "geglu"])),
        "model__norm": draw(st.sampled_from(["rmsnorm", "layernorm"])),
        "model__positions": draw(st.sampled_from(["rotary", "learned", "none"])),
        "model__qkv_bias": draw(flag),
        "model__attention_output_bias": draw(flag),
        "model__mlp_bias": draw(flag),
        "model__qk_norm": draw(flag),
        "model__tied_embeddings": draw(flag),
        "model__hidden_dropout": draw(st.sampled_from([0.0, 0.1])),
        "model__attention_dropout": draw(st.sampled_from([0.0, 0.1])) if unfused else 0.0,
        "parallel__tp": tp,
        "parallel__sp": sp,
        "parallel__pp": pp,
        "parallel__vpp": vpp,
        "parallel__dp": dp,
        "parallel__zero": draw(st.sampled_from([0, 1])),
        "training__seq_len": 4 * draw(st.integers(1, 16)),
        "training__micro_batch_size": draw(st.integers(1, 2)),
        "training__num_microbatches": pp * draw(st.integers(1, 2)) if vpp > 1 else draw(st.integers(1, 5)),
        "training__recompute": recompute,
        "training__cross_entropy_fusion": draw(flag),
        "training__attention": "unfused" if unfused else "flash",
        "schedule": "interleaved-1f1b" if vpp > 1 else draw(st.sampled_from(["gpipe", "1f1b"])),
        **{f"overlap__{name}": draw(policy) for name, policy in policies.items()},
        **fixed,
    }
    return load_scenario(dense_mapping(**changes))
