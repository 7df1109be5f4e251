"""As ``products``, and every second matrix product runs again too (torchtitan ``selective_ac_option = "op"``).

Counted from the first of a layer these are keys, the output projection, and the half of a gated MLP's first linear that
is not activated.
"""

from __future__ import annotations

from ..model import ModelDescription
from ..plan import TrainingPlan
from .products import BETWEEN_PRODUCTS, unknown_between_products
from .rule import Part, RecomputeRule


def _has(model: ModelDescription) -> bool:
    return True


def _problem(model: ModelDescription, training: TrainingPlan) -> str:
    if problem := unknown_between_products(model, training):
        return problem
    if model.moe is None and not model.layer_pattern and model.mixer_pattern == "*":
        return ""
    other = "experts" if model.moe is not None else "layers of other parts"
    return f"every-second-product counts the products of dense layers, {model.name} has {other}; use products"


EVERY_SECOND_PRODUCT = RecomputeRule(BETWEEN_PRODUCTS | {Part.SECOND_PRODUCTS}, _has, _problem)
