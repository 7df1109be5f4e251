"""Interleaving two programs on one rank: a forward and a backward of different microbatches run side by side.

Each program is cut behind its exposed expert-parallel exchanges. In which order the pieces stand is the policy of
``overlap.ep``, and which weight gradients run behind the start of the exchange of their piece, and so beside it, that
of ``overlap.wgrad`` (``op_graphs.overlap``). A program without such exchanges is one piece.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from op_graphs.columns import Bool, Int64
from op_graphs.graph import Operations
from op_graphs.overlap.policy import WeightPlacement
from op_graphs.overlap.registry import PAIRS, WEIGHTS
from op_graphs.plan import OverlapPlan
from op_graphs.program import Program, ProgramBuffers
from op_graphs.vocabulary import Phase, Stream


@dataclass(frozen=True)
class Interleaved:
    """Two programs as one."""

    program: Program
    """All operations, without buffers."""
    parts: tuple[Program, Program]
    """Each program's buffers and named rows, in rows of :attr:`program`; without operations."""
    first_rows: Int64
    second_rows: Int64


def interleave(first: Program, second: Program, overlap: OverlapPlan) -> Interleaved:
    """Lay two programs on one stream, a forward and a backward (``second``), as the policies of a plan order them."""
    weights = WEIGHTS.chosen(overlap.wgrad)
    first, second = _exchanges_before_weights(first, weights), _exchanges_before_weights(second, weights)
    lead = [(0, np.arange(second.lead)), (1, np.arange(first.lead))]
    order = [*lead, *PAIRS.chosen(overlap.ep).order(first, second, lambda program: _pieces(program, weights))]
    lengths = (len(second), len(first))
    new_rows = tuple(np.empty(length, dtype=np.int64) for length in lengths)
    source: list[Int64] = []
    position = 0
    for which, rows in order:
        new_rows[which][rows] = np.arange(position, position + len(rows))
        source.append(rows + (lengths[0] if which else 0))
        position += len(rows)
    operations = Operations.concatenate((second.operations, first.operations)).take(np.concatenate(source))
    moved = _moved(first, new_rows[1]), _moved(second, new_rows[0])
    nothing = np.empty(0, dtype=np.int64)
    program = Program(
        operations=operations,
        dependency_rows=np.concatenate([part.dependency_rows for part in moved]),
        dependencies=np.concatenate([part.dependencies for part in moved]),
        buffers=ProgramBuffers.empty(),
        forward_release=nothing,
        input_release=nothing,
        lead=first.lead + second.lead,
    )
    return Interleaved(program, moved, new_rows[1], new_rows[0])


def _bounds(program: Program) -> list[int]:
    """Bounds of runs of rows that each end with an expert-parallel exchange, but perhaps for the last."""
    ends = (np.flatnonzero(program.operations.stream == Stream.EP) + 1).tolist()
    bounds = [program.lead, *ends]
    return bounds if bounds[-1] == len(program) else [*bounds, len(program)]


def _pieces(program: Program, weights: WeightPlacement) -> list[Int64]:
    """Rows of each run in the order in which they are to run: weight gradients that can wait behind the exchange."""
    later = _can_wait(program, weights)
    pieces = []
    for begin, end in pairwise(_bounds(program)):
        rows = np.arange(begin, end)
        ends_in_exchange = program.operations.stream[end - 1] == Stream.EP
        waits = later[begin:end] & ends_in_exchange
        pieces.append(np.concatenate([rows[~waits], rows[waits]]))
    return pieces


def _can_wait(program: Program, weights: WeightPlacement) -> Bool:
    """Rows of weight gradients and of their reduction, unless an operation that is neither waits for one."""
    later = weights.can_wait(_of_weights(program))
    awaited = program.dependencies[~later[program.dependency_rows]]
    kept = np.zeros(len(program), dtype=np.bool_)
    kept[awaited] = True
    # One that must stay keeps those before it on its streams.
    for begin, end in pairwise(_bounds(program)):
        held = np.flatnonzero(later[begin:end] & kept[begin:end])
        if len(held):
            later[begin : begin + int(held[-1]) + 1] = False
    return later


def _of_weights(program: Program) -> Bool:
    """Rows of weight gradients and of their reduction."""
    found: Bool = np.isin(program.operations.phase, (Phase.BACKWARD_WEIGHT, Phase.GRADIENT_SYNC))
    return found


def _exchanges_before_weights(program: Program, placement: WeightPlacement) -> Program:
    """The program with exchanges that wait for the weight gradient before them waiting for what comes before that."""
    operations = program.operations
    weights = placement.can_wait(_of_weights(program))
    sources = program.dependencies.copy()
    begins = _bounds(program)
    for position in np.flatnonzero(operations.stream[program.dependency_rows] == Stream.EP).tolist():
        row, source = int(program.dependency_rows[position]), int(sources[position])
        begin = max(bound for bound in begins if bound <= row)
        if not begin <= source < row or not weights[source] or operations.stream[source] != Stream.COMPUTE:
            continue
        before = np.flatnonzero(~weights[begin:row] & (operations.stream[begin:row] == Stream.COMPUTE))
        if len(before):
            sources[position] = begin + int(before[-1])
    return replace(program, dependencies=sources)


def _moved(program: Program, new_rows: Int64) -> Program:
    """A program with every row number replaced, the operations left out."""

    def rows(old: Int64) -> Int64:
        return np.where(old >= 0, new_rows[old], -1) if len(old) else old

    def row(old: int) -> int:
        return int(new_rows[old]) if old >= 0 else -1

    held = program.buffers
    return replace(
        program,
        operations=Operations.empty(),
        dependency_rows=rows(program.dependency_rows),
        dependencies=rows(program.dependencies),
        buffers=held.with_columns(allocate=rows(held.allocate), release=rows(held.release)),
        forward_release=rows(program.forward_release),
        input_release=rows(program.input_release),
        input_row=int(new_rows[program.input_row]),
        output_row=row(program.output_row),
        first_reload=row(program.first_reload),
        last_offload=row(program.last_offload),
    )
