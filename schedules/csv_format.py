"""Schedules as CSV, as ``torch.distributed.pipelining`` dumps and loads them: one row a rank, one action a cell.

Empty cells are idle steps of PyTorch's lock-step drawings; a schedule knows no clock, so reading drops them. Rows
may hold compute actions only, or communication too.
"""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path

from .actions import WEIGHT_KINDS, Action, ActionKind, Schedule, ScheduleError, parse_action
from .check import check_schedule

_FORWARD_KINDS = frozenset(
    (
        ActionKind.FORWARD,
        ActionKind.SEND_F,
        ActionKind.RECV_F,
        ActionKind.UNSHARD,
        ActionKind.RESHARD,
    )
)


def format_csv(schedule: Schedule) -> str:
    """The schedule as CSV text (lines end in CR LF, as Python's and PyTorch's ``csv.writer`` write them)."""
    text = io.StringIO()
    writer = csv.writer(text)
    for row in schedule.actions:
        writer.writerow([str(action) for action in row])
    return text.getvalue()


def parse_csv(text: str, name: str = "csv") -> Schedule:
    """The schedule in CSV text. Stages, microbatches and the rank of each stage follow from the rows.

    Two copies of the model (bidirectional schedules) are recognised by the second half of the stages lying opposite to
    the first and taking the second half of the microbatches, a forward-only schedule by having no backward at all.

    The result is complete in itself but not checked: see :func:`~schedules.check.check_schedule`.

    Raises:
        ScheduleError: if a cell is no action (naming row and column), there is no action at all, or a stage is
            worked on by no rank or by two.
    """
    rows = [_parse_row(rank, cells, name) for rank, cells in enumerate(csv.reader(io.StringIO(text)))]
    while rows and not rows[-1]:
        rows.pop()
    if not rows:
        raise ScheduleError(f"{name}: holds no actions; write one row a rank, as in 0F0,0F1,0B0,0B1")
    parts = [
        (rank, part)
        for rank, row in enumerate(rows)
        for action in row
        for part in action.parts
        if part.stage >= 0
    ]
    stages = 1 + max(part.stage for _, part in parts)
    microbatches = 1 + max((part.microbatch for _, part in parts if part.kind not in WEIGHT_KINDS), default=0)
    stage_ranks = _stage_ranks(parts, stages, name)
    if microbatches > len(parts):
        raise ScheduleError(
            f"{name}: microbatches 0 to {microbatches - 1} are expected, because {microbatches - 1} is the highest, "
            f"but its {len(parts)} actions cannot name them all"
        )
    return Schedule(
        name,
        len(rows),
        stages,
        microbatches,
        tuple(rows),
        stage_ranks,
        copies=_copies(parts, stage_ranks, microbatches),
        forward_only=all(part.kind in _FORWARD_KINDS for _, part in parts),
    )


def _copies(parts: list[tuple[int, Action]], stage_ranks: tuple[int, ...], microbatches: int) -> int:
    """2 if the stages mirror each other and each half of them takes its half of the microbatches, else 1."""
    stages = len(stage_ranks)
    if stages % 2 or microbatches % 2 or stage_ranks != stage_ranks[::-1]:
        return 1
    computes = [part for _, part in parts if part.is_compute]
    split = all((part.stage >= stages // 2) == (part.microbatch >= microbatches // 2) for part in computes)
    return 2 if split and computes else 1


def _parse_row(rank: int, cells: list[str], name: str) -> tuple[Action, ...]:
    row = []
    for column, cell in enumerate(cells, start=1):
        if not cell.strip():
            continue
        try:
            row.append(parse_action(cell))
        except ScheduleError as error:
            raise ScheduleError(f"{name}: row {rank + 1} (rank {rank}), column {column}: {error}") from None
    return tuple(row)


def _stage_ranks(parts: list[tuple[int, Action]], stages: int, name: str) -> tuple[int, ...]:
    found: dict[int, tuple[int, Action]] = {}
    for rank, part in parts:
        first_rank, first = found.setdefault(part.stage, (rank, part))
        if first_rank != rank:
            raise ScheduleError(
                f"{name}: stage {part.stage} is on rank {first_rank} ({first}) and on rank {rank} ({part}); "
                "a stage lies on one rank"
            )
    # Of the numbers up to that of stages found at least one is not there, if any.
    lacking = [stage for stage in range(min(stages, len(found) + 1)) if stage not in found]
    if lacking:
        raise ScheduleError(
            f"{name}: stages 0 to {stages - 1} are expected, because {stages - 1} is the highest, but no rank works "
            f"on stage {lacking[0]}"
        )
    return tuple(found[stage][0] for stage in range(stages))


def read_schedule_csv(path: str | os.PathLike[str], check: bool = True) -> Schedule:
    """Read a schedule from a CSV file, and check it unless told not to.

    Raises:
        ScheduleError: if the file cannot be read, or the schedule is malformed or cannot run.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"cannot read schedule {os.fspath(path)}: {error}") from None
    schedule = parse_csv(text, name=os.fspath(path))
    if check:
        check_schedule(schedule)
    return schedule


def write_schedule_csv(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Write a schedule as CSV; the file appears whole or not at all.

    Raises:
        ScheduleError: if the file cannot be written.
    """
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with beside.open("w", encoding="utf-8", newline="") as file:
            file.write(format_csv(schedule))
        beside.replace(target)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ScheduleError(f"cannot write schedule {target}: {error}") from None
