"""What a row recomputes, read from the words of its table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .row import RowSkippedError, text_at
from .source_settings import SourceSettings

_MODULES = {
    "core_attn": "core_attn",
    "layernorm": "layernorm",
    "norm": "layernorm",
    "mlp": "mlp",
    "moe": "moe",
    "act": "moe_act",
    "moe_act": "moe_act",
    "mla_up_proj": "mla_up_proj",
    "shared_expert": "shared_experts",
    "shared_experts": "shared_experts",
}
"""Modules that are recomputed, by the words of tables."""
_TORCHTITAN: dict[str, dict[str, Any]] = {
    "full ac": {"every": 1},
    "selective layer ac": {"every": 2},
    "selective op ac": {"keep": "every-second-product"},
    "selective ac (op)": {"keep": "every-second-product"},
    "op sac": {"keep": "every-second-product"},
    "sac": {"keep": "every-second-product"},
    "per-op sac": {"keep": "every-second-product"},
}
"""torchtitan's kinds of activation checkpointing; its configurations recompute every second layer. Its policy by
operators keeps every second matrix product (``_save_list`` of torchtitan/parallelisms/parallelize_llama.py)."""


def recompute_of(row: Mapping[str, Any], settings: SourceSettings) -> str | dict[str, Any]:
    """``training.recompute`` of a row; raise RowSkippedError where it is not given, or not expressed.

    Where nothing else runs again, norms may still do, as a framework has it without being asked.
    """
    stated = _stated(row, settings)
    return {"modules": ["layernorm"]} if settings.norms_run_again and stated == "none" else stated


def _stated(row: Mapping[str, Any], settings: SourceSettings) -> str | dict[str, Any]:
    text = text_at(row, "recompute").lower()
    text = settings.recompute_names.get(text, text)
    if text in _TORCHTITAN:
        return _TORCHTITAN[text]
    if "selective" in text or text.partition(",")[0] in _MODULES:
        if re.fullmatch(r"(recompute-activations \()?selective\)?( \(attention core\)| core_attn)?", text):
            return {"modules": ["core_attn"]}
        words = re.split(r"[,+\s]+", text.removeprefix("selective").replace("[]", "").strip(" []"))
        words = [word for word in words if word]
        unknown = [word for word in words if word not in _MODULES]
        if unknown:
            raise RowSkippedError(f"recompute {row['recompute']!r} is not expressed")
        return {"modules": [_MODULES[word] for word in words]} if words else "none"
    if text.startswith("full") or text in ("yes", "on", "activation checkpointing true"):
        return "full"
    if text.startswith(("none", "no ac")) or text in ("no", "off", "activation checkpointing false"):
        return "none"
    if (text and text != "not stated") or settings.recompute is None:
        if settings.recipes and not text:
            return "none"
        raise RowSkippedError(f"recompute is given as {text or 'nothing'!r}")
    return settings.recompute
