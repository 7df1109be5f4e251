"""Optimizer states of which every tensor lies whole on one rank, as Colossal-AI's and InternEvo's ZeRO 1 have it.

Tensors go one after the other, the largest first, to the rank that has the least so far
(``hybrid_zero_optim.py``, ``_partition_param_list``). So a rank may hold more than its part, at the most by the largest
tensor: over many ranks the embedding decides how long the update takes, and some ranks hold nothing. Gradients are
all-reduced, because hooks reduce them into buckets that know no owner; behind the update each owner broadcasts what is
its own, one owner after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from .parameters import ParameterTensor, elements_of


def tensors_by_rank(tensors: Sequence[ParameterTensor], ranks: int) -> list[list[ParameterTensor]]:
    """What each of so many ranks owns, the fullest rank first; ranks that own nothing are left out."""
    owned: list[list[ParameterTensor]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for tensor in sorted(tensors, key=lambda tensor: -tensor.elements):
        rank = loads.index(min(loads))
        owned[rank].append(tensor)
        loads[rank] += tensor.elements
    return sorted(filter(None, owned), key=lambda own: -elements_of(own))
