"""A recovered schedule as plain data and text: its check, its bubbles by cause, and the intended one beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from schedules import (
    ActionCosts,
    ActionKind,
    Schedule,
    ScheduleError,
    UnitTimes,
    check_schedule,
    simulate_costs,
)

from .recovered_names import intended_schedule
from .recovered_schedule import BUBBLE_CAUSES, RecoveredSchedule
from .schedule_workbench import schedule_rows

SCHEMA = "tracesim.recovered-schedule/1"


@dataclass(frozen=True)
class Intended:
    """The schedule that a run was meant to follow."""

    name: str
    times: UnitTimes
    """On the mean times of the executed actions, with free communication; milliseconds."""
    differences: tuple[str, ...]
    """For each rank whose order differs, the first step at which it does."""


def intended_beside(recovered: RecoveredSchedule, name: str | None) -> Intended | None:
    """The schedule of a name, else the first that has the recovered order; None if no name fits.

    Raises:
        ScheduleError: if the named schedule cannot have the sizes of the recovered one.
    """
    chosen = name or next(iter(recovered.matches), None)
    if chosen is None:
        return None
    schedule = intended_schedule(recovered.times.schedule, chosen)
    times = simulate_costs(schedule, mean_costs(recovered))
    return Intended(chosen, times, tuple(_differences(recovered.times.schedule, schedule)))


def mean_costs(recovered: RecoveredSchedule) -> ActionCosts:
    """Mean milliseconds of the executed actions; a full backward counts half for the input and half for the weight."""
    lengths: dict[ActionKind, list[float]] = {}
    for row, starts, ends in zip(
        recovered.times.schedule.actions, recovered.times.starts, recovered.times.ends, strict=True
    ):
        for action, start, end in zip(row, starts, ends, strict=True):
            lengths.setdefault(action.kind, []).append(end - start)
    mean = {kind: sum(listed) / len(listed) for kind, listed in lengths.items()}
    half = mean.get(ActionKind.FULL_BACKWARD, 0.0) / 2
    return ActionCosts(
        forward=mean.get(ActionKind.FORWARD, 0.0),
        backward_input=mean.get(ActionKind.BACKWARD_INPUT, half),
        backward_weight=mean.get(ActionKind.BACKWARD_WEIGHT, half),
        overlapped=mean.get(ActionKind.OVERLAP_F_B),
    )


def _differences(ran: Schedule, meant: Schedule) -> list[str]:
    found = []
    for rank, (row, plan) in enumerate(zip(ran.actions, meant.actions, strict=True)):
        for step in range(max(len(row), len(plan))):
            here = str(row[step]) if step < len(row) else "nothing"
            there = str(plan[step]) if step < len(plan) else "nothing"
            if here != there:
                found.append(f"rank {rank} step {step}: ran {here}, {meant.name} has {there}")
                break
    return found


def problem_of(schedule: Schedule) -> str | None:
    """Why a schedule could not run; None if it can."""
    try:
        check_schedule(schedule)
    except ScheduleError as error:
        return str(error)
    return None


def describe_recovered(recovered: RecoveredSchedule, intended: Intended | None) -> dict[str, Any]:
    """A recovered schedule as plain data; times in milliseconds. The fields are documented in ``docs/overlap.md``."""
    times = recovered.times
    busy = times.rank_busy
    # A pair by itself is a part of a step: there is no order to check.
    problem = problem_of(times.schedule) if recovered.pair is None else None
    return {
        "schema": SCHEMA,
        "name": times.schedule.name,
        "step": recovered.step,
        "method": recovered.method,
        "pp": times.schedule.pp,
        "stages": times.schedule.model_stages,
        "microbatches": times.schedule.microbatches,
        "matches": list(recovered.matches),
        "ok": problem is None if recovered.pair is None else None,
        "problem": problem,
        "intended": None
        if intended is None
        else {
            "name": intended.name,
            "time": intended.times.makespan,
            "bubble_fraction": intended.times.bubble_fraction,
            "differences": list(intended.differences),
        },
        "pair": recovered.pair,
        "time": times.makespan,
        "bubble_fraction": times.bubble_fraction,
        "ranks": [
            {"rank": place, "global_rank": rank, "busy": busy[place], "bubbles": totals}
            for place, (rank, totals) in enumerate(zip(recovered.ranks, recovered.totals(), strict=True))
        ],
        "bubbles": [vars(bubble) for bubble in recovered.bubbles],
        "actions": schedule_rows(times),
    }


def _print_pair(pair: dict[str, float], console: Console) -> None:
    console.print("a part of a step, which has no order to check: a forward beside a backward", markup=False)
    for name in ("forward", "backward"):
        moving, hidden = pair[f"{name}_exchanges"], pair[f"{name}_exchanges_hidden"]
        console.print(
            f"{name}: compute {pair[f'{name}_compute']:.3f} ms, exchanges of experts {moving:.3f} ms, "
            f"{hidden / moving:.1%} of them beside compute",
            soft_wrap=True,
            markup=False,
        )


def render_recovered(description: dict[str, Any], console: Console) -> None:
    """Print the figures of :func:`describe_recovered`."""
    matches = ", ".join(description["matches"]) or "no schedule by name"
    console.print(
        f"step {description['step']} from {description['method']}: {description['time']:.3f} ms, bubble "
        f"{description['bubble_fraction']:.1%}, {description['microbatches']} microbatches; its order is that of "
        f"{matches}",
        soft_wrap=True,
        markup=False,
    )
    intended = description["intended"]
    if intended is not None:
        console.print(
            f"{intended['name']} on the mean times of its actions and free communication: {intended['time']:.3f} ms, "
            f"bubble {intended['bubble_fraction']:.1%}",
            soft_wrap=True,
            markup=False,
        )
        for line in intended["differences"]:
            console.print(f"- {line}", soft_wrap=True, markup=False)
    pair = description["pair"]
    if pair is None:
        check = "ok" if description["ok"] else description["problem"]
        console.print(f"check: {check}", soft_wrap=True, markup=False)
    else:
        _print_pair(pair, console)
    table = Table(
        "rank", "busy", *(cause.replace("_", " ") for cause in BUBBLE_CAUSES), box=None, pad_edge=False
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for row in description["ranks"]:
        figures = (row["bubbles"][cause] for cause in BUBBLE_CAUSES)
        table.add_row(str(row["rank"]), f"{row['busy']:.3f}", *(f"{figure:.3f}" for figure in figures))
    console.print(table)
