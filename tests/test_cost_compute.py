"""Compute durations: closed forms of each formula, and properties of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardware_profiles.profile import (
    AttentionFigures,
    GemmFigures,
    GemmTile,
    HardwareProfile,
    HostFigures,
    LinkFigures,
    MeasuredAttention,
    MeasuredGemm,
    MemoryFigures,
    NetworkFigures,
)
from op_graphs.graph import (
    OPERATION_DEFAULTS,
    AttentionShape,
    Buffers,
    GemmShape,
    MemoryShape,
    Operations,
    OpGraph,
    Segments,
    Shape,
)
from op_graphs.timeline import CommunicationGroup
from op_graphs.vocabulary import Communication, DType, OpKind
from tracesim.cost import ComputeCost, CostModel, Provenance
from tracesim.cost.attention import attention_flops
from tracesim.cost.distinct import distinct_rows

LINK = LinkFigures(bandwidth_gb_per_s=100, efficiency=1.0, latency_us=1.0)

# 100 SMs at 1 TFLOP/s each, so a 100 x 100 tile at K = 1 takes 20,000 FLOP / 1,000 FLOP/ns = 20 ns.
ROUND = HardwareProfile(
    name="round",
    description="",
    vendor="none",
    sm_count=100,
    peak_tflops={"bf16": 100.0, "tf32": 50.0, "fp8": 200.0},
    gemm=GemmFigures((GemmTile(100, 100),), 1.0, 1.0, 0.0, 0.0),
    attention=AttentionFigures(0.5, 0.5, 0.0, wide_head_ratio=0.8),
    memory=MemoryFigures(80, 1000, 1.0, 0.5, 0.25, kernel_floor_us=2.0, kernel_gap_us=1.5),
    network=NetworkFigures(8, LINK, LINK, collective_base_us=0.0),
    host=HostFigures(5.0),
    sources={},
)
A100_PCIE = replace(
    ROUND,
    name="a100",
    sm_count=108,
    peak_tflops={"bf16": 312.0},
    gemm=GemmFigures(
        (GemmTile(128, 256),), 0.85, 0.752, 100, 0.45, grouped_per_expert_us=1.3, grouped_exposed_traffic=0.5
    ),
    attention=AttentionFigures(0.678, 0.75, 128.0),
    memory=MemoryFigures(80, 1935, 0.724, 0.65, 0.45, 2.0, 1.2),
)
B200 = replace(
    ROUND,
    name="b200",
    sm_count=148,
    peak_tflops={"bf16": 2250.0},
    gemm=GemmFigures(
        (GemmTile(128, 256), GemmTile(256, 128), GemmTile(128, 128, 0.85)), 0.78, 0.498, 100, 0.45, 2.9, 0.557
    ),
    attention=AttentionFigures(0.549, 0.75, 31.0),
    memory=MemoryFigures(180, 8000, 0.85, 0.65, 0.45, 2.0, 1.2),
)


def with_gemm(**figures: Any) -> HardwareProfile:
    return replace(ROUND, gemm=replace(ROUND.gemm, **figures))


def graph_of(
    rows: list[dict[str, Any]], shapes: tuple[Shape, ...], strings: tuple[str, ...] = ("op",)
) -> OpGraph:
    operations = Operations.from_rows(rows, **{**OPERATION_DEFAULTS, "name": 0})
    return OpGraph(
        strings=strings,
        ranks=np.array([0]),
        operations=operations,
        dependency_offsets=np.zeros(len(rows) + 1, dtype=np.int64),
        dependencies=np.empty(0, dtype=np.int64),
        segments=Segments.empty(),
        buffers=Buffers.empty(),
        shapes=shapes,
    )


# ---- matrix products: closed forms -------------------------------------------------------------------------

K = 4000
ONE_WAVE_NS = 20_000 * K // 1_000  # every SM computes one tile: 80 us

GEMM_CASES = {
    "one tile costs a whole wave": (ROUND, GemmShape(100, 100, K), ONE_WAVE_NS),
    "one element costs a whole tile": (ROUND, GemmShape(8, 8, K), ONE_WAVE_NS),
    "exactly one wave": (ROUND, GemmShape(1000, 1000, K), ONE_WAVE_NS),
    "one tile more starts a second wave": (ROUND, GemmShape(1000, 1008, K), 2 * ONE_WAVE_NS),
    "exactly three waves": (ROUND, GemmShape(1000, 3000, K), 3 * ONE_WAVE_NS),
    "half the rate doubles the time": (
        with_gemm(mainloop_efficiency=0.5),
        GemmShape(1000, 1000, K),
        2 * ONE_WAVE_NS,
    ),
    "the power cap hides a partial wave": (
        with_gemm(sustained_efficiency=0.25),
        GemmShape(1000, 1000, K),
        4 * ONE_WAVE_NS,
    ),
    "fill and drain count as K": (
        with_gemm(prologue_k=K / 2),
        GemmShape(1000, 1000, K),
        3 * ONE_WAVE_NS // 2,
    ),
    "half of a 2-byte output at 1000 B/ns": (
        with_gemm(exposed_epilogue=0.5),
        GemmShape(1000, 1000, K),
        ONE_WAVE_NS + 1000,
    ),
    "half of an fp32 output, read and written": (
        with_gemm(exposed_epilogue=0.5),
        GemmShape(1000, 1000, K, "NT", output=DType.FP32, accumulate=True),
        ONE_WAVE_NS + 4000,
    ),
    "a smaller, slower tile wins where it wastes less": (
        with_gemm(tiles=(GemmTile(100, 100), GemmTile(50, 50, 0.5))),
        GemmShape(50, 48, K),
        ONE_WAVE_NS // 2,
    ),
    "fp8 doubles the peak": (ROUND, GemmShape(1000, 1000, K, dtype=DType.FP8), ONE_WAVE_NS // 2),
    "fp16 runs at the bf16 peak": (ROUND, GemmShape(1000, 1000, K, dtype=DType.FP16), ONE_WAVE_NS),
    "a tiny product costs the kernel floor": (ROUND, GemmShape(8, 8, 8), 2000),
    "split in four along K where tiles are few": (ROUND, GemmShape(100, 100, 10_000), 20 * 10_000 // 4),
    "four products of 25 tiles share one wave": (ROUND, GemmShape(500, 500, K, count=4), ONE_WAVE_NS),
    # 2 * (1e6 * 8 + 8 * 8 + 1e6 * 8) bytes at 1000 B/ns; its 10,000 tiles take 100 waves of 160 ns.
    "memory bound": (ROUND, GemmShape(1_000_000, 8, 8), 32_000),
}


@pytest.fixture
def any_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round sizes, whose rows are not multiples of 16 bytes, at the rate of those that are."""
    monkeypatch.setattr("tracesim.cost.gemm.alignment_ratio", lambda shape: 1.0)


@pytest.mark.usefixtures("any_alignment")
@pytest.mark.parametrize("case", GEMM_CASES)
def test_gemm_equals_its_closed_form(case: str) -> None:
    profile, shape, expected_ns = GEMM_CASES[case]
    assert ComputeCost(profile).duration_ns(shape, kind=OpKind.GEMM) == expected_ns


def test_fewer_sms_make_more_waves_and_longer_ones_never() -> None:
    shape = GemmShape(1000, 1000, K)
    # 50 SMs at the same rate each: two waves of the same length.
    assert ComputeCost(ROUND, available_sms=50).duration_ns(shape) == 2 * ONE_WAVE_NS
    # 96 of 100 SMs still need two waves, the second nearly empty.
    assert ComputeCost(ROUND, available_sms=96).duration_ns(shape) == 2 * ONE_WAVE_NS


@pytest.mark.usefixtures("any_alignment")
def test_grouped_gemm_sums_start_work_and_traffic() -> None:
    profile = with_gemm(grouped_per_expert_us=3.0, grouped_exposed_traffic=0.5, sustained_efficiency=0.5)
    shape = GemmShape(100, 100, 1000, count=4)
    work_ns = 4 * 2 * 100 * 100 * 1000 / 50_000
    traffic_ns = 0.5 * 4 * 2 * (2 * 100 * 1000 + 100 * 100) / 1000
    expected = round(4 * 3000 + work_ns + traffic_ns)
    assert ComputeCost(profile).duration_ns(shape, kind=OpKind.GROUPED_GEMM) == expected
    # The same product as one strided-batch kernel runs its four tiles side by side, at the sustained rate or slower.
    assert ComputeCost(profile).duration_ns(shape, kind=OpKind.GEMM) == 20_000


# ---- matrix products: properties ---------------------------------------------------------------------------

SIZES = st.integers(1, 64).map(lambda n: n * 64)
MACHINES = st.sampled_from([ROUND, A100_PCIE, B200])
LAYOUTS = st.sampled_from([("TN", DType.BF16, False), ("NN", DType.BF16, False), ("NT", DType.FP32, True)])


@given(MACHINES, SIZES, SIZES, SIZES, LAYOUTS, st.integers(1, 40))
def test_gemm_is_positive_and_grows_with_m(
    profile: HardwareProfile, m: int, n: int, k: int, layout: tuple[str, DType, bool], more: int
) -> None:
    name, output, accumulate = layout
    cost = ComputeCost(profile)
    small, large = (
        cost.duration_ns(GemmShape(rows, n, k, name, DType.BF16, output, accumulate))
        for rows in (m, m + 64 * more)
    )
    assert 0 < small <= large


@given(MACHINES, SIZES, SIZES, SIZES)
def test_gemm_never_beats_the_roofline(profile: HardwareProfile, m: int, n: int, k: int) -> None:
    time_ns = ComputeCost(profile).duration_ns(GemmShape(m, n, k))
    assert time_ns >= 2.0 * m * n * k / (profile.peak_tflops["bf16"] * 1e3) - 1
    assert time_ns >= 2.0 * (m * k + k * n + m * n) / profile.memory.bandwidth_gb_per_s - 1


@given(MACHINES, SIZES, SIZES, SIZES, st.sampled_from(["GEMM", "GROUPED_GEMM"]), st.floats(1.0, 10.0))
def test_a_faster_machine_is_never_slower(
    profile: HardwareProfile, m: int, n: int, k: int, kind: str, factor: float
) -> None:
    shape = GemmShape(m, n, k, count=3)
    memory = replace(profile.memory, bandwidth_gb_per_s=profile.memory.bandwidth_gb_per_s * factor)
    peaks = {name: peak * factor for name, peak in profile.peak_tflops.items()}
    before = ComputeCost(profile).duration_ns(shape, kind=OpKind[kind])
    for faster in (replace(profile, memory=memory), replace(profile, peak_tflops=peaks)):
        assert ComputeCost(faster).duration_ns(shape, kind=OpKind[kind]) <= before


# ---- attention ---------------------------------------------------------------------------------------------

SQUARE = AttentionShape(1, 4096, 4096, 8, 8, 128, 128)

PAIRS = {
    "causal square, half": (SQUARE, 4096 * 4096 / 2),
    "full square": (replace(SQUARE, causal=False), 4096 * 4096),
    "causal, one query sees every key": (replace(SQUARE, query_length=1, key_length=1000), 999.5),
    "causal, later half of the queries": (replace(SQUARE, query_length=2048), 2048 * 3072),
    "causal, more queries than keys": (replace(SQUARE, query_length=8192), 4096 * 4096 / 2),
    "window of 1024": (replace(SQUARE, window=1024), 1024 * 1024 / 2 + 3072 * 1024),
    "window as long as the keys": (replace(SQUARE, window=4096), 4096 * 4096 / 2),
    "window without causal mask": (replace(SQUARE, causal=False, window=512), 4096 * 512),
}


@pytest.mark.parametrize("case", PAIRS)
def test_attention_counts_the_pairs_the_mask_leaves(case: str) -> None:
    shape, pairs = PAIRS[case]
    assert attention_flops(shape) == 2 * 8 * pairs * (128 + 128)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 50), st.booleans())
def test_continuous_pairs_follow_a_count_of_the_discrete_mask(
    queries: int, keys: int, window: int, causal: bool
) -> None:
    shape = AttentionShape(1, queries, keys, 1, 1, 1, 1, causal=causal, window=window)
    limit = min(window, keys) if window else keys
    visible = [keys - queries + i + 1 if causal else keys for i in range(queries)]
    count = sum(min(max(seen, 0), limit) for seen in visible)
    # The continuum takes half of the diagonal's pairs.
    assert count - queries <= attention_flops(shape) / 4 <= count


def test_attention_is_work_over_efficiency() -> None:
    cost = ComputeCost(ROUND)
    work = 2 * 8 * (4096**2 / 2) * 256
    assert cost.duration_ns(SQUARE) == round(work / (100_000 * 0.5))
    # Backward: five products instead of two at half the efficiency.
    assert cost.duration_ns(replace(SQUARE, backward=True)) == round(2.5 * work / (100_000 * 0.25))
    wide = replace(SQUARE, head_size=192)
    assert cost.duration_ns(wide) == round(work * (192 + 128) / 256 / (100_000 * 0.4))


def test_flops_of_the_operation_stand_for_masks_the_shape_cannot_say() -> None:
    cost = ComputeCost(ROUND)
    assert cost.duration_ns(SQUARE, flops=5e9) == round(5e9 / 50_000)


def test_fixed_cost_is_added_once() -> None:
    slow_start = replace(ROUND, attention=replace(ROUND.attention, fixed_us=10.0))
    assert ComputeCost(slow_start).duration_ns(SQUARE) == ComputeCost(ROUND).duration_ns(SQUARE) + 10_000


# ---- memory-bound kernels ----------------------------------------------------------------------------------

MEMORY_CASES = {
    "stream": (MemoryShape("stream"), 2000 + 10_000),
    "reduction reaches half": (MemoryShape("reduction"), 2000 + 20_000),
    "strided reaches a quarter": (MemoryShape("strided"), 2000 + 40_000),
    "columns are strided where nothing else is known": (MemoryShape("columns"), 2000 + 40_000),
    "a floor for each pass": (MemoryShape("stream", passes=3), 6000 + 10_000),
}


@pytest.mark.parametrize("case", MEMORY_CASES)
def test_memory_bound_is_floor_plus_bytes(case: str) -> None:
    shape, expected_ns = MEMORY_CASES[case]
    assert ComputeCost(ROUND).duration_ns(shape, bytes_read=6e6, bytes_written=4e6) == expected_ns


@given(st.floats(0, 1e12), st.floats(0, 1e12), st.sampled_from(["stream", "reduction", "strided", "columns"]))
def test_memory_bound_grows_with_bytes(one: float, other: float, access: str) -> None:
    cost = ComputeCost(ROUND)
    fewer, more = (cost.duration_ns(MemoryShape(access), bytes_read=size) for size in sorted((one, other)))
    assert 0 < fewer <= more


SHAPELESS = {
    "copy streams": (OpKind.MEMCPY, 0.0, 12_000),
    "norm reduces": (OpKind.NORM, 0.0, 22_000),
    "permute strides": (OpKind.PERMUTE, 0.0, 42_000),
    "elementwise work is free": (OpKind.ELEMENTWISE, 1e12, 12_000),
    "convolution is bound by work": (OpKind.CONVOLUTION, 1e10, 2000 + 100_000),
    "host call": (OpKind.HOST, 0.0, 0),
    "annotation": (OpKind.ANNOTATION, 0.0, 0),
}


@pytest.mark.parametrize("case", SHAPELESS)
def test_operation_without_a_shape(case: str) -> None:
    kind, flops, expected_ns = SHAPELESS[case]
    assert ComputeCost(ROUND).duration_ns(None, flops, 5e6, 5e6, DType.BF16, kind) == expected_ns


def test_operation_with_nothing_to_do_is_free() -> None:
    assert ComputeCost(ROUND).duration_ns(None, kind=OpKind.ELEMENTWISE) == 0


def test_gap_belongs_to_the_timeline() -> None:
    cost = ComputeCost(ROUND)
    assert cost.gap_ns == 1500
    assert cost.duration_ns(GemmShape(1000, 1000, K)) == ONE_WAVE_NS


# ---- measured rows win -------------------------------------------------------------------------------------

MEASURED = replace(
    ROUND,
    measured_gemms=(
        MeasuredGemm(1000, 1000, K, "TN", "bf16", "bf16", False, 1, time_us=123.0),
        MeasuredGemm(1000, 1000, K, "NT", "bf16", "fp32", True, 1, time_us=456.0),
    ),
    measured_attentions=(
        MeasuredAttention(1, 4096, 4096, 8, 8, 128, 128, True, False, "bf16", time_us=77.0),
    ),
)
TABLE_SHAPE = GemmShape(1000, 1000, K)


@pytest.mark.parametrize(
    ("shape", "expected_ns"),
    [
        (TABLE_SHAPE, 123_000),
        (replace(TABLE_SHAPE, layout="NT", output=DType.FP32, accumulate=True), 456_000),
        (SQUARE, 77_000),
    ],
)
def test_measured_shape_wins(shape: Shape, expected_ns: int) -> None:
    estimate = ComputeCost(MEASURED).estimate(shape)
    assert (estimate.time_ns, estimate.provenance) == (expected_ns, Provenance.MEASURED)


@pytest.mark.parametrize(
    "shape",
    [
        replace(TABLE_SHAPE, layout="NN"),
        replace(TABLE_SHAPE, dtype=DType.FP16),
        replace(TABLE_SHAPE, output=DType.FP32),
        replace(TABLE_SHAPE, accumulate=True),
        replace(TABLE_SHAPE, m=1008),
        replace(TABLE_SHAPE, count=2),
        replace(SQUARE, backward=True),
        replace(SQUARE, kv_heads=1),
        replace(SQUARE, window=128),
    ],
)
def test_measured_row_of_another_shape_does_not_count(shape: Shape) -> None:
    assert ComputeCost(MEASURED).estimate(shape) == ComputeCost(ROUND).estimate(shape)


def test_measured_row_is_scaled_to_fewer_sms_as_the_formula_says() -> None:
    estimate = ComputeCost(MEASURED, available_sms=50).estimate(TABLE_SHAPE)
    assert (estimate.time_ns, estimate.provenance) == (246_000, Provenance.MODELLED)


# ---- bad input ---------------------------------------------------------------------------------------------

BAD: dict[str, tuple[Callable[[], object], str]] = {
    "dtype": (
        lambda: ComputeCost(ROUND).duration_ns(GemmShape(8, 8, 8, dtype=DType.FP32)),
        "round has no peak for dtype fp32; its profile has bf16, fp8, tf32",
    ),
    "no dtype": (
        lambda: ComputeCost(ROUND).duration_ns(None, flops=1.0, kind=OpKind.CONVOLUTION),
        "no peak for dtype none",
    ),
    "size": (lambda: ComputeCost(ROUND).duration_ns(GemmShape(0, 8, 8)), "size below 1"),
    "access": (
        lambda: ComputeCost(ROUND).duration_ns(MemoryShape("random")),
        "one of stream, reduction, strided",
    ),
    "bytes": (lambda: ComputeCost(ROUND).duration_ns(MemoryShape(), bytes_read=-1.0), "none can be negative"),
    "sms": (lambda: ComputeCost(ROUND, available_sms=101), "give 1 to 100"),
    "measured dtype": (
        lambda: ComputeCost(
            replace(ROUND, measured_gemms=(MeasuredGemm(1, 1, 1, "TN", "bf17", "bf16", False, 1, 1.0),))
        ),
        "dtype 'bf17'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_its_limit(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_refused_operation_of_a_graph_is_named() -> None:
    graph = graph_of(
        [{"kind": OpKind.GEMM, "shape": 0}], (GemmShape(8, 8, 8, dtype=DType.FP32),), strings=("qkv",)
    )
    with pytest.raises(ValueError, match="operation 'qkv': round has no peak for dtype fp32"):
        ComputeCost(ROUND).durations_ns(graph)


# ---- graphs ------------------------------------------------------------------------------------------------


def test_graph_durations_equal_single_durations_in_every_row() -> None:
    shapes: tuple[Shape, ...] = (GemmShape(512, 512, 512), SQUARE, MemoryShape("reduction"))
    distinct: list[dict[str, Any]] = [
        {"kind": OpKind.GEMM, "shape": 0},
        {"kind": OpKind.ATTENTION, "shape": 1, "flops": 3e9},
        {"kind": OpKind.ATTENTION, "shape": 1, "flops": 4e9},
        {"kind": OpKind.NORM, "shape": 2, "bytes_read": 1e6},
        {"kind": OpKind.NORM, "shape": 2, "bytes_written": 1e6},
        {"kind": OpKind.ELEMENTWISE, "bytes_read": 2e6},
        {"kind": OpKind.HOST},
    ]

    def shape_of(row: dict[str, Any]) -> Shape:
        return shapes[row["shape"]] if "shape" in row else None

    order = np.random.default_rng(7).integers(0, len(distinct), 500)
    rows: list[dict[str, Any]] = [distinct[i] for i in order]
    durations, provenances = ComputeCost(MEASURED).estimates(graph_of(rows, shapes))
    cost = ComputeCost(MEASURED)
    expected = [
        cost.estimate(
            shape_of(row),
            row.get("flops", 0.0),
            row.get("bytes_read", 0.0),
            row.get("bytes_written", 0.0),
            DType.NONE,
            row["kind"],
        )
        for row in rows
    ]
    assert durations.tolist() == [estimate.time_ns for estimate in expected]
    assert provenances.tolist() == [estimate.provenance for estimate in expected]


def test_cost_model_leaves_communication_to_the_collectives() -> None:
    rows: list[dict[str, Any]] = [
        {"kind": OpKind.ELEMENTWISE, "bytes_read": 1e6},
        {
            "kind": OpKind.COLLECTIVE,
            "communication": Communication.ALL_REDUCE,
            "communication_bytes": 1,
            "group": 0,
        },
    ]
    graph = graph_of(rows, ())
    assert ComputeCost(ROUND).durations_ns(graph).tolist() == [3000, 0]
    placed = replace(graph, groups=(CommunicationGroup("dp", (0, 1)),))
    # Two steps of the LL protocol, 0.5 us each; a byte takes no time.
    assert CostModel(ROUND).durations_ns(placed).tolist() == [3000, 1000]


def test_empty_graph_has_no_durations() -> None:
    assert len(CostModel(ROUND).durations_ns(graph_of([], ()))) == 0


@given(
    st.lists(st.tuples(st.integers(-3, 3), st.sampled_from([0.0, 0.5, 1e18]), st.integers(0, 2)), min_size=1)
)
def test_distinct_rows_agrees_with_a_set_of_tuples(rows: list[tuple[int, float, int]]) -> None:
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    first, inverse = distinct_rows(columns)
    assert len(first) == len(set(rows))
    assert [rows[first[i]] for i in inverse] == rows
