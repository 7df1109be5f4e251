"""What a policy of overlap is, and what it decides at each point where communication can be placed.

A stream is first in, first out, so a policy decides two things only: in which order operations stand on their streams,
and which operation waits for which. It knows no durations and no schedule. Each point below is a class whose methods
are those decisions; a policy is a subclass in a file of its own, with a name that a scenario can choose.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np

from op_graphs.columns import Bool, Int64
from op_graphs.graph import GemmShape
from op_graphs.lowering_context import LoweringContext
from op_graphs.plan import ParallelPlan
from op_graphs.program import Program, ProgramBuilder
from op_graphs.vocabulary import DType


class OverlapPolicy(ABC):
    """A named rule at one point."""

    name: ClassVar[str]
    beside: ClassVar[str]
    """What runs beside what, as the tables of the documentation say it."""
    follows: ClassVar[str]
    """Which framework or paper does so."""

    def refusal(self, parallel: ParallelPlan, schedule: str) -> str | None:
        """What a parallel plan, or the name of a schedule, lacks for this policy; None if nothing."""
        return None


# -- data parallelism ----------------------------------------------------------------------------------------------


class GradientPlacement(OverlapPolicy):
    """When gradients are reduced over the data-parallel ranks."""

    in_backward: ClassVar[bool]
    """Whether buckets are reduced inside the last backward, else all behind it."""

    @abstractmethod
    def behind_reduction(self, builder: ProgramBuilder, row: int) -> None:
        """What waits for the reduction of a bucket that was just emitted inside a backward."""


class ParameterPlacement(OverlapPolicy):
    """When updated parameters are gathered over the data-parallel ranks (ZeRO-1 and 2)."""

    in_forward: ClassVar[bool]
    """Whether buckets are gathered inside the first forward, else all behind the optimizer's step."""

    @abstractmethod
    def gather_after(self, readers_before: Sequence[int]) -> list[int]:
        """Rows of a first forward behind which the gather of a bucket is posted.

        ``readers_before`` are the first readers of the bucket before it, in the order of use; empty for the first.
        """


# -- pipeline parallelism ------------------------------------------------------------------------------------------


@dataclass
class RankTransfers:
    """Where the row of a pipeline rank stands, as far as its sends and receives are concerned. Rows of the graph."""

    compute_ends: list[int] = field(default_factory=list)
    """Last compute row of each action so far."""
    sends: list[int] = field(default_factory=list)
    """Sends since the last compute action."""
    receives: list[int] = field(default_factory=list)
    """Receives since then that the next compute action needs."""
    batch: list[int] = field(default_factory=list)
    """Transfers of the batch before."""


class TransferPlacement(OverlapPolicy):
    """When activations and gradients travel between pipeline stages."""

    host_waits: ClassVar[bool] = False
    """Whether the framework's host waits for the device after each batch of transfers, and launches late behind it."""

    def joins(self, schedule: str) -> bool:
        """Whether a schedule, by name, sends and receives nothing between a forward and the backward behind it."""
        return False

    @abstractmethod
    def behind(self, transfers: RankTransfers, *, is_send: bool, awaited: bool) -> Sequence[int]:
        """Rows behind which a transfer is posted, beside what makes the data it sends.

        ``awaited`` says of a receive that the next compute action needs it, or one that follows without a transfer
        between; others are posted early.
        """

    @abstractmethod
    def compute_waits(self, transfers: RankTransfers) -> Sequence[int]:
        """Rows that the next compute action waits for, beside the receives that it needs."""


# -- tensor parallelism --------------------------------------------------------------------------------------------


class GemmEmitter(Protocol):
    """Adds a GEMM to a program, as :meth:`ProgramBuilder.gemm` does; returns its last row."""

    def __call__(self, name: str, shape: GemmShape, *, scale_bytes: float = 0.0) -> int:
        """Add the GEMM."""


@dataclass(frozen=True)
class GatheredGemm:
    """A gather over the tensor-parallel ranks whose result the next GEMM reads."""

    row: int
    """From the start of this row the gathered tensor exists."""
    end: int
    """At the end of this row all of it is there."""
    gemm: GemmEmitter
    """Adds the GEMM that reads it."""


class ReducedGemm(Protocol):
    """A GEMM whose partial sums are reduced over the tensor-parallel ranks."""

    def gemm(self, name: str, shape: GemmShape, *, scale_bytes: float = 0.0) -> int:
        """Add the GEMM; returns its last row."""

    def finish(self) -> int:
        """Add what is left of the reduction behind it; returns the row at whose end the result is there."""


class TensorPlacement(OverlapPolicy):
    """How the collectives of tensor parallelism lie beside the GEMMs that they feed and that feed them."""

    beside_weights: ClassVar[bool] = False
    """Whether the second gather of an input and the reduction of its gradient run beside GEMMs that need neither."""
    in_pieces: ClassVar[bool] = False
    """Whether what is gathered or reduced exists in pieces only, which nothing beside its own GEMM can read."""
    reduces_sums_beside: ClassVar[bool] = True
    """Whether that holds of a gradient, too, that several products add up to."""
    gathers_again: ClassVar[bool] = True
    """Whether the backward gathers an input again; else the forward keeps it whole, unless operands are quantised."""

    @abstractmethod
    def gather(
        self, builder: ProgramBuilder, context: LoweringContext, name: str, size: float, dtype: DType
    ) -> GatheredGemm:
        """Gather ``size`` bytes along the sequence, for one GEMM that reads them next."""

    @abstractmethod
    def reduction(
        self, builder: ProgramBuilder, context: LoweringContext, name: str, size: float, *, scatter: bool
    ) -> ReducedGemm:
        """Reduce the ``size`` bytes that a forward GEMM makes; ``scatter`` along the sequence, or whole."""

    @abstractmethod
    def gradient_reduction(
        self,
        builder: ProgramBuilder,
        context: LoweringContext,
        name: str,
        size: float,
        *,
        scatter: bool,
        summed: bool = False,
    ) -> ReducedGemm:
        """The same for the gradient of an input, behind which its weight gradient follows.

        ``summed`` says that several products add up to it, so that what is reduced is not what a GEMM writes.
        """

    def cuts_gathers(self, context: LoweringContext) -> bool:
        """Whether a gather comes in pieces, with the recipe of ``context``."""
        return self.in_pieces

    def copies_parts(self, context: LoweringContext) -> bool:
        """Whether whole collectives along the sequence need a copy between the order of ranks and that of tokens."""
        return False

    def orders_for_weights(self, context: LoweringContext) -> bool:
        """Whether what was gathered for a GEMM needs a copy in the order of tokens for the weight gradient."""
        return False


# -- context parallelism -------------------------------------------------------------------------------------------


class RingPlacement(OverlapPolicy):
    """How the steps of ring attention lie beside its kernels."""

    @abstractmethod
    def behind(self, builder: ProgramBuilder, arriving: int) -> list[int]:
        """Rows behind which a step is posted; ``arriving`` is the step before it, -1 for the first."""

    @abstractmethod
    def behind_step(self, builder: ProgramBuilder, sending: int) -> None:
        """What waits for a step that was just posted, in front of the kernel on the keys that are here."""


# -- offload to the host -------------------------------------------------------------------------------------------


class CopyPlacement(OverlapPolicy):
    """When activations that wait in the memory of the host go there and come back (``training.offload``)."""

    announces: ClassVar[bool]
    """Whether a layer brings back what the one below reads, and the action before a backward what it reads first; else
    each part of a backward brings its own back when it begins."""

    @abstractmethod
    def behind_copy(self, builder: ProgramBuilder, copies: Sequence[int], in_flight: int | None) -> None:
        """What waits for a copy to the host that was just queued.

        ``copies`` are the rows of its kind so far, itself the last; ``in_flight`` how many the plan lets be under way.
        """


# -- pairs of a forward and a backward -----------------------------------------------------------------------------


class PairPlacement(OverlapPolicy):
    """The order of the operations of a forward and a backward that a schedule pairs."""

    @abstractmethod
    def order(
        self, first: Program, second: Program, pieces: Callable[[Program], list[Int64]]
    ) -> list[tuple[bool, Int64]]:
        """Runs of rows in the order in which they are to stand, each with whether it is of ``first``.

        ``first`` is the forward, ``second`` the backward; ``pieces`` cuts a program behind its exposed exchanges, as
        the placement of weight gradients orders the rows inside.
        """


class WeightPlacement(OverlapPolicy):
    """Where weight gradients stand in the backward of a pair."""

    @abstractmethod
    def can_wait(self, weights: Bool) -> Bool:
        """Of the rows of weight gradients and their reduction, those that run behind the start of the exchange."""


def nowhere(weights: Bool) -> Bool:
    """No row at all, as a mask."""
    none: Bool = np.zeros(len(weights), dtype=np.bool_)
    return none
