"""Buckets of parameters for data-parallel communication, as Megatron-Core's DistributedDataParallel forms them.

Parameters are taken in reverse order of their use, so that a bucket is complete as early as possible in the
backward pass; a bucket closes when it holds at least ``max(40 M, 1 M * data-parallel size)`` elements. Only the
first chunk of the first pipeline stage is bucketed: on later stages the communication is not on the critical path
and one bucket a chunk is used (Megatron-Core ``distributed_data_parallel.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .parameters import ParameterTensor

_MINIMUM_BUCKET_ELEMENTS = 40_000_000
_ELEMENTS_PER_RANK = 1_000_000


@dataclass(frozen=True)
class Bucket:
    """Parameters that are reduced, and gathered, in one collective."""

    elements: int
    modules: tuple[str, ...]
    """Modules whose parameters lie in the bucket."""


def parameter_module(tensor: ParameterTensor) -> str:
    """The module a parameter belongs to; the norms of queries and keys run as one kernel and count as one."""
    return tensor.name.rsplit(".", 1)[0].replace("k_layernorm", "q_layernorm")


def form_buckets(
    tensors: Sequence[ParameterTensor], data_parallel_size: int, *, split: bool
) -> tuple[Bucket, ...]:
    """Buckets in the order in which backward completes them; one bucket for all where ``split`` is false."""
    limit = max(_MINIMUM_BUCKET_ELEMENTS, _ELEMENTS_PER_RANK * data_parallel_size)
    buckets: list[Bucket] = []
    elements, modules = 0, dict[str, None]()
    for tensor in reversed(tensors):
        elements += tensor.elements
        modules[parameter_module(tensor)] = None
        if split and elements >= limit:
            buckets.append(Bucket(elements, tuple(modules)))
            elements, modules = 0, {}
    if elements:
        buckets.append(Bucket(elements, tuple(modules)))
    return tuple(buckets)
