"""Reading and checking ``training.offload``: activations and optimizer states in the memory of the host.

Sources of the rules: Megatron-Core ``transformer_config.py`` and ``optimizer/cpu_offloading``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardware_profiles.profile import HardwareProfile
from op_graphs.model import ModelDescription
from op_graphs.offload_activations import MODULES
from op_graphs.plan import Offload, TrainingPlan
from op_graphs.recompute import Part, recomputed_parts

from .scenario_fields import Problems, check_keys, nearest_key
from .yaml_reading import describe_type

KEYS = ("modules", "layers", "minimum_bytes", "in_flight", "optimizer", "optimizer_overlap")
HOST_OPTIMIZERS = ("adam", "sgd")
"""Optimizers with an update for the processor (Megatron-Core ``optimizer/__init__.py``)."""
_PATH = "training.offload"
_MOST_BYTES = 1 << 40


def read_offload(value: object, problems: Problems) -> Offload:
    """What ``training.offload`` says; nothing for null, and where it is wrong, which is noted."""
    if value is None:
        return Offload()
    if not isinstance(value, Mapping) or not value:
        problems.add(
            _PATH,
            value,
            f"is a {describe_type(value)}, must be {{modules: [core_attn]}}, {{layers: 4}}, {{optimizer: 1.0}}, "
            "or null",
        )
        return Offload()
    problems.given.update(f"{_PATH}.{key}" for key in value)
    check_keys(_PATH, value, KEYS, problems)
    default = Offload()
    modules = _modules(value.get("modules"), problems)
    layers = _number(value, "layers", 0, 1 << 20, default.layers, problems)
    if modules and layers:
        problems.note(
            f"{_PATH}.layers", "moves whole layers and modules parts of every layer; give one or the other"
        )
    in_flight: int | None = 1 if layers else None
    if value.get("in_flight") is not None:
        in_flight = _number(value, "in_flight", 0, 1 << 20, 1, problems)
    return Offload(
        modules=modules,
        layers=layers,
        minimum_bytes=_number(value, "minimum_bytes", 0, _MOST_BYTES, default.minimum_bytes, problems),
        in_flight=in_flight,
        optimizer=_fraction(value.get("optimizer", default.optimizer), problems),
        optimizer_overlap=_flag(value.get("optimizer_overlap", default.optimizer_overlap), problems),
    )


def offload_mapping(training: TrainingPlan) -> dict[str, Any]:
    """The field as a scenario file has it; empty where nothing is moved."""
    plan = training.offload
    if plan == Offload():
        return {}
    mapping = {key: getattr(plan, key) for key in KEYS}
    mapping["modules"] = list(plan.modules) or None
    return {"offload": mapping}


def check_offload(
    model: ModelDescription | None,
    hardware: HardwareProfile | None,
    training: TrainingPlan,
    problems: Problems,
) -> None:
    """Note what cannot be moved, and machines whose link to the host is not known."""
    plan = training.offload
    if plan == Offload() or not problems.sound(_PATH, *(f"{_PATH}.{key}" for key in KEYS)):
        return
    if model is not None and plan.modules:
        _check_modules(model, training, problems)
    if model is not None and plan.layers > model.layers:
        problems.add(
            f"{_PATH}.layers", plan.layers, f"{model.name} has {model.layers}; nearest: {model.layers}"
        )
    if plan.optimizer and training.optimizer not in HOST_OPTIMIZERS and problems.sound("training.optimizer"):
        problems.add(
            f"{_PATH}.optimizer",
            plan.optimizer,
            f"there is no {training.optimizer} for the processor of the host; set optimizer: adam, or leave it out",
        )
    if hardware is None:
        return
    needed = ["link_gb_per_s"] + (["memory_gb_per_s"] if plan.optimizer else [])
    for figure in needed:
        if not getattr(hardware.host, figure):
            problems.note(
                _PATH,
                f"{hardware.name} does not know host.{figure}, which copies to the host need; add it to the profile, "
                "or leave offload out",
            )


def _check_modules(model: ModelDescription, training: TrainingPlan, problems: Problems) -> None:
    path, plan, recompute = f"{_PATH}.modules", training.offload, training.recompute
    if recompute.mode == "full" and recompute.method == "uniform":
        problems.note(
            path, "is empty where whole layers are recomputed, which keep their input only; use layers"
        )
        return
    possible = [module for module in MODULES if not _reason_against(model, training, module)]
    for module in plan.modules:
        reason = _reason_against(model, training, module)
        if reason:
            problems.add(path, module, f"{reason}; what can be moved: {', '.join(possible)}")
    if "attn_proj" in plan.modules and "core_attn" not in plan.modules:
        problems.add(
            path,
            "attn_proj",
            "moves the output of core attention, which the backward pass of core attention keeps; add core_attn",
        )


def _reason_against(model: ModelDescription, training: TrainingPlan, module: str) -> str:
    """Why a module keeps nothing that could be moved; '' if it does."""
    again = recomputed_parts(training.recompute)
    if module in ("expert_fc1", "moe_act") and model.moe is None:
        return f"{model.name} has no experts"
    if module in ("expert_fc1", "moe_act") and Part.EXPERTS in again:
        return "recompute of moe keeps nothing of it"
    if module == "qkv_linear" and Part.NORMS in again and model.latent_attention is None:
        return "its input, the output of a norm, is recomputed"
    if module == "core_attn" and {Part.LATENT_UP_PROJECTIONS, Part.CORE_ATTENTION} <= again:
        return "recompute keeps nothing of it"
    return ""


def _modules(value: object, problems: Problems) -> tuple[str, ...]:
    path = f"{_PATH}.modules"
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not value:
        problems.add(path, value, f"must be a list of one or more of {', '.join(MODULES)}")
        return ()
    for module in value:
        if module not in MODULES:
            problems.add(path, module, f"is not a module; {nearest_key(module, MODULES)}")
    if len({str(module) for module in value}) < len(value):
        problems.add(path, value, "names a module twice; name each once")
    return tuple(str(module) for module in value)


def _number(
    mapping: Mapping[Any, Any], key: str, low: int, high: int, default: int, problems: Problems
) -> int:
    value = mapping.get(key, default)
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return value
    problems.add(f"{_PATH}.{key}", value, f"must be a whole number from {low} to {high}")
    return default


def _fraction(value: object, problems: Problems) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
        return float(value)
    problems.add(f"{_PATH}.optimizer", value, "must be the part of the parameters to move, from 0 to 1")
    return 0.0


def _flag(value: object, problems: Problems) -> bool:
    if isinstance(value, bool):
        return value
    problems.add(f"{_PATH}.optimizer_overlap", value, "must be true or false")
    return True
