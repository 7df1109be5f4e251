"""What a comparison says beside its figures: what the host did, what the memory holds, and sentences on both."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from op_graphs.timeline import Timeline
from op_graphs.vocabulary import FlowKind, MemoryCategory, OpKind, TrackRole
from tests.layered_runs import Kernel, LayeredRun
from tests.timelines import timeline_of
from tests.trace_files import memory_timeline
from tracesim.diff import compare_timelines, diff_timelines, markdown
from tracesim.readers import read_trace

DEVICE, MAIN, NOTES, BACKWARD = 0, 1, 2, 3


def hosted(
    gap: int, host: list[tuple[int, str, int, int]], launched_by: int = MAIN, bystander: int = 0
) -> Timeline:
    """A kernel, a gap, a kernel that ``launched_by`` launches at its end, in a step of that length.

    ``host`` are slices of the host as (track, name, start, end). A bystander is how many kernels the main thread
    launched in the first 1000 ns.
    """
    rows: list[dict[str, Any]] = [
        {"track": DEVICE, "start": 0, "duration": 1000, "name": "first", "kind": OpKind.GEMM},
        {"track": DEVICE, "start": 1000 + gap, "duration": 1000, "name": "second", "kind": OpKind.GEMM},
        {"track": MAIN, "start": 0, "duration": 1, "name": "cudaLaunchKernel", "kind": OpKind.HOST},
        {
            "track": launched_by,
            "start": 999 + gap,
            "duration": 1,
            "name": "cudaLaunchKernel",
            "kind": OpKind.HOST,
        },
    ]
    flows = [(2, 0, FlowKind.LAUNCH), (3, 1, FlowKind.LAUNCH)]
    for number in range(bystander):
        rows.append(
            {
                "track": MAIN,
                "start": 10 * number,
                "duration": 1,
                "name": "cudaLaunchKernel",
                "kind": OpKind.HOST,
            }
        )
        rows.append(
            {"track": DEVICE, "start": 10 * number, "duration": 1, "name": "tiny", "kind": OpKind.ELEMENTWISE}
        )
        flows.append((len(rows) - 2, len(rows) - 1, FlowKind.LAUNCH))
    for track, name, start, end in host:
        kind = OpKind.ANNOTATION if track == NOTES else OpKind.HOST
        rows.append({"track": track, "start": start, "duration": end - start, "name": name, "kind": kind})
    found = timeline_of(
        rows,
        tracks=[
            (0, TrackRole.DEVICE, "stream 7"),
            (0, TrackRole.HOST, "main"),
            (0, TrackRole.ANNOTATION, "main"),
            (0, TrackRole.HOST, "autograd"),
        ],
        flows=flows,
        steps=[(0, 1, 0, 2000 + gap)],
    )
    # Annotations have the number of their thread.
    stream = found.tracks.stream.copy()
    stream[NOTES] = stream[MAIN]
    return replace(found, tracks=found.tracks.with_columns(stream=stream))


def in_gaps(a: Timeline, b: Timeline) -> dict[str, tuple[int, int]]:
    result = diff_timelines(a, b)
    rows = result["host_in_launch_gaps"]
    assert sum(row["difference_ns"] for row in rows) == result["attribution"]["parts_ns"]["launch_gaps"]
    return {row["name"]: (row["a_ns"], row["b_ns"]) for row in rows}


# -- host --------------------------------------------------------------------------------------------------------


def test_the_outermost_slice_of_few_launches_has_the_gap():
    a = hosted(0, [])
    notes = [(NOTES, "## forward ##", 0, 60_000), (NOTES, "enumerate(DataLoader)#7.__next__", 2_000, 50_000)]
    b = hosted(60_000, [*notes, (MAIN, "aten::div", 10_000, 20_000)], bystander=20)
    # The forward launches twenty kernels and is no explanation; the gap begins at 1000.
    assert in_gaps(a, b) == {
        "enumerate(DataLoader).__next__": (0, 48_000),
        "## forward ##": (0, 11_000),
        "outside of operators": (0, 999),
        "cudaLaunchKernel": (0, 1),
    }


def test_a_call_of_the_driver_is_named():
    b = hosted(50_000, [(MAIN, "aten::cat", 1_000, 50_990), (MAIN, "cudaFree", 1_500, 41_500)])
    found = in_gaps(hosted(0, []), b)
    assert found["aten::cat > cudaFree"] == (0, 40_000)
    assert found["aten::cat"][1] == pytest.approx(9_990, abs=10)


def test_the_thread_that_ends_the_gap_is_looked_at():
    host = [(MAIN, "aten::wait", 0, 60_000), (BACKWARD, "BmmBackward0", 1_000, 50_900)]
    found = in_gaps(hosted(0, []), hosted(50_000, host, launched_by=BACKWARD, bystander=5))
    assert max(found, key=lambda name: found[name][1]) == "BmmBackward0"


# -- memory ------------------------------------------------------------------------------------------------------


def test_memory_is_compared_without_any_step():
    curves = [(0, "allocated", -1, True), (0, "weights", MemoryCategory.WEIGHTS, True)]
    a, b = (
        timeline_of([], counters=curves, samples=[(0, 0, 10.0), (0, 5, top), (1, 0, held)])
        for top, held in ((100.0, 60.0), (150.0, 50.0))
    )
    result = diff_timelines(a, b)
    assert result["memory"] == [
        {"rank": 0, "rank_b": 0, "of": "categories", "a_bytes": 100, "b_bytes": 150, "difference_bytes": 50,
         "parts_bytes": {"weights": -10, "other": 60}}
    ]  # fmt: skip
    assert result["attribution"]["steps"] == []
    assert "no step" in result["summary"][0].lower()
    assert result["summary"][1].startswith("Peak memory of rank 0 differs by")
    assert "| rank 0 | 0.000 | 0.000 | +0.000 | -0.000 | +0.000 |" in markdown(result)


def test_categories_of_a_profilers_memory_timeline_are_ours(tmp_path):
    path = tmp_path / "memory.json"
    path.write_text(json.dumps(memory_timeline()))
    timeline = read_trace(path)
    (row,) = diff_timelines(timeline, timeline)["memory"]
    assert {"weights", "optimizer_states", "activations", "gradients", "temporary"} <= set(row["parts_bytes"])
    assert row["difference_bytes"] == sum(row["parts_bytes"].values()) == 0


@pytest.mark.shared_data
def test_eight_bit_states_are_where_the_memory_goes(shared_data):
    folder = shared_data / "traces" / "torchao"
    a, b = (read_trace(folder / f"galore_{name}-memory-timeline.json.gz") for name in ("adamw", "adamw8bit"))
    (row,) = diff_timelines(a, b)["memory"]
    # Two states of four bytes are now of one.
    assert row["parts_bytes"]["optimizer_states"] == pytest.approx(-0.6e9, rel=0.01)
    assert row["parts_bytes"]["optimizer_states"] == pytest.approx(row["difference_bytes"], rel=0.01)


# -- sentences ---------------------------------------------------------------------------------------------------

RUN = LayeredRun((tuple(Kernel(f"gemm_{c}", 10_000) for c in "abcd"),) * 2)


@pytest.mark.parametrize(
    ("edited", "said"),
    [
        (RUN, ["The steps of b take as long as those of a, and for the same reasons."]),
        (
            RUN.edited(1, [*RUN.layers[1][:2], Kernel("gemm_c", 14_000), RUN.layers[1][3]]),
            [
                "A step of b is 0.004 ms longer than one of a (+4.4 %): kernels that both have +0.004 ms.",
                "Kernels that both have: gemm_c +0.004 ms.",
            ],
        ),
        (
            RUN.edited(0, RUN.layers[0][1:]),
            [
                "A step of b is 0.010 ms shorter than one of a (-11.1 %): only in a -0.010 ms.",
                "Only in a: gemm_a -0.010 ms.",
            ],
        ),
        (
            replace(RUN, slower={(0, 0, 0): 5_000}),
            [
                "A step of b is 0.005 ms longer than one of a (+5.6 %): "
                "kernels that both have +0.003 ms, waiting for peers +0.003 ms.",
                "Kernels that both have: gemm_a +0.003 ms.",
            ],
        ),
    ],
)  # fmt: skip
def test_the_parts_that_count_are_said_in_words(edited, said):
    found = compare_timelines(RUN.timeline(), edited.timeline()).result["summary"]
    assert found[: len(said)] == said
    assert found[-1].endswith("of b).")


@pytest.mark.shared_data
def test_a_real_difference_in_words(shared_data):
    traces = shared_data / "traces" / "torchrec"
    names = ("sst_long_a2a_optimizer_5", "sst_long_a2a_optimizer_5_qcomm_run0")
    result = diff_timelines(*(read_trace(traces / name) for name in names))
    text = " ".join(result["summary"])
    # One run has its allocator give memory back in the middle of a step; the other packs messages into fewer bits.
    assert "in aten::cat > cudaFree -50." in text
    assert "Only in b: aten::copy_ +" in text
    rows = result["host_in_launch_gaps"]
    assert sum(r["difference_ns"] for r in rows) == pytest.approx(
        result["attribution"]["parts_ns"]["launch_gaps"], rel=0.01
    )


def test_sentences_are_in_the_markdown_as_plain_text():
    kernel = Kernel("void f<a|b>(`x`)", 10_000)
    runs = [LayeredRun(((k,),)).timeline() for k in (kernel, replace(kernel, duration=20_000))]
    lines = markdown(compare_timelines(*runs).result).splitlines()
    assert "Kernels that both have: void f\\<a\\|b\\>(\\`x\\`) +0.010 ms." in lines
