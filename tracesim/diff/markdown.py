"""A comparison as Markdown, to paste into a pull request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tracesim.diff.tables import describe_side
from tracesim.diff.words import PART_LABELS, operation_label, rank_label

_MOST_OPERATIONS = 10
_MOST_HOST_ROWS = 5
_LONGEST_NAME = 80


def markdown(result: Mapping[str, Any]) -> str:
    """The summary of what :func:`~tracesim.diff.diff_timelines` returned, with tables of what makes the difference."""
    attribution = result["attribution"]
    a, b, difference = (attribution[key] / 1e6 for key in ("step_a_ns", "step_b_ns", "difference_ns"))
    relative = f" ({100 * difference / a:+.2f} %)" if a else ""
    compared = bool(attribution["steps"])
    lines = [
        f"## Step time {a:.3f} ms -> {b:.3f} ms: {difference:+.3f} ms{relative}"
        if compared
        else "## Comparison of two runs",
        "",
        *(f"- {_text(describe_side(key, result[key]))}" for key in ("a", "b")),
    ]
    if compared:
        steps, ranks = len(attribution["steps"]), len(attribution["ranks"])
        lines.append(f"- mean over {steps} step(s) of {ranks} rank(s)")
    lines += ["", *(f"{_text(sentence)}\n" for sentence in result["summary"])]
    if compared:
        lines += _parts(attribution)
    for table in (
        _operations(result["operations"]),
        _host(result["host_in_launch_gaps"]),
        _memory(result["memory"]),
    ):
        if table:
            lines += ["", *table]
    return "\n".join(lines) + "\n"


def _parts(attribution: Mapping[str, Any]) -> list[str]:
    rows = [(PART_LABELS[key], f"{ns / 1e6:+.3f}") for key, ns in attribution["parts_ns"].items() if ns]
    return _table(
        ("part", "ms a step"), (*rows, ("**sum**", f"**{attribution['difference_ns'] / 1e6:+.3f}**"))
    )


def _operations(operations: Iterable[Mapping[str, Any]]) -> list[str]:
    shown = [o for o in operations if o["difference_ns"]][:_MOST_OPERATIONS]
    rows = [
        (
            f"`{_code(operation_label(o))}`",
            f"{o['count_a']:.4g} -> {o['count_b']:.4g}",
            f"{o['a_ns'] / 1e6:.3f}",
            f"{o['b_ns'] / 1e6:.3f}",
            f"{o['difference_ns'] / 1e6:+.3f}",
        )
        for o in shown
    ]
    return _table(("operation", "count", "a ms", "b ms", "b - a"), rows) if rows else []


def _host(gaps: Iterable[Mapping[str, Any]]) -> list[str]:
    rows = [
        (
            f"`{_code(row['name'])}`",
            *(f"{row[key] / 1e6:.3f}" for key in ("a_ns", "b_ns")),
            f"{row['difference_ns'] / 1e6:+.3f}",
        )
        for row in gaps
        if row["difference_ns"]
    ]
    return (
        _table(("host during launch gaps", "a ms", "b ms", "b - a"), rows[:_MOST_HOST_ROWS]) if rows else []
    )


def _memory(peaks: Iterable[Mapping[str, Any]]) -> list[str]:
    rows = list(peaks)
    names = list(dict.fromkeys(name for row in rows for name, size in row["parts_bytes"].items() if size))
    names = names if len(names) > 1 else []
    cells = [
        (
            rank_label(row),
            *(f"{row[key] / 2**30:.3f}" for key in ("a_bytes", "b_bytes")),
            f"{row['difference_bytes'] / 2**30:+.3f}",
            *(f"{row['parts_bytes'].get(name, 0) / 2**30:+.3f}" for name in names),
        )
        for row in rows
    ]
    headings = ("peak memory, GiB", "a", "b", "b - a", *(_text(name.replace("_", " ")) for name in names))
    return _table(headings, cells) if rows else []


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(headings) + " |", "|---" + "|---:" * (len(headings) - 1) + "|"]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _code(name: str) -> str:
    """A name inside a code span of a table cell."""
    short = name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 3] + "..."
    return short.replace("`", "'").replace("|", "\\|").replace("\n", " ")


def _text(name: str) -> str:
    """A name as plain text: nothing in it is markup."""
    return "".join("\\" + c if c in "\\`*_[]<>#|" else c for c in name.replace("\n", " "))
