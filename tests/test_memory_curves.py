"""Memory over time: a buffer lives from the start of the operation that allocates it to the end of its last use."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardware_profiles import load_profile
from op_graphs.vocabulary import MemoryCategory
from tests.graphs import graph_of
from tracesim.engine import execute
from tracesim.memory.curves import LiveTensor, memory_curve
from tracesim.memory.job import reserved_memory
from tracesim.memory.workspaces import library_workspaces

WEIGHTS, ACTIVATIONS, TEMPORARY = MemoryCategory.WEIGHTS, MemoryCategory.ACTIVATIONS, MemoryCategory.TEMPORARY
MIB = 2**20


def curve_of(operations, durations, buffers, rank=0):
    graph = graph_of(operations, buffers=buffers)
    return memory_curve(graph, execute(graph, np.array(durations, dtype=np.int64)), rank)


@pytest.mark.parametrize(
    ("buffers", "expected"),
    [
        # alive from the start of operation 0 to the end of operation 1
        ([{"allocate": 0, "release": 1, "size": 5}], {0: 5, 30: 0}),
        ([{"allocate": 1, "release": 1, "size": 5}], {0: 0, 10: 5, 30: 0}),
        # there before the step and after it
        ([{"allocate": -1, "release": -1, "size": 7}], {0: 7}),
        ([{"allocate": -1, "release": 0, "size": 7}], {0: 7, 10: 0}),
        ([{"allocate": 2, "release": -1, "size": 7}], {0: 0, 30: 7}),
        # at one instant what is released makes room for what is allocated
        ([{"allocate": 0, "release": 0, "size": 8}, {"allocate": 1, "release": 2, "size": 8}],
         {0: 8, 10: 8, 60: 0}),
        ([], {0: 0}),
    ],
)  # fmt: skip
def test_a_buffer_lives_as_long_as_its_operations(buffers, expected):
    curve = curve_of([{}, {}, {}], [10, 20, 30], buffers)
    assert dict(zip(curve.time.tolist(), curve.allocated.tolist(), strict=True)) == expected
    assert curve.peak == max(expected.values())


def test_buffers_are_summed_by_category_and_named_at_the_peak():
    curve = curve_of(
        [{}, {}, {}],
        [10, 10, 10],
        [
            {"allocate": -1, "size": 100, "category": WEIGHTS, "name": "weights"},
            {"allocate": 0, "release": 2, "size": 30, "name": "input"},
            {"allocate": 1, "release": 2, "size": 40, "name": "input"},
            {"allocate": 1, "release": 1, "size": 9, "category": TEMPORARY, "name": "scratch"},
            {"allocate": 2, "release": 2, "size": 8, "category": TEMPORARY, "name": "late"},
        ],
    )
    assert curve.time.tolist() == [0, 10, 20, 30]
    assert curve.by_category[WEIGHTS].tolist() == [100, 100, 100, 100]
    assert curve.by_category[ACTIVATIONS].tolist() == [30, 70, 70, 0]
    assert curve.by_category[TEMPORARY].tolist() == [0, 9, 8, 0]
    assert (int(curve.time[curve.peak_moment]), curve.peak) == (10, 179)
    assert curve.alive_at_peak == (
        LiveTensor("weights", WEIGHTS, 1, 100),
        LiveTensor("input", ACTIVATIONS, 2, 70),
        LiveTensor("scratch", TEMPORARY, 1, 9),
    )


def test_each_rank_has_its_own():
    operations = [{}, {"rank": 1}]
    buffers = [{"allocate": 0, "release": 0, "size": 5}, {"rank": 1, "allocate": 1, "release": 1, "size": 9}]
    assert [curve_of(operations, [3, 4], buffers, rank).peak for rank in (0, 1)] == [5, 9]


BUFFER = st.tuples(
    st.integers(-1, 5), st.integers(-1, 5), st.integers(0, 99), st.sampled_from(MemoryCategory)
)


@given(st.lists(st.integers(1, 9), min_size=6, max_size=6), st.lists(BUFFER, max_size=12))
def test_the_curve_is_the_sum_of_live_buffers(durations, drawn):
    buffers = [
        {"allocate": min(a, r) if r >= 0 else a, "release": r, "size": size, "category": category}
        for a, r, size, category in drawn
    ]
    curve = curve_of([{}] * 6, durations, buffers)
    starts = np.concatenate([[0], np.cumsum(durations)]).tolist()
    for moment, allocated in zip(curve.time.tolist(), curve.allocated.tolist(), strict=True):
        alive = [
            b
            for b in buffers
            if (b["allocate"] < 0 or starts[b["allocate"]] <= moment)
            and (b["release"] < 0 or starts[b["release"] + 1] > moment)
        ]
        assert allocated == sum(b["size"] for b in alive)
        if moment == curve.time[curve.peak_moment]:
            assert sum(tensor.count for tensor in curve.alive_at_peak) == len(alive)
            assert sum(tensor.size for tensor in curve.alive_at_peak) == curve.peak
    assert sorted(set(curve.time.tolist())) == curve.time.tolist()
    assert curve.peak == curve.allocated.max()


def test_reserved_memory_follows_program_order_not_the_clock():
    """Two streams run beside each other, so both buffers are alive at once on the clock; in program order not."""
    operations = [{}, {"stream": 1}]
    buffers = [{"allocate": row, "release": row, "size": 20 * MIB} for row in (0, 1)]
    graph = graph_of(operations, buffers=buffers)
    assert memory_curve(graph, execute(graph, np.array([5, 5])), 0).peak == 40 * MIB
    assert reserved_memory(graph, 0).usage.peak_reserved == 20 * MIB


@pytest.mark.parametrize(
    ("profile", "mib"),
    [
        # two cuBLAS workspaces and Transformer Engine's
        ("h100-sxm", 2 * 32 + 32),
        ("a100-sxm-80g", 2 * 8.125 + 4),
    ],
)
def test_workspaces_of_libraries(profile, mib):
    assert sum(library_workspaces(load_profile(profile))) == mib * MIB
