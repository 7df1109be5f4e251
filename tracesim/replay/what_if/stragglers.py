"""What if nothing straggled: no rank, step or microbatch slower than the others, and nothing launched late."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from op_graphs.columns import Int64
from tracesim.errors import ScenarioError
from tracesim.replay.graph import Rebuilt
from tracesim.replay.measured import declares_operations


def without_stragglers(rebuilt: Rebuilt, value: str = "stragglers") -> Rebuilt:
    """Device slices last as long as the same slice does elsewhere: compute the mean, communication the median.

    The same are slices of one name and number in their step, on all ranks and in all steps; in a trace of
    micro-operations all of one name. ``value`` says what goes: ``stragglers`` the differences, ``launch-delays``
    lateness without a cause, ``both`` both. With ``both`` the step is the ideal one of `Understanding Stragglers in
    Large Model Training <https://arxiv.org/abs/2505.05713>`_, with ``launch-delays`` the one without launch delay.

    Raises:
        ScenarioError: if ``value`` is something else.
    """
    if value not in ("stragglers", "launch-delays", "both"):
        raise ScenarioError(f"even={value}: write even=stragglers, even=launch-delays or even=both")
    if value != "stragglers":
        rebuilt = replace(rebuilt, unexplained=np.zeros(len(rebuilt.rows), dtype=np.int64))
    return rebuilt if value == "launch-delays" else replace(rebuilt, durations=_evened(rebuilt))


def _evened(rebuilt: Rebuilt) -> Int64:
    device = np.flatnonzero(rebuilt.on_device())
    communication = rebuilt.graph.is_communication()[device]
    durations = rebuilt.durations.copy()
    label, count = _same(rebuilt, device)
    for number, chosen in enumerate(np.split(np.argsort(label, kind="stable"), np.cumsum(count)[:-1])):
        assert (label[chosen] == number).all()
        rows = device[chosen]
        usual = np.median if communication[chosen[0]] else np.mean
        durations[rows] = round(float(usual(rebuilt.durations[rows])))
    evened: Int64 = durations
    return evened


def _same(rebuilt: Rebuilt, device: Int64) -> tuple[Int64, Int64]:
    """A number for each row that is equal for the same operation, and how many there are of each."""
    name = rebuilt.graph.operations.name[device].astype(np.int64)
    if declares_operations(rebuilt.timeline):
        key = name[None]
    else:
        rows = rebuilt.rows
        block = np.stack([rows.track[device], rows.step[device], name])
        order = np.lexsort((rows.start[device], *block[::-1]))
        begins = np.append(True, (np.diff(block[:, order], axis=1) != 0).any(axis=0))
        place = np.arange(len(device))
        number = np.empty(len(device), dtype=np.int64)
        number[order] = place - np.maximum.accumulate(np.where(begins, place, 0))
        stream = rebuilt.timeline.tracks.stream[rows.track[device]].astype(np.int64)
        # What ran before the first step is no counterpart of anything.
        key = np.stack([name, stream, number, (rows.step[device] >= 0).astype(np.int64)])
    _, label, count = np.unique(key, axis=1, return_inverse=True, return_counts=True)
    return label.ravel().astype(np.int64), count.astype(np.int64)
