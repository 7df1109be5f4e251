"""Arguments that Megatron-DeepSpeed adds to Megatron-LM's."""

from __future__ import annotations

from typing import Any

from .arguments import Arguments

_CAPACITY = 1.0
"""``--moe-train-capacity-factor`` where it is not given."""


def add_deepspeed_defaults(arguments: Arguments) -> None:
    """Say in Megatron-LM's arguments what Megatron-DeepSpeed takes where nothing is said, and calls otherwise.

    Layers are its own, not Transformer Engine's; of the experts one is chosen, up to a capacity that is padded to, in
    every second layer (``arguments.py``, ``megatron/model/transformer.py``, DeepSpeed ``moe/layer.py``).
    """
    if not arguments.flag("deepspeed"):
        return
    implied: dict[str, Any] = {
        "transformer-impl": "local",
        "no-check-for-nan-in-loss-and-grad": True,
        # DeepSpeed accumulates gradients itself.
        "no-gradient-accumulation-fusion": True,
    }
    experts = arguments.words("num-experts")
    if len(experts) > 1:
        arguments.refuse("num-experts", "layers with different numbers of experts have no rule")
        implied["num-experts"] = experts[0]
    if experts and experts[0] != "1":
        implied |= _expert_defaults(arguments)
    elif experts:
        # One expert is an MLP.
        implied["num-experts"] = None
    arguments.imply(implied)


def _expert_defaults(arguments: Arguments) -> dict[str, Any]:
    interval = arguments.count("expert-interval", 2) or 2
    drops = not arguments.flag("disable-moe-token-dropping")
    capacity = arguments.number("moe-train-capacity-factor", _CAPACITY)
    inside = arguments.flag("enable-expert-tensor-parallelism")
    return {
        "moe-layer-freq": f"([{'0,' * (interval - 1)}1]*{(arguments.count('num-layers', 1) or 1) // interval})",
        "moe-router-topk": arguments.count("topk", 1),
        "moe-token-dispatcher-type": "alltoall",
        "moe-router-pre-softmax": True,
        **(
            {"moe-expert-capacity-factor": capacity, "moe-pad-expert-input-to-capacity": True}
            if drops
            else {}
        ),
        **({} if inside else {"expert-tensor-parallel-size": 1}),
    }


def deepspeed_stage(arguments: Arguments) -> int:
    """ZeRO stage; DeepSpeed's bf16 optimizer shards its states whatever is said, other types only from stage 1 on.

    Source: Megatron-DeepSpeed ``arguments.py`` (1 by default), DeepSpeed ``runtime/bf16_optimizer.py``.
    """
    name = "zero-stage"
    stated = arguments.values.get(name)
    stage = 0 if stated == 0 else int(arguments.number(name, 1.0))
    arguments.get(name)
    if stated is None:
        arguments.assumed.append("DeepSpeed's own configuration says the ZeRO stage; no --zero-stage: 1")
    if stage not in range(4):
        arguments.refuse(name, "must be 0, 1, 2 or 3")
        return 1
    if stage == 0 and arguments.flag("bf16"):
        arguments.assumed.append("DeepSpeed's bf16 optimizer shards its states: zero: 1")
        return 1
    return stage
