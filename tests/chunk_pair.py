"""One forward of a model chunk beside one backward, without the rest of a step: what DualPipe repeats in its middle."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from op_graphs.graph import OpGraph
from op_graphs.graph_names import GraphNames
from op_graphs.imbalance import stage_loads
from op_graphs.lower_stage import Chunk, lower_chunk
from op_graphs.lower_step import lower_rank
from op_graphs.lowering_context import LoweringContext
from op_graphs.precision import precision_recipe
from op_graphs.timeline import Steps, Timeline
from op_graphs.vocabulary import OpKind, Stream
from schedules.assembly import assemble
from schedules.csv_format import parse_csv
from tracesim.analysis.intervals import intersect, union
from tracesim.contention import execute
from tracesim.cost import CostModel
from tracesim.cost.contention import sharing_policy
from tracesim.scenario import Scenario
from tracesim.simulation import Simulation


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
        return self.hidden / self.communication


def pair_graph(scenario: Scenario) -> OpGraph:
    """A forward of all layers, a forward beside a backward, and a backward; no embedding, head or neighbours."""
    names = GraphNames()
    loads = stage_loads(scenario.model, scenario.parallel, scenario.training)
    context = LoweringContext(
        model=scenario.model,
        parallel=scenario.parallel,
        training=scenario.training,
        overlap=scenario.overlap,
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


def pair_costs(scenario: Scenario) -> CostModel:
    """Costs on the machine of a scenario, with the SMs that it reserves."""
    return CostModel(scenario.hardware, reserved_sms=scenario.overlap.reserved_sms)


def run_pair(scenario: Scenario, durations: np.ndarray | None = None) -> ChunkPair:
    """Simulate a pair; with contention where the scenario has it on."""
    graph, costs = pair_graph(scenario), pair_costs(scenario)
    durations = costs.durations_ns(graph) if durations is None else durations
    sharing = sharing_policy(costs, graph, durations) if scenario.overlap.contention else None
    execution = execute(graph, durations, gap_ns=costs.gap_ns, sharing=sharing)
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
    graph, costs = pair_graph(scenario), pair_costs(scenario)
    durations = costs.durations_ns(graph)
    simulation = Simulation(scenario, graph, execute(graph, durations, gap_ns=costs.gap_ns, sharing=None))
    segments = graph.segments
    (number,) = [i for i, name in enumerate(segments.name.tolist()) if graph.strings[name] == "F3+B1"]
    rows = slice(int(segments.begin[number]), int(segments.end[number]))
    start, end = simulation.execution.start[rows].min(), simulation.execution.end[rows].max()
    step = {"rank": 0, "number": 1, "start": int(start), "end": int(end)}
    return replace(simulation.timeline(), steps=Steps.from_rows([step]))
