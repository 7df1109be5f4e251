"""Why a device, or one of its streams, is idle: the host was late, an event of another stream, a peer, or not known.

A gap ends with the start of a slice, and what that slice waited for (:mod:`.causes`) explains the gap. Up to the end of
the launching call the host is the cause; so is the ordinary delay after it. What is left after a known launch is:

- ``queue``: the ordinary distance between two slices of one stream;
- ``other_stream``: waiting for a slice on another stream, or for its event to arrive;
- ``peer``: waiting for another rank, in simulated timelines and in traces of operations without launches (a measured
  kernel waits for its peers while it runs, which is communication);
- ``unknown``: nothing recorded explains it. A device that is shared or throttled looks like this.

A gap with nothing after it is the host's where launches are known, the peers' in a simulation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Int8, Int64
from op_graphs.timeline import Timeline
from tracesim.analysis.causes import EVENT_DELAY_NS, Cause, Causes
from tracesim.analysis.intervals import Intervals, intersect, subtract

IDLE_CAUSES = ("host", "queue", "other_stream", "peer", "unknown")
"""Keys of idle time, in the order of their numbers."""
HOST, QUEUE, OTHER_STREAM, PEER, UNKNOWN = range(len(IDLE_CAUSES))


@dataclass(frozen=True)
class IdlePieces:
    """Pieces of gaps, disjoint, in order of time; together they are the gaps."""

    start: Int64
    end: Int64
    cause: Int8
    """Index into :data:`IDLE_CAUSES`."""

    def totals(self) -> dict[str, int]:
        """Nanoseconds by cause; every key is there."""
        length = self.end - self.start
        return {name: int(length[self.cause == number].sum()) for number, name in enumerate(IDLE_CAUSES)}

    def of(self, cause: int) -> Intervals:
        """The pieces of one cause; abutting ones stay apart."""
        chosen = self.cause == cause
        return Intervals(self.start[chosen], self.end[chosen])


def explain_gaps(
    timeline: Timeline, causes: Causes, rows: Int64, gaps: Intervals, others: Intervals | None = None
) -> IdlePieces:
    """Split gaps by cause.

    Args:
        timeline: where the slices are.
        causes: of its slices.
        rows: the slices between which the gaps lie (those of a device, or of one stream), also later ones.
        gaps: instants at which none of them runs.
        others: for the gaps of a stream, when the other streams of its rank run: what is unknown beside them is
            waiting for another stream.
    """
    slices = timeline.slices
    if not len(rows):
        cause = PEER if timeline.simulated else UNKNOWN
        return IdlePieces(gaps.start, gaps.end, np.full(len(gaps), cause, dtype=np.int8))
    rows = rows[np.lexsort((rows, slices.start[rows]))]
    at = np.searchsorted(slices.start[rows], gaps.end, side="left")
    follows = at < len(rows)
    none = np.int64(-1)
    row = np.where(follows, np.append(rows, none)[np.minimum(at, len(rows))], none)
    begin, end = gaps.start, gaps.end
    host_launch = (row >= 0) & (causes.launch[row] >= 0)
    ordinary = causes.late[row] <= causes.tolerance[row]
    by_launch = host_launch & (causes.cause[row] == Cause.LAUNCH)
    launched = np.where(host_launch, np.clip(causes.host_ready[row], begin, end), begin)
    launched = np.where(by_launch & ordinary & (launched > begin), end, launched)
    no_launches = not (causes.launch >= 0).any()
    nothing_more = PEER if timeline.simulated else UNKNOWN if no_launches else HOST
    # A simulated operation that waited for its peers did so up to its start.
    peer = np.where(row >= 0, np.maximum(end - slices.wait[row], launched), end)
    rest = np.array([UNKNOWN, QUEUE, QUEUE, OTHER_STREAM, PEER], dtype=np.int8)[causes.cause[row]]
    direct = (causes.cause[row] == Cause.OTHER_STREAM) | (causes.cause[row] == Cause.PEER)
    ordinary |= (slices.waited_for[row] >= 0) | (direct & (causes.late[row] <= EVENT_DELAY_NS))
    rest = np.where(~direct & ~ordinary, UNKNOWN, rest)
    rest = np.where(row >= 0, rest, nothing_more)
    # What another slice let start is explained up to that slice's end and, for the usual delay, beyond it.
    explained = np.where(direct & ~ordinary & (row >= 0), np.clip(causes.time[row], launched, peer), peer)
    moments = np.stack([begin, launched, explained, peer, end], axis=1)
    reason = [np.full(len(row), HOST), rest, np.full(len(row), UNKNOWN), np.full(len(row), PEER)]
    pieces = IdlePieces(
        moments[:, :-1].ravel(), moments[:, 1:].ravel(), np.stack(reason, axis=1).astype(np.int8).ravel()
    )
    kept = pieces.end > pieces.start
    pieces = IdlePieces(pieces.start[kept], pieces.end[kept], pieces.cause[kept])
    return pieces if others is None else _beside(pieces, others)


def _beside(pieces: IdlePieces, others: Intervals) -> IdlePieces:
    """Pieces of unknown cause, where another stream runs, become waiting for it."""
    unknown = pieces.of(UNKNOWN)
    beside, alone = intersect(unknown, others), subtract(unknown, others)
    known = pieces.cause != UNKNOWN
    start = np.concatenate((pieces.start[known], beside.start, alone.start))
    end = np.concatenate((pieces.end[known], beside.end, alone.end))
    cause = np.concatenate(
        (
            pieces.cause[known],
            np.full(len(beside), OTHER_STREAM, dtype=np.int8),
            np.full(len(alone), UNKNOWN, dtype=np.int8),
        )
    )
    order = np.argsort(start, kind="stable")
    return IdlePieces(start[order], end[order], cause[order].astype(np.int8))
