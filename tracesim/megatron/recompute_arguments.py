"""Which activations an argument list recomputes.

``--recompute-granularity`` with its method, or what earlier versions called it: ``--activations-checkpoint-method``
(Megatron-LM 2.4 to 2.6) and ``--checkpoint-activations`` (before, and Megatron-DeepSpeed).
"""

from __future__ import annotations

from typing import Any

from .arguments import Arguments


def recompute_rule(arguments: Arguments) -> str | dict[str, Any]:
    """``training.recompute`` of the scenario."""
    granularity = arguments.text("recompute-granularity")
    if arguments.flag("recompute-activations"):
        granularity = granularity or "selective"
    old_switch = arguments.flag("checkpoint-activations")
    method = arguments.text(arguments.first_given("recompute-method", "activations-checkpoint-method"))
    layers = arguments.count(
        arguments.first_given(
            "recompute-num-layers", "activations-checkpoint-num-layers", "checkpoint-num-layers"
        )
    )
    modules = arguments.words("recompute-modules")
    if arguments.flag("moe-layer-recompute"):
        granularity, modules = granularity or "selective", [*modules, "moe"]
    if not granularity and (old_switch or arguments.given("activations-checkpoint-method")):
        granularity, method = "full", method or "uniform"
    if granularity == "full":
        if not method:
            arguments.refuse("recompute-granularity", "needs --recompute-method")
        elif method not in ("uniform", "block"):
            arguments.refuse("recompute-method", "must be uniform or block")
        return {"method": method if method in ("uniform", "block") else "uniform", "layers": layers or 1}
    if granularity == "selective":
        return {"modules": modules or ["core_attn"]}
    if granularity:
        arguments.refuse("recompute-granularity", "must be full or selective")
    return "none"
