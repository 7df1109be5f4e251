"""What a trace holds, counted: events of a profiler file as they stand in it, and slices of a timeline by category.

Counts of a file are taken from the events themselves, not from what a reader made of them, so that a conversion can be
held against them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from exporters.chrome_arguments import category as profiler_category
from exporters.chrome_slices import correlations
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import OpKind, TrackRole
from tracesim.readers.kineto_json import Chunk, Notes, decode
from tracesim.readers.sources import FileBytes

NO_CATEGORY = "(none)"
MEMORY_EVENT = "[memory]"


@dataclass
class EventCounts:
    """Events of one or several profiler files."""

    slices: Counter[str] = field(default_factory=Counter)
    """Complete and begin events, by category."""
    untimed: Counter[str] = field(default_factory=Counter)
    """Those of them without a time, which no trace can show."""
    arrows: Counter[str] = field(default_factory=Counter)
    """Ends of flows (``f``) whose start (``s``) is in the file, by category."""
    lone_ends: Counter[str] = field(default_factory=Counter)
    """Starts and ends of flows that find no other end."""
    shared_ids: int = 0
    """Those of the arrows whose id is that of an earlier one."""
    counters: int = 0
    """Counter events."""
    memory: int = 0
    """Instant events that say how much memory is allocated."""
    instants: int = 0
    """Other instant events."""
    metadata: int = 0
    """Names and order of processes and threads."""
    others: Counter[str] = field(default_factory=Counter)
    """Events of any other phase (asynchronous, object, sample), by phase."""

    def __iadd__(self, other: EventCounts) -> EventCounts:
        self.slices += other.slices
        self.untimed += other.untimed
        self.arrows += other.arrows
        self.lone_ends += other.lone_ends
        self.shared_ids += other.shared_ids
        self.counters += other.counters
        self.memory += other.memory
        self.instants += other.instants
        self.metadata += other.metadata
        self.others += other.others
        return self


class _Counting:
    def __init__(self) -> None:
        self.counts = EventCounts()
        self.starts: Counter[tuple[str, object]] = Counter()
        self.ends: Counter[tuple[str, object]] = Counter()

    def add(self, chunk: Chunk) -> None:
        counts = self.counts
        phases: dict[str, list[int]] = {}
        for index, event in enumerate(chunk.events):
            phases.setdefault(event.ph or "", []).append(index)
        for phase, members in phases.items():
            events = [chunk.events[index] for index in members]
            if phase in ("X", "B"):
                counts.slices.update(event.cat or NO_CATEGORY for event in events)
                counts.untimed.update(event.cat or NO_CATEGORY for event in events if event.ts is None)
            elif phase in ("s", "f"):
                ends = self.starts if phase == "s" else self.ends
                ends.update((event.cat or NO_CATEGORY, event.id) for event in events)
            elif phase in ("i", "I"):
                memory = sum(1 for event in events if event.name == MEMORY_EVENT)
                counts.memory += memory
                counts.instants += len(events) - memory
            elif phase == "C":
                counts.counters += len(events)
            elif phase == "M":
                counts.metadata += len(events)
            elif phase != "E":
                counts.others[phase or NO_CATEGORY] += len(events)

    def finish(self) -> EventCounts:
        for key, count in self.ends.items():
            kind = "arrows" if self.starts[key] else "lone_ends"
            getattr(self.counts, kind)[key[0]] += count
            self.counts.shared_ids += count - 1 if self.starts[key] else 0
        for key, count in self.starts.items():
            if key not in self.ends:
                self.counts.lone_ends[key[0]] += count
        return self.counts


def count_events(
    path: Path, data: FileBytes, progress: Callable[[int], None] = lambda position: None
) -> EventCounts:
    """Count the events of a profiler file.

    Args:
        path: named in messages.
        data: the file, unpacked.
        progress: is told how many bytes are done.

    Raises:
        TraceError: if the file is truncated or no JSON.
    """
    counting = _Counting()
    decode(path, data, counting.add, Notes(), progress)
    return counting.finish()


def slices_by_category(timeline: Timeline) -> Counter[str]:
    """Slices of a timeline by the category that a profiler file gives them, or gave them where it came from one."""
    if not len(timeline.slices):
        return Counter()
    slices, origins = timeline.slices, timeline.origins
    found: Counter[str] = Counter()
    ours = np.ones(len(slices), dtype=np.bool_)
    if origins is not None:
        ours = np.array([not header for header in origins.headers], dtype=np.bool_)[timeline.slice_ranks()]
        for value, count in zip(*np.unique(origins.category[~ours], return_counts=True), strict=True):
            found[timeline.string(int(value)) or NO_CATEGORY] += int(count)
    launches = (correlations(timeline) >= 0) | timeline.simulated
    device = timeline.on_device()
    columns = (timeline.slice_roles(), slices.kind, launches, device)
    rows = np.column_stack([column[ours].astype(np.int64) for column in columns])
    for (role, kind, launch, on_device), count in zip(
        *(part.tolist() for part in np.unique(rows, axis=0, return_counts=True)), strict=True
    ):
        found[profiler_category(TrackRole(role), OpKind(kind), bool(launch), bool(on_device))] += count
    return found
