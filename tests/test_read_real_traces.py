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


NO_TRACES = {
    "STRUCTURE.md", "catalog.json", "comm.json", "meta-ST.yaml", "ms-ST.json", "mw-ST.json", "result-ST.json.gz",
    "pytorch_profiler_utils_mock_events.json.gz", "git-lfs-pointer_kineto_trace.json",
}  # fmt: skip


def test_every_file_reads_or_is_refused_with_one_message(shared_data):
    """What is no trace is refused, and nothing else is; a parquet table where pyarrow is missing asks for it."""
    refused: dict[str, str] = {}
    formats: dict[str, int] = {}
    for path in sorted((shared_data / "traces").rglob("*")):
        if not path.is_file():
            continue
        try:
            timeline = read_trace(path)
        except TraceError as error:
            refused[path.name] = str(error)
            continue
        assert len(timeline.slices) or len(timeline.counter_samples), path
        form = timeline.properties["format"]
        formats[form] = formats.get(form, 0) + 1
    without_pyarrow = {n for n, message in refused.items() if "tracesim[parquet]" in message}
    assert set(refused) - without_pyarrow == NO_TRACES
    assert not [message for message in refused.values() if "\n" in message]
    assert formats == {
        "kineto": 47, "Chakra execution trace": 17, "PyTorch execution trace": 11, "memory snapshot": 4,
        "memory timeline": 2, "micro-operations": 3 - len(without_pyarrow), "nsys": 1,
    }  # fmt: skip


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


def test_a_pipeline_job_shows_its_bubble_and_its_long_last_stage(shared_data):
    """4 stages of 2 data-parallel ranks; the last one takes about twice as long, and the others wait for it."""
    timeline = read_trace(shared_data / "traces" / "straggler" / "timeline-ST.json.gz")
    slices, ranks = timeline.slices, timeline.slice_ranks()
    assert (len(timeline.ranks), timeline.world_size, len(timeline.steps)) == (8, 8, 8 * 32)
    compute = timeline.slice_roles() == TrackRole.COMPUTE
    stage = timeline.ranks.pp[ranks]

    def median_ms(chosen, phase: Phase) -> float:
        return float(np.median(slices.duration[compute & chosen & (slices.phase == phase)])) / 1e6

    last, before = median_ms(stage == 3, Phase.FORWARD), median_ms(stage < 3, Phase.FORWARD)
    assert last > 1.8 * before
    assert median_ms(stage == 3, Phase.BACKWARD_INPUT) > 1.3 * median_ms(stage < 3, Phase.BACKWARD_INPUT)
    steps = breakdowns(timeline)
    idle = {
        s: np.mean([b.idle / b.window.length for b in steps if timeline.ranks.pp[b.window.rank] == s])
        for s in range(4)
    }
    assert min(idle[s] for s in range(3)) > 0.5 > 0.4 > idle[3]


@pytest.mark.parametrize(
    "name",
    ["cs336_bcrafton", "cs336_wl_medium_128_training", "torchtitan_llama3_8b_fsdp16/rank0_memory_snapshot"],
)
def test_memory_snapshots_end_at_what_their_segments_hold(shared_data, name):
    """The curves span what the catalog says, never fall below 0, and reserved memory never below allocated."""
    import gzip
    import pickle

    path = shared_data / "traces" / "memsnap" / f"{name}.pickle.gz"
    timeline = read_trace(path)
    samples = timeline.counter_samples
    figures = catalog(shared_data / "traces")[f"memsnap/{name}.pickle.gz"]
    # The catalog counts all events, the curves those that move them (a request that fails moves nothing).
    assert np.ptp(samples.time) / 1e6 == pytest.approx(figures["span_ms"], rel=0.06)
    with gzip.open(path) as file:
        segments = pickle.load(file)["segments"]
    last = {
        timeline.strings[timeline.counter_tracks.name[track]]: samples.value[samples.track == track]
        for track in range(len(timeline.counter_tracks))
    }
    assert last["allocated"][-1] == sum(s["allocated_size"] for s in segments)
    assert last["reserved"][-1] == sum(s["total_size"] for s in segments)
    assert last["allocated"].min() >= 0
    assert last["allocated"].max() <= last["reserved"].max()


@pytest.mark.parametrize("rank", [0, 1])
def test_chakra_forms_of_one_trace_agree(shared_data, rank):
    folder = shared_data / "traces" / "megatron-lm" / "tp2_v100"
    protobuf, documents = (
        read_trace(folder / f"final.{rank}.et.gz"),
        read_trace(folder / f"final.{rank}.json.gz"),
    )
    for column in ("start", "duration", "kind", "communication", "communication_bytes"):
        assert getattr(protobuf.slices, column).tolist() == getattr(documents.slices, column).tolist(), column
    assert int((protobuf.slices.communication == Communication.ALL_REDUCE).sum()) == 13
