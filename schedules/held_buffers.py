"""Buffers that a model chunk holds over several actions: where in the graph they begin and end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from op_graphs.chunk_buffers import Edge, Moment
from op_graphs.graph import Buffers
from op_graphs.lower_step import RankPrograms
from op_graphs.program import GraphNames
from op_graphs.vocabulary import Stream

from .actions import ActionKind
from .copies import Part

_BACKWARDS = ActionKind.FULL_BACKWARD, ActionKind.BACKWARD_WEIGHT
"""What completes gradients."""


def held_buffers(programs: Sequence[RankPrograms], actions: Sequence[Part], names: GraphNames) -> Buffers:
    """The buffers of all chunks; ``actions`` are the compute actions of all ranks in the graph."""
    placed: dict[tuple[int, int], list[Part]] = {}
    for part in actions:
        assert part.action is not None
        placed.setdefault((part.rank, part.action.stage), []).append(part)
    rows = []
    for rank, of_rank in enumerate(programs):
        for chunk in of_rank.chunks:
            edges = _edges(placed[rank, chunk.chunk.stage]) if chunk.held else {}
            for held in chunk.held:
                begin = _row(edges[held.begin.edge], held.begin)
                end = -1 if held.end is None else _row(edges[held.end.edge], held.end)
                rows.append(
                    {
                        "rank": rank,
                        "allocate": begin,
                        # Units of prediction heads are not used in the order of units.
                        "release": -1 if held.end is None else max(begin, end),
                        "size": held.size,
                        "category": held.category,
                        "name": names.strings.intern(held.name),
                        "pool": held.pool,
                    }
                )
    return Buffers.from_rows(rows)


def _edges(actions: Sequence[Part]) -> dict[Edge, Part]:
    """Those of a stage between which it holds something."""
    ordered = sorted(actions, key=lambda part: part.base)
    backwards = [part for part in ordered if part.action and part.action.kind in _BACKWARDS]
    forwards = [part for part in ordered if part.action and part.action.kind is ActionKind.FORWARD]
    return {
        Edge.FIRST_FORWARD: forwards[0],
        Edge.FIRST_BACKWARD: backwards[0],
        Edge.LAST_BACKWARD: backwards[-1],
    }


def _row(action: Part, moment: Moment) -> int:
    """The row of a moment of an action; its last one for what none of its operations does."""
    if moment.at_begin:
        return action.begin
    program = action.program
    known = program.parameter_rows if moment.edge is Edge.FIRST_FORWARD else program.gradient_rows
    found = [known[module] for module in moment.modules if module in known]
    if moment.edge is Edge.FIRST_FORWARD:
        # Gathers for later units may stand behind the last kernel, and run long before it.
        kernels = np.flatnonzero(program.operations.stream == Stream.COMPUTE)
        last = int(kernels[-1]) if len(kernels) else len(program) - 1
        return action.base + max(min(found, default=last), 0)
    return action.base + max(max(found, default=len(program) - 1), 0)
