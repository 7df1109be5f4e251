"""``docs/accuracy.md``, written from the results of the scoreboard.

Prose stands in ``accuracy_page.md`` beside this file, with a line ``{{name}}`` where a table goes; what is known of a
source is in :mod:`benchmarks.source_notes`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.golden_memory import FAR_PCT, golden_memory
from benchmarks.intervals import coverage, quantiles, ratios_of, tail_percent
from benchmarks.microbatch_slopes import slopes, verdict
from benchmarks.setting_deltas import FIGURES as DELTA_UNITS
from benchmarks.setting_deltas import SIZE_LIMIT_PCT, deltas
from benchmarks.source_notes import note_of

TEMPLATE = Path(__file__).with_name("accuracy_page.md")
_WORST = 2
_REASONS = 12
_UNITS = {"time": "ms", "bubble": "%", "activations": ""}

Document = Mapping[str, Any]


def page(document: Document) -> str:
    """The page; ``document`` is what ``benchmarks.accuracy --json`` prints.

    Raises:
        ValueError: if the template asks for a table that is not known.
    """

    def fill(found: re.Match[str]) -> str:
        name, _, argument = found[1].partition(":")
        if name not in _TABLES:
            raise ValueError(f"{TEMPLATE.name} asks for {name!r}; known are {', '.join(_TABLES)}")
        return _TABLES[name](document, argument)

    text = re.sub(r"^\{\{([^}]+)\}\}$", fill, TEMPLATE.read_text("utf-8"), flags=re.MULTILINE)
    return text.rstrip() + "\n"


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heading) + " |", "|" + "---|" * len(heading)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _counts(document: Document, _: str) -> str:
    simulated, skipped = len(document["rows"]), len(document["skipped"])
    return f"{simulated} of {simulated + skipped} rows could be expressed and are simulated; {skipped} are left out."


def _sources(document: Document, _: str) -> str:
    rows = []
    for source, figures in document["sources"].items():
        for figure, found in figures.items():
            if not found["n"]:
                continue
            rank = "-" if found["spearman"] is None else f"{found['spearman']:.3f}"
            errors = (
                f"{found['mean_abs_pct']:.2f}",
                f"{found['mean_signed_pct']:+.2f}",
                f"{found['max_abs_pct']:.2f}",
            )
            in_fit = note_of(source).in_fit if figure == "time" else "no"
            rows.append((f"`{source}`", figure, str(found["n"]), *errors, rank, in_fit))
    heading = ("source", "figure", "rows", "mean \\|error\\| %", "mean error %", "largest %", "Spearman")
    return _table((*heading, "took part in a fit"), rows).replace("\\\\|", "\\|")


def _runs(document: Document, _: str) -> str:
    return _table(
        ("source", "runs"), ((f"`{source}`", note_of(source).runs) for source in document["sources"])
    )


def _skipped(document: Document, _: str) -> str:
    counts: dict[str, int] = {}
    for reasons in document["skip_reasons"].values():
        for reason, count in reasons.items():
            counts[reason] = counts.get(reason, 0) + count
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    rows = [(reason, str(count)) for reason, count in ordered[:_REASONS]]
    rest = sum(count for _, count in ordered[_REASONS:])
    if rest:
        rows.append((f"{len(ordered) - _REASONS} other reasons", str(rest)))
    return _table(("why not expressed", "rows"), rows)


def _worst(document: Document, _: str) -> str:
    rows = []
    for source in document["sources"]:
        timed = [row for row in document["rows"] if row["source"] == source and "time" in row]
        timed.sort(key=lambda row: (-abs(row["time"]["error_pct"]), row["row"]))
        for place, row in enumerate(timed[:_WORST]):
            explains = note_of(source).explains if place == 0 else ""
            rows.append((f"`{source}`", row["row"], f"{row['time']['error_pct']:+.1f}", explains))
    return _table(("source", "row", "error of the time, %", "what explains it"), rows)


def _slopes(document: Document, _: str) -> str:
    found = slopes(document["rows"])
    rows = []
    for one in found:
        fixed = one.fixed_error_pct
        rows.append(
            (
                f"`{one.source}`",
                one.layout,
                ", ".join(map(str, one.counts)),
                f"{one.measured_slope:.2f}",
                f"{one.slope_error_pct:+.1f}",
                f"{one.measured_fixed:.1f}",
                f"{one.fixed_error:.1f}",
                "-" if fixed is None else f"{fixed:+.0f}",
                f"{one.scatter_pct:.2f}",
            )
        )
    heading = (
        "source",
        "layout",
        "microbatches",
        "ms each",
        "error %",
        "fixed, ms",
        "standard error",
        "error %",
        "scatter %",
    )
    return f"{_table(heading, rows)}\n\n{verdict(found)}"


def _deltas(document: Document, _: str) -> str:
    found = deltas(document["rows"])
    rows = []
    for one in found:
        error = one.size_error_pct
        rows.append(
            (
                one.row,
                one.baseline.partition(":")[0],
                f"{one.figure}, {DELTA_UNITS[one.figure]}",
                f"{one.measured:+.2f}",
                f"{one.predicted:+.2f}",
                "-" if error is None else f"{error:+.0f}",
            )
        )
    verdict = (
        f"The sign is right in {sum(one.has_right_sign for one in found)} of {len(found)}, the size within "
        f"{SIZE_LIMIT_PCT:.0f} % in {sum(one.has_right_size for one in found)}."
    )
    heading = ("row", "against", "figure", "measured change", "predicted", "error %")
    return f"{_table(heading, rows)}\n\n{verdict}"


def _golden(document: Document, _: str) -> str:
    found = golden_memory(document["rows"])
    if found is None:
        return "No row of this source took part in these results."
    count = len(found.errors)
    near = found.within(FAR_PCT)
    counts = _table(
        (
            "rows",
            "not determined",
            "median of the error %",
            "within 1 %",
            f"within {FAR_PCT:.0f} %",
            "with its sign",
        ),
        [
            (
                str(count),
                str(found.undetermined),
                f"{found.median_error:.2f}",
                str(found.within(1.0)),
                f"{near} ({100 * near / count:.1f} %)",
                f"{found.median_signed_error:+.2f}",
            )
        ],
    )
    far = _table(
        (f"rows beyond {FAR_PCT:.0f} %", "error %", "reason"),
        (
            (
                str(len(errors)),
                f"{errors[0]:+.1f} to {errors[-1]:+.1f}" if len(errors) > 1 else f"{errors[0]:+.1f}",
                reason,
            )
            for reason, errors in found.far
        ),
    )
    return f"{counts}\n\n{far}"


def _ranges(document: Document, _: str) -> str:
    rows = []
    for figure, by_source in ratios_of(document["rows"]).items():
        if len(by_source) < 2:
            continue
        tail = tail_percent(by_source)
        low, high = quantiles(by_source, (tail, 100 - tail)).tolist()
        held = coverage(by_source, tail)
        inside = sum(share * len(by_source[source]) for source, share in held.items())
        count = sum(map(len, by_source.values()))
        rows.append(
            (
                figure,
                str(count),
                str(len(by_source)),
                f"{low:.3f} to {high:.3f}",
                f"{sum(held.values()) / len(held):.0%}",
                f"{inside / count:.0%}",
            )
        )
    heading = ("prediction", "rows", "sources", "measured over predicted")
    return _table((*heading, "inside the range of the other sources, a source", "a row"), rows)


def _rows(document: Document, source: str) -> str:
    own = [row for row in document["rows"] if row["source"] == source]
    figures = [name for name in document["sources"].get(source, {}) if any(name in row for row in own)]
    heading = ["row"]
    for name in figures:
        unit = _UNITS.get(name, "GiB")
        heading += [f"{name}, {unit}" if unit else name, "predicted", "error %"]
    lines = []
    for row in own:
        cells = [row["row"]]
        for name in figures:
            pair = row.get(name)
            cells += (
                ["", "", ""]
                if pair is None
                else [f"{pair['measured']:,.2f}", f"{pair['predicted']:,.2f}", f"{pair['error_pct']:+.2f}"]
            )
        lines.append(cells)
    return _table(heading, lines)


_TABLES: dict[str, Callable[[Document, str], str]] = {
    "counts": _counts,
    "sources": _sources,
    "runs": _runs,
    "skipped": _skipped,
    "worst": _worst,
    "slopes": _slopes,
    "deltas": _deltas,
    "golden": _golden,
    "ranges": _ranges,
    "rows": _rows,
}
