"""Outputs of matrix products and of attention are kept, what lies between runs again (torchtitan, by operators)."""

from __future__ import annotations

from ..model import ModelDescription
from ..plan import TrainingPlan
from .rule import Part, RecomputeRule

BETWEEN_PRODUCTS = frozenset(
    {Part.NORMS, Part.POSITIONS, Part.RESIDUAL, Part.MLP_ACTIVATION, Part.EXPERT_ACTIVATION}
)


def _has(model: ModelDescription) -> bool:
    return True


def unknown_between_products(model: ModelDescription, training: TrainingPlan) -> str:
    """What of a model is not known by operators."""
    if model.layer_pattern or model.state_space or model.delta_net or model.attention_output_gate:
        return f"knows layers of attention and an MLP, {model.name} has others; use modules"
    if model.latent_attention is not None:
        return f"does not know the latent attention of {model.name}; use modules"
    if training.fp8_storage:
        return "does not go with fp8_storage; use modules"
    return ""


PRODUCTS = RecomputeRule(BETWEEN_PRODUCTS, _has, unknown_between_products)
