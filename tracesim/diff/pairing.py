"""Which ranks and which steps of two runs are laid beside each other.

Ranks pair by their global number. Where no number occurs on both sides (two traces of one rank each, say), they pair in
order of pipeline stage, then number. Steps pair by number or in order of time, whichever pairs more; by number if both
do. The only step of one side (a simulated one) is laid beside every step of the other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from op_graphs.timeline import Timeline
from tracesim.analysis import Window


@dataclass(frozen=True)
class StepPair:
    """A step of one rank on both sides."""

    a: Window
    b: Window

    @property
    def difference(self) -> int:
        """Nanoseconds by which the step of b takes longer."""
        return self.b.length - self.a.length


@dataclass(frozen=True)
class RankPair:
    """A rank of each side, with the steps that are compared."""

    a: int
    """Row of :attr:`Timeline.ranks` of the first run."""
    b: int
    steps: tuple[StepPair, ...]

    @property
    def repeats_a(self) -> bool:
        """Whether one step of a stands beside several of b."""
        return len({step.a.start for step in self.steps}) < len(self.steps)

    @property
    def repeats_b(self) -> bool:
        """Whether one step of b stands beside several of a."""
        return len({step.b.start for step in self.steps}) < len(self.steps)


def pair_ranks(
    a: Timeline, b: Timeline, windows_a: Sequence[Window], windows_b: Sequence[Window]
) -> list[RankPair]:
    """The ranks that have a step on both sides, in the order of their rows in ``a``."""
    steps_a, steps_b = _by_rank(windows_a), _by_rank(windows_b)
    rows = pair_rows(a, b, steps_a, steps_b)
    return [RankPair(x, y, tuple(pair_steps(steps_a[x], steps_b[y]))) for x, y in rows]


def pair_rows(
    a: Timeline, b: Timeline, rows_a: Collection[int], rows_b: Collection[int]
) -> list[tuple[int, int]]:
    """Rows of :attr:`Timeline.ranks` of both runs that are the same rank, out of the given ones."""
    numbers_a = {int(a.ranks.rank[row]): row for row in rows_a}
    numbers_b = {int(b.ranks.rank[row]): row for row in rows_b}
    common = sorted((set(numbers_a) & set(numbers_b)) - {-1})
    if common:
        return [(numbers_a[number], numbers_b[number]) for number in common]
    return list(zip(_in_order(a, rows_a), _in_order(b, rows_b), strict=False))


def pair_steps(a: Sequence[Window], b: Sequence[Window]) -> list[StepPair]:
    """The steps of one rank that are compared, in order of time."""
    if len(a) == 1 or len(b) == 1:
        return [StepPair(x, y) for x in a for y in b]
    by_number = {window.step: window for window in b}
    numbered = [StepPair(window, by_number[window.step]) for window in a if window.step in by_number]
    in_order = [StepPair(x, y) for x, y in zip(a, b, strict=False)]
    return numbered if len(numbered) >= len(in_order) else in_order


def _by_rank(windows: Sequence[Window]) -> dict[int, list[Window]]:
    found: dict[int, list[Window]] = {}
    for window in windows:
        # A window of no length (an empty step) has nothing that could be compared.
        if window.length > 0:
            found.setdefault(window.rank, []).append(window)
    return found


def _in_order(timeline: Timeline, rows: Collection[int]) -> list[int]:
    return sorted(rows, key=lambda row: (int(timeline.ranks.pp[row]), int(timeline.ranks.rank[row]), row))
