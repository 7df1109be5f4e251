"""What an optimizer sees of a rank: its share of every parameter, element types, and groups to talk to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..lowering_context import LoweringContext
from ..parameters import ParameterTensor
from ..program import ProgramBuilder
from ..vocabulary import Dimension, DType

FP32_BYTES = 4.0


@dataclass(frozen=True)
class Part:
    """A parameter and the number of ranks over which its update is spread evenly."""

    tensor: ParameterTensor
    ranks: int

    @property
    def elements(self) -> float:
        """Elements this rank updates."""
        return self.tensor.elements / self.ranks

    @property
    def dimension(self) -> Dimension:
        """Along which the update is spread."""
        return Dimension.EDP if self.tensor.is_expert else Dimension.DP


@dataclass(frozen=True)
class OptimizerShard:
    """A rank's share of the parameters."""

    context: LoweringContext
    parts: tuple[Part, ...]
    gradient_dtype: DType
    """Element type of the gradient the update reads."""
    group_of: Callable[[Dimension], int]
    """Process group over which parameters of a dimension are spread."""

    @property
    def elements(self) -> float:
        """Elements this rank updates."""
        return sum(part.elements for part in self.parts)

    @property
    def moment_bytes(self) -> float:
        """Bytes of an element of a moment."""
        return self.context.training.optimizer_dtypes.moments.itemsize

    def subset(self, parts: Sequence[Part]) -> OptimizerShard:
        """The same rank with only some of its parameters."""
        return OptimizerShard(self.context, tuple(parts), self.gradient_dtype, self.group_of)


class Optimizer(Protocol):
    """An optimizer. The fp32 weight an update is applied to (4 bytes, or two halves of it) is not one of its states."""

    chooses_moments: bool
    """Whether ``optimizer_dtypes.moments`` applies to it."""

    def state_bytes(self, shard: OptimizerShard) -> float:
        """Bytes of states on this rank, without the master weights."""
        ...

    def emit_step(self, builder: ProgramBuilder, shard: OptimizerShard) -> None:
        """Add the kernels and collectives of an update behind gradient norm and clipping."""
        ...
