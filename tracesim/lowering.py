"""From a scenario to the operation graph of its representative ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from op_graphs.chunk import Chunk
from op_graphs.graph import OpGraph
from op_graphs.graph_names import GraphNames
from op_graphs.imbalance import Level, StageLoads, stage_loads
from op_graphs.lower_stage import lower_chunk
from op_graphs.lower_step import RankPrograms, lower_rank
from op_graphs.lowering_context import LoweringContext
from op_graphs.overlap.registry import TRANSFERS
from op_graphs.precision import precision_recipe
from op_graphs.stage_layout import embedding_stage, layers_per_stage
from schedules.actions import ActionKind, Schedule
from schedules.assembly import assemble
from schedules.check import check_schedule
from schedules.communication import add_communication
from schedules.registry import build_schedule

from .errors import ScenarioError
from .memory.workspaces import library_workspaces
from .scenario import Scenario

_HOPPER, _BLACKWELL = 90, 100
_MAXIMUM_OPERATIONS = 20_000_000
"""About ten GB of memory and two minutes; a step of a 405 B model with 64 microbatches has half a million."""


def lower_scenario(scenario: Scenario, level: Level = "most") -> OpGraph:
    """The graph of one training step; one rank of each pipeline stage stands for all ranks of that stage.

    Where ranks of a stage are unevenly loaded (``training.routing``, ``training.sequence_lengths``) it is the most
    loaded one, or with another ``level`` the least loaded, or one that has the mean load.

    Raises:
        ScheduleError: if the schedule (a CSV file, say) cannot be executed.
        ScenarioError: if the step has more operations than can be simulated.
    """
    parallel, training = scenario.parallel, scenario.training
    schedule = build_schedule(scenario.schedule, parallel.pp, parallel.vpp, training.num_microbatches)
    names = GraphNames()
    loads = stage_loads(scenario.model, parallel, training)
    programs = [_lower_rank(scenario, names, schedule, rank, loads, level) for rank in range(parallel.pp)]
    _check_operations(programs, schedule)
    if schedule.has_communication:
        check_schedule(schedule)
    else:
        joined = TRANSFERS.chosen(scenario.overlap.p2p).joins(scenario.schedule)
        schedule = add_communication(schedule, joined=joined)
    return assemble(programs, schedule, scenario.overlap, names)


def _copies_attention_output(scenario: Scenario) -> bool:
    """Whether Transformer Engine copies the output of attention: [batch, sequence, ...] to [sequence, batch, ...].

    FlashAttention writes the first layout and keeps it for its backward, the linears read the second; with one sequence
    a microbatch both are the same. cuDNN's kernels, which Transformer Engine prefers from Hopper on, write the second
    (``pytorch/attention``, ``backends.py`` and ``utils.py``).
    """
    kernel, libraries = scenario.training.attention, scenario.libraries
    capability = scenario.hardware.compute_capability
    if not libraries.transformer_engine or scenario.training.micro_batch_size == 1:
        return False
    without_cudnn = capability < _HOPPER or (libraries.deterministic and capability >= _BLACKWELL)
    return kernel.startswith("flash-") or (kernel == "flash" and without_cudnn)


def _check_operations(programs: Sequence[RankPrograms], schedule: Schedule) -> None:
    """Refuse a step whose operations would not fit in the memory of the machine that simulates it."""
    share = schedule.microbatches // schedule.copies
    count = sum(
        share * (len(chunk.forward) + len(chunk.backward)) for rank in programs for chunk in rank.chunks
    )
    if count > _MAXIMUM_OPERATIONS:
        raise ScenarioError(
            f"training.num_microbatches: {schedule.microbatches} make about {count:,} operations, more than the "
            f"{_MAXIMUM_OPERATIONS:,} of a step that can be simulated; the step repeats itself: simulate about "
            f"{max(1, schedule.microbatches * _MAXIMUM_OPERATIONS // count):,} microbatches or fewer"
        )


def _turns_at_once(schedule: Schedule, pipeline_rank: int, stage: int) -> bool:
    """Whether each forward pass of a stage is followed by its own backward pass."""
    row = [action for action in schedule.actions[pipeline_rank] if action.is_compute]
    return all(
        at + 1 < len(row)
        and row[at + 1].kind in (ActionKind.FULL_BACKWARD, ActionKind.BACKWARD_INPUT)
        and (row[at + 1].stage, row[at + 1].microbatch) == (stage, action.microbatch)
        for at, action in enumerate(row)
        if action.kind is ActionKind.FORWARD and action.stage == stage
    )


def _lower_rank(
    scenario: Scenario,
    names: GraphNames,
    schedule: Schedule,
    pipeline_rank: int,
    loads: StageLoads,
    level: Level,
) -> RankPrograms:
    parallel, training = scenario.parallel, scenario.training
    stages = [stage for stage in range(schedule.stages) if schedule.stage_rank(stage) == pipeline_rank]
    # Two copies of the model run in opposite directions: the mirrored rank holds the same layers.
    opposite = parallel.pp - 1 - pipeline_rank
    mirrored = loads.rank(parallel, opposite, level) if schedule.copies > 1 else None
    context = LoweringContext(
        model=scenario.model,
        parallel=parallel,
        training=scenario.training,
        overlap=scenario.overlap,
        libraries=scenario.libraries,
        copies_attention_output=_copies_attention_output(scenario),
        names=names,
        rank=loads.rank(parallel, pipeline_rank, level),
        copy_rank=mirrored,
        load=loads.at(level),
        recipe=precision_recipe(
            training.recipe, scenario.hardware.compute_capability, stored_once=training.fp8_storage
        ),
    )
    layers = layers_per_stage(scenario.model.layers, parallel)
    actions = (part for action in schedule.actions[pipeline_rank] for part in action.parts)
    splits = any(part.kind is ActionKind.BACKWARD_INPUT for part in actions)
    chunks = []
    for index, stage in enumerate(stages):
        # A second copy of the model (DualPipe) numbers its stages on.
        part = stage % len(layers)
        first = sum(layers[:part])
        chunk = Chunk(
            stage=stage,
            index=index,
            layers=range(first, first + layers[part]),
            has_embedding=part == embedding_stage(parallel),
            has_encoder=part == 0,
            has_head=part == len(layers) - 1,
        )
        placed = replace(
            context,
            chunk_layers=chunk.layers,
            backward_at_once=_turns_at_once(schedule, pipeline_rank, stage),
        )
        chunks.append(lower_chunk(placed, chunk, splits_backward=splits))
    workspaces = library_workspaces(
        scenario.hardware,
        scenario.libraries,
        grouped=scenario.model.moe is not None and scenario.libraries.grouped_gemm,
        tp=parallel.tp,
    )
    return lower_rank(context, chunks, workspaces)
