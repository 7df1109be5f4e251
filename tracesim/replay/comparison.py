"""Measured and replayed side by side as one timeline."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from op_graphs.columns import StringTable
from op_graphs.timeline import Slices, Timeline
from tracesim.replay.graph import RowRole
from tracesim.replay.run import Replayed


def side_by_side(replayed: Replayed) -> Timeline:
    """The measured timeline with a track ``replayed ...`` behind each track that was replayed."""
    rebuilt, rows = replayed.rebuilt, replayed.rebuilt.rows
    timeline = rebuilt.timeline
    wanted = np.isin(rows.role, (RowRole.DEVICE, RowRole.CALL, RowRole.GAP))
    shown = np.flatnonzero(wanted & (rows.slice_row >= 0))
    strings = StringTable(timeline.strings)
    copied = np.unique(rows.track[shown])
    names = [strings.intern(f"replayed {timeline.string(int(n))}") for n in timeline.tracks.name[copied]]
    count = len(timeline.tracks)
    source = np.concatenate((np.arange(count), copied))
    order = np.lexsort((np.arange(len(source)) >= count, source, timeline.tracks.rank[source]))
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    tracks = timeline.tracks.take(source)
    tracks = tracks.with_columns(name=np.concatenate((timeline.tracks.name, np.array(names, dtype=np.int64))))
    track_of_copy = np.full(count, -1, dtype=np.int64)
    track_of_copy[copied] = place[count:]
    again = timeline.slices.take(rows.slice_row[shown])
    ends = replayed.end[shown]
    # The part of a blocking call that waits lies in the row behind it.
    follows = np.minimum(shown + 1, len(rows) - 1)
    ends = np.where(rows.role[follows] == RowRole.RETURN, replayed.end[follows], ends)
    again = again.with_columns(
        track=track_of_copy[rows.track[shown]],
        start=replayed.start[shown],
        duration=ends - replayed.start[shown],
        waited_for=np.full(len(shown), -1),
        correlation=np.full(len(shown), -1),
    )
    first = timeline.slices.with_columns(track=place[timeline.slices.track])
    return replace(
        timeline,
        strings=strings.strings(),
        tracks=tracks.take(order),
        slices=Slices.concatenate([first, again]),
        origins=None,
    )
