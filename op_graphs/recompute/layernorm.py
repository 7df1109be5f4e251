"""Both norms run again on their inputs, their outputs are dropped (Megatron-Core ``layernorm``)."""

from __future__ import annotations

from ..model import ModelDescription
from .rule import Part, RecomputeRule


def _has(model: ModelDescription) -> bool:
    return True


LAYERNORM = RecomputeRule(frozenset({Part.NORMS}), _has)
