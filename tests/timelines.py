"""Small timelines for tests, made by hand: rows as tuples, strings interned on the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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
from op_graphs.vocabulary import Communication, FlowKind, MemoryCategory, OpKind, Phase, TrackRole

PIPELINE, COMPUTE, TP, PP, HOST = (
    TrackRole.PIPELINE,
    TrackRole.COMPUTE,
    TrackRole.COMMUNICATION_TP,
    TrackRole.COMMUNICATION_PP,
    TrackRole.HOST,
)


def timeline_of(
    slices: Iterable[Mapping[str, Any]],
    tracks: Sequence[tuple[int, TrackRole, str]] = ((0, COMPUTE, "compute"),),
    ranks: Sequence[Mapping[str, int]] = ({"rank": 0},),
    flows: Iterable[tuple[int, int, FlowKind]] = (),
    counters: Sequence[tuple[int, str, int, bool]] = (),
    samples: Iterable[tuple[int, int, float]] = (),
    steps: Iterable[tuple[int, int, int, int]] = (),
    **facts: Any,
) -> Timeline:
    """A timeline from rows: slices as dicts (``track``, ``start``, ``duration``, ``name`` and what is known),

    tracks as (rank row, role, name), flows as (source, target, kind), counters as (rank row, name, category or -1,
    in bytes), samples as (counter, time, value), steps as (rank row, number, start, end).
    """
    strings = StringTable()
    rows = []
    for row in slices:
        row = dict(row)
        row["name"] = strings.intern(row["name"])
        if isinstance(row.get("module"), str):
            row["module"] = strings.intern(row["module"])
        rows.append(row)
    track_rows = [
        {"rank": rank, "role": role, "stream": index + 7, "name": strings.intern(name)}
        for index, (rank, role, name) in enumerate(tracks)
    ]
    counter_rows = [
        {"rank": rank, "name": strings.intern(name), "category": category, "is_bytes": is_bytes}
        for rank, name, category, is_bytes in counters
    ]
    unknown = {"tp": -1, "cp": -1, "ep": -1, "pp": -1, "dp": -1}
    return Timeline(
        slices=Slices.from_rows(rows, **SLICE_DEFAULTS),
        tracks=Tracks.from_rows(track_rows),
        ranks=Ranks.from_rows(ranks, **unknown),
        flows=Flows.from_rows({"source": s, "target": t, "kind": k} for s, t, k in flows),
        counter_tracks=CounterTracks.from_rows(counter_rows),
        counter_samples=CounterSamples.from_rows({"track": c, "time": t, "value": v} for c, t, v in samples),
        steps=Steps.from_rows({"rank": r, "number": n, "start": s, "end": e} for r, n, s, e in steps),
        strings=strings.strings(),
        **facts,
    )


def _two_stage_slices() -> list[dict[str, Any]]:
    attention = {"kind": OpKind.ATTENTION, "phase": Phase.FORWARD, "layer": 3, "microbatch": 0, "chunk": 0}
    reduction = {"kind": OpKind.COLLECTIVE, "communication": Communication.ALL_REDUCE, "group": 0}
    send = {"kind": OpKind.P2P, "communication": Communication.SEND, "group": 1, "communication_bytes": 4096}
    receive = {**send, "communication": Communication.RECEIVE}
    return [
        {"track": 0, "start": 100, "duration": 900, "name": "F0", "kind": OpKind.ANNOTATION, "microbatch": 0},
        {"track": 1, "start": 100, "duration": 500, "name": "attention", "module": "decoder.core_attention"}
        | attention
        | {"flops": 2.5e12, "bytes": 1e9, "correlation": 7},
        {"track": 1, "start": 600, "duration": 0, "name": "marker 😀", "kind": OpKind.MEMSET},
        {"track": 2, "start": 600, "duration": 400, "name": "all_reduce", "communication_bytes": 1 << 33}
        | reduction
        | {"wait": 20, "waited_for": 1},
        {"track": 3, "start": 1000, "duration": 250, "name": "send", "waited_for": 3} | send,
        {
            "track": 4,
            "start": 50,
            "duration": 10,
            "name": "cudaLaunchKernel",
            "kind": OpKind.HOST,
            "correlation": 7,
        },
        {
            "track": 5,
            "start": 1250,
            "duration": 300,
            "name": "F0",
            "kind": OpKind.ANNOTATION,
            "microbatch": 0,
        },
        {"track": 6, "start": 1000, "duration": 250, "name": "receive", "waited_for": 4} | receive,
    ]


def two_stage_timeline() -> Timeline:
    """Two pipeline stages of one microbatch: forward on rank 2, a send, forward on rank 10; launches and memory."""
    return timeline_of(
        _two_stage_slices(),
        tracks=[
            (0, PIPELINE, "pipeline"),
            (0, COMPUTE, "compute"),
            (0, TP, "tp"),
            (0, PP, "pp send next"),
            (0, HOST, "host"),
            (1, PIPELINE, "pipeline"),
            (1, PP, "pp receive previous"),
        ],
        ranks=[
            {"rank": 2, "tp": 0, "cp": 0, "ep": 0, "pp": 0, "dp": 1},
            {"rank": 10, "tp": 0, "cp": 0, "ep": 0, "pp": 1, "dp": 1},
        ],
        flows=[(4, 7, FlowKind.P2P), (5, 1, FlowKind.LAUNCH)],
        counters=[
            (0, "allocated", -1, True),
            (0, "weights", MemoryCategory.WEIGHTS, True),
            (0, "activations", MemoryCategory.ACTIVATIONS, True),
            (0, "SM utilisation", -1, False),
        ],
        samples=[(0, 0, 1e9), (0, 500, 6e10), (0, 900, 2e9), (1, 0, 1e9), (2, 500, 5.9e10), (3, 100, 50.0)],
        steps=[(0, 5, 0, 1600), (1, 5, 0, 1600)],
        groups=(CommunicationGroup("tp", (2, 3), 2), CommunicationGroup("pp", (2, 10), 2)),
        name="two stages",
        simulated=True,
        device="H100",
        world_size=16,
        time_base_ns=1_700_000_000_000_000_000,
        quirks=(Quirk("kernels without a launch", 3, "attention"),),
        properties={"framework": "none"},
    )
