"""Reading and checking ``training.lora``: low-rank adapters beside frozen weights.

What a plan must keep to is what Megatron Bridge enforces when it places adapters (``peft/lora.py``, ``peft/utils.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from op_graphs.adapters import TARGETS, smallest_target
from op_graphs.model import ModelDescription
from op_graphs.plan import LowRankAdapters, ParallelPlan, TrainingPlan

from .scenario_fields import Problems, check_keys, nearest_key
from .yaml_reading import describe_type

LORA_KEYS = ("rank", "alpha", "targets", "dropout", "dropout_position")
_PATH = "training.lora"
_LARGEST_RANK = 1 << 16
_POSITIONS = ("pre", "post")


def read_lora(value: object, problems: Problems) -> LowRankAdapters | None:
    """What ``training.lora`` says; None for training every weight, and where it is wrong, which is noted."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        problems.add(_PATH, value, f"is a {describe_type(value)}, must be a mapping such as {{rank: 16}}")
        return None
    before = len(problems.lines)
    problems.given.update(f"{_PATH}.{key}" for key in value)
    check_keys(_PATH, value, LORA_KEYS, problems)
    default = LowRankAdapters(rank=1)
    rank = value.get("rank")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= _LARGEST_RANK:
        problems.add(f"{_PATH}.rank", rank, f"must be a whole number from 1 to {_LARGEST_RANK}")
    alpha = value.get("alpha", default.alpha)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < float("inf"):
        problems.add(f"{_PATH}.alpha", alpha, "must be a number above 0")
    dropout = value.get("dropout", default.dropout)
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        problems.add(f"{_PATH}.dropout", dropout, "must be a probability from 0 to below 1")
    position = value.get("dropout_position", default.dropout_position)
    if position not in _POSITIONS:
        problems.add(f"{_PATH}.dropout_position", position, f"must be one of {', '.join(_POSITIONS)}")
    targets = _read_targets(value.get("targets", default.targets), problems)
    if len(problems.lines) > before:
        return None
    return LowRankAdapters(int(value["rank"]), float(alpha), targets, float(dropout), str(position))


def _read_targets(value: object, problems: Problems) -> tuple[str, ...]:
    path = f"{_PATH}.targets"
    if not isinstance(value, list | tuple) or not value:
        problems.add(path, value, f"must be a list of one or more of {', '.join(TARGETS)}")
        return ()
    for target in value:
        if not isinstance(target, str) or target not in TARGETS:
            problems.add(
                path, target, f"is no linear that adapters are placed at; {nearest_key(target, TARGETS)}"
            )
            return ()
    placed: dict[str, list[str]] = {}
    for target in value:
        linear, part = TARGETS[target]
        for other in placed.setdefault(linear, []):
            if "" in (part, TARGETS[other][1]) or part == TARGETS[other][1]:
                problems.add(
                    path, [other, target], f"would put two adapters at {linear}; name one of the two"
                )
        placed[linear].append(target)
    return tuple(str(target) for target in value)


def lora_mapping(training: TrainingPlan) -> dict[str, Any]:
    """The field as a scenario file has it; empty where every weight is trained."""
    lora = training.lora
    if lora is None:
        return {}
    return {
        "lora": {
            "rank": lora.rank,
            "alpha": lora.alpha,
            "targets": list(lora.targets),
            "dropout": lora.dropout,
            "dropout_position": lora.dropout_position,
        }
    }


def check_lora(
    model: ModelDescription | None, parallel: ParallelPlan, training: TrainingPlan, problems: Problems
) -> None:
    """Note what the model, the degrees or the rest of the training plan does not allow beside adapters."""
    lora = training.lora
    if lora is None:
        return
    _check_training(training, problems)
    if lora.rank % parallel.tp and problems.sound("parallel.tp"):
        below, above = (lora.rank // parallel.tp + step for step in (0, 1))
        nearest = " or ".join(str(times * parallel.tp) for times in (below, above) if times)
        problems.add(
            f"{_PATH}.rank",
            lora.rank,
            f"is cut over the tensor-parallel ranks beside column-parallel linears, tp is {parallel.tp}; "
            f"nearest: {nearest}",
        )
    if model is None or not problems.sound("model"):
        return
    unplaced = [
        name
        for name, has in (
            ("experts", model.moe is not None),
            ("latent attention", model.latent_attention is not None),
            ("gated attention", model.attention_output_gate),
            ("state-space layers", model.state_space is not None),
            ("delta-rule layers", model.delta_net is not None),
            ("layers of one part", bool(model.layer_pattern)),
            ("heads for multi-token prediction", model.mtp_layers > 0),
            ("a vision encoder", model.vision is not None),
            ("image patches", model.patches is not None),
        )
        if has
    ]
    if unplaced:
        problems.note(
            _PATH,
            f"{model.name} has {' and '.join(unplaced)}; adapters are placed at dense layers with one projection to "
            "queries, keys and values; leave it out, or train such a model",
        )
        return
    if not model.gated and "gate_proj" in lora.targets:
        problems.add(f"{_PATH}.targets", "gate_proj", f"{model.name} has no gate; nearest: up_proj")
    target, side = smallest_target(model, lora)
    if lora.rank >= side:
        problems.add(
            f"{_PATH}.rank",
            lora.rank,
            f"is not below the smaller side of {target} in {model.name}, {side}; give 1 to {side - 1}",
        )


def _check_training(training: TrainingPlan, problems: Problems) -> None:
    refused = (
        (
            "training.fp8_param_gather",
            training.fp8_param_gather,
            "gathers quantised weights behind their update, and with training.lora they are frozen; leave it out",
        ),
        (
            "training.fp8_storage",
            training.fp8_storage,
            "keeps inputs for weight gradients that frozen weights do not have; leave it out",
        ),
        (
            "training.deferred_head_gradients",
            training.deferred_head_gradients,
            "puts off the weight gradient of a head that training.lora freezes; leave it out",
        ),
    )
    for path, value, rule in refused:
        if value and problems.sound(path):
            problems.add(path, value, rule)
    if training.recompute.keeps_products and problems.sound("training.recompute"):
        problems.note(
            "training.recompute.keep",
            "with training.lora what is kept of the adapters' products is not known; use modules, every or full",
        )
