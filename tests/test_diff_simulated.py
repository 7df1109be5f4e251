"""Simulated runs against each other: what a changed scenario changes is where the difference is."""

from __future__ import annotations

from pathlib import Path

import pytest

from op_graphs.timeline import Timeline
from tracesim.diff import diff_timelines
from tracesim.scenario import load_scenario
from tracesim.simulation import simulate

SCENARIO = """\
model: {base: llama3.2-1b, layers: 4}
hardware: h100-sxm
parallel: {tp: 2, sp: true, pp: 2, dp: 2}
training: {num_microbatches: 6, seq_len: 512}
"""


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scenario") / "small.yaml"
    path.write_text(SCENARIO)
    return path


def simulated(scenario: Path, *changes: str) -> Timeline:
    return simulate(load_scenario(scenario, changes)).timeline()


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        # What else changes with these is waiting: for the other stage, for peers, and gaps between kernels.
        ("hardware.network.domain.bandwidth_gb_per_s=100", {"exposed_communication"}),
        ("schedule=gpipe", set()),
        ("training.recompute=full", {"unmatched_b"}),
        ("hardware=a100-sxm-80g", {"kernels", "optimizer", "exposed_communication"}),
    ],
)
def test_a_changed_scenario(scenario, change, parts):
    result = diff_timelines(simulated(scenario), simulated(scenario, change))
    found = result["attribution"]
    for rank in found["ranks"]:
        assert sum(rank["parts_ns"].values()) == rank["difference_ns"]
    waiting = {"bubble", "waiting_for_peers", "launch_gaps", "waiting_for_streams"}
    told = {key for key, value in found["parts_ns"].items() if value} - waiting
    # A schedule moves what is exposed without changing what there is.
    assert told - parts <= ({"exposed_communication"} if change == "schedule=gpipe" else set())
    assert parts <= told
    assert result["matched"]["fraction_a"] == 1


def test_microbatches_match_by_their_number_whatever_their_order(scenario):
    result = diff_timelines(simulated(scenario), simulated(scenario, "schedule=gpipe"))
    assert result["matched_fraction"] == 1
    assert result["unmatched"] == {"a": [], "b": []}


def test_what_is_recomputed_is_only_in_the_second_run(scenario):
    result = diff_timelines(simulated(scenario), simulated(scenario, "training.recompute=full"))
    assert result["unmatched"]["a"] == []
    names = {u["name"] for u in result["unmatched"]["b"]}
    assert {"fc1", "fc2", "qkv", "proj"} <= names
    assert all(m["parts_bytes"]["activations"] == m["difference_bytes"] < 0 for m in result["memory"])
