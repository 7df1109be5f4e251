"""Times that are sums of parts: of the optimizer step the update alone, and no host that waits between stages."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.fits.result import time_ms
from benchmarks.rows.row import MeasuredRow
from benchmarks.rows.training_rows import express
from benchmarks.step_figures import step_figures
from benchmarks.update_only import update_only_ms
from op_graphs.vocabulary import Phase
from tests.dense_scenarios import dense_mapping
from tracesim.lowering import lower_scenario
from tracesim.scenario import load_scenario
from tracesim.simulation import iteration_ms, simulate

ROW: dict[str, Any] = {
    "gpu": "A100",
    "gbs": 8,
    "mbs": 1,
    "metrics": {"iter_time_s": 0.1},
    "model": {"name": "GPT", "layers": 4, "hidden": 1024, "heads": 16, "seq": 1024},
    "num_gpus": 2,
    "parallel": {"tp": 1, "pp": 2, "dp": 1},
    "schedule": "1f1b",
    "table": "single-node",
}


def row_of(**changes: Any) -> MeasuredRow:
    return express({**ROW, **changes}, "row", "vtrain-ground-truth")


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("operation_us", [0.0, 100.0])
def test_without_replicas_the_kernels_around_the_update_are_what_is_left_out(optimizer, dtype, operation_us):
    scenario = load_scenario(
        dense_mapping(
            parallel={"dp": 1},
            training__optimizer=optimizer,
            training__dtype=dtype,
            hardware={"base": "a100-sxm-80g", "host": {"operation_us": operation_us}},
        )
    )
    found = simulate(scenario)
    operations, execution = found.graph.operations, found.execution
    around = {
        found.graph.strings[operations.name[row]]: int(execution.end[row] - execution.start[row])
        for row in range(len(operations))
        if operations.phase[row] == Phase.OPTIMIZER
    }
    update = around.pop(optimizer)
    assert update > 0
    assert {"zero_gradients", "gradient_norm", "gradient_clip", "master_to_model_weights"} <= set(around)
    left_out = iteration_ms(scenario) - update_only_ms(scenario, found.graph)
    if not operation_us:
        assert left_out == pytest.approx(sum(around.values()) / 1e6, abs=1e-6)
        return
    # Behind the backward pass the host launches one kernel after another; the last one runs, and so does the update.
    behind = len(around) - 1
    last = around["master_to_model_weights"]
    expected = behind * operation_us / 1e3 + (around["zero_gradients"] + last - update) / 1e6
    assert left_out == pytest.approx(expected, abs=0.01)


def test_the_reduction_of_gradients_stays():
    """With replicas that are reduced behind the backward pass, a slower network makes both times longer alike."""
    mappings = [
        dense_mapping(
            parallel={"dp": 4, "zero": 0},
            overlap__grad_reduce=False,
            hardware={
                "base": "a100-sxm-80g",
                "network": {"domain": {"bandwidth_gb_per_s": rate}},
                "host": {"operation_us": 0.0},
            },
        )
        for rate in (300.0, 3.0)
    ]
    fast, slow = (load_scenario(mapping) for mapping in mappings)
    whole = iteration_ms(slow) - iteration_ms(fast)
    part = update_only_ms(slow, lower_scenario(slow)) - update_only_ms(fast, lower_scenario(fast))
    assert part == pytest.approx(whole, rel=0.01)
    assert part > 0


@pytest.mark.parametrize(("table", "composed"), [("single-node", True), ("multi-node", False)])
def test_rows_of_one_table_are_sums(table, composed):
    row = row_of(table=table)
    assert row.update_only is composed
    assert row.scenario.hardware.memory.bandwidth_gb_per_s == (1555.0 if composed else 2039.0)
    assert row.scenario.overlap.p2p is composed


def test_the_scoreboard_and_the_fit_compare_the_same_time():
    row = row_of()
    figures = step_figures(row.scenario, False, False, False, update_only=True)
    expected = update_only_ms(row.scenario, lower_scenario(row.scenario))
    assert figures["update_only_time_ms"] == expected == time_ms(row.scenario, update_only=True)
    assert figures["iteration_time_ms"] == time_ms(row.scenario) > expected
    assert "update_only_time_ms" not in step_figures(row.scenario, False, False, False)
