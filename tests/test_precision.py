"""Low-precision recipes: bytes, FLOPs, kernels and times of quantised linears against sums written out here.

The sizes come from the recipes' papers and from what Transformer Engine keeps, not from the package.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hardware_profiles import load_profile
from op_graphs.graph import GemmShape, OpGraph
from op_graphs.precision import RECIPES, precision_recipe
from op_graphs.vocabulary import Communication, DType, MemoryCategory, OpKind, Phase
from tests.dense_scenarios import dense_mapping
from tracesim.cost import ComputeCost
from tracesim.errors import ScenarioError
from tracesim.lowering import lower_scenario
from tracesim.scenario import load_scenario, scenario_to_mapping

H100, B200 = "h100-sxm", "b200-sxm"
LOW = [
    (H100, "fp8-tensorwise", "current"),
    (H100, "fp8-tensorwise", "delayed"),
    (H100, "fp8-blockwise", "current"),
    (B200, "fp8-tensorwise", "current"),
    (B200, "mxfp8", "current"),
    (B200, "nvfp4", "current"),
]
COPIES = {(H100, "fp8-tensorwise"): 2, (B200, "fp8-tensorwise"): 1}
"""Copies of a tensor that two GEMMs read; 2 where not listed."""
ELEMENT = {"fp8-tensorwise": 1, "fp8-blockwise": 1 + 4 / 128, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
"""Bytes of an element of an activation: its own, and its share of an fp32 or one-byte scale."""
WEIGHT = {**ELEMENT, "fp8-blockwise": 1 + 4 / 128**2}
HIDDEN, FFN, QUERY, KEY = 256, 512, 256, 128
LAYER_WEIGHTS = HIDDEN * (QUERY + 2 * KEY) + QUERY * HIDDEN + 3 * HIDDEN * FFN
TOKENS = 256
MOE = {"experts": 4, "top_k": 2, "expert_ffn_size": 128, "shared_ffn_size": 128}


def lowered(hardware: str, dtype: str, scaling: str = "current", **changes: Any) -> OpGraph:
    changes = {"training__dtype": dtype, "training__fp8_scaling": scaling, **changes}
    return lower_scenario(load_scenario(dense_mapping(hardware=hardware, **changes)))


def named(graph: OpGraph, part: str) -> np.ndarray:
    """Rows of the first rank whose name holds a text."""
    names = [graph.strings[name] for name in graph.operations.name]
    return np.array([i for i, name in enumerate(names) if part in name and graph.operations.rank[i] == 0])


def held(graph: OpGraph, name: str) -> float:
    """Bytes of the buffers of that name on the first rank."""
    buffers = graph.buffers
    return float(
        sum(
            size
            for size, text, rank in zip(buffers.size, buffers.name, buffers.rank, strict=True)
            if graph.strings[text] == name and rank == 0
        )
    )


# -- FLOPs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hardware", "dtype", "scaling"), LOW)
def test_a_recipe_changes_the_operands_of_linears_and_no_flop(hardware, dtype, scaling):
    low, plain = lowered(hardware, dtype, scaling), lowered(hardware, "bf16")
    assert low.operations.flops.sum() == plain.operations.flops.sum()
    element = DType.FP4 if dtype == "nvfp4" else DType.FP8
    flops = {
        kind: float(low.operations.flops[low.operations.dtype == kind].sum())
        for kind in (element, DType.BF16)
    }
    microbatches, layers, vocabulary = 2, 4, 1024
    assert flops[element] == 3 * 2 * TOKENS * LAYER_WEIGHTS * layers * microbatches
    head = 3 * 2 * TOKENS * HIDDEN * vocabulary * microbatches
    attention = float(low.operations.flops[low.operations.kind == OpKind.ATTENTION].sum())
    assert flops[DType.BF16] == head + attention


def test_the_router_and_the_norms_stay_as_they_are():
    changes = {"model__moe": MOE, "training__num_microbatches": 1}
    low, plain = lowered(H100, "fp8-blockwise", **changes), lowered(H100, "bf16", **changes)
    for name in ("router", "layernorm", "flash_attention", "head"):
        kept = [graph.operations.dtype[named(graph, name)].tolist() for graph in (low, plain)]
        assert kept[0] == kept[1], name
    grouped = low.operations.kind == OpKind.GROUPED_GEMM
    assert set(low.operations.dtype[grouped].tolist()) == {DType.FP8}


# -- bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hardware", "dtype", "scaling"), LOW)
def test_a_gemm_reads_quantised_operands_with_their_scales(hardware, dtype, scaling):
    graph = lowered(hardware, dtype, scaling)
    row = named(graph, "fc2")[
        [graph.strings[graph.operations.name[i]] == "fc2" for i in named(graph, "fc2")]
    ][0]
    read = ELEMENT[dtype] * TOKENS * FFN + WEIGHT[dtype] * FFN * HIDDEN
    assert graph.operations.bytes_read[row] == pytest.approx(read)
    assert graph.operations.bytes_written[row] == 2 * TOKENS * HIDDEN
    row = named(graph, "fc2_wgrad")[0]
    read = ELEMENT[dtype] * TOKENS * (FFN + HIDDEN) + 4 * FFN * HIDDEN
    assert graph.operations.bytes_read[row] == pytest.approx(read)
    assert graph.operations.bytes_written[row] == 4 * FFN * HIDDEN


@pytest.mark.parametrize(("hardware", "dtype", "scaling"), LOW)
def test_inputs_are_kept_quantised_along_the_axis_the_weight_gradient_reads(hardware, dtype, scaling):
    graph = lowered(hardware, dtype, scaling, model__layers=1, training__num_microbatches=1)
    for name, width in (("qkv", HIDDEN), ("proj", QUERY), ("fc1", HIDDEN), ("fc2", FFN)):
        kept = held(graph, f"{name}_quantized_input")
        assert kept == pytest.approx(ELEMENT[dtype] * TOKENS * width, abs=1), name
    peak = live_at_loss(graph)
    # Two norm outputs and the input of fc2 give way to one-byte copies; attention's output stays for its own backward.
    plain = live_at_loss(lowered(hardware, "bf16", model__layers=1, training__num_microbatches=1))
    gone = 2 * TOKENS * (HIDDEN + HIDDEN + FFN)
    came = ELEMENT[dtype] * TOKENS * (HIDDEN + QUERY + HIDDEN + FFN)
    assert peak - plain == pytest.approx(came - gone, abs=4)


def live_at_loss(graph: OpGraph) -> float:
    """Bytes of activations alive when the last layer's forward is done."""
    at, buffers = named(graph, "final_norm")[0], graph.buffers
    alive = (
        (buffers.category == MemoryCategory.ACTIVATIONS) & (buffers.allocate < at) & (buffers.release >= at)
    )
    return float(buffers.size[alive].sum())


@pytest.mark.parametrize(("hardware", "dtype", "scaling"), LOW)
def test_quantised_weights_stay_beside_the_bf16_ones(hardware, dtype, scaling):
    graph, plain = lowered(hardware, dtype, scaling), lowered(hardware, "bf16")
    copies = COPIES.get((hardware, dtype), 2)
    assert held(graph, "quantized_weights") == round(WEIGHT[dtype] * copies * 4 * LAYER_WEIGHTS)
    assert held(graph, "weights") == held(plain, "weights")
    assert held(plain, "quantized_weights") == 0


def test_quantised_weights_alone_take_their_place_with_fp8_param_gather():
    changes: dict[str, Any] = {"parallel__dp": 2, "training__fp8_param_gather": True}
    graph, plain = lowered(H100, "fp8-tensorwise", **changes), lowered(H100, "bf16", parallel__dp=2)
    assert held(plain, "weights") - held(graph, "weights") == 2 * 4 * LAYER_WEIGHTS
    assert held(graph, "quantized_weights") == 2 * 4 * LAYER_WEIGHTS


@pytest.mark.parametrize(
    ("hardware", "dtype", "item"),
    [(H100, "fp8-tensorwise", 1), (H100, "fp8-blockwise", 1), (B200, "mxfp8", 2)],
)
def test_a_parameter_gather_moves_a_byte_for_each_quantised_weight(hardware, dtype, item):
    """MXFP8 makes both copies of a weight from bf16, so bf16 is what is gathered."""
    gathered = []
    for flag in (False, True):
        graph = lowered(hardware, dtype, parallel__dp=2, training__fp8_param_gather=flag)
        gathered.append(graph.operations.communication_bytes[named(graph, "parameter_all_gather")].sum())
    assert gathered[0] - gathered[1] == (2 - item) * 4 * LAYER_WEIGHTS


def test_sequence_shards_are_gathered_quantised():
    changes: dict[str, Any] = {"parallel__tp": 2, "parallel__sp": True}
    for hardware, dtype, scaling in LOW:
        graph, plain = lowered(hardware, dtype, scaling, **changes), lowered(hardware, "bf16", **changes)
        for name, copies in (
            ("qkv_all_gather", 1),
            ("fc1_input_all_gather", 1),
            ("fc2_gradient_all_gather", 2),
        ):
            # Tensorwise bytes are transposed behind the gather, block-scaled ones travel along both axes.
            times = copies if dtype not in ("fp8-tensorwise",) else 1
            moved = graph.operations.communication_bytes[named(graph, name)]
            whole = plain.operations.communication_bytes[named(plain, name)]
            assert moved.tolist() == pytest.approx((whole / 2 * ELEMENT[dtype] * times).tolist()), (
                dtype,
                name,
            )
        for name in ("proj_reduce_scatter", "fc1_gradient_reduce_scatter"):
            assert (
                graph.operations.communication_bytes[named(graph, name)].tolist()
                == plain.operations.communication_bytes[named(plain, name)].tolist()
            )


# -- kernels -----------------------------------------------------------------------------------------------------


def cast_names(graph: OpGraph, phases: tuple[Phase, ...], microbatch: int) -> list[str]:
    """Quantisation kernels of the first layer in some phases of a microbatch, in order."""
    operations = graph.operations
    rows = np.flatnonzero(
        (operations.layer == 0) & (operations.microbatch == microbatch) & np.isin(operations.phase, phases)
    )
    names = [graph.strings[operations.name[row]] for row in rows]
    ends = ("_cast", "_cast_transpose", "_cast_columns", "_amax", "_transpose")
    return [name for name in names if name.endswith(ends)]


BACKWARD = (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)


@pytest.mark.parametrize(
    ("hardware", "dtype", "scaling", "forward"),
    [
        (H100, "fp8-tensorwise", "delayed", ["{}_input_cast_transpose"]),
        (H100, "fp8-tensorwise", "current", ["{}_input_amax", "{}_input_cast_transpose"]),
        (H100, "fp8-blockwise", "current", ["{}_input_cast_transpose"]),
        (B200, "fp8-tensorwise", "current", ["{}_input_amax", "{}_input_cast"]),
        (B200, "mxfp8", "current", ["{}_input_cast_transpose"]),
        (B200, "nvfp4", "current", ["{}_input_amax", "{}_input_cast", "{}_input_cast_columns"]),
    ],
)
def test_each_input_and_each_gradient_is_quantised_once(hardware, dtype, scaling, forward):
    graph = lowered(hardware, dtype, scaling)
    linears = ("qkv", "proj", "fc1", "fc2")
    expected = [name.format(linear) for linear in linears for name in forward]
    assert cast_names(graph, (Phase.FORWARD,), 1) == expected
    gradients = [name.replace("_input", "_gradient") for name in forward]
    expected = [name.format(linear) for linear in linears[::-1] for name in gradients]
    assert cast_names(graph, BACKWARD, 1) == expected


def test_weights_are_quantised_in_the_first_microbatch_only():
    graph = lowered(H100, "fp8-blockwise")
    first, second = (cast_names(graph, (Phase.FORWARD,), microbatch) for microbatch in (0, 1))
    assert [name for name in first if name not in second] == [
        f"{linear}_weight_cast_transpose" for linear in ("qkv", "proj", "fc1", "fc2")
    ]
    row = named(graph, "fc1_weight_cast_transpose")[0]
    assert graph.operations.bytes_read[row] == 2 * 2 * FFN * HIDDEN
    assert graph.operations.bytes_written[row] == 2 * WEIGHT["fp8-blockwise"] * 2 * FFN * HIDDEN


def test_sharded_weights_are_quantised_at_every_use():
    graph = lowered(H100, "fp8-tensorwise", parallel__zero=3, parallel__dp=2)
    for microbatch in (0, 1):
        for phases in ((Phase.FORWARD,), BACKWARD):
            assert "fc1_weight_cast" in cast_names(graph, phases, microbatch)
    assert held(graph, "quantized_weights") == 0


def test_a_shard_gathered_along_rows_is_transposed_behind_the_gather():
    graph = lowered(H100, "fp8-tensorwise", parallel__tp=2, parallel__sp=True)
    names = cast_names(graph, BACKWARD, 1)
    assert {"fc1_input_transpose", "fc2_gradient_transpose"} <= set(names)
    rows = named(graph, "fc1_input_amax_all_reduce")
    assert set(graph.operations.communication[rows].tolist()) == {Communication.ALL_REDUCE}
    assert set(graph.operations.communication_bytes[rows].tolist()) == {4}


def test_recomputed_linears_quantise_their_inputs_again_and_their_weights_not():
    graph = lowered(H100, "fp8-blockwise", training__recompute="full")
    assert cast_names(graph, (Phase.RECOMPUTE,), 0) == [
        f"{linear}_input_cast_transpose" for linear in ("qkv", "proj", "fc1", "fc2")
    ]


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [
        ("1f1b", "none"),
        ("1f1b", "full"),
        ("1f1b", {"modules": ["core_attn", "layernorm", "moe_act"]}),
        ("zb-h1", "none"),
    ],
)
@pytest.mark.parametrize(("hardware", "dtype", "scaling"), LOW)
def test_all_that_a_step_allocates_it_releases(hardware, dtype, scaling, recompute, schedule):
    changes: dict[str, Any] = {
        "model__moe": {**MOE, "first_dense_layers": 1},
        "parallel__tp": 2,
        "parallel__sp": True,
        "parallel__pp": 2,
        "schedule": schedule,
        "training__num_microbatches": 4,
        "training__recompute": recompute,
    }
    buffers = lowered(hardware, dtype, scaling, **changes).buffers
    inside = buffers.allocate >= 0
    assert (buffers.release[inside] >= 0).all()


# -- time --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hardware", "ratio"), [("h100-sxm", 1.21), ("h800-sxm", 0.64 / 0.58), ("b200-sxm", 1.17)]
)
def test_a_long_gemm_is_faster_by_the_peaks_and_the_share_of_them_that_each_type_reaches(hardware, ratio):
    profile = load_profile(hardware)
    cost = ComputeCost(profile)
    # Power-capped and long, so that neither waves nor the epilogue matter.
    shapes = [GemmShape(16384, 16384, 65536, dtype=dtype) for dtype in (DType.BF16, DType.FP8)]
    bf16, fp8 = (cost.duration_ns(shape, kind=OpKind.GEMM) for shape in shapes)
    peaks = profile.peak_tflops
    assert bf16 / fp8 == pytest.approx(peaks["fp8"] / peaks["bf16"] * ratio, rel=0.02)


def test_a_machine_that_gives_no_ratio_reaches_the_same_share_in_every_type():
    profile = load_profile("mi300x")
    assert profile.gemm.dtype_ratio == {}


# -- scenarios ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hardware", "dtype", "scaling"), LOW)
def test_a_scenario_written_out_loads_equal(hardware, dtype, scaling):
    changes = {"training__dtype": dtype, "training__fp8_scaling": scaling}
    scenario = load_scenario(dense_mapping(hardware=hardware, **changes))
    assert scenario.training.recipe in RECIPES
    assert load_scenario(scenario_to_mapping(scenario)) == scenario


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"training__dtype": "mxfp8"},
            "needs tensor cores with scales for each block (compute capability 10.0)",
        ),
        ({"training__dtype": "nvfp4"}, "has no peak rate in the hardware profile h100-sxm"),
        ({"hardware": "a100-sxm-80g", "training__dtype": "fp8-blockwise"}, "has no peak rate"),
        ({"training__fp8_scaling": "delayed"}, "belongs to dtype fp8-tensorwise, dtype is bf16"),
        ({"training__fp8_param_gather": True}, "needs weights in fp8, dtype is bf16"),
        (
            {"training__dtype": "fp8-tensorwise", "training__fp8_param_gather": True, "parallel__zero": 0},
            "needs sharded master weights to make fp8 weights from, zero is 0; set zero: 1",
        ),
        ({"training__fp8_dispatch": True}, "needs block scales, dtype is bf16; set dtype: fp8-blockwise"),
        (
            {"training__fp8_dispatch": True, "training__dtype": "fp8-blockwise"},
            "needs a dispatcher that sends 8 bits, ep_dispatcher is alltoall; set ep_dispatcher: deepep",
        ),
        ({"training__fp8_storage": True}, "needs block scales, dtype is bf16; set dtype: fp8-blockwise"),
        (
            {"training__fp8_storage": True, "training__dtype": "fp8-blockwise", "parallel__tp": 2},
            "is known for whole layers on a rank, tp is 2 and cp 1; set both to 1",
        ),
        (
            {
                "training__fp8_storage": True,
                "training__dtype": "fp8-blockwise",
                "training__offload": {"layers": 2},
            },
            "keeps activations on the device; leave out offload of modules or layers",
        ),
        (
            {"training__dtype": "fp8-tensorwise", "model__ffn_size": 520},
            "needs widths that are multiples of 16; the ffn width 520 of small is 520",
        ),
    ],
)
def test_what_a_recipe_cannot_do_is_refused_with_what_could_be_done(changes, said):
    with pytest.raises(ScenarioError) as found:
        load_scenario(dense_mapping(**changes))
    assert said in str(found.value)
    assert str(found.value).startswith("scenario has a problem:")


def test_an_unknown_recipe_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match="'fp6' is not known; known are fp8-tensorwise, fp8-delayed"):
        precision_recipe("fp6")
