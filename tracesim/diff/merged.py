"""Two compared runs as one timeline, for a trace file that shows them above one another.

The ranks of the first run are called ``a``, those of the second ``b``. The second is moved in time by its fitted clock,
so that the first compared steps begin together. Matched operations are joined by flows; those that take longer or
shorter carry ``ratio`` (b by a) and ``difference_ns`` among their arguments. Each compared rank of b has a counter that
runs from 0 to the difference of its steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from exporters.perfetto_tracks import RANK_PREFIXES
from op_graphs.columns import Float64, Int64
from op_graphs.timeline import (
    CounterSamples,
    CounterTracks,
    Flows,
    Origins,
    Ranks,
    Slices,
    Steps,
    Timeline,
    Tracks,
)
from op_graphs.vocabulary import FlowKind
from tracesim.diff.alignment import Alignment
from tracesim.diff.comparison import Comparison
from tracesim.diff.matcher import MOVED, PIECE

DIFFERENCE_COUNTER = "b behind a (ms)"


def merged_timeline(comparison: Comparison) -> Timeline:
    """Both runs of a comparison in one timeline."""
    alignment = comparison.alignment
    a, b = alignment.a, _moved(alignment.b, _shifts(alignment))
    merged = _side_by_side(a, b)
    pairs = np.flatnonzero(alignment.how != PIECE)
    row_a, row_b = alignment.row_a[pairs], alignment.row_b[pairs] + len(a.slices)
    kind = np.full(len(pairs), FlowKind.MATCH, dtype=np.int8)
    matches = Flows(row_a.astype(np.int32), row_b.astype(np.int32), kind)
    merged = replace(merged, flows=Flows.concatenate([merged.flows, matches]))
    merged = replace(merged, origins=_ratios(merged, row_a, row_b))
    return _with_counters(merged, _running_differences(alignment, b), len(a.ranks))


def _shifts(alignment: Alignment) -> Int64:
    """What is added to the times of each rank of b, by row of its ranks.

    It is one number, so that ranks keep their distances, unless a rank would come to lie more than one of its steps
    from its partner in a: then the ranks of a run have no common clock, and each is moved by its own.
    """
    fitted = [clock.offset for clock in alignment.clocks]
    common = int(np.median(fitted)) if fitted else 0
    shifts = np.full(len(alignment.b.ranks), -common, dtype=np.int64)
    for rank, offset in zip(alignment.ranks, fitted, strict=True):
        if abs(offset - common) > max(max(step.a.length, step.b.length) for step in rank.steps):
            shifts[rank.b] = -offset
    return shifts


def _moved(timeline: Timeline, shifts: Int64) -> Timeline:
    slices, samples, steps = timeline.slices, timeline.counter_samples, timeline.steps
    of_sample = shifts[timeline.counter_tracks.rank[samples.track]]
    of_step = shifts[steps.rank]
    return replace(
        timeline,
        slices=slices.with_columns(start=slices.start + shifts[timeline.slice_ranks()]),
        counter_samples=samples.with_columns(time=samples.time + of_sample),
        steps=steps.with_columns(start=steps.start + of_step, end=steps.end + of_step),
    )


def _side_by_side(a: Timeline, b: Timeline) -> Timeline:
    def more(ids: npt.NDArray[np.int32], offset: int) -> npt.NDArray[np.int32]:
        return np.where(ids >= 0, ids + offset, ids).astype(np.int32)

    strings, rows = len(a.strings), len(a.slices)
    slices = b.slices.with_columns(
        track=b.slices.track + len(a.tracks),
        name=more(b.slices.name, strings),
        module=more(b.slices.module, strings),
        group=more(b.slices.group, len(a.groups)),
        waited_for=more(b.slices.waited_for, rows),
    )
    tracks = b.tracks.with_columns(rank=b.tracks.rank + len(a.ranks), name=more(b.tracks.name, strings))
    counters = b.counter_tracks.with_columns(
        rank=b.counter_tracks.rank + len(a.ranks), name=more(b.counter_tracks.name, strings)
    )
    samples = b.counter_samples.with_columns(track=b.counter_samples.track + len(a.counter_tracks))
    flows = b.flows.with_columns(source=b.flows.source + rows, target=b.flows.target + rows)
    prefixes = ["a"] * len(a.ranks) + ["b"] * len(b.ranks)
    return Timeline(
        strings=a.strings + b.strings,
        ranks=Ranks.concatenate([a.ranks, b.ranks]),
        tracks=Tracks.concatenate([a.tracks, tracks]),
        slices=Slices.concatenate([a.slices, slices]),
        flows=Flows.concatenate([a.flows, flows]),
        counter_tracks=CounterTracks.concatenate([a.counter_tracks, counters]),
        counter_samples=CounterSamples.concatenate([a.counter_samples, samples]),
        steps=Steps.concatenate([a.steps, b.steps.with_columns(rank=b.steps.rank + len(a.ranks))]),
        groups=a.groups + b.groups,
        name=f"a: {a.name}, b: {b.name}",
        simulated=a.simulated and b.simulated,
        device=a.device if a.device == b.device else f"{a.device} | {b.device}",
        world_size=max(a.world_size, b.world_size),
        time_base_ns=a.time_base_ns,
        properties={RANK_PREFIXES: ",".join(prefixes)},
    )


def _ratios(merged: Timeline, row_a: Int64, row_b: Int64) -> Origins:
    """Arguments of matched slices whose durations differ; nothing for all others."""
    duration = merged.slices.duration
    differs = np.flatnonzero(duration[row_a] != duration[row_b])
    row_a, row_b = row_a[differs], row_b[differs]
    texts: dict[int, bytes] = {}
    for x, y, of_a, of_b in zip(
        row_a.tolist(), row_b.tolist(), duration[row_a].tolist(), duration[row_b].tolist(), strict=True
    ):
        ratio = f'"ratio":{of_b / of_a:.4f},' if of_a else ""
        texts[x] = texts[y] = f'{{{ratio}"difference_ns":{of_b - of_a}}}'.encode()
    rows = sorted(texts)
    count = len(merged.slices)
    lengths = np.zeros(count, dtype=np.int64)
    lengths[rows] = [len(texts[row]) for row in rows]
    unknown = np.full(count, -1, dtype=np.int32)
    return Origins(
        category=unknown,
        process=unknown,
        thread=unknown,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        text=b"".join(texts[row] for row in rows),
        headers=("",) * len(merged.ranks),
    )


@dataclass(frozen=True)
class _Curve:
    """Samples of one counter on one rank of b."""

    rank: int
    time: Int64
    value: Float64


def _running_differences(alignment: Alignment, b: Timeline) -> list[_Curve]:
    """For each compared rank, by how much b is behind a at the end of every matched operation of its steps, in ms."""
    entries = alignment.entries[0]
    in_order = np.flatnonzero((alignment.how != PIECE) & (alignment.how != MOVED))
    in_order = in_order[entries.group[alignment.at_a[in_order]] == 0]
    segment = entries.segment[alignment.at_a[in_order]]
    end_a = (alignment.a.slices.start + alignment.a.slices.duration)[alignment.row_a[in_order]]
    end_b = (b.slices.start + b.slices.duration)[alignment.row_b[in_order]]
    shifts = _shifts(alignment)
    curves, number = [], 0
    for rank in alignment.ranks:
        times, values, before, shift = [], [], 0, int(shifts[rank.b])
        for step in rank.steps:
            low, high = np.searchsorted(segment, (number, number + 1))
            number += 1
            first, last = step.b.start + shift, step.b.end + shift
            time = np.clip(end_b[low:high], first, last)
            behind = before + (end_b[low:high] - first) - (end_a[low:high] - step.a.start)
            order = np.argsort(time, kind="stable")
            times.append(np.concatenate([[first], time[order], [last]]))
            values.append(np.concatenate([[before], behind[order], [before + step.difference]]) / 1e6)
            before += step.difference
        time, value = np.concatenate(times), np.concatenate(values)
        order = np.argsort(time, kind="stable")
        time, value = time[order], value[order]
        kept = np.append(time[1:] != time[:-1], True)
        curves.append(_Curve(rank.b, time[kept].astype(np.int64), value[kept]))
    return curves


def _with_counters(merged: Timeline, curves: list[_Curve], ranks_of_a: int) -> Timeline:
    count = len(merged.counter_tracks)
    tracks = CounterTracks.from_rows(
        {"rank": ranks_of_a + curve.rank, "name": len(merged.strings), "category": -1, "is_bytes": False}
        for curve in curves
    )
    samples = [
        CounterSamples(np.full(len(curve.time), count + number), curve.time, curve.value)
        for number, curve in enumerate(curves)
    ]
    return replace(
        merged,
        strings=(*merged.strings, DIFFERENCE_COUNTER),
        counter_tracks=CounterTracks.concatenate([merged.counter_tracks, tracks]),
        counter_samples=CounterSamples.concatenate([merged.counter_samples, *samples]),
    )
