"""Published runs of one layout that differ in one setting, beside what the simulation makes of the difference.

- :func:`step_pairs`: torchtitan's with and without asynchronous tensor parallelism (``torchtitan-bench``, June 2025).
  What an overlap saves is what contention takes back from it, so the speed-up of a pair tests contention with most
  other errors cancelled. Row-wise float8 has no recipe here and is left out.
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
from benchmarks.setting_deltas import heading
from tracesim.scenario import Scenario, load_scenario
from tracesim.simulation import simulate

_MODELS = {"Llama 3.1 8B": "llama3-8b", "Llama 3.1 70B": "llama3-70b"}
_DTYPES = {"bf16": "bf16", "float8 tensorwise": "fp8-tensorwise"}
_RECOMPUTE: dict[str, Any] = {"full AC": "full", "per-op SAC": {"keep": "every-second-product"}}
_HARDWARE = {"base": "h100-sxm", "memory": {"bandwidth_gb_per_s": 2400.0}}
"""The source's H100 has HBM2e. Its 500 W limit is not modelled."""
_SEQUENCE = 8192


@dataclass(frozen=True)
class StepPair:
    """Speed-up of a step by a setting: measured, and simulated without and with contention."""

    layout: str
    measured: float
    without_contention: float
    with_contention: float


def step_pairs(data: Path) -> list[StepPair]:
    """All pairs of the source below ``data`` that can be expressed."""
    rows = json.loads((data / "measured" / "torchtitan-bench.json").read_text())["rows"]
    found: dict[str, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for row in rows:
        if "async TP" in row.get("table", "") and row["precision"] in _DTYPES:
            layout = f"{row['model']['name']}, {row['precision']}, {row['num_gpus']} GPUs"
            found[layout][row["technique"].split(" TP")[0]] = row
    pairs = []
    for layout, both in found.items():
        tokens = {name: row["metrics"]["tokens_per_s_per_gpu"] for name, row in both.items()}
        free, shared = (
            _step_ms(_scenario(both["vanilla"], overlapped=False, contention=contention))
            / _step_ms(_scenario(both["vanilla"], overlapped=True, contention=contention))
            for contention in (False, True)
        )
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
        free, shared = (
            _step_ms(_with_contention(before.scenario, on)) / _step_ms(_with_contention(row.scenario, on))
            for on in (False, True)
        )
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


def _scenario(row: Mapping[str, Any], *, overlapped: bool, contention: bool) -> Scenario:
    parallel = row["parallel"]
    return load_scenario(
        {
            "name": row["model"]["name"],
            "model": _MODELS[row["model"]["name"]],
            "hardware": _HARDWARE,
            "parallel": {"tp": parallel["tp"], "sp": True, "dp": parallel["fsdp"], "zero": 3},
            "training": {
                "seq_len": _SEQUENCE,
                "micro_batch_size": row["local_batch"],
                "num_microbatches": 1,
                "dtype": _DTYPES[row["precision"]],
                "recompute": _RECOMPUTE[row["recompute"]] if row["precision"] == "bf16" else "full",
            },
            "overlap": {"tp": "async-tp" if overlapped else False, "contention": contention},
        }
    )


def _step_ms(scenario: Scenario) -> float:
    return float(simulate(scenario).report["iteration_time_ms"])
