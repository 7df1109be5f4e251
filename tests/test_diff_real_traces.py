"""Pairs of real traces: everything adds up, what is the same model matches, and the known difference is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.chunk_pair import deepseek, pair_timeline
from op_graphs.vocabulary import OpKind, TrackRole
from tracesim.diff import compare_timelines, diff_timelines
from tracesim.diff.matcher import PIECE
from tracesim.readers import read_trace

pytestmark = pytest.mark.shared_data

PAIRS = {
    "control and test": ("hta/trace_diff/control", "hta/trace_diff/test"),
    "another reduction": (
        "torchrec/sst_long_a2a_optimizer_5",
        "torchrec/sst_long_a2a_optimizer_5_qcomm_run0",
    ),
    "data loader": (
        "kineto/resnet50_num_workers_0_worker0.1623143089861.pt.trace.json.gz",
        "kineto/resnet50_num_workers_4_worker0.1623212756351.pt.trace.json.gz",
    ),
    "another vendor": (
        "tracelens/h100__Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
        "tracelens/mi300__Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
    ),
}


@pytest.fixture(scope="module")
def results(shared_data: Path) -> dict[str, dict[str, Any]]:
    traces = shared_data / "traces"
    return {
        name: diff_timelines(*(read_trace(traces / path) for path in pair)) for name, pair in PAIRS.items()
    }


@pytest.mark.parametrize("name", PAIRS)
def test_parts_add_up_to_the_measured_difference(results, name):
    found = results[name]["attribution"]
    for entry in (found, *found["ranks"], *found["steps"]):
        assert sum(entry["parts_ns"].values()) == entry["difference_ns"]
    measured = results[name]["averages"]["metrics"]["iteration_time_ms"]["absolute"]
    assert found["difference_ns"] == pytest.approx(measured * 1e6, abs=1)


@pytest.mark.parametrize(
    ("name", "least_of_a", "least_of_b"),
    [
        # The test run is compiled: a tenth of its time are copies that the control run does not make.
        ("control and test", 0.99, 0.83),
        # The tenth of the second run is what packs its messages into fewer bits.
        ("another reduction", 0.999, 0.90),
        ("data loader", 0.999, 0.999),
        ("another vendor", 0.99, 0.98),
    ],
)
def test_most_of_the_device_time_is_matched(results, name, least_of_a, least_of_b):
    matched = results[name]["matched"]
    assert matched["fraction_a"] >= least_of_a
    assert matched["fraction_b"] >= least_of_b


def test_the_data_loader_is_what_differs(results):
    found = results["data loader"]
    parts = found["attribution"]["parts_ns"]
    assert parts["launch_gaps"] == pytest.approx(found["attribution"]["difference_ns"], rel=0.06)
    first = found["host_in_launch_gaps"][0]
    assert "DataLoader" in first["name"]
    assert first["difference_ns"] < -30_000_000


def test_kernels_of_two_vendors_match_by_what_they_compute(results):
    products = [o for o in results["another vendor"]["operations"] if o["kind"] == "gemm" and o["name_b"]]
    assert any("xmma_gemm" in o["name"] and o["name_b"].startswith("Cijk") for o in products)


def test_copies_that_one_run_does_not_make_are_listed(results):
    first = results["control and test"]["unmatched"]["b"][0]
    assert (first["name"], first["kind"]) == ("Memcpy DtoD (Device -> Device)", "memcpy")
    assert first["count"] > 4_000


def test_steps_of_a_pipelined_loop_are_as_long_as_its_iterations(results):
    # The host of the test run is a third of a step ahead, and its trace begins with the end of an iteration.
    found = results["control and test"]
    lengths = [step["step_b_ns"] for step in found["attribution"]["steps"]]
    assert max(lengths) < 1.07 * min(lengths)
    assert found["matched"]["outside_a_ns"] == 0
    assert found["matched"]["outside_b_ns"] == pytest.approx(56e6, rel=0.02)


def test_ranks_that_wait_are_told_from_those_that_transfer(results):
    ranks = results["another reduction"]["attribution"]["ranks"]
    assert [r["rank"] for r in ranks] == [0, 1, 2, 3]
    assert all(r["parts_ns"]["waiting_for_peers"] for r in ranks)


def test_measured_kernels_find_their_simulated_operations(shared_data):
    measured = read_trace(shared_data / "traces" / "deepseek" / "train.json.gz")
    comparison = compare_timelines(pair_timeline(deepseek()), measured)
    found, alignment = comparison.result, comparison.alignment
    assert found["matched"]["fraction_a"] >= 0.99
    assert found["matched"]["fraction_b"] >= 0.90
    assert sum(found["attribution"]["parts_ns"].values()) == found["attribution"]["difference_ns"]
    # Each of the four layers has its attention, its grouped products and its exchanges, in forward and backward.
    whole = alignment.how != PIECE
    kinds = [
        t.slices.kind[rows[whole]]
        for t, rows in ((alignment.a, alignment.row_a), (alignment.b, alignment.row_b))
    ]
    for kind, count in ((OpKind.ATTENTION, 8), (OpKind.GROUPED_GEMM, 16), (OpKind.COLLECTIVE, 16)):
        assert int(((kinds[0] == kind) & (kinds[1] == kind)).sum()) == count
    # What matches takes about as long: grouped products within a factor of two and a half.
    rows = np.flatnonzero(whole)[(kinds[0] == OpKind.GROUPED_GEMM) & (kinds[1] == OpKind.GROUPED_GEMM)]
    ratio = (
        alignment.b.slices.duration[alignment.row_b[rows]]
        / alignment.a.slices.duration[alignment.row_a[rows]]
    )
    assert ratio.max() < 2.5
    assert ratio.min() > 1 / 2.5


@pytest.mark.parametrize("seed", [1, 2])
def test_edits_of_a_real_trace_are_found(shared_data, seed):
    # 3 % of the kernels are renamed and 5 % take three times as long, and 2 % are gone from the device.
    a = read_trace(shared_data / "traces" / "hta" / "trace_diff" / "control")
    chance = np.random.default_rng(seed).random(len(a.slices))
    kernel = a.on_device() & ~np.isin(a.slices.kind, (OpKind.COLLECTIVE, OpKind.MEMCPY, OpKind.MEMSET))
    renamed, slower, gone = (
        kernel & (chance >= low) & (chance < low + share)
        for low, share in ((0, 0.03), (0.1, 0.05), (0.2, 0.02))
    )
    slices = a.slices.with_columns(
        name=np.where(renamed, len(a.strings), a.slices.name).astype(np.int32),
        duration=np.where(slower, 3 * a.slices.duration, a.slices.duration),
        # On a track of the host a slice is no part of the device's time.
        track=np.where(gone, np.flatnonzero(a.tracks.role == TrackRole.HOST)[0], a.slices.track).astype(
            np.int32
        ),
    )
    kept = np.flatnonzero(~gone[a.flows.target])
    b = replace(a, slices=slices, flows=a.flows.take(kept), strings=(*a.strings, "renamed"))
    alignment = compare_timelines(a, b).alignment
    partner = np.full(len(a.slices), -1)
    whole = alignment.how != PIECE
    partner[alignment.row_a[whole]] = alignment.row_b[whole]
    right = partner == np.arange(len(a.slices))
    # Where equal kernels follow each other, it cannot be told which one is gone.
    assert right[kernel & ~renamed & ~gone].mean() > 0.99
    assert right[renamed].mean() > 0.95
    assert (partner[gone] < 0).mean() > 0.8


@pytest.mark.parametrize("path", sorted({path for pair in PAIRS.values() for path in pair}))
def test_a_trace_against_itself(shared_data, path):
    timeline = read_trace(shared_data / "traces" / path)
    found = diff_timelines(timeline, timeline)
    assert found["matched_fraction"] == 1
    assert set(found["attribution"]["parts_ns"].values()) == {0}
    assert found["attribution"]["difference_ns"] == 0
