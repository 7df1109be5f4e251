"""Alignment of sequences: what is rare anchors, what is left is matched as well as it can be, and nothing crosses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from op_graphs.vocabulary import OpKind
from tests.layered_runs import Kernel, LayeredRun
from tracesim.analysis import Window, step_windows
from tracesim.diff.alignment import align_timelines
from tracesim.diff.operations import name_similarity
from tracesim.diff.pairing import pair_ranks, pair_steps
from tracesim.diff.sequences import Gaps, align


def aligned(a: str, b: str, with_keys: bool = True) -> str:
    """The letters of ``a`` that are matched, those of ``b`` in brackets where they differ; cases are alike."""
    keys = [np.array([ord(c) for c in text], dtype=np.int64) for text in (a, b)]
    lower = [np.array([ord(c.lower()) for c in text], dtype=np.int64) for text in (a, b)]
    gaps = Gaps(*(np.array([n]) for n in (0, 0, len(a), len(b))))

    def prepare(left_a, left_b):
        return lambda i, j: np.where(
            lower[0][i] == lower[1][j], np.where(keys[0][i] == keys[1][j], 1, 0.5), 0
        ).astype(np.float32)

    x, y = align(len(a), gaps, [(keys[0], keys[1])] if with_keys else [], prepare)
    assert (np.diff(x) > 0).all()
    assert (np.diff(y) > 0).all()
    return "".join(a[i] + (f"[{b[j]}]" if a[i] != b[j] else "") for i, j in zip(x, y, strict=True))


@pytest.mark.parametrize(
    ("a", "b", "matched"),
    [
        ("abcabc", "abcabc", "abcabc"),
        ("abcabcabc", "abcacabc", "abcacabc"),
        ("abcabc", "abxcaybc", "abcabc"),
        ("abcdef", "abCdef", "abc[C]def"),
        ("aXbcaYbc", "abcabc", "abcabc"),
        ("xabc", "abcx", "abc"),
        ("abc", "xyz", ""),
        ("", "abc", ""),
        ("aaaa", "aa", "aa"),
    ],
)
def test_letters(a, b, matched):
    assert aligned(a, b) == matched


letters = st.text(alphabet="abcdABCD", max_size=24)


def longest_common(a: str, b: str) -> int:
    """Length of the longest common subsequence, ignoring case."""
    row = [0] * (len(b) + 1)
    for x in a.lower():
        before = 0
        for j, y in enumerate(b.lower()):
            before, row[j + 1] = row[j + 1], before + 1 if x == y else max(row[j + 1], row[j])
    return row[-1]


@given(st.text(alphabet="abcd", max_size=30), st.text(alphabet="abcd", max_size=30))
def test_without_anchors_as_much_is_matched_as_can_be(a, b):
    assert len(aligned(a, b, with_keys=False)) == longest_common(a, b)


@given(letters, letters)
def test_only_what_is_alike_is_matched_and_in_order(a, b):
    aligned(a, b)


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.integers(200, 500), st.lists(st.integers(0, 199), max_size=12))
def test_in_a_band_the_diagonal_is_found(seed, length, dropped):
    text = "".join("abcdefghij"[k] for k in np.random.default_rng(seed).integers(0, 10, length))
    shorter = "".join(c for i, c in enumerate(text) if i not in set(dropped))
    assert aligned(text, shorter, with_keys=False) == shorter
    assert len(aligned(shorter, text)) >= 0.9 * len(shorter)


def test_words_of_names_tell_how_alike_kernels_are():
    names = [
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)",
        "ncclDevKernel_AllGather_RING_LL(ncclDevComm*)",
    ]
    other = ["ncclKernel_AllReduce_RING_LL_Sum_float", "volta_sgemm_128x32_nn"]
    similar = name_similarity(names, [*other, names[0]])
    assert similar[0, 2] == 1
    assert similar[0, 0] > 1.5 * similar[1, 0] > 0
    assert similar[0, 1] < 0.1


# -- which steps and ranks ---------------------------------------------------------------------------------------


def windows(*steps: int) -> list[Window]:
    return [Window(0, number, 10 * i, 10 * i + 10) for i, number in enumerate(steps)]


@pytest.mark.parametrize(
    ("a", "b", "pairs"),
    [
        ((5, 6, 7), (5, 6, 7), [(5, 5), (6, 6), (7, 7)]),
        ((5, 6, 7), (6, 7, 8, 9), [(5, 6), (6, 7), (7, 8)]),
        ((5, 6, 7, 8), (6, 7, 8), [(6, 6), (7, 7), (8, 8)]),
        ((0,), (10, 11), [(0, 10), (0, 11)]),
        ((1, 2), (101, 102), [(1, 101), (2, 102)]),
    ],
)
def test_steps_pair_by_number_or_by_order_whichever_pairs_more(a, b, pairs):
    assert [(p.a.step, p.b.step) for p in pair_steps(windows(*a), windows(*b))] == pairs


@pytest.mark.parametrize(
    ("a", "b", "pairs"),
    [((0, 1), (0, 1), [(0, 0), (1, 1)]), ((0, 4), (4, 7), [(1, 0)]), ((3,), (1,), [(0, 0)])],
)
def test_ranks_pair_by_number_and_by_order_where_none_is_common(a, b, pairs):
    runs = []
    for numbers in (a, b):
        timeline = LayeredRun(((Kernel("gemm", 1000),),), ranks=len(numbers)).timeline()
        runs.append((timeline, numbers))
    first, second = (
        type(t)(**{**t.__dict__, "ranks": t.ranks.with_columns(rank=np.array(n))}) for t, n in runs
    )
    found = pair_ranks(first, second, step_windows(first), step_windows(second))
    assert [(rank.a, rank.b) for rank in found] == pairs


# -- operations --------------------------------------------------------------------------------------------------


def matched_names(a: LayeredRun, b: LayeredRun) -> set[tuple[str, str]]:
    """Names of what matches on rank 0."""
    first, second = a.timeline(), b.timeline()
    ranks = pair_ranks(first, second, step_windows(first), step_windows(second))
    found = align_timelines(first, second, ranks)
    names = [
        [timeline.string(int(n)) for n in timeline.slices.name[rows]]
        for timeline, rows in ((first, found.row_a), (second, found.row_b))
    ]
    return set(zip(*names, strict=True))


def test_a_kernel_of_another_name_is_found_by_its_place():
    layer = [Kernel("norm_kernel", 10_000), Kernel("sm80_gemm_tn", 90_000), Kernel("softmax", 20_000)]
    run = LayeredRun((tuple(layer),) * 3)
    renamed = run.edited(1, [layer[0], Kernel("Cijk_Alik_Bljk", 70_000), layer[2]])
    assert ("sm80_gemm_tn", "Cijk_Alik_Bljk") in matched_names(run, renamed)


def test_different_kinds_do_not_match():
    run = LayeredRun(((Kernel("x", 9_000),), (Kernel("same", 9_000),)))
    other = run.edited(0, [Kernel("x", 9_000, OpKind.MEMSET)])
    assert not {pair for pair in matched_names(run, other) if "x" in pair}


def test_the_clock_of_the_other_side_is_fitted():
    run = LayeredRun((tuple(Kernel(f"k{i}", 10_000) for i in range(8)),))
    first, second = run.timeline(), LayeredRun(run.layers, epoch=123_456_789).timeline()
    ranks = pair_ranks(first, second, step_windows(first), step_windows(second))
    clocks = align_timelines(first, second, ranks).clocks
    assert [(c.offset, c.spread, c.anchors) for c in clocks] == [(123_456_789, 0, 9)] * 2
