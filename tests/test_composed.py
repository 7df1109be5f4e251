"""Times that are sums of parts: of the optimizer step the update alone, nothing that hides, no wait between stages."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.composed import composed_ms
from benchmarks.fits.result import time_ms
from benchmarks.rows.row import MeasuredRow
from benchmarks.rows.training_rows import express
from benchmarks.step_figures import step_figures
from op_graphs.vocabulary import Phase, Stream
from tests.dense_scenarios import dense_mapping
from tracesim.lowering import lower_scenario
from tracesim.scenario import Scenario, load_scenario
from tracesim.simulation import iteration_ms, simulate, step_durations

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
    left_out = iteration_ms(scenario) - composed_ms(scenario, found.graph)
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
    part = composed_ms(slow, lower_scenario(slow)) - composed_ms(fast, lower_scenario(fast))
    assert part == pytest.approx(whole, rel=0.01)
    assert part > 0


def hidden_reduces(rate: float, operation_us: float) -> Scenario:
    """Two tensor-parallel ranks whose all-reduces are short beside what the host takes, one stage, one replica."""
    return load_scenario(
        dense_mapping(
            parallel={"tp": 2},
            overlap__grad_reduce=False,
            hardware={
                "base": "a100-sxm-80g",
                "network": {"domain": {"bandwidth_gb_per_s": rate}},
                "host": {"operation_us": operation_us},
            },
        )
    )


def test_all_reduces_of_layers_do_not_hide_behind_launches():
    fast, slow = hidden_reduces(300.0, 500.0), hidden_reduces(30.0, 500.0)
    assert iteration_ms(slow) == pytest.approx(iteration_ms(fast), rel=0.01)
    lengthened = 0
    for scenario, sign in ((slow, 1), (fast, -1)):
        graph = lower_scenario(scenario)
        reduces = (graph.operations.stream == Stream.TP) & (graph.operations.layer >= 0)
        lengthened += sign * int(
            step_durations(scenario, graph)[reduces & (graph.operations.rank == 0)].sum()
        )
    assert lengthened > 0
    part = composed_ms(slow, lower_scenario(slow)) - composed_ms(fast, lower_scenario(fast))
    assert part == pytest.approx(lengthened / 1e6, rel=1e-6)


@pytest.mark.parametrize("replicas", [2, 4])
def test_gradients_beyond_the_largest_timed_all_reduce_take_their_bytes_over_the_bus_bandwidth(
    monkeypatch, replicas
):
    """That is the time of an all-reduce without its factor of ``2 (n - 1) / n``, which is one of two ranks."""
    scenario = load_scenario(
        dense_mapping(
            parallel={"dp": replicas, "zero": 0},
            overlap__grad_reduce=False,
            hardware={"base": "a100-sxm-80g", "host": {"operation_us": 0.0}},
        )
    )
    graph = lower_scenario(scenario)
    operations = graph.operations
    reduces = (
        (operations.stream == Stream.DP) & (operations.phase != Phase.OPTIMIZER) & (operations.rank == 0)
    )
    reduced_ms = int(step_durations(scenario, graph)[reduces].sum()) / 1e6
    below = composed_ms(scenario, graph)
    monkeypatch.setattr("benchmarks.composed.LARGEST_TIMED_BYTES", 0)
    saved = below - composed_ms(scenario, graph)
    assert saved == pytest.approx(reduced_ms * (1 - replicas / (2 * (replicas - 1))), abs=1e-5)


@pytest.mark.parametrize(("tp", "words"), [(1, 50257), (2, 50256), (8, 50256)])
def test_rows_that_are_sums_recompute_nothing_and_pad_no_vocabulary(tp, words):
    parts = row_of(parallel={"tp": tp, "pp": 1, "dp": 1}, num_gpus=tp).scenario
    assert (parts.training.recompute.mode, parts.training.cross_entropy) == ("none", "torch")
    assert parts.model.padded_vocab(tp) == parts.model.vocab_size == words
    whole = row_of(table="multi-node", parallel={"tp": tp, "pp": 1, "dp": 1}, num_gpus=tp).scenario
    assert (whole.training.recompute.mode, whole.training.cross_entropy) == ("full", "unfused")
    assert whole.model.padded_vocab(tp) % (128 * tp) == 0


@pytest.mark.parametrize(("table", "composed"), [("single-node", True), ("multi-node", False)])
def test_rows_of_one_table_are_sums(table, composed):
    row = row_of(table=table)
    assert row.composed is composed
    assert row.scenario.hardware.memory.bandwidth_gb_per_s == (1555.0 if composed else 2039.0)
    assert row.scenario.overlap.p2p is composed


def test_the_scoreboard_and_the_fit_compare_the_same_time():
    row = row_of()
    figures = step_figures(row.scenario, False, False, False, composed=True)
    expected = composed_ms(row.scenario, lower_scenario(row.scenario))
    assert figures["composed_time_ms"] == expected == time_ms(row.scenario, composed=True)
    assert figures["iteration_time_ms"] == time_ms(row.scenario) > expected
    assert "composed_time_ms" not in step_figures(row.scenario, False, False, False)
