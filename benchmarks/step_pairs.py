"""Published runs of one layout that differ in one setting, beside what the simulation makes of the difference.

- :func:`step_pairs`: torchtitan's with and without asynchronous tensor parallelism (``torchtitan-bench``, June 2025).
  What an overlap saves is what contention takes back from it, so the speed-up of a pair tests contention with most
  other errors cancelled.
- :func:`setting_pairs`: every row of ``megatron-bridge-ablations`` beside the first of its heading.
- :func:`chunk_pairs`: the pair of chunks of DeepSeek-V3's trace (:mod:`benchmarks.chunk_pair`).

No parameter is fitted on them: they say what the parameters fitted on kernels make of whole steps. Used by
:mod:`benchmarks.fit`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.chunk_pair import TRACE_HIDDEN, TRACE_MS, deepseek, run_pair
from benchmarks.fits.result import expressed
from benchmarks.rows import MeasuredRow
from benchmarks.rows.training_rows import scenario_for
from benchmarks.setting_deltas import heading
from tracesim.scenario import Scenario
from tracesim.simulation import simulate

_ASYNCHRONOUS = "torchtitan-bench"


@dataclass(frozen=True)
class StepPair:
    """Speed-up of a step by a setting: measured, and simulated without and with contention."""

    layout: str
    measured: float
    without_contention: float
    with_contention: float


def step_pairs(data: Path) -> list[StepPair]:
    """All pairs of the source below ``data`` that can be expressed."""
    rows = json.loads((data / "measured" / f"{_ASYNCHRONOUS}.json").read_text())["rows"]
    found: dict[str, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for row in rows:
        if "async TP" in row.get("table", ""):
            layout = f"{row['model']['name']}, {row['precision']}, {row['num_gpus']} GPUs"
            found[layout][row["technique"].split(" TP")[0]] = row
    pairs = []
    for layout, both in found.items():
        tokens = {name: row["metrics"]["tokens_per_s_per_gpu"] for name, row in both.items()}
        scenarios = [scenario_for(both[name], layout, _ASYNCHRONOUS) for name in ("vanilla", "async")]
        free, shared = (_speed_up(scenarios[0], scenarios[1], contention=on) for on in (False, True))
        pairs.append(StepPair(layout, tokens["async"] / tokens["vanilla"], free, shared))
    return pairs


def setting_pairs(data: Path) -> list[StepPair]:
    """The rows of ``megatron-bridge-ablations`` below ``data`` beside the first of their heading."""
    first: dict[str, MeasuredRow] = {}
    pairs = []
    for _, row in expressed([data / "measured" / "megatron-bridge-ablations.json"]):
        before = first.setdefault(heading(row.label), row)
        if before is row or not before.time_ms or not row.time_ms:
            continue
        free, shared = (_speed_up(before.scenario, row.scenario, contention=on) for on in (False, True))
        pairs.append(StepPair(row.label, before.time_ms / row.time_ms, free, shared))
    return pairs


@dataclass(frozen=True)
class ChunkFigure:
    """A figure of DeepSeek-V3's pair of chunks: measured, and simulated without and with contention."""

    figure: str
    measured: float
    without_contention: float
    with_contention: float


def chunk_pairs() -> list[ChunkFigure]:
    """Time of the pair, and the part of its exchanges that is hidden."""
    free, shared = (run_pair(deepseek(contention=contention)) for contention in (False, True))
    return [
        ChunkFigure("ms", TRACE_MS, free.time / 1e6, shared.time / 1e6),
        ChunkFigure(
            "exchanges hidden, %", 100 * TRACE_HIDDEN, 100 * free.hidden_share, 100 * shared.hidden_share
        ),
    ]


def _with_contention(scenario: Scenario, on: bool) -> Scenario:
    return replace(scenario, overlap=replace(scenario.overlap, contention=on))


def _speed_up(before: Scenario, after: Scenario, *, contention: bool) -> float:
    return _step_ms(_with_contention(before, contention)) / _step_ms(_with_contention(after, contention))


def _step_ms(scenario: Scenario) -> float:
    return float(simulate(scenario).report["iteration_time_ms"])
