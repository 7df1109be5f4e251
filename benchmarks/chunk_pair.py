"""One forward of a model chunk beside one backward, without the rest of a step: what DualPipe repeats in its middle.

:func:`deepseek` is the pair of a public trace of DeepSeek-V3's training (H800, rank 0 of 64), whose figures stand
below. Used by :mod:`benchmarks.fit` and the tests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from op_graphs.chunk import Chunk
from op_graphs.graph import OpGraph
from op_graphs.graph_names import GraphNames
from op_graphs.imbalance import stage_loads
from op_graphs.lower_stage import lower_chunk
from op_graphs.lower_step import lower_rank
from op_graphs.lowering_context import LoweringContext
from op_graphs.precision import precision_recipe
from op_graphs.timeline import Steps, Timeline
from op_graphs.vocabulary import OpKind, Stream
from schedules.assembly import assemble
from schedules.csv_format import parse_csv
from tracesim.analysis.intervals import intersect, union
from tracesim.scenario import Scenario, load_scenario
from tracesim.simulation import Simulation, run_graph

TRACE_MS = 129.0
"""From the first kernel of the trace to its last."""
TRACE_COMPUTE_MS = 124.3
TRACE_HIDDEN = 0.963
TRACE_EXCHANGES_MS = {
    "combine_backward_all_to_all": 5.8,
    "dispatch_all_to_all": 6.7,
    "dispatch_backward_all_to_all": 7.6,
    "combine_all_to_all": 8.7,
}
"""Exchanges of its four layers on average, with the notifications before them, in which they wait for other ranks."""


@dataclass(frozen=True)
class ChunkPair:
    """Nanoseconds of a pair."""

    time: int
    compute: int
    communication: int
    """Union of expert-parallel exchanges."""
    hidden: int
    """Part of it beside compute."""
    kernels: dict[OpKind, int]
    """Compute by kind."""

    @property
    def hidden_share(self) -> float:
        """Part of the exchanges' time beside compute."""
        return self.hidden / self.communication


def deepseek(*, jitter: bool = True, **overlap: bool) -> Scenario:
    """What the trace says it ran.

    Kernel names give the precision of the router, what is quantised and what is computed again, their grids the SMs
    that products leave free.

    Args:
        jitter: the slowest of the ranks that meet in every layer, whose time a pair takes; else a rank by itself.
        overlap: fields of ``overlap`` that differ.
    """
    scenario = load_scenario(
        {
            "name": "pair",
            "model": {
                "base": "deepseek-v3", "layers": 4, "mtp_layers": 0,
                "moe": {"first_dense_layers": 0, "router_fp32": False},
            },
            "hardware": "h800-sxm",
            "parallel": {"dp": 64, "ep": 64, "ep_dispatcher": "deepep"},
            "training": {
                "seq_len": 4096, "micro_batch_size": 1, "num_microbatches": 4,
                "dtype": "fp8-blockwise", "fp8_dispatch": True, "fp8_storage": True,
                "recompute": {"modules": ["layernorm", "mla_up_proj", "moe_act"]},
            },
            # Its passes are written by hand: no kernel copies what was made again, as Megatron-Core's checkpoints do.
            "libraries": {"checkpoints": False},
            "overlap": {"ep": True, "reserved_sms": 20, **overlap},
        }
    )  # fmt: skip
    return scenario if jitter else replace(scenario, hardware=replace(scenario.hardware, rank_jitter=0.0))


def pair_graph(scenario: Scenario) -> OpGraph:
    """A forward of all layers, a forward beside a backward, and a backward; no embedding, head or neighbours."""
    names = GraphNames()
    loads = stage_loads(scenario.model, scenario.parallel, scenario.training)
    context = LoweringContext(
        model=scenario.model,
        parallel=scenario.parallel,
        training=scenario.training,
        overlap=scenario.overlap,
        libraries=scenario.libraries,
        names=names,
        rank=loads.rank(scenario.parallel, 0, "most"),
        copy_rank=None,
        load=loads.at("most"),
        recipe=precision_recipe(
            scenario.training.recipe,
            scenario.hardware.compute_capability,
            stored_once=scenario.training.fp8_storage,
        ),
    )
    layers = range(scenario.model.layers)
    chunk = lower_chunk(context, Chunk(stage=0, index=0, layers=layers, has_embedding=False, has_head=False))
    # Four microbatches, so that the pair in the middle neither gathers weights nor reduces gradients.
    text = "0F0,0F1,(0F2;0B0)OVERLAP_F_B,(0F3;0B1)OVERLAP_F_B,0B2,0B3"
    schedule = parse_csv(f"{text}\r\n", "pair")
    return assemble([lower_rank(context, [chunk], ())], schedule, scenario.overlap, names)


def run_pair(scenario: Scenario, durations: np.ndarray | None = None) -> ChunkPair:
    """Simulate a pair as a step of the scenario is simulated; ``durations`` of operations as there by default."""
    graph = pair_graph(scenario)
    execution = run_graph(scenario, graph, durations)
    segments = graph.segments
    (number,) = [i for i, name in enumerate(segments.name.tolist()) if graph.strings[name] == "F3+B1"]
    rows = np.arange(segments.begin[number], segments.end[number])
    stream = graph.operations.stream[rows]
    compute, exchange = rows[stream == Stream.COMPUTE], rows[stream == Stream.EP]
    kinds, lasts = graph.operations.kind[compute], execution.end[compute] - execution.start[compute]
    busy = union(execution.start[compute], execution.end[compute])
    moving = union(execution.start[exchange], execution.end[exchange])
    return ChunkPair(
        time=int(execution.end[rows].max() - execution.start[rows].min()),
        compute=busy.total,
        communication=moving.total,
        hidden=intersect(busy, moving).total,
        kernels={OpKind(kind): int(lasts[kinds == kind].sum()) for kind in np.unique(kinds).tolist()},
    )


def pair_timeline(scenario: Scenario) -> Timeline:
    """The timeline of a simulated pair as its only step; what is around it is outside of steps."""
    graph = pair_graph(scenario)
    simulation = Simulation(scenario, graph, run_graph(scenario, graph))
    segments = graph.segments
    (number,) = [i for i, name in enumerate(segments.name.tolist()) if graph.strings[name] == "F3+B1"]
    rows = slice(int(segments.begin[number]), int(segments.end[number]))
    start, end = simulation.execution.start[rows].min(), simulation.execution.end[rows].max()
    step = {"rank": 0, "number": 1, "start": int(start), "end": int(end)}
    return replace(simulation.timeline(), steps=Steps.from_rows([step]))
