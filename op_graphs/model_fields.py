"""Keys of a model file and their values: what each may be, and how the nested parts of a model are read.

The table :data:`RULES` has a line for every field of every part of a model. A part is a mapping in the file and a
value of its own in :class:`~op_graphs.model.ModelDescription`; given over a base, it changes that part key by key.
"""

from __future__ import annotations

import difflib
import re
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, cast, get_args

from .model import (
    EXPERTS_LETTER,
    MIXER_LETTERS,
    MLP_LETTER,
    Activation,
    DropPolicy,
    GatedDeltaNet,
    LatentAttention,
    LayerOverride,
    MixtureOfExperts,
    ModelDescription,
    Norm,
    PatchInput,
    Positions,
    RouterScore,
    StateSpace,
    VisionEncoder,
    WindowKind,
)
from .model_checks import (
    LARGEST_SIZE,
    MOST_LAYERS,
    choice_problem,
    factor_problem,
    layers_problem,
    pattern_problem,
    probability_problem,
    shown,
    switch_problem,
    text_problem,
    whole_number_problem,
)

Check = Callable[[object], str]
"""What is wrong with a value, or ''."""


@dataclass(frozen=True)
class Part:
    """A field that is a part of its own, described by a mapping; it may be null."""

    kind: type


def _whole(low: int = 1, high: int = LARGEST_SIZE) -> Check:
    return lambda value: whole_number_problem(value, low, high)


def _choice(words: object) -> Check:
    return lambda value: choice_problem(value, get_args(words))


def _optional(check: Check) -> Check:
    return lambda value: "" if value is None else check(value)


def _widths_problem(value: object) -> str:
    if isinstance(value, list | tuple) and not any(whole_number_problem(width) for width in value):
        return ""
    return f"must be a list of whole numbers, not {shown(value)}"


def _source_problem(value: object) -> str:
    return "" if value == "" else text_problem(value)


_LARGEST_IMAGE = 1 << 16
_ONE_PART_LAYERS = layers_problem(
    ChainMap({MLP_LETTER: "MLP", EXPERTS_LETTER: "experts"}, cast("dict[str, str]", MIXER_LETTERS))
)
RULES: dict[type, dict[str, Check | Part]] = {
    ModelDescription: {
        "name": text_problem,
        "layers": _whole(1, MOST_LAYERS),
        "hidden_size": _whole(),
        "ffn_size": _whole(),
        "heads": _whole(1, 1_000_000),
        "kv_heads": _whole(1, 1_000_000),
        "head_size": _whole(),
        "vocab_size": _whole(0),
        "max_positions": _whole(0),
        "activation": _choice(Activation),
        "norm": _choice(Norm),
        "positions": _choice(Positions),
        "qkv_bias": switch_problem,
        "attention_output_bias": switch_problem,
        "mlp_bias": switch_problem,
        "qk_norm": switch_problem,
        "tied_embeddings": switch_problem,
        "vocab_padding_multiple": _whole(),
        "hidden_dropout": probability_problem,
        "attention_dropout": probability_problem,
        "causal": switch_problem,
        "window": _whole(0),
        "window_kind": _choice(WindowKind),
        "window_pattern": pattern_problem,
        "rotary_on_full_attention": switch_problem,
        "attention_sinks": switch_problem,
        "attention_output_gate": switch_problem,
        "qk_norm_weight": switch_problem,
        "head_bias": switch_problem,
        "moe": Part(MixtureOfExperts),
        "latent_attention": Part(LatentAttention),
        "mtp_layers": _whole(0, 64),
        "mtp_pattern": _ONE_PART_LAYERS,
        "mtp_repeated": switch_problem,
        "layer_pattern": _ONE_PART_LAYERS,
        "mixer_pattern": layers_problem(MIXER_LETTERS, empty=False),
        "state_space": Part(StateSpace),
        "delta_net": Part(GatedDeltaNet),
        "layer_overrides": Part(LayerOverride),
        "patches": Part(PatchInput),
        "vision": Part(VisionEncoder),
        "source": _source_problem,
    },
    MixtureOfExperts: {
        "experts": _whole(1, 1 << 16),
        "top_k": _whole(1, 1 << 16),
        "expert_ffn_size": _whole(),
        "shared_ffn_size": _whole(0),
        "shared_gate": switch_problem,
        "first_dense_layers": _whole(0, MOST_LAYERS),
        "layer_frequency": _whole(1, MOST_LAYERS),
        "layer_offset": _whole(0, MOST_LAYERS),
        "router_score": _choice(RouterScore),
        "router_fp32": switch_problem,
        "router_linear_bias": switch_problem,
        "router_bias": switch_problem,
        "normalize_top_k": switch_problem,
        "aux_loss": switch_problem,
        "capacity_factor": factor_problem,
        "pad_to_capacity": switch_problem,
        "drop_policy": _choice(DropPolicy),
        "routing_groups": _whole(1, 1 << 16),
        "top_groups": _whole(1, 1 << 16),
        "expert_bias": switch_problem,
        "scores_on_input": switch_problem,
        "latent_size": _whole(0),
    },
    LatentAttention: {
        "kv_lora_rank": _whole(),
        "qk_nope_head_size": _whole(),
        "qk_rope_head_size": _whole(),
        "v_head_size": _whole(),
        "q_lora_rank": _whole(0),
    },
    StateSpace: {
        "heads": _whole(1, 1_000_000),
        "head_size": _whole(1, 1 << 16),
        "state_size": _whole(1, 1 << 16),
        "groups": _whole(1, 1_000_000),
        "conv_width": _whole(1, 64),
        "chunk_size": _whole(1, 1 << 16),
    },
    GatedDeltaNet: {
        "key_heads": _whole(1, 1_000_000),
        "value_heads": _whole(1, 1_000_000),
        "key_head_size": _whole(1, 1 << 16),
        "value_head_size": _whole(1, 1 << 16),
        "conv_width": _whole(1, 64),
    },
    LayerOverride: {
        "first": _whole(0, MOST_LAYERS - 1),
        "last": _whole(0, MOST_LAYERS - 1),
        "ffn_size": _optional(_whole()),
        "window": _optional(_whole(0)),
        "moe": _optional(switch_problem),
    },
    PatchInput: {
        "image_size": _whole(1, _LARGEST_IMAGE),
        "patch_size": _whole(1, _LARGEST_IMAGE),
        "channels": _whole(1, 1024),
        "temporal_patch": _whole(1, 1024),
        "bias": switch_problem,
        "class_token": switch_problem,
        "position_rows": _whole(0),
        "pre_norm": switch_problem,
    },
    VisionEncoder: {
        "encoder": Part(ModelDescription),
        "merge_size": _whole(1, 1024),
        "projector_sizes": _widths_problem,
        "projector_bias": switch_problem,
    },
}

_ONE_LAYER_OR_RANGE = re.compile(r"\s*(\d{1,5})\s*(?:-\s*(\d{1,5})\s*)?\Z")


def read_fields(
    kind: type, mapping: Mapping[Any, Any], problems: list[str], prefix: str = "", start: object = None
) -> dict[str, Any]:
    """The sound values of a mapping for the fields of ``kind``; what is wrong is added to ``problems``.

    ``prefix`` (as ``moe.``) comes before keys in messages; ``start`` is a value of the same kind that parts of the
    mapping are laid over.
    """
    rules = RULES[kind]
    values: dict[str, Any] = {}
    for key, value in mapping.items():
        rule = rules.get(key) if isinstance(key, str) else None
        if rule is None:
            problems.append(f"{prefix}{shown(key).strip(chr(39))}: {_unknown_key(kind, key)}")
        elif isinstance(rule, Part):
            part = _read_part(rule.kind, value, problems, f"{prefix}{key}", getattr(start, key, None))
            if part is not _WRONG:
                values[key] = part
        elif problem := rule(value):
            problems.append(f"{prefix}{key}: {problem}")
        else:
            values[key] = _stored(rule, value)
    return values


class _Wrong:
    """Stands for a value that could not be read; the problem is noted."""


_WRONG = _Wrong()


def _stored(rule: Check, value: object) -> object:
    """A value in the type its field has, whatever the file's form was."""
    if rule in (probability_problem, factor_problem) and isinstance(value, int | float):
        return float(value)
    return tuple(value) if isinstance(value, list) else value


def _unknown_key(kind: type, key: object) -> str:
    names = [*RULES[kind], "base"] if kind is ModelDescription else list(RULES[kind])
    near = difflib.get_close_matches(shown(key).strip("'"), names, n=1, cutoff=0.5)
    what = "a model" if kind is ModelDescription else "this part of a model"
    return f"is not a key of {what}; " + (
        f"did you mean {near[0]}?" if near else f"the keys are {', '.join(names)}"
    )


def _read_part(kind: type, value: object, problems: list[str], path: str, start: object) -> object:
    if kind is LayerOverride:
        return _read_overrides(value, problems, path)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        problems.append(f"{path}: must be a mapping of its keys, or null, not {shown(value)}")
        return _WRONG
    before = len(problems)
    given = read_fields(kind, value, problems, f"{path}.", start)
    if start is not None:
        given = {column.name: getattr(start, column.name) for column in fields(start)} | given  # type: ignore[arg-type]
    if kind is ModelDescription:
        given.setdefault("name", "encoder")
        fill_defaults(given, problems, f"{path}.")
    unread = {problem.split(":", 1)[0] for problem in problems[before:]}
    for column in fields(kind):
        required = column.default is MISSING and column.default_factory is MISSING
        if required and column.name not in given and f"{path}.{column.name}" not in unread:
            problems.append(f"{path}.{column.name}: is missing")
    return _WRONG if len(problems) > before else kind(**given)


def _read_overrides(value: object, problems: list[str], path: str) -> object:
    """Overrides from ``{"0-2": {ffn_size: 1024}, 7: {moe: false}}``, or a list of mappings with first and last."""
    entries: list[tuple[str, Mapping[Any, Any]]] = []
    if isinstance(value, Mapping):
        for key, change in value.items():
            found = _ONE_LAYER_OR_RANGE.match(str(key)) if not isinstance(key, bool) else None
            if found is None or not isinstance(change, Mapping):
                problems.append(
                    f"{path}: must give a layer or a range of layers, as 0-2, and what changes there; "
                    f"not {shown(key)}: {shown(change)}"
                )
                return _WRONG
            first = int(found[1])
            entries.append((f"{path}.{key}.", {"first": first, "last": int(found[2] or first), **change}))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        if any(not isinstance(entry, Mapping) for entry in value):
            problems.append(f"{path}: must be a list of mappings, not {shown(value)}")
            return _WRONG
        entries = [(f"{path}.{index}.", entry) for index, entry in enumerate(value)]
    elif value is not None:
        problems.append(f"{path}: must map layers to changes, not {shown(value)}")
        return _WRONG
    before = len(problems)
    overrides = []
    for prefix, entry in entries:
        given = read_fields(LayerOverride, entry, problems, prefix)
        missing = [name for name in ("first", "last") if name not in entry]
        problems.extend(f"{prefix}{name}: is missing" for name in missing)
        if len(problems) == before:
            overrides.append(LayerOverride(**given))
    return _WRONG if len(problems) > before else tuple(overrides)


def fill_defaults(values: dict[str, Any], problems: list[str], prefix: str = "") -> None:
    """Fill what follows from the rest of a model: multi-head attention, heads that split the width, no vocabulary."""
    latent, heads = values.get("latent_attention"), values.get("heads")
    if values.get("patches") is not None:
        values.setdefault("vocab_size", 0)
        values.setdefault("causal", False)
    if heads is None:
        return
    values.setdefault("kv_heads", heads)
    if latent is not None:
        values.setdefault("head_size", latent.qk_head_size)
    if "head_size" not in values and "hidden_size" in values:
        hidden = values["hidden_size"]
        if hidden % heads:
            problems.append(
                f"{prefix}heads: {heads} does not divide hidden_size {hidden}; give head_size as well"
            )
        values["head_size"] = max(hidden // heads, 1)
