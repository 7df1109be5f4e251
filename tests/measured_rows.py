"""Measured rows, and a simulator that needs no time, for the tests of the scoreboard."""

from __future__ import annotations

import copy
import json

from benchmarks import step_figures
from benchmarks.rows import RowFile, express

GPT_22B = {
    "framework": "Megatron-LM",
    "gbs": 4,
    "gpu": "A100-80GB-SXM",
    "mbs": 4,
    "metrics": {"iter_time_s": 1.1},
    "model": {
        "ffn": 24576,
        "heads": 64,
        "hidden": 6144,
        "layers": 48,
        "name": "GPT 22B",
        "seq": 2048,
        "vocab": 51200,
    },
    "num_gpus": 8,
    "parallel": {"dp": 1, "pp": 1, "sp": True, "tp": 8, "vpp": 1},
    "precision": "mixed fp16",
    "recompute": "selective (attention core)",
    "source": "korthikanti2022",
    "table": "Table 5",
}


def fake_report(scenario):
    """A simulator whose step takes 1 ms a layer and microbatch and 5 ms for the optimizer."""
    return {
        "iteration_time_ms": scenario.model.layers * scenario.training.num_microbatches + 5.0,
        "peak_allocated_blocks_gib": 10.0,
        "peak_reserved_gib": 12.0,
        "calculated_bubble_fraction": 0.1,
        "stages": [
            {
                "optimizer_ms": 5.0,
                "peak_allocated_blocks_gib": 10.0 - stage,
                "peak_reserved_gib": 12.0,
                "memory_at_peak_gib": dict.fromkeys(
                    ("weights", "gradients", "optimizer_states", "activations"), 2.0
                ),
                "layer_activations_gib": 3.0,
                "layer_state_gib": 4.0,
            }
            for stage in range(scenario.parallel.pp)
        ],
    }


def simulate_by(runner, monkeypatch):
    """Let the command simulate by a function of the scenario."""
    monkeypatch.setattr(step_figures, "step_figures", lambda scenario, *wanted: runner(scenario))


def changed(row, **changes):
    """The row with some fields replaced; a field of a mapping is written mapping__field."""
    row = copy.deepcopy(row)
    for path, value in changes.items():
        *outer, key = path.split("__")
        inner = row
        for part in outer:
            inner = inner[part]
        inner[key] = value
    return row


def expressed(row, tmp_path):
    return express(row, 0, RowFile(tmp_path / "rows.json", {}))


def write_rows(path, rows):
    path.write_text(json.dumps({"source": {"name": "test"}, "rows": rows}))
    return path


GOLDEN = {
    "source": "megatron-golden",
    "table": "gpt/some_test/golden_values_dev_dgx_a100.json",
    "gpu": "A100-80GB",
    "num_gpus": 8,
    "env": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    "megatron_args_full": {
        "num-layers": 12,
        "hidden-size": 512,
        "num-attention-heads": 8,
        "seq-length": 1024,
        "max-position-embeddings": 1024,
        "micro-batch-size": 4,
        "global-batch-size": 32,
        "bf16": True,
        "pipeline-model-parallel-size": 4,
        "attention-backend": "unfused",
    },
    "metrics": {"peak_alloc_gib": 2.5, "iter_time_s_median": 0.2},
}
