"""A timeline with the findings of its analysis as tracks and counters beside its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from op_graphs.columns import Float64, Int32, Int64, StringTable
from op_graphs.timeline import SLICE_DEFAULTS, CounterSamples, CounterTracks, Slices, Timeline, Tracks
from op_graphs.vocabulary import OpKind, TrackRole
from tracesim.analysis.analysis import Analysis, StepAnalysis
from tracesim.analysis.critical_path import COMMUNICATION, COMPUTE, MEMORY, PIECES, CriticalPath
from tracesim.analysis.idle import IDLE_CAUSES

IDLE_TRACK, EXPOSED_TRACK, PATH_TRACK = "idle cause", "exposed communication", "critical path"
WHY_TRACK = "why not overlapped"
EXPOSED_COUNTER, IDLE_COUNTER = "exposed communication so far (ms)", "idle so far (ms)"


Notes = tuple[int, Int64, Int64, list[str]]
"""Row of :attr:`Timeline.ranks`, and starts, ends and texts of what is to be written there."""


def annotate(analysis: Analysis, why: Iterable[Notes] = ()) -> Timeline:
    """The timeline of an analysis with, for each rank, three annotation tracks and two counters.

    ``idle cause`` and ``exposed communication`` tile the idle and exposed time of the steps; ``critical path`` shows
    the path across ranks where there is one, else that of the rank. The counters run from the first step to the last.
    ``why`` goes to a track of its own (:data:`WHY_TRACK`).
    """
    builder = _Builder(analysis.timeline)
    shared = {path.window.step for path in analysis.paths}
    for step in analysis.steps:
        rank = step.window.rank
        builder.add(
            rank, IDLE_TRACK, step.idle.start, step.idle.end, [IDLE_CAUSES[c] for c in step.idle.cause]
        )
        for key, part in step.parts.exposed.items():
            builder.add(rank, EXPOSED_TRACK, part.start, part.end, [f"exposed {key}"] * len(part))
        if step.window.step not in shared:
            _add_path(builder, step.path)
    for path in analysis.paths:
        _add_path(builder, path)
    for rank, start, end, texts in why:
        builder.add(rank, WHY_TRACK, start, end, texts)
    _add_counters(builder, analysis.steps)
    return builder.timeline()


def _add_path(builder: _Builder, path: CriticalPath) -> None:
    timeline = builder.source
    work = np.isin(path.piece, (COMPUTE, COMMUNICATION, MEMORY))
    names = [
        timeline.string(int(timeline.slices.name[row])) if works and row >= 0 else PIECES[piece]
        for row, works, piece in zip(path.row.tolist(), work.tolist(), path.piece.tolist(), strict=True)
    ]
    for rank in np.unique(path.rank[path.rank >= 0]).tolist():
        mine = np.flatnonzero(path.rank == rank)
        builder.add(rank, PATH_TRACK, path.start[mine], path.end[mine], [names[i] for i in mine.tolist()])


def _add_counters(builder: _Builder, steps: Iterable[StepAnalysis]) -> None:
    """Running totals: a sample where each interval begins and ends, so that the curve is flat between them."""
    measures: dict[str, Callable[[StepAnalysis], list[tuple[Int64, Int64]]]] = {
        EXPOSED_COUNTER: lambda step: [(p.start, p.end) for p in step.parts.exposed.values()],
        IDLE_COUNTER: lambda step: [(step.parts.idle.start, step.parts.idle.end)],
    }
    by_rank: dict[int, list[StepAnalysis]] = {}
    for step in steps:
        by_rank.setdefault(step.window.rank, []).append(step)
    for rank, mine in by_rank.items():
        for name, intervals in measures.items():
            pairs = [pair for step in mine for pair in intervals(step)]
            start = np.concatenate([start for start, _ in pairs])
            end = np.concatenate([end for _, end in pairs])
            order = np.argsort(start, kind="stable")
            start, end = start[order], end[order]
            total = np.cumsum(end - start) / 1e6
            before = np.concatenate(([0.0], total[:-1])) if len(total) else total
            first = min(step.window.start for step in mine)
            time = np.concatenate(([first], np.stack([start, end], axis=1).ravel()))
            value = np.concatenate(([0.0], np.stack([before, total], axis=1).ravel()))
            last = np.concatenate((np.diff(time) != 0, [True]))
            builder.add_counter(rank, name, time[last], value[last])


class _Builder:
    """Appends tracks, slices and counters to a timeline."""

    def __init__(self, source: Timeline) -> None:
        self.source = source
        self.strings = StringTable(source.strings)
        self.tracks: dict[tuple[int, str], int] = {}
        self.slices: list[Slices] = [source.slices]
        self.counters: list[dict[str, int]] = []
        self.samples: list[CounterSamples] = [source.counter_samples]

    def add(self, rank: int, track: str, start: Int64, end: Int64, names: list[str]) -> None:
        """Annotations on a track of a rank, which is made where it is missing."""
        if not len(start):
            return
        number = self.tracks.setdefault((rank, track), len(self.source.tracks) + len(self.tracks))
        columns = {name: np.full(len(start), default) for name, default in SLICE_DEFAULTS.items()}
        columns["kind"] = np.full(len(start), OpKind.ANNOTATION)
        self.slices.append(
            Slices(
                track=np.full(len(start), number, dtype=np.int32),
                start=start,
                duration=end - start,
                name=self._intern(names),
                **columns,
            )
        )

    def _intern(self, names: list[str]) -> Int32:
        return np.array([self.strings.intern(name) for name in names], dtype=np.int32)

    def add_counter(self, rank: int, name: str, time: Int64, value: Float64) -> None:
        """A counter of a rank that is no amount of memory."""
        track = len(self.source.counter_tracks) + len(self.counters)
        self.counters.append({"rank": rank, "name": self.strings.intern(name), "category": -1, "is_bytes": 0})
        self.samples.append(CounterSamples(np.full(len(time), track, dtype=np.int32), time, value))

    def timeline(self) -> Timeline:
        """The source with everything that was added."""
        rows = [
            {
                "rank": rank,
                "role": TrackRole.ANNOTATION,
                "stream": -1 - number,
                "name": self.strings.intern(name),
            }
            for number, (rank, name) in enumerate(self.tracks)
        ]
        return replace(
            self.source,
            tracks=Tracks.concatenate([self.source.tracks, Tracks.from_rows(rows)]),
            slices=Slices.concatenate(self.slices),
            counter_tracks=CounterTracks.concatenate(
                [self.source.counter_tracks, CounterTracks.from_rows(self.counters)]
            ),
            counter_samples=CounterSamples.concatenate(self.samples),
            strings=self.strings.strings(),
        )
