"""What ``tracesim schedule`` computes: a schedule's figures, its timeline on given costs, and comparisons.

Times here are in the unit of the costs given; in a timeline one unit is a millisecond. Nothing is shared. What a
schedule does on a machine is for :func:`tracesim.simulation.simulate`; :func:`compare_on_scenario` asks it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hardware_profiles import ProfileError
from op_graphs.columns import Bool, StringTable
from op_graphs.graph import Segments
from op_graphs.model import ModelError
from op_graphs.timeline import (
    SLICE_DEFAULTS,
    CounterSamples,
    CounterTracks,
    Flows,
    Ranks,
    Slices,
    Steps,
    Timeline,
    Tracks,
)
from op_graphs.vocabulary import OpKind, Phase, Stream, TrackRole
from schedules import (
    Action,
    ActionCosts,
    ActionKind,
    Schedule,
    ScheduleError,
    UnitTimes,
    activations_held,
    build_schedule,
    peak_activations,
    read_schedule_csv,
    simulate_costs,
    usual_chunks,
    without_communication,
)

from .engine import Execution
from .errors import ScenarioError, SimulationError
from .scenario import Scenario, load_scenario
from .simulation import simulate

SCHEMA = "tracesim.schedule/1"
_UNIT_NS = 1_000_000
_PHASES = {
    ActionKind.FORWARD: Phase.FORWARD,
    ActionKind.FULL_BACKWARD: Phase.BACKWARD_INPUT,
    ActionKind.BACKWARD_INPUT: Phase.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT: Phase.BACKWARD_WEIGHT,
}
_REFUSALS = (ScenarioError, ScheduleError, SimulationError, ModelError, ProfileError)


@dataclass(frozen=True)
class PlanSizes:
    """What the user said of the sizes of a schedule; None where a file or the schedule's usual value decides."""

    pp: int | None = None
    vpp: int | None = None
    microbatches: int | None = None


def load_schedule(source: str, sizes: PlanSizes, check: bool = True) -> Schedule:
    """The schedule of a name or a CSV file.

    Raises:
        ScheduleError: if it cannot be built or read, a file has other sizes than those given, or a name comes without
            sizes; unless ``check`` is false, also if a file's schedule cannot run.
    """
    if not source.lower().endswith(".csv"):
        lacking = [
            option
            for option, value in (("--pp", sizes.pp), ("--microbatches", sizes.microbatches))
            if value is None
        ]
        if lacking:
            usual_chunks(source)  # an unknown name is the better message
            raise ScheduleError(
                f"schedule {source}: give {' and '.join(lacking)}; only a .csv file says it itself"
            )
        vpp = usual_chunks(source) if sizes.vpp is None else sizes.vpp
        return build_schedule(source, sizes.pp or 0, vpp, sizes.microbatches or 0)
    schedule = read_schedule_csv(source, check)
    held = {
        "--pp": (sizes.pp, schedule.pp),
        "--vpp": (sizes.vpp, schedule.model_stages // schedule.pp),
        "--microbatches": (sizes.microbatches, schedule.microbatches),
    }
    wrong = [
        f"{option} {said} (it has {has})" for option, (said, has) in held.items() if said not in (None, has)
    ]
    if wrong:
        raise ScheduleError(
            f"schedule {source} does not fit {', '.join(wrong)}; leave out the option, or change it"
        )
    return schedule


def describe_schedule(times: UnitTimes, costs: ActionCosts | None) -> dict[str, Any]:
    """The figures of a schedule as plain data; times in the unit of the costs, or milliseconds if simulated (None)."""
    schedule = times.schedule
    peaks = peak_activations(schedule)
    time, busy, spans = times.makespan, times.rank_busy, times.rank_spans
    ranks = [
        {
            "rank": rank,
            "stages": list(schedule.rank_stages[rank]),
            "actions": len(schedule.actions[rank]),
            "busy": busy[rank],
            "idle": time - busy[rank],
            "idle_inside": spans[rank] - busy[rank],
            "bubble_fraction": 1.0 - busy[rank] / time if time else 0.0,
            "peak_activations": peaks[rank],
        }
        for rank in range(schedule.pp)
    ]
    return {
        "schema": SCHEMA,
        "name": schedule.name,
        "pp": schedule.pp,
        "stages": schedule.model_stages,
        "copies": schedule.copies,
        "microbatches": schedule.microbatches,
        "costs": None
        if costs is None
        else {
            "forward": costs.forward,
            "backward": costs.backward,
            "backward_weight": costs.backward_weight,
            "overlapped": costs.overlapped,
            "stage_factors": list(costs.stage_factors),
            "transfer": costs.transfer,
        },
        "time": time,
        "bubble_fraction": times.bubble_fraction,
        "longest_rank": times.longest_rank,
        "ranks": ranks,
    }


def schedule_rows(times: UnitTimes) -> list[list[dict[str, Any]]]:
    """Every action with its start and end, one list a rank."""
    return [
        [
            {"action": str(action), "start": start, "end": end}
            for action, start, end in zip(row, starts, ends, strict=True)
        ]
        for row, starts, ends in zip(times.schedule.actions, times.starts, times.ends, strict=True)
    ]


def schedule_timeline(times: UnitTimes) -> Timeline:
    """The schedule as a timeline: a track of pipeline actions a rank, and a curve of the activations it holds."""
    schedule = times.schedule
    strings = StringTable()
    track_name, counter_name = strings.intern("pipeline"), strings.intern("activations held")
    rows: list[dict[str, Any]] = []
    samples: list[dict[str, Any]] = []
    for rank, row in enumerate(schedule.actions):
        held = activations_held(row)
        for step, action in enumerate(row):
            start, end = (
                round(time * _UNIT_NS) for time in (times.starts[rank][step], times.ends[rank][step])
            )
            if action.is_compute:
                rows.append(_slice(schedule, action, rank, start, end, strings.intern(_short_name(action))))
                samples.append({"track": rank, "time": start, "value": float(held[step])})
        if row:
            last = round(times.ends[rank][-1] * _UNIT_NS)
            samples.append({"track": rank, "time": last, "value": 0.0})
    pp, end = schedule.pp, round(times.makespan * _UNIT_NS)
    absent = {"tp": -1, "cp": -1, "ep": -1, "dp": -1}
    return Timeline(
        ranks=Ranks.from_rows({"rank": rank, "pp": rank, **absent} for rank in range(pp)),
        tracks=Tracks.from_rows(
            {"rank": rank, "role": TrackRole.PIPELINE, "stream": -1, "name": track_name} for rank in range(pp)
        ),
        slices=Slices.from_rows(rows, **SLICE_DEFAULTS),
        flows=Flows.empty(),
        counter_tracks=CounterTracks.from_rows(
            {"rank": rank, "name": counter_name, "category": -1, "is_bytes": False} for rank in range(pp)
        ),
        counter_samples=CounterSamples.from_rows(_last_of_each_time(samples)),
        steps=Steps.from_rows({"rank": rank, "number": 0, "start": 0, "end": end} for rank in range(pp)),
        strings=strings.strings(),
        name=f"{schedule.name}, pp {pp}, {schedule.model_stages} stages, {schedule.microbatches} microbatches",
        simulated=True,
        device="given costs",
        world_size=pp,
    )


def _slice(schedule: Schedule, action: Action, rank: int, start: int, end: int, name: int) -> dict[str, Any]:
    part = action.parts[0]
    return {
        "track": rank,
        "start": start,
        "duration": end - start,
        "name": name,
        "kind": OpKind.ANNOTATION,
        "phase": _PHASES.get(action.kind, Phase.UNKNOWN),
        "chunk": schedule.chunk(part.stage),
        "microbatch": part.microbatch,
    }


def _short_name(action: Action) -> str:
    return "+".join(f"{part.kind.value}{part.microbatch}" for part in action.parts)


def _last_of_each_time(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One sample a track and time: actions without cost start together."""
    return list({(sample["track"], sample["time"]): sample for sample in samples}.values())


# -- scenarios and comparisons -------------------------------------------------------------------------------


def scenario_times(scenario: str, overrides: Sequence[str], schedule: str | None = None) -> UnitTimes:
    """A scenario's schedule, or another one on it, with the times of its simulated actions in milliseconds.

    An action lasts from the start of its first operation on the compute stream to the end of its last, exposed
    communication between them included. Transfers between stages are left out.

    Raises:
        ScenarioError: if the scenario is wrong, or cannot have this schedule.
        ScheduleError: if the schedule cannot be built or run.
    """
    loaded = _load_with_schedule(scenario, overrides, schedule)
    parallel = loaded.parallel
    simulation = simulate(loaded)
    name = simulation.scenario.schedule
    plan = build_schedule(name, parallel.pp, parallel.vpp, loaded.training.num_microbatches)
    plan = without_communication(plan)
    graph, execution = simulation.graph, simulation.execution
    segments, computes = graph.segments, graph.operations.stream == Stream.COMPUTE
    starts, ends = [], []
    for rank, row in enumerate(plan.actions):
        names = [_short_name(action) for action in row]
        known = set(names)
        own = np.flatnonzero(segments.rank == rank)
        drawn = [
            index
            for index in own[np.argsort(segments.begin[own], kind="stable")].tolist()
            if graph.strings[segments.name[index]] in known
        ]
        assert [graph.strings[segments.name[index]] for index in drawn] == names
        spans = [_compute_span(segments, computes, execution, index) for index in drawn]
        starts.append([begin for begin, _ in spans])
        ends.append([end for _, end in spans])
    first = min(times[0] for times in starts)
    return UnitTimes(
        plan,
        tuple(tuple((time - first) / _UNIT_NS for time in times) for times in starts),
        tuple(tuple((time - first) / _UNIT_NS for time in times) for times in ends),
    )


def _compute_span(segments: Segments, computes: Bool, execution: Execution, index: int) -> tuple[int, int]:
    """First start and last end of a segment's operations on the compute stream (of all, if none is there)."""
    rows = slice(int(segments.begin[index]), int(segments.end[index]))
    own = computes[rows] if computes[rows].any() else slice(None)
    return int(execution.start[rows][own].min()), int(execution.end[rows][own].max())


def _load_with_schedule(
    scenario: str, overrides: Sequence[str], schedule: str | None, vpp: int | None = None
) -> Scenario:
    """A scenario, with another schedule on it and as many chunks a rank as that one takes."""
    given = load_scenario(scenario, overrides)
    if schedule is None:
        return given
    chunks = _chunks_for(schedule, given.parallel.vpp if vpp is None else vpp)
    value = os.path.abspath(schedule) if chunks is None else schedule
    changes = (f"schedule={value}", *((f"parallel.vpp={chunks}",) if chunks else ()))
    return load_scenario(scenario, (*overrides, *changes))


def compare_on_costs(names: Sequence[str], sizes: PlanSizes, costs: ActionCosts) -> dict[str, Any]:
    """Time, bubble and memory of several schedules of one model on one number of ranks.

    Costs are those of a rank's whole share of the model: with v chunks a rank a chunk costs a v-th, and holds a v-th of
    the activations. A schedule that cannot have these sizes is listed with the reason.
    """
    rows: list[dict[str, Any]] = []
    for name in names:
        try:
            schedule = load_schedule(name, sizes)
            chunks = schedule.model_stages // schedule.pp
            times = simulate_costs(schedule, _share(costs, chunks))
        except ScheduleError as error:
            rows.append({"schedule": name, "refused": str(error)})
            continue
        peaks = peak_activations(schedule)
        rows.append(
            {
                "schedule": name,
                "vpp": chunks,
                "time": times.makespan,
                "bubble_fraction": times.bubble_fraction,
                "peak_activations_first_rank": peaks[0] / chunks,
                "peak_activations_last_rank": peaks[-1] / chunks,
                "peak_activations": max(peaks) / chunks,
            }
        )
    return {
        "schema": "tracesim.schedule-comparison/1",
        "rows": rows,
        **_winners(rows, "time", "peak_activations"),
    }


def compare_on_scenario(
    names: Sequence[str], scenario: str, overrides: Sequence[str], vpp: int | None = None
) -> dict[str, Any]:
    """Several schedules simulated on one scenario.

    Each takes the scenario's model chunks a rank if it can have so many, else its usual number. A schedule that the
    scenario cannot have, or the simulator does not take, is listed with the reason.

    Raises:
        ScenarioError: if the scenario itself is wrong.
    """
    given = load_scenario(scenario, overrides)
    rows: list[dict[str, Any]] = []
    for name in names:
        try:
            loaded = _load_with_schedule(scenario, overrides, name, vpp)
            report = simulate(loaded).report
        except _REFUSALS as error:
            rows.append({"schedule": name, "refused": str(error)})
            continue
        rows.append({"schedule": name, "vpp": loaded.parallel.vpp, **_report_figures(report)})
    return {
        "schema": "tracesim.schedule-comparison/1",
        "scenario": given.name,
        "rows": rows,
        **_winners(rows, "iteration_time_ms", "peak_allocated_gib"),
    }


def _share(costs: ActionCosts, chunks: int) -> ActionCosts:
    return replace(
        costs,
        forward=costs.forward / chunks,
        backward_input=costs.backward_input / chunks,
        backward_weight=costs.backward_weight / chunks,
        overlapped=None if costs.overlapped is None else costs.overlapped / chunks,
    )


def _chunks_for(name: str, wanted: int) -> int | None:
    """Chunks a rank for a schedule: those wanted if it allows them; None for a file, which says it itself."""
    if name.lower().endswith(".csv"):
        return None
    usual = usual_chunks(name)
    return wanted if (wanted > 1) == (usual > 1) else usual


def _report_figures(report: Mapping[str, Any]) -> dict[str, Any]:
    stages = report["stages"]
    return {
        "iteration_time_ms": report["iteration_time_ms"],
        "bubble_fraction": report["pipeline_bubble_fraction"],
        "exposed_communication_fraction": report["exposed_communication_fraction"],
        "exposed_pp_ms": float(np.mean([stage["exposed_communication_ms"]["pp"] for stage in stages])),
        "peak_allocated_gib_first_rank": stages[0]["peak_allocated_gib"],
        "peak_allocated_gib_last_rank": stages[-1]["peak_allocated_gib"],
        "peak_allocated_gib": report["peak_allocated_gib"],
        "fits_in_memory": report["fits_in_memory"],
    }


def _winners(rows: Sequence[Mapping[str, Any]], time: str, memory: str) -> dict[str, Any]:
    """Which schedules are fastest and smallest; ties go to all of them."""
    ran = [row for row in rows if "refused" not in row]
    return {
        label: [row["schedule"] for row in ran if row[key] <= min(other[key] for other in ran) * (1 + 1e-9)]
        for label, key in (("fastest", time), ("least_memory", memory))
    }
