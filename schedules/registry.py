"""The schedules by name. Adding one is a file with a pure function, and a line in ``SCHEDULES``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from .actions import Schedule, ScheduleError
from .csv_format import read_schedule_csv
from .gpipe import gpipe
from .interleaved import interleaved_one_forward_one_backward
from .one_forward_one_backward import one_forward_one_backward


class _Builder(Protocol):
    def __call__(self, pp: int, chunks: int, microbatches: int) -> Schedule: ...


class _GroupedBuilder(Protocol):
    def __call__(self, pp: int, chunks: int, microbatches: int, group_size: int | None) -> Schedule: ...


@dataclass(frozen=True)
class Single:
    """A schedule with one stage a rank."""

    build: _Builder


@dataclass(frozen=True)
class Grouped:
    """A schedule with two or more stages a rank, which passes microbatches in groups."""

    build: _GroupedBuilder


SCHEDULES: Mapping[str, Single | Grouped] = {
    "gpipe": Single(gpipe),
    "1f1b": Single(one_forward_one_backward),
    "interleaved-1f1b": Grouped(interleaved_one_forward_one_backward),
}


def schedule_names() -> tuple[str, ...]:
    """Names :func:`build_schedule` knows."""
    return tuple(SCHEDULES)


def build_schedule(
    name: str, pp: int, vpp: int, microbatches: int, group_size: int | None = None
) -> Schedule:
    """The schedule of a name (in any case) or of a CSV file.

    Args:
        name: one of :func:`schedule_names`, or a path that ends in ``.csv``.
        pp: pipeline ranks.
        vpp: model chunks (stages) of a rank.
        microbatches: microbatches of a step.
        group_size: microbatches an interleaved schedule passes through a chunk before the next; pp if not given.

    Raises:
        ScheduleError: if the name is unknown, a size is below 1, or the schedule cannot have these sizes.
    """
    for label, value in (("pp", pp), ("vpp", vpp), ("microbatches", microbatches)):
        if value < 1:
            raise ScheduleError(f"schedule {name}: {label}={value} must be at least 1")
    if name.lower().endswith(".csv"):
        return _from_file(name, pp, vpp, microbatches)
    known = SCHEDULES.get(name.lower())
    if known is None:
        raise ScheduleError(_unknown(name))
    if isinstance(known, Grouped):
        if vpp < 2 or pp < 2:
            raise ScheduleError(
                f"schedule {name.lower()} needs at least 2 model chunks a rank and 2 ranks, not vpp={vpp} and "
                f"pp={pp}; use 1f1b, or a larger {'vpp' if vpp < 2 else 'pp'}"
            )
        return known.build(pp, vpp, microbatches, group_size)
    if vpp != 1:
        raise ScheduleError(
            f"schedule {name.lower()} runs one model chunk a rank, not vpp={vpp}; use interleaved-1f1b, or vpp=1"
        )
    if group_size is not None:
        raise ScheduleError(
            f"schedule {name.lower()} has no microbatch groups; remove group_size={group_size}"
        )
    return known.build(pp, vpp, microbatches)


def _unknown(name: str) -> str:
    nearest = difflib.get_close_matches(name.lower(), SCHEDULES, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    return f"unknown schedule {name!r}: valid are {', '.join(SCHEDULES)}, or the path of a .csv file{hint}"


def _from_file(path: str, pp: int, vpp: int, microbatches: int) -> Schedule:
    schedule = read_schedule_csv(path)
    wanted = {"pp": pp, "stages (pp * vpp)": pp * vpp, "microbatches": microbatches}
    held = {
        "pp": schedule.pp,
        "stages (pp * vpp)": schedule.stages,
        "microbatches": schedule.microbatches,
    }
    wrong = [f"{held[key]} {key} instead of {wanted[key]}" for key in wanted if held[key] != wanted[key]]
    if wrong:
        raise ScheduleError(f"schedule {path} has {', '.join(wrong)}; change the plan or the file")
    return schedule
