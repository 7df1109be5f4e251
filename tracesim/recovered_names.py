"""Schedules by name beside a recovered one: which have its order, and the one that a run was meant to follow."""

from __future__ import annotations

from schedules import (
    Schedule,
    ScheduleError,
    build_schedule,
    schedule_names,
    usual_chunks,
    without_communication,
)


def intended_schedule(schedule: Schedule, name: str) -> Schedule:
    """The schedule of a name, or a CSV file, with the sizes of a recovered one.

    Raises:
        ScheduleError: if it cannot have these sizes.
    """
    chunks = schedule.model_stages // schedule.pp
    return with_two_copies(name, schedule) or without_communication(
        build_schedule(name, schedule.pp, chunks, schedule.microbatches)
    )


def with_two_copies(name: str, schedule: Schedule) -> Schedule | None:
    """The schedule of a name, if it holds two copies of the model, in the number of stages of a given one."""
    if name not in schedule_names() or usual_chunks(name) > 1:
        return None
    try:
        known = without_communication(build_schedule(name, schedule.pp, 1, schedule.microbatches))
    except ScheduleError:
        return None
    return known if schedule.pp < known.stages == schedule.stages else None


def matching_names(schedule: Schedule) -> tuple[str, ...]:
    """Schedules without options that order the same actions alike."""
    chunks = schedule.model_stages // schedule.pp
    found = []
    for name in schedule_names():
        known = with_two_copies(name, schedule)
        if known is None:
            if (usual_chunks(name) > 1) != (chunks > 1):
                continue
            try:
                known = build_schedule(name, schedule.pp, chunks, schedule.microbatches)
            except ScheduleError:
                continue
        if known.actions == schedule.actions:
            found.append(name)
    return tuple(found)
