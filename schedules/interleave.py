"""Interleaving two programs on one rank: a forward and a backward of different microbatches run side by side.

Each program is cut behind its exposed expert-parallel exchanges; the pieces take turns on the compute stream, so that
the exchange that ends a piece of one program travels under the next piece of the other. This is the pairing of
DeepSeek-V3's DualPipe (arXiv:2412.19437, section 3.2.1, figure 4) and of Megatron-Core's combined 1F1B. A program
without such exchanges is one piece: then the second simply follows the first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from op_graphs.columns import Int64
from op_graphs.graph import Operations
from op_graphs.program import Program, ProgramBuffers
from op_graphs.vocabulary import Stream


@dataclass(frozen=True)
class Interleaved:
    """Two programs as one."""

    program: Program
    """All operations, without buffers."""
    parts: tuple[Program, Program]
    """Each program's buffers and named rows, in rows of :attr:`program`; without operations."""
    first_rows: Int64
    second_rows: Int64


def interleave(first: Program, second: Program) -> Interleaved:
    """Let the pieces of two programs take turns, beginning with ``second`` (the backward, which others wait for)."""
    pieces = (_pieces(second), _pieces(first))
    order: list[tuple[int, range]] = []
    for turn in range(max(map(len, pieces))):
        order += [(which, found[turn]) for which, found in enumerate(pieces) if turn < len(found)]
    lengths = (len(second), len(first))
    new_rows = tuple(np.empty(length, dtype=np.int64) for length in lengths)
    source: list[Int64] = []
    position = 0
    for which, rows in order:
        new_rows[which][rows.start : rows.stop] = np.arange(position, position + len(rows))
        source.append(np.arange(rows.start, rows.stop) + (lengths[0] if which else 0))
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
    )
    return Interleaved(program, moved, new_rows[1], new_rows[0])


def _pieces(program: Program) -> list[range]:
    """Runs of rows, each ending with an expert-parallel exchange."""
    ends = (np.flatnonzero(program.operations.stream == Stream.EP) + 1).tolist()
    bounds = [0, *ends]
    if bounds[-1] != len(program):
        bounds.append(len(program))
    return [range(begin, end) for begin, end in pairwise(bounds)]


def _moved(program: Program, new_rows: Int64) -> Program:
    """A program with every row number replaced, the operations left out."""

    def rows(old: Int64) -> Int64:
        return np.where(old >= 0, new_rows[old], -1) if len(old) else old

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
        output_row=int(new_rows[program.output_row]) if program.output_row >= 0 else -1,
    )
