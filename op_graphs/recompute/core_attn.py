"""Core attention runs again on kept queries, keys and values (Korthikanti et al. 2022; Megatron-Core ``core_attn``)."""

from __future__ import annotations

from ..model import ModelDescription
from .rule import Part, RecomputeRule


def _has(model: ModelDescription) -> bool:
    return any(model.mixer(layer) == "attention" for layer in model.layer_numbers)


CORE_ATTN = RecomputeRule(frozenset({Part.CORE_ATTENTION}), _has)
