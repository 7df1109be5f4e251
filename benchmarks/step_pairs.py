"""Published runs of one layout with and without an overlap, beside what the simulation makes of the difference.

The pairs are torchtitan's with and without asynchronous tensor parallelism (``torchtitan-bench``, June 2025). What an
overlap saves is what contention takes back from it, so the speed-up of a pair tests contention with most other errors
cancelled. Row-wise float8 has no recipe here and is left out. Used by :mod:`benchmarks.fit`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """Speed-up of a step by an overlap: measured, and simulated without and with contention."""

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
