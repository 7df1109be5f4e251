"""Interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473, section 2.2.2), in the order Megatron-LM runs it.

A rank holds v model chunks: chunk c of rank r is stage c * p + r. Microbatches pass in groups: a rank runs a whole
group through chunk 0, then through chunk 1, and so on, before it takes the next group; backwards visit the chunks
in the opposite order. The group is p microbatches by default (``--microbatch-group-size-per-virtual-pipeline-stage``
changes it). With equal stages, free communication and groups of p the bubble is (p - 1) / (v * m + p - 1) of the step.

Follows ``forward_backward_pipelining_with_interleaving`` and ``get_schedule_table`` of Megatron-LM's
``core/pipeline_parallel/schedules.py``.
"""

from __future__ import annotations

from .actions import Action, Schedule, ScheduleError, backward, forward


def interleaved_one_forward_one_backward(
    pp: int, chunks: int, microbatches: int, group_size: int | None = None
) -> Schedule:
    """The interleaved 1F1B schedule of ``pp`` ranks with ``chunks`` stages each.

    Raises:
        ScheduleError: if a group is smaller than ``pp`` or larger than ``microbatches``, or the last, smaller group
            has fewer than ``pp`` microbatches, as Megatron-LM refuses them: the last rank could not hand a
            microbatch on to the next chunk of the first rank before that rank needs it.
    """
    group = pp if group_size is None else group_size
    _check_groups(pp, microbatches, group, group_size is None)
    order = _chunk_order(chunks, microbatches, group)
    rows = tuple(_rank_actions(rank, pp, chunks, group, order) for rank in range(pp))
    return Schedule("interleaved-1f1b", pp, pp * chunks, microbatches, rows)


def _check_groups(pp: int, microbatches: int, group: int, is_default: bool) -> None:
    if not pp <= group <= microbatches:
        source = "the default group size is pp" if is_default else "group_size was given"
        raise ScheduleError(
            f"interleaved-1f1b: a group of {group} microbatches ({source}) must lie between pp={pp} and "
            f"microbatches={microbatches}; use at least {pp} microbatches, a smaller pp, or schedule 1f1b"
        )
    last = microbatches % group
    if 0 < last < pp:
        raise ScheduleError(
            f"interleaved-1f1b: {microbatches} microbatches in groups of {group} leave a last group of {last}, and a "
            f"group needs at least pp={pp}; make the microbatches a multiple of {group}, as "
            f"{microbatches - last} or {microbatches - last + group}, or choose another group_size"
        )


def _chunk_order(chunks: int, microbatches: int, group: int) -> list[tuple[int, int]]:
    """(chunk, microbatch) of every forward of a rank; the same on every rank."""
    return [
        (chunk, microbatch)
        for begin in range(0, microbatches, group)
        for chunk in range(chunks)
        for microbatch in range(begin, min(begin + group, microbatches))
    ]


def _rank_actions(
    rank: int, pp: int, chunks: int, group: int, order: list[tuple[int, int]]
) -> tuple[Action, ...]:
    forwards = [forward(chunk * pp + rank, microbatch) for chunk, microbatch in order]
    backwards = [backward((chunks - 1 - chunk) * pp + rank, microbatch) for chunk, microbatch in order]
    actions: list[Action] = []
    # Warm-up: all chunks but the last of the first group, and two more for each rank behind this one.
    warm_up = min((pp - rank - 1) * 2 + (chunks - 1) * group, len(order))
    actions += forwards[:warm_up]
    # Steady state: one forward, one backward.
    steady = len(order) - warm_up
    for step in range(steady):
        actions += [forwards[warm_up + step], backwards[step]]
    # Cool-down: drain the backwards of the warm-up.
    actions += backwards[steady:]
    return tuple(actions)
