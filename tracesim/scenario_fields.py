"""The keys of a scenario file: what each accepts, its default, and reading them with every problem noted.

Only single fields are judged here; combinations are judged in ``tracesim.scenario_checks``. Adding a field is one
line in :data:`FIELDS` and a field of the same name in the plan of ``op_graphs.plan``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from op_graphs.context_parallel.registry import ALGORITHMS
from op_graphs.dispatchers import DISPATCHERS
from op_graphs.optimizers import OPTIMIZERS
from op_graphs.overlap.registry import OVERLAP_POINTS
from op_graphs.plan import (
    EAGER_PARTS,
    CrossEntropy,
    LibraryPlan,
    OverlapPlan,
    ParallelPlan,
    Recompute,
    TrainingPlan,
)
from op_graphs.recompute import KEEP_RULES, LAYER_RULES, MODULE_RULES
from op_graphs.vocabulary import DType
from schedules.registry import schedule_names

from .yaml_reading import describe_type

SCHEDULES = schedule_names()
LOW_PRECISION = ("fp8-tensorwise", "fp8-blockwise", "fp8-rowwise", "mxfp8", "nvfp4")
"""Training precisions whose linears run on quantised operands, and everything else in bf16."""
DTYPES: dict[str, DType] = {
    "fp32": DType.FP32,
    "fp16": DType.FP16,
    "bf16": DType.BF16,
    **dict.fromkeys(LOW_PRECISION, DType.BF16),
}
"""Type of weights and activations by the name of a training precision."""
CROSS_ENTROPIES: dict[object, CrossEntropy] = {
    False: "unfused",
    "native": "native",
    "torch": "torch",
    "compiled": "compiled",
    True: "te",
}
"""Kernels of the loss by what ``training.cross_entropy_fusion`` says."""
LOSS_NAMES = ("true", "false", "native", "torch", "compiled")
RESHARDS = ("default", "always", "never")
REDUCE_DTYPES = {"fp32": DType.FP32, "bf16": DType.BF16, "fp16": DType.FP16}


@dataclass(frozen=True)
class FieldRule:
    """What a key accepts, in words and as a predicate, and the value it has when left out."""

    expects: str
    accepts: Callable[[object], bool]
    default: object
    choices: tuple[str, ...] = ()


def _count(default: int, limit: int = 1 << 20) -> FieldRule:
    return FieldRule(f"must be a whole number from 1 to {limit}", lambda v: _is_count(v, limit), default)


def _amount(default: int, limit: int = 1 << 20) -> FieldRule:
    return FieldRule(
        f"must be a whole number from 0 to {limit}",
        lambda v: v is not False and (v == 0 or _is_count(v, limit)),
        default,
    )


def _optional_count(limit: int = 1 << 20) -> FieldRule:
    return FieldRule(
        f"must be a whole number from 1 to {limit}, or null",
        lambda value: value is None or _is_count(value, limit),
        None,
    )


def _flag(default: bool) -> FieldRule:
    return FieldRule("must be true or false", lambda value: isinstance(value, bool), default)


def _policy(default: bool | str, names: tuple[str, ...]) -> FieldRule:
    return FieldRule(
        f"must be true, false or one of {', '.join(names)}",
        lambda value: isinstance(value, bool) or (isinstance(value, str) and value in names),
        default,
        names,
    )


def _choice(default: str, choices: Collection[str]) -> FieldRule:
    names = tuple(choices)
    return FieldRule(
        f"must be one of {', '.join(names)}",
        # A registry may have got an entry since.
        lambda value: isinstance(value, str) and value in choices,
        default,
        names,
    )


def _is_count(value: object, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= limit


def _is_level(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 3


def _is_choice_list(value: object, choices: tuple[str, ...]) -> bool:
    """Whether a value is a list of one or more different choices."""
    return (
        isinstance(value, (list, tuple))
        and 0 < len(value) == len({str(item) for item in value})
        and all(item in choices for item in value)
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


_PARALLEL, _TRAINING, _OVERLAP, _LIBRARIES = ParallelPlan(), TrainingPlan(), OverlapPlan(), LibraryPlan()

FIELDS: dict[str, dict[str, FieldRule]] = {
    "parallel": {
        "tp": _count(_PARALLEL.tp),
        "sp": _flag(_PARALLEL.sp),
        "cp": _count(_PARALLEL.cp),
        "cp_comm": _choice(_PARALLEL.cp_comm, ALGORITHMS),
        "pp": _count(_PARALLEL.pp),
        "vpp": _count(_PARALLEL.vpp),
        "dp": _count(_PARALLEL.dp),
        "ep": _count(_PARALLEL.ep),
        "etp": _count(_PARALLEL.etp),
        "ep_dispatcher": _choice(_PARALLEL.ep_dispatcher, DISPATCHERS),
        "ep_host_sync": _flag(_PARALLEL.ep_host_sync),
        "zero": FieldRule("must be 0, 1, 2 or 3", _is_level, _PARALLEL.zero),
        "hsdp_shard": _optional_count(),
        "reshard": FieldRule(
            f"must be one of {', '.join(RESHARDS)}, or a number of ranks from 2",
            lambda value: value in RESHARDS if isinstance(value, str) else _is_count(value, 1 << 20),
            _PARALLEL.reshard,
            RESHARDS,
        ),
        "prefetch": FieldRule(
            "must be a whole number from 0 to 64",
            lambda value: isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 64,
            _PARALLEL.prefetch,
        ),
        "flat_parameters": _flag(_PARALLEL.flat_parameters),
        "root_unit": _flag(_PARALLEL.root_unit),
        "whole_tensors": _flag(_PARALLEL.whole_tensors),
        "first_stage_layers": _optional_count(),
        "last_stage_layers": _optional_count(),
        "layout": FieldRule(
            'must be a Megatron layout text such as "Et*3|t*4|t*4L", or null',
            lambda value: value is None or _is_text(value),
            None,
        ),
        "vision_stage": _choice(_PARALLEL.vision_stage, ("colocated", "own")),
        "order": FieldRule(
            "must name tp, cp, ep, dp and pp once each, joined by -, such as tp-cp-ep-dp-pp",
            lambda value: (
                isinstance(value, str) and sorted(value.split("-")) == ["cp", "dp", "ep", "pp", "tp"]
            ),
            _PARALLEL.order,
        ),
    },
    "training": {
        "seq_len": _count(_TRAINING.seq_len, 1 << 24),
        "micro_batch_size": _count(_TRAINING.micro_batch_size),
        "num_microbatches": _optional_count(),
        "global_batch_size": _optional_count(1 << 31),
        "dtype": _choice("bf16", DTYPES),
        "fp8_scaling": _choice("current", ("current", "delayed")),
        "fp8_param_gather": _flag(_TRAINING.fp8_param_gather),
        "bf16_first_layers": _amount(_TRAINING.bf16_first_layers),
        "bf16_last_layers": _amount(_TRAINING.bf16_last_layers),
        "fp8_head": _flag(_TRAINING.fp8_head),
        "fp8_dispatch": _flag(_TRAINING.fp8_dispatch),
        "fp8_storage": _flag(_TRAINING.fp8_storage),
        "router_padding": _flag(_TRAINING.router_padding),
        "grad_reduce_dtype": _choice("fp32", REDUCE_DTYPES),
        "optimizer": _choice(_TRAINING.optimizer, OPTIMIZERS),
        # Read by tracesim.precision_fields.
        "optimizer_dtypes": FieldRule("", lambda value: True, None),
        "recompute": FieldRule("", lambda value: True, "none"),
        # Read by tracesim.offload_fields.
        "offload": FieldRule("", lambda value: True, None),
        "cross_entropy_fusion": FieldRule(
            f"must be {', '.join(LOSS_NAMES)}",
            lambda value: isinstance(value, (bool, str)) and value in CROSS_ENTROPIES,
            False,
            ("native",),
        ),
        "gradient_accumulation_fusion": _flag(_TRAINING.gradient_accumulation_fusion),
        "deferred_head_gradients": _optional_count(),
        "post_validation": _flag(_TRAINING.post_validation),
        "attention_mask": _flag(_TRAINING.attention_mask),
        "attention": _choice(_TRAINING.attention, ("flash", "flash-2", "flash-1", "unfused")),
        "mla": _choice(_TRAINING.mla, ("expanded", "absorbed")),
        "images_per_sample": _count(_TRAINING.images_per_sample),
        # Read by tracesim.cuda_graph_fields.
        "cuda_graphs": FieldRule("", lambda value: True, None),
        # Read by tracesim.imbalance_fields.
        "routing": FieldRule("", lambda value: True, None),
        "sequence_lengths": FieldRule("", lambda value: True, None),
        # Read by tracesim.lora_fields.
        "lora": FieldRule("", lambda value: True, None),
    },
    "overlap": {
        **{key: _policy(getattr(_OVERLAP, key), point.names()) for key, point in OVERLAP_POINTS.items()},
        "contention": _flag(_OVERLAP.contention),
        "reserved_sms": FieldRule(
            "must be a whole number of SMs, 0 or more",
            lambda value: isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1 << 16,
            _OVERLAP.reserved_sms,
        ),
    },
    "libraries": {
        "transformer_engine": _flag(_LIBRARIES.transformer_engine),
        "grouped_gemm": _flag(_LIBRARIES.grouped_gemm),
        "permute_fusion": _flag(_LIBRARIES.permute_fusion),
        "router_fusion": _flag(_LIBRARIES.router_fusion),
        "weighted_squared_relu_fusion": _flag(_LIBRARIES.weighted_squared_relu_fusion),
        "grouped_mlp_fusion": _flag(_LIBRARIES.grouped_mlp_fusion),
        "experts_in_turn": _flag(_LIBRARIES.experts_in_turn),
        "eager": FieldRule(
            f"must be true, false or a list of {', '.join(EAGER_PARTS)}",
            lambda value: isinstance(value, bool) or _is_choice_list(value, EAGER_PARTS),
            _LIBRARIES.eager,
            EAGER_PARTS,
        ),
        "fp32_norm_inputs": _flag(_LIBRARIES.fp32_norm_inputs),
        "separate_projections": _flag(_LIBRARIES.separate_projections),
        "separate_biases": _flag(_LIBRARIES.separate_biases),
        "gelu_fusion": _flag(_LIBRARIES.gelu_fusion),
        "deterministic": _flag(_LIBRARIES.deterministic),
        "batch_fetch_waits": _flag(_LIBRARIES.batch_fetch_waits),
        "nan_checks": _flag(_LIBRARIES.nan_checks),
        "checkpoints": _flag(_LIBRARIES.checkpoints),
        "cublas_workspace_kib": _optional_count(1 << 24),
        "torch_pipelining": _flag(_LIBRARIES.torch_pipelining),
        "expandable_segments": _flag(_LIBRARIES.expandable_segments),
    },
}
_OTHER_NAMES = {
    "tensor": "tp",
    "pipeline": "pp",
    "data": "dp",
    "context": "cp",
    "expert": "ep",
    "sequence_parallel": "sp",
    "virtual": "vpp",
    "mbs": "micro_batch_size",
    "gbs": "global_batch_size",
    "seq_length": "seq_len",
    "gpu": "hardware",
    "precision": "dtype",
}
"""What other tools call a key, by its beginning."""
TOP_KEYS = ("name", "model", "hardware", "parallel", "training", "schedule", "overlap", "libraries")
RECOMPUTE_KEYS = ("modules", "layers", "method", "every", "keep", "stops_early")


@dataclass
class Problems:
    """Everything wrong with a scenario, gathered so that all of it is told at once.

    ``overrides`` are the dotted paths set on the command line, ``given`` those written in ``source``.
    """

    source: str
    given: set[str] = field(default_factory=set)
    overrides: set[str] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)

    def add(self, path: str, value: object, rule: str) -> None:
        """Note that the field at ``path`` has a value that breaks ``rule``."""
        self.lines.append(f"{path}: {show_value(value)} ({self.origin(path)}) {rule}")
        self.paths.add(path)

    def note(self, path: str, message: str) -> None:
        """Note a problem with ``path`` that has no single value; a message that begins with the path says it once."""
        self.lines.append(message if message.startswith(path) else f"{path}: {message}")
        self.paths.add(path)

    def origin(self, path: str) -> str:
        """Where the value at ``path`` comes from, for a message."""
        parts = path.split(".")
        prefixes = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
        if prefixes & self.overrides:
            return "from --set"
        return f"from {self.source}" if path in self.given else "default"

    def sound(self, *paths: str) -> bool:
        """Whether nothing was noted about any of these fields, so that they can be judged together."""
        return self.paths.isdisjoint(paths)


def show_value(value: object) -> str:
    """A value as YAML would show it, cut to a readable length."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value) if isinstance(value, (str, int, float)) else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."


def nearest_key(key: object, valid: Collection[str]) -> str:
    """Advice for an unknown key: the nearest valid one if any is near, else all of them."""
    near = difflib.get_close_matches(str(key), valid, n=1, cutoff=0.5)
    near += [ours for theirs, ours in _OTHER_NAMES.items() if str(key).startswith(theirs) and ours in valid]
    return f"did you mean {near[0]}?" if near else f"valid: {', '.join(valid)}"


def check_keys(path: str, mapping: Mapping[Any, Any], valid: Collection[str], problems: Problems) -> None:
    """Note every key of ``mapping`` that is not one of ``valid``."""
    for key in mapping:
        if key not in valid:
            where = f"{path}.{show_value(key)}" if path else show_value(key)
            problems.note(where, f"unknown key ({problems.origin(where)}); {nearest_key(key, valid)}")


def read_section(section: str, raw: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    """Values of a section with defaults filled in; a field that breaks its rule is noted and gets its default."""
    rules = FIELDS[section]
    mapping = raw.get(section)
    if mapping is None:
        mapping = {}
    elif not isinstance(mapping, Mapping):
        problems.add(
            section, mapping, f"is a {describe_type(mapping)}, must be a mapping of {', '.join(rules)}"
        )
        mapping = {}
    problems.given.update(f"{section}.{key}" for key in mapping)
    check_keys(section, mapping, rules, problems)
    values: dict[str, Any] = {}
    for key, rule in rules.items():
        value = mapping.get(key, rule.default)
        if not rule.accepts(value):
            problems.add(
                f"{section}.{key}", value, f"{_kind_note(value)}{rule.expects}{_nearest(value, rule)}"
            )
            value = rule.default
        values[key] = value
    return values


def read_recompute(value: object, problems: Problems) -> Recompute:
    """What ``training.recompute`` says: ``none``, ``full``, or a mapping of some of :data:`RECOMPUTE_KEYS`.

    A mapping with modules is selective; one without is full recompute with its layers and method.
    """
    path = "training.recompute"
    if value in ("none", "full"):
        return Recompute(mode=str(value))
    if not isinstance(value, Mapping):
        hint = (
            "; selective recompute of Megatron-LM is {modules: [core_attn]}" if value == "selective" else ""
        )
        problems.add(path, value, f"must be none, full, or a mapping of {', '.join(RECOMPUTE_KEYS)}{hint}")
        return Recompute()
    problems.given.update(f"{path}.{key}" for key in value)
    check_keys(path, value, RECOMPUTE_KEYS, problems)
    if {"every", "keep"} & set(value):
        return _read_torchtitan(value, problems)
    layers, method = value.get("layers", 1), value.get("method", "uniform")
    early = value.get("stops_early", False)
    if not isinstance(early, bool):
        problems.add(f"{path}.stops_early", early, "must be true or false")
    if not _is_count(layers, 1 << 20):
        problems.add(f"{path}.layers", layers, "must be a whole number from 1")
    if method not in LAYER_RULES:
        problems.add(f"{path}.method", method, f"must be {' or '.join(LAYER_RULES)}")
    if value.get("modules") is None:
        if not {"layers", "method", "stops_early"} & set(value):
            problems.add(
                path,
                dict(value),
                "is empty; write none, full, or give modules, layers or method, every or keep",
            )
        return Recompute("full", (), layers, method, stops_early=early)
    modules = _read_modules(value["modules"], problems)
    if {"layers", "method", "stops_early"} & set(value):
        problems.note(
            path,
            "layers, method and stops_early belong to full recompute and modules to selective; give one or the other",
        )
    return Recompute("selective", modules)


def _read_torchtitan(value: Mapping[Any, Any], problems: Problems) -> Recompute:
    """``{every: N}``, whole layers, or ``{keep: products}``, what lies between matrix products and attention.

    ``{keep: every-second-product}`` runs every second product again as well.
    """
    path = "training.recompute"
    if len(value) > 1:
        problems.note(path, f"takes every or keep alone, not {', '.join(str(key) for key in value)}")
        return Recompute()
    if "every" in value:
        every = value["every"]
        if not _is_count(every, 1 << 20):
            problems.add(
                f"{path}.every",
                every,
                "must be a whole number from 1: every how many layers one is recomputed",
            )
            return Recompute()
        return Recompute("full", (), every, "every", stops_early=True)
    keep = value["keep"]
    if not isinstance(keep, str) or keep not in KEEP_RULES:
        problems.add(
            f"{path}.keep",
            keep,
            f"must be {' or '.join(KEEP_RULES)}: outputs of matrix products and attention",
        )
        return Recompute()
    return Recompute("selective", keep=keep)


def _read_modules(value: object, problems: Problems) -> tuple[str, ...]:
    path = "training.recompute.modules"
    if not isinstance(value, (list, tuple)) or not value:
        problems.add(path, value, f"must be a list of one or more of {', '.join(MODULE_RULES)}")
        return ()
    for module in value:
        if not isinstance(module, str) or module not in MODULE_RULES:
            problems.add(path, module, f"is not a module; {nearest_key(module, MODULE_RULES)}")
    if len({str(module) for module in value}) < len(value):
        problems.add(path, value, "names a module twice; name each once")
    return tuple(str(module) for module in value)


def _kind_note(value: object) -> str:
    return f"is a {describe_type(value)}, " if isinstance(value, (bool, float, str, list, dict)) else ""


def _nearest(value: object, rule: FieldRule) -> str:
    near = difflib.get_close_matches(str(value).lower(), rule.choices, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""
