"""Several files, folders, and how their ranks and clocks are put together."""

from __future__ import annotations

import json

import pytest

from tracesim.errors import TraceError
from tracesim.readers import read_trace
from tracesim.readers.merge import rank_from_name


def document(start_us, rank=None, base=None, name="k"):
    event = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": start_us, "dur": 10}
    step = {
        "ph": "X",
        "cat": "user_annotation",
        "name": "ProfilerStep#1",
        "pid": 9,
        "tid": 9,
        "ts": start_us,
        "dur": 9,
    }
    found = {"traceEvents": [event, step]}
    if rank is not None:
        found["distributedInfo"] = {"rank": rank, "world_size": 16}
    if base is not None:
        found["baseTimeNanoseconds"] = base
    return json.dumps(found)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank12.json", 12),
        ("rank-34.Jul_15_10_52_41.1074.pt.trace.v1.json.gz", 34),
        ("worker7_step_12.1694128201553.pt.trace.json.gz", 7),
        ("rank_003.json", 3),
        ("train.json.gz", -1),
        ("run2024.json", -1),
    ],
)
def test_a_file_name_tells_the_rank(name, rank):
    assert rank_from_name(name) == rank


def test_ranks_of_a_folder_stand_on_one_clock(tmp_path):
    (tmp_path / "b.json").write_text(document(100, rank=1, base=1_000_000))
    (tmp_path / "a.json").write_text(document(50, rank=5, base=1_000_500))
    (tmp_path / "report.json").write_text('{"schema": "x"}')
    timeline = read_trace(tmp_path)
    assert timeline.ranks.rank.tolist() == [1, 5]
    first = timeline.slices.start[timeline.slice_ranks() == 0].min()
    second = timeline.slices.start[timeline.slice_ranks() == 1].min()
    # 1,000,000 + 100,000 ns against 1,000,500 + 50,000 ns
    assert (first, second, timeline.time_base_ns) == (49_500, 0, 1_050_500)
    assert timeline.steps.start.tolist() == [49_500, 0]
    assert timeline.world_size == 16
    assert [(q.name, q.count) for q in timeline.quirks if "left out" in q.name] == [
        ("files left out, no trace", 1)
    ]


def test_names_then_order_give_ranks_the_files_do_not_say(tmp_path):
    for name in ("rank10.json", "rank2.json"):
        (tmp_path / name).write_text(document(0))
    assert read_trace(tmp_path).ranks.rank.tolist() == [2, 10]
    assert read_trace([tmp_path / "rank10.json"]).ranks.rank.tolist() == [10]
    (tmp_path / "other.json").write_text(document(0))
    named_by_order = read_trace([tmp_path / "other.json", tmp_path / "rank10.json"])
    assert named_by_order.ranks.rank.tolist() == [0, 1]
    assert any("numbered in the order" in q.name for q in named_by_order.quirks)


def test_two_files_of_one_rank_are_numbered_by_order(tmp_path):
    for name in ("x.json", "y.json"):
        (tmp_path / name).write_text(document(0, rank=3))
    assert read_trace(tmp_path).ranks.rank.tolist() == [0, 1]


def test_clocks_that_cannot_be_compared_are_aligned_at_their_starts(tmp_path):
    (tmp_path / "rank0.json").write_text(document(0, rank=0))
    (tmp_path / "rank1.json").write_text(document(0, rank=1, base=1_700_000_000_000_000_000))
    timeline = read_trace(tmp_path)
    assert timeline.slices.start.tolist() == [0, 0, 0, 0]
    assert any("clocks" in q.name for q in timeline.quirks)


def test_bad_paths_are_named(tmp_path):
    with pytest.raises(TraceError, match="no such file"):
        read_trace(tmp_path / "missing.json")
    with pytest.raises(TraceError, match="no file in this folder"):
        read_trace(tmp_path)
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(TraceError, match="none of its 1 files"):
        read_trace(tmp_path)
    with pytest.raises(TraceError, match="no trace given"):
        read_trace([])


def test_a_damaged_rank_of_a_folder_is_an_error(tmp_path):
    (tmp_path / "rank0.json").write_text(document(0, rank=0))
    (tmp_path / "rank1.json").write_text(document(0, rank=1)[:-9])
    with pytest.raises(TraceError, match=r"rank1\.json.*truncated"):
        read_trace(tmp_path)
