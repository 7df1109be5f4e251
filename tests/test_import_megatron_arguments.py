"""What single arguments of Megatron-LM mean, over its releases: known, priced as something else, or refused."""

from __future__ import annotations

import pytest

from op_graphs.stage_layout import layers_per_stage
from op_graphs.vocabulary import DType
from tests.megatron_lists import EXPERTS, GPT, LATENT, problems_of, scenario_of
from tracesim.megatron import import_megatron
from tracesim.megatron.argument_table import APPROXIMATED, REFUSED
from tracesim.megatron.layer_patterns import layer_numbers
from tracesim.scenario import load_scenario

FSDP = {"use-megatron-fsdp": True, "data-parallel-sharding-strategy": "optim_grads_params"}
GEOMETRY = {"pipeline-model-parallel-size": 4, "micro-batch-size": 1, "global-batch-size": 8}


@pytest.mark.parametrize(
    ("changes", "read", "expected"),
    [
        # Losses and gradients are looked at for NaN unless the arguments say not, or a loss scale is found by trial.
        ({}, lambda s: s.libraries.nan_checks, True),
        ({"no-check-for-nan-in-loss-and-grad": True}, lambda s: s.libraries.nan_checks, False),
        ({"bf16": None, "fp16": True}, lambda s: s.libraries.nan_checks, False),
        ({"bf16": None, "fp16": True, "loss-scale": 4096}, lambda s: s.libraries.nan_checks, True),
        # A balancing loss needs a kind and a coefficient, which is 0 by default.
        (EXPERTS, lambda s: s.model.moe.aux_loss, False),
        ({**EXPERTS, "moe-aux-loss-coeff": "1e-2"}, lambda s: s.model.moe.aux_loss, True),
        ({**EXPERTS, "moe-aux-loss-coeff": 0.0}, lambda s: s.model.moe.aux_loss, False),
        ({**EXPERTS, "moe-aux-loss-coeff": 0.1, "moe-router-load-balancing-type": "none"},
         lambda s: s.model.moe.aux_loss, False),
        ({**EXPERTS, "moe-aux-loss-coeff": ["0", "0.1"],
          "moe-router-load-balancing-type": ["aux_loss", "seq_aux_loss"]},
         lambda s: s.model.moe.aux_loss, True),
        ({**EXPERTS, "moe-router-pre-softmax": True}, lambda s: s.model.moe.normalize_top_k, False),
        ({**EXPERTS, "moe-router-pre-softmax": True, "moe-router-score-function": "sigmoid"},
         lambda s: s.model.moe.normalize_top_k, True),
        ({**EXPERTS, "expert-model-parallel-size": 4, "moe-router-topk-limited-devices": 2},
         lambda s: (s.model.moe.routing_groups, s.model.moe.top_groups), (4, 2)),
        ({**EXPERTS, "moe-token-dispatcher-type": "flex", "moe-enable-deepep": True},
         lambda s: s.parallel.ep_dispatcher, "deepep"),
        ({**EXPERTS, "moe-token-dispatcher-type": "flex", "moe-flex-dispatcher-backend": "hybridep"},
         lambda s: s.parallel.ep_dispatcher, "hybridep"),
        # A bias of queries, keys and values alone.
        ({"disable-bias-linear": True, "add-qkv-bias": True}, lambda s: (s.model.qkv_bias, s.model.mlp_bias),
         (True, False)),
        ({"add-qkv-bias": True}, lambda s: s.model.qkv_bias, True),
        ({"quick-geglu": True}, lambda s: (s.model.activation, s.model.ffn_size), ("geglu", 2048)),
        ({"glu-activation": "swiglu"}, lambda s: s.model.activation, "swiglu"),
        ({"qk-l2-norm": True}, lambda s: (s.model.qk_norm, s.model.qk_norm_weight), (True, False)),
        ({"position-embedding-type": "alibi"}, lambda s: s.model.positions, "none"),
        # A padded vocabulary is not padded again.
        ({"padded-vocab-size": 50000}, lambda s: s.model.padded_vocab(2), 50000),
        ({"vocab-size": 1000, "pad-vocab-size-to": 1003}, lambda s: s.model.padded_vocab(), 1003),
        ({"vocab-size": 1000, "no-pad-vocab-size": True}, lambda s: s.model.padded_vocab(), 1000),
        # Windows count tokens beside a token's own.
        ({"window-size": "127,0"}, lambda s: [s.model.attention_window(i) for i in range(3)], [128, 128, 128]),
        ({"window-size": "(127, 0)", "window-attn-skip-freq": 2},
         lambda s: [s.model.attention_window(i) for i in range(4)], [128, 0, 128, 0]),
        ({"window-size": "7,0", "window-attn-skip-freq": "([1,1,0])*4"},
         lambda s: [s.model.attention_window(i) for i in range(6)], [8, 8, 0, 8, 8, 0]),
        ({"window-size": "-1,0"}, lambda s: s.model.window, 0),
        ({"tokenizer-type": None, "patch-tokenizer-type": "GPT2BPETokenizer"}, lambda s: s.model.vocab_size, 50257),
        ({"softmax-type": "learnable"}, lambda s: s.model.attention_sinks, True),
        # Gradients of a precision-aware optimizer.
        ({"use-precision-aware-optimizer": True, "main-grads-dtype": "bf16"}, lambda s: s.training.grad_reduce_dtype,
         DType.BF16),
        ({"use-precision-aware-optimizer": True, "main-grads-dtype": "fp32"}, lambda s: s.training.grad_reduce_dtype,
         DType.FP32),
        # What recompute was called before.
        ({"checkpoint-activations": True}, lambda s: (s.training.recompute.mode, s.training.recompute.layers),
         ("full", 1)),
        ({"activations-checkpoint-method": "block", "activations-checkpoint-num-layers": 3},
         lambda s: (s.training.recompute.method, s.training.recompute.layers), ("block", 3)),
        ({"recompute-granularity": "full", "recompute-method": "uniform"}, lambda s: s.training.recompute.layers, 1),
        ({**EXPERTS, "moe-layer-recompute": True}, lambda s: s.training.recompute.modules, ("moe",)),
        # With these names layers were Megatron-LM's own.
        ({"checkpoint-activations": True}, lambda s: (s.libraries.transformer_engine, s.libraries.nan_checks),
         (False, False)),
        ({"DDP-impl": "local"}, lambda s: (s.training.attention, s.libraries.transformer_engine), ("unfused", False)),
        # And what else was.
        ({"micro-batch-size": None, "batch-size": 2}, lambda s: s.training.micro_batch_size, 2),
        ({"model-parallel-size": 2}, lambda s: s.parallel.tp, 2),
        ({"num-layers": None, "encoder-num-layers": 6, "seq-length": None, "encoder-seq-length": 512},
         lambda s: (s.model.layers, s.training.seq_len), (6, 512)),
        ({"external-cuda-graph": True}, lambda s: s.training.cuda_graphs, ("attn", "mlp")),
        ({"enable-cuda-graph": True, "hybrid-layer-pattern": "M*-", "num-layers": 3}, lambda s: s.training.cuda_graphs,
         ("attn", "mlp", "mamba")),
        ({"dataloader-inter-document-masking": True}, lambda s: s.training.attention_mask, False),
        ({"flash-attention-version": 2}, lambda s: s.training.attention, "flash-2"),
        # What is sharded.
        (FSDP, lambda s: s.parallel.zero, 3),
        ({**FSDP, "data-parallel-sharding-strategy": "no_shard"}, lambda s: s.parallel.zero, 0),
        ({**FSDP, "num-distributed-optimizer-instances": 2, "outer-dp-sharding-strategy": "no_shard"},
         lambda s: s.parallel.hsdp_shard, 4),
        ({"use-torch-fsdp2": True}, lambda s: s.parallel.zero, 3),
        ({"use-torch-fsdp2": True, "torch-fsdp2-no-reshard-after-forward": True}, lambda s: s.parallel.zero, 2),
        ({"deepspeed": True, "zero-stage": 2, "deepspeed_config": "ds.json"}, lambda s: s.parallel.zero, 2),
        ({"deepspeed": True, "zero-stage": 0}, lambda s: s.parallel.zero, 1),
        ({"deepspeed": True, "zero-stage": 0, "bf16": None, "fp16": True}, lambda s: s.parallel.zero, 0),
        # 0 stands for none.
        ({"mtp-num-layers": 0, "cpu-offloading-num-layers": 0},
         lambda s: (s.model.mtp_layers, s.training.offload.layers), (0, 0)),
        ({**LATENT, "q-lora-rank": 0}, lambda s: s.model.latent_attention.q_lora_rank, 0),
    ],
)  # fmt: skip
def test_what_an_argument_means(changes, read, expected):
    assert read(scenario_of({"position-embedding-type": "rope", **changes}, world_size=8)) == expected


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ({"num-layers": 14, "account-for-embedding-in-pipeline-split": True,
          "account-for-loss-in-pipeline-split": True}, (3, 4, 4, 3)),
        ({"num-layers": 11, "account-for-loss-in-pipeline-split": True}, (3, 3, 3, 2)),
        ({"num-layers": 14, "account-for-embedding-in-pipeline-split": True,
          "account-for-loss-in-pipeline-split": True, "num-layers-per-virtual-pipeline-stage": 2},
         (1, 2, 2, 2, 2, 2, 2, 1)),
        ({"num-layers": 6, "account-for-embedding-in-pipeline-split": True,
          "account-for-loss-in-pipeline-split": True, "num-virtual-stages-per-pipeline-rank": 2},
         (0, 1, 1, 1, 1, 1, 1, 0)),
        ({"num-layers": 14, "pp-partition-method": "'type:transformer|embedding'"}, (3, 4, 4, 3)),
        ({"num-layers-in-first-pipeline-stage": 6}, (6, 2, 2, 2)),
        ({"pipeline-model-parallel-layout": r"Et\*3\|\(ttt\|\)\*2tttL"}, (3, 3, 3, 3)),
    ],
)  # fmt: skip
def test_layers_of_each_stage(changes, held):
    scenario = scenario_of({**GEOMETRY, **changes})
    assert layers_per_stage(scenario.model.layers, scenario.parallel) == held


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [
        ({}, 1),
        ({"tensor-model-parallel-size": 2, "pipeline-model-parallel-size": 2, "sequence-parallel": True}, 4),
        # Experts spread over more ranks than a replica has.
        ({"num-experts": 8, "expert-model-parallel-size": 8}, 8),
        ({**EXPERTS, "expert-model-parallel-size": 4}, 8),
        ({**EXPERTS, "expert-model-parallel-size": 4, "expert-tensor-parallel-size": 1}, 4),
    ],
)
def test_the_fewest_gpus_where_nothing_says_how_many(changes, gpus):
    scenario = scenario_of(changes)
    assert scenario.parallel.world_size == gpus


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"glu-activation": "reglu"}, "--glu-activation reglu: must be swiglu or geglu"),
        ({"swiglu": True, "quick-geglu": True}, "--swiglu and --geglu do not go together"),
        ({"window-size": "128,128"}, "--window-size 128,128: windows that look ahead have no rule"),
        ({"window-size": "many"}, "--window-size many: must be two numbers such as 127,0"),
        ({"window-size": "7,0", "window-attn-skip-freq": "[1,0]"}, "list of 1 (window) or 0 for each of 12 layers"),
        ({"recompute-granularity": "full"}, "--recompute-granularity full: needs --recompute-method"),
        ({"recompute-granularity": "full", "recompute-method": "all"}, "must be uniform or block"),
        ({"deepspeed": True, "zero-stage": 4}, "--zero-stage 4: must be 0, 1, 2 or 3"),
        ({**FSDP, "data-parallel-sharding-strategy": "all"}, "must be one of no_shard, optim"),
        ({"use-megatron-fsdp": True}, "its default was no_shard, and is optim_grads_params in newer versions"),
        ({**EXPERTS, "moe-aux-loss-coeff": "some"}, "--moe-aux-loss-coeff some: must be a number"),
        ({**GEOMETRY, "num-layers": 13, "account-for-embedding-in-pipeline-split": True},
         "13 layers with an embedding do not divide over 4 stages"),
        ({**GEOMETRY, "num-layers": 14, "account-for-loss-in-pipeline-split": True,
          "decoder-first-pipeline-num-layers": 2}, "does not go with --decoder-first-pipeline-num-layers"),
        ({"num-layers": 0}, "--num-layers 0: must be a whole number from 1"),
        ({"num-layers": "${LAYERS}"}, "LAYERS is set nowhere in the file; say it with --variable LAYERS=..."),
        ({"encoder-num-layers": 12, "decoder-num-layers": 12}, "models with an encoder and a decoder have no rule"),
        ({"tokenizer-type": "HuggingFaceTokenizer", "tokenizer-model": "org/model"},
         "--tokenizer-type HuggingFaceTokenizer (org/model): its vocabulary is in a file"),
        ({"patch-tokenizer-type": "LLama3Tokenizer"}, "--patch-tokenizer-type LLama3Tokenizer: its vocabulary"),
        ({"fp8-format": "hybrid", "fp8-dot-product-attention": True}, "attention on 8-bit operands has no rule"),
        ({"enable-hyper-connections": True}, "several residual streams have no rule"),
        ({"num-tokens-to-generate": 10}, "belongs to a run of inference; only training is simulated"),
    ],
)  # fmt: skip
def test_what_is_refused(changes, message):
    assert message in problems_of(changes)


def judged(changes):
    """What importing a GPT with more arguments assumes beyond it, and which arguments are without effect."""
    plain, changed = (import_megatron({**GPT, **more}, "h100-sxm") for more in ({}, changes))
    load_scenario(changed.mapping)
    passed_over = [name for name in changed.without_effect if name not in plain.without_effect]
    return [line for line in changed.assumed if line not in plain.assumed], passed_over


@pytest.mark.parametrize(
    ("changes", "assumed", "without_effect"),
    [
        ({"no-rope-fusion": True}, ["--no-rope-fusion: rotary positions are priced as one kernel"], []),
        ({"use-mcore-models": None},
         ["no --transformer-impl: Transformer Engine, the default since 2024; it was local"], []),
        ({"enable-cuda-graph": True}, ["the memory of CUDA graphs' own pools is not counted"], []),
        ({"deepspeed": True}, ["DeepSpeed's own configuration says the ZeRO stage; no --zero-stage: 1"], []),
        ({**EXPERTS, "moe-shared-expert-overlap": True, "moe-shared-expert-intermediate-size": 64},
         ["--moe-shared-expert-overlap: shared experts run in their place, not beside the exchange of tokens"], []),
        ({"rampup-batch-size": "16 16 1000"}, ["--rampup-batch-size: a step of the whole batch is simulated"], []),
        # What asks for nothing is nothing.
        ({"empty-unused-memory-level": 0, "expert-tensor-parallel-num-weight-shards": 1, "window-size": None}, [],
         ["empty-unused-memory-level", "expert-tensor-parallel-num-weight-shards"]),
        # What means something only beside another argument.
        ({"moe-router-topk": 2, "moe-paged-stash": True, "fp8-dot-product-attention": True, "kda-safe-gate": True}, [],
         ["moe-router-topk", "moe-paged-stash", "fp8-dot-product-attention", "kda-safe-gate"]),
        ({"rl-generation-lag": 3, "grpo-iterations": 1, "inference-max-requests": 9}, [],
         ["rl-generation-lag", "grpo-iterations", "inference-max-requests"]),
        ({"tp-comm-overlap-rs-dgrad": True}, [], ["tp-comm-overlap-rs-dgrad"]),
    ],
)  # fmt: skip
def test_what_is_taken_for_an_argument(changes, assumed, without_effect):
    assert judged(changes) == (assumed, without_effect)


def test_a_hybrid_pattern_of_latent_attention_and_more_layers_than_are_counted():
    """Megatron-LM warns and goes by the pattern; ``+`` is latent attention."""
    sizes = {"multi-latent-attention": None, "hybrid-layer-pattern": "M+-M+-", "num-layers": 5}
    imported = import_megatron({**GPT, **LATENT, **sizes}, "h100-sxm")
    model = load_scenario(imported.mapping).model
    assert (model.layer_pattern, model.latent_attention.kv_lora_rank) == ("M*-M*-", 512)
    assert "--hybrid-layer-pattern names 6 layers, --num-layers says 5: the pattern holds" in imported.assumed


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("[0]*3+[1]*2", [0, 0, 0, 1, 1]),
        ("([0]*1+[1]*1)*2", [0, 1, 0, 1]),
        ("2*[1,0]", [1, 0, 1, 0]),
        ("(0,4,128)", [0, 4, 128]),
        ("3", None),
        ("[1]*1000000", None),
        ("[[1]]", None),
        ("__import__('os')", None),
        ("[1" * 200, None),
        ("[1]+" * 3000 + "[1]", None),
    ],
)
def test_a_number_for_each_layer(text, numbers):
    assert layer_numbers(text) == numbers


def test_no_argument_is_both_refused_and_priced_as_something_else():
    assert not set(APPROXIMATED) & set(REFUSED)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"img-h": 336, "freeze-ViT": True},
            "--img-h 336, --freeze-ViT: the vision encoder stands in code of its own; --leave-out with each name",
        ),
        # What belongs to a refused argument is not told beside it.
        (
            {"flextron": True, "tau-init": 1.0},
            "--flextron: a router that changes the width of layers has no rule",
        ),
    ],
)
def test_arguments_refused_for_one_reason_are_one_problem(changes, line):
    text = problems_of(changes)
    assert text.splitlines()[0] == "the argument list has a problem:"
    assert line in text


DEEPSPEED_EXPERTS = {"deepspeed": True, "num-experts": 8, "moe-expert-parallel-size": 4}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (1, 1.0, [False, True, False, True])),
        ({"expert-interval": 1, "topk": 2}, (2, 1.0, [True, True, True, True])),
        ({"moe-train-capacity-factor": 1.5}, (1, 1.5, [False, True, False, True])),
        ({"disable-moe-token-dropping": True}, (1, None, [False, True, False, True])),
    ],
)
def test_experts_of_deepspeed(changes, expected):
    scenario = scenario_of({**DEEPSPEED_EXPERTS, **changes}, world_size=4)
    model, libraries = scenario.model, scenario.libraries
    layers = [model.is_moe_layer(layer) for layer in range(4)]
    assert (model.moe.top_k, model.moe.capacity_factor, layers) == expected
    assert (scenario.parallel.ep, scenario.parallel.ep_dispatcher) == (4, "alltoall")
    assert (libraries.transformer_engine, libraries.nan_checks) == (False, False)


def test_one_expert_of_deepspeed_is_an_mlp_and_several_numbers_are_refused():
    assert scenario_of({**DEEPSPEED_EXPERTS, "num-experts": 1}).model.moe is None
    text = problems_of({**DEEPSPEED_EXPERTS, "num-experts": ["64", "128"]})
    assert "layers with different numbers of experts have no rule" in text
