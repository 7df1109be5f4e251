"""Public profiler traces: what the reader finds against an independent count of what the files hold."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from op_graphs.vocabulary import Communication, OpKind, Phase, TrackRole
from tracesim.analysis import breakdowns
from tracesim.analysis.intervals import union
from tracesim.errors import TraceError
from tracesim.kernel_kinds import coverage
from tracesim.readers import read_trace

pytestmark = pytest.mark.shared_data

KINETO = [
    "deepseek/train.json.gz",
    "hta/nccl_parser_config/nccl_data.json.gz",
    "hta/timeline_analysis/sampled_rank-0.json.gz",
    "hta/trace_diff/control/control.json.gz",
    "hta/trace_diff/test/test.json.gz",
    "kineto/resnet50_num_workers_0_worker0.1623143089861.pt.trace.json.gz",
    "megatron-lm/tp2_v100/rank0.pt.trace.json.gz",
    "megatron-lm/tp2_v100/rank1.pt.trace.json.gz",
]


def catalog(traces: Path) -> dict[str, dict]:
    return {entry["path"]: entry["figures"] for entry in json.loads((traces / "catalog.json").read_text())}


@pytest.mark.parametrize("name", KINETO)
def test_counts_agree_with_the_catalog(shared_data, name):
    traces = shared_data / "traces"
    figures = catalog(traces)[name]
    timeline = read_trace(traces / name)
    slices = timeline.slices
    device = timeline.on_device()
    kernels = device & ~np.isin(slices.kind, (OpKind.MEMCPY, OpKind.MEMSET))
    streams = timeline.tracks.stream[slices.track[kernels]]
    found = {str(s): int(n) for s, n in zip(*np.unique(streams, return_counts=True), strict=True)}
    assert found == figures["streams"]
    assert sum(found.values()) == figures["kernels"]
    assert timeline.device == figures.get("gpu", "")
    assert len(timeline.steps) == figures["profiler_steps"]
    lengths = ((timeline.steps.end - timeline.steps.start) / 1e3).tolist()
    assert lengths == pytest.approx(figures["step_dur_us"], abs=0.06)
    communication = slices.communication > 0
    assert int(communication.sum()) == figures["comm_kernels"]
    assert int((slices.group[communication] >= 0).sum()) >= figures["comm_kernels_with_args"]
    busy = union(slices.start[communication], (slices.start + slices.duration)[communication]).total
    assert busy / 1e6 == pytest.approx(figures["comm_ms"], abs=0.001)


@pytest.mark.parametrize(
    "name",
    [
        "deepseek",
        "megatron-lm/tp2_v100",
        "hta/trace_diff/control",
        "hta/trace_diff/test",
        "param/dlrm_8rank_v100/kineto",
    ],
)
def test_nearly_all_device_time_has_a_kind(shared_data, name):
    assert coverage(read_trace(shared_data / "traces" / name))["classified_fraction"] > 0.99


def test_every_file_reads_or_is_refused_with_one_message(shared_data):
    read, refused = 0, []
    for path in sorted((shared_data / "traces").rglob("*")):
        if not path.is_file() or "df_index" in path.name:
            continue
        try:
            assert len(read_trace(path).slices) > 0
            read += 1
        except TraceError as error:
            refused.append(str(error))
    assert read >= 45
    assert len(refused) >= 20
    assert not [message for message in refused if "\n" in message]


def test_megatron_tp2_step(shared_data):
    """13 all-reduces a rank: embedding, 2 a layer each way in 2 layers, 3 of the loss, logits backward."""
    timeline = read_trace(shared_data / "traces" / "megatron-lm" / "tp2_v100")
    assert timeline.ranks.rank.tolist() == [0, 1]
    assert timeline.world_size == 2
    for rank in range(2):
        rows = (timeline.slice_ranks() == rank) & (timeline.slices.communication == Communication.ALL_REDUCE)
        assert int(rows.sum()) == 13
        phases = timeline.slices.phase[rows]
        assert (int((phases == Phase.FORWARD).sum()), int((phases == Phase.BACKWARD_INPUT).sum())) == (8, 5)
        sizes = timeline.slices.communication_bytes[rows]
        assert set(sizes.tolist()) == {6144 * 4, 512 * 4}
        members = {timeline.groups[g].ranks for g in timeline.slices.group[rows]}
        assert members == {(0, 1)}


def test_ranks_of_one_collective_end_together_on_the_common_clock(shared_data):
    """A collective ends on all ranks within some microseconds, so their clocks must be aligned."""
    timeline = read_trace(shared_data / "traces" / "param" / "dlrm_8rank_v100" / "kineto")
    slices = timeline.slices
    ends = []
    for rank in range(8):
        rows = (timeline.slice_ranks() == rank) & (slices.communication > 0)
        ends.append(np.sort((slices.start + slices.duration)[rows]))
    spread = np.ptp(np.array(ends), axis=0)
    assert spread.shape == (8,)
    assert spread.max() <= 10_000


def test_deepseek_overlap(shared_data):
    """113.0 ms of expert-parallel communication, 96.3 % of it overlapped; the device is busy 99.6 % of 129.0 ms."""
    timeline = read_trace(shared_data / "traces" / "deepseek" / "train.json.gz")
    (step,) = breakdowns(timeline)
    assert step.communication / 1e6 == pytest.approx(113.03, abs=0.01)
    assert step.overlap_fraction == pytest.approx(0.963, abs=0.0005)
    assert step.busy / step.window.length == pytest.approx(0.996, abs=0.0005)
    assert step.window.length / 1e6 == pytest.approx(129.0, abs=0.05)
    assert step.exposed_communication["ep"] == step.exposed
    weight = timeline.slices.phase == Phase.BACKWARD_WEIGHT
    assert int((weight & (timeline.tracks.stream[timeline.slices.track] == 23)).sum()) == 16
    assert set(timeline.slice_roles()[weight].tolist()) == {TrackRole.DEVICE}
