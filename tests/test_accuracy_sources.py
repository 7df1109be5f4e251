"""The scoreboard: rows of single sources, and what it makes of several rows at once."""

from __future__ import annotations

import pytest

from benchmarks import step_figures
from benchmarks.accuracy import evaluate, scores_by_source
from benchmarks.rows import RowSkippedError
from benchmarks.schedule_bubble import calculated_bubble
from op_graphs.stage_layout import layers_per_stage
from tests.measured_rows import GOLDEN, GPT_22B, changed, expressed, fake_report, write_rows
from tracesim.scenario import load_scenario
from tracesim.simulation import simulate

# -- argument lists ------------------------------------------------------------------------------------------------


def test_memory_of_an_argument_list_is_that_of_the_last_stage_and_its_time_is_not_compared(tmp_path):
    results, skipped = evaluate([write_rows(tmp_path / "golden.json", [GOLDEN])], fake_report)
    assert skipped == []
    assert results[0].figures == {"allocated": (2.5, 7.0)}
    scenario = expressed(GOLDEN, tmp_path).scenario
    assert (scenario.parallel.dp, scenario.libraries.cublas_workspace_kib) == (2, 32768)


@pytest.mark.parametrize(
    ("table", "allowed", "attention"),
    [
        ("gpt/test/golden_values_dev_dgx_a100.json", 0, "flash"),
        ("gpt/test/golden_values_lts_dgx_a100.json", 0, "unfused"),
        ("gpt/test/golden_values_lts_dgx_a100.json", 1, "flash"),
    ],
)
def test_the_attention_that_a_container_takes_by_itself(table, allowed, attention, tmp_path):
    arguments = {
        key: value for key, value in GOLDEN["megatron_args_full"].items() if key != "attention-backend"
    }
    row = {
        **GOLDEN,
        "table": table,
        "megatron_args_full": arguments,
        "env": {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": allowed},
    }
    assert expressed(row, tmp_path).scenario.training.attention == attention


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {
                "num_gpus": None,
                "table": "gpt/a_release/x.json",
                "megatron_args_full__use-distributed-optimizer": True,
            },
            "does not say how many GPUs the release test ran on",
        ),
        (
            {"megatron_args_full__perform-rl-step": True},
            "--perform-rl-step: alternates training with generation",
        ),
        ({"megatron_args_full__num-layers": 13}, "does not fit the 13 layers"),
    ],
)
def test_argument_lists_that_do_not_determine_the_memory(changes, reason, tmp_path):
    with pytest.raises(RowSkippedError, match=reason):
        expressed(changed(GOLDEN, **changes), tmp_path)


# -- several rows at once ------------------------------------------------------------------------------------------


def test_rows_that_contradict_each_other_are_shown_and_count_in_no_score(tmp_path):
    rows = [changed(GOLDEN, metrics__peak_alloc_gib=gib) for gib in (2.5, 3.9)]
    rows += [
        changed(GOLDEN, megatron_args_full__swiglu=True, metrics__peak_alloc_gib=gib) for gib in (2.5, 2.6)
    ]
    results, _ = evaluate([write_rows(tmp_path / "golden.json", rows)], fake_report)
    told = "the same settings measured 2.50 to 3.90 GiB: what differed is not stated"
    assert [result.undetermined for result in results] == [told, told, "", ""]
    assert scores_by_source(results)["megatron-golden"]["allocated"].n == 2


def test_equal_scenarios_are_simulated_once(tmp_path):
    seen = []

    def count(scenario):
        seen.append(scenario.name)
        return fake_report(scenario)

    rows = [GPT_22B, changed(GPT_22B, metrics={"iter_time_s": 2.0}), changed(GPT_22B, gbs=8)]
    results, _ = evaluate([write_rows(tmp_path / "rows.json", rows)], count)
    assert (len(results), len(seen)) == (3, 2)


def test_the_number_of_processes_changes_nothing(tmp_path):
    rows = [changed(GPT_22B, model__layers=layers, metrics__peak_alloc_gib=9.0) for layers in (2, 4)]
    path = write_rows(tmp_path / "rows.json", rows)
    assert evaluate([path], jobs=1) == evaluate([path], jobs=2)


def test_what_the_scoreboard_computes_is_what_a_report_says():
    scenario = load_scenario("llama3-8b-tp2-pp2-vpp2-dp2")
    figures, report = step_figures.step_figures(scenario), simulate(scenario).report
    stages = figures.pop("stages")
    assert figures.pop("calculated_bubble_fraction") == calculated_bubble(
        scenario, simulate(scenario).graph, simulate(scenario).execution
    )
    assert figures == {key: report[key] for key in figures}
    assert stages == [{key: stage[key] for key in stages[0]} for stage in report["stages"]]


# -- sources -------------------------------------------------------------------------------------------------------


def test_a_recipe_says_what_a_table_does_not(tmp_path):
    row = {
        "framework": "Megatron-Bridge",
        "gbs": 4096,
        "gpu": "DGX-GB300",
        "mbs": 2,
        "metrics": {"tokens_per_s_per_gpu": 4992},
        "model": {"name": "DeepSeekV3", "seq": 4096},
        "num_gpus": 256,
        "parallel": {"cp": 1, "ep": 32, "fsdp": 0, "pp": 2, "tp": 1, "vp": 8},
        "precision": "MXFP8",
        "source": "megatron-bridge",
    }
    scenario = expressed(row, tmp_path).scenario
    assert (scenario.training.recompute.modules, scenario.parallel.ep_dispatcher) == (
        ("mla_up_proj",),
        "hybridep",
    )
    assert layers_per_stage(61, scenario.parallel) == (*([4] * 15), 1)
    later = expressed(changed(row, mbs=1, table="26.08 NeMo Container / Pre-Training"), tmp_path).scenario
    assert (later.schedule, later.training.cuda_graphs) == ("1f1b-overlap", ("full_iteration",))
    # 64 nodes in racks of 18 come in four segments of 16.
    assert later.hardware.network.gpus_per_domain == 64
    assert (
        expressed(changed(row, model__name="DeepSeekV3 (w/o MTP)"), tmp_path).scenario.model.mtp_layers == 0
    )
    assert expressed(changed(row, parallel__tp="1 (2)"), tmp_path).scenario.parallel.tp == 1


def test_layers_follow_from_the_size_where_a_row_does_not_say_them(tmp_path):
    row = {
        "gbs": 2048,
        "gpu": "A100-80GB-SXM",
        "mbs": 1,
        "metrics": {"iter_time_s": 172.4},
        "model": {"name": "GPT 183B", "seq": 2048},
        "notes": "shape text above: NLAYERS=80, NHIDDEN=14400, NHEADS=96, VOCAB_LENGTH=250k, GBS=2048",
        "num_gpus": 384,
        "parallel": {"dp": 4, "pp": 12, "tp": 8},
        "source": "bigscience-tr11",
    }
    # 72 layers of 12 * 14400^2 elements and 250,000 rows of 14,400 are 182.8 billion.
    model = expressed(row, tmp_path).scenario.model
    assert (model.layers, model.heads) == (72, 96)
    uneven = expressed(
        changed(row, model__name="GPT 195B", parallel__pp=6, parallel__dp=8), tmp_path
    ).scenario
    # DeepSpeed spreads 77 layers over 6 stages: 79 with the ends do not divide.
    assert layers_per_stage(77, uneven.parallel) == (13, 13, 13, 13, 13, 12)


def test_a_calculated_bubble_is_compared_where_no_time_is_given(tmp_path):
    row = {
        "gpu": "A100-80GB-SXM",
        "mbs": 3,
        "metrics": {"bubble_rate_calculated": 0.0554},
        "model": {"heads": 32, "hidden": 4096, "layers": 30, "name": "GPT 6.2B", "seq": 1024},
        "num_gpus": 8,
        "num_microbatches": 64,
        "parallel": {"dp": 1, "pp": 8, "tp": 1},
        "schedule": "ZB-2p",
        "source": "zero-bubble",
    }
    found = expressed(row, tmp_path)
    assert (found.time_ms, found.bubble_pct) == (None, pytest.approx(5.54))
    # Of the 34 + 5 * 8 hidden sizes a token its weight gradients wait for 32.
    assert (
        found.scenario.schedule
        == "greedy:memory=16,weight_memory=0.4324,times=profiled,minimize=longest-rank"
    )


def test_runtimes_of_one_source_differ_by_their_schedule(tmp_path):
    row = {
        "gpu": "A100-80GB-SXM",
        "mbs": 3,
        "gbs": 72,
        "metrics": {"samples_per_gpu_s": 4.0},
        "model": {"heads": 32, "hidden": 4096, "layers": 30, "name": "GPT 6.2B", "seq": 1024},
        "num_gpus": 8,
        "parallel": {"dp": 1, "pp": 8, "tp": 1},
        "schedule": "ZB-1p",
        "source": "zero-bubble",
    }
    automatic, megatron, interleaved = (
        expressed(changed(row, **changes), tmp_path).scenario
        for changes in (
            {},
            {"schedule": "1F1B"},
            {"schedule": "1F1B-I", "parallel__vpp": "layers per stage"},
        )
    )
    assert (automatic.overlap.p2p, automatic.overlap.contention) == ("ahead", True)
    for scenario in (megatron, interleaved):
        assert (scenario.overlap.p2p, scenario.overlap.contention) == ("batched", False)
    for libraries in (s.libraries for s in (automatic, megatron, interleaved)):
        assert (libraries.separate_biases, libraries.gelu_fusion, libraries.batch_fetch_waits) == (
            True,
            False,
            False,
        )
    # Its own runtime validates the optimizer's step behind it.
    assert [s.training.post_validation for s in (automatic, megatron, interleaved)] == [True, False, False]


def test_activations_relative_to_a_baseline(tmp_path):
    row = changed(
        GPT_22B,
        gbs=None,
        metrics={"activation_mem_pct_of_tp_baseline": 20.0},
        source="calculon-validation",
        recompute="seqsel",
        parallel={"pp": 1, "tp": 8},
    )
    found = expressed(row, tmp_path)
    assert (found.scenario.parallel.sp, found.scenario.training.recompute.modules) == (True, ("core_attn",))
    assert (found.baseline.parallel.sp, found.baseline.training.recompute.mode) == (False, "none")
    results, _ = evaluate([write_rows(tmp_path / "rows.json", [row])], fake_report)
    assert results[0].figures == {"activations": (20.0, 100.0)}


GIB = 2**30
BATCH, LAYERS, HIDDEN, HEADS, LENGTH, SHARDS = 4, 48, 6144, 64, 2048, 8
ONE = LENGTH * BATCH * HIDDEN / GIB
"""Bytes of sbh, in GiB."""
SCORES = 5 * HEADS * LENGTH**2 * BATCH / GIB


@pytest.mark.parametrize(
    ("recompute", "sequence_parallel", "a_layer"),
    [
        # arXiv:2205.05198, Table 2
        ("none", False, 10 * ONE + 24 * ONE / SHARDS + SCORES / SHARDS),
        ("none", True, 34 * ONE / SHARDS + SCORES / SHARDS),
        ("selective", False, 10 * ONE + 24 * ONE / SHARDS),
        ("selective", True, 34 * ONE / SHARDS),
        ("full", False, 2 * ONE),
    ],
)
def test_activations_of_the_layers_are_the_closed_forms_of_the_paper(
    recompute, sequence_parallel, a_layer, tmp_path
):
    row = changed(
        GPT_22B,
        metrics={"activation_mem_gib": 1.0, "param_optimizer_mem_gib": 1.0},
        source="calculon-validation",
        recompute=recompute,
        parallel={"pp": 1, "tp": SHARDS, "sp": sequence_parallel},
    )
    (result,), _ = evaluate([write_rows(tmp_path / "rows.json", [row])])
    assert result.figures["activations"][1] == pytest.approx(LAYERS * a_layer, rel=1e-4)
    # 18 bytes of the 12 h^2 weights of a layer; biases and norms are what is more.
    weights = 12 * HIDDEN**2 * LAYERS / SHARDS / GIB
    assert result.figures["state"][1] == pytest.approx(18 * weights, rel=2e-3)


def test_the_large_models_of_the_paper_run_interleaved(tmp_path):
    row = changed(
        GPT_22B,
        gbs=64,
        mbs=1,
        metrics={"activation_mem_gib": 1.0},
        source="calculon-validation",
        recompute="selective",
        num_gpus=64,
        parallel={"pp": 8, "tp": 8, "sp": True},
        model={
            "ffn": 49152, "heads": 96, "hidden": 12288, "layers": 96, "name": "GPT-3 175B", "seq": 2048, "vocab": 51200,
        },
    )  # fmt: skip
    found = expressed(row, tmp_path).scenario
    assert (found.parallel.vpp, found.schedule, found.training.num_microbatches) == (
        3,
        "interleaved-1f1b",
        16,
    )
    (result,), _ = evaluate([write_rows(tmp_path / "rows.json", [row])])
    # The first stage holds 1 + (p - 1) / (p m) times all layers.
    held = 34 * 2048 * 12288 / 8 * 96 * (1 + 7 / 24) / GIB
    assert result.figures["activations"][1] == pytest.approx(held, rel=1e-4)


# -- fully sharded runs --------------------------------------------------------------------------------------------

TITAN = {
    "gpu": "A100-80GB",
    "local_batch": 1,
    "metrics": {"tokens_per_s_per_gpu": 1000},
    "model": {"name": "Llama 3 8B", "seq": 8192},
    "num_gpus": 64,
    "parallel": {"fsdp": 64},
    "precision": "bf16",
    "recompute": "selective op AC",
    "source": "torchtitan-perf-2024",
}


def test_a_run_of_torchtitan_as_its_configurations_have_it(tmp_path):
    """Tensor operations one by one, every second product again, communication that takes from compute."""
    scenario = expressed(TITAN, tmp_path).scenario
    recompute, overlap = scenario.training.recompute, scenario.overlap
    assert (recompute.mode, recompute.keep) == ("selective", "every-second-product")
    assert (scenario.libraries.eager, scenario.libraries.transformer_engine) == (True, False)
    assert scenario.libraries.separate_projections
    assert (scenario.training.cross_entropy, overlap.contention) == ("torch", True)
    assert (scenario.parallel.zero, scenario.parallel.flat_parameters) == (3, False)


def test_what_is_compiled_is_fused_but_for_products_of_complex_numbers(tmp_path):
    scenario = expressed({**TITAN, "technique": "compile+float8"}, tmp_path).scenario
    assert scenario.libraries.eager == ("positions",)


INTERNEVO = {
    "gpu": "A100-80GB-SXM",
    "mbs": 2,
    "metrics": {"tokens_per_s_per_gpu": 4000},
    "model": {"name": "InternLM 7B", "seq": 2048},
    "num_gpus": 256,
    "num_microbatches": 4,
    "parallel": {"tp": 1, "zero1_group": -1},
    "precision": "bf16",
    "recompute": "none",
    "source": "internevo",
}


def test_packed_samples_of_internevo_count_as_whole_sequences(tmp_path):
    packed = {**INTERNEVO, "notes": "packed samples"}
    assert expressed(packed, tmp_path).scenario.training.sequence_lengths is None
    with pytest.raises(RowSkippedError, match="packed sequences are not stated"):
        expressed({**packed, "source": "megatron-pr482"}, tmp_path)


@pytest.mark.parametrize(
    ("technique", "recipe", "eager"),
    [
        ("compile+float8", "fp8-tensorwise", ("positions",)),
        ("compile + float8 rowwise", "fp8-rowwise", ("positions",)),
        ("FSDP", None, True),
    ],
)
def test_the_technique_of_torchtitan_says_what_is_compiled_and_in_8_bits(technique, recipe, eager, tmp_path):
    row = {key: value for key, value in TITAN.items() if key != "precision"}
    changes = {
        "source": "torchtitan-bench",
        "technique": technique,
        "recompute": "selective AC",
        "gpu": "H100-80GB",
    }
    scenario = expressed({**row, **changes}, tmp_path).scenario
    assert (scenario.training.recipe, scenario.libraries.eager) == (recipe, eager)
    assert scenario.training.recompute.keep == "every-second-product"


@pytest.mark.parametrize(
    ("recompute", "mode", "modules"), [("none", "selective", ("layernorm",)), ("full", "full", ())]
)
def test_a_run_of_internevo_as_its_source_has_it(recompute, mode, modules, tmp_path):
    """Norms of fp32 copies that run again, an MLP written out, PyTorch's AdamW on whole tensors; the rest is fused."""
    scenario = expressed({**INTERNEVO, "recompute": recompute}, tmp_path).scenario
    assert scenario.libraries.eager == ("mlp", "optimizer")
    assert scenario.libraries.fp32_norm_inputs
    assert (scenario.parallel.zero, scenario.parallel.whole_tensors) == (1, True)
    assert scenario.overlap.contention
    assert (scenario.training.recompute.mode, scenario.training.recompute.modules) == (mode, modules)


@pytest.mark.parametrize(("fsdp", "cp", "shard"), [(4, 2, None), (2, 4, None), (2, 2, 4), (8, 1, None)])
def test_torchtitan_shards_over_the_ranks_of_context_parallelism_too(fsdp, cp, shard, tmp_path):
    row = {
        **TITAN,
        "source": "torchtitan-bench",
        "recompute": "full AC",
        "num_gpus": 8,
        "parallel": {"fsdp": fsdp, "cp": cp},
    }
    parallel = expressed(row, tmp_path).scenario.parallel
    assert (parallel.dp, parallel.hsdp_shard) == (8 // cp, shard)


@pytest.mark.parametrize(
    ("gpu", "fsdp", "fabric", "shard"),
    [
        ("A100-80GB-SXM", "HSDP", 6.25, 8),
        ("A100-80GB-SXM", "FSDP", 6.25, None),
        ("H100-80GB-SXM", "FSDP", 12.5, None),
    ],
)
def test_the_network_that_a_source_states_is_its_rows(gpu, fsdp, fabric, shard, tmp_path):
    row = {
        **TITAN,
        "gpu": gpu,
        "source": "fms-fsdp",
        "recompute": "No AC",
        "num_gpus": 96,
        "parallel": {"fsdp": fsdp},
    }
    scenario = expressed(row, tmp_path).scenario
    assert scenario.hardware.network.fabric.bandwidth_gb_per_s == fabric
    assert (scenario.parallel.hsdp_shard, scenario.parallel.flat_parameters) == (shard, True)
    assert scenario.training.grad_reduce_dtype.name == "BF16"


@pytest.mark.parametrize(
    ("own", "heading", "ran"), [(2048, 512, 512), (2040, 2048, 2040), (2048, None, 2048)]
)
def test_of_two_stated_batches_the_smaller_one_ran(own, heading, ran, tmp_path):
    notes = "shape text above: NHIDDEN=6144 / NLAYERS=48" + (f" / GBS={heading}" if heading else "")
    row = changed(
        GPT_22B, gbs=own, mbs=1, notes=notes, source="bigscience-tr11", parallel={"dp": 1, "pp": 1, "tp": 8}
    )
    assert expressed(row, tmp_path).scenario.training.num_microbatches == ran


@pytest.mark.parametrize(("own", "layers"), [(10, 10), (None, 6)])
def test_layers_of_a_row_count_before_those_of_its_heading(own, layers, tmp_path):
    model = {"name": "GPT 18B", "seq": 2048} | ({"layers": own} if own else {})
    notes = "shape text above: NHIDDEN=14336 / NLAYERS=6 / GBS=512"
    parallel = {"dp": 1, "pp": 1, "tp": 8}
    row = changed(
        GPT_22B, gbs=2048, mbs=1, notes=notes, source="bigscience-tr11", parallel=parallel, model=model
    )
    assert expressed(row, tmp_path).scenario.model.layers == layers


@pytest.mark.parametrize("gpu", ["A100-80GB-SXM", "H100-80GB-SXM"])
def test_both_tables_of_llm_foundry_ran_tritons_kernel(gpu, tmp_path):
    row = {
        **TITAN,
        "gpu": gpu,
        "source": "llm-foundry-mpt",
        "recompute": "activation checkpointing True",
        "model": {"name": "MPT 7b", "seq": 2048},
        "parallel": {"fsdp": "FULL_SHARD"},
    }
    assert expressed(row, tmp_path).scenario.training.attention == "flash-1"
