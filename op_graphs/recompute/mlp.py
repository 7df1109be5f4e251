"""The dense MLP runs again whole (Megatron-Core ``mlp``)."""

from __future__ import annotations

from ..model import ModelDescription
from .rule import Part, RecomputeRule


def _has(model: ModelDescription) -> bool:
    return any(model.layer_ffn_size(layer) for layer in model.layer_numbers)


MLP = RecomputeRule(frozenset({Part.MLP}), _has)
