"""A test of the rules that a base replay is not: the graph of one step with the durations of another.

Replaying a step with its own host and its own waits reproduces nearly anything. With the graph of step i and the
durations and host gaps of step j, the end of the device work of step j is predicted only if the waits are right. Waits
are learned without step j, and lateness without a cause is not used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from op_graphs.timeline import Timeline
from tracesim.errors import TraceError
from tracesim.replay.graph import Rebuilt
from tracesim.replay.rebuild import Rules, rebuild
from tracesim.replay.run import replay
from tracesim.replay.steps import cut_step, learn_waits, with_times_of

RULE_SETS: dict[str, Rules] = {
    "inferred waits": Rules(admission=False, unexplained=False, learn=False),
    "no inferred waits": Rules(waits="none", admission=False, unexplained=False),
    "wait on everything": Rules(waits="all", admission=False, unexplained=False),
}
"""Ours, and two to compare with."""
COPY = "copy the other step"
"""Taking the time of step i for that of step j."""


@dataclass(frozen=True)
class Prediction:
    """The end of the device work of one step, predicted from another; nanoseconds from the start of the step."""

    rules: str
    graph_step: int
    """Position of the step whose graph is used."""
    times_step: int
    """Position of the step whose durations are used, and whose end is predicted."""
    measured: int
    predicted: int

    @property
    def error(self) -> float:
        """Predicted over measured, minus one."""
        return self.predicted / self.measured - 1


def predict_across_steps(timeline: Timeline) -> list[Prediction]:
    """All pairs of different steps, for each rule set.

    Raises:
        TraceError: if the timeline has less than two steps.
    """
    runs = {name: rebuild(timeline, rules) for name, rules in RULE_SETS.items()}
    first = next(iter(runs.values()))
    steps = np.unique(first.rows.step[first.on_device() & (first.rows.step >= 0)]).tolist()
    if len(steps) < 2 or not len(timeline.steps):
        raise TraceError(
            f"{timeline.name or 'the trace'}: {len(timeline.steps)} steps; comparing across steps needs two. "
            "Record more steps, marked by profiler.step()."
        )
    found: list[Prediction] = []
    for name, run in runs.items():
        cuts = {step: cut_step(run, step) for step in steps}
        for times in steps:
            learned = learn_waits(run, without=times, admission=False) if name == "inferred waits" else run
            for graph in steps:
                if graph == times:
                    continue
                part = with_times_of(cut_step(learned, graph), cuts[times])
                predicted = _device_end(part, replay(part, keep_unexplained=False).end)
                found.append(Prediction(name, graph, times, _device_end(cuts[times]), predicted))
    found += [
        Prediction(COPY, a, b, _device_end(cuts[b]), _device_end(cuts[a]))
        for b in steps
        for a in steps
        if a != b
    ]
    return found


def _device_end(part: Rebuilt, end: np.ndarray | None = None) -> int:
    ends = part.rows.end if end is None else end
    return int(ends[part.on_device()].max()) - part.origin


def summary(predictions: list[Prediction]) -> dict[str, tuple[float, float, float]]:
    """Absolute errors of each rule set in percent: median, 90th percentile, worst."""
    table = {}
    for name in dict.fromkeys(p.rules for p in predictions):
        errors = 100 * np.abs([p.error for p in predictions if p.rules == name])
        table[name] = (float(np.median(errors)), float(np.quantile(errors, 0.9)), float(errors.max()))
    return table
