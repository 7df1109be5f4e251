"""Timeline -> text, one line a slice (``rank0 compute 19..40 F0``): for tests and for reading by eye."""

from __future__ import annotations

import numpy as np

from op_graphs.timeline import Timeline


def format_slices(timeline: Timeline) -> str:
    """One line a slice, in order of rank, track and start; times in ns, as ``start..end``."""
    slices, tracks = timeline.slices, timeline.tracks
    lines = []
    for row in np.lexsort((-slices.duration, slices.start, slices.track)).tolist():
        track = int(slices.track[row])
        rank = int(timeline.ranks.rank[tracks.rank[track]])
        start = int(slices.start[row])
        where = f"rank{rank} {timeline.string(int(tracks.name[track]))}"
        name = timeline.string(int(slices.name[row]))
        lines.append(f"{where} {start}..{start + int(slices.duration[row])} {name}\n")
    return "".join(lines)
