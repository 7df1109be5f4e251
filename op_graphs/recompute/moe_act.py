"""The activation of experts runs again on the output of their first linear (Megatron-Core ``moe_act``)."""

from __future__ import annotations

from ..model import ModelDescription
from .rule import Part, RecomputeRule


def _has(model: ModelDescription) -> bool:
    return model.moe is not None


MOE_ACT = RecomputeRule(frozenset({Part.EXPERT_ACTIVATION}), _has)
