"""What is edited in a run is what the difference is attributed to, and the parts add up to it to the nanosecond."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from op_graphs.timeline import Timeline
from op_graphs.vocabulary import MemoryCategory, OpKind, Phase
from tests.layered_runs import Kernel, LayeredRun
from tests.timelines import timeline_of, two_stage_timeline
from tracesim.diff import compare_timelines, diff_timelines
from tracesim.diff.attribution import PARTS, StepAttribution, mean_parts

few = settings(max_examples=20)
IDLE = ("launch_gaps", "waiting_for_streams", "unexplained_idle")

kinds = st.sampled_from([OpKind.GEMM, OpKind.ELEMENTWISE, OpKind.NORM, OpKind.ATTENTION, OpKind.REDUCTION])
layers = st.lists(st.tuples(kinds, st.integers(1_000, 500_000)), min_size=1, max_size=6)


@st.composite
def runs(draw: st.DrawFn) -> LayeredRun:
    """One to four layers of kernels with names of their own, on one to three ranks, one to three steps."""
    drawn = draw(st.lists(layers, min_size=1, max_size=4))
    kernels = tuple(
        tuple(Kernel(f"{kind.name.lower()}_{'abcdef'[i]}", ns, kind) for i, (kind, ns) in enumerate(layer))
        for layer in drawn
    )
    return LayeredRun(kernels, ranks=draw(st.integers(1, 3)), steps=draw(st.integers(1, 3)))


@st.composite
def edited_runs(draw: st.DrawFn) -> tuple[LayeredRun, int, int]:
    """A run with the layer and place of one of its kernels."""
    run = draw(runs())
    layer = draw(st.integers(0, len(run.layers) - 1))
    return run, layer, draw(st.integers(0, len(run.layers[layer]) - 1))


def parts(result: dict, rank: int | None = None) -> dict[str, int]:
    """The parts that are not zero, of a rank or of the mean; checks that they add up."""
    found = result["attribution"]
    for entry in (found, *found["ranks"], *found["steps"]):
        assert sum(entry["parts_ns"].values()) == entry["difference_ns"]
        assert entry["step_b_ns"] - entry["step_a_ns"] == entry["difference_ns"]
    chosen = found if rank is None else found["ranks"][rank]
    return {key: value for key, value in chosen["parts_ns"].items() if value}


def diff(a: LayeredRun, b: LayeredRun) -> dict:
    return diff_timelines(a.timeline(), b.timeline())


def replaced(run: LayeredRun, layer: int, place: int, *kernels: Kernel) -> LayeredRun:
    old = run.layers[layer]
    return run.edited(layer, [*old[:place], *kernels, *old[place + 1 :]])


@few
@given(runs())
def test_a_run_does_not_differ_from_itself(run):
    result = diff(run, replace(run, epoch=987_654_321))
    assert parts(result) == {}
    assert result["matched_fraction"] == 1
    assert result["unmatched"] == {"a": [], "b": []}


@few
@given(edited_runs(), st.integers(-900, 400_000))
def test_a_slower_kernel(drawn, more):
    run, layer, place = drawn
    kernel = run.layers[layer][place]
    result = diff(run, replaced(run, layer, place, replace(kernel, duration=kernel.duration + more)))
    assert parts(result) == ({"kernels": more} if more else {})
    assert result["matched_fraction"] == 1
    if more:
        first = result["operations"][0]
        assert (first["name"], first["difference_ns"]) == (kernel.name, more)


@few
@given(edited_runs(), st.integers(1, 400_000))
def test_a_kernel_that_is_slower_on_one_rank_makes_the_others_wait(drawn, more):
    run, layer, place = drawn
    result = diff(run, replace(run, slower={(0, layer, place): more}))
    assert parts(result, 0) == {"kernels": more}
    for rank in range(1, run.ranks):
        assert parts(result, rank) == {"waiting_for_peers": more}


@few
@given(edited_runs(), st.integers(1, 400_000))
def test_a_rank_that_is_late(drawn, delay):
    run, layer, _ = drawn
    result = diff(run, replace(run, delays={(0, layer): delay}))
    late = parts(result, 0)
    if layer or run.steps == 1:
        assert sum(late.get(key, 0) for key in IDLE) == delay
    for rank in range(1, run.ranks):
        assert parts(result, rank) == {"waiting_for_peers": delay}


@few
@given(edited_runs())
def test_a_kernel_less(drawn):
    run, layer, place = drawn
    kernel = run.layers[layer][place]
    result = diff(run, replaced(run, layer, place))
    assert parts(result) == {"unmatched_a": -kernel.duration}
    assert [(u["name"], u["count"]) for u in result["unmatched"]["a"]] == [
        (kernel.name, run.ranks * run.steps)
    ]
    assert result["unmatched"]["b"] == []


@few
@given(edited_runs(), kinds, st.integers(1, 400_000))
def test_a_kernel_more(drawn, kind, duration):
    run, layer, place = drawn
    more = Kernel("another", duration, kind)
    result = diff(run, replaced(run, layer, place, run.layers[layer][place], more))
    assert parts(result) == {"unmatched_b": duration}
    assert result["operations"][0]["name"] == "another"


@few
@given(edited_runs())
def test_a_kernel_of_another_name(drawn):
    run, layer, place = drawn
    result = diff(run, replaced(run, layer, place, replace(run.layers[layer][place], name="Cijk_Ailk")))
    assert parts(result) == {}
    assert result["matched_fraction"] == 1


@st.composite
def much_edited_runs(draw: st.DrawFn) -> tuple[LayeredRun, LayeredRun, dict[str, int], set[str]]:
    """A run, the same with several edits, the parts that they make, and the names of the kernels that are gone.

    All kernels of a layer differ. What is inserted is of a kind that no kernel has, so that it is no renamed one, and
    in a layer where something is gone nothing is renamed.
    """
    drawn = draw(st.lists(layers, min_size=2, max_size=5))
    kernels = [
        [Kernel(f"{kind.name.lower()}_{number}{'abcdef'[i]}", ns, kind) for i, (kind, ns) in enumerate(layer)]
        for number, layer in enumerate(drawn)
    ]
    run = LayeredRun(tuple(map(tuple, kernels)), ranks=draw(st.integers(1, 3)), steps=draw(st.integers(1, 3)))
    other, expected, gone = run, dict.fromkeys(("kernels", "unmatched_a", "unmatched_b"), 0), set[str]()
    for number, layer in enumerate(kernels):
        allowed = draw(
            st.sampled_from([("scale", "drop", "insert", "keep"), ("scale", "rename", "insert", "keep")])
        )
        edited: list[Kernel] = []
        for kernel in layer:
            edit = draw(st.sampled_from(allowed))
            if edit == "scale":
                duration = max(round(kernel.duration * draw(st.floats(0.05, 8))), 1)
                expected["kernels"] += duration - kernel.duration
                edited.append(replace(kernel, duration=duration))
            elif edit == "drop":
                expected["unmatched_a"] -= kernel.duration
                gone.add(kernel.name)
            elif edit == "rename":
                edited.append(replace(kernel, name=f"Cijk_{kernel.name}"))
            else:
                edited.append(kernel)
            if edit == "insert":
                more = Kernel("embedding", draw(st.integers(1, 400_000)), OpKind.MEMSET)
                expected["unmatched_b"] += more.duration
                edited.append(more)
        other = other.edited(number, edited)
    return run, other, {key: value for key, value in expected.items() if value}, gone


@few
@given(much_edited_runs())
def test_many_edits_at_once(drawn):
    run, other, expected, gone = drawn
    result = diff(run, other)
    assert parts(result) == expected
    assert {row["name"] for row in result["unmatched"]["a"]} == gone
    assert {row["name"] for row in result["unmatched"]["b"]} <= {"embedding"}


@few
@given(runs(), st.lists(st.integers(0, 400_000), min_size=4, max_size=4))
def test_delays_of_all_ranks_are_idle_time(run, delays):
    late = {(rank, layer): delays[layer] for rank in range(run.ranks) for layer in range(len(run.layers))}
    result = diff(run, replace(run, delays=late))
    found = parts(result)
    # What comes before the first kernel of a run is in no window but that of its step's mark, which it has here.
    assert sum(found.get(key, 0) for key in IDLE) == sum(delays[: len(run.layers)])
    assert set(found) <= set(IDLE)


@few
@given(runs(), runs())
def test_parts_add_up_whatever_is_compared(a, b):
    result = diff(a, b)
    parts(result)
    assert 0 <= result["matched_fraction"] <= 1
    json.dumps(result, allow_nan=False)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.integers(-99, 99), min_size=11, max_size=11)), min_size=1
    )
)
def test_means_are_whole_and_add_up(drawn):
    steps = [
        StepAttribution(rank, 0, 0, 1000, 1000 + sum(values), dict(zip(PARTS, values, strict=True)))
        for rank, values in drawn
    ]
    found = mean_parts(steps)
    assert sum(found["parts_ns"].values()) == found["difference_ns"]
    by_rank = {rank: [s for s in steps if s.rank == rank] for rank in {s.rank for s in steps}}
    for key in PARTS:
        exact = sum(sum(s.parts[key] for s in mine) / len(mine) for mine in by_rank.values()) / len(by_rank)
        assert abs(found["parts_ns"][key] - exact) < 1 + 1e-9


# -- causes ------------------------------------------------------------------------------------------------------


def test_optimizer_and_communication_have_parts_of_their_own():
    step = (Kernel("gemm", 9_000), Kernel("adam", 4_000, OpKind.OPTIMIZER, Phase.OPTIMIZER))
    slower = (step[0], replace(step[1], duration=7_000))
    assert parts(diff(LayeredRun((step,)), LayeredRun((slower,)))) == {"optimizer": 3_000}
    run = LayeredRun((step, step), ranks=2).timeline()
    longer = run.slices.duration.copy()
    last = np.flatnonzero(run.slices.kind == OpKind.COLLECTIVE)[-2:]
    longer[last] += 1_000
    steps = run.steps.with_columns(end=run.steps.end + 1_000)
    other = replace(run, slices=run.slices.with_columns(duration=longer), steps=steps)
    assert parts(diff_timelines(run, other)) == {"exposed_communication": 1_000}


def test_waiting_for_another_stage_is_bubble():
    a = two_stage_timeline()
    late = np.where(a.slices.start >= 1000, a.slices.start + 700, a.slices.start)
    b = replace(
        a,
        slices=a.slices.with_columns(start=late),
        steps=a.steps.with_columns(end=a.steps.end + 700),
    )
    result = diff_timelines(a, b)
    assert parts(result, 1).get("bubble") == 700


def test_one_simulated_step_is_laid_beside_every_measured_one():
    layer = (Kernel("gemm", 9_000), Kernel("softmax", 4_000))
    slower = (Kernel("gemm", 10_000), Kernel("softmax", 4_000))
    result = diff(LayeredRun((layer,)), LayeredRun((slower,), steps=3))
    assert parts(result) == {"kernels": 1_000}
    assert len(result["attribution"]["steps"]) == 2 * 3
    assert result["matched_fraction"] == 1


# -- memory ------------------------------------------------------------------------------------------------------


def with_memory(weights: list[float], activations: list[float]) -> Timeline:
    samples = [(0, 10 * i, v) for i, v in enumerate(weights)] + [
        (1, 10 * i, v) for i, v in enumerate(activations)
    ]
    return timeline_of(
        [{"track": 0, "start": 0, "duration": 100, "name": "gemm", "kind": OpKind.GEMM}],
        counters=[
            (0, "weights", MemoryCategory.WEIGHTS, True),
            (0, "activations", MemoryCategory.ACTIVATIONS, True),
        ],
        samples=samples,
    )


def test_the_peak_is_compared_by_what_was_alive_at_it():
    a, b = with_memory([100, 100, 100], [0, 50, 20]), with_memory([90, 90, 90], [80, 10, 20])
    assert diff_timelines(a, b)["memory"] == [
        {
            "rank": 0, "rank_b": 0, "of": "categories", "a_bytes": 150, "b_bytes": 170, "difference_bytes": 20,
            "parts_bytes": {"weights": -10, "activations": 30},
        }
    ]  # fmt: skip


def test_without_curves_on_both_sides_there_is_no_memory_to_compare():
    bare = timeline_of([{"track": 0, "start": 0, "duration": 100, "name": "gemm", "kind": OpKind.GEMM}])
    assert diff_timelines(with_memory([1], [2]), bare)["memory"] == []


@pytest.mark.parametrize("side", ["a", "b", "both"])
def test_nothing_to_compare(side):
    run = LayeredRun(((Kernel("gemm", 9_000),),)).timeline()
    empty = timeline_of([])
    comparison = compare_timelines(empty if side != "b" else run, empty if side != "a" else run)
    assert comparison.result["attribution"]["difference_ns"] == 0
    assert comparison.result["attribution"]["steps"] == []
