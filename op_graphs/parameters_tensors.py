"""A parameter tensor of one rank, and how linears and norms are cut: column-parallel, row-parallel, or not at all."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from .model import ModelDescription

Role = Literal["weight", "bias", "norm", "embedding", "positions", "head"]


@dataclass(frozen=True)
class ParameterTensor:
    """One parameter tensor of one rank."""

    name: str
    """Module path and ``weight`` or ``bias``, with Megatron-Core's module names."""
    shape: tuple[int, ...]
    """Elements on this rank; a linear's weight is ``(outputs, inputs)``."""
    role: Role
    layer: int = -1
    """Global layer number; -1 outside the layers. Prediction heads continue the count of the layers; a vision
    encoder's layers have their own."""
    tp_axis: int | None = None
    """Axis cut over the tensor-parallel ranks (of an expert: the expert-tensor-parallel ranks); ``None`` if every
    rank of that group holds the whole tensor."""
    reduced_over_tp: bool = False
    """Whether each rank has only a part of the gradient, to be summed over the tensor-parallel group: replicated
    tensors that see a shard of the sequence (sequence parallelism) or of the heads (norms of queries and keys)."""
    tied: bool = False
    """Whether the tensor is the vocabulary matrix that embedding and head share, or a copy of the embedding for
    prediction heads; the gradients of its copies on several pipeline stages are summed."""
    is_expert: bool = False
    """Whether the tensor belongs to a routed expert: its gradient is summed over the expert-data-parallel group."""
    in_vision: bool = False
    """Whether the tensor belongs to the vision encoder of a vision-language model, or to its projector."""
    in_bf16: bool = False
    """Whether it belongs to a layer that a low-precision recipe leaves out."""
    is_quantized_head: bool = False
    """Whether it is the weight of an output head that a low-precision recipe quantises."""
    frozen: bool = False
    """Whether it is not trained: it has no gradient and no optimizer state."""

    @property
    def elements(self) -> int:
        """Number of elements on this rank."""
        return math.prod(self.shape)


def local_kv_heads(model: ModelDescription, tp: int) -> int:
    """Key-value heads on each rank: their share, or one where ranks outnumber them (the head is replicated).

    Megatron-Core does not replicate in that case: it cuts the QKV weight evenly all the same and gathers the
    projected heads. Replication is what most other frameworks do, and what is modelled here.
    """
    return max(model.kv_heads // tp, 1)


def elements_of(tensors: Iterable[ParameterTensor]) -> int:
    """Elements of several tensors together."""
    return sum(tensor.elements for tensor in tensors)


@dataclass(frozen=True)
class TensorCuts:
    """Tensors of linears and norms of one rank."""

    model: ModelDescription
    tp: int
    sequence_parallel: bool

    def norm(self, path: str, layer: int) -> list[ParameterTensor]:
        """A norm over the width."""
        parts = ("weight", "bias") if self.model.norm == "layernorm" else ("weight",)
        shape = (self.model.hidden_size,)
        return [
            ParameterTensor(f"{path}.{part}", shape, "norm", layer, reduced_over_tp=self.sequence_parallel)
            for part in parts
        ]

    def replicated(
        self, name: str, shape: tuple[int, ...], layer: int, role: Role = "weight"
    ) -> ParameterTensor:
        """A tensor each rank holds whole and applies to its shard of the sequence."""
        return ParameterTensor(name, shape, role, layer, reduced_over_tp=self.sequence_parallel)

    def column(self, path: str, layer: int, outputs: int, inputs: int, bias: bool) -> list[ParameterTensor]:
        """A linear cut along its outputs; ``outputs`` are those of the rank."""
        tensors = [ParameterTensor(f"{path}.weight", (outputs, inputs), "weight", layer, tp_axis=0)]
        if bias:
            tensors.append(ParameterTensor(f"{path}.bias", (outputs,), "bias", layer, tp_axis=0))
        return tensors

    def row(self, path: str, layer: int, outputs: int, inputs: int, bias: bool) -> list[ParameterTensor]:
        """A linear cut along its inputs; ``inputs`` are those of the rank. Its bias is whole on each."""
        tensors = [ParameterTensor(f"{path}.weight", (outputs, inputs), "weight", layer, tp_axis=1)]
        if bias:
            tensors.append(
                ParameterTensor(
                    f"{path}.bias", (outputs,), "bias", layer, reduced_over_tp=self.sequence_parallel
                )
            )
        return tensors

    def cut_vector(self, name: str, size: int, layer: int, role: Role = "bias") -> ParameterTensor:
        """A vector of which each rank holds ``size`` elements of its own."""
        return ParameterTensor(name, (size,), role, layer, tp_axis=0)
