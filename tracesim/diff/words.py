"""Why two runs differ, in a few sentences: the parts that count, and what is behind each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PART_LABELS = {
    "kernels": "kernels that both have",
    "optimizer": "optimizer",
    "copies": "copies and fills",
    "exposed_communication": "exposed communication",
    "waiting_for_peers": "waiting for peers",
    "bubble": "pipeline bubble",
    "launch_gaps": "launch gaps",
    "waiting_for_streams": "waiting for other streams",
    "unexplained_idle": "idle, unexplained",
    "unmatched_a": "only in a",
    "unmatched_b": "only in b",
}
"""The parts of a difference in words."""

_LEAST_SHARE = 0.1
"""Share of the largest part, or of the part it explains, below which nothing is said."""
_LEAST_MEMORY = 0.01
_MOST_REASONS = 3
_LONGEST_NAME = 72


def summary(result: Mapping[str, Any]) -> list[str]:
    """Sentences on the result of a comparison; one if no step is on both sides."""
    attribution = result["attribution"]
    if not attribution["steps"]:
        return ["No step is on both sides, so nothing is attributed.", *_memory(result["memory"])]
    difference, before = attribution["difference_ns"], attribution["step_a_ns"]
    memory = _memory(result["memory"])
    if not any(attribution["parts_ns"].values()):
        return [
            "The steps of b take as long as those of a, and for the same reasons.",
            _matched(result),
            *memory,
        ]
    relative = f" ({100 * difference / before:+.1f} %)" if before else ""
    parts = _largest((PART_LABELS[key], ns) for key, ns in attribution["parts_ns"].items())
    longer = "longer" if difference > 0 else "shorter"
    text = (
        f"is {abs(difference) / 1e6:.3f} ms {longer} than one of a{relative}"
        if difference
        else "is as long as one of a"
    )
    found = [f"A step of b {text}: {parts}."]
    found += [f"{label[:1].upper()}{label[1:]}: {text}." for label, text in _reasons(result)]
    return [*found, _matched(result), *memory]


def _reasons(result: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """For each part that counts, what it consists of."""
    parts = result["attribution"]["parts_ns"]
    most = max(map(abs, parts.values()))
    for key, ns in sorted(parts.items(), key=lambda item: -abs(item[1])):
        if abs(ns) < _LEAST_SHARE * most:
            continue
        if key == "launch_gaps":
            rows = [(f"in {row['name']}", row["difference_ns"]) for row in result["host_in_launch_gaps"]]
        else:
            rows = [
                (operation["operator"] or operation["name"], operation["difference_ns"])
                for operation in result["operations"]
                if _part_of(operation) == key
            ]
        # An operator has many kernels, and one name may stand for several operations.
        totals: dict[str, int] = {}
        for name, value in rows:
            totals[name] = totals.get(name, 0) + value
        text = _largest(((_short(name), value) for name, value in totals.items() if value * ns > 0), ns)
        if text:
            yield PART_LABELS[key], text


def _part_of(operation: Mapping[str, Any]) -> str:
    """The part that most of the time of an operation is in."""
    if operation["name_b"] is None:
        return "unmatched_a"
    if not operation["count_a"] and not operation["a_ns"]:
        return "unmatched_b"
    kind = operation["kind"]
    if kind in ("collective", "p2p"):
        return "exposed_communication"
    if kind in ("memcpy", "memset"):
        return "copies"
    return "optimizer" if kind == "optimizer" else "kernels"


def _largest(rows: Iterable[tuple[str, int]], of: int | None = None) -> str:
    """The largest of named times, those that are worth saying."""
    ordered = sorted(rows, key=lambda row: -abs(row[1]))[:_MOST_REASONS]
    least = _LEAST_SHARE * abs(ordered[0][1] if of is None else of) if ordered else 0
    return ", ".join(f"{name} {_signed(ns)} ms" for name, ns in ordered if ns and abs(ns) >= least)


def _matched(result: Mapping[str, Any]) -> str:
    matched = result["matched"]
    text = (
        f"{100 * result['matched_fraction']:.1f} % of device time is matched ({100 * matched['fraction_a']:.1f} % of "
        f"a, {100 * matched['fraction_b']:.1f} % of b)"
    )
    outside = [
        f"{matched[f'outside_{side}_ns'] / 1e6:.3f} ms of {side}"
        for side in ("a", "b")
        if matched[f"outside_{side}_ns"]
    ]
    return text + (f"; {' and '.join(outside)} lie outside of the compared steps." if outside else ".")


def _memory(peaks: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rank whose peak memory differs most, if that is worth saying."""
    worst = max(peaks, key=lambda peak: abs(peak["difference_bytes"]), default=None)
    if worst is None or abs(worst["difference_bytes"]) < _LEAST_MEMORY * max(worst["a_bytes"], 1):
        return []
    parts = sorted(worst["parts_bytes"].items(), key=lambda part: -abs(part[1]))
    of = ", ".join(f"{name} {_gib(size)}" for name, size in parts[:_MOST_REASONS] if size)
    return [f"Peak memory of {rank_label(worst)} differs by {_gib(worst['difference_bytes'])}: {of}."]


def _gib(size: int) -> str:
    return f"{size / 2**30:+.3f} GiB"


def rank_label(entry: Mapping[str, Any]) -> str:
    """``rank 3``, or ``rank 3 / 1`` where the ranks that are compared differ; ``?`` for an unknown number."""
    first, second = ("?" if entry[key] < 0 else str(entry[key]) for key in ("rank", "rank_b"))
    return f"rank {first}" + (f" / {second}" if first != second else "")


def operation_label(operation: Mapping[str, Any]) -> str:
    """The framework's operator where it is known, and the name of the slice."""
    return ": ".join(part for part in (operation["operator"], operation["name"]) if part)


def _signed(ns: int) -> str:
    return f"{ns / 1e6:+.3f}"


def _short(name: str) -> str:
    name = " ".join(name.split())
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 3] + "..."
