"""Argument lists of Megatron-LM become scenarios: what each argument means, and what is refused."""

from __future__ import annotations

import json

import pytest
import yaml
from click.testing import CliRunner

from op_graphs.vocabulary import DType
from tests.megatron_lists import EXPERTS, GPT, LATENT, problems_of, scenario_of
from tracesim.cli import main
from tracesim.errors import ScenarioError
from tracesim.megatron import import_megatron, read_launch_file
from tracesim.scenario import load_scenario


def capacity_of(scenario):
    moe = scenario.model.moe
    return moe.capacity_factor, moe.pad_to_capacity, moe.drop_policy


def test_what_megatron_trains_where_nothing_else_is_said():
    scenario = scenario_of(world_size=8)
    model, training = scenario.model, scenario.training
    assert (model.activation, model.norm, model.positions, model.tied_embeddings) == (
        "gelu",
        "layernorm",
        "learned",
        True,
    )
    assert (model.ffn_size, model.head_size, model.vocab_size, model.padded_vocab()) == (
        2048,
        64,
        50257,
        50304,
    )
    assert (model.qkv_bias, model.mlp_bias, model.hidden_dropout, model.attention_dropout) == (
        True,
        True,
        0.1,
        0.1,
    )
    assert (scenario.parallel.dp, scenario.parallel.zero, training.num_microbatches) == (8, 0, 1)
    assert (training.dtype, training.grad_reduce_dtype, training.attention_mask) == (
        DType.BF16,
        DType.FP32,
        True,
    )
    assert (scenario.overlap.grad_reduce, scenario.overlap.param_gather, scenario.overlap.p2p) == (
        False,
        False,
        False,
    )


@pytest.mark.parametrize(
    ("changes", "read", "expected"),
    [
        (EXPERTS, lambda s: s.libraries.permute_fusion, False),
        ({**EXPERTS, "moe-permute-fusion": True}, lambda s: s.libraries.permute_fusion, True),
        ({**EXPERTS, "moe-permute-fusion": False}, lambda s: s.libraries.permute_fusion, False),
        (EXPERTS, lambda s: s.libraries.router_fusion, False),
        ({**EXPERTS, "moe-router-fusion": True}, lambda s: s.libraries.router_fusion, True),
        ({**EXPERTS, "moe-router-fusion": True, "transformer-impl": "local"},
         lambda s: s.libraries.router_fusion, False),
        (EXPERTS, lambda s: s.libraries.weighted_squared_relu_fusion, False),
        ({**EXPERTS, "squared-relu": True, "use-fused-weighted-squared-relu": True},
         lambda s: s.libraries.weighted_squared_relu_fusion, True),
        (EXPERTS, capacity_of, (None, True, "probs")),
        ({**EXPERTS, "moe-expert-capacity-factor": -1}, capacity_of, (None, True, "probs")),
        ({**EXPERTS, "moe-expert-capacity-factor": 1.25}, capacity_of, (1.25, False, "probs")),
        (
            {
                **EXPERTS,
                "moe-expert-capacity-factor": 1.25,
                "moe-pad-expert-input-to-capacity": True,
                "moe-token-drop-policy": "position",
            },
            capacity_of,
            (1.25, True, "position"),
        ),
        *(
            (
                {**EXPERTS, "fp8-format": "hybrid", name: True, "moe-token-dispatcher-type": "alltoall"},
                lambda s: s.training.router_padding,
                True,
            )
            for name in ("moe-router-padding-for-quantization", "moe-router-padding-for-fp8")
        ),
        ({"swiglu": True}, lambda s: (s.model.activation, s.model.ffn_size), ("swiglu", 1344)),
        ({"squared-relu": True}, lambda s: s.model.activation, "squared_relu"),
        ({"group-query-attention": True, "num-query-groups": 2}, lambda s: s.model.kv_heads, 2),
        ({"num-query-groups": 2}, lambda s: s.model.kv_heads, 8),
        ({"position-embedding-type": "rope"}, lambda s: s.model.positions, "rotary"),
        ({"position-embedding-type": "none"}, lambda s: s.model.positions, "none"),
        ({"use-rotary-position-embeddings": True}, lambda s: s.model.positions, "rotary"),
        ({"tokenizer-type": "NullTokenizer", "vocab-size": 8193}, lambda s: s.model.padded_vocab(2), 8448),
        ({"bf16": None, "fp16": True}, lambda s: s.training.grad_reduce_dtype, DType.FP16),
        ({"bf16": None}, lambda s: s.training.dtype, DType.FP32),
        ({"grad-reduce-in-bf16": True}, lambda s: s.training.grad_reduce_dtype, DType.BF16),
        ({"fp8-format": "hybrid"}, lambda s: s.training.recipe, "fp8-delayed"),
        ({"fp8-format": "e4m3", "fp8-recipe": "blockwise"}, lambda s: s.training.recipe, "fp8-blockwise"),
        ({"attention-backend": "unfused"}, lambda s: s.training.attention, "unfused"),
        ({"transformer-impl": "local"}, lambda s: (s.training.attention, s.libraries.transformer_engine),
         ("unfused", False)),
        ({"spec": "local"}, lambda s: (s.training.attention, s.libraries.transformer_engine), ("unfused", False)),
        ({"cross-entropy-loss-fusion": True}, lambda s: s.training.cross_entropy, "native"),
        ({"cross-entropy-loss-fusion": True, "cross-entropy-fusion-impl": "te"}, lambda s: s.training.cross_entropy,
         "te"),
        ({"no-gradient-accumulation-fusion": True}, lambda s: s.training.gradient_accumulation_fusion, False),
        ({"recompute-activations": True}, lambda s: s.training.recompute.modules, ("core_attn",)),
        ({"recompute-granularity": "selective", "recompute-modules": "[layernorm mlp]"},
         lambda s: s.training.recompute.modules, ("layernorm", "mlp")),
        ({"recompute-granularity": "full", "recompute-method": "block", "recompute-num-layers": 2},
         lambda s: (s.training.recompute.method, s.training.recompute.layers), ("block", 2)),
        ({"use-distributed-optimizer": True, "num-distributed-optimizer-instances": 2},
         lambda s: (s.parallel.zero, s.parallel.hsdp_shard), (1, 4)),
        ({"tp-comm-overlap": True, "tensor-model-parallel-size": 2, "sequence-parallel": True},
         lambda s: s.overlap.tp, "userbuffers"),
        ({"tp-comm-overlap": True}, lambda s: s.overlap.tp, True),
        ({"delay-wgrad-compute": True}, lambda s: s.overlap.wgrad, True),
        ({"use-tp-pp-dp-mapping": True}, lambda s: s.parallel.order, "tp-cp-ep-pp-dp"),
        ({"num_layers": 6, "num-layers": None}, lambda s: s.model.layers, 6),
        ({"optimizer": "muon"}, lambda s: s.training.optimizer, "muon"),
        ({"use-precision-aware-optimizer": True, "exp-avg-dtype": "bf16", "exp-avg-sq-dtype": "bf16"},
         lambda s: s.training.optimizer_dtypes.moments, DType.BF16),
    ],
)  # fmt: skip
def test_what_an_argument_means(changes, read, expected):
    assert read(scenario_of(changes, world_size=8)) == expected


@pytest.mark.parametrize(
    ("changes", "schedule", "vpp"),
    [
        ({}, "1f1b", 1),
        ({"num-layers-per-virtual-pipeline-stage": 1}, "interleaved-1f1b", 3),
        ({"num-virtual-stages-per-pipeline-rank": 3}, "interleaved-1f1b", 3),
        ({"num-layers-per-virtual-pipeline-stage": 1, "microbatch-group-size-per-virtual-pipeline-stage": 8,
          "global-batch-size": 64}, "interleaved-1f1b:group=8", 3),
        ({"pipeline-model-parallel-layout": "Et*3|t*3|t*3|t*3L"}, "1f1b", 1),
        ({"decoder-first-pipeline-num-layers": 2, "decoder-last-pipeline-num-layers": 2,
          "num-layers-per-virtual-pipeline-stage": 2, "num-layers": 12}, "interleaved-1f1b", 2),
    ],
)  # fmt: skip
def test_stages_and_their_schedule(changes, schedule, vpp):
    if "decoder-first-pipeline-num-layers" in changes:
        changes = {**changes, "decoder-first-pipeline-num-layers": 2, "num-layers": 12}
    scenario = scenario_of({"pipeline-model-parallel-size": 4, **changes})
    assert (scenario.schedule, scenario.parallel.vpp, scenario.parallel.pp) == (schedule, vpp, 4)


def test_experts():
    changes = {
        **EXPERTS,
        "moe-layer-freq": "([0]*3+[1]*9)",
        "moe-ffn-hidden-size": 256,
        "moe-router-topk": 4,
        "moe-router-load-balancing-type": "seq_aux_loss",
        "moe-aux-loss-coeff": "1e-4",
        "moe-shared-expert-intermediate-size": 512,
        "moe-grouped-gemm": True,
        "expert-model-parallel-size": 4,
        "moe-token-dispatcher-type": "alltoall",
    }
    scenario = scenario_of(changes, world_size=8)
    moe = scenario.model.moe
    assert (moe.experts, moe.top_k, moe.expert_ffn_size, moe.shared_ffn_size) == (8, 4, 256, 512)
    assert (moe.first_dense_layers, moe.aux_loss, moe.expert_bias) == (3, True, False)
    # Experts are cut over as many ranks as the rest, unless the arguments say otherwise.
    with pytest.raises(ScenarioError):
        scenario_of({**changes, "expert-model-parallel-size": 8}, world_size=8)
    assert (scenario.parallel.ep, scenario.parallel.etp, scenario.parallel.ep_dispatcher) == (
        4,
        2,
        "alltoall",
    )


def test_a_pattern_of_layers_with_experts():
    changes = {**EXPERTS, "moe-layer-freq": "([0,1]*6)", "expert-tensor-parallel-size": 1}
    model = scenario_of(changes).model
    assert [model.is_moe_layer(layer) for layer in range(4)] == [False, True, False, True]


def test_latent_attention_norms_the_latents_not_queries_and_keys():
    model = scenario_of({**LATENT, "position-embedding-type": "rope"}).model
    assert (model.latent_attention.kv_lora_rank, model.latent_attention.q_lora_rank) == (512, 1536)
    assert (model.head_size, model.qk_norm) == (192, False)


def test_bert_reads_both_ways_and_has_its_own_words():
    model = scenario_of(is_bert=True).model
    assert (model.causal, model.vocab_size) == (False, 30522)


def test_the_environment_decides_what_libraries_allocate():
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": 0}
    libraries = scenario_of(environment=environment).libraries
    assert (libraries.cublas_workspace_kib, libraries.deterministic) == (32768, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num-layers": None}, "--num-layers is missing"),
        ({"num-layers": "many"}, "--num-layers many: must be a whole number from 1"),
        ({"num-layrs": 3}, "--num-layrs 3: is not known; did you mean --num-layers?"),
        ({"perform-rl-step": True}, "--perform-rl-step: alternates training with generation"),
        (
            {"cuda-graph-impl": "eager"},
            "--cuda-graph-impl eager: must be one of none, local, transformer_engine",
        ),
        (
            {"cuda-graph-impl": "local", "cuda-graph-modules": "[attn lm_head]"},
            "--cuda-graph-modules [attn lm_head]: lm_head has no rule; known: attn, mamba, mlp, moe",
        ),
        ({"tokenizer-type": "TikTokenizer"}, "say how many words it has (--vocab-size)"),
        (
            {"tensor-model-parallel-size": 3},
            "tp * pp * cp = 3 * 1 * 1 = 3 does not divide 8 GPUs; nearest: 6",
        ),
        ({**EXPERTS, "moe-layer-freq": "lots"}, "--moe-layer-freq lots: must be a number or lists"),
        ({**EXPERTS, "moe-layer-freq": "([0]*3+[1]*11)"}, "names 14 layers of 12"),
        ({"use-megatron-fsdp": True}, "--data-parallel-sharding-strategy is missing"),
        ({"swiglu": 3}, "--swiglu 3: is a switch"),
        ({"optimizer": "lion"}, "--optimizer lion: must be one of adam, sgd, muon"),
        ({"recompute-granularity": "some"}, "--recompute-granularity some: must be full or selective"),
        ({"fp8-format": "hybrid", "fp8-recipe": "custom"}, "--fp8-recipe custom: must be one of"),
        ({"pipeline-model-parallel-layout": "Ex"}, "'x' means nothing"),
        ({**EXPERTS, "moe-pad-expert-input-to-capacity": True}, "needs --moe-expert-capacity-factor"),
        ({**EXPERTS, "moe-expert-capacity-factor": 0}, "drops every token; a factor below 0 is none"),
    ],
)
def test_what_is_refused(changes, message):
    assert message in problems_of(changes, world_size=8)


def test_all_problems_are_told_at_once():
    text = problems_of({"num-layers": None, "perform-rl-step": True, "spam": 1})
    assert text.splitlines()[0] == "the argument list has 3 problems:"


def test_what_does_not_change_a_step_is_passed_over_and_what_was_assumed_is_told():
    changed = {**GPT, "lr": 1e-4, "save-interval": 100, "log-throughput": True, "no-mmap-bin-files": True}
    imported = import_megatron(changed, "h100-sxm")
    assert imported.without_effect == ("lr", "save-interval", "log-throughput", "no-mmap-bin-files")
    assert imported.assumed == (
        "no tokenizer is named: GPT2BPETokenizer with 50257 words",
        "no attention backend is named: flash",
    )


def test_an_argument_can_be_left_out():
    imported = import_megatron(
        {**GPT, "hybrid-layer-pattern": "M*"}, "h100-sxm", leave_out=["--hybrid_layer_pattern"]
    )
    assert imported.left_out == ("hybrid-layer-pattern",)


@pytest.mark.parametrize(
    ("changes", "graphs"),
    [
        ({}, ()),
        ({"cuda-graph-impl": "none"}, ()),
        ({"enable-cuda-graph": True}, ("attn", "mlp")),
        ({"cuda-graph-impl": "local"}, ("attn", "mlp")),
        ({**EXPERTS, "cuda-graph-impl": "transformer_engine"}, ("attn", "moe_router", "moe_preprocess")),
        ({"cuda-graph-impl": "transformer_engine", "cuda-graph-scope": "attn"}, ("attn",)),
        (
            {**EXPERTS, "cuda-graph-impl": "transformer_engine", "cuda-graph-modules": "[attn moe_router]"},
            ("attn", "moe_router"),
        ),
        ({"cuda-graph-impl": "full_iteration"}, ("full_iteration",)),
        ({"cuda-graph-impl": "local", "cuda-graph-scope": "full_iteration"}, ("full_iteration",)),
    ],
)
def test_what_is_captured_into_cuda_graphs(changes, graphs):
    assert scenario_of(changes).training.cuda_graphs == graphs


# -- files ---------------------------------------------------------------------------------------------------------

SCRIPT = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
export CUBLAS_WORKSPACE_CONFIG=:4096:8
TP=2
GPT_MODEL_ARGS=(
    --num-layers 12 --hidden-size 512   # small
    --num-attention-heads 8
    --seq-length ${SEQ:-1024}
    --max-position-embeddings 1024
    --moe-layer-freq '([0]*3+[1]*9)'
)
TRAINING_ARGS="--micro-batch-size 4 \\
    --global-batch-size 32 --bf16 --lr 6.0e-5"
torchrun --nproc_per_node 8 pretrain_gpt.py ${GPT_MODEL_ARGS[@]} $TRAINING_ARGS \\
    --tensor-model-parallel-size $TP --recompute-modules layernorm mlp
"""


def test_a_launch_script(tmp_path):
    path = tmp_path / "pretrain.sh"
    path.write_text(SCRIPT)
    found = read_launch_file(path)
    assert found.environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    expected = {
        "num-layers": 12,
        "hidden-size": 512,
        "num-attention-heads": 8,
        "seq-length": 1024,
        "moe-layer-freq": "([0]*3+[1]*9)",
        "global-batch-size": 32,
        "micro-batch-size": 4,
        "bf16": True,
        "lr": 6e-5,
        "tensor-model-parallel-size": 2,
        "recompute-modules": ["layernorm", "mlp"],
    }
    assert {key: found.arguments.get(key) for key in expected} == expected


@pytest.mark.parametrize("name", ["a.yaml", "a.json"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_file_of_arguments(tmp_path, name, nested):
    content = {"MODEL_ARGS": {"--num-layers": 12}, "ENV_VARS": {"X": 1}} if nested else {"num-layers": 12}
    path = tmp_path / name
    path.write_text(json.dumps(content) if name.endswith("json") else yaml.safe_dump(content))
    found = read_launch_file(path)
    assert list(found.arguments.values()) == [12]
    assert found.environment == ({"X": "1"} if nested else {})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.sh", "echo hello\n", "holds no argument such as --num-layers 12"),
        ("a.json", "[1]", "a mapping of arguments is expected"),
        ("a.json", "{", "cannot be read as JSON"),
        ("a.yaml", "MODEL_ARGS: 3\n", "holds no arguments"),
        ("a.sh", "x" * (1 << 20) + "yy", "is larger than 1 MiB"),
        ("a.sh", b"\xff\xfe\x00", "is not a text file"),
        ("a.sh", None, "no such file"),
        ("a.yaml", None, "no such file"),
        ("a.yaml", b"[1]", "holds a list; a mapping of arguments is expected"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ScenarioError, match=message):
        read_launch_file(path)


def test_the_command_writes_a_scenario_that_loads(tmp_path):
    launch, output = tmp_path / "run.json", tmp_path / "out.yaml"
    launch.write_text(json.dumps({**GPT, "swiglu": True}))
    command = ["import-megatron", str(launch), "--hardware", "h100-sxm", "--gpus", "8", "-o", str(output)]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[0] == f"wrote {output}"
    scenario = load_scenario(output)
    assert (scenario.name, scenario.parallel.dp, scenario.model.activation) == ("run", 8, "swiglu")
    assert "# Assumed: no attention backend is named: flash" in output.read_text()
    printed = CliRunner().invoke(main, command[:-2])
    assert printed.output == output.read_text()


def test_the_command_prints_json_and_refuses_without_writing(tmp_path):
    launch, output = tmp_path / "run.json", tmp_path / "out.yaml"
    launch.write_text(json.dumps({**GPT, "spam": 1, "lr": 0.1}))
    command = ["import-megatron", str(launch), "--hardware", "h100-sxm"]
    refused = CliRunner().invoke(main, [*command, "-o", str(output)])
    assert (refused.exit_code, output.exists()) == (2, False)
    assert "--spam 1: is not known" in refused.output
    found = CliRunner().invoke(main, [*command, "--leave-out", "spam", "--json"])
    document = json.loads(found.output)
    assert set(document) == {"scenario", "assumed", "without_effect", "left_out"}
    assert (document["left_out"], document["without_effect"]) == (["spam"], ["lr"])


def test_a_scenario_that_cannot_exist_is_refused_by_the_command(tmp_path):
    launch = tmp_path / "run.json"
    launch.write_text(json.dumps({**GPT, "num-layers": 13, "pipeline-model-parallel-size": 4}))
    result = CliRunner().invoke(main, ["import-megatron", str(launch), "--hardware", "h100-sxm"])
    assert result.exit_code == 2
    assert "does not fit the 13 layers of megatron-gpt" in result.output


@pytest.mark.parametrize(
    ("changes", "offload"),
    [
        (
            {
                **EXPERTS,
                "fine-grained-activation-offloading": True,
                "offload-modules": "[core_attn attn_proj moe_act]",
                "min-offloaded-tensor-size": 1000,
                "fine-grained-offloading-max-inflight-offloads": 2,
            },
            {"modules": ("core_attn", "attn_proj", "moe_act"), "minimum_bytes": 2000, "in_flight": 2},
        ),
        ({"cpu-offloading-num-layers": 6}, {"layers": 6, "in_flight": 1}),
        ({"optimizer-cpu-offload": True}, {"optimizer": 1.0, "optimizer_overlap": False}),
        (
            {
                "optimizer-cpu-offload": True,
                "optimizer-offload-fraction": 0.5,
                "overlap-cpu-optimizer-d2h-h2d": True,
            },
            {"optimizer": 0.5, "optimizer_overlap": True},
        ),
        ({"optimizer-offload-fraction": 0.5}, {"optimizer": 0.0}),
    ],
)
def test_what_is_moved_to_the_host(changes, offload):
    plan = scenario_of(changes).training.offload
    assert {key: getattr(plan, key) for key in offload} == offload


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fine-grained-activation-offloading": True}, "needs --offload-modules, one or more of attn_norm"),
        (
            {"fine-grained-activation-offloading": True, "offload-modules": ["mlp"]},
            "--offload-modules ['mlp']: needs --offload-modules, one or more of attn_norm",
        ),
        ({"cpu-offloading": True}, "--cpu-offloading: needs --cpu-offloading-num-layers"),
        (
            {"cpu-offloading-num-layers": 2, "cpu-offloading-weights": True},
            "--cpu-offloading-weights: moves weights, which has no rule",
        ),
    ],
)
def test_what_cannot_be_moved_to_the_host(changes, said):
    assert said in problems_of(changes)
