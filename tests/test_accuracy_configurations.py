"""The scoreboard: what configuration files and scripts of a source say beside its rows, and what they rule out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.rows import RowSkippedError
from benchmarks.rows.configurations import configuration_of
from benchmarks.rows.recipes import bridge_recipe
from op_graphs.vocabulary import DType
from tests.measured_rows import expressed
from tracesim.scenario import Scenario

LORA: dict[str, Any] = {
    "source": "nemo-24.07",
    "framework": "NeMo 24.07",
    "table": "Finetuning LoRA",
    "gpu": "DGX-H100",
    "num_gpus": 8,
    "gbs": 32,
    "mbs": 1,
    "precision": "FP8",
    "model": {"name": "LLAMA2-7B", "seq": 4096},
    "parallel": {"tp": 1, "pp": 1},
    "metrics": {"tokens_per_s_per_gpu": 25206},
}
ABLATION: dict[str, Any] = {
    "source": "megatron-bridge-ablations",
    "framework": "Megatron-Bridge",
    "gpu": "H100-80GB-SXM",
    "num_gpus": 8,
    "gbs": 8,
    "mbs": 1,
    "precision": "bf16",
    "recompute": "selective moe",
    "metrics": {"iter_time_s": 0.5},
}
ZOO: dict[str, Any] = {
    "source": "moe-modelzoo",
    "table": "H100 performance",
    "gpu": "H100",
    "num_gpus": 256,
    "gbs": 2048,
    "mbs": 1,
    "precision": "BF16",
    "recompute": "norm, act",
    "model": {"name": "Qwen3-235B", "seq": 4096},
    "parallel": {"cp": 1, "dp": 16, "ep": 32, "etp": 1, "pp": 8, "tp": 2, "vpp": 4},
    "metrics": {"iter_time_s": 19.7},
}
CCL: dict[str, Any] = {
    "source": "ccl-bench",
    "framework": "torchtitan",
    "table": "llama3-torchtitan-nccl-4gpu-fsdp_4-b_4-s_512",
    "gpu": "nvidia_a100",
    "num_gpus": 4,
    "num_microbatches": 1,
    "batch_as_printed": 4,
    "precision": "bf16",
    "model": {"name": "llama-3.1-8b", "seq": 512},
    "parallel": {"cp": 1, "dp_replicate": 1, "dp_shard": 4, "ep": 1, "pp": 1, "tp": 1},
    "metrics": {"iter_time_s": 1.4, "communication_fraction_pct": 34.0, "collective_vol_allgather_gb": 40.0},
}


def scenario(row: dict[str, Any], folder: Path, **changes: Any) -> Scenario:
    return expressed({**row, **changes}, folder).scenario


def refusal(row: dict[str, Any], folder: Path, **changes: Any) -> str:
    with pytest.raises(RowSkippedError) as caught:
        expressed({**row, **changes}, folder)
    return str(caught.value)


@pytest.mark.parametrize(
    ("table", "model", "parallel", "graphs", "moments"),
    [
        ("Moonlight recompute", "Moonlight 16B", {"tp": 2, "pp": 1, "ep": 8}, (), DType.BF16),
        (
            "Nemotron 3 Nano recompute",
            "Nemotron 3 Nano",
            {"tp": 1, "pp": 1, "ep": 8},
            ("attn", "mamba"),
            DType.FP32,
        ),
    ],
)
def test_ablations_change_one_setting_of_a_recipe(table, model, parallel, graphs, moments, tmp_path):
    found = scenario(
        ABLATION, tmp_path, table=table, model={"name": model, "seq": 4096}, parallel={**parallel, "cp": 1}
    )
    assert found.training.grad_reduce_dtype is DType.BF16
    assert found.training.cuda_graphs == graphs
    assert found.training.optimizer_dtypes.moments is moments


@pytest.mark.parametrize(
    ("technique", "expected"),
    [
        ("", ("alltoall", "1f1b", False)),
        ("HybridEP, TE CUDA graphs", ("hybridep", "1f1b", False)),
        ("no EP overlap", ("alltoall", "1f1b", False)),
        ("EP overlap off, DeepEP", ("deepep", "1f1b", False)),
        ("EP overlap", ("alltoall", "1f1b-overlap", False)),
        ("MoE a2a overlap, delayed wgrad", ("alltoall", "1f1b-overlap", True)),
        ("grad reduce overlap", ("alltoall", "1f1b", False)),
    ],
)
def test_ablations_say_how_tokens_travel_to_experts_and_beside_what(technique, expected, tmp_path):
    found = scenario(
        ABLATION,
        tmp_path,
        table="EP overlap",
        model={"name": "Moonlight 16B", "seq": 4096},
        parallel={"tp": 2, "pp": 1, "ep": 8, "cp": 1},
        technique=technique,
    )
    overlaps = found.schedule == "1f1b-overlap"
    assert (found.parallel.ep_dispatcher, found.schedule, overlaps and found.overlap.wgrad) == expected


@pytest.mark.parametrize(
    ("dispatcher", "notes", "expected"),
    [
        ("DeepEP", "", ("deepep", "interleaved-1f1b")),
        ("A2A", "main(1e057005)", ("alltoall", "interleaved-1f1b")),
        ("DeepEP", "+1f1b overlap", ("deepep", "1f1b-overlap")),
    ],
)
def test_rows_of_the_model_zoo_say_dispatcher_and_overlap(dispatcher, notes, expected, tmp_path):
    found = scenario(ZOO, tmp_path, dispatcher=dispatcher, notes=notes)
    assert (found.parallel.ep_dispatcher, found.schedule) == expected


@pytest.mark.parametrize(
    ("gpu", "precision", "recompute", "graphs"),
    [
        ("h100", "fp8", ("moe", "layernorm", "core_attn"), ("mamba",)),
        ("h100", "bf16", ("moe", "layernorm"), ("attn", "mamba")),
        ("gb300", "mxfp8", (), ("attn", "mamba", "moe_router", "moe_preprocess")),
    ],
)
def test_recipes_of_hybrid_models_run_again_and_capture_what_the_machine_asks_for(
    gpu, precision, recompute, graphs
):
    recipe = bridge_recipe("nemotron3-nano-30b-a3b", gpu, precision, 1, {"tp": 1, "pp": 1}, (26, 4))
    assert (recipe.recompute, recipe.cuda_graphs, recipe.dispatcher) == (recompute, graphs, "hybridep")
    assert (recipe.router_fusion, recipe.weighted_squared_relu_fusion) == (False, True)


@pytest.mark.parametrize(
    ("release", "precision", "dispatcher", "layers"),
    [
        ((26, 4), "nvfp4", "alltoall", 0),
        ((26, 6), "nvfp4", "hybridep", 14),
        ((26, 6), "mxfp8", "hybridep", 0),
    ],
)
def test_nemotron_3_super_got_another_dispatcher_and_precision_in_26_06(
    release, precision, dispatcher, layers
):
    degrees = {"tp": 1, "pp": 1}
    recipe = bridge_recipe("nemotron3-super-120b-a12b", "gb300", precision, 1, degrees, release)
    assert (recipe.dispatcher, recipe.bf16_last_layers) == (dispatcher, layers)


@pytest.mark.parametrize(
    ("gpu", "precision", "dispatcher"),
    [
        ("gb300", "bf16", "alltoall"),
        ("gb300", "mxfp8", "hybridep"),
        ("b300", "bf16", "hybridep"),
        ("gb200", "bf16", "alltoall"),
    ],
)
def test_recipes_of_gpt_oss_choose_a_dispatcher_for_some_machines(gpu, precision, dispatcher):
    recipe = bridge_recipe("gpt-oss-120b", gpu, precision, 4, {"tp": 1, "pp": 1}, (26, 4))
    assert recipe.dispatcher == dispatcher
    assert recipe.router_fusion


def test_adapters_of_nvidias_fine_tuning_lie_at_the_projection_of_queries_keys_and_values(tmp_path):
    row = expressed(LORA, tmp_path)
    lora, lengths = row.scenario.training.lora, row.scenario.training.sequence_lengths
    assert lora is not None
    assert lengths is not None
    assert (lora.rank, lora.targets, lengths.mean) == (32, ("linear_qkv",), 160)
    assert any("adapters of rank 32" in note for note in row.notes)
    bridge = scenario(LORA, tmp_path, source="megatron-bridge", table="26.06 / LoRA Performance")
    assert bridge.training.lora is not None
    assert bridge.training.lora.rank == 16


@pytest.mark.parametrize(
    ("source", "table", "gpu", "model", "precision", "graphs", "adapters"),
    [
        ("megatron-bridge", "26.06 / LoRA Performance", "DGX-GB300", "LLAMA3_70B", "FP8", ("mlp",), True),
        ("megatron-bridge", "26.06 / LoRA Performance", "DGX-H100", "LLAMA3_70B", "FP8", (), True),
        ("megatron-bridge", "26.06 / SFT Performance", "DGX-GB200", "LLAMA3_70B", "BF16", ("mlp",), False),
        ("megatron-bridge", "26.06 / SFT Performance", "DGX-H100", "LLAMA3_70B", "BF16", (), False),
        ("megatron-bridge", "26.06 / SFT Performance", "DGX-GB200", "LLAMA3_8B", "BF16", (), False),
        (
            "megatron-bridge-ablations",
            "Llama3 70B SFT",
            "H100-80GB-SXM",
            "Llama 3 70B SFT",
            "FP8",
            ("mlp",),
            False,
        ),
    ],
)
def test_fine_tuning_recipes_pack_documents_and_capture_the_mlps_of_large_models(
    source, table, gpu, model, precision, graphs, adapters, tmp_path
):
    changes = {"source": source, "table": table, "gpu": gpu, "precision": precision}
    found = scenario(LORA, tmp_path, **changes, model={"name": model, "seq": 4096})
    assert found.training.sequence_lengths is not None
    assert found.training.cuda_graphs == graphs
    assert (found.training.lora is not None) == adapters


def test_a_table_of_adapters_without_their_recipe_is_left_out(tmp_path):
    assert "of which rank, is not stated" in refusal(LORA, tmp_path, source="nemo-25.02-25.04")


@pytest.mark.parametrize(("gpu", "overlaps"), [("GB200", False), ("GB300", True)])
def test_the_scripts_beside_the_modelzoos_table_of_blackwell(gpu, overlaps, tmp_path):
    changes = {"gpu": gpu, "num_gpus": 64, "precision": "MXFP8", "recompute": ""}
    parallel = {"cp": 1, "ep": 64, "etp": 1, "pp": 1, "tp": 1}
    found = scenario(ZOO, tmp_path, **changes, table="Blackwell", parallel=parallel)
    assert (found.parallel.ep_dispatcher, found.libraries.router_fusion) == ("hybridep", True)
    assert found.training.cuda_graphs == ("attn", "moe_router", "moe_preprocess")
    assert (found.schedule == "1f1b-overlap") == overlaps


@pytest.mark.parametrize(
    ("gpu", "parallel", "dispatcher", "overlaps"),
    [
        ("h100", {"tp": 2, "pp": 8, "vpp": 4, "ep": 64}, "deepep", True),
        ("b200", {"tp": 1, "pp": 16, "ep": 8}, "alltoall", False),
        ("b200", {"tp": 1, "pp": 8, "vpp": 2, "ep": 32}, "deepep", True),
    ],
)
def test_exchanges_of_deepseek_on_eight_gpus_a_node(gpu, parallel, dispatcher, overlaps):
    recipe = bridge_recipe("deepseek-v3", gpu, "fp8", 1, parallel, (25, 11))
    assert (recipe.dispatcher, recipe.overlaps_experts) == (dispatcher, overlaps)


@pytest.mark.parametrize(
    ("release", "gpu", "fuses"),
    [((26, 6), "gb300", True), ((26, 4), "gb300", False), ((26, 6), "b200", False)],
)
def test_captured_mixtures_have_fused_experts(release, gpu, fuses):
    parallel = {"tp": 1, "pp": 1, "ep": 8}
    assert bridge_recipe("qwen3-30b-a3b", gpu, "mxfp8", 8, parallel, release).fuses_experts == fuses


@pytest.mark.parametrize(
    ("name", "gpus", "parallel", "recompute", "tp_overlap"),
    [
        ("Llama3 8B", 1, {"fsdp": 1, "tp": 1}, "none", False),
        ("Qwen2.5 7B", 1, {"fsdp": 1, "tp": 1}, "none", False),
        ("Llama3 70B", 8, {"fsdp": 1, "tp": 4, "pp": 2, "vpp": 10}, "full", False),
        ("Llama3 70B", 8, {"fsdp": 4, "tp": 2}, "full", "async-tp"),
        ("Qwen2.5 32B", 8, {"fsdp": 4, "tp": 2}, "full", False),
    ],
)
def test_what_the_benchmark_files_of_automodel_set(name, gpus, parallel, recompute, tp_overlap, tmp_path):
    changes = {"source": "nemo-automodel", "model": {"name": name, "seq": 4096}, "precision": "bf16"}
    found = scenario(LORA, tmp_path, **changes, num_gpus=gpus, parallel=parallel)
    assert found.training.lora is not None
    assert len(found.training.lora.targets) == (7 if recompute == "none" else 4)
    assert found.training.recompute.stops_early == (recompute == "full")
    assert (found.training.recompute.mode, found.overlap.tp) == (recompute, tp_overlap)
    assert found.parallel.sp == (tp_overlap == "async-tp")


def test_a_local_batch_of_automodel_is_that_many_microbatches(tmp_path):
    row = {
        **{key: LORA[key] for key in ("gpu", "metrics")},
        "source": "nemo-automodel",
        "table": "Pre-Training Performance",
        "precision": "bf16",
        "num_gpus": 256,
        "gbs": 512,
        "local_batch": 8,
        "mbs": 1,
        "num_microbatches": 1,
        "model": {"name": "DeepSeek V3 671B", "seq": 4096},
        "parallel": {"ep": 64, "fsdp": 64, "pp": 4, "tp": 1, "vpp": 8},
    }
    found = scenario(row, tmp_path)
    assert (found.training.micro_batch_size, found.training.num_microbatches) == (1, 8)
    assert (found.global_batch_size, found.model.mtp_layers, found.parallel.ep_dispatcher) == (
        512,
        0,
        "deepep",
    )
    assert found.libraries.experts_in_turn
    assert found.training.recompute.stops_early
    assert found.schedule == "interleaved-1f1b"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"model": "Kimi K2", "num_gpus": 256, "ep": 32, "fsdp": 32, "pp": 8, "vpp": 4, "calls": 2},
            ("kimi-k2", "full", 8, 1, 16, "interleaved-1f1b:flush=8"),
        ),
        (
            {"model": "Qwen3 MoE 30B", "num_gpus": 8, "ep": 8, "fsdp": 8, "local": 4, "mbs": 4, "calls": 16},
            ("qwen3-30b-a3b", "full", 1, 4, 16, "1f1b"),
        ),
        (
            {"model": "GPT-OSS 20B", "num_gpus": 8, "ep": 8, "fsdp": 8, "local": 2, "mbs": 2, "calls": 16},
            ("gpt-oss-20b", "none", 1, 2, 16, "1f1b"),
        ),
    ],
)
def test_mixtures_of_automodel_are_the_models_of_their_rows(row, expected, tmp_path):
    """A pipeline is called once for each local batch; without one, local batches are plain accumulation."""
    plan = {key: row[key] for key in ("ep", "fsdp", "pp", "vpp") if key in row}
    found = scenario(
        {key: LORA[key] for key in ("gpu", "metrics")},
        tmp_path,
        source="nemo-automodel",
        table="Pre-Training Performance",
        precision="bf16",
        num_gpus=row["num_gpus"],
        local_batch=row.get("local", 8),
        mbs=row.get("mbs", 1),
        num_microbatches=row["calls"],
        model={"name": row["model"], "seq": 4096},
        parallel=plan,
    )
    training = found.training
    assert (
        found.model.name,
        training.recompute.mode,
        found.parallel.pp,
        training.micro_batch_size,
        training.num_microbatches,
        found.schedule,
    ) == expected


def test_the_file_beside_a_trace_says_its_batch(tmp_path):
    found = scenario(CCL, tmp_path)
    assert (found.training.micro_batch_size, found.training.recompute.mode) == (4, "none")
    assert (found.parallel.zero, found.parallel.reshard) == (3, "always")
    assert found.hardware.network.gpus_per_domain == 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"framework": "torchxla"}, "ran on a TPU"),
        ({"table": "llama3-torchtitan-mscclpp-4gpu-fsdp_4-b_4-s_512"}, "MSCCL"),
        ({"table": "deepseek-v3-16b-torchtitan-ep4-dp4-tp2-perlmutter"}, "give different degrees"),
        (
            {"parallel": {"dp_replicate": 1, "dp_shard": 1, "pp": 2, "tp": 2}},
            "torchtitan trains in fp32",
        ),
        (
            {"num_gpus": 8, "metrics": {**CCL["metrics"], "collective_vol_allgather_gb": 0.4}},
            "moved 0.8 GB/s a GPU by its own figures",
        ),
    ],
)
def test_runs_that_their_files_do_not_determine(changes, reason, tmp_path):
    assert reason in refusal(CCL, tmp_path, **changes)


def test_scripts_of_megatron_say_the_microbatches_of_table_1(tmp_path):
    row = {
        "source": "megatron-sc21",
        "framework": "Megatron-LM",
        "table": "Table 1",
        "gpu": "A100-80GB-SXM",
        "gbs": 1792,
        "num_gpus": 1024,
        "model": {
            "name": "GPT 76.1B",
            "layers": 60,
            "hidden": 10240,
            "heads": 80,
            "seq": 2048,
            "vocab": 51200,
        },
        "parallel": {"tp": 8, "pp": 4, "dp": 32},
        "metrics": {"tflops_per_gpu": 140},
    }
    found = scenario(row, tmp_path)
    assert (found.training.micro_batch_size, found.parallel.vpp, found.schedule) == (2, 3, "interleaved-1f1b")


def test_the_page_of_long_sequences_has_fewer_gpus_now(tmp_path):
    row = {
        "source": "nemo-longseq",
        "table": "LLAMA3-8B (FP8) - B200",
        "gpu": "B200",
        "gbs": 64,
        "num_gpus": 64,
        "precision": "FP8",
        "model": {"name": "LLAMA3-8B", "seq": 65536},
        "parallel": {"cp": 4, "dp": 4, "pp": 1, "tp": 1},
        "metrics": {"tflops_per_gpu": 1600},
    }
    found = expressed(row, tmp_path)
    assert (found.scenario.parallel.world_size, found.scenario.training.micro_batch_size) == (16, 1)
    short = {**row, "model": {"name": "LLAMA3-8B", "seq": 8192}}
    assert "does not say mbs" in refusal(short, tmp_path)


def test_sources_without_a_configuration_are_left_as_they_are():
    assert configuration_of({"model": {"name": "x"}}, "unheard of").completed({"mbs": 1}) == {"mbs": 1}


TITAN: dict[str, Any] = {
    "source": "torchtitan-bench",
    "table": "2025-06 async TP",
    "gpu": "H100-96GB-HBM2e-500W",
    "local_batch": 12,
    "num_gpus": 64,
    "model": {"name": "Llama 3.1 8B"},
    "parallel": {"fsdp": 8, "tp": 8},
    "precision": "float8 rowwise",
    "recompute": "per-op SAC",
    "technique": "async TP+compile",
    "metrics": {"tokens_per_s_per_gpu": 3914.9},
}


@pytest.mark.parametrize(
    ("technique", "policy"),
    [("async TP+compile", "async-tp"), ("vanilla TP+compile", "gathered-once")],
)
def test_tensor_parallelism_of_torchtitan_is_asynchronous_where_its_rows_say_so(technique, policy, tmp_path):
    found = scenario(TITAN, tmp_path, technique=technique)
    assert (found.overlap.tp, found.parallel.sp) == (policy, True)
    assert (found.training.recipe, found.training.recompute.keeps_products) == ("fp8-rowwise", True)


def test_the_command_line_of_a_run_names_its_configuration(tmp_path):
    row = {
        **{key: value for key, value in TITAN.items() if key not in ("recompute", "precision")},
        "table": "2025-06 Trainy H200",
        "gpu": "H200-141GB-SXM",
        "parallel": {"fsdp": 64},
        "technique": "compile+float8 (all-gather float8)",
    }
    found = scenario(row, tmp_path)
    assert found.training.recompute.keeps_products
    assert (found.training.recipe, found.training.fp8_param_gather) == ("fp8-tensorwise", True)


FMS: dict[str, Any] = {
    "source": "fms-fsdp",
    "table": "README",
    "gpu": "A100-80GB-SXM",
    "local_batch": 2,
    "num_gpus": 128,
    "model": {"name": "Llama 2 70b", "seq": 4096},
    "parallel": {"fsdp": "FSDP"},
    "precision": "bf16",
    "recompute": "Selective AC",
    "metrics": {"hfu": 0.74, "mfu": 0.55, "tokens_per_s_per_gpu": 410},
}


def test_the_part_of_layers_that_fms_recomputes_follows_from_its_utilisations(tmp_path):
    # 0.74 / 0.55 is 4 / 3: a whole forward pass more; 0.69 / 0.61 is about a third of one.
    assert scenario(FMS, tmp_path).training.recompute.mode == "full"
    metrics = {**FMS["metrics"], "hfu": 0.69, "mfu": 0.61}
    assert "leave 0.34 to 0.45" in refusal(FMS, tmp_path, metrics=metrics)


@pytest.mark.parametrize(
    ("text", "fraction", "overlap"),
    [("optimizer 50%, no overlap", 0.5, False), ("optimizer 100%, overlap", 1.0, True)],
)
def test_offload_of_a_part_of_the_optimizer(text, fraction, overlap, tmp_path):
    offload = scenario({**TITAN, "precision": "bf16"}, tmp_path, offload=text).training.offload
    assert (offload.optimizer, offload.optimizer_overlap) == (fraction, overlap)
    assert "is not expressed" in refusal(TITAN, tmp_path, offload="everything")


@pytest.mark.parametrize(
    ("source", "reason"),
    [("nnscaler", "times single kernels"), ("torchtitan-issue-773", "which GPU it ran on is not stated")],
)
def test_rows_that_are_no_steps_of_a_known_machine(source, reason, tmp_path):
    assert reason in refusal(FMS, tmp_path, source=source, table="grouped GEMM kernel timing")
