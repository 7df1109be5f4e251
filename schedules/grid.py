"""Text pictures of a schedule for terminals and error messages: ranks are rows, time runs to the right."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from .actions import Schedule

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
    labels = _rank_labels(schedule.pp)
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
    labels = _rank_labels(schedule.pp)
    available = width - len(labels[0]) - 6
    lines = []
    for label, cells in zip(labels, canvas, strict=True):
        line = "".join(cells)
        lines.append(f"{label}  {line[:available] + ' ...' if len(line) > available else line}".rstrip())
    return "\n".join(lines)


def _rank_labels(pp: int) -> list[str]:
    digits = len(str(pp - 1))
    return [f"rank {rank:>{digits}}" for rank in range(pp)]
