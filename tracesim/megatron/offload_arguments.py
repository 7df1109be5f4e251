"""Megatron-LM arguments that move activations and optimizer states to the host."""

from __future__ import annotations

from typing import Any

from op_graphs.offload_activations import MODULES

from .arguments import Arguments

_ITEM = 2
"""Bytes of an activation element; Megatron-LM counts elements."""


def offload_mapping(arguments: Arguments) -> dict[str, Any] | None:
    """``training.offload``, None where nothing is moved (``arguments.py``, ``transformer_config.py``)."""
    found: dict[str, Any] = {}
    _add_modules(arguments, found)
    layers = arguments.count("cpu-offloading-num-layers")
    if arguments.flag("cpu-offloading") and layers is None:
        arguments.refuse("cpu-offloading", "needs --cpu-offloading-num-layers")
    if layers is not None:
        found["layers"] = layers
        if arguments.flag("cpu-offloading-weights"):
            arguments.refuse("cpu-offloading-weights", "moves weights, which has no rule")
    # A fraction is given beside the switch that turns it on.
    fraction = arguments.number("optimizer-offload-fraction", 1.0)
    overlap = arguments.flag("overlap-cpu-optimizer-d2h-h2d")
    for name in ("no-pin-cpu-grads", "no-pin-cpu-params", "use-torch-optimizer-for-cpu-offload"):
        arguments.flag(name)
    if arguments.flag("optimizer-cpu-offload"):
        found |= {"optimizer": fraction, "optimizer_overlap": overlap}
    return found or None


def _add_modules(arguments: Arguments, found: dict[str, Any]) -> None:
    modules = arguments.words("offload-modules")
    elements = arguments.count("min-offloaded-tensor-size", 1 << 20) or 1 << 20
    in_flight = arguments.get("fine-grained-offloading-max-inflight-offloads")
    if not arguments.flag("fine-grained-activation-offloading"):
        return
    unknown = [module for module in modules if module not in MODULES]
    if unknown or not modules:
        arguments.refuse(
            "offload-modules" if modules else "fine-grained-activation-offloading",
            f"needs --offload-modules, one or more of {', '.join(MODULES)}",
        )
        return
    found |= {"modules": modules, "minimum_bytes": _ITEM * elements}
    if in_flight is not None:
        found["in_flight"] = in_flight
