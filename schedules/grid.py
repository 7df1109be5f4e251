"""Text pictures of a schedule for terminals and error messages: ranks are rows, time runs to the right."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from op_graphs.columns import Float64, Int64

from .actions import Action, ActionKind, Schedule

_DEFAULT_WIDTH = 160


def step_grid(
    schedule: Schedule, marked: Collection[tuple[int, int]] = (), width: int = _DEFAULT_WIDTH
) -> str:
    """Rank-by-step grid: one column a step, no notion of how long an action takes.

    Args:
        schedule: what to draw.
        marked: (rank, step) positions put in ``>`` and ``<``. A step one behind the end of a row is drawn as
            ``>end<``. If the grid is wider than ``width``, the columns around the marked ones are kept.
        width: characters a line may take.
    """
    rows = [[str(action) for action in row] for row in schedule.actions]
    steps = max([len(row) for row in rows] + [step + 1 for _, step in marked])
    for row in rows:
        row += [""] * (steps - len(row))
    for rank, step in marked:
        rows[rank][step] = f">{rows[rank][step] or 'end'}<"
    header = [str(step) for step in range(steps)]
    widths = [max(len(header[step]), *(len(row[step]) for row in rows)) for step in range(steps)]
    labels = rank_labels(schedule.pp)
    first, last = _window(widths, [step for _, step in marked], width - len(labels[0]) - 10)
    lines = [_step_line("step".rjust(len(labels[0])), header, widths, first, last)]
    lines += [_step_line(label, row, widths, first, last) for label, row in zip(labels, rows, strict=True)]
    return "\n".join(lines)


def _window(widths: Sequence[int], focus: Sequence[int], available: int) -> tuple[int, int]:
    """Range of columns that fits: from the first column in focus to the last, then evenly to both sides."""
    first = min(focus, default=0)
    last, used = first + 1, widths[first] + 2
    while last <= max(focus, default=0) and used + widths[last] + 2 <= available:
        used += widths[last] + 2
        last += 1
    grew = True
    while grew:
        grew = False
        if first > 0 and used + widths[first - 1] + 2 <= available:
            first -= 1
            used += widths[first] + 2
            grew = True
        if last < len(widths) and used + widths[last] + 2 <= available:
            used += widths[last] + 2
            last += 1
            grew = True
    return first, last


def _step_line(label: str, cells: Sequence[str], widths: Sequence[int], first: int, last: int) -> str:
    shown = "  ".join(cells[step].ljust(widths[step]) for step in range(first, last))
    before, after = ("... " if first > 0 else ""), (" ..." if last < len(cells) else "")
    return f"{label}  {before}{shown}{after}".rstrip()


def time_grid(
    schedule: Schedule,
    starts: Sequence[Sequence[float]],
    ends: Sequence[Sequence[float]],
    width: int = _DEFAULT_WIDTH,
) -> str:
    """Grid over time: an action takes as many columns as it lasts, ``.`` is an idle column.

    Args:
        schedule: what to draw; actions that take no time are left out.
        starts: start of each action of each rank, in columns.
        ends: end of each action.
        width: characters a line may take; the rest of a long schedule is cut off with ``...``.
    """
    text_width = max((len(str(action)) for _, _, action in schedule.steps()), default=1)
    spans: Mapping[tuple[int, int], str] = {
        (rank, step): str(action)
        for rank, step, action in schedule.steps()
        if ends[rank][step] > starts[rank][step]
    }
    # The shortest drawn action must hold its text.
    shortest = min((ends[rank][step] - starts[rank][step] for rank, step in spans), default=1.0)
    scale = (text_width + 1) / min(shortest, 1.0)
    end = max((ends[rank][step] for rank, step in spans), default=0.0)
    canvas = [["."] * round(end * scale) for _ in range(schedule.pp)]
    for (rank, step), text in spans.items():
        begin, stop = round(starts[rank][step] * scale), round(ends[rank][step] * scale)
        canvas[rank][begin:stop] = list(f"{text:-<{stop - begin - 1}}" + " ")
    labels = rank_labels(schedule.pp)
    available = width - len(labels[0]) - 6
    lines = []
    for label, cells in zip(labels, canvas, strict=True):
        line = "".join(cells)
        lines.append(f"{label}  {line[:available] + ' ...' if len(line) > available else line}".rstrip())
    return "\n".join(lines)


class Cell(NamedTuple):
    """A stretch of a rank's line in a scaled grid."""

    text: str
    """As many characters as the stretch is wide."""
    kind: ActionKind | None
    """What runs; None where the rank is idle."""
    chunk: int = 0
    """Model chunk of what runs (of the forward, where a backward runs beside it)."""


_OMITTED = Cell(" ~ ", None)


def scaled_rows(
    schedule: Schedule, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]], columns: int
) -> list[list[Cell]]:
    """The schedule over time in at most ``columns`` columns: for each rank its cells from left to right.

    The shortest action gets as many columns as it can have in the whole picture; where that is not even one, it gets
    one and only the beginning and the end are drawn: the middle, which repeats itself, is left out as ``~``. A column
    shows what runs at its middle. Text is the action (``0F3``) if every drawn action has room for it, else what fits
    of kind and microbatch, lower case on odd chunks: ``F3--`` or ``f3--``, or ``F``; a forward beside a backward is
    ``F3+B1`` or ``+``, idle columns are dots.
    """
    end = max((row[-1] for row in ends if row), default=0.0)
    lengths = [
        stop - start
        for row_starts, row_ends in zip(starts, ends, strict=True)
        for start, stop in zip(row_starts, row_ends, strict=True)
        if stop > start
    ]
    shortest = min(lengths, default=1.0)
    scale = np.floor(columns * shortest / end + 1e-9) / shortest if end else 1.0
    is_whole = scale > 0
    if is_whole:
        middles = (np.arange(round(end * scale)) + 0.5) / scale
    else:
        scale = 1 / shortest
        half = (columns - len(_OMITTED.text)) // 2
        begin = (np.arange(half) + 0.5) / scale
        middles = np.concatenate([begin, end - begin[::-1]])
    strips = []
    for row, row_starts, row_ends in zip(schedule.actions, starts, ends, strict=True):
        owner = _owners(np.asarray(row_starts), np.asarray(row_ends), middles)
        parts = [owner] if is_whole else np.split(owner, 2)
        strips.append([_stretches(row, part) for part in parts])
    spacious = all(
        len(str(action)) < width
        for strip in strips
        for stretches in strip
        for action, width in stretches
        if action is not None
    )
    drawn = []
    for strip in strips:
        cells = [[_cell(schedule, action, width, spacious) for action, width in part] for part in strip]
        drawn.append(cells[0] if is_whole else [*cells[0], _OMITTED, *cells[1]])
    return drawn


def _owners(starts: Float64, ends: Float64, times: Float64) -> Int64:
    """Step that runs at each of ``times``, or -1."""
    runs = np.flatnonzero(ends > starts)
    if not len(runs):
        return np.full(len(times), -1)
    place = np.maximum(np.searchsorted(starts[runs], times, side="right") - 1, 0)
    inside = (times >= starts[runs[place]]) & (times < ends[runs[place]])
    return np.where(inside, runs[place], -1)


def _stretches(row: Sequence[Action], owner: Int64) -> list[tuple[Action | None, int]]:
    """What runs, or None, with how many columns in a row it has."""
    changes = [0, *(np.flatnonzero(np.diff(owner)) + 1).tolist(), len(owner)]
    return [
        (row[owner[first]] if owner[first] >= 0 else None, last - first)
        for first, last in itertools.pairwise(changes)
    ]


def _cell(schedule: Schedule, action: Action | None, width: int, spacious: bool) -> Cell:
    if action is None:
        return Cell("." * width, None)
    chunk = schedule.chunk(action.parts[0].stage)
    if spacious:
        return Cell(f"{action!s:-<{width - 1}} ", action.kind, chunk)
    texts = [f"{part.kind.value}{part.microbatch}" for part in action.parts]
    short = "+" if action.sub_actions else action.kind.value
    text = next((text for text in ("+".join(texts), short) if len(text) <= width), "")
    return Cell(f"{text.lower() if chunk % 2 else text:-<{width}}", action.kind, chunk)


def rank_labels(pp: int) -> list[str]:
    """``rank 0`` and so on, equally wide."""
    digits = len(str(pp - 1))
    return [f"rank {rank:>{digits}}" for rank in range(pp)]
