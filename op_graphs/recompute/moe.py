"""The experts run again whole, router and exchanges included (Megatron-Core ``moe``)."""

from __future__ import annotations

from ..model import ModelDescription
from .rule import Part, RecomputeRule


def _has(model: ModelDescription) -> bool:
    return model.moe is not None


MOE = RecomputeRule(frozenset({Part.EXPERTS}), _has)
