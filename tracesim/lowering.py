"""From a scenario to the operation graph of its representative ranks."""

from __future__ import annotations

from op_graphs.graph import OpGraph
from op_graphs.lower_stage import Chunk, lower_chunk
from op_graphs.lower_step import RankPrograms, lower_rank
from op_graphs.lowering_context import LoweringContext
from op_graphs.program import GraphNames
from op_graphs.stage_layout import layers_per_stage
from schedules.actions import Schedule
from schedules.assembly import assemble
from schedules.check import check_schedule
from schedules.communication import add_communication
from schedules.registry import build_schedule

from .memory.workspaces import library_workspace_bytes
from .scenario import Scenario


def lower_scenario(scenario: Scenario) -> OpGraph:
    """The graph of one training step; one rank of each pipeline stage stands for all ranks of that stage.

    Raises:
        ScheduleError: if the schedule (a CSV file, say) cannot be executed.
    """
    parallel, training = scenario.parallel, scenario.training
    schedule = build_schedule(scenario.schedule, parallel.pp, parallel.vpp, training.num_microbatches)
    if schedule.has_communication:
        check_schedule(schedule)
    else:
        schedule = add_communication(schedule)
    names = GraphNames()
    programs = [_lower_rank(scenario, names, schedule, rank) for rank in range(parallel.pp)]
    return assemble(programs, schedule, scenario.overlap, names)


def _lower_rank(
    scenario: Scenario, names: GraphNames, schedule: Schedule, pipeline_rank: int
) -> RankPrograms:
    parallel = scenario.parallel
    stages = [stage for stage in range(schedule.stages) if schedule.stage_rank(stage) == pipeline_rank]
    # Two copies of the model run in opposite directions: the mirrored rank holds the same layers.
    mirrored = parallel.rank_of(pp=parallel.pp - 1 - pipeline_rank) if schedule.copies > 1 else None
    context = LoweringContext(
        model=scenario.model,
        parallel=parallel,
        training=scenario.training,
        overlap=scenario.overlap,
        names=names,
        rank=parallel.rank_of(pp=pipeline_rank),
        copy_rank=mirrored,
    )
    layers = layers_per_stage(scenario.model.layers, parallel)
    chunks = []
    for index, stage in enumerate(stages):
        # A second copy of the model (DualPipe) numbers its stages on.
        part = stage % len(layers)
        first = sum(layers[:part])
        chunk = Chunk(
            stage=stage,
            index=index,
            layers=range(first, first + layers[part]),
            has_embedding=part == 0,
            has_head=part == len(layers) - 1,
        )
        chunks.append(lower_chunk(context, chunk))
    workspaces = library_workspace_bytes(scenario.hardware, grouped=scenario.model.moe is not None)
    return lower_rank(context, chunks, workspaces)
