"""Conversion of SimuMax machine files: a small synthetic one checked by hand, the two public ones, and broken ones."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from statistics import fmean

import pytest

from hardware_profiles import (
    MeasuredAttention,
    MeasuredCollective,
    MeasuredGemm,
    ProfileError,
    import_simumax,
    load_profile,
    profile_to_yaml,
)

GIB = 2**30 / 1e9
GROUPED = "dtype=bf16, out_dtype=bf16, main_grad_dtype=fp32"
RING = {"scale": 1, "offset": -1}

# 100 TFLOPS, that is 10^8 FLOP/us, so that the times below come out round.
MACHINE = {
    "sys_name": "a100_sxm_tiny",
    "num_per_node": 8,
    "accelerator": {
        "backend": "cuda",
        "mem_gbs": 80,
        "op": {
            "default": {"tflops": 100, "efficient_factor": 0.75},
            "matmul": {
                "tflops": 100,
                "efficient_factor": 0.5,
                "accurate_efficient_factor": {
                    "b=1, m=1000, k=2000, n=500, layout=TN, accumulate=False, out_dtype=bf16": 0.5,
                    "b=2, m=1000, k=500, n=2000, layout=NN, accumulate=False, out_dtype=bf16": 0.4,
                    "b=2, m=500, k=1000, n=2000, layout=NT, accumulate=True, out_dtype=fp32": 0.25,
                },
            },
            "fp8_matmul": {"tflops": 200, "efficient_factor": 0},
            "group_matmul": {
                "tflops": 100,
                "efficient_factor": 0.5,
                "accurate_efficient_factor": {
                    f"ng=10, M=100, N=200, K=500, {GROUPED}, stage=fwd, accumulate=False": 0.5,
                    f"ng=10, M=100, N=200, K=500, {GROUPED}, stage=bwd_grad_act, accumulate=False": 0.5,
                    f"ng=10, M=100, N=200, K=500, {GROUPED}, stage=bwd_grad_w, accumulate=True": 0.2,
                },
            },
            "sdp_fwd": {
                "tflops": 100,
                "efficient_factor": 1.0,
                "accurate_efficient_factor": {
                    "batch=1, seq_len=1000, head_num=10, kv_head_num=2, qk_head_dim=150, v_head_dim=50, "
                    "qkv_contiguous=True": 0.8,
                    "batch=1, seq_len=1000, head_num=10, kv_head_num=2, qk_head_dim=150, v_head_dim=50, "
                    "qkv_contiguous=False": 0.4,
                },
            },
            "sdp_bwd": {
                "tflops": 100,
                "efficient_factor": 1.0,
                "accurate_efficient_factor": {
                    "batch=1, seq_len=1000, head_num=10, kv_head_num=2, qk_head_dim=150, v_head_dim=50, "
                    "qkv_contiguous=False": 0.5,
                },
            },
        },
        "bandwidth": {"default": {"efficient_factor": 0.9, "gbps": 1600, "latency_us": 40}},
        "mode": "roofline",
    },
    "networks": {
        "intra_with_pcie": False,
        "high_intra_node": {
            "processor_usage": 0,
            "bandwidth": {"efficient_factor": 0.5, "gbps": 300, "latency_us": 10},
            "op": {
                "all_reduce": {
                    "scale": 2,
                    "offset": -1,
                    "efficient_factor": 0.7,
                    "latency_us": 3,
                    "fixed_latency_us": 20,
                },
                "all_gather": {**RING, "efficient_factor": 0.6, "latency_us": 4},
                "reduce_scatter": dict(RING),
                "all2all": {
                    **RING,
                    "efficient_factor": 0.5,
                    "latency_us": 5,
                    "fixed_latency_us": 1,
                    "fixed_latency_us_by_comm_num": {"2": 50, "4": 19},
                },
                "p2p": {"scale": 1, "offset": 0, "efficient_factor": 0.8, "latency_us": 16},
            },
        },
        "inter_node": {
            "processor_usage": 0,
            "bandwidth": {"efficient_factor": 1, "gbps": 200, "latency_us": 35},
            "op": {"all_reduce": {"scale": 2, "offset": -1}, "p2p": {"scale": 1, "offset": 0}},
        },
    },
}


def write(tmp_path, document):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


@pytest.fixture
def tiny(tmp_path):
    return import_simumax(write(tmp_path, MACHINE))


# ------------------------------------------------------------------------------------------- the synthetic machine


def test_dense_products_become_times_of_two_m_n_k(tiny):
    # 2 * 1000 * 500 * 2000 = 2e9 FLOP at 0.5 * 1e8 FLOP/us; the batch multiplies tokens: rows, or the sum of a wgrad.
    assert tiny.measured_gemms[:3] == (
        MeasuredGemm(1000, 500, 2000, "TN", "bf16", "bf16", False, 1, pytest.approx(40)),
        MeasuredGemm(2000, 2000, 500, "NN", "bf16", "bf16", False, 1, pytest.approx(100)),
        MeasuredGemm(500, 2000, 2000, "NT", "bf16", "fp32", True, 1, pytest.approx(160)),
    )


def test_grouped_products_turn_their_sizes_by_stage(tiny):
    # Ten experts of 2 * 100 * 200 * 500 FLOP; the weight gradient is [N, K] and lands in the fp32 main gradient.
    assert tiny.measured_gemms[3:] == (
        MeasuredGemm(100, 200, 500, "TN", "bf16", "bf16", False, 10, pytest.approx(4)),
        MeasuredGemm(100, 500, 200, "NN", "bf16", "bf16", False, 10, pytest.approx(4)),
        MeasuredGemm(200, 500, 100, "NT", "bf16", "fp32", True, 10, pytest.approx(10)),
    )


def test_attention_counts_unmasked_work_and_five_products_backward(tiny):
    # 10 heads * 1000^2 * 200 = 2e9; 2 of it at 0.8e8 FLOP/us (contiguous wins), 5 of it at 0.5e8 (strided, alone).
    shape = (1, 1000, 1000, 10, 2, 150, 50)
    assert tiny.measured_attentions == (
        MeasuredAttention(*shape, causal=True, backward=False, dtype="bf16", time_us=pytest.approx(50)),
        MeasuredAttention(*shape, causal=True, backward=True, dtype="bf16", time_us=pytest.approx(200)),
    )


def test_collectives_count_steps_and_decimal_bytes(tiny):
    eff = pytest.approx
    assert {(row.communication, row.group_size): row for row in tiny.measured_collectives} == {
        ("all_reduce", 0): MeasuredCollective("all_reduce", "domain", eff(0.7 * GIB), 20, 6),
        ("all_gather", 0): MeasuredCollective("all_gather", "domain", eff(0.6 * GIB), 0, 4),
        ("all_to_all", 0): MeasuredCollective("all_to_all", "domain", eff(0.5 * GIB), 1, 5),
        ("all_to_all", 2): MeasuredCollective("all_to_all", "domain", eff(0.5 * GIB), 50, 5, 2),
        ("all_to_all", 4): MeasuredCollective("all_to_all", "domain", eff(0.5 * GIB), 19, 5, 4),
        ("p2p", 0): MeasuredCollective("p2p", "domain", eff(0.8 * GIB), 16, 0),
    }


def test_a_collective_takes_what_simumax_says_it_takes(tiny):
    """Eight GPUs, 1 GiB, all-reduce: 2 * 7/8 GiB over 300 GiB/s * 0.7, 2 * 7 steps of 3 us, 20 us fixed."""
    row = next(row for row in tiny.measured_collectives if row.communication == "all_reduce")
    traffic = 2 * 7 / 8 * 2**30
    rate = row.efficiency * tiny.network.domain.bandwidth_gb_per_s * 1e3
    ours = row.fixed_us + row.per_step_us * 7 + traffic / rate
    assert ours == pytest.approx(2 * 7 / 8 / (300 * 0.7) * 1e6 + 2 * 7 * 3 + 20)


def test_tiers_take_measured_figures_and_leave_default_ones(tiny):
    base = load_profile("a100-sxm-80g")
    domain, fabric = tiny.network.domain, tiny.network.fabric
    assert (domain.bandwidth_gb_per_s, domain.efficiency) == (300, pytest.approx(0.6 * GIB))
    assert domain.p2p_efficiency == pytest.approx(0.8 * GIB)
    assert domain.latency_us == base.network.domain.latency_us
    assert fabric == replace(base.network.fabric, bandwidth_gb_per_s=25)


def test_what_the_file_does_not_measure_comes_from_the_nearest_profile_and_says_so(tiny):
    base = load_profile("a100-sxm-80g")
    assert (tiny.memory, tiny.attention, tiny.gemm) == (base.memory, base.attention, base.gemm)
    assert tiny.peak_tflops == {**base.peak_tflops, "bf16": 100.0}
    datasheet = base.sources["memory.bandwidth_gb_per_s"]
    assert tiny.sources["memory.bandwidth_gb_per_s"] == f"carried over from a100-sxm-80g: {datasheet}"
    assert tiny.sources["measured_gemms"] == "SimuMax machine file machine.json, converted to times"
    assert tiny.name == "a100-sxm-tiny"


def test_the_base_can_be_chosen(tmp_path):
    base = load_profile("mi300x")
    profile = import_simumax(write(tmp_path, MACHINE), base)
    assert profile.sm_count == base.sm_count
    assert profile.vendor == "amd"


def test_long_products_give_the_sustained_rate(tmp_path):
    document = copy.deepcopy(MACHINE)
    table = document["accelerator"]["op"]["matmul"]["accurate_efficient_factor"]
    for k in (8192, 9216, 10240):
        table[f"b=1, m=8192, k={k}, n=8192, layout=TN, accumulate=False, out_dtype=bf16"] = 0.6
    profile = import_simumax(write(tmp_path, document))
    assert profile.gemm.sustained_efficiency == pytest.approx(0.6, rel=0.01)
    assert profile.gemm.sustained_efficiency > 0.6, "the epilogue is taken off"
    assert "median" in profile.sources["gemm.sustained_efficiency"]


def test_a_shape_measured_several_times_is_averaged(tmp_path):
    document = copy.deepcopy(MACHINE)
    table = document["accelerator"]["op"]["group_matmul"]["accurate_efficient_factor"]
    key = next(iter(table))
    table[key.replace("main_grad_dtype=fp32", "main_grad_dtype=bf16")] = 0.25
    profile = import_simumax(write(tmp_path, document))
    assert [row.time_us for row in profile.measured_gemms if row.count == 10 and row.layout == "TN"] == [
        pytest.approx(fmean((4.0, 8.0)))
    ]


def test_a_send_faster_than_its_link_is_a_copy_inside_one_gpu(tmp_path):
    document = copy.deepcopy(MACHINE)
    document["networks"]["high_intra_node"]["op"]["p2p"]["efficient_factor"] = 1.45
    profile = import_simumax(write(tmp_path, document))
    assert "p2p" not in {row.communication for row in profile.measured_collectives}
    assert profile.network.domain.p2p_efficiency == 0


def test_other_node_sizes_count_the_latency_once(tmp_path):
    document = copy.deepcopy(MACHINE)
    document["num_per_node"] = 4
    profile = import_simumax(write(tmp_path, document))
    row = next(row for row in profile.measured_collectives if row.communication == "all_reduce")
    assert (row.fixed_us, row.per_step_us) == (23, 0)
    assert profile.network.gpus_per_domain == 4
    assert profile.network.fabric.bandwidth_gb_per_s == 50


# ------------------------------------------------------------------------------------------- broken files

BROKEN = [
    ("", {}, "'accelerator' is missing"),
    ("accelerator.op.matmul", {}, "'tflops' is missing"),
    ("accelerator.op.matmul.tflops", "fast", "accelerator.op.matmul.tflops is 'fast', not a number above 0"),
    ("num_per_node", 0, "num_per_node=0 is not a size"),
    ("num_per_node", [8], "invalid literal"),
    ("networks", [], "networks: 'list' object has no attribute 'get'"),
    ("networks", {}, "networks: none of the tiers high_intra_node, low_intra_node is there"),
    ("networks.high_intra_node.bandwidth", {}, "networks: 'gbps' is missing"),
    ("networks.high_intra_node.op.all_reduce.scale", 3, "all_reduce has scale 3 and offset -1"),
    ("networks.high_intra_node.op.broadcast", {}, "high_intra_node.op.broadcast is not one of all_reduce"),
    ("accelerator.op.matmul.accurate_efficient_factor", {"m=1": 0.5}, "matmul, 'm=1': 'b' is missing"),
    ("accelerator.op.matmul.accurate_efficient_factor", {"what": 0.5}, "matmul, 'what': "),
    ("accelerator.op.sdp_fwd", {"accurate_efficient_factor": {"x=1": 1}}, "sdp_fwd: 'tflops' is missing"),
    ("accelerator.op.sdp_fwd", 3, "sdp_fwd: 'int' object has no attribute 'get'"),
]


@pytest.mark.parametrize(
    ("path", "value", "expected"), BROKEN, ids=[f"{row[0]}={row[1]!r:.20}" for row in BROKEN]
)
def test_a_malformed_file_gets_one_message(path, value, expected, tmp_path):
    document = copy.deepcopy(MACHINE)
    if path:
        *above, last = path.split(".")
        inner = document
        for key in above:
            inner = inner[key]
        inner[last] = value
    else:
        document = value
    with pytest.raises(ProfileError) as error:
        import_simumax(write(tmp_path, document))
    assert expected in str(error.value)
    assert str(tmp_path / "machine.json") in str(error.value)


@pytest.mark.parametrize("efficiency", [0, -0.5, "0.5", None, True])
def test_an_efficiency_that_is_none_names_its_shape(efficiency, tmp_path):
    document = copy.deepcopy(MACHINE)
    table = document["accelerator"]["op"]["matmul"]["accurate_efficient_factor"]
    table.update(dict.fromkeys(table, efficiency))
    with pytest.raises(ProfileError, match=r"b=1, m=1000.*its efficiency is .*not a number above 0"):
        import_simumax(write(tmp_path, document))


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"{", "not valid JSON"), (b"[]", "not an object"), (b"\xff", "not UTF-8"), (b"[" * 100_000, "not valid JSON")],
)  # fmt: skip
def test_a_file_that_is_no_machine_file(content, expected, tmp_path):
    path = tmp_path / "machine.json"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=expected):
        import_simumax(path)


def test_an_unknown_machine_asks_for_a_base(tmp_path):
    document = copy.deepcopy(MACHINE)
    document["sys_name"] = "quantum"
    document["accelerator"]["op"]["matmul"]["tflops"] = 3
    with pytest.raises(ProfileError, match="no installed profile is near 'quantum'"):
        import_simumax(write(tmp_path, document))


# ------------------------------------------------------------------------------------------- the two public files


@pytest.mark.shared_data
@pytest.mark.parametrize(
    ("file", "base", "gemms", "attentions", "sustained"),
    [
        ("a100_pcie.json", "a100-pcie-80g", 183 + 12, 12 + 12, 0.752),
        # Of 108 grouped rows 32 repeat a shape with another main gradient; of 64 attention rows 26 are not contiguous.
        ("b200_bf16_ceperm.json", "b200-sxm", 514 + 108 - 32, 19 + 19, 0.498),
    ],
)
def test_a_public_machine_file(file, base, gemms, attentions, sustained, shared_data, tmp_path):
    profile = import_simumax(shared_data / "simumax_system" / file)
    assert profile.sm_count == load_profile(base).sm_count
    assert (len(profile.measured_gemms), len(profile.measured_attentions)) == (gemms, attentions)
    # The preset's figure is a fit of the whole formula on the same rows; the importer's median agrees.
    assert profile.gemm.sustained_efficiency == pytest.approx(sustained, rel=0.02)
    path = tmp_path / "machine.yaml"
    path.write_text(profile_to_yaml(profile), encoding="utf-8")
    assert load_profile(path) == profile


@pytest.mark.shared_data
@pytest.mark.parametrize("backward", [False, True])
def test_attention_times_are_those_of_causal_kernels(backward, shared_data):
    """Independent check of the FLOPs convention: halved work over the preset's efficiencies gives the same times."""
    profile = import_simumax(shared_data / "simumax_system" / "a100_pcie.json")
    figures = profile.attention
    errors = []
    for row in profile.measured_attentions:
        if row.backward != backward:
            continue
        products = (
            3 * row.head_size + 2 * row.value_head_size if backward else row.head_size + row.value_head_size
        )
        work = 2 * row.batch * row.heads * row.query_length**2 * products / 2
        rate = profile.peak_tflops["bf16"] * 1e6 * figures.forward_efficiency
        rate *= figures.backward_ratio if backward else 1
        rate *= figures.wide_head_ratio if row.head_size != row.value_head_size else 1
        errors.append(abs(figures.fixed_us + work / rate - row.time_us) / row.time_us)
    assert fmean(errors) < 0.03


@pytest.mark.shared_data
def test_a_pcie_machine_has_a_line_for_each_group_size(shared_data):
    profile = import_simumax(shared_data / "simumax_system" / "a100_pcie.json")
    reductions = {
        row.group_size: row for row in profile.measured_collectives if row.communication == "all_reduce"
    }
    assert {size: row.efficiency for size, row in reductions.items()} == {
        0: pytest.approx(0.4176 * GIB),
        4: pytest.approx(0.6924 * GIB),
        2: pytest.approx(0.6965 * GIB),
    }
    assert profile.extra["simumax.intra_node_pcie_8x.all_gather.dp_fixed_bw"] == '{"2": 4, "4": 7.65}'
