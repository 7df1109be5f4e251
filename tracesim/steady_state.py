"""Steps of ranks that do not meet in between: how long it takes from one to the next.

Where the optimizer waits for no other stage (``training.post_validation``) a rank begins its next step when it is done
with this one, while ranks behind it still work. A pipeline then repeats a step in a staggered way, and what a step
takes is the time after which it repeats, not the time until the last rank is done.

A run maps when each rank begins a step to when it begins the next, a max-plus linear map: repeated, all ranks come to
move on by the same time a step (Baccelli et al. 1992, "Synchronization and Linearity", section 3.7), here after two or
three steps. With contention the map is linear only nearly, and the mean of the last steps is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from op_graphs.columns import Int64
from op_graphs.graph import OpGraph

from .engine import Execution

_MOST_STEPS = 8
_AVERAGED_STEPS = 4
_AGREEMENT = 1e-4
"""By how much ranks may differ in what they move on in a step, as a share of it, where it counts as repeated."""


def steady_execution(graph: OpGraph, run: Callable[[Sequence[int]], Execution]) -> Execution:
    """A step of many, with the time to the next one as its period.

    Args:
        graph: of one step.
        run: executes it, given when each rank begins.
    """
    begins = np.zeros(len(graph.ranks), dtype=np.int64)
    passed, done = 0, [0]
    for _ in range(_MOST_STEPS):
        execution = run(begins.tolist())
        ends = _ends(graph, execution)
        moved = ends - begins
        slowest = int(moved.max())
        if slowest - int(moved.min()) <= _AGREEMENT * slowest:
            return replace(execution, period_ns=slowest)
        done.append(passed + int(ends.max()))
        earliest = int(ends.min())
        begins = ends - earliest
        passed += earliest
    return replace(execution, period_ns=round((done[-1] - done[-1 - _AVERAGED_STEPS]) / _AVERAGED_STEPS))


def _ends(graph: OpGraph, execution: Execution) -> Int64:
    """When each rank is done."""
    ends = np.zeros(len(graph.ranks), dtype=np.int64)
    np.maximum.at(ends, graph.operations.rank, execution.end)
    return ends
