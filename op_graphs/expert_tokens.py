"""How many tokens an expert gets: what its router sends, what is dropped beyond its capacity, what is padded.

Counts are expectations, so they may lie between whole numbers; they hold for the tokens of one rank, or of all ranks
that send to an expert. Sources: Megatron-Core ``transformer/moe/moe_utils.py`` (``get_capacity``,
``apply_router_token_dropping``, ``pad_routing_map``) and Transformer Engine ``pytorch/module/fp8_padding.py``.
"""

from __future__ import annotations

import math
from typing import overload

import numpy as np

from .model import MixtureOfExperts
from .plan import LibraryPlan, ParallelPlan, TrainingPlan
from .precision import precision_recipe

Counts = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

_DISPATCHED_MULTIPLE = 128
"""Rows of an expert in a grouped product of what was quantised in blocks before it was sent (DeepGEMM)."""


def routing_tokens(parallel: ParallelPlan, training: TrainingPlan) -> int:
    """Tokens of a microbatch that one rank routes: its part of the sequence, cut by sequence parallelism too."""
    tokens = training.micro_batch_size * training.seq_len // parallel.cp
    return tokens // parallel.tp if parallel.sp else tokens


def capacity(moe: MixtureOfExperts, tokens: int) -> int | None:
    """Tokens that an expert takes of the ``tokens`` of a rank; None where nothing is dropped.

    ``ceil(tokens * top_k / experts * capacity_factor)``, and not more than there are.
    """
    if moe.capacity_factor is None:
        return None
    return min(tokens, math.ceil(tokens * moe.top_k / moe.experts * moe.capacity_factor))


def token_multiple(training: TrainingPlan) -> int:
    """What the rows of an expert must be a multiple of, for its products; 1 where they are not quantised."""
    recipe = precision_recipe(training.recipe)
    if recipe is None:
        return 1
    return _DISPATCHED_MULTIPLE if training.fp8_dispatch else recipe.token_multiple


def brings_once(parallel: ParallelPlan) -> bool:
    """Whether tokens reach a rank once and are copied for its experts there, where a router's map is not known."""
    return parallel.ep_dispatcher in ("deepep", "hybridep") and parallel.ep > 1


def pads_on_arrival(parallel: ParallelPlan, training: TrainingPlan, libraries: LibraryPlan) -> bool:
    """Whether the kernel that copies arrived tokens for each expert pads them, so that the experts need not.

    Transformer Engine's does (``moe_permute_and_pad_with_probs``), and so does a router's padding, which is of the map
    of what arrived (Megatron-Core ``_DeepepManager``).
    """
    return brings_once(parallel) and (
        libraries.permute_fusion or training.router_padding or training.fp8_dispatch
    )


def source_multiple(parallel: ParallelPlan, training: TrainingPlan) -> int:
    """What the tokens that one rank routes to one expert are padded to a multiple of; 1 for no padding."""
    return token_multiple(training) if training.router_padding and not brings_once(parallel) else 1


@overload
def routed(moe: MixtureOfExperts, tokens: int, demand: float, multiple: int = 1) -> float: ...
@overload
def routed(moe: MixtureOfExperts, tokens: int, demand: Counts, multiple: int = 1) -> Counts: ...
def routed(moe: MixtureOfExperts, tokens: int, demand: float | Counts, multiple: int = 1) -> float | Counts:
    """Tokens that a rank sends to experts which ``demand`` of its ``tokens`` chose: after dropping and padding."""
    limit = capacity(moe, tokens)
    counts: float | Counts = demand
    if limit is not None:
        kept = np.full_like(demand, limit) if moe.pad_to_capacity else np.minimum(demand, limit)
        counts = kept if isinstance(demand, np.ndarray) else float(kept)
    return padded(counts, multiple)


@overload
def padded(counts: float, multiple: int) -> float: ...
@overload
def padded(counts: Counts, multiple: int) -> Counts: ...
def padded(counts: float | Counts, multiple: int) -> float | Counts:
    """Counts padded to a multiple; one between whole numbers is a mean of the next two, each padded."""
    if multiple == 1:
        return counts
    below = np.floor(counts)
    part = counts - below

    def up(whole: Counts) -> Counts:
        return np.ceil(whole / multiple) * multiple

    found = (1 - part) * up(below) + part * up(below + 1)
    return found if isinstance(counts, np.ndarray) else float(found)
