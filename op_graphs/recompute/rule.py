"""What a recompute rule is: which layers run again as wholes, or which parts of every layer.

A part is something whose lowering knows how to keep less in forward and how to make it again in backward
(``LoweringContext.recomputes``); a rule names some of them and says which models have them. A new rule of known parts
is a file and a line of the registry; a new part is one more entry here, and the place where it is lowered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ..model import ModelDescription
from ..plan import TrainingPlan

LayerRule = Callable[[range, int], list[range]]
"""Of the layers of a chunk and a number: groups of layers. Of a group only the input of its first layer is kept."""


class Part(Enum):
    """A part of a layer that can run again by itself; the value says in words what."""

    CORE_ATTENTION = "core attention, on queries, keys and values"
    NORMS = "norms, on their inputs"
    POSITIONS = "norm and rotation of queries and keys, and their repetition for all heads"
    LATENT_UP_PROJECTIONS = "projections from latents to what attention reads"
    RESIDUAL = "the addition behind attention, for which the output of the MLP is kept too"
    MLP = "the MLP"
    MLP_ACTIVATION = "the activation of the MLP, on the output of its first linear"
    EXPERTS = "the experts"
    EXPERT_ACTIVATION = "the activation of experts, on the output of their first linear"
    SHARED_EXPERTS = "shared experts, on the input of the layer's second half"
    SECOND_PRODUCTS = "every second matrix product of a layer"


INSIDE: dict[Part, frozenset[Part]] = {
    Part.MLP: frozenset({Part.MLP_ACTIVATION}),
    Part.EXPERTS: frozenset({Part.EXPERT_ACTIVATION, Part.SHARED_EXPERTS}),
}
"""Parts that run again with another as a whole."""


def _nothing_wrong(model: ModelDescription, training: TrainingPlan) -> str:
    return ""


@dataclass(frozen=True)
class RecomputeRule:
    """Parts of every layer that run again in its backward pass."""

    parts: frozenset[Part]
    needs: Callable[[ModelDescription], bool]
    """Whether a model has what the rule is about."""
    problem: Callable[[ModelDescription, TrainingPlan], str] = _nothing_wrong
    """What in a model or plan that has it is not known, and what to do; '' for nothing."""
