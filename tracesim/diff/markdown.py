"""A comparison as Markdown, to paste into a pull request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tracesim.diff.tables import PART_LABELS, describe_side, operation_label

_MOST_OPERATIONS = 10
_LONGEST_NAME = 80


def markdown(result: Mapping[str, Any]) -> str:
    """The summary of what :func:`~tracesim.diff.diff_timelines` returned, with tables of parts and operations."""
    attribution = result["attribution"]
    a, b, difference = (attribution[key] / 1e6 for key in ("step_a_ns", "step_b_ns", "difference_ns"))
    lines = [f"- {_text(describe_side(key, result[key]))}" for key in ("a", "b")]
    if not attribution["steps"]:
        return "\n".join(["## Comparison of two runs", "", *lines, "", "No step is on both sides.", ""])
    relative = f" ({100 * difference / a:+.2f} %)" if a else ""
    steps = len(attribution["steps"])
    lines = [
        f"## Step time {a:.3f} ms -> {b:.3f} ms: {difference:+.3f} ms{relative}",
        "",
        *lines,
        f"- mean over {steps} step(s) of {len(attribution['ranks'])} rank(s); "
        f"{100 * result['matched_fraction']:.1f} % of device time matched",
        "",
    ]
    lines += _table(
        ("part", "ms a step"),
        (
            *((PART_LABELS[key], f"{ns / 1e6:+.3f}") for key, ns in attribution["parts_ns"].items() if ns),
            ("**sum**", f"**{difference:+.3f}**"),
        ),
    )
    operations = [o for o in result["operations"] if o["difference_ns"]][:_MOST_OPERATIONS]
    if operations:
        rows = [
            (
                f"`{_code(operation_label(o))}`",
                f"{o['count_a']:.4g} -> {o['count_b']:.4g}",
                f"{o['a_ns'] / 1e6:.3f}",
                f"{o['b_ns'] / 1e6:.3f}",
                f"{o['difference_ns'] / 1e6:+.3f}",
            )
            for o in operations
        ]
        lines += ["", *_table(("operation", "count", "a ms", "b ms", "b - a"), rows)]
    if result["memory"]:
        peaks = [
            (
                f"rank {m['rank']}",
                *(f"{m[key] / 2**30:.3f}" for key in ("a_bytes", "b_bytes", "difference_bytes")),
            )
            for m in result["memory"]
        ]
        lines += ["", *_table(("peak memory, GiB", "a", "b", "b - a"), peaks)]
    return "\n".join(lines) + "\n"


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
