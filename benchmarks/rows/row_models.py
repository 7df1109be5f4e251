"""Model and machine of a row: explicit dimensions where the row has them, else a preset by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .row import RowSkippedError, count_at, mapping_at, text_at
from .source_settings import SourceSettings

MACHINES: tuple[tuple[str, str | dict[str, Any]], ...] = (
    (r"a100[ _-]*40gb", {"base": "a100-sxm-80g", "memory": {"capacity_gib": 40, "bandwidth_gb_per_s": 1555}}),
    # The A800 is an A100 whose NVLink carries 400 GB/s in both directions together (NVIDIA A800 datasheet).
    (r"(a800|a100/a800).*", {"base": "a100-sxm-80g", "network": {"domain": {"bandwidth_gb_per_s": 200}}}),
    (r"a100.*pcie", "a100-pcie-80g"),
    (r"(nvidia[ _])?a100([ _-](80 ?gb|sxm4?)?){0,2}(\(ampere\))?", "a100-sxm-80g"),
    (r"h100.*(hbm2e|96gb|pcie|nvl)", ""),
    (r"(dgx-)?h100([ _-](80 ?gb|sxm5?)?){0,2}", "h100-sxm"),
    (r"h200([ _-]sxm)?", "h200-sxm"),
    (r"h800([ _-](80gb|sxm)?){0,2}", "h800-sxm"),
    (r"(dgx-)?b200", "b200-sxm"),
    (r"(dgx-)?gb200", "gb200-nvl72"),
    (r"mi300x?", "mi300x"),
)
"""Machine by pattern of a row's ``gpu``, first match of the whole text; empty where no profile fits."""

PRESETS = {
    "llama27b": "llama2-7b",
    "llama213b": "llama2-13b",
    "llama270b": "llama2-70b",
    "llama38b": "llama3-8b",
    "llama370b": "llama3-70b",
    "llama3405b": "llama3-405b",
    "llama318b": "llama3-8b",
    "llama3170b": "llama3-70b",
    "llama31405b": "llama3-405b",
    "gpt3175b": "gpt3-175b",
    "qwen2514b": "qwen2.5-14b",
    "qwen2532b": "qwen2.5-32b",
    "qwen2572b": "qwen2.5-72b",
    "qwen2505b": "qwen2.5-0.5b",
    "qwen257b": "qwen2.5-7b",
    "qwen306b": "qwen3-0.6b",
    "qwen314b": "qwen3-14b",
    "qwen332b": "qwen3-32b",
    "qwen38b": "qwen3-8b",
}
"""Preset by a row's model name, letters and digits only."""

# (layers, width, heads) of scripts/train/yamls/pretrain/mpt-*.yaml of llm-foundry; they give the sizes in the rows.
_MPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
_GPT: dict[str, Any] = {
    "activation": "gelu",
    "norm": "layernorm",
    "positions": "learned",
    "qkv_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
    "tied_embeddings": True,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
}
"""GPT as Megatron-LM trains it by default."""
_INTERNLM_7B: dict[str, Any] = {
    "layers": 32,
    "hidden_size": 4096,
    "ffn_size": 11008,
    "heads": 32,
    "vocab_size": 103168,
    "activation": "swiglu",
    "norm": "rmsnorm",
    "positions": "rotary",
    "qkv_bias": True,
    "attention_output_bias": True,
}
"""config.json of internlm/internlm-7b."""


def machine_of(row: Mapping[str, Any]) -> str | dict[str, Any]:
    """Hardware of a scenario for the ``gpu`` of a row; raise RowSkippedError where no profile fits."""
    gpu = text_at(row, "gpu")
    for pattern, machine in MACHINES:
        if re.fullmatch(pattern, gpu.lower().replace(" (", "(")):
            if machine:
                return machine
            break
    raise RowSkippedError(f"no hardware profile fits the GPU {gpu!r}")


def model_of(row: Mapping[str, Any], settings: SourceSettings) -> str | dict[str, Any]:
    """Model of a scenario; raise RowSkippedError where neither the row nor a preset gives its dimensions."""
    model = mapping_at(row, "model")
    name = text_at(model, "name")
    known = re.sub(r"[^a-z0-9]", "", name.lower())
    stated = _stated_dimensions(model, text_at(row, "notes"))
    if known in PRESETS:
        return {"base": PRESETS[known], "name": PRESETS[known], **stated} if stated else PRESETS[known]
    if known == "internlm7b":
        return {"name": "internlm-7b", **_INTERNLM_7B}
    if known.startswith("mpt") and known[3:] in _MPT:
        return _mpt(known[3:])
    if not re.match(r"(gpt|mt-?nlg|megatron)\b", name.lower()):
        raise RowSkippedError(f"no preset and no rule for the architecture of {name or 'an unnamed model'!r}")
    missing = [key for key in ("layers", "hidden_size", "heads") if key not in stated]
    if missing:
        raise RowSkippedError(f"the row does not say {', '.join(missing)} of {name}")
    vocab = stated.get("vocab_size") or settings.vocab_size
    if vocab is None:
        raise RowSkippedError(f"the row does not say the vocabulary of {name}")
    ffn = stated.get("ffn_size", 4 * stated["hidden_size"])
    return {"name": name, **_GPT, **stated, "ffn_size": ffn, "vocab_size": vocab}


def _mpt(size: str) -> dict[str, Any]:
    layers, width, heads = _MPT[size]
    shape = {
        "layers": layers,
        "hidden_size": width,
        "ffn_size": 4 * width,
        "heads": heads,
        "vocab_size": 50368,
    }
    no_bias = {"qkv_bias": False, "attention_output_bias": False, "mlp_bias": False}
    no_dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return {"name": f"mpt-{size}", **_GPT, **no_bias, **no_dropout, **shape}


def _stated_dimensions(model: Mapping[str, Any], notes: str) -> dict[str, int]:
    """Dimensions in the row itself, then those in a shape text of its notes (``NHIDDEN=14336 / NLAYERS=72``)."""
    keys = {
        "layers": ("layers", r"NLAYERS=(\d+)"),
        "hidden_size": ("hidden", r"N?HIDDEN=(\d+)"),
        "heads": ("heads", r"NHEADS=(\d+)"),
        "ffn_size": ("ffn", None),
        "vocab_size": ("vocab", r"VOCAB_LENGTH=(\d+k?)\b"),
        "kv_heads": ("kv_heads", None),
    }
    stated: dict[str, int] = {}
    for ours, (theirs, pattern) in keys.items():
        if model.get(theirs) is not None:
            stated[ours] = count_at(model, theirs)
        elif pattern and (found := re.search(pattern, notes)):
            text = found.group(1)
            stated[ours] = int(text[:-1]) * 1000 if text.endswith("k") else int(text)
    return stated
