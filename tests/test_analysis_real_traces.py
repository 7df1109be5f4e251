"""What is known of real traces is found in them: late ranks, a stalled device, a long pipeline stage."""

from __future__ import annotations

import numpy as np
import pytest

from tracesim.analysis import Analysis, analyze, describe
from tracesim.readers import read_trace

pytestmark = pytest.mark.shared_data


@pytest.fixture(scope="module")
def analyses(shared_data):
    known: dict[str, Analysis] = {}

    def get(*names: str) -> Analysis:
        key = names[0]
        if key not in known:
            known[key] = analyze(read_trace([shared_data / "traces" / name for name in names]))
        return known[key]

    return get


TP2 = ("megatron-lm/tp2_v100/rank0.pt.trace.json.gz", "megatron-lm/tp2_v100/rank1.pt.trace.json.gz")
DLRM = "param/dlrm_8rank_v100/kineto"
SETS = [
    (DLRM,), TP2, ("torchrec/sst_long_a2a_optimizer_5",), ("hta/nccl_parser_config",), ("hta/trace_diff/control",),
    ("hta/cpu_only",), ("deepseek/train.json.gz",), ("tracelens/inference__vllm_decode_full__graph_execution.json.gz",),
]  # fmt: skip


@pytest.mark.parametrize("names", SETS, ids=lambda names: names[0].split("/")[1])
def test_parts_and_paths_add_up_to_the_step(analyses, names):
    analysis = analyses(*names)
    assert analysis.steps
    for step in analysis.steps:
        found = step.breakdown
        assert sum(step.idle.totals().values()) == found.idle
        assert (
            found.compute + found.optimizer + found.exposed + found.memory + found.idle == step.window.length
        )
        assert sum(step.path.totals().values()) == step.window.length
        for stream in step.streams:
            assert stream.busy + sum(stream.idle.values()) == step.window.length
    for path in analysis.paths:
        assert sum(path.totals().values()) == path.window.length


def ranks_in_order_of_last_arrival(analysis: Analysis) -> list[int]:
    transfers = analysis.transfers
    row = transfers.matches.row[transfers.last_member]
    return analysis.timeline.ranks.rank[analysis.timeline.slice_ranks()[row]].tolist()


def test_dlrm_rank_7_is_late_then_5_then_4(analyses):
    analysis = analyses(DLRM)
    result = describe(analysis)
    found = result["communication"]
    assert (found["slices"], found["matched_slices"], found["operations"], found["unmatched"]) == (
        64,
        64,
        8,
        {},
    )
    assert ranks_in_order_of_last_arrival(analysis) == [7] * 5 + [5] * 2 + [4]
    assert {s["rank"]: s["last"] for s in result["stragglers"]} == {
        0: 0, 1: 0, 2: 0, 3: 0, 4: 1, 5: 2, 6: 0, 7: 5,
    }  # fmt: skip
    assert found["largest_end_spread_ns"] <= 7_000
    # 96 % of the time in communication kernels is waiting
    assert found["wait_ns"] / (found["wait_ns"] + found["transfer_ns"]) == pytest.approx(0.965, abs=0.005)
    assert not any(rank["clock_corrected"] for rank in result["ranks"])


def test_tp2_rank_1_waits_for_rank_0_whose_device_stalls(analyses):
    analysis = analyses(*TP2)
    result = describe(analysis)
    assert (result["communication"]["matched_slices"], result["communication"]["operations"]) == (26, 13)
    assert ranks_in_order_of_last_arrival(analysis) == [0] * 13
    late, waiting = result["stragglers"]
    assert (late["last"], late["waited_ns"], waiting["last"]) == (13, 0, 0)
    assert waiting["median_wait_ns"] == pytest.approx(2_400_000, rel=0.02)
    waits = analysis.transfers.wait[analysis.transfers.wait > 0]
    assert ((waits > 2.3e6) & (waits < 2.5e6)).sum() == 9
    # rank 0 idles 53.7 ms between bursts although its kernels were launched long before
    stalled, waiting_device = (step.stalls for step in analysis.steps)
    assert stalled.total == pytest.approx(53.7e6, abs=0.1e6)
    assert waiting_device.count == 0
    assert {"straggler", "device_stall"} <= {finding["what"] for finding in result["findings"]}
    # nothing of it is put on the host
    assert analysis.steps[0].idle.totals()["unknown"] > 52e6


def test_torchrec_collectives_are_matched_from_the_end(analyses):
    """The ranks show 32, 32, 30 and 32 collectives; rank 2 is the late one."""
    result = describe(analyses("torchrec/sst_long_a2a_optimizer_5"))
    found = result["communication"]
    assert (found["matched_slices"], found["operations"], found["matched_by"]) == (
        120,
        30,
        {"order from the end": 30},
    )
    assert found["unmatched"] == {"before the first on all ranks": 6}
    assert max(result["stragglers"], key=lambda s: s["last"])["rank"] == 2


def test_deepseek_is_bound_by_its_device_although_the_host_blocks(analyses):
    """The host polls for the sizes of the messages, 20 ms at a time; the device is busy 99.6 % of the step."""
    (step,) = analyses("deepseek/train.json.gz").steps
    assert 1 - step.breakdown.idle / step.window.length == pytest.approx(0.996, abs=0.001)
    assert 100 * step.breakdown.overlap_fraction == pytest.approx(96.3, abs=0.1)
    path = step.path.totals()
    assert (path["compute"] + path["communication"]) / step.window.length > 0.96


def test_the_long_last_stage_of_a_production_pipeline_is_found(shared_data):
    """Its authors' slowdown by stage is 1.23 for the last and at most 1.00 for the others."""
    timeline = read_trace(shared_data / "traces" / "straggler" / "timeline-ST.json.gz")
    if len(timeline.ranks) < 8:
        pytest.skip("no reader of this schema is registered")
    analysis = analyze(timeline)
    result = describe(analysis)
    last = {int(r) for r, pp in zip(timeline.ranks.rank, timeline.ranks.pp, strict=True) if pp == 3}
    assert result["pipeline"]["longest_rank"] in last
    assert result["pipeline"]["longest_over_median"] > 1.5
    assert {"bubble", "long_stage"} <= {finding["what"] for finding in result["findings"]}
    by_stage = [[s["bubble_fraction"] for s in result["pipeline"]["stages"] if (s["rank"] in last) is late]
                for late in (True, False)]  # fmt: skip
    assert np.mean(by_stage[0]) < np.mean(by_stage[1])
    # The path fills the pipeline, stays on the last stage, and drains it: after that all stages reduce gradients.
    compute = analysis.paths[0].piece == 0
    stages = timeline.ranks.pp[analysis.paths[0].rank][compute].tolist()
    assert stages[:-1] == [0, 1, 2] + 8 * [3] + [2, 1, 0]
