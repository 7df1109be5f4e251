"""Timelines of graphs that the engine ran, for tests of what is found in timelines."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from op_graphs.graph import OpGraph
from op_graphs.timeline import (
    SLICE_DEFAULTS,
    CounterSamples,
    CounterTracks,
    Flows,
    Ranks,
    Slices,
    Steps,
    Timeline,
    Tracks,
)
from op_graphs.vocabulary import STREAM_ROLES, Communication, FlowKind, OpKind, Stream
from tests.graphs import graph_of
from tracesim.engine import execute


def executed_timeline(graph: OpGraph, durations: Sequence[int], gap_ns: int = 0) -> Timeline:
    """The timeline of an executed graph: one track a (rank, stream), one step a rank from 0 to the last end."""
    execution = execute(graph, np.array(durations, dtype=np.int64), gap_ns=gap_ns)
    operations = graph.operations
    lanes = sorted(set(zip(operations.rank.tolist(), operations.stream.tolist(), strict=True)))
    number = {lane: i for i, lane in enumerate(lanes)}
    track = [number[lane] for lane in zip(operations.rank.tolist(), operations.stream.tolist(), strict=True)]
    met = [np.flatnonzero(operations.rendezvous == r) for r in np.unique(operations.rendezvous) if r >= 0]
    flows = [(int(a), int(b)) for rows in met for a, b in itertools.pairwise(rows)]
    end = int(execution.end.max()) if len(operations) else 0
    columns = {name: np.full(len(operations), value) for name, value in SLICE_DEFAULTS.items()}
    columns |= {
        "kind": operations.kind,
        "communication": operations.communication,
        "wait": execution.wait,
        "waited_for": execution.waited_for,
        "microbatch": operations.microbatch,
        "phase": operations.phase,
    }
    return Timeline(
        strings=graph.strings,
        ranks=Ranks.from_rows([{"rank": int(r)} for r in graph.ranks], tp=0, cp=0, ep=0, pp=0, dp=0),
        tracks=Tracks.from_rows(
            {"rank": rank, "role": STREAM_ROLES[Stream(stream)], "stream": stream, "name": 0}
            for rank, stream in lanes
        ),
        slices=Slices(
            track=np.array(track),
            start=execution.start,
            duration=execution.end - execution.start,
            name=operations.name,
            **columns,
        ),
        flows=Flows.from_rows({"source": a, "target": b, "kind": FlowKind.COLLECTIVE} for a, b in flows),
        counter_tracks=CounterTracks.empty(),
        counter_samples=CounterSamples.empty(),
        steps=Steps.from_rows(
            {"rank": r, "number": 0, "start": 0, "end": end} for r in range(len(graph.ranks))
        ),
        simulated=True,
    )


@st.composite
def executed_graphs(draw, gap_ns: int = 0) -> tuple[Timeline, int]:
    """Random graphs of up to 3 ranks with dependencies within a rank and collectives of all, run; with the makespan."""
    ranks = draw(st.integers(1, 3))
    rows: list[dict] = []
    durations: list[int] = []
    for number in range(draw(st.integers(1, 14))):
        length = draw(st.integers(0, 9))
        if ranks > 1 and draw(st.integers(0, 3)) == 0:
            # A collective of all ranks on the same stream in the same order cannot deadlock.
            for rank in range(ranks):
                mine = [i for i, row in enumerate(rows) if row["rank"] == rank]
                after = draw(st.lists(st.sampled_from(mine), max_size=2, unique=True)) if mine else []
                rows.append(
                    {
                        "rank": rank,
                        "stream": Stream.TP,
                        "after": after,
                        "rendezvous": number,
                        "kind": OpKind.COLLECTIVE,
                        "communication": Communication.ALL_REDUCE,
                    }
                )
                durations.append(length)
            continue
        rank = draw(st.integers(0, ranks - 1))
        mine = [i for i, row in enumerate(rows) if row["rank"] == rank]
        after = draw(st.lists(st.sampled_from(mine), max_size=3, unique=True)) if mine else []
        stream = draw(st.sampled_from([Stream.COMPUTE, Stream.DP]))
        rows.append({"rank": rank, "stream": stream, "after": after, "kind": OpKind.GEMM})
        durations.append(length)
    timeline = executed_timeline(graph_of(rows), durations, gap_ns)
    end = int((timeline.slices.start + timeline.slices.duration).max())
    return timeline, end
