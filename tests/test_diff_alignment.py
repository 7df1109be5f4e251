"""Which slices are aligned: by the step that launched them, by call, by likeness where the order differs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from op_graphs.timeline import CommunicationGroup, Timeline
from op_graphs.vocabulary import Communication, FlowKind, OpKind, TrackRole
from tests.timelines import timeline_of
from tracesim.analysis import step_windows
from tracesim.diff import diff_timelines
from tracesim.diff.alignment import Alignment, align_timelines
from tracesim.diff.likeness import most_alike
from tracesim.diff.matcher import MOVED, PIECE, PRIMARY
from tracesim.diff.pairing import pair_ranks
from tracesim.diff.sequences import Gaps

STEP = 1_000_000
COMPUTE, COPIES, HOST = 0, 1, 2


@dataclass
class Launched:
    """A measured rank: calls of operators on the host, each with the kernels that it launches."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    flows: list[tuple[int, int, FlowKind]] = field(default_factory=list)
    steps: list[tuple[int, int, int, int]] = field(default_factory=list)

    def call(self, operator: str, at: int, kernels: list[dict[str, Any]]) -> None:
        """An operator at a time of the host; kernels have name, start, duration and kind, and a track if not 0."""
        outer = {
            "track": HOST,
            "start": at,
            "duration": 10 * len(kernels) + 10,
            "name": operator,
            "kind": OpKind.HOST,
        }
        self.rows.append(outer)
        for number, kernel in enumerate(kernels):
            launch = {"track": HOST, "start": at + 5 + 10 * number, "duration": 2, "name": "cudaLaunchKernel"}
            self.rows += [launch | {"kind": OpKind.HOST}, {"track": COMPUTE, "kind": OpKind.GEMM} | kernel]
            self.flows.append((len(self.rows) - 2, len(self.rows) - 1, FlowKind.LAUNCH))

    def timeline(self) -> Timeline:
        tracks = [
            (0, TrackRole.DEVICE, "stream 7"),
            (0, TrackRole.DEVICE, "stream 8"),
            (0, TrackRole.HOST, "thread"),
        ]
        return timeline_of(self.rows, tracks=tracks, flows=self.flows, steps=self.steps)


def aligned(a: Timeline, b: Timeline) -> Alignment:
    return align_timelines(a, b, pair_ranks(a, b, step_windows(a), step_windows(b)))


def matches(alignment: Alignment) -> set[tuple[str, str, int]]:
    """Names on both sides, and how they were found."""
    names = [
        [timeline.string(int(name)) for name in timeline.slices.name[rows]]
        for timeline, rows in ((alignment.a, alignment.row_a), (alignment.b, alignment.row_b))
    ]
    return set(zip(*names, alignment.how.tolist(), strict=True))


def training(steps: int, lag: int, tail: int = 0) -> Timeline:
    """Steps of a copy of the batch and two products; the compute stream is late by ``lag``, copies never are.

    With a tail there is a product whose launch was before the trace.
    """
    run = Launched()
    if tail:
        run.rows.append({"track": COMPUTE, "start": 0, "duration": tail, "name": "gemm", "kind": OpKind.GEMM})
    for step in range(steps):
        now = step * STEP
        run.steps.append((0, step, now, now + STEP))
        copy = {"name": "Memcpy HtoD", "start": now + 100, "duration": 50_000, "kind": OpKind.MEMCPY}
        run.call("aten::copy_", now, [copy | {"track": COPIES}])
        for number in range(2):
            kernel = {"name": "gemm", "start": now + lag + 100_000 + number * 450_000, "duration": 440_000}
            run.call("aten::mm", now + 1000 * (number + 1), [kernel])
    return run.timeline()


# -- steps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 300_000, 900_000, 2_500_000])
def test_what_a_step_launched_matches_what_that_step_launched(lag):
    # However far the device is behind: copies of later steps then run beside products of earlier ones.
    a, b = training(6, 0), training(6, lag)
    found = aligned(a, b)
    launched = [
        np.searchsorted(t.steps.start, t.slices.start[t.flows.source], side="right")[
            np.argsort(t.flows.target)
        ]
        for t in (a, b)
    ]
    device = [np.sort(t.flows.target) for t in (a, b)]
    step_a = launched[0][np.searchsorted(device[0], found.row_a)]
    step_b = launched[1][np.searchsorted(device[1], found.row_b)]
    assert (step_a == step_b).all()
    assert (found.how == PRIMARY).all()
    assert len(found.how) == 6 * 3


def test_the_end_of_a_step_before_the_trace_is_outside():
    result = diff_timelines(training(3, 0), training(3, 800_000, tail=800_000))
    matched = result["matched"]
    assert (matched["fraction_a"], matched["fraction_b"]) == (1, 1)
    assert (matched["outside_a_ns"], matched["outside_b_ns"]) == (0, 800_000)
    assert [(u["name"], u["count"], u["total_ns"]) for u in result["unmatched"]["b"]] == [
        ("gemm", 1, 800_000)
    ]


def test_ranks_and_steps_that_only_one_run_has_are_outside():
    result = diff_timelines(training(2, 0), training(5, 0))
    each = 50_000 + 2 * 440_000
    assert result["matched_fraction"] == 1
    assert (result["matched"]["outside_a_ns"], result["matched"]["outside_b_ns"]) == (0, 3 * each)


# -- calls -------------------------------------------------------------------------------------------------------


def single_step(*calls: tuple[str, list[tuple[str, int, OpKind]]]) -> Timeline:
    """Calls of one step, kernels back to back."""
    run, now = Launched(), 1000
    for number, (operator, kernels) in enumerate(calls):
        rows = []
        for name, duration, kind in kernels:
            rows.append({"name": name, "start": now, "duration": duration, "kind": kind})
            now += duration
        run.call(operator, 1000 * number, rows)
    run.steps.append((0, 1, 0, now))
    return run.timeline()


CONVOLUTION = OpKind.CONVOLUTION


def test_of_calls_with_different_kernels_the_longest_match():
    offsets, main = ("computeOffsetsKernel", 2_000, CONVOLUTION), ("scudnn_128x64_relu", 90_000, CONVOLUTION)
    other = ("implicit_convolve_sgemm", 110_000, CONVOLUTION)
    a = single_step(("aten::cudnn_convolution", [offsets, main]))
    found = aligned(a, single_step(("aten::cudnn_convolution", [other])))
    assert matches(found) == {
        ("scudnn_128x64_relu", "implicit_convolve_sgemm", PRIMARY),
        ("computeOffsetsKernel", "implicit_convolve_sgemm", PIECE),
    }


def test_of_calls_with_as_many_kernels_each_matches_the_one_in_its_place():
    a = single_step(("aten::mm", [("split", 40_000, OpKind.GEMM), ("reduce", 50_000, OpKind.GEMM)]))
    b = single_step(("aten::mm", [("Cijk_1", 60_000, OpKind.GEMM), ("Cijk_2", 30_000, OpKind.GEMM)]))
    assert matches(aligned(a, b)) == {("split", "Cijk_1", PRIMARY), ("reduce", "Cijk_2", PRIMARY)}


def test_a_compiled_graph_with_an_order_of_its_own():
    products = [(f"sgemm_{size}", 1_000 * size, OpKind.GEMM) for size in (1, 1600, 64_000, 40)]
    eager = single_step(*(("aten::mm", [product]) for product in products))
    compiled = [(name.replace("sgemm", "tensorop"), ns, kind) for name, ns, kind in reversed(products)]
    fills = [(f"clone_{number}", 3_000, OpKind.MEMCPY) for number in range(20)]
    found = aligned(eager, single_step(("CompiledFunction", [*compiled, *fills])))
    pairs = matches(found)
    assert {(x, y) for x, y, _ in pairs} == {(f"sgemm_{n}", f"tensorop_{n}") for n in (1, 40, 1600, 64_000)}
    assert MOVED in {how for *_, how in pairs}


def test_in_a_call_of_many_kernels_nothing_is_a_piece_of_another():
    many = [(f"pointwise_{number}", 1_000, OpKind.ELEMENTWISE) for number in range(30)]
    a = single_step(("CompiledFunction", [("gemm_a", 50_000, OpKind.GEMM)]))
    b = single_step(("CompiledFunction", [("gemm_b", 50_000, OpKind.GEMM), *many]))
    assert matches(aligned(a, b)) == {("gemm_a", "gemm_b", PRIMARY)}


def test_a_product_is_no_piece_of_an_addition():
    a = single_step(("aten::add", [("add_a", 9_000, OpKind.ELEMENTWISE)]))
    b = single_step(("aten::add", [("add_b", 9_000, OpKind.ELEMENTWISE), ("gemm", 90_000, OpKind.GEMM)]))
    assert matches(aligned(a, b)) == {("add_a", "add_b", PRIMARY)}


@pytest.mark.parametrize(("factor", "same"), [(20, True), (50, False)])
def test_place_and_kind_do_not_make_a_head_out_of_a_small_product(factor, same):
    a = single_step(("mine", [("head", 10_000, OpKind.GEMM)]))
    b = single_step(("other", [("Cijk", 10_000 * factor, OpKind.GEMM)]))
    assert bool(matches(aligned(a, b))) == same


# -- communication ------------------------------------------------------------------------------------------------


def reduced(*members: int) -> Timeline:
    """All-reduces of equal size back to back, each in a group of so many ranks."""
    reduction = {
        "kind": OpKind.COLLECTIVE,
        "communication": Communication.ALL_REDUCE,
        "communication_bytes": 1 << 20,
    }
    sizes = sorted(set(members))
    return timeline_of(
        [
            {
                "track": 0,
                "start": 1000 * i,
                "duration": 900 - i,
                "name": f"all_reduce {size}",
                "group": sizes.index(size),
            }
            | reduction
            for i, size in enumerate(members)
        ],
        tracks=[(0, TrackRole.DEVICE, "stream 20")],
        groups=tuple(CommunicationGroup(f"group {size}", (), size) for size in sizes),
        steps=[(0, 1, 0, 1000 * len(members))],
    )


def test_collectives_match_by_the_size_of_their_group():
    # A reduction of two ranks is gone, and names tell nothing: those of eight still match each other.
    a, b = reduced(2, 8, 2, 8, 2, 8), reduced(8, 2, 8, 8, 2)
    a, b = (
        replace(t, strings=tuple(s.partition(" ")[0] if "all" in s else s for s in t.strings)) for t in (a, b)
    )
    found = aligned(a, b)
    sizes = [
        [timeline.groups[group].size for group in timeline.slices.group[rows].tolist()]
        for timeline, rows in ((a, found.row_a), (b, found.row_b))
    ]
    assert sizes[0] == sizes[1]
    assert sorted(sizes[0]) == [2, 2, 8, 8, 8]


def test_copies_match_by_their_bytes():
    def copied(*sizes: int) -> Timeline:
        rows = [
            {
                "track": 0,
                "start": 1000 * i,
                "duration": 500,
                "name": "Memcpy",
                "kind": OpKind.MEMCPY,
                "bytes": size,
            }
            for i, size in enumerate(sizes)
        ]
        return timeline_of(
            rows, tracks=[(0, TrackRole.DEVICE, "stream 7")], steps=[(0, 1, 0, 1000 * len(sizes))]
        )

    a, b = copied(1 << 10, 1 << 24, 1 << 12), copied(1 << 24, 1 << 12)
    found = aligned(a, b)
    assert [(int(x), int(y)) for x, y in zip(found.row_a, found.row_b, strict=True)] == [(1, 0), (2, 1)]


# -- likeness ----------------------------------------------------------------------------------------------------


@st.composite
def tables(draw: st.DrawFn) -> np.ndarray:
    """Similarities that are all different by more than what distance counts; a third of the pairs cannot match."""
    n, m = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    values = draw(st.permutations(range(n * m)))
    return np.maximum(np.array(values, dtype=np.float32).reshape(n, m) - n * m // 3, 0)


@given(tables())
def test_the_most_alike_pair_comes_first(table):
    n, m = table.shape
    x, y = most_alike(Gaps(*(np.array([size]) for size in (0, 0, n, m))), lambda i, j: table[i, j])
    # Oracle: the largest of what is free, again and again.
    rest, wanted = table.copy(), set()
    while rest.max() > 0:
        i, j = np.unravel_index(rest.argmax(), rest.shape)
        wanted.add((int(i), int(j)))
        rest[i, :] = rest[:, j] = 0
    assert set(zip(x.tolist(), y.tolist(), strict=True)) == wanted


def test_nothing_alike_is_nothing_matched():
    gaps = Gaps(*(np.array([x]) for x in (0, 0, 3, 4)))
    x, y = most_alike(gaps, lambda i, j: np.zeros(np.broadcast(i, j).shape, dtype=np.float32))
    assert (len(x), len(y)) == (0, 0)
