"""The order in which slices are written, so that no two slices on one drawn track overlap without nesting.

Trace viewers keep a stack for each track: a slice that begins inside another must end inside it. Slices that follow
one another or nest stay on their track; slices that cross are moved to extra *lanes* of it. Inside a lane the events
are ordered so that an end comes before a begin at the same time, an outer begin before an inner one, and an inner
end before an outer one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Bool, Int32, Int64

MAX_DEPTH = 500
"""Slices nested deeper than this go to another lane: trace viewers drop what is deeper than 512."""


WHOLE, BEGIN, END = 0, 1, 2
"""Parts of a slice in an event stream: begin and end right after one another, or one of them."""


@dataclass(frozen=True)
class Placement:
    """Slices in the order in which they are written: lane after lane, in order of their begin.

    ``order[k]`` is the row of the ``k``-th slice and ``lane[k]`` its lane. Lane ``i`` is lane number
    ``lane_number[i]`` (0 for the track itself) of track ``lane_track[i]``. ``events`` is the stream to write: ``4 * k``
    plus ``WHOLE``, ``BEGIN`` or ``END``; a slice inside which no other begins is one event.
    """

    order: Int64
    lane: Int32
    events: Int64
    lane_track: Int32
    lane_number: Int32

    @property
    def extra_lanes(self) -> int:
        """How many tracks had to be added because slices crossed."""
        return int(np.count_nonzero(self.lane_number))


def place_slices(track: Int32, start: Int64, duration: Int64, tracks: int) -> Placement:
    """Order slices (one row each; times in ns) for writing, and split tracks whose slices cross into lanes."""
    end_time = start + duration
    order, overlapping = _order_by_track(track, start, end_time, tracks)
    counts = np.bincount(track, minlength=tracks)
    bounds = np.concatenate([[0], np.cumsum(counts)]).tolist()
    lanes_of_track = np.ones(tracks, dtype=np.int64)
    lane_in_track = np.zeros(len(order), dtype=np.int64) if overlapping else None
    events, done = [], 0
    for index in overlapping:
        window = slice(bounds[index], bounds[index + 1])
        rows = order[window]
        rows = rows[np.lexsort((-duration[rows], start[rows]))]
        events.append(np.arange(done, window.start, dtype=np.int64) << 2)
        at, done = window.start, window.stop
        for number, (members, begin_at, end_at) in enumerate(_lanes_of(start[rows], end_time[rows])):
            assert lane_in_track is not None
            order[at : at + len(members)] = rows[members]
            lane_in_track[at : at + len(members)] = number
            lanes_of_track[index] = number + 1
            events.append(_events(begin_at, end_at) + 4 * at)
            at += len(members)
    events.append(np.arange(done, len(order), dtype=np.int64) << 2)
    first_lane = np.cumsum(lanes_of_track) - lanes_of_track
    lane_track = np.repeat(np.arange(tracks, dtype=np.int32), lanes_of_track)
    lane_number = (np.arange(len(lane_track)) - first_lane[lane_track]).astype(np.int32)
    lane = np.repeat(first_lane, counts)
    if lane_in_track is not None:
        lane += lane_in_track
    return Placement(order, lane.astype(np.int32), np.concatenate(events), lane_track, lane_number)


def _order_by_track(track: Int32, start: Int64, end: Int64, tracks: int) -> tuple[Int64, list[int]]:
    """Rows sorted by track, then start, ties in row order; and the tracks on which slices overlap.

    Nearly free where the rows come in such an order.
    """
    order = np.arange(len(track), dtype=np.int64)
    by_track = track
    if np.any(track[1:] < track[:-1]):
        # numpy sorts 16-bit keys by radix, ten times faster than wider ones.
        order = np.argsort(track.astype(np.int16) if tracks < 1 << 15 else track, kind="stable")
        by_track, start, end = track[order], start[order], end[order]
    same_track = by_track[1:] == by_track[:-1]
    if np.any((start[1:] < start[:-1]) & same_track):
        again = np.lexsort((start, by_track))
        order, start, end = order[again], start[again], end[again]
    overlap = (start[1:] < end[:-1]) & same_track
    return order, np.flatnonzero(np.bincount(by_track[1:][overlap], minlength=1)).tolist()


def _events(begin_at: Int64, end_at: Int64) -> Int64:
    """The event stream of slices that nest, from the positions of their begins and ends."""
    number = np.arange(len(begin_at), dtype=np.int64) << 2
    whole = end_at == begin_at + 1
    stream = np.full(2 * len(begin_at), -1, dtype=np.int64)
    stream[begin_at] = number + np.where(whole, WHOLE, BEGIN)
    stream[end_at[~whole]] = number[~whole] + END
    return stream[stream >= 0]


def _lanes_of(start: Int64, end: Int64) -> list[tuple[Int64, Int64, Int64]]:
    """Members of each lane and the positions of their begin and end; slices sorted by start, the longest first."""
    nested = nesting_positions(start, end)
    if nested is not None:
        return [(np.arange(len(start)), *nested)]
    assigned = _assign_lanes(start, end)
    lanes = []
    for number in range(int(assigned.max()) + 1):
        members = np.flatnonzero(assigned == number)
        positions = nesting_positions(start[members], end[members])
        assert positions is not None, "a lane holds slices that cross"
        lanes.append((members, *positions))
    return lanes


def nesting_positions(start: Int64, end: Int64) -> tuple[Int64, Int64] | None:
    """Positions of the begin and end events of slices that nest; None where two cross or the nesting is too deep.

    Slices come sorted by start, the longest first. A slice of no duration is an event pair of its own.
    """
    count = len(start)
    index = np.arange(count)
    instant = start == end
    instants_before = np.concatenate([[0], np.cumsum(instant)])
    long = np.flatnonzero(~instant)
    # Ends at one time close the slice that began last first.
    by_end = long[::-1][np.argsort(end[long[::-1]], kind="stable")]
    begin_at = index + instants_before[:-1] + np.searchsorted(end[by_end], start, side="right")
    end_at = begin_at + 1
    begun = np.searchsorted(start, end[by_end], side="left")
    end_at[by_end] = np.arange(len(by_end)) + begun + instants_before[begun]
    if not _pairs_match(begin_at, end_at):
        return None
    return begin_at, end_at


def _pairs_match(begin_at: Int64, end_at: Int64) -> bool:
    """Whether every end closes the innermost open slice, with at most ``MAX_DEPTH`` open at a time."""
    count = len(begin_at)
    member = np.empty(2 * count, dtype=np.int64)
    member[begin_at] = member[end_at] = np.arange(count)
    begins: Bool = np.zeros(2 * count, dtype=bool)
    begins[begin_at] = True
    depth = np.cumsum(np.where(begins, 1, -1))
    level = np.where(begins, depth, depth + 1)
    if level.max() > MAX_DEPTH:
        return False
    # On one level, begins and ends alternate, so each end must follow the begin of its own slice.
    by_level = member[np.argsort(level.astype(np.int16), kind="stable")]
    return bool(np.array_equal(by_level[0::2], by_level[1::2]))


def _assign_lanes(start: Int64, end: Int64) -> Int64:
    """First lane in which each slice nests. A loop in Python: only tracks whose slices cross come here."""
    lanes: list[list[int]] = []
    assigned = np.zeros(len(start), dtype=np.int64)
    for row, (begins, ends) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        for number, still_open in enumerate(lanes):  # noqa: B007 -- the number of the lane found is used below
            while still_open and still_open[-1] <= begins:
                still_open.pop()
            if not still_open or (ends <= still_open[-1] and len(still_open) < MAX_DEPTH):
                break
        else:
            number, still_open = len(lanes), []
            lanes.append(still_open)
        if ends > begins:
            still_open.append(ends)
        assigned[row] = number
    return assigned
