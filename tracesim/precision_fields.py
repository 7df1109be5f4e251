"""Reading and checking ``training.dtype``, what goes with low precision, and ``training.optimizer_dtypes``.

What a recipe needs of a machine and of sizes is what Transformer Engine checks when it starts (``pytorch/fp8.py``,
``pytorch/utils.py``); what an optimizer takes is what Megatron-Core's ``optimizer_config.py`` accepts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardware_profiles.profile import HardwareProfile
from op_graphs.model import MixtureOfExperts, ModelDescription
from op_graphs.optimizers import OPTIMIZERS
from op_graphs.parameters_checks import mixers_of
from op_graphs.plan import OptimizerDTypes, ParallelPlan, TrainingPlan
from op_graphs.precision import BLACKWELL
from op_graphs.vocabulary import DType

from .scenario_fields import LOW_PRECISION, Problems, check_keys, nearest_key, show_value
from .yaml_reading import describe_type

OPTIMIZER_DTYPES: dict[str, dict[str, DType]] = {
    "master": {"fp32": DType.FP32, "fp16": DType.FP16, "bf16": DType.BF16},
    "moments": {"fp32": DType.FP32, "bf16": DType.BF16, "fp16": DType.FP16, "fp8": DType.FP8},
}
_PATH = "training.optimizer_dtypes"
_PEAKS = {
    "fp8-tensorwise": "fp8",
    "fp8-blockwise": "fp8",
    "fp8-rowwise": "fp8",
    "mxfp8": "fp8",
    "nvfp4": "fp4",
}
_BLACKWELL_RECIPES = ("mxfp8", "nvfp4")
_MULTIPLES = {"mxfp8": 32}
_MULTIPLE = 16
"""Widths of a quantised linear must be multiples of this: vector loads of 16 bytes, blocks of 32 in MXFP8."""


def recipe_name(dtype: str, scaling: str) -> str | None:
    """The recipe of ``op_graphs.precision`` that ``training.dtype`` and ``fp8_scaling`` name; None for none."""
    if dtype not in LOW_PRECISION:
        return None
    return "fp8-delayed" if dtype == "fp8-tensorwise" and scaling == "delayed" else dtype


def read_optimizer_dtypes(value: object, problems: Problems) -> OptimizerDTypes:
    """What ``training.optimizer_dtypes`` says: a mapping of ``master`` and ``moments``; fp32 where left out."""
    if value is None:
        return OptimizerDTypes()
    if not isinstance(value, Mapping):
        problems.add(
            _PATH, value, f"is a {describe_type(value)}, must be a mapping such as {{moments: bf16}}"
        )
        return OptimizerDTypes()
    problems.given.update(f"{_PATH}.{key}" for key in value)
    check_keys(_PATH, value, OPTIMIZER_DTYPES, problems)
    found: dict[str, DType] = {}
    for key, choices in OPTIMIZER_DTYPES.items():
        name = value.get(key, "fp32")
        if not isinstance(name, str) or name not in choices:
            problems.add(f"{_PATH}.{key}", name, f"is not a type for it; {nearest_key(name, choices)}")
            name = "fp32"
        found[key] = choices[name]
    return OptimizerDTypes(**found)


def precision_mapping(training: TrainingPlan) -> dict[str, Any]:
    """The fields of this module as a scenario writes them."""
    delayed = training.recipe == "fp8-delayed"
    dtypes = training.optimizer_dtypes
    return {
        "dtype": "fp8-tensorwise" if delayed else training.recipe or training.dtype.name.lower(),
        "fp8_scaling": "delayed" if delayed else "current",
        "fp8_param_gather": training.fp8_param_gather,
        "bf16_first_layers": training.bf16_first_layers,
        "bf16_last_layers": training.bf16_last_layers,
        "fp8_head": training.fp8_head,
        "fp8_dispatch": training.fp8_dispatch,
        "fp8_storage": training.fp8_storage,
        "router_padding": training.router_padding,
        "optimizer_dtypes": {"master": dtypes.master.name.lower(), "moments": dtypes.moments.name.lower()},
    }


def check_precision(
    dtype: str,
    scaling: str,
    hardware: HardwareProfile | None,
    model: ModelDescription | None,
    parallel: ParallelPlan,
    training: TrainingPlan,
    problems: Problems,
) -> None:
    """Note what the machine, the model or the plan cannot do in a precision."""
    if not problems.sound("training.dtype"):
        return
    if hardware is not None:
        _check_machine(dtype, hardware, problems)
    if scaling == "delayed" and dtype != "fp8-tensorwise":
        problems.add(
            "training.fp8_scaling",
            scaling,
            f"belongs to dtype fp8-tensorwise, dtype is {dtype}; leave it out, or set dtype: fp8-tensorwise",
        )
    if training.fp8_param_gather:
        _check_gather(dtype, parallel, training, problems)
    if training.bf16_first_layers or training.bf16_last_layers:
        _check_bf16_layers(dtype, scaling, model, training, problems)
    if training.fp8_head:
        _check_head(dtype, model, training, problems)
    if training.fp8_dispatch:
        _check_dispatch(dtype, model, parallel, problems)
    if training.fp8_storage:
        _check_storage(dtype, model, parallel, training, problems)
    if training.router_padding:
        _check_router_padding(dtype, model, parallel, problems)
    if (
        model is not None
        and dtype in LOW_PRECISION
        and problems.sound("model", "parallel.tp", "parallel.etp")
    ):
        _check_widths(dtype, model, parallel, problems)
        _check_rowwise(dtype, model, problems)
    _check_optimizer(parallel, training, problems)


def _check_bf16_layers(
    dtype: str, scaling: str, model: ModelDescription | None, training: TrainingPlan, problems: Problems
) -> None:
    first, last = training.bf16_first_layers, training.bf16_last_layers
    path = f"training.bf16_{'first' if first else 'last'}_layers"
    if dtype not in LOW_PRECISION:
        problems.add(
            path,
            first or last,
            f"leaves layers out of a recipe, which dtype {dtype} has none of; leave it out",
        )
    elif scaling == "delayed":
        problems.add(
            path,
            first or last,
            "does not go with scales from earlier steps, as in Megatron-Core; set fp8_scaling: current",
        )
    elif model is not None and first + last > model.layers:
        problems.add(
            path,
            first or last,
            f"with both ends {first + last} layers, the model has {model.layers}; for none quantised set dtype: bf16",
        )


def _check_machine(dtype: str, hardware: HardwareProfile, problems: Problems) -> None:
    known = hardware.peak_tflops
    if _PEAKS.get(dtype, dtype) not in known:
        problems.add(
            "training.dtype",
            dtype,
            f"has no peak rate in the hardware profile {hardware.name}; known there: {', '.join(sorted(known))}",
        )
    elif (
        dtype in _BLACKWELL_RECIPES
        and hardware.vendor == "nvidia"
        and hardware.compute_capability < BLACKWELL
    ):
        problems.add(
            "training.dtype",
            dtype,
            f"needs tensor cores with scales for each block (compute capability 10.0), {hardware.name} has "
            f"{hardware.compute_capability / 10:.1f}; nearest: fp8-tensorwise or fp8-blockwise",
        )


def _check_gather(dtype: str, parallel: ParallelPlan, training: TrainingPlan, problems: Problems) -> None:
    path = "training.fp8_param_gather"
    if dtype == "fp8-rowwise":
        problems.add(
            path,
            True,
            "needs scales that all shards share, and rows have one each; leave it out, or set dtype: "
            "fp8-tensorwise",
        )
    elif dtype not in LOW_PRECISION or dtype == "nvfp4":
        problems.add(path, True, f"needs weights in fp8, dtype is {dtype}; leave it out, or set an fp8 dtype")
    elif parallel.zero == 0 and problems.sound("parallel.zero"):
        problems.add(
            path, True, "needs sharded master weights to make fp8 weights from, zero is 0; set zero: 1"
        )
    elif training.optimizer_dtypes.master is not DType.FP32:
        name = training.optimizer_dtypes.master.name.lower()
        problems.add(
            path, True, f"needs whole master weights, optimizer_dtypes.master is {name}; set master: fp32"
        )


def _check_head(
    dtype: str, model: ModelDescription | None, training: TrainingPlan, problems: Problems
) -> None:
    """Megatron-Core runs the head as a linear of Transformer Engine under MXFP8 alone."""
    path = "training.fp8_head"
    if dtype != "mxfp8":
        problems.add(path, True, f"needs scales of 32 elements, dtype is {dtype}; set dtype: mxfp8")
    elif training.lora is not None:
        problems.add(path, True, "has no rule beside frozen weights; leave it, or training.lora, out")
    elif model is not None and model.tied_embeddings:
        problems.add(
            path, True, f"{model.name} shares it with the embedding, which stays in bf16; leave it out"
        )


def _check_dispatch(
    dtype: str, model: ModelDescription | None, parallel: ParallelPlan, problems: Problems
) -> None:
    """DeepEP sends 8-bit elements with a scale for each 128 of a token, and to whole experts."""
    path = "training.fp8_dispatch"
    if dtype != "fp8-blockwise":
        problems.add(path, True, f"needs block scales, dtype is {dtype}; set dtype: fp8-blockwise")
    elif parallel.ep_dispatcher != "deepep":
        problems.add(
            path,
            True,
            f"needs a dispatcher that sends 8 bits, ep_dispatcher is {parallel.ep_dispatcher}; "
            "set ep_dispatcher: deepep",
        )
    elif parallel.etp > 1 and problems.sound("parallel.etp"):
        problems.add(path, True, f"needs experts that lie whole on a rank, etp is {parallel.etp}; set etp: 1")
    elif model is not None and model.moe is None and problems.sound("model"):
        problems.add(path, True, f"needs experts, {model.name} has none; leave it out")


def _check_router_padding(
    dtype: str, model: ModelDescription | None, parallel: ParallelPlan, problems: Problems
) -> None:
    """What Megatron-Core's ``transformer_config.py`` says of ``moe_router_padding_for_quantization``."""
    path = "training.router_padding"
    if dtype not in LOW_PRECISION:
        problems.add(
            path, True, f"is for products in 8 or 4 bits, dtype is {dtype}; leave it out, or set an fp8 dtype"
        )
    elif model is not None and model.moe is None and problems.sound("model"):
        problems.add(path, True, f"pads what experts get, {model.name} has none; leave it out")
    elif parallel.ep_dispatcher == "allgather":
        problems.add(
            path,
            True,
            "is not there for ep_dispatcher allgather; leave it out, or set ep_dispatcher: alltoall",
        )
    elif model is not None and model.moe is not None and _fills_capacity(model.moe):
        problems.add(
            path,
            True,
            "pads what varies, experts padded to their capacity do not; leave it out, or set moe.pad_to_capacity: "
            "false",
        )


def _fills_capacity(moe: MixtureOfExperts) -> bool:
    return moe.capacity_factor is not None and moe.pad_to_capacity


def _check_storage(
    dtype: str,
    model: ModelDescription | None,
    parallel: ParallelPlan,
    training: TrainingPlan,
    problems: Problems,
) -> None:
    path = "training.fp8_storage"
    if dtype != "fp8-blockwise":
        problems.add(path, True, f"needs block scales, dtype is {dtype}; set dtype: fp8-blockwise")
    elif max(parallel.tp, parallel.cp) > 1 and problems.sound("parallel.tp", "parallel.cp"):
        problems.add(
            path,
            True,
            f"is known for whole layers on a rank, tp is {parallel.tp} and cp {parallel.cp}; set both to 1",
        )
    elif (training.offload.modules or training.offload.layers) and problems.sound("training.offload"):
        problems.add(path, True, "keeps activations on the device; leave out offload of modules or layers")
    elif model is not None and model.attention_output_gate and problems.sound("model"):
        problems.add(
            path, True, f"knows attention without a gate behind it, {model.name} has one; leave it out"
        )


def _check_rowwise(dtype: str, model: ModelDescription, problems: Problems) -> None:
    """A scale for each row is what torchao's linears have; its grouped products and other layers are not known."""
    others = [
        name
        for name, has in (
            ("experts", model.moe is not None),
            ("latent attention", model.latent_attention is not None),
            ("heads for multi-token prediction", model.mtp_layers > 0),
            ("state-space layers", model.state_space is not None),
            ("delta-rule layers", model.delta_net is not None),
        )
        if has
    ]
    if dtype == "fp8-rowwise" and others:
        problems.add(
            "training.dtype",
            dtype,
            f"is known for dense layers, {model.name} has {' and '.join(others)}; nearest: fp8-blockwise",
        )


def _check_widths(dtype: str, model: ModelDescription, parallel: ParallelPlan, problems: Problems) -> None:
    multiple = _MULTIPLES.get(dtype, _MULTIPLE)
    layers = model.layer_numbers
    widths = {"hidden_size": model.hidden_size}
    for mixer in mixers_of(model):
        widths.update(mixer.widths(model, parallel.tp))
    dense = {model.layer_ffn_size(layer) for layer in layers} - {0}
    widths.update({f"ffn width {size}": size // parallel.tp for size in sorted(dense)})
    if model.moe is not None:
        widths["expert width"] = model.moe.expert_ffn_size // parallel.etp
    for name, width in widths.items():
        if width % multiple:
            problems.add(
                "training.dtype",
                dtype,
                f"needs widths that are multiples of {multiple}; the {name} of {model.name} is {width} on a rank "
                f"(tp = {parallel.tp}, etp = {parallel.etp}); nearest: dtype bf16, or smaller degrees",
            )
            return


def _check_optimizer(parallel: ParallelPlan, training: TrainingPlan, problems: Problems) -> None:
    dtypes, name = training.optimizer_dtypes, training.optimizer
    if not problems.sound(_PATH, f"{_PATH}.master", f"{_PATH}.moments", "training.optimizer"):
        return
    if dtypes.moments is not DType.FP32 and not OPTIMIZERS[name].chooses_moments:
        fitting = [known for known, optimizer in OPTIMIZERS.items() if optimizer.chooses_moments]
        problems.add(
            f"{_PATH}.moments",
            dtypes.moments.name.lower(),
            f"does not apply to {name}, whose states have a type of their own; leave it out, or use one of "
            f"{', '.join(fitting)}",
        )
    if dtypes.master is DType.FP32:
        return
    master = show_value(dtypes.master.name.lower())
    if training.dtype is DType.FP32:
        problems.add(f"{_PATH}.master", master, "does not apply to dtype fp32, which has no master weights")
    elif parallel.zero == 3:
        problems.add(f"{_PATH}.master", master, "does not apply to zero: 3, whose sharded weights are fp32")
