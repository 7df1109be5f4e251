"""Recompute: which activations are dropped in forward and made again in backward. One file a rule."""

from .registry import (
    KEEP_RULES,
    LAYER_RULES,
    MODULE_RULES,
    checkpointed_parts,
    recomputed_layers,
    recomputed_parts,
)
from .rule import INSIDE, LayerRule, Part, RecomputeRule

__all__ = [
    "INSIDE",
    "KEEP_RULES",
    "LAYER_RULES",
    "MODULE_RULES",
    "LayerRule",
    "Part",
    "RecomputeRule",
    "checkpointed_parts",
    "recomputed_layers",
    "recomputed_parts",
]
