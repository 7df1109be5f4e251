"""What the readers make of files that are not Kineto: one small file a format (``trace_files``), one question each."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import trace_files

from op_graphs.timeline import Timeline
from op_graphs.vocabulary import Communication, FlowKind, OpKind, Phase, TrackRole
from tracesim.errors import TraceError
from tracesim.readers import READERS, read_trace

FILES = trace_files.all_files()


def read(tmp_path, name: str, data: bytes | None = None) -> Timeline:
    path = tmp_path / name
    path.write_bytes(FILES[name] if data is None else data)
    return read_trace(path)


def rows(timeline: Timeline) -> list[tuple[str, str, int, int]]:
    """(track, name, start, duration) of all slices, in order of track and start."""
    s, strings = timeline.slices, timeline.strings
    tracks = [strings[i] for i in timeline.tracks.name]
    columns = (s.track.tolist(), s.name.tolist(), s.start.tolist(), s.duration.tolist())
    return [(tracks[t], strings[n], start, length) for t, n, start, length in zip(*columns, strict=True)]


def curves(timeline: Timeline) -> dict[str, list[tuple[int, float]]]:
    samples = timeline.counter_samples
    found: dict[str, list[tuple[int, float]]] = {}
    for track, time, value in zip(
        *(c.tolist() for c in (samples.track, samples.time, samples.value)), strict=True
    ):
        found.setdefault(timeline.strings[timeline.counter_tracks.name[track]], []).append((time, value))
    return found


def quirks(timeline: Timeline) -> dict[str, int]:
    return {q.name: q.count for q in timeline.quirks}


def test_every_file_is_recognised_by_one_reader_whatever_its_name(tmp_path):
    for name, data in FILES.items():
        if name != "chakra.et":
            (tmp_path / "file").write_bytes(data)
            assert read_trace(tmp_path / "file"), name
    assert len(READERS) == 9


@pytest.mark.parametrize("name", ["chakra.et", "chakra.0.json"])
def test_chakra_nodes_start_when_what_they_need_has_ended(tmp_path, name):
    timeline = read(tmp_path, name)
    assert rows(timeline) == [
        ("stream 7", "gemm_kernel", 3_000, 5_000),
        ("stream 8", "nccl_all_reduce", 8_000, 2_000),
        ("thread 2", "aten::mm", 0, 3_000),
    ]
    slices = timeline.slices
    assert [OpKind(k).name for k in slices.kind.tolist()] == ["GEMM", "COLLECTIVE", "GEMM"]
    assert (slices.communication[1], slices.communication_bytes[1]) == (Communication.ALL_REDUCE, 256)
    assert "times computed from dependencies, not measured" in quirks(timeline)
    assert timeline.ranks.rank.tolist() == [0]


def test_chakra_nodes_without_durations_are_drawn_in_order(tmp_path):
    header = trace_files.chakra_message(
        trace_files.field(2, trace_files.field(1, b"schema") + trace_files.field(29, b"1"))
    )
    nodes = [
        trace_files.chakra_node(1, "send", 5, [], 0, comm_size=64),
        trace_files.chakra_node(2, "receive", 6, [1], 0, comm_size=64),
    ]
    timeline = read(tmp_path, "custom.5.et", header + b"".join(nodes))
    assert [(name, start, length) for _, name, start, length in rows(timeline)] == [
        ("send", 0, 1000),
        ("receive", 1000, 1000),
    ]
    assert timeline.ranks.rank.tolist() == [5]


def test_nodes_that_wait_for_one_another_are_cut_loose(tmp_path):
    header = trace_files.chakra_message(
        trace_files.field(2, trace_files.field(1, b"schema") + trace_files.field(29, b"1"))
    )
    nodes = [trace_files.chakra_node(i, f"n{i}", 4, [3 - i], 2, is_cpu_op=1) for i in (1, 2)]
    timeline = read(tmp_path, "t.et", header + b"".join(nodes))
    assert [name for _, name, _, _ in rows(timeline)] == ["n1", "n2"]
    assert quirks(timeline)["circles of operations that wait for one another, cut"] == 1


def test_a_pytorch_execution_trace_keeps_order_and_nesting(tmp_path):
    timeline = read(tmp_path, "et.json")
    assert rows(timeline) == [
        ("thread 1", "root", 0, 2_000),
        ("thread 1", "aten::linear", 0, 1_000),
        ("thread 1", "aten::addmm", 0, 1_000),
        ("thread 1", "record_param_comms allreduce", 1_000, 1_000),
    ]
    last = timeline.slices.take(np.array([3]))
    assert (int(last.communication[0]), int(last.communication_bytes[0])) == (Communication.ALL_REDUCE, 256)
    assert (timeline.groups[last.group[0]].name, timeline.groups[last.group[0]].size) == ("tp", 2)


def test_a_memory_snapshot_goes_back_from_what_is_there_at_its_end(tmp_path):
    timeline = read(tmp_path, "snapshot.pickle")
    found = curves(timeline)
    # 512 bytes are left at the end, so 512 were there before; 1000 bytes take 1024.
    assert found["allocated"] == [(6_000, 1536.0), (15_000, 512.0)]
    assert found["reserved"] == [(5_000, 3.0 * 2**20)]
    assert [name for _, name, _, _ in rows(timeline)] == [
        "ProfilerStep#2",
        "segment_alloc 2 MiB",
        "oom 1.02e+03 MiB",
    ]
    assert timeline.steps.number.tolist() == [2]


class Evil:
    def __reduce__(self):
        return print, ("this must not run",)


@pytest.mark.parametrize("snapshot", [Evil(), {"device_traces": [Evil()]}, {"device_traces": np.zeros(3)}])
def test_a_pickle_that_imports_anything_is_refused(tmp_path, capsys, snapshot):
    with pytest.raises(TraceError, match="it would import"):
        read(tmp_path, "t.pickle", pickle.dumps(snapshot))
    assert capsys.readouterr().out == ""


def test_a_memory_timeline_is_a_curve_a_category(tmp_path):
    found = curves(read(tmp_path, "memory.json"))
    assert found["allocated"] == [(0, 100.0), (10_000, 150.0)]
    assert found["gradient"] == [(0, 0.0), (10_000, 50.0)]
    assert found["parameter"] == [(0, 100.0), (10_000, 100.0)]


def test_nsys_exports_have_launches_kernels_copies_and_ranges(tmp_path):
    timeline = read(tmp_path, "nsys.sqlite")
    assert rows(timeline) == [
        ("stream 7", "volta_sgemm_128x32_nn", 30, 30),
        ("stream 7", "Memcpy HtoD", 60, 10),
        ("thread 2", "cudaLaunchKernel", 10, 10),
        ("annotations of thread 2", "step", 0, 110),
    ]
    assert [OpKind(k).name for k in timeline.slices.kind.tolist()] == ["GEMM", "MEMCPY", "HOST", "ANNOTATION"]
    flows = timeline.flows
    assert (flows.source.tolist(), flows.target.tolist(), flows.kind.tolist()) == (
        [2],
        [0],
        [FlowKind.LAUNCH],
    )
    assert timeline.device == "NVIDIA A100"


def test_perfetto_traces_of_other_programs_are_read_by_the_official_bindings(tmp_path):
    timeline = read(tmp_path, "foreign.pftrace")
    assert rows(timeline) == [
        ("GPU stream 7", "volta_sgemm_128x32_nn", 0, 2_000),
        ("main", "loop", 0, 8_000),
    ]
    assert [TrackRole(r).name for r in timeline.tracks.role.tolist()] == ["DEVICE", "HOST"]
    assert curves(timeline) == {"bytes in use": [(3_000, 64.0)]}


def test_a_perfetto_trace_without_track_events_says_so(tmp_path):
    with pytest.raises(TraceError, match="without track events"):
        read(tmp_path, "other.pftrace", b"\x0a\x04\x40\x01\x50\x01")


def test_micro_operations_are_ranks_with_pipeline_actions(tmp_path):
    timeline = read(tmp_path, "micro.json")
    assert timeline.ranks.pp.tolist() == [0, 1]
    roles = [TrackRole(r).name for r in timeline.tracks.role.tolist()]
    assert roles == ["PIPELINE", "COMPUTE", "COMMUNICATION_PP", "PIPELINE", "COMPUTE"]
    assert rows(timeline) == [
        ("pipeline", "F0", 0, 5_000),
        ("compute", "forward-compute", 0, 5_000),
        ("send forward", "forward-send", 5_000, 1_000),
        ("pipeline", "F0", 6_000, 20_000),
        ("pipeline", "B0", 26_000, 40_000),
        ("compute", "forward-compute", 6_000, 20_000),
        ("compute", "backward-compute", 26_000, 40_000),
    ]
    assert timeline.slices.phase.tolist()[-2:] == [Phase.FORWARD, Phase.BACKWARD_INPUT]
    assert (timeline.steps.number.tolist(), timeline.steps.end.tolist()) == ([4, 4], [66_000, 66_000])


def test_a_parquet_table_of_micro_operations_is_read_where_pyarrow_is(tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra `parquet`)")
    timeline = read(tmp_path, "t.parquet", trace_files.parquet())
    assert [(n, s, d) for t, n, s, d in rows(timeline) if t == "compute"] == [
        ("forward-compute", 0, 10**9),
        ("forward-compute", 10**9, 2 * 10**9),
    ]


def test_zstandard_is_unpacked_where_the_package_is_and_else_asked_for(tmp_path, monkeypatch):
    zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed (extra `zstd`)")
    packed = zstandard.ZstdCompressor().compress(FILES["kineto.json"])
    assert len(read(tmp_path, "t.json.zst", packed).slices) == 6
    with pytest.raises(TraceError, match="damaged Zstandard"):
        read(tmp_path, "t.json.zst", packed[:8] + b"\xff" * 30)


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(TraceError, match=r"pip install tracesim\[zstd\]"):
        read(tmp_path, "t.zst", b"\x28\xb5\x2f\xfd" + bytes(20))
    with pytest.raises(TraceError, match=r"pip install tracesim\[parquet\]"):
        read(tmp_path, "t.parquet", b"PAR1" + bytes(20))


def test_a_folder_of_several_formats_is_read_from_the_first_of_them(tmp_path):
    for name in ("chakra.et", "kineto.json", "snapshot.pickle"):
        (tmp_path / name).write_bytes(FILES[name])
    (tmp_path / "notes.json").write_text(json.dumps({"a": 1}))
    timeline = read_trace(tmp_path)
    assert timeline.ranks.rank.tolist() == [1]
    found = {q.name: (q.count, q.example) for q in timeline.quirks}
    assert found["files left out, of another format"] == (2, "chakra.et, snapshot.pickle")
    assert found["files left out, no trace"] == (1, "notes.json")
