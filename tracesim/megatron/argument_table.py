"""Arguments of Megatron-LM that no scenario field answers to: those without effect, and those that are refused.

Source of names and meanings: Megatron-LM ``megatron/training/arguments.py`` and ``transformer_config.py``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_WITHOUT_EFFECT = re.compile(
    r"""
      lr | lr-.* | min-lr | decoupled-.*lr | weight-decay.* | start-weight-decay | end-weight-decay | adam-.* | sgd-.*
    | muon-.* | clip-grad | init-method-.* | embedding-init-method-std | seed | rng-.* | data-parallel-random-init
    | te-rng-tracker | inference-rng-tracker | loss-scale.* | initial-loss-scale | min-loss-scale | hysteresis
    | override-opt.* | use-checkpoint-.* | ckpt-.* | .*ckpt-.* | auto-detect-ckpt-format | dist-ckpt-.* | async-save
    | async-strategy | async-ckpt-.* | use-dist-ckpt | use-persistent-ckpt-worker | verify-integrity | save | save-.*
    | load | load-.* | no-load-.* | no-save-.* | finetune | pretrained-checkpoint | exit-.* | non-persistent-.*
    | no-use-tokenizer-model-from-checkpoint-args | log-.* | logging-.* | tensorboard-.* | wandb-.* | timing-.*
    | one-logger-.* | enable-one-logger | profile.* | use-pytorch-profiler | record-memory-history
    | memory-snapshot-path | straggler-.* | eval-.* | skip-train | test-mode | full-validation | train-.* | split
    | data-path
    | data-args-path | data-cache-path | per-split-data-args-path | mock-data | mmap-bin-files | no-mmap-bin-files
    | num-workers | dataloader-type | num-dataset-builder-threads | fim-.* | reset-.* | eod-mask-loss | mask-prob
    | short-seq-prob | vocab-file | merge-file | vocab-extra-ids | tokenizer-model | tokenizer-.*-size-hint
    | tiktoken-.* | distributed-backend | distributed-timeout-.* | local-rank | lazy-mpu-init | use-tp-.*-init
    | use-mcore-models | use-legacy-models | use-cpu-initialization | perform-initialization | norm-epsilon
    | layernorm-epsilon | rotary-.* | use-rope-scaling | rope-.* | original-max-position-embeddings
    | mscale | mscale-all-dim | beta-fast | beta-slow | mtp-loss-scaling-factor | moe-aux-loss-coeff | moe-z-loss-coeff
    | moe-router-bias-update-rate | moe-router-topk-scaling-factor | moe-router-force-load-balancing | moe-.*-log.*
    | moe-per-layer-logging | check-for-.* | no-check-for-.* | check-weight-hash-.* | manual-gc.* | deterministic-mode
    | calculate-per-token-loss | step-batch-size-schedule | rampup-batch-size | attention-softmax-in-fp32
    | no-query-key-layer-scaling | apply-query-key-layer-scaling | apply-layernorm-1p | apply-residual-connection.*
    | no-persist-layer-norm | disable-gloo-.* | enable-gloo-.* | use-ring-exchange-p2p | nccl-.* | high-priority-.*
    | enable-experimental | te-.*-precision-debug.* | ddp-average-in-collective | ddp-num-buckets | ddp-bucket-size
    | ddp-pad-.* | num-workers | history-.* | retro-.*-log | yaml-cfg | no-use-layer-wise-param-layout
    | inference-.* | max-tokens-to-oom | align-.*-gather | keep-fp8-.* | fp8-amax-.* | fp8-margin | fp8-interval
    | no-fp8-wgrad | disable-tp-comm-bulk-.* | tp-comm-.*cfg.* | tp-comm-bootstrap-backend | masked-softmax-fusion
    | decrease-batch-size-if-needed | result-rejected-tracker.* | rerun-mode | error-injection-.* | context-parallel-.*
    """,
    re.VERBOSE,
)
"""Arguments that change what is learnt, read, written or logged, not what a training step costs."""
_WITH_EFFECT = ("context-parallel-size",)

REFUSED = {
    "perform-rl-step": "alternates training with generation, whose engine and memory the arguments do not describe",
    "use-megatron-fsdp": "needs --data-parallel-sharding-strategy to say what is sharded",
    "export-kd-teacher-load": "runs a second model, the teacher, that the arguments do not describe",
    "first-last-layers-bf16": "gives layers different precisions, which has no rule",
    "model-provider": "names a model in code of its own",
    "retro-add-retriever": "retrieval has no rule",
    "heterogeneous-layers-config-path": "layers come from another file",
    "window-size": "attention windows of an argument list are not read",
    "encoder-num-layers": "models with an encoder and a decoder have no rule",
    "img-h": "the vision encoder stands in code of its own",
}
"""Arguments that change a step in a way that is not simulated, and why."""


def has_no_effect(name: str) -> bool:
    """Whether an argument is known not to change what a step costs."""
    return bool(_WITHOUT_EFFECT.fullmatch(name)) and name not in _WITH_EFFECT


def nearest(name: str, known: Iterable[str]) -> str:
    """Advice for an unknown argument."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.8)
    return f"; did you mean --{near[0]}?" if near else ""
