"""What becomes of the memory of a changed run, as far as its trace tells.

A trace with ``[memory]`` events, or a simulated one, holds a curve of allocated bytes for each rank; from it follows
what a change that moves no operator allocates. Traces without the curve can only say in which direction memory goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Float64, Int64
from op_graphs.timeline import Timeline
from tracesim.replay.graph import Rebuilt

NO_CURVE = "the trace has no memory events (record with profile_memory=True)"


@dataclass(frozen=True)
class MemoryEffect:
    """What a what-if does to allocated memory."""

    says: str
    peak_change: dict[int, int] | None
    """Bytes by which the peak of each rank (row of the timeline's ranks) changes; None where it is not known."""


UNCHANGED = MemoryEffect("unchanged: no buffer is moved or kept longer", {})


def unchanged(rebuilt: Rebuilt, value: str) -> MemoryEffect:
    """The effect of changes of durations, order between streams and the network."""
    return UNCHANGED


def unknown(says: str) -> MemoryEffect:
    """An effect of which only the direction is known."""
    return MemoryEffect(f"unknown: {says}", None)


def together(effects: Sequence[MemoryEffect]) -> MemoryEffect:
    """The effect of several changes: what each says, and the sum where all are known."""
    says = list(dict.fromkeys(effect.says for effect in effects))
    moved = [effect for effect in effects if effect.peak_change != {}]
    if not moved:
        return MemoryEffect("; ".join(says), {})
    said = "; ".join(dict.fromkeys(effect.says for effect in moved))
    changes: dict[int, int] = {}
    for effect in moved:
        if effect.peak_change is None:
            return MemoryEffect(said, None)
        for rank, change in effect.peak_change.items():
            changes[rank] = changes.get(rank, 0) + change
    return MemoryEffect(said, changes)


@dataclass(frozen=True)
class Allocated:
    """Allocated bytes of one rank over time, each valid until the next; sorted by time."""

    time: Int64
    value: Float64

    def at(self, moment: int) -> float:
        """Bytes at a moment; those of the first sample before it."""
        place = int(np.searchsorted(self.time, moment, side="right")) - 1
        return float(self.value[max(place, 0)])

    def peak_with(self, changes: Sequence[tuple[int, int, float]]) -> float:
        """The peak if ``bytes`` were added in each ``(from, to, bytes)``."""
        added = np.zeros(len(self.time))
        for begin, end, size in changes:
            low, high = np.searchsorted(self.time, (begin, end))
            added[low:high] += size
        return float((self.value + added).max())

    @property
    def peak(self) -> float:
        """The most that was allocated."""
        return float(self.value.max())


def allocated_memory(timeline: Timeline, rank: int) -> Allocated | None:
    """The curve of a rank (row of the timeline's ranks); None where the trace has none."""
    tracks, samples = timeline.counter_tracks, timeline.counter_samples
    for track in np.flatnonzero((tracks.rank == rank) & tracks.is_bytes & (tracks.category < 0)).tolist():
        if timeline.string(int(tracks.name[track])).startswith("allocated"):
            mine = np.flatnonzero(samples.track == track)
            if len(mine):
                return Allocated(samples.time[mine], samples.value[mine])
    return None


def gibibytes(size: float) -> str:
    """A size in words: GiB, or MiB where it is small."""
    return f"{size / 2**30:.2f} GiB" if abs(size) >= 2**30 else f"{size / 2**20:.1f} MiB"
