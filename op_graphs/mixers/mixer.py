"""What a mixer is: the part of a layer in which tokens meet, between its norm and the residual addition.

A mixer says everything of itself: its tensors on a rank, its FLOPs, which degrees fit it, and its forward and backward
programs. The layer around it (``op_graphs.lower_layer``) has the norm and the residual.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..flops_conventions import FlopsConvention
from ..linear import Linear
from ..lower_linear import row_parallel_backward
from ..lowering_context import LoweringContext
from ..model import ModelDescription
from ..parameters_tensors import ParameterTensor, TensorCuts
from ..program import ProgramBuilder, Tensor


@dataclass(frozen=True)
class BlockGradient:
    """The gradient that reaches a mixer: of its output, and of the residual stream beside it."""

    branch: Tensor
    residual: Tensor

    @property
    def is_shared(self) -> bool:
        """Whether both are one tensor, which the layer still needs."""
        return self.branch == self.residual


def output_projection_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    linear: Linear,
    output: Tensor,
    gradient: BlockGradient,
    *,
    reads_output_again: bool = False,
) -> Tensor:
    """Backward of a mixer's last linear, whose input is ``output``; returns the gradient of that.

    Releases ``output`` unless ``reads_output_again``, and the gradient unless the layer still needs it.
    """
    read = ((output, reads_output_again), (gradient.branch, gradient.is_shared))
    return row_parallel_backward(
        builder,
        context,
        linear,
        gradient.branch,
        consumed=tuple(tensor for tensor, again in read if not again),
        borrowed=tuple(tensor for tensor, again in read if again),
    )


class Mixer(ABC):
    """Rules of one kind of mixer. ``Any`` stands for what it keeps, which only it reads."""

    module: str
    """Name of its module in a layer, as Megatron-Core has it."""
    norm: str
    """Name of the norm in front of it."""
    residual: str
    """Name of the residual addition behind it."""
    output_linear: str
    """Name of its last linear, whose bias the residual addition adds."""
    recomputes_norm: bool
    """Whether recompute of layer norms reaches its norm."""

    @abstractmethod
    def forward(
        self,
        builder: ProgramBuilder,
        context: LoweringContext,
        layer: int,
        normalized: Tensor,
        *,
        keep_input: bool,
    ) -> tuple[Any, Tensor]:
        """Emit its forward pass; returns what it keeps, and its output, which the caller releases.

        ``normalized`` is released behind its last reader unless ``keep_input``.
        """

    @abstractmethod
    def backward(
        self,
        builder: ProgramBuilder,
        context: LoweringContext,
        layer: int,
        saved: Any,  # noqa: ANN401
        gradient: BlockGradient,
        normalized: Callable[[], Tensor],
    ) -> Tensor:
        """Emit its backward pass; returns the gradient of its input.

        ``normalized`` gives the norm's output, which it may compute again: call it where it is needed first.
        """

    @abstractmethod
    def parameters(self, cuts: TensorCuts, path: str, layer: int) -> list[ParameterTensor]:
        """Its tensors on a rank, in forward order; ``path`` is its module's."""

    @abstractmethod
    def misfits(self, model: ModelDescription, tp: int) -> list[str]:
        """Why it cannot be cut over ``tp`` ranks; empty if it can."""

    @abstractmethod
    def most_ranks(self, model: ModelDescription) -> int:
        """The largest tensor-parallel degree that can fit it."""

    def context_parallel_problem(self, model: ModelDescription, tp: int, cp: int) -> str:
        """Why ``cp`` ranks cannot share its sequences where ``tp`` cut it, with the nearest degree; '' if they can.

        What depends on the algorithm of attention is checked beside it.
        """
        del model, tp, cp
        return ""

    @abstractmethod
    def matrix_elements(self, model: ModelDescription, convention: FlopsConvention) -> int:
        """Elements of its matrices: multiply-adds of its linears for a token."""

    @abstractmethod
    def mixing_flops(
        self, model: ModelDescription, layer: int, seq_len: int, convention: FlopsConvention, *, causal: bool
    ) -> float:
        """Forward FLOPs of its products of tokens with tokens, or with a state, for one token of a sequence."""

    def widths(self, model: ModelDescription, tp: int) -> dict[str, int]:
        """Widths of its linears on a rank, by name, that a low-precision recipe wants to be round."""
        del model, tp
        return {}
