"""Projections from latents to what attention reads run again (Megatron-Core ``mla_up_proj``)."""

from __future__ import annotations

from ..model import ModelDescription
from .rule import Part, RecomputeRule


def _has(model: ModelDescription) -> bool:
    return model.latent_attention is not None


MLA_UP_PROJ = RecomputeRule(frozenset({Part.LATENT_UP_PROJECTIONS}), _has)
