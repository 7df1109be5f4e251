"""Interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473, section 2.2.2), in the order Megatron-LM runs it.

A rank holds v model chunks: chunk c of rank r is stage c * p + r. Microbatches pass in groups: a rank runs a whole
group through chunk 0, then through chunk 1, and so on, before it takes the next group; backwards visit the chunks
in the opposite order. The group is p microbatches by default (``--microbatch-group-size-per-virtual-pipeline-stage``
changes it). With equal stages, free communication and groups of p the bubble is (p - 1) / (v * m + p - 1) of the step.

Follows ``forward_backward_pipelining_with_interleaving`` and ``get_schedule_table`` of Megatron-LM's
``core/pipeline_parallel/schedules.py``. Fewer microbatches than ranks pass as one group, as in PyTorch's
``ScheduleInterleaved1F1B``; Megatron-LM refuses them.
"""

from __future__ import annotations

from collections.abc import Sequence

from .actions import Schedule, ScheduleError, backward, forward
from .one_forward_one_backward import alternate


def interleaved_one_forward_one_backward(
    pp: int, chunks: int, microbatches: int, group_size: int | None = None
) -> Schedule:
    """The interleaved 1F1B schedule of ``pp`` ranks with ``chunks`` stages each.

    Raises:
        ScheduleError: if the groups cannot be formed (:func:`microbatch_groups`).
    """
    groups = microbatch_groups("interleaved-1f1b", pp, microbatches, group_size)
    order = chunk_order(chunks, groups)
    rows = tuple(
        alternate(
            [forward(chunk * pp + rank, microbatch) for chunk, microbatch in order],
            [backward((chunks - 1 - chunk) * pp + rank, microbatch) for chunk, microbatch in order],
            # All chunks but the last of the first group, and two more for each rank behind this one.
            warm_up=(pp - rank - 1) * 2 + (chunks - 1) * len(groups[0]),
        )
        for rank in range(pp)
    )
    return Schedule("interleaved-1f1b", pp, pp * chunks, microbatches, rows)


def microbatch_groups(name: str, pp: int, microbatches: int, group_size: int | None) -> list[range]:
    """The microbatches in groups of ``group_size`` (``pp`` if not given), the last one perhaps smaller.

    Raises:
        ScheduleError: if a group is larger than ``microbatches``, or one of several is smaller than ``pp``: the last
            rank could not hand a microbatch on to the next chunk of the first rank before that rank needs it.
    """
    group = min(pp, microbatches) if group_size is None else group_size
    if not min(pp, microbatches) <= group <= microbatches:
        raise ScheduleError(
            f"{name}: a group of {group} microbatches (group_size was given) must lie between "
            f"{min(pp, microbatches)} and {microbatches}: at least pp={pp} if there are so many, and at most all "
            f"microbatches={microbatches}"
        )
    last = microbatches % group
    if 0 < last < pp:
        raise ScheduleError(
            f"{name}: {microbatches} microbatches in groups of {group} leave a last group of {last}, and a "
            f"group needs at least pp={pp}; make the microbatches a multiple of {group}, as "
            f"{microbatches - last} or {microbatches - last + group}, or choose another group_size"
        )
    return [range(begin, min(begin + group, microbatches)) for begin in range(0, microbatches, group)]


def chunk_order(chunks: int, groups: Sequence[range]) -> list[tuple[int, int]]:
    """(chunk, microbatch) of every forward of a rank; the same on every rank."""
    return [(chunk, microbatch) for group in groups for chunk in range(chunks) for microbatch in group]
