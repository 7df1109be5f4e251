"""The eight steps that DualPipe and DualPipeV share (DeepSeek-V3 report, arXiv:2412.19437, section 3.2.1).

Both feed a rank from two sides: in DualPipe two copies of the model run in opposite directions, in DualPipeV the two
legs of a V do. Seen from one rank the order of work is the same, and the names of the steps are those of DeepSeek's
``dualpipe`` package: 0 is the side nearer to its input, 1 the other one, F0B1 a forward of side 0 beside a backward of
side 1.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from .actions import Action, ActionKind, backward, backward_input, backward_weight, forward, overlapped


@dataclass
class _Row:
    """The row of one rank while it grows, and how far each side has come."""

    stages: tuple[int, int]
    first_microbatches: tuple[int, int]
    actions: list[Action] = field(default_factory=list)
    _done: Counter[tuple[int, ActionKind]] = field(default_factory=Counter)
    _waiting_weights: deque[Action] = field(default_factory=deque)

    def _next(self, side: int, kind: ActionKind) -> tuple[int, int]:
        count = self._done[side, kind]
        self._done[side, kind] += 1
        return self.stages[side], self.first_microbatches[side] + count

    def forward(self, side: int) -> None:
        """The next forward of a side."""
        self.actions.append(forward(*self._next(side, ActionKind.FORWARD)))

    def backward(self, side: int, zero_bubble: bool = False) -> None:
        """The next backward of a side: full, or for the input with the one for the weight put by."""
        where = self._next(side, ActionKind.FULL_BACKWARD)
        self.actions.append(backward_input(*where) if zero_bubble else backward(*where))
        if zero_bubble:
            self._waiting_weights.append(backward_weight(*where))

    def forward_beside_backward(self, forward_side: int, backward_side: int) -> None:
        """The next forward of one side and the next full backward of the other, overlapped."""
        ahead = forward(*self._next(forward_side, ActionKind.FORWARD))
        self.actions.append(overlapped(ahead, backward(*self._next(backward_side, ActionKind.FULL_BACKWARD))))

    def weight(self) -> None:
        """The backward for the weight that has been put by longest."""
        self.actions.append(self._waiting_weights.popleft())


def dual_pipe_row(
    ranks: int, rank: int, microbatches: int, stages: tuple[int, int], first_microbatches: tuple[int, int]
) -> tuple[Action, ...]:
    """The actions of a rank that is ``rank``-th from where its side 0 begins, of ``ranks`` to where the sides meet.

    ``microbatches`` (at least ``2 * ranks``) pass on each side, numbered from ``first_microbatches``.
    """
    row = _Row(stages, first_microbatches)
    behind = ranks - rank - 1
    # Step 1: F0
    for _ in range(2 * behind):
        row.forward(0)
    # Step 2: F0 F1
    for _ in range(rank + 1):
        row.forward(0)
        row.forward(1)
    # Step 3: I1 W1 F1
    for _ in range(behind):
        row.backward(1, zero_bubble=True)
        row.weight()
        row.forward(1)
    # Step 4, the main one: F0B1 F1B0
    for turn in range(microbatches - 2 * ranks + rank + 1):
        if turn == 0 and behind == 0:
            # Where the sides meet, one after the other is earlier at its neighbour than both together.
            row.forward(0)
            row.backward(1)
        else:
            row.forward_beside_backward(0, 1)
        row.forward_beside_backward(1, 0)
    # Step 5: B1 F1B0
    for _ in range(behind):
        row.backward(1)
        row.forward_beside_backward(1, 0)
    # Step 6: B1 B0, with split backwards from the middle on
    for turn in range(2 * (rank + 1)):
        row.backward((turn + 1) % 2, zero_bubble=turn >= rank + 1)
    # Step 7: W I0
    for _ in range(behind):
        row.weight()
        row.backward(0, zero_bubble=True)
    # Step 8: W
    for _ in range(rank + 1):
        row.weight()
    return tuple(row.actions)
