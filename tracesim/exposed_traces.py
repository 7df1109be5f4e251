"""Exposed communication of traces: of tracesim's own by running their scenario again, of measured ones by analysis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import yaml
from rich.console import Console

from op_graphs.timeline import Timeline

from .analysis import Analysis
from .analysis.annotate import Notes
from .analysis.short_names import short_name
from .errors import ScenarioError, SimulationError
from .exposed import (
    ExposedCommunication,
    describe_classes,
    describe_stretches,
    exposed_in_trace,
)
from .scenario import load_scenario
from .simulation import Simulation, simulate

_MOST_ROWS = 20
_MOST_NAME = 44
_WIDE_NAME = 30


def exposed_in(analysis: Analysis) -> ExposedCommunication:
    """Exposed communication of an analyzed timeline.

    A simulated trace carries its scenario: where that still gives the same step, savings are exact. Otherwise, and on
    measured traces, they are upper bounds.
    """
    timeline = analysis.timeline
    simulation = _simulation_of(timeline)
    if simulation is None:
        return exposed_in_trace(analysis)
    return simulation.exposed_communication(timeline.ranks.rank.tolist())


def _simulation_of(timeline: Timeline) -> Simulation | None:
    """The simulation that a trace was written from; None if it does not say, or would not come out so any more."""
    text = timeline.properties.get("scenario")
    if not timeline.simulated or not text:
        return None
    try:
        mapping = yaml.safe_load(text)
        simulation = simulate(load_scenario(mapping)) if isinstance(mapping, Mapping) else None
    except (yaml.YAMLError, ScenarioError, SimulationError, ValueError):
        return None
    if simulation is None:
        return None
    begin, end = timeline.span_ns
    return simulation if int(simulation.execution.end.max()) == end - begin else None


def describe_exposed(found: ExposedCommunication) -> dict[str, Any]:
    """Classes (ranked by what hiding them saves) and stretches as plain data; see ``docs/overlap.md``."""
    return {"classes": describe_classes(found), "stretches": describe_stretches(found)}


def exposed_notes(found: ExposedCommunication) -> list[Notes]:
    """What each stretch waited for, what waited for it and what could have run, for a track of each rank."""
    stretches = describe_stretches(found)
    notes: list[Notes] = []
    for rank in range(len(found.timeline.ranks)):
        rows = np.flatnonzero(found.stretches.rank == rank)
        rows = rows[np.argsort(found.stretches.start[rows], kind="stable")]
        texts = [_note(stretches[row]) for row in rows.tolist()]
        notes.append((rank, found.stretches.start[rows], found.stretches.end[rows], texts))
    return notes


def _note(stretch: Mapping[str, Any]) -> str:
    parts = [stretch["name"]]
    parts += [f"waited for {stretch['waited_for']}"] if stretch["waited_for"] else []
    parts += [f"before {stretch['waited_by']}"] if stretch["waited_by"] else []
    could_run = stretch["could_run_ns"] / 1e3
    parts += [f"{stretch['could_run']} could have run ({could_run:.1f} us)"] if could_run else []
    return "; ".join(parts)


def render_exposed(classes: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print ranked classes: a line of figures for each, below it what it waited for and what waited for it."""
    if not classes:
        console.print("no communication is exposed")
        return
    exact = all(entry["saving"] == "exact" for entry in classes)
    console.print("exposed communication, ms over all ranks" + ("" if exact else " (<=: upper bound)"))
    shown = classes[:_MOST_ROWS]
    names = [_class_name(entry) for entry in shown]
    width = max(map(len, ("transfer", *names)))
    headings = ("stretches", "exposed", "of it wait", "could run", "saves")
    lines = [f"{'transfer':{width}}" + "".join(f"{heading:>11}" for heading in headings)]
    for name, entry in zip(names, shown, strict=True):
        saves = f"{'' if entry['saving'] == 'exact' else '<='}{entry['saving_ms']:.3f}"
        lines.append(f"{name:{width}}{entry['count']:11d}{_figures(entry)}{saves:>11}")
        if circumstances := _circumstances(entry):
            lines.append(f"  {circumstances}")
    # What could run and what hiding saves does not add up: it is the same work, or the next transfer is in the way.
    total = {key: sum(entry[key] for entry in classes) for key in ("count", "exposed_ms", "waiting_ms")}
    lines.append(f"{'all':{width}}{total['count']:11d}{total['exposed_ms']:11.3f}{total['waiting_ms']:11.3f}")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if len(classes) > _MOST_ROWS:
        console.print(f"... and {len(classes) - _MOST_ROWS} more (--json has all)")


_FIGURES = ("exposed_ms", "waiting_ms", "could_run_ms")


def _figures(entry: Mapping[str, Any]) -> str:
    return "".join(f"{entry[key]:11.3f}" for key in _FIGURES)


def _class_name(entry: Mapping[str, Any]) -> str:
    """The transfer, with what it is of where that is short."""
    name, told = short_name(entry["name"])[:_MOST_NAME], _told(entry)
    return f"{name}, {told}" if told and len(name) + len(told) < _WIDE_NAME else name


def _told(entry: Mapping[str, Any]) -> str:
    what = (entry["dimension"], entry["phase"], entry["layer_class"])
    return " ".join(part for part in what if part and part not in ("unknown", "other"))


def _circumstances(entry: Mapping[str, Any]) -> str:
    """What most of the time of a class waited for, what it kept waiting, and what else could have run."""
    named = {
        key: short_name(entry[key])[:_MOST_NAME]
        for key in ("waited_for", "waited_by", "could_run")
        if entry[key]
    }
    parts = [_told(entry)] if _told(entry) and "," not in _class_name(entry) else []
    parts += [f"waited for {named['waited_for']}"] if "waited_for" in named else []
    parts += [f"{named['waited_by']} waited for it"] if "waited_by" in named else []
    parts += [f"{named['could_run']} could have run"] if "could_run" in named else []
    return "; ".join(parts)
