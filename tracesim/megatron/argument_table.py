"""Arguments of Megatron-LM that no scenario field answers to: without effect, priced as something else, or refused.

Source of names and meanings: Megatron-LM ``megatron/training/arguments.py``, ``transformer_config.py`` and
``model_parallel_config.py`` of core 0.2 to 0.19; Megatron-DeepSpeed ``megatron/arguments.py``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_LEARNING = r"""
      lr | lr-.* | min-lr | decoupled-.*lr | warmup | weight-decay.* | start-weight-decay | end-weight-decay
    | adam-.* | wd-incr-steps | apply-wd-to-qk-layernorm | no-weight-decay-cond-type | sgd-.* | muon-.* | lion-.*
    | soap-.* | adaptive-muon-.* | clip-grad | init-method.* | embedding-init-method.* | seed | rng-.*
    | data-parallel-random-init | te-rng-tracker | use-te-rng-tracker | inference-rng-tracker | loss-scale.*
    | initial-loss-scale | min-loss-scale | hysteresis | override-opt.* | override-lr-scheduler | head-lr-mult
    | use-mup | mup-.* | softmax-scale | qk-clip.* | norm-epsilon | layernorm-epsilon
    | layernorm-zero-centered-gamma | apply-layernorm-1p | .*attention-softmax-in-fp32 | no-query-key-layer-scaling
    | apply-query-key-layer-scaling | apply-residual-connection.* | glu-linear-offset | activation-func-clamp-value
    | mtp-loss-scaling-factor | mtp-detach-heads | wsd-decay-steps | disable-bf16-reduced-precision-matmul
    | train-.* | phase-transition-iterations | iterations-to-skip | calculate-per-token-loss
    | step-batch-size-schedule | decrease-batch-size-if-needed | sync-tp-.*
"""
_POSITIONS = r"""
      rotary-.* | use-rope-scaling | rope-.* | original-max-position-embeddings | mscale | mscale-all-dim
    | beta-fast | beta-slow | yarn-.* | no-yarn-.* | mrope-section | max-position-embeddings-.*
"""
_ROUTING = r"""
      moe-aux-loss-coeff | moe-loss-coeff | moe-z-loss-coeff | moe-input-jitter-eps | moe-router-bias-update-rate
    | moe-router-topk-scaling-factor | moe-router-force-load-balancing | moe-router-quantile-.* | moe-.*-log.*
    | moe-per-layer-logging | moe-routing-trace-.* | moe-enable-routing-replay | moe-use-upcycling
    | moe-upcycling-.* | moe-pad-experts-for-cuda-graph-inference | moe-eval-capacity-factor
    | enable-shared-expert | num-shared-experts
"""
_CHECKPOINTS = r"""
      use-checkpoint-.* | ckpt-.* | .*ckpt-.* | auto-detect-ckpt-format | async-save | async-strategy
    | use-dist-ckpt | use-persistent-ckpt-worker | verify-integrity | save | save-.* | load | load-.* | no-load-.*
    | no-save-.* | disable-load-.* | disable-save-.* | finetune | pretrained-checkpoint | exit-.*
    | non-persistent-.* | persistent-save-interval | most-recent-k | replication.*
    | no-use-tokenizer-model-from-checkpoint-args | disable-use-tokenizer-model-from-checkpoint-args
    | use-mp-args-from-checkpoint-args | no-strict-fsdp-.* | disable-strict-fsdp-.*
    | distrib-optim-fully-reshardable-.* | hetereogenous-dist-checkpoint | adlr-autoresume.* | enable-msc
    | disable-msc | dump-param-to-param-group-map | dataloader-save | universal-checkpoint
"""
_LOGS = r"""
      log-.* | no-log-.* | disable-log-.* | logging-.* | tensorboard-.* | wandb-.* | timing-.* | one-logger-.*
    | enable-one-logger | no-one-logger | no-barrier-.* | profile.* | use-pytorch-profiler | pytorch-profiler-.*
    | nvtx-ranges | record-shapes | record-memory-history | memory-snapshot-path | memory-keys | straggler-.*
    | disable-straggler-.* | throughput-window-size | runtime-time-unit | no-filter-warnings | modules-to-filter
    | set-level-for-all-loggers | app-tag-.* | config-logger-dir | history-.* | result-rejected-tracker.*
    | rerun-mode | error-injection-.* | fault-injector-.* | enable-ft-package | calc-ft-timeouts | ft-.*
    | inprocess-.* | gpu-sniff-test-.* | run-workload-inspector-server | .*flight-recorder-.* | check-for-.*
    | no-check-for-nan-in-loss | check-weight-hash-.* | te-.*-precision-debug.* | retro-.*-log | fake-process-group
    | disable-check-for-nan-in-loss | disable-filter-warnings | print-.* | comet-.* | structured-logs.*
"""
_EVALUATION = r"""
      eval-.* | skip-train | test-mode | full-validation | multiple-validation-sets | validation-.* | start-eval-.*
"""
_DATA = r"""
      split | data-path | data-args-path | data-cache-path | data-impl | .*-split-.*-path
    | .*-weighted-split-paths.* | per-split-data-args-path | valid-data-path | test-data-path | valid-path
    | prompt-path | per-dataset-.* | mid-level-dataset-surplus | mock-data | mmap-.* | no-mmap-bin-files
    | no-mmap-warmup | num-workers | valid-num-workers | dataloader-type | dataloader-fast-cache-load
    | dataloader-defer-npy-index-mmap | num-dataset-builder-threads | fim-.* | reset-.* | eod-mask-loss | mask-prob
    | short-seq-prob | vocab-file | merge-file | vocab-extra-ids | tokenizer-model | tokenizer-name-or-path
    | tokenizer-metadata | tokenizer-.* | disable-tokenizer-.* | no-tokenizer-.* | null-tokenizer-.* | tiktoken-.*
    | trust-remote-code | chat-template | sft-tokenizer-.* | allow-ambiguous-pad-tokens | object-storage-cache-path
    | sample-rate | classes-fraction | data-per-class-fraction | no-data-sharding | data-sharding | dataset
    | extra-vocab-size | max-padding-length | loss-on-targets-only | use-one-sent-docs | data-efficiency-.*
    | shuffle-.*
"""
_PROCESSES = r"""
      distributed-backend | distributed-timeout-.* | local-rank | rank | lazy-mpu-init | use-tp-.*-init
    | use-mcore-models | use-legacy-models | use-cpu-initialization | perform-initialization | no-initialization
    | init-model-with-meta-device | disable-gloo-.* | enable-gloo-.* | use-ring-exchange-p2p | nccl-.*
    | high-priority-.* | enable-experimental | ddp-average-in-collective | ddp-pad-.* | manual-gc.*
    | no-manual-gc-.* | disable-manual-gc-.* | disable-jit-fuser | yaml-cfg | align-.*-gather | no-align-.*
    | disable-align-.* | no-use-layer-wise-param-layout | use-layer-wise-param-layout
    | abort-on-unmet-fused-kernel-constraints | kill-switch-path | use-te | use-mcore | fsdp-manual-registration
    | fsdp-db-.* | megatron-fsdp-version | disable-symmetric-registration | distributed-implementation
    | export-default-te-spec | export-model-type | export-te-mcore-model | external-cuda-graph-.*
    | (no|disable)-batch-p2p-.* | barrier-with-.* | timers | standalone-.*-log
"""
_OTHER_RUNS = r"""
      inference-.* | max-tokens-to-oom | mamba-inference-.* | flash-decode | cache-mla-latents
    | mlp-chunks-for-prefill | use-legacy-static-engine | enable-chunked-prefill | decode-only-cuda-graphs
    | use-inference-optimized-layers | use-same-sampling-.* | rl-.* | grpo-.* | langrl-.* | refit-method | dino-.*
    | ict-head-size | ict-load | retriever-.* | biencoder-.* | indexer-.* | block-data-path | embedding-path
    | evidence-data-path | titles-data-path | bert-load | bert-embedder-type | query-in-block-prob | logits-load-.*
    | export-kd-cfg | num-speculative-tokens | output-bert-embeddings
"""
"""Arguments of runs other than plain training, which have an effect only beside one that is refused."""
_LOW_PRECISION = (
    r"keep-fp8-.* | fp8-amax-.* | fp8-margin | fp8-interval | tp-only-amax-red | .*-quantizer-factory"
)
_TENSOR_COLLECTIVES = (
    r"tp-comm-.*cfg.* | tp-comm-bootstrap-backend | tp-comm-(split|atomic)-.* | (no|disable)-tp-comm-split-.*"
)
_DEEPSPEED = r"""
      deepspeed.?config | deepscale.* | deepspeed-activation-checkpointing | deepspeed-mpi | no-pipeline-parallel
    | create-moe-param-group | synchronize-each-layer | profile-backward | ds-.* | use-tutel
"""
_WITHOUT_EFFECT = re.compile(
    "|".join(
        (
            _LEARNING,
            _POSITIONS,
            _ROUTING,
            _CHECKPOINTS,
            _LOGS,
            _EVALUATION,
            _DATA,
            _PROCESSES,
            _OTHER_RUNS,
            _LOW_PRECISION,
            _TENSOR_COLLECTIVES,
            _DEEPSPEED,
            r"context-parallel-(?!size).*",
        )
    ),
    re.VERBOSE,
)
"""Arguments that change what is learnt, read, written or logged, not what a training step costs."""

APPROXIMATED = {
    "no-bias-gelu-fusion": "bias and activation are priced as one kernel",
    "no-bias-swiglu-fusion": "bias and activation are priced as one kernel",
    "no-bias-dropout-fusion": "bias, dropout and residual are priced as one kernel",
    "no-rope-fusion": "rotary positions are priced as one kernel",
    "no-persist-layer-norm": "norms are priced as persistent kernels",
    "memory-efficient-layer-norm": "norms keep their inputs",
    "no-masked-softmax-fusion": "masks and softmax are priced as one kernel",
    "openai-gelu": "priced as any GELU",
    "onnx-safe": "priced as any GELU",
    "use-te-activation-func": "activations are priced alike whoever computes them",
    "use-transformer-engine-op-fuser": "operations are fused as without it",
    "use-grouped-gemm-for-dense-mlp": "priced as a plain linear",
    "use-grouped-gemm-for-shared-expert": "priced as a plain linear",
    "fused-residual-rmsnorm": "residual and norm are priced as two kernels",
    "fused-single-qkv-rope": "positions of queries and keys are priced as without it",
    "mla-down-proj-fusion": "the two down projections are priced one by one",
    "moe-shared-expert-overlap": "shared experts run in their place, not beside the exchange of tokens",
    "moe-apply-probs-on-input": "scores are applied behind the activation",
    "moe-use-legacy-grouped-gemm": "priced as Transformer Engine's grouped products",
    "moe-single-grouped-weight": "weights of experts are parameters of their own",
    "moe-single-grouped-bias": "biases of experts are parameters of their own",
    "moe-mlp-glu-interleave-size": "the layout of a gate has no cost of its own",
    "moe-shared-expert-glu-interleave-size": "the layout of a gate has no cost of its own",
    "moe-permute-fusion-into-hybridep": "tokens are permuted by a kernel of their own",
    "moe-hybridep-.*": "the dispatcher runs on as many SMs as the machine says",
    "moe-flex-dispatcher-num-sms": "the dispatcher runs on as many SMs as the machine says",
    "moe-deepep-num-sms": "the dispatcher runs on as many SMs as the machine says",
    "moe-min-capacity": "the capacity of experts has no least value",
    "use-nccl-ub|use-sharp|sharp-enabled-group|symmetric-ar-type": "collectives are priced as NCCL's on plain buffers",
    "fsdp-double-buffer|megatron-fsdp-max-pool-double-buffer": "gathered weights are allocated as they are needed",
    "suggested-communication-unit-size": "a layer is gathered at once",
    "megatron-fsdp-enable-fine-grained-param-gather": "a layer is gathered at once",
    "enable-full-sharding-in-hsdp": "optimizer states are sharded inside a shard group",
    "create-all-gather-group": "gathers and reductions of parameters share a stream",
    "ddp-bucket-size|ddp-num-buckets": "buckets have Megatron-LM's default size",
    "no-contiguous-buffers-in-local-ddp|use-contiguous-buffers-in-ddp": "gradients lie in contiguous buffers",
    "no-scaled-masked-softmax-fusion|scaled-(upper-triang-)?masked-softmax-fusion": "masks and softmax are one kernel",
    "no-gradient-reduce-div-fusion": "gradients are scaled by a kernel of their own in any case",
    "ddp-reduce-scatter-with-fp32-accumulation": "gradients are reduced as they are",
    "overlap-param-gather-with-optimizer-step": "parameters are gathered in the first forward",
    "overlap-p2p-communication-warmup-flush": "only sends of the steady state are overlapped",
    "overlap-dispatch-backward-with-experts-wgrad": "weight gradients of experts run in their place",
    "ep-overlap-early-attn-memory-release": "activations of attention are freed as without it",
    "no-async-tensor-model-parallel-allreduce": "overlap.tp says where tensor-parallel collectives run",
    "disable-tp-comm-.*|no-tp-comm-(?!split).*|tp-comm-overlap-.*": "--tp-comm-overlap is taken as a whole",
    "variable-seq-lengths": "sizes of what is sent are known before",
    "empty-unused-memory-level": "the allocator keeps its cache between steps",
    "rampup-batch-size": "a step of the whole batch is simulated",
    "optimizer-cuda-graph": "kernels of the optimizer are launched one by one",
    "cuda-graph-(?!impl|modules|scope).*|no-cuda-graph-use-single-mempool": "graphs cost no memory of their own",
    "delay-offload-until-cuda-graph": "copies to the host are launched as without it",
    "cpu-offloading-(double-buffering|retain-pinned-cpu-buffers)": "one buffer a copy",
    "megatron-fsdp-grad-comm-dtype": "gradients travel in the type they are kept in",
    "pipeline-model-parallel-comm-backend": "sends between stages are NCCL's",
    "(no|disable)-clone-scatter-output-in-embedding": "the output of the embedding is copied once",
    "disable-parameter-transpose-cache": "quantised weights are kept in both layouts",
    "deallocate-pipeline-outputs": "outputs of a stage are freed once they are sent",
    "embed-layernorm": "the norm behind the embedding is left out",
    "mtp-standalone": "prediction heads lie where the layout says",
}
"""Arguments whose effect is small or not told apart, and what a scenario takes for it; names are patterns."""

_RETRIEVAL = "retrieval has no rule"
_VISION = "the vision encoder stands in code of its own"
_ANOTHER_KERNEL = "changes the arithmetic of linears in a way that has no recipe"
_INFERENCE = "belongs to a run of inference; only training is simulated"
REFUSED = {
    "perform-rl-step": "alternates training with generation, whose engine and memory the arguments do not describe",
    "export-kd-teacher-load": "runs a second model, the teacher, that the arguments do not describe",
    "logits-save-.*": "the kernels that choose logits have no rule",
    "prompts?|num-tokens-to-generate|top-k|top-p|incoming-requests-per-step|use-flashinfer-fused-rope": _INFERENCE,
    "model-provider": "names a model in code of its own",
    "retro-.*": _RETRIEVAL,
    "heterogeneous-.*": "layers come from another file",
    "encoder-.*|decoder-num-layers|decoder-seq-length|pipeline-model-parallel-split-rank": (
        "models with an encoder and a decoder have no rule"
    ),
    "attention-sink-k": "tokens that every token attends to have no rule",
    "relative-attention-.*": "relative position biases have no rule",
    "img-.*|patch-dim|vision-.*|swin-.*|num-classes|num-channels|freeze-.*|language-model-(type|checkpoint)"
    "|total-seq-length|mask-type|mask-factor|iter-per-epoch|disable-vision-class-token"
    "|allow-missing-vision-.*|use-tiling|use-thumbnail|max-num-tiles|pixel-shuffle|image-tag-type": _VISION,
    "no-rope-freq": "layers without rotary positions have a rule only where they alternate with windows",
    "fp32-residual-connection": "residuals in fp32 beside layers in half precision have no rule",
    "fp16-lm-cross-entropy": "a loss in half precision has no rule",
    "fp8-(dot-product|multi-head)-attention": "attention on 8-bit operands has no rule",
    "fp4-param-gather": "gathering weights in 4 bits has no rule",
    "no-fp8-wgrad|disable-fp8-wgrad": "weight gradients in another precision than the rest have no rule",
    "te-precision-config-file|quant-recipe|use-kitchen.*|kitchen-.*": _ANOTHER_KERNEL,
    "activation-func-fp8-input-store": "inputs of activations in 8 bits have a rule only with all of fp8_storage",
    "distribute-(saved|checkpointed)-activations|partition-activations": (
        "kept inputs spread over tensor-parallel ranks have no rule"
    ),
    "(contigious|contiguous)-checkpointing|checkpoint-in-cpu": "this place of kept inputs has no rule",
    "enable-(mhc|hyper)-connections|num-residual-streams|mhc-.*": "several residual streams have no rule",
    "attention-residuals.*|attn-res-.*": "residuals over all earlier layers have no rule",
    "dsa-.*|csa-.*|no-dsa-.*": "sparse attention has no rule",
    "engram.*": "embeddings of n-grams have no rule",
    "flextron|enable-router": "a router that changes the width of layers has no rule",
    "kda-.*|linear-cp-mode|gated-attention-proj-granularity": "this variant of attention has no rule",
    "(hybrid|dynamic)-context-parallel|sequence-packing-scheduler|use-varlen-dataset|sft|max-seqlen-per-dp-cp-rank": (
        "packs sequences of lengths that the arguments do not say; training.sequence_lengths does"
    ),
    "(expert-)?(gtp-weight-remat-size|tensor-parallel-num-weight-shards)": (
        "weights gathered over tensor-parallel ranks before each use have no rule"
    ),
    "moe-paged-stash.*|moe-expert-rank-capacity-factor|moe-ncclep-.*": "this buffer of the dispatcher has no rule",
    "ddp-param-name-patterns-for-fp32-local-accumulation": "gradients of several types have no rule",
    "batch-invariant-mode": "kernels that do not depend on the batch have no rate",
    "mlp-chunks-for-training": "an MLP in pieces of the sequence has no rule",
    "mlp-type": "residual experts have no rule",
    "curriculum-learning.*|random-ltd.*": "steps of growing length have no rule",
    "memory-centric-tiled-linear|split-transformers|remote-device|cpu-optimizer|use-pin-memory": (
        "this form of ZeRO-Infinity has no rule"
    ),
    "optimizer-offload-policy": "an optimizer that places its states by itself has no rule",
    "offload-optimizer-states": "states that come back to the GPU for each update have no rule",
    "no-scatter-gather-tensors-in-pipeline": "sends of whole tensors from every tensor-parallel rank have no rule",
    "(no|disable)-cpu-offloading-activations": "offloading weights alone has no rule",
    "delta-offload-bytes-across-pp-ranks": "stages that offload different amounts have no rule",
    "moe-router-force-biased": "forces uneven routing by random numbers; training.routing says it by a law",
    "num-microbatches-with-partial-activation-checkpoints": "recompute in some microbatches only has no rule",
    "activation-offload-fraction": "offloading a part of a layer's modules has no rule",
    "mamba-training-ssm-states-dtype": "states of a scan in half precision have no rule",
    "lora-.*|peft-.*": "adapters are no arguments of Megatron-LM; training.lora says them",
    "nproc-per-node|nnodes|nodes": "is an argument of the launcher; --gpus says how many GPUs run",
}
"""Arguments that change a step in a way that is not simulated, and why; names are patterns."""


_NEEDS = {
    "binary-mask|soft-mask|hard-sample-th|router-.*|original-model-sample-prob|tau-.*|loss-alpha|budget-.*|.*-int-list"
    "|linear-scaler-.*|slice": ("flextron",),
    r"moe-.*|num-experts-per-.*|expert-model-parallel-size|expert-tensor-parallel-.*|overlap-moe-.*|use-tutel"
    r"|moe-router-.*|expert-gtp-.*|overlap-dispatch-.*|ep-overlap-.*|expert-interval|topk": ("num-experts",),
    "mamba-.*|disable-mamba-mem-eff-path|use-mamba-mem-eff-path": (
        "hybrid-layer-pattern",
        "hybrid-override-pattern",
        "is-hybrid-model",
        "spec",
    ),
    "linear-.*|kda-.*": ("experimental-attention-variant", "hybrid-layer-pattern"),
    "q-lora-rank|kv-lora-rank|qk-head-dim|qk-pos-emb-head-dim|v-head-dim|mla-.*|cache-mla-.*": (
        "multi-latent-attention",
    ),
    "fp8-.*|no-fp8-wgrad|disable-fp8-wgrad|first-last-layers-bf16|num-layers-at-.*-in-bf16": (
        "fp8-format",
        "fp8",
        "fp4-format",
        "fp4",
    ),
    "fp4-.*": ("fp4-format", "fp4"),
    "offload-modules|delta-offload-.*|min-offloaded-tensor-size|activation-offload-fraction": (
        "fine-grained-activation-offloading",
    ),
    "recompute-.*": ("recompute-granularity", "recompute-activations"),
    "window-attn-skip-freq": ("window-size",),
    "torch-fsdp2-.*": ("use-torch-fsdp2",),
    "(no|disable)-cpu-offloading-activations|cpu-offloading-.*": (
        "cpu-offloading",
        "cpu-offloading-num-layers",
    ),
    "tp-comm-.*|no-tp-comm-.*|disable-tp-comm-.*": ("tp-comm-overlap",),
    "cuda-graph-.*": ("cuda-graph-impl", "enable-cuda-graph", "external-cuda-graph"),
    "mtp-.*": ("mtp-num-layers", "hybrid-layer-pattern"),
    "main-.*-dtype|exp-avg.*-dtype": ("use-precision-aware-optimizer",),
    "data-parallel-sharding-strategy|outer-dp-sharding-strategy|megatron-fsdp-.*|fsdp-.*|expert-outer-dp-.*": (
        "use-megatron-fsdp",
        "use-custom-fsdp",
    ),
    "wgrad-deferral-limit": ("defer-embedding-wgrad-compute",),
    "varlen-.*|pad-packed-.*|no-pad-packed-.*|thd-.*|cp-partition-mode": (
        "use-varlen-dataset",
        "sequence-packing-scheduler",
    ),
    "mhc-.*|num-residual-streams": ("enable-mhc-connections", "enable-hyper-connections"),
    "dsa-.*|csa-.*|no-dsa-.*": ("experimental-attention-variant", "hybrid-layer-pattern"),
}
"""Arguments that mean something only where one of others is given; names are patterns."""


def needed_argument(name: str) -> tuple[str, ...] | None:
    """The arguments of which one must be given for this one to mean anything; None where it means something alone."""
    return next((others for pattern, others in _NEEDS.items() if re.fullmatch(pattern, name)), None)


def has_no_effect(name: str) -> bool:
    """Whether an argument is known not to change what a step costs."""
    return bool(_WITHOUT_EFFECT.fullmatch(name))


def stand_in(name: str) -> str | None:
    """What a scenario takes for an argument that it does not tell apart; None if that is not known of it."""
    return _found(APPROXIMATED, name)


def why_refused(name: str) -> str | None:
    """Why an argument is not simulated; None if it is not among those."""
    return _found(REFUSED, name)


def _found(table: dict[str, str], name: str) -> str | None:
    if name in table:
        return table[name]
    return next((text for pattern, text in table.items() if re.fullmatch(pattern, name)), None)


def nearest(name: str, known: Iterable[str]) -> str:
    """Advice for an unknown argument."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.8)
    return f"; did you mean --{near[0]}?" if near else ""
