"""Rows of Megatron-like training runs: papers, vendors' tables, open benchmarks.

A row is expressed only where it, or its source as a whole (``source_settings``), says everything that decides the
time: dimensions, degrees, micro-batch size, batch, precision, recompute, optimizer sharding and attention kernel.
Memory is compared only where the row names what was measured (``peak_alloc_gib``, ``peak_reserved_gib``); a bare
"peak memory" may be either, or what ``nvidia-smi`` shows, and is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tracesim.scenario import Scenario

from .measured_time import iteration_ms
from .row import (
    MeasuredRow,
    RowSkippedError,
    count_at,
    mapping_at,
    number_at,
    refuse_unknown,
    scenario_of,
    text_at,
)
from .row_models import machine_of, model_of
from .source_settings import SETTINGS, UNKNOWN_SOURCE, SourceSettings

_DEGREES = ("tp", "pp", "dp", "cp", "ep", "etp", "vpp", "vp", "sp", "zero", "fsdp", "zero1_group", "edp")
_SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "1f1b-i": "interleaved-1f1b",
    "interleaved1f1b": "interleaved-1f1b",
    "zb-h1": "zb-h1",
    "zb-h2": "zb-h2",
    "zb-v": "zb-v",
}
_FP8_RECIPES = {
    "mxfp8": r"mxfp8|fp8-mx",
    "fp8-blockwise": r"fp8-sc|block|sub-?channel",
    "current": r"fp8-cs|current",
    "delayed": r"fp8-ds|delayed",
}
_NOT_GIVEN = ("n/a", "N/A", "-", "/")
_FSDP_ZERO = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "HYBRID_SHARD": 3, "FSDP": 3, "HSDP": 3}


def express(row: Mapping[str, Any], label: str, source: str) -> MeasuredRow:
    """The scenario and measured figures of a row; raise RowSkippedError with what is missing or not expressed."""
    metrics = mapping_at(row, "metrics")
    if metrics.get("oom"):
        raise RowSkippedError("the run ended out of memory")
    settings = SETTINGS.get(source, UNKNOWN_SOURCE)
    scenario = scenario_for(row, label, source)
    time_ms = iteration_ms(metrics, scenario, settings)
    allocated = number_at(metrics, "peak_alloc_gib") or _gib(number_at(metrics, "peak_alloc_gb"))
    reserved = number_at(metrics, "peak_reserved_gib") or _gib(number_at(metrics, "peak_reserved_gb"))
    if time_ms is None and allocated is None and reserved is None:
        raise RowSkippedError(f"none of its figures is compared: {', '.join(metrics) or 'it has none'}")
    return MeasuredRow(label, scenario, time_ms, allocated, reserved, notes=settings.notes)


def scenario_for(row: Mapping[str, Any], label: str, source: str) -> Scenario:
    """The scenario of a row; raise RowSkippedError with what is missing or not expressed."""
    settings = SETTINGS.get(source, UNKNOWN_SOURCE)
    if settings.refused:
        raise RowSkippedError(settings.refused)
    framework = text_at(row, "framework")
    if settings.frameworks and not framework.startswith(settings.frameworks):
        raise RowSkippedError(
            f"runs of {framework or 'an unnamed framework'} differ from a plain Megatron-LM run"
        )
    if row.get("offload") not in (None, "none", "activation CPU offload False"):
        raise RowSkippedError(f"offload {row['offload']!r} is not expressed")
    if "packed" in text_at(row, "notes"):
        raise RowSkippedError("the lengths of its packed sequences are not stated")
    model = model_of(row, settings)
    parallel = _parallel(row, settings)
    mapping = {
        "name": re.sub(r"[/\\]", ":", label),
        "model": model,
        "hardware": machine_of(row),
        "parallel": parallel,
        "training": _training(row, parallel, settings),
        "schedule": _schedule(row, parallel, settings),
        "overlap": _overlap(row, settings),
    }
    if settings.embedding_counts_as_layer:
        _shorten_ends(mapping)
    return scenario_of(mapping)


def _parallel(row: Mapping[str, Any], settings: SourceSettings) -> dict[str, Any]:
    stated = {key: value for key, value in mapping_at(row, "parallel").items() if value not in _NOT_GIVEN}
    refuse_unknown(stated, _DEGREES, "the parallel plan")
    degrees = {key: count_at(stated, key, default=1) for key in ("tp", "pp", "cp", "ep", "etp")}
    gpus = count_at(row, "num_gpus")
    block = degrees["tp"] * degrees["pp"] * degrees["cp"]
    dp = count_at(stated, "dp", default=max(gpus // block, 1))
    if block * dp != gpus:
        raise RowSkippedError(f"tp * pp * cp * dp = {block * dp} is not its number of GPUs, {gpus}")
    plan = {**degrees, "dp": dp, "vpp": _chunks(stated), "sp": bool(stated.get("sp", settings.sp))}
    return {**plan, **_sharding(stated, dp, settings)}


def _chunks(stated: Mapping[str, Any]) -> int:
    value = stated.get("vpp", stated.get("vp"))
    if value is None:
        return 1
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RowSkippedError(f"the number of model chunks is given as {value!r}")
    return value


def _sharding(stated: Mapping[str, Any], dp: int, settings: SourceSettings) -> dict[str, Any]:
    fsdp = stated.get("fsdp")
    if isinstance(fsdp, str) and fsdp.upper() in _FSDP_ZERO:
        return {"zero": _FSDP_ZERO[fsdp.upper()]}
    if fsdp in ("True", "Yes"):
        return {"zero": 3}
    if isinstance(fsdp, int) and fsdp > 1 and dp % fsdp == 0:
        return {"zero": 3, "hsdp_shard": fsdp if fsdp < dp else None}
    if fsdp not in (None, 0, 1, "False", "No"):
        raise RowSkippedError(f"sharding fsdp = {fsdp!r} is not expressed")
    group = stated.get("zero1_group", -1)
    if group not in (-1, dp):
        raise RowSkippedError(f"ZeRO-1 over groups of {group!r} of {dp} data-parallel ranks is not expressed")
    zero = stated.get("zero", settings.zero if settings.zero is not None else (0 if dp == 1 else None))
    if zero is None:
        raise RowSkippedError("the row does not say how the optimizer is sharded")
    return {"zero": zero}


def _training(
    row: Mapping[str, Any], parallel: Mapping[str, Any], settings: SourceSettings
) -> dict[str, Any]:
    model = mapping_at(row, "model")
    seq_len = count_at(model, "seq", default=settings.seq_len)
    attention = settings.attention_on(text_at(row, "gpu"))
    if attention is None:
        raise RowSkippedError("neither the row nor its source says which attention kernel ran")
    training: dict[str, Any] = {
        "seq_len": seq_len,
        "micro_batch_size": count_at(row, "mbs"),
        **_precision(text_at(row, "precision"), settings),
        "grad_reduce_dtype": settings.grad_reduce_dtype,
        "recompute": _recompute(row, settings),
        "attention": attention,
    }
    if row.get("gbs") is not None:
        training["global_batch_size"] = count_at(row, "gbs")
    else:
        training["num_microbatches"] = count_at(row, "num_microbatches")
    return training


def _precision(precision: str, settings: SourceSettings) -> dict[str, str]:
    text = precision.lower()
    if "fp4" in text:
        return {"dtype": "nvfp4"}
    if "fp8" in text or "float8" in text:
        return _fp8(text, settings)
    for name in ("bf16", "fp16", "fp32"):
        if name in text:
            return {"dtype": name}
    if settings.dtype is None:
        raise RowSkippedError(f"the precision is given as {precision or 'nothing'!r}")
    return {"dtype": settings.dtype}


def _fp8(text: str, settings: SourceSettings) -> dict[str, str]:
    """The recipe an fp8 row names; without a name it is tensorwise, scaled as its source does."""
    if re.search(r"float8 rowwise", text):
        raise RowSkippedError("fp8 with a scale for each row is not expressed")
    stated = {recipe for recipe, pattern in _FP8_RECIPES.items() if re.search(pattern, text)}
    if len(stated) > 1:
        raise RowSkippedError(f"its fp8 recipe is given as {text!r}")
    if stated & {"mxfp8", "fp8-blockwise"}:
        return {"dtype": stated.pop()}
    return {"dtype": "fp8-tensorwise", "fp8_scaling": stated.pop() if stated else settings.fp8_scaling}


def _recompute(row: Mapping[str, Any], settings: SourceSettings) -> str | dict[str, Any]:
    text = text_at(row, "recompute").lower()
    if "selective" in text:
        if re.fullmatch(r"(recompute-activations \()?selective\)?( \(attention core\)| core_attn)?", text):
            return {"modules": ["core_attn"]}
        raise RowSkippedError(f"recompute {row['recompute']!r} is not expressed")
    if text.startswith("full") or text in ("yes", "on", "activation checkpointing true"):
        return "full"
    if text.startswith(("none", "no ac")) or text in ("no", "off", "activation checkpointing false"):
        return "none"
    if text or settings.recompute is None:
        raise RowSkippedError(f"recompute is given as {text or 'nothing'!r}")
    return settings.recompute


def _schedule(row: Mapping[str, Any], parallel: Mapping[str, Any], settings: SourceSettings) -> str:
    stated = text_at(row, "schedule") or settings.schedule or ""
    if parallel["vpp"] > 1 and stated.lower() in ("", "1f1b"):
        return "interleaved-1f1b"
    if not stated:
        return "1f1b"
    if stated.lower() not in _SCHEDULES:
        raise RowSkippedError(f"schedule {stated} is not expressed")
    return _SCHEDULES[stated.lower()]


def _overlap(row: Mapping[str, Any], settings: SourceSettings) -> dict[str, bool]:
    overlap = dict(settings.overlap)
    if "no overlap of gradient" in text_at(row, "notes"):
        overlap["grad_reduce"] = False
    return overlap


def _shorten_ends(mapping: dict[str, Any]) -> None:
    """Give the first and the last stage one layer less, as embedding and head count as a layer each."""
    parallel, layers = mapping["parallel"], mapping["model"]["layers"]
    pp = parallel["pp"]
    if pp == 1:
        return
    if (layers + 2) % pp or (layers + 2) // pp < 2:
        raise RowSkippedError(f"{layers} layers and the two ends do not divide over {pp} stages")
    parallel["first_stage_layers"] = parallel["last_stage_layers"] = (layers + 2) // pp - 1


def _gib(gigabytes: float | None) -> float | None:
    return gigabytes * 1e9 / 2**30 if gigabytes is not None else None
