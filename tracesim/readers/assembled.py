"""A timeline put together row by row, for readers of small files; large formats build their columns themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from op_graphs.columns import StringTable
from op_graphs.timeline import (
    SLICE_DEFAULTS,
    CommunicationGroup,
    CounterSamples,
    CounterTracks,
    Flows,
    Quirk,
    Ranks,
    Slices,
    Steps,
    Timeline,
    Tracks,
)
from op_graphs.vocabulary import TrackRole
from tracesim.readers.kineto_json import Notes


class AssembledTimeline:
    """Takes ranks, tracks, slices, flows, counters and steps in any order; :meth:`timeline` sorts and joins them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes = Notes()
        self.strings = StringTable()
        self.groups: dict[CommunicationGroup, int] = {}
        self._ranks: dict[int, dict[str, int]] = {}
        self._tracks: dict[tuple[int, int, int, str], int] = {}
        self._slices: list[dict[str, Any]] = []
        self._flows: list[tuple[int, int, int]] = []
        self._counters: list[tuple[int, str, bool, Any, Any, int]] = []
        self._steps: list[tuple[int, int, int, int]] = []

    def rank(self, number: int, **coordinates: int) -> int:
        """The key of a rank, made if it is new; coordinates as in :class:`~op_graphs.timeline.Ranks`."""
        self._ranks.setdefault(number, {"rank": number, **coordinates})
        return number

    def track(self, rank: int, role: TrackRole, stream: int, name: str) -> int:
        """The key of a track of a rank, made if it is new."""
        return self._tracks.setdefault((rank, int(role), stream, name), len(self._tracks))

    def group(self, group: CommunicationGroup) -> int:
        """The index of a group."""
        return self.groups.setdefault(group, len(self.groups))

    def add(self, track: int, start: int, duration: int, name: str, **columns: Any) -> int:  # noqa: ANN401
        """A slice (times in ns), by columns of :class:`~op_graphs.timeline.Slices`; its key for flows."""
        row = {
            "track": track,
            "start": start,
            "duration": duration,
            "name": self.strings.intern(name),
            **columns,
        }
        self._slices.append(row)
        return len(self._slices) - 1

    def flow(self, source: int, target: int, kind: int) -> None:
        """An arrow between two slices."""
        self._flows.append((source, target, kind))

    def counter(
        self,
        rank: int,
        name: str,
        times: Any,  # noqa: ANN401
        values: Any,  # noqa: ANN401
        is_bytes: bool = True,
        category: int = -1,
    ) -> None:
        """A curve of a rank; times in ns, in any order; ``category`` is a :class:`MemoryCategory` or -1."""
        self._counters.append(
            (rank, name, is_bytes, np.asarray(times, np.int64), np.asarray(values, np.float64), category)
        )

    def step(self, rank: int, number: int, start: int, end: int) -> None:
        """A training step of a rank."""
        self._steps.append((rank, number, start, end))

    def timeline(self, **facts: Any) -> Timeline:  # noqa: ANN401
        """The timeline, its earliest time brought to 0; ``facts`` are fields of :class:`Timeline`."""
        ranks = sorted(self._ranks)
        row_of_rank = {number: row for row, number in enumerate(ranks)}
        ordered = sorted(self._tracks, key=lambda key: (row_of_rank[key[0]], *key[1:]))
        row_of_track = {self._tracks[key]: row for row, key in enumerate(ordered)}
        for row in self._slices:
            row["track"] = row_of_track[row["track"]]
        slices = Slices.from_rows(self._slices, **SLICE_DEFAULTS)
        times = [slices.start, *(c[3] for c in self._counters)]
        base = min((int(t.min()) for t in times if len(t)), default=0)
        order = np.lexsort((-slices.duration, slices.start, slices.track))
        place = np.argsort(order)
        slices = slices.take(order).with_columns(start=slices.start[order] - base)
        flows = np.array(self._flows, dtype=np.int64).reshape(-1, 3)
        counters = sorted(self._counters, key=lambda c: row_of_rank[c[0]])
        samples = []
        for track, (_, _, _, at, values, _) in enumerate(counters):
            rows = np.argsort(at, kind="stable")
            samples.append(CounterSamples(np.full(len(rows), track), at[rows] - base, values[rows]))
        facts = {"name": self.path.name, "time_base_ns": base, **facts}
        return Timeline(
            ranks=Ranks.from_rows([self._ranks[n] for n in ranks], tp=-1, cp=-1, ep=-1, pp=-1, dp=-1),
            tracks=Tracks.from_rows(
                {"rank": row_of_rank[r], "role": role, "stream": stream, "name": self.strings.intern(name)}
                for r, role, stream, name in ordered
            ),
            slices=slices,
            flows=Flows(
                place[flows[:, 0]].astype(np.int32),
                place[flows[:, 1]].astype(np.int32),
                flows[:, 2].astype(np.int8),
            ),
            counter_tracks=CounterTracks.from_rows(
                {
                    "rank": row_of_rank[r],
                    "name": self.strings.intern(name),
                    "category": category,
                    "is_bytes": is_bytes,
                }
                for r, name, is_bytes, _, _, category in counters
            ),
            counter_samples=CounterSamples.concatenate(samples),
            steps=Steps.from_rows(
                {"rank": row_of_rank[r], "number": number, "start": start - base, "end": end - base}
                for r, number, start, end in sorted(self._steps, key=lambda s: (row_of_rank[s[0]], s[2]))
            ),
            groups=tuple(self.groups),
            quirks=tuple(
                Quirk(n, count, example) for n, (count, example) in sorted(self.notes.found.items())
            ),
            strings=self.strings.strings(),
            **facts,
        )
