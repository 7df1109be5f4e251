"""Pipeline programs of one operation each, so that a schedule's times follow from its paper's closed form."""

from __future__ import annotations

import numpy as np

from op_graphs.chunk import Chunk, ChunkPrograms
from op_graphs.columns import Int64
from op_graphs.graph import OpGraph
from op_graphs.lower_step import RankPrograms
from op_graphs.overlap.registry import TRANSFERS
from op_graphs.plan import OverlapPlan
from op_graphs.program import GraphNames, Program, ProgramBuilder, Tensor
from op_graphs.startup import PersistentBuffer
from op_graphs.vocabulary import MemoryCategory, OpKind, Phase
from schedules import Schedule, add_communication
from schedules.assembly import assemble

ACTIVATION_BYTES = 100
WEIGHT_BYTES = 7


def one_operation_step(schedule: Schedule, overlap: OverlapPlan | None = None) -> OpGraph:
    """The graph of a compute-only schedule whose programs are one operation each, named as the action.

    ``F``, ``B``, ``I`` and ``W``; ``F first``, ``B last`` and ``W last`` are the variants of the first and last
    microbatch. A forward keeps ``ACTIVATION_BYTES`` until its backward, or backward for the weight, ends. Transfers
    are of 1 byte.
    """
    names = GraphNames()
    ranks = []
    for rank in range(schedule.pp):
        held = [stage for stage in range(schedule.stages) if schedule.stage_rank(stage) == rank]
        chunks = tuple(_chunk(names, stage, index, schedule.stages) for index, stage in enumerate(held))
        ranks.append(
            RankPrograms(
                rank=rank,
                chunks=chunks,
                before=_single(names, "before", Phase.OPTIMIZER)[0].build(),
                after=_single(names, "after", Phase.OPTIMIZER)[0].build(),
                persistent=(PersistentBuffer("weights", WEIGHT_BYTES, MemoryCategory.WEIGHTS),),
                receive_bytes=1,
            )
        )
    overlap = overlap or OverlapPlan()
    joined = TRANSFERS.chosen(overlap.p2p).joins(schedule.name)
    return assemble(ranks, add_communication(schedule, joined=joined), overlap, names)


def durations_of(graph: OpGraph, **by_name: int) -> Int64:
    """Nanoseconds of each operation by the first word of its name, ``transfer`` for sends and receives; default 0."""
    operations = graph.operations
    lengths = []
    for kind, name in zip(operations.kind.tolist(), operations.name.tolist(), strict=True):
        word = "transfer" if kind == OpKind.P2P else graph.strings[name].split()[0]
        lengths.append(by_name.get(word, 0))
    return np.array(lengths, dtype=np.int64)


def _chunk(names: GraphNames, stage: int, index: int, stages: int) -> ChunkPrograms:
    is_first, is_last = stage == 0, stage == stages - 1
    forward = _forward(names, "F", index, is_last)
    backward_input, _ = _single(names, "I", Phase.BACKWARD_INPUT, index, forward=forward[0])
    backward_input.output_row = -1 if is_first else 0

    def releasing(name: str, backward_input: ProgramBuilder | None = None) -> Program:
        builder, row = _single(
            names, name, Phase.BACKWARD_WEIGHT, index, forward=forward[0], backward_input=backward_input
        )
        builder.output_row = -1 if is_first or backward_input else row
        builder.release(forward[1], row)
        return builder.build()

    return ChunkPrograms(
        chunk=Chunk(stage, index, range(stage, stage + 1), is_first, is_last),
        forward=forward[0].build(),
        forward_first=_forward(names, "F first", index, is_last)[0].build(),
        backward=releasing("B"),
        backward_last=releasing("B last"),
        backward_input=backward_input.build(),
        backward_weight=releasing("W", backward_input),
        backward_weight_last=releasing("W last", backward_input),
        parameters=(),
        buckets=(),
    )


def _single(
    names: GraphNames,
    name: str,
    phase: Phase,
    chunk: int = -1,
    forward: ProgramBuilder | None = None,
    backward_input: ProgramBuilder | None = None,
) -> tuple[ProgramBuilder, int]:
    builder = ProgramBuilder(names, chunk=chunk, phase=phase, forward=forward, backward_input=backward_input)
    return builder, builder.memory_bound(name, OpKind.ELEMENTWISE, read=1, written=1)


def _forward(names: GraphNames, name: str, index: int, is_last: bool) -> tuple[ProgramBuilder, Tensor]:
    builder, row = _single(names, name, Phase.FORWARD, index)
    builder.output_row = -1 if is_last else row
    return builder, builder.activation("activation", ACTIVATION_BYTES, row)
