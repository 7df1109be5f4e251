"""Arguments that Megatron-DeepSpeed adds to Megatron-LM's."""

from __future__ import annotations

from .arguments import Arguments


def deepspeed_stage(arguments: Arguments) -> int:
    """ZeRO stage; DeepSpeed's bf16 optimizer shards its states whatever is said, other types only from stage 1 on.

    Source: Megatron-DeepSpeed ``arguments.py`` (1 by default), DeepSpeed ``runtime/bf16_optimizer.py``.
    """
    name = "zero-stage"
    stated = arguments.values.get(name)
    stage = 0 if stated == 0 else int(arguments.number(name, 1.0))
    arguments.get(name)
    if stage not in range(4):
        arguments.refuse(name, "must be 0, 1, 2 or 3")
        return 1
    if stage == 0 and arguments.flag("bf16"):
        arguments.assumed.append("DeepSpeed's bf16 optimizer shards its states: zero: 1")
        return 1
    return stage
