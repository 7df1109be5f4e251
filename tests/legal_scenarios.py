"""Small scenarios of every kind: models with and without experts and latent attention, every degree, sharding,
precision, recompute, offload, schedule and overlap. A draw may be illegal; then loading it says why."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

from op_graphs.context_parallel.registry import ALGORITHMS
from op_graphs.dispatchers import DISPATCHERS
from op_graphs.optimizers import OPTIMIZERS
from tracesim.errors import ScenarioError
from tracesim.scenario import Scenario, load_scenario

LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_size": 16,
    "qk_rope_head_size": 8,
    "v_head_size": 16,
}
SPACE = {"heads": 16, "head_size": 16, "state_size": 16, "groups": 16, "chunk_size": 16}
DELTA = {"key_heads": 8, "value_heads": 16, "key_head_size": 16, "value_head_size": 16}
EXPERTS = {"experts": 8, "top_k": 2, "expert_ffn_size": 64, "aux_loss": True}
CAPACITY: list[Any] = [
    {},
    {},
    {"capacity_factor": 1.25},
    {"capacity_factor": 1.0, "pad_to_capacity": False, "drop_policy": "position"},
    {"capacity_factor": 0.4, "pad_to_capacity": False},
]
RECOMPUTE: list[Any] = [
    "none",
    "full",
    {"method": "block", "layers": 1},
    {"every": 2},
    {"keep": "products"},
    {"modules": ["core_attn"]},
    {"modules": ["layernorm", "mlp"]},
    {"modules": ["moe_act", "mla_up_proj"]},
]
OFFLOAD: list[Any] = [
    None,
    {"layers": 1, "minimum_bytes": 0},
    {"modules": ["core_attn", "attn_proj", "attn_norm"], "minimum_bytes": 0},
    {"modules": ["expert_fc1", "moe_act"], "minimum_bytes": 0, "in_flight": 1},
    {"optimizer": 0.5},
]
DTYPES = ["bf16", "bf16", "fp8-tensorwise", "fp8-blockwise", "fp8-rowwise", "mxfp8"]
LORA: list[Any] = [None, None, {"rank": 8}, {"rank": 4, "targets": ["linear_fc2"], "dropout": 0.1}]
SCHEDULES = [
    *("gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "interleaved-zb", "zb-v", "dualpipe", "dualpipev"),
    *("1f1b-overlap", "looped-bfs"),
]


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    """A decoder of four layers whose sizes divide by eight ranks."""
    model: dict[str, Any] = {
        "name": "drawn",
        "layers": 4,
        "hidden_size": 128,
        "ffn_size": 256,
        "heads": 8,
        "vocab_size": 1024,
        "vocab_padding_multiple": 1,
        "activation": draw(st.sampled_from(["swiglu", "gelu", "clamped_swiglu"])),
        "tied_embeddings": draw(st.booleans()),
        "mtp_layers": draw(st.sampled_from([0, 0, 1])),
    }
    if draw(st.booleans()):
        model["latent_attention"] = {**LATENT, "q_lora_rank": draw(st.sampled_from([0, 32]))}
    else:
        model |= {"kv_heads": draw(st.sampled_from([4, 8])), "head_size": 16, "qk_norm": draw(st.booleans())}
        model["attention_output_gate"] = draw(st.integers(0, 3)) == 0
        if draw(st.integers(0, 3)) == 0:
            model |= {"window": 16, "window_pattern": "wf"}
    if draw(st.booleans()):
        model["moe"] = {
            **EXPERTS,
            "shared_ffn_size": draw(st.sampled_from([0, 64])),
            "first_dense_layers": draw(st.sampled_from([0, 1])),
            **draw(st.sampled_from(CAPACITY)),
            "latent_size": draw(st.sampled_from([0, 0, 32])),
            "expert_bias": draw(st.booleans()),
        }
    kind = draw(st.integers(0, 5))
    if kind == 0:
        model |= {"mixer_pattern": draw(st.sampled_from(["M", "M*"])), "state_space": SPACE}
    elif kind == 1:
        pattern = "ME*-" if "moe" in model else draw(st.sampled_from(["M*M-", "MM-M"]))
        model |= {"layer_pattern": pattern, "state_space": SPACE}
        if model["mtp_layers"]:
            model |= {"mtp_pattern": "*-"}
    elif kind == 2:
        model |= {"mixer_pattern": draw(st.sampled_from(["G", "G*"])), "delta_net": DELTA}
    return model


@st.composite
def mappings(draw: st.DrawFn) -> dict[str, Any]:
    """A scenario that may break a rule or two."""
    tp = draw(st.sampled_from([1, 2, 4]))
    pp = draw(st.sampled_from([1, 2]))
    schedule = draw(st.sampled_from(SCHEDULES)) if pp > 1 else "1f1b"
    vpp = 2 if schedule in ("interleaved-1f1b", "interleaved-zb", "zb-v", "dualpipev", "looped-bfs") else 1
    dp = draw(st.sampled_from([1, 2, 4]))
    return {
        "model": draw(models()),
        "hardware": draw(st.sampled_from(["h100-sxm", "b200-sxm"])),
        "parallel": {
            "tp": tp,
            "sp": tp > 1 or draw(st.booleans()),
            "cp": draw(st.sampled_from([1, 1, 2, 4])),
            "cp_comm": draw(st.sampled_from(list(ALGORITHMS))),
            "pp": pp,
            "vpp": vpp,
            "dp": dp,
            "ep": draw(st.sampled_from([1, 2, 4])),
            "etp": draw(st.sampled_from([1, 1, 2])),
            "ep_dispatcher": draw(st.sampled_from(list(DISPATCHERS))),
            "zero": draw(st.sampled_from([0, 1, 1, 2, 3])),
            "reshard": draw(st.sampled_from(["default", "default", "always", "never", 2])),
        },
        "training": {
            "seq_len": 64,
            "micro_batch_size": draw(st.integers(1, 2)),
            "num_microbatches": draw(st.sampled_from([4, 8])),
            "dtype": draw(st.sampled_from(DTYPES)),
            "router_padding": draw(st.booleans()),
            "mla": draw(st.sampled_from(["expanded", "absorbed"])),
            "routing": draw(st.sampled_from([None, None, {"zipf": 1.0}])),
            "optimizer": draw(st.sampled_from(list(OPTIMIZERS))),
            "recompute": draw(st.sampled_from(RECOMPUTE)),
            "offload": draw(st.sampled_from(OFFLOAD)),
            "lora": draw(st.sampled_from(LORA)),
        },
        "schedule": schedule,
        "libraries": {
            "permute_fusion": draw(st.booleans()),
            "router_fusion": draw(st.booleans()),
            "experts_in_turn": draw(st.booleans()),
        },
        "overlap": {
            **{name: draw(st.booleans()) for name in ("grad_reduce", "param_gather", "p2p", "tp")},
            "contention": draw(st.integers(0, 4)) == 0,
        },
    }


@st.composite
def legal_scenarios(draw: st.DrawFn) -> dict[str, Any]:
    """A mapping that loads: what the message of an illegal one names is put back to its default, until it does."""
    mapping = draw(mappings())
    for _ in range(12):
        message = problems_of(mapping)
        if not message:
            return mapping
        mapping = _without_problems(mapping, message)
    raise AssertionError(f"no legal scenario near {mapping}")


def without_padding(mapping: dict[str, Any]) -> dict[str, Any]:
    """The mapping with as many rows in its experts, over all ranks, however tokens are dealt out to them."""
    mapping = copy.deepcopy(mapping)
    model, training = mapping["model"], mapping["training"]
    if "moe" in model:
        for key in ("capacity_factor", "pad_to_capacity", "drop_policy"):
            model["moe"].pop(key, None)
        for key in ("routing", "router_padding"):
            training.pop(key, None)
        if training.get("dtype") in DTYPES[2:]:
            training["dtype"] = "bf16"
    return mapping


def problems_of(mapping: dict[str, Any]) -> str:
    """Why a mapping is refused; '' if it is not."""
    try:
        load_scenario(mapping)
    except ScenarioError as error:
        return str(error)
    return ""


def _without_problems(mapping: dict[str, Any], message: str) -> dict[str, Any]:
    changed = copy.deepcopy(mapping)
    for line in message.splitlines()[1:]:
        path = line.strip().partition(":")[0].split(".")
        if path[0] == "schedule":
            changed["schedule"] = "1f1b"
        elif len(path) > 1 and path[1] in mapping.get(path[0], {}):
            changed[path[0]].pop(path[1], None)
    if changed == mapping:
        # A default is refused, because of another field.
        for section, key in (("parallel", "cp"), ("parallel", "etp"), ("training", "recompute")):
            changed[section].pop(key, None)
    assert changed != mapping, f"{message} names nothing that could be left out"
    return changed


def changed(mapping: dict[str, Any], **changes: Any) -> Scenario | None:
    """The scenario with other values (``section__key``), or None where it is then refused."""
    mapping = copy.deepcopy(mapping)
    for path, value in changes.items():
        section, key = path.split("__")
        mapping[section][key] = value
    try:
        return load_scenario(mapping)
    except ScenarioError:
        return None
