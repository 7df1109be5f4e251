"""Every policy of overlap by the point it decides and its name.

Adding one is a file with a subclass of its point's class (``op_graphs.overlap.policy``) and an entry in
:data:`OVERLAP_POINTS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from op_graphs.plan import OverlapPlan

from .copies_ahead import CopiesAhead
from .copies_in_place import CopiesInPlace
from .copies_on_demand import CopiesOnDemand
from .gradient_buckets import GradientBuckets
from .gradients_after_backward import GradientsAfterBackward
from .pairs_in_sequence import PairsInSequence
from .pairs_take_turns import PairsTakeTurns
from .parameter_buckets import ParameterBuckets
from .parameter_next_bucket import ParameterNextBucket
from .parameters_after_step import ParametersAfterStep
from .policy import (
    CopyPlacement,
    GradientPlacement,
    OverlapPolicy,
    PairPlacement,
    ParameterPlacement,
    RingPlacement,
    TensorPlacement,
    TransferPlacement,
    WeightPlacement,
)
from .ring_in_place import RingInPlace
from .ring_under_attention import RingUnderAttention
from .tensor_async import TensorAsync
from .tensor_beside_weights import TensorBesideWeights
from .tensor_gathered_once import TensorGatheredOnce
from .tensor_in_place import TensorInPlace
from .tensor_userbuffers import TensorUserbuffers
from .transfers_ahead import TransfersAhead
from .transfers_batched import TransfersBatched
from .transfers_in_place import TransfersInPlace
from .weights_behind_exchange import WeightsBehindExchange
from .weights_in_place import WeightsInPlace

P = TypeVar("P", bound=OverlapPolicy)


@dataclass(frozen=True)
class OverlapPoint(Generic[P]):
    """A key of ``overlap`` in a scenario, and the policies it can name."""

    key: str
    decides: str
    policies: tuple[P, ...]
    """The first is what ``true`` means, the second what ``false`` means."""

    def names(self) -> tuple[str, ...]:
        """Names of the policies."""
        return tuple(policy.name for policy in self.policies)

    def chosen(self, value: bool | str) -> P:
        """The policy that a scenario's value stands for.

        Raises:
            KeyError: if no policy has that name.
        """
        if isinstance(value, bool):
            return self.policies[0 if value else 1]
        return {policy.name: policy for policy in self.policies}[value]


GRADIENTS = OverlapPoint[GradientPlacement](
    "grad_reduce",
    "reduction of gradients over data-parallel ranks",
    (GradientBuckets(), GradientsAfterBackward()),
)
PARAMETERS = OverlapPoint[ParameterPlacement](
    "param_gather",
    "gather of updated parameters over data-parallel ranks",
    (ParameterBuckets(), ParametersAfterStep(), ParameterNextBucket()),
)
TRANSFERS = OverlapPoint[TransferPlacement](
    "p2p", "transfers between stages", (TransfersAhead(), TransfersInPlace(), TransfersBatched())
)
TENSOR = OverlapPoint[TensorPlacement](
    "tp",
    "collectives of tensor parallelism",
    (TensorBesideWeights(), TensorInPlace(), TensorGatheredOnce(), TensorUserbuffers(), TensorAsync()),
)
RING = OverlapPoint[RingPlacement]("cp", "steps of ring attention", (RingUnderAttention(), RingInPlace()))
COPIES = OverlapPoint[CopyPlacement](
    "offload",
    "copies of activations to the host and back",
    (CopiesAhead(), CopiesInPlace(), CopiesOnDemand()),
)
PAIRS = OverlapPoint[PairPlacement](
    "ep", "exchanges of experts in pairs of a forward and a backward", (PairsTakeTurns(), PairsInSequence())
)
WEIGHTS = OverlapPoint[WeightPlacement](
    "wgrad", "weight gradients in those pairs", (WeightsBehindExchange(), WeightsInPlace())
)

OVERLAP_POINTS: dict[str, OverlapPoint[OverlapPolicy]] = {
    point.key: OverlapPoint[OverlapPolicy](point.key, point.decides, point.policies)
    for point in (GRADIENTS, PARAMETERS, TRANSFERS, TENSOR, RING, COPIES, PAIRS, WEIGHTS)
}
"""All points by their key in ``overlap``."""


def describe_policies() -> list[dict[str, Any]]:
    """Every policy as plain data, in the order of the points."""
    default = OverlapPlan()
    return [
        {
            "point": point.key,
            "decides": point.decides,
            "name": policy.name,
            "means": ["true"] * (number == 0) + ["false"] * (number == 1),
            "default": point.chosen(getattr(default, point.key)) is policy,
            "beside": policy.beside,
            "follows": policy.follows,
        }
        for point in OVERLAP_POINTS.values()
        for number, policy in enumerate(point.policies)
    ]
