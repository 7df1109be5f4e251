"""Shared experts run again (Megatron-Core ``shared_experts``)."""

from __future__ import annotations

from ..model import ModelDescription
from .rule import Part, RecomputeRule


def _has(model: ModelDescription) -> bool:
    return model.moe is not None and model.moe.shared_ffn_size > 0


SHARED_EXPERTS = RecomputeRule(frozenset({Part.SHARED_EXPERTS}), _has)
