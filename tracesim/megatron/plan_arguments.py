"""The parallel plan, training settings, schedule and overlap that an argument list describes.

What an argument implies for others is Megatron-LM's ``validate_args`` (``megatron/training/arguments.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from op_graphs.cuda_graphs import FULL_ITERATION, LAYER_PARTS

from .arguments import Arguments
from .deepspeed_arguments import deepspeed_stage
from .offload_arguments import offload_mapping
from .recompute_arguments import recompute_rule
from .stage_arguments import add_stages

_FP8 = {
    "delayed": {"dtype": "fp8-tensorwise", "fp8_scaling": "delayed"},
    "tensorwise": {"dtype": "fp8-tensorwise"},
    "blockwise": {"dtype": "fp8-blockwise"},
    "mxfp8": {"dtype": "mxfp8"},
}
_BACKENDS = {"flash": "flash", "fused": "flash", "auto": "flash", "unfused": "unfused", "local": "unfused"}
_DISPATCHERS = {
    "alltoall": "alltoall",
    "allgather": "allgather",
    "flex": "deepep",
    "alltoall_seq": "alltoall",
}
_CP_COMM = {
    "p2p": "p2p",
    "a2a": "a2a",
    "allgather": "allgather",
    "all_gather": "allgather",
    "a2a+p2p": "a2a+p2p",
}
_GRAPH_PARTS = {"attention": "attn", "router": "moe_router", "preprocess": "moe_preprocess"}
"""Parts of a layer by other words of ``--cuda-graph-modules``."""
_IMPLEMENTATIONS = {"transformer_engine": "transformer_engine", "local": "local"}
_UNTIL_2021 = ("DDP-impl", "checkpoint-activations", "activations-checkpoint-method")
_SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def parallel_mapping(
    arguments: Arguments, world_size: int | None, launched: int | None = None
) -> dict[str, Any]:
    """The ``parallel`` section; the data-parallel degree is what is left of ``world_size``."""
    tp = (
        arguments.count(
            arguments.first_given(
                "tensor-model-parallel-size", "model-parallel-size", "intra-layer-model-parallel-size"
            ),
            1,
        )
        or 1
    )
    pp = arguments.count("pipeline-model-parallel-size", 1) or 1
    cp = arguments.count("context-parallel-size", 1) or 1
    experts = _expert_plan(arguments, tp)
    block = tp * pp * cp
    ranks = world_size or arguments.count("world-size") or _ranks(arguments, tp * cp, pp, experts, launched)
    if ranks % block:
        arguments.problems.append(
            f"tp * pp * cp = {tp} * {pp} * {cp} = {block} does not divide {ranks} GPUs; nearest: "
            f"{max(block, ranks // block * block)}"
        )
    arguments.words("hierarchical-context-parallel-sizes")
    plan: dict[str, Any] = {
        "tp": tp,
        "sp": arguments.flag("sequence-parallel") and tp > 1,
        "cp": cp,
        "cp_comm": arguments.choice("cp-comm-type", "p2p", _CP_COMM),
        "pp": pp,
        "dp": max(1, ranks // block),
        "zero": _zero(arguments),
        "order": "tp-cp-ep-pp-dp" if arguments.flag("use-tp-pp-dp-mapping") else "tp-cp-ep-dp-pp",
        **experts,
    }
    instances = arguments.count("num-distributed-optimizer-instances", 1) or 1
    if instances > 1:
        plan["hsdp_shard"] = max(1, plan["dp"] * cp // instances)
    add_stages(arguments, plan)
    return plan


def _expert_plan(arguments: Arguments, tp: int) -> dict[str, Any]:
    """How experts are spread; empty without them."""
    if arguments.count("num-experts") is None:
        return {}
    old_name = arguments.flag("moe-enable-deepep")
    backend = arguments.text("moe-flex-dispatcher-backend", "deepep")
    dispatcher = arguments.choice("moe-token-dispatcher-type", "allgather", _DISPATCHERS)
    if dispatcher == "deepep" and backend == "hybridep" and not old_name:
        dispatcher = "hybridep"
    elif dispatcher == "deepep" and backend != "deepep" and not old_name:
        arguments.assumed.append(f"--moe-flex-dispatcher-backend {backend}: priced as DeepEP")
    name = arguments.first_given("expert-model-parallel-size", "moe-expert-parallel-size")
    return {
        "ep": arguments.count(name, 1) or 1,
        "etp": arguments.count("expert-tensor-parallel-size", tp) or 1,
        "ep_dispatcher": dispatcher,
    }


def _ranks(
    arguments: Arguments, replica: int, pp: int, experts: Mapping[str, Any], launched: int | None
) -> int:
    """GPUs that are started, else the fewest on which all groups of a stage are whole; ``replica`` is tp * cp."""
    fewest = math.lcm(replica, experts.get("ep", 1) * experts.get("etp", 1)) * pp
    if launched is None or launched % fewest == 0:
        return launched or fewest
    arguments.assumed.append(
        f"the launcher starts {launched} GPUs, which the plan does not fit: the {fewest} it needs; --gpus says more"
    )
    return fewest


def _zero(arguments: Arguments) -> int:
    sharded = arguments.flag("use-distributed-optimizer")
    if arguments.flag("use-torch-fsdp2"):
        return 2 if arguments.flag("torch-fsdp2-no-reshard-after-forward") else 3
    strategy = arguments.text("data-parallel-sharding-strategy")
    if not (arguments.flag("use-megatron-fsdp") or arguments.flag("use-custom-fsdp")):
        return deepspeed_stage(arguments) if arguments.flag("deepspeed") else int(sharded)
    for name in ("outer-dp-sharding-strategy", "expert-outer-dp-sharding-strategy"):
        outer = arguments.text(name, "no_shard")
        if outer != "no_shard":
            arguments.assumed.append(
                f"--{name} {outer}: optimizer states are sharded inside a shard group only"
            )
    if not strategy:
        arguments.problems.append(
            "--use-megatron-fsdp: --data-parallel-sharding-strategy is missing, which says what is sharded "
            "(its default was no_shard, and is optim_grads_params in newer versions)"
        )
        return 3
    if strategy not in _SHARDING:
        arguments.refuse("data-parallel-sharding-strategy", f"must be one of {', '.join(_SHARDING)}")
    return _SHARDING.get(strategy, 3)


def training_mapping(arguments: Arguments, plan: Mapping[str, Any], default_backend: str) -> dict[str, Any]:
    """The ``training`` section."""
    micro = arguments.required(arguments.first_given("micro-batch-size", "batch-size"))
    fusion = arguments.choice("cross-entropy-fusion-impl", "native", {"native": "native", "te": "te"})
    training: dict[str, Any] = {
        "seq_len": arguments.required(arguments.first_given("seq-length", "encoder-seq-length")),
        "micro_batch_size": micro,
        "global_batch_size": arguments.count("global-batch-size", micro * plan["dp"]),
        **_precision(arguments),
        "optimizer": arguments.choice(
            "optimizer",
            "adam",
            {"adam": "adam", "sgd": "sgd", "muon": "muon", "dist_muon": "muon"},
        ),
        "recompute": recompute_rule(arguments),
        "cross_entropy_fusion": {"te": True, "native": "native"}[fusion]
        if arguments.flag("cross-entropy-loss-fusion")
        else False,
        "attention": _attention(arguments, default_backend),
        "attention_mask": _makes_mask(arguments),
        "gradient_accumulation_fusion": not arguments.flag("no-gradient-accumulation-fusion"),
    }
    types = _optimizer_types(arguments)
    if types:
        training["optimizer_dtypes"] = types
    padding, old_name = (arguments.flag(f"moe-router-padding-for-{what}") for what in ("quantization", "fp8"))
    if padding or old_name:
        training["router_padding"] = True
    graphs = _cuda_graphs(arguments)
    if graphs:
        training["cuda_graphs"] = graphs
        arguments.assumed.append("the memory of CUDA graphs' own pools is not counted")
    offload = offload_mapping(arguments)
    if offload:
        training["offload"] = offload
    if arguments.flag("defer-embedding-wgrad-compute"):
        # Without a limit the gradients of all microbatches wait.
        training["deferred_head_gradients"] = arguments.count("wgrad-deferral-limit", 1 << 20)
    return training


def _makes_mask(arguments: Arguments) -> bool:
    """Whether the data loader makes a mask; ends of documents beside the sequence take its place."""
    documents = arguments.flag("dataloader-inter-document-masking")
    if documents:
        arguments.assumed.append(
            "--dataloader-inter-document-masking: attention spans the whole sequence; training.sequence_lengths "
            "says how long documents are"
        )
    return not documents and not arguments.flag("no-create-attention-mask-in-dataloader")


def _is_of_2021(arguments: Arguments) -> bool:
    """Whether arguments are given that Megatron-LM 3 no longer had; before it layers were its own."""
    return any([arguments.given(name) for name in _UNTIL_2021])  # noqa: C419 - all are to be known


def uses_transformer_engine(arguments: Arguments) -> bool:
    """Whether layers are built from Transformer Engine; ``pretrain_bert.py`` takes ``--spec local`` for not."""
    default = "local" if _is_of_2021(arguments) else "transformer_engine"
    stated = arguments.choice("transformer-impl", default, _IMPLEMENTATIONS)
    return stated == "transformer_engine" and arguments.get("spec") != "local"


def _attention(arguments: Arguments, default_backend: str) -> str:
    local = not uses_transformer_engine(arguments)
    stated = arguments.text("attention-backend")
    version = arguments.count("flash-attention-version")
    flash = any([arguments.flag("use-flash-attn"), arguments.flag("use-flash-attn-v2"), bool(version)])
    if version == 2 and stated in ("", "auto", "flash"):
        return "flash-2"
    if stated:
        return arguments.choice("attention-backend", "auto", _BACKENDS)
    if local and not flash:
        return "unfused"
    if not flash:
        arguments.assumed.append(f"no attention backend is named: {default_backend}")
    return "flash" if flash else default_backend


def _precision(arguments: Arguments) -> dict[str, Any]:
    half = "bf16" if arguments.flag("bf16") else "fp16" if arguments.flag("fp16") else "fp32"
    in_fp32, in_bf16 = (
        arguments.flag(name) for name in ("accumulate-allreduce-grads-in-fp32", "grad-reduce-in-bf16")
    )
    # bf16 implies gradients in fp32, unless a precision-aware optimizer is to keep them in bf16; fp16 does not.
    kept = arguments.text("main-grads-dtype") or arguments.text("megatron-fsdp-main-grads-dtype")
    gradients = "bf16" if half == "bf16" and (in_bf16 or (kept == "bf16" and not in_fp32)) else "fp32"
    if half == "fp16" and not in_fp32:
        gradients = "fp16"
    if arguments.text("megatron-fsdp-main-params-dtype", "fp32") not in ("fp32", "auto"):
        arguments.refuse(
            "megatron-fsdp-main-params-dtype", "master weights of Megatron-FSDP are simulated in fp32 only"
        )
    precision: dict[str, Any] = {"dtype": half, "grad_reduce_dtype": gradients}
    fp8, recipe = (
        arguments.text("fp8-format") or arguments.text("fp8"),
        arguments.text("fp8-recipe", "delayed"),
    )
    if fp8:
        if recipe not in _FP8:
            arguments.refuse("fp8-recipe", f"must be one of {', '.join(_FP8)} to be simulated")
        precision |= _FP8.get(recipe, {})
        precision["fp8_param_gather"] = arguments.flag("fp8-param-gather") or arguments.flag("fp8-param")
        arguments.flag("reuse-grad-buf-for-mxfp8-param-ag")
        precision["fp8_head"] = arguments.flag("fp8-output-proj")
    if arguments.text("fp4-format") or arguments.text("fp4"):
        precision["dtype"] = "nvfp4"
        arguments.text("fp4-recipe")
        fp8 = "fp4"
    ends = {
        f"bf16_{end}_layers": _layers_in_bf16(arguments, f"num-layers-at-{place}-in-bf16")
        for end, place in (("first", "start"), ("last", "end"))
    }
    if arguments.flag("first-last-layers-bf16") and fp8:
        precision |= ends
    return precision


def _layers_in_bf16(arguments: Arguments, name: str) -> int:
    """Layers at an end of the model: 1 where nothing is said, and 0 is none."""
    return 0 if str(arguments.get(name)) == "0" else arguments.count(name, 1) or 1


def _optimizer_types(arguments: Arguments) -> dict[str, str]:
    if not arguments.flag("use-precision-aware-optimizer"):
        return {}
    words = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}
    master = arguments.choice("main-params-dtype", "fp32", words)
    moments = {arguments.choice(name, "fp32", words) for name in ("exp-avg-dtype", "exp-avg-sq-dtype")}
    if len(moments) > 1:
        arguments.problems.append(
            "--exp-avg-dtype and --exp-avg-sq-dtype differ; only one type for both is simulated"
        )
    return {"master": master, "moments": moments.pop()}


def _cuda_graphs(arguments: Arguments) -> str | list[str]:
    """What is captured: ``full_iteration``, or parts of a layer; all that can be captured where none is named."""
    words = {name: name for name in ("none", "local", "transformer_engine", FULL_ITERATION)}
    stated = arguments.choice("cuda-graph-impl", "none", words)
    if arguments.flag("enable-cuda-graph"):
        stated = "local"
    if arguments.flag("external-cuda-graph"):
        stated = "transformer_engine"
    named = arguments.words("cuda-graph-modules") or arguments.words("cuda-graph-scope")
    for name in ("cuda-graph-warmup-steps", "cuda-graph-num-warmup-steps"):
        arguments.count(name)
    if stated == "none":
        return []
    if FULL_ITERATION in (stated, *named):
        return FULL_ITERATION
    parts = [_GRAPH_PARTS.get(name, name) for name in named]
    if "full" in parts or not parts:
        experts = arguments.given("num-experts")
        parts = ["attn", "moe_router", "moe_preprocess"] if experts else ["attn", "mlp"]
        pattern = arguments.first_given("hybrid-layer-pattern", "hybrid-override-pattern")
        if "M" in arguments.text(pattern):
            parts.append("mamba")
    for part in parts:
        if part not in LAYER_PARTS:
            arguments.refuse("cuda-graph-modules", f"{part} has no rule; known: {', '.join(LAYER_PARTS)}")
    return [part for part in parts if part in LAYER_PARTS]


def schedule_name(arguments: Arguments, plan: Mapping[str, Any]) -> str:
    """The ``schedule`` of the scenario."""
    overlapped = arguments.flag("overlap-moe-expert-parallel-comm")
    delayed = arguments.flag("delay-wgrad-compute")
    group = arguments.count("microbatch-group-size-per-virtual-pipeline-stage")
    options = f":group={group}" if group and plan["vpp"] > 1 else ""
    if overlapped:
        return ("1f1b-overlap-wgrad" if delayed else "1f1b-overlap") + options
    return f"interleaved-1f1b{options}" if plan["vpp"] > 1 else "1f1b"


def overlap_mapping(arguments: Arguments, plan: Mapping[str, Any]) -> dict[str, bool | str]:
    """The ``overlap`` section."""
    bulk = arguments.flag("tp-comm-overlap")
    off = arguments.flag("no-overlap-p2p-communication")
    return {
        "grad_reduce": arguments.flag("overlap-grad-reduce"),
        "param_gather": arguments.flag("overlap-param-gather"),
        "p2p": plan["vpp"] > 1 and not off,
        "tp": "userbuffers" if bulk and plan["sp"] and plan["tp"] > 1 else bulk,
        "ep": arguments.flag("overlap-moe-expert-parallel-comm"),
        "wgrad": arguments.flag("delay-wgrad-compute"),
    }


def _looks_for_nan(arguments: Arguments) -> bool:
    """Whether losses and gradients are looked at for NaN: by default, but not beside a dynamic loss scale."""
    off = arguments.flag("no-check-for-nan-in-loss-and-grad") or _is_of_2021(arguments)
    return not off and not (arguments.flag("fp16") and not arguments.given("loss-scale"))


def libraries_mapping(arguments: Arguments, environment: Mapping[str, Any]) -> dict[str, Any]:
    """The ``libraries`` section: whose linears run, and the workspace that cuBLAS is given."""
    of_a_time = [arguments.given(name) for name in ("transformer-impl", "use-mcore-models", "spec")]
    if not any(of_a_time) and not _is_of_2021(arguments):
        arguments.assumed.append(
            "no --transformer-impl: Transformer Engine, the default since 2024; it was local"
        )
    found: dict[str, Any] = {
        "transformer_engine": uses_transformer_engine(arguments),
        "nan_checks": _looks_for_nan(arguments),
    }
    if arguments.given("num-experts"):
        found["grouped_gemm"] = arguments.flag("moe-grouped-gemm")
        found["permute_fusion"] = arguments.flag("moe-permute-fusion")
        fused = arguments.flag("moe-router-fusion")
        found["router_fusion"] = fused and found["transformer_engine"]
        found["weighted_squared_relu_fusion"] = arguments.flag("use-fused-weighted-squared-relu")
    allowed = str(environment.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1"))
    found["deterministic"] = arguments.flag("deterministic-mode") or allowed == "0"
    config = environment.get("CUBLAS_WORKSPACE_CONFIG")
    if config is not None:
        parts = str(config).strip(":").split(":")
        try:
            pairs = [(int(size), int(times)) for size, times in zip(parts[::2], parts[1::2], strict=True)]
        except ValueError:
            arguments.problems.append(f"CUBLAS_WORKSPACE_CONFIG {config}: must be pairs such as :4096:8")
            return found
        found["cublas_workspace_kib"] = sum(size * times for size, times in pairs)
    return found
