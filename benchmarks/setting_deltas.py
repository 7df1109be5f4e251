"""What changing one setting did to time and memory, measured and predicted, in sources that are meant for that.

Rows that a source has under one heading differ in a setting; each is held against the first of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

SOURCES = frozenset({"megatron-bridge-ablations"})
FIGURES = {"time": "ms", "allocated": "GiB"}
SIZE_LIMIT_PCT = 30.0


@dataclass(frozen=True)
class Delta:
    """Change of a figure from the first row of a heading to another, in the figure's unit."""

    source: str
    baseline: str
    row: str
    figure: str
    measured: float
    predicted: float

    @property
    def has_right_sign(self) -> bool:
        """Whether both go the same way."""
        return self.measured * self.predicted > 0

    @property
    def size_error_pct(self) -> float | None:
        """Error of the change; None where nothing changed."""
        return 100 * (self.predicted / self.measured - 1) if self.measured else None

    @property
    def has_right_size(self) -> bool:
        """Whether the change is within :data:`SIZE_LIMIT_PCT`."""
        return self.size_error_pct is not None and abs(self.size_error_pct) <= SIZE_LIMIT_PCT


def heading(label: str) -> str:
    """What rows that differ in a setting have in common: the label of a row without its number."""
    return re.sub(r"^row \d+: ", "", label)


def deltas(rows: Iterable[Mapping[str, Any]]) -> list[Delta]:
    """The changes among ``rows``, which are those in the JSON of the scoreboard."""
    first: dict[tuple[str, str], Mapping[str, Any]] = {}
    found = []
    for row in rows:
        if row["source"] not in SOURCES:
            continue
        baseline = first.setdefault((row["source"], heading(row["row"])), row)
        for figure in FIGURES:
            if baseline is row or figure not in row or figure not in baseline:
                continue
            measured, predicted = (
                row[figure][side] - baseline[figure][side] for side in ("measured", "predicted")
            )
            found.append(Delta(row["source"], baseline["row"], row["row"], figure, measured, predicted))
    return found
