"""How far the memory of ``megatron-golden`` is off, and what is known of the rows that are furthest off."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

SOURCE = "megatron-golden"
FAR_PCT = 3.0
REASONS: tuple[tuple[str, str], ...] = (
    (
        r"bert/bert_release",
        "BERT releases of 0.45 GiB: 51 to 128 MiB; the dense layer and norm before BERT's output matrix are not "
        "lowered, the rest is not explained",
    ),
    (r"bert/", "BERT: the same layer, and its states"),
    (r"muon", "the layout of the distributed Muon; equal tests differ by 150 MiB between GPUs"),
    (r"fine_grained_offloading", "which tensors are on the host at the peak"),
    (r"gb200", "an older container: cuBLAS took 8.125 MiB there, not 32"),
    (r"moe/.*golden_values_dev\.json", "the GPU is not named; its siblings on named GPUs are nearer"),
    (r"moe/.*lts", "the code of the time kept fewer tensors"),
)
"""Pattern in the name of a row -> what explains its error; the first that matches counts."""
UNEXPLAINED = "not explained"


@dataclass(frozen=True)
class GoldenMemory:
    """Errors in % of the rows that their settings determine."""

    expressed: int
    undetermined: int
    errors: tuple[float, ...]
    far: tuple[tuple[str, tuple[float, ...]], ...]
    """Reason -> errors of the rows that are off by more than :data:`FAR_PCT`, in the order of :data:`REASONS`."""

    def within(self, percent: float) -> int:
        """Rows that are off by so much at the most."""
        return sum(abs(error) <= percent for error in self.errors)

    @property
    def median_error(self) -> float:
        """Median of the errors without their signs."""
        return median(map(abs, self.errors))

    @property
    def median_signed_error(self) -> float:
        """Median of the errors."""
        return median(self.errors)


def golden_memory(rows: Sequence[Mapping[str, Any]]) -> GoldenMemory | None:
    """The errors among ``rows``, which are those in the JSON of the scoreboard; None without any."""
    own = [row for row in rows if row["source"] == SOURCE and "allocated" in row]
    errors = {row["row"]: row["allocated"]["error_pct"] for row in own if not row["undetermined"]}
    if not errors:
        return None
    far: dict[str, list[float]] = {reason: [] for reason in (*(why for _, why in REASONS), UNEXPLAINED)}
    for name, error in errors.items():
        if abs(error) > FAR_PCT:
            far[_reason(name)].append(error)
    return GoldenMemory(
        len(own),
        sum(1 for row in own if row["undetermined"]),
        tuple(errors.values()),
        tuple((reason, tuple(sorted(found))) for reason, found in far.items() if found),
    )


def _reason(name: str) -> str:
    return next((reason for pattern, reason in REASONS if re.search(pattern, name)), UNEXPLAINED)
