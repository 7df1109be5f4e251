"""Recompute rules by name; adding one is a file here and a line in one of these tables (``docs/extending.md``)."""

from __future__ import annotations

from ..plan import Recompute
from .block import block
from .core_attn import CORE_ATTN
from .every import every
from .every_second_product import EVERY_SECOND_PRODUCT
from .layernorm import LAYERNORM
from .mla_up_proj import MLA_UP_PROJ
from .mlp import MLP
from .moe import MOE
from .moe_act import MOE_ACT
from .products import PRODUCTS
from .rule import LayerRule, Part, RecomputeRule
from .shared_experts import SHARED_EXPERTS
from .uniform import uniform

LAYER_RULES: dict[str, LayerRule] = {
    "uniform": uniform,
    "block": block,
    "every": every,
}
"""Whole layers; ``Recompute.method`` is one of them, ``Recompute.layers`` their number."""

MODULE_RULES: dict[str, RecomputeRule] = {
    "core_attn": CORE_ATTN,
    "layernorm": LAYERNORM,
    "mlp": MLP,
    "moe": MOE,
    "moe_act": MOE_ACT,
    "mla_up_proj": MLA_UP_PROJ,
    "shared_experts": SHARED_EXPERTS,
}
"""Modules of every layer, by the names of ``Recompute.modules``."""

KEEP_RULES: dict[str, RecomputeRule] = {
    "products": PRODUCTS,
    "every-second-product": EVERY_SECOND_PRODUCT,
}
"""Policies by operators, by the name of what they keep: ``Recompute.keep``."""


def recomputed_layers(recompute: Recompute, layers: range) -> list[range]:
    """Groups of a chunk's layers that are recomputed together, in layer order; the others keep their activations."""
    return LAYER_RULES[recompute.method](layers, recompute.layers) if recompute.mode == "full" else []


def checkpointed_parts(recompute: Recompute) -> frozenset[Part]:
    """Parts of every layer that are checkpoints of their own: those of modules, not of policies by operators."""
    return frozenset(part for name in recompute.modules for part in MODULE_RULES[name].parts)


def recomputed_parts(recompute: Recompute) -> frozenset[Part]:
    """Parts of every layer that run again."""
    rules = [MODULE_RULES[name] for name in recompute.modules]
    if recompute.keep:
        rules.append(KEEP_RULES[recompute.keep])
    return frozenset(part for rule in rules for part in rule.parts)
