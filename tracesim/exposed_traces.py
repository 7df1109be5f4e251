"""Exposed communication of traces: of tracesim's own by running their scenario again, of measured ones by analysis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from op_graphs.timeline import Timeline

from .analysis import Analysis
from .analysis.annotate import Notes
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
    """Print ranked classes as a table."""
    if not classes:
        console.print("no communication is exposed")
        return
    exact = all(entry["saving"] == "exact" for entry in classes)
    title = "exposed communication, ms over all ranks" + ("" if exact else " (<=: upper bound)")
    table = Table(title=title, title_justify="left")
    for heading in ("transfer", "what", "waited for", "waited by", "could have run"):
        table.add_column(heading, overflow="fold")
    for heading in ("count", "exposed", "of it wait", "could run", "saves"):
        table.add_column(heading, justify="right")
    for entry in classes[:_MOST_ROWS]:
        what = (entry["dimension"], entry["phase"], entry["layer_class"])
        table.add_row(
            escape(entry["name"][:_MOST_NAME]),
            escape(" ".join(part for part in what if part and part != "unknown")),
            *(escape(entry[key][:_MOST_NAME]) or "-" for key in ("waited_for", "waited_by", "could_run")),
            str(entry["count"]),
            *(f"{entry[key]:.3f}" for key in ("exposed_ms", "waiting_ms", "could_run_ms")),
            f"{'' if entry['saving'] == 'exact' else '<='}{entry['saving_ms']:.3f}",
        )
    console.print(table)
    if len(classes) > _MOST_ROWS:
        console.print(f"... and {len(classes) - _MOST_ROWS} more (--json has all)")
