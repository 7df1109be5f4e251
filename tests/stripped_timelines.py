"""Simulated timelines as a profiler would show them: kernels and transfers, without what only the simulator knows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from op_graphs.columns import Bool
from op_graphs.timeline import SLICE_DEFAULTS, Flows, Slices, Timeline, Tracks
from op_graphs.vocabulary import FlowKind, OpKind, TrackRole


def stripped(timeline: Timeline, *, coordinates: bool = False) -> Timeline:
    """Without pipeline tracks, chunks, microbatches, layers, modules and the scenario; with the phase of a kernel.

    ``coordinates`` leaves the parallel coordinates of the ranks.
    """
    kept = np.flatnonzero(~np.isin(timeline.slice_roles(), (TrackRole.PIPELINE, TrackRole.ANNOTATION)))
    moved = np.full(len(timeline.slices), -1, dtype=np.int64)
    moved[kept] = np.arange(len(kept))
    unknown = np.full(len(kept), -1, dtype=np.int32)
    flows = timeline.flows
    flows = flows.take(np.flatnonzero((moved[flows.source] >= 0) & (moved[flows.target] >= 0)))
    return replace(
        timeline,
        slices=timeline.slices.take(kept).with_columns(
            chunk=unknown, microbatch=unknown, layer=unknown, module=unknown, waited_for=unknown
        ),
        flows=flows.with_columns(
            source=moved[flows.source].astype(np.int32), target=moved[flows.target].astype(np.int32)
        ),
        ranks=timeline.ranks
        if coordinates
        else timeline.ranks.with_columns(pp=np.full(len(timeline.ranks), -1, dtype=np.int32)),
        properties={},
        simulated=False,
    )


def with_launches(timeline: Timeline) -> Timeline:
    """With a host thread a rank that launches kernels and transfers in the order of the program, long ahead."""
    device, rank = np.flatnonzero(timeline.on_device()), timeline.slice_ranks()
    name, first = len(timeline.strings), len(timeline.tracks)
    tracks = Tracks.from_rows(
        {"rank": number, "role": TrackRole.HOST, "stream": 900, "name": name}
        for number in range(len(timeline.ranks))
    )
    calls, flows = [], []
    for number in range(len(timeline.ranks)):
        for place, row in enumerate(device[rank[device] == number].tolist()):
            flows.append(
                {"source": len(timeline.slices) + len(calls), "target": row, "kind": FlowKind.LAUNCH}
            )
            calls.append(
                {
                    "track": first + number,
                    "start": 10 * place,
                    "duration": 5,
                    "name": name,
                    "kind": OpKind.HOST,
                }
            )
    return replace(
        timeline,
        strings=(*timeline.strings, "launch"),
        tracks=Tracks.concatenate([timeline.tracks, tracks]),
        slices=Slices.concatenate([timeline.slices, Slices.from_rows(calls, **SLICE_DEFAULTS)]),
        flows=Flows.concatenate([timeline.flows, Flows.from_rows(flows)]),
    )


def without_transfers(timeline: Timeline) -> Timeline:
    """Without sends and receives."""
    return only(timeline, timeline.slices.kind != OpKind.P2P)


def only(timeline: Timeline, kept: Bool) -> Timeline:
    """Some of its slices, with the flows between them."""
    moved = np.cumsum(kept) - 1
    flows = timeline.flows.take(np.flatnonzero(kept[timeline.flows.source] & kept[timeline.flows.target]))
    return replace(
        timeline,
        slices=timeline.slices.take(np.flatnonzero(kept)),
        flows=flows.with_columns(
            source=moved[flows.source].astype(np.int32), target=moved[flows.target].astype(np.int32)
        ),
    )
