"""Reading and checking ``training.cuda_graphs``: what the host launches as CUDA graphs.

Sources of the rules: Megatron-Core ``transformer_config.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from op_graphs.cuda_graphs import FULL_ITERATION, LAYER_PARTS, mixer_part
from op_graphs.model import ModelDescription
from op_graphs.plan import TrainingPlan

from .scenario_fields import Problems, nearest_key

_PATH = "training.cuda_graphs"
_NAMES = (*LAYER_PARTS, FULL_ITERATION)


def read_cuda_graphs(value: object, problems: Problems) -> tuple[str, ...]:
    """What ``training.cuda_graphs`` says: ``none``, ``full_iteration``, or a list of parts of a layer."""
    if value is None or value == "none":
        return ()
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not parts:
        problems.add(_PATH, value, f"must be none, {FULL_ITERATION}, or a list of {', '.join(LAYER_PARTS)}")
        return ()
    for part in parts:
        if part not in _NAMES:
            problems.add(_PATH, part, f"cannot be captured; {nearest_key(part, _NAMES)}")
    if len({str(part) for part in parts}) < len(parts):
        problems.add(_PATH, value, "names a part twice; name each once")
    if FULL_ITERATION in parts and len(parts) > 1:
        problems.add(_PATH, value, f"{FULL_ITERATION} captures everything; give it alone")
    return tuple(str(part) for part in parts)


def cuda_graphs_mapping(training: TrainingPlan) -> dict[str, Any]:
    """The field as a scenario file has it; empty where nothing is captured."""
    parts = training.cuda_graphs
    if not parts:
        return {}
    return {"cuda_graphs": FULL_ITERATION if parts == (FULL_ITERATION,) else list(parts)}


def check_cuda_graphs(model: ModelDescription | None, training: TrainingPlan, problems: Problems) -> None:
    """Note what Megatron-Core cannot capture together with other settings."""
    parts = training.cuda_graphs
    if not parts or not problems.sound(_PATH):
        return
    if training.offload.layers or training.offload.optimizer:
        problems.note(
            _PATH,
            "CUDA graphs cannot hold copies of whole layers or of optimizer states to the host; leave out "
            "training.offload, or set cuda_graphs: none",
        )
    if parts == (FULL_ITERATION,):
        return
    if training.recompute.mode == "full":
        problems.note(
            _PATH,
            f"parts of a layer cannot be captured where whole layers are recomputed; set {FULL_ITERATION}, or "
            "recompute modules",
        )
    for part, reason in _impossible(model, training).items():
        if part in parts:
            problems.add(_PATH, part, reason)


def _impossible(model: ModelDescription | None, training: TrainingPlan) -> Mapping[str, str]:
    """Why parts cannot be captured."""
    parts = training.cuda_graphs
    found = {}
    if "moe_router" in parts and "moe" in parts:
        found["moe_router"] = "is part of moe; give one or the other"
    if "moe_preprocess" in parts and "moe_router" not in parts:
        found["moe_preprocess"] = "is captured behind the router; add moe_router"
    if "moe" in training.recompute.modules:
        found["moe_router"] = "belongs to the experts that are recomputed; leave one of the two out"
    if model is None:
        return found
    captured = {mixer_part(mixer) for layer in range(model.layers) if (mixer := model.mixer(layer))}
    if "mamba" not in captured:
        found["mamba"] = f"{model.name} has no state-space layers"
    if "attn" not in captured:
        found["attn"] = f"{model.name} has no attention"
    if model.moe is None:
        found |= dict.fromkeys(("moe", "moe_router", "moe_preprocess"), f"{model.name} has no experts")
    elif model.moe.capacity_factor is None or not model.moe.pad_to_capacity:
        found["moe"] = (
            "holds shapes that change with routing; set model.moe.capacity_factor, or capture moe_router"
        )
    return found
