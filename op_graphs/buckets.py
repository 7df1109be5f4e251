"""Buckets of parameters for data-parallel communication, as Megatron-Core's DistributedDataParallel forms them.

Parameters are taken in reverse order of their use, so that a bucket is complete as early as possible in the
backward pass; a bucket closes when it holds at least ``max(40 M, 1 M * data-parallel size)`` elements. Only the
first chunk of the first pipeline stage is bucketed: on later stages the communication is not on the critical path
and one bucket a chunk is used (Megatron-Core ``distributed_data_parallel.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .parameters import ParameterTensor, elements_of
from .plan import ParallelPlan
from .precision import quantized_elements
from .vocabulary import Dimension

_MINIMUM_BUCKET_ELEMENTS = 40_000_000
_ELEMENTS_PER_RANK = 1_000_000


@dataclass(frozen=True)
class Bucket:
    """Parameters that are reduced, and gathered, in one collective."""

    dimension: Dimension
    """``DP``, or ``EDP`` for experts."""
    elements: int
    modules: tuple[str, ...]
    """Modules whose parameters lie in the bucket."""
    quantized_elements: int = 0
    """Elements of weights that a low-precision recipe quantises."""
    unit: str = ""
    """Layer number, ``embedding``, ``head`` or ``root``, where a bucket is one unit of a sharded model."""
    frozen_elements: int = 0
    """Elements without a gradient, which are gathered but never reduced."""
    frozen_modules: tuple[str, ...] = ()
    gradient_elements: tuple[tuple[str, int], ...] = ()
    """Of a unit, the trained modules and the elements of each, in the order in which backward completes them."""

    @property
    def trained_elements(self) -> int:
        """Elements whose gradients are reduced."""
        return self.elements - self.frozen_elements

    @property
    def trained_modules(self) -> tuple[str, ...]:
        """Modules whose gradients are reduced."""
        return tuple(module for module in self.modules if module not in self.frozen_modules)


def parameter_module(tensor: ParameterTensor) -> str:
    """The module a parameter belongs to; the norms of queries and keys run as one kernel and count as one."""
    return tensor.name.rsplit(".", 1)[0].replace("k_layernorm", "q_layernorm")


def form_buckets(
    tensors: Sequence[ParameterTensor], parallel: ParallelPlan, *, split: bool
) -> tuple[Bucket, ...]:
    """Buckets of dense parameters, then of experts, each in the order in which backward completes them.

    Experts are replicated over fewer ranks and have buckets of their own. Without ``split`` there is one for each.
    """
    dense = [tensor for tensor in tensors if not tensor.is_expert]
    experts = [tensor for tensor in tensors if tensor.is_expert]
    return (
        *_form(dense, Dimension.DP, parallel.data_parallel_size, split),
        *_form(experts, Dimension.EDP, parallel.expert_data_parallel_size, split),
    )


def _form(
    tensors: Sequence[ParameterTensor], dimension: Dimension, group_size: int, split: bool
) -> list[Bucket]:
    limit = max(_MINIMUM_BUCKET_ELEMENTS, _ELEMENTS_PER_RANK * group_size)
    buckets: list[Bucket] = []
    elements, quantized, modules = 0, 0, dict[str, None]()
    for tensor in reversed(tensors):
        elements += tensor.elements
        quantized += quantized_elements([tensor])
        modules[parameter_module(tensor)] = None
        if split and elements >= limit:
            buckets.append(Bucket(dimension, elements, tuple(modules), quantized))
            elements, quantized, modules = 0, 0, {}
    if elements:
        buckets.append(Bucket(dimension, elements, tuple(modules), quantized))
    return buckets


ROOT = "root"
"""The unit that both ends of the model form together."""
ENDS = ("embedding", "head")
"""Units of the ends of a model by themselves."""


def form_units(tensors: Sequence[ParameterTensor], *, root: bool = False) -> tuple[Bucket, ...]:
    """Buckets of one layer each, in the order in which backward completes them; experts of a layer are their own.

    Parameters outside of layers form a unit with others of the same end of the model, or with ``root`` of both.
    """
    elements: dict[tuple[str, Dimension], int] = {}
    quantized: dict[tuple[str, Dimension], int] = {}
    modules: dict[tuple[str, Dimension], dict[str, None]] = {}
    frozen: dict[tuple[str, Dimension], list[ParameterTensor]] = {}
    learned: dict[tuple[str, Dimension], dict[str, int]] = {}
    for tensor in reversed(tensors):
        unit = unit_of(tensor)
        unit = ROOT if root and unit in ENDS else unit
        key = (unit, Dimension.EDP if tensor.is_expert else Dimension.DP)
        if not tensor.frozen:
            of_unit = learned.setdefault(key, {})
            module = parameter_module(tensor)
            of_unit[module] = of_unit.get(module, 0) + tensor.elements
        elements[key] = elements.get(key, 0) + tensor.elements
        quantized[key] = quantized.get(key, 0) + quantized_elements([tensor])
        modules.setdefault(key, {})[parameter_module(tensor)] = None
        frozen.setdefault(key, []).extend([tensor] if tensor.frozen else [])
    return tuple(
        Bucket(
            dimension,
            count,
            tuple(modules[unit, dimension]),
            quantized[unit, dimension],
            unit,
            elements_of(frozen[unit, dimension]),
            tuple(dict.fromkeys(map(parameter_module, frozen[unit, dimension]))),
            tuple(learned.get((unit, dimension), {}).items()),
        )
        for (unit, dimension), count in elements.items()
    )


def unit_of(tensor: ParameterTensor) -> str:
    """The unit a parameter is sharded in: its layer, or its end of the model, or of the vision encoder."""
    if tensor.in_vision:
        if tensor.layer >= 0:
            return f"vision.{tensor.layer}"
        return "vision_embedding" if ".embedding." in tensor.name else "vision_projection"
    if tensor.layer >= 0:
        return str(tensor.layer)
    return "head" if tensor.name.startswith(("decoder.", "output_layer")) else "embedding"
