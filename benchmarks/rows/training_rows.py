"""Rows of Megatron-like training runs: papers, vendors' tables, open benchmarks.

A row is expressed only where it, or its source as a whole (``source_settings``), says everything that decides the
time: dimensions, degrees, micro-batch size, batch, precision, recompute, optimizer sharding and attention kernel.
Memory is compared only where the row names what was measured (``peak_alloc_gib``, ``peak_reserved_gib``); a bare
"peak memory" may be either, or what ``nvidia-smi`` shows, and is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from tracesim.scenario import Scenario

from .configurations import configuration_of
from .layouts import ends_count_as_layers, evenly, layout_text
from .measured_time import iteration_ms
from .recipes import bridge_recipe, release_of
from .recompute_words import recompute_of
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
from .row_models import machine_of, model_of, placed, read_model_of
from .source_settings import SETTINGS, UNKNOWN_SOURCE, SourceSettings

_DEGREES = (
    "tp",
    "pp",
    "dp",
    "cp",
    "ep",
    "etp",
    "vpp",
    "vp",
    "sp",
    "zero",
    "fsdp",
    "zero1_group",
    "edp",
    "nodes",
)
_SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "1f1b-i": "interleaved-1f1b",
    "interleaved1f1b": "interleaved-1f1b",
    "interleaved 1f1b": "interleaved-1f1b",
    "looped bfs": "looped-bfs",
    "loopedbfs": "looped-bfs",
    "interleavedzerobubble": "interleaved-zb",
    "interleaved zero bubble": "interleaved-zb",
    "zbvzerobubble": "zb-v",
    "zbv": "zb-v",
    "dualpipev": "dualpipev",
    # The automatic schedules of Zero Bubble hold the activations of p and of 2 p microbatches, and are searched for
    # the times of the run's own passes and the least time of the longest rank.
    "zb-1p": "greedy:memory={pp},weight_memory={kept:.4f},times=profiled,minimize=longest-rank",
    "zb-2p": "greedy:memory={twice},weight_memory={kept:.4f},times=profiled,minimize=longest-rank",
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
_HYBRID = ("HYBRID_SHARD", "HSDP")
_NODE = 8


def express(row: Mapping[str, Any], label: str, source: str) -> MeasuredRow:
    """The scenario and measured figures of a row; raise RowSkippedError with what is missing or not expressed."""
    metrics = mapping_at(row, "metrics")
    if metrics.get("oom"):
        raise RowSkippedError("the run ended out of memory")
    settings = SETTINGS.get(source, UNKNOWN_SOURCE).of_table(text_at(row, "table"))
    configuration = configuration_of(row, source)
    scenario = scenario_for(row, label, source)
    time_ms = iteration_ms(metrics, scenario, settings)
    bubble = number_at(metrics, "bubble_rate_calculated") if time_ms is None else None
    allocated = number_at(metrics, "peak_alloc_gib") or _gib(number_at(metrics, "peak_alloc_gb"))
    reserved = number_at(metrics, "peak_reserved_gib") or _gib(number_at(metrics, "peak_reserved_gb"))
    if source.startswith("torchtitan") or "torchtitan" in text_at(row, "framework"):
        # torchtitan prints the largest reserved memory of its ranks (components/metrics.py).
        reserved = reserved or number_at(metrics, "peak_mem_gib")
    if time_ms is None and allocated is None and reserved is None and bubble is None:
        raise RowSkippedError(f"none of its figures is compared: {', '.join(metrics) or 'it has none'}")
    return MeasuredRow(
        label,
        scenario,
        time_ms,
        allocated,
        reserved,
        bubble and 100 * bubble,
        notes=(*settings.notes, *configuration.notes),
        composed=_is_composed(row, settings),
    )


def scenario_for(row: Mapping[str, Any], label: str, source: str) -> Scenario:
    """The scenario of a row; raise RowSkippedError with what is missing or not expressed."""
    settings = SETTINGS.get(source, UNKNOWN_SOURCE).of_table(text_at(row, "table"))
    if settings.refused:
        raise RowSkippedError(settings.refused)
    framework = text_at(row, "framework")
    if settings.frameworks and not framework.startswith(settings.frameworks):
        raise RowSkippedError(
            f"runs of {framework or 'an unnamed framework'} differ from a plain Megatron-LM run"
        )
    offload = _offload(row)
    if "packed" in text_at(row, "notes") and not settings.packed_as_whole:
        raise RowSkippedError("the lengths of its packed sequences are not stated")
    configuration = configuration_of(row, source)
    row = configuration.completed(row)
    if "LoRA" in text_at(row, "table") and "lora" not in configuration.scenario.get("training", {}):
        raise RowSkippedError("where its low-rank adapters are, and of which rank, is not stated")
    model = model_of(row, settings)
    parallel = _parallel(row, settings)
    training = {**_training(row, parallel, settings), "offload": offload}
    if text_at(row, "schedule").lower().startswith(settings.post_validation or ("-",)):
        training["post_validation"] = True
    mapping = {
        "name": re.sub(r"[/\\]", ":", label),
        "model": model,
        "hardware": placed(
            machine_of(row, settings), math.prod(parallel[degree] for degree in ("tp", "pp", "cp", "dp"))
        ),
        "parallel": parallel,
        "training": training,
        "schedule": _schedule(row, parallel, settings),
        "overlap": _overlap(row, parallel, settings),
        "libraries": {
            "transformer_engine": settings.transformer_engine,
            "eager": _eager(row, settings),
            "fp32_norm_inputs": settings.fp32_norm_inputs,
            "separate_projections": settings.separate_projections,
            "separate_biases": settings.separate_biases,
            "gelu_fusion": settings.gelu_fusion,
            "batch_fetch_waits": settings.batch_fetch_waits,
            "torch_pipelining": settings.torch_pipelining,
            "expandable_segments": settings.expandable_segments,
        },
    }
    if settings.recipes:
        _apply_recipe(mapping, row)
    configuration.apply(mapping)
    _place_layers(mapping, row, settings)
    return scenario_of(mapping)


def _apply_recipe(mapping: dict[str, Any], row: Mapping[str, Any]) -> None:
    """What Megatron-Bridge's recipe for model, GPU and precision sets."""
    model = mapping["model"]
    name = model if isinstance(model, str) else str(model.get("base", model.get("name")))
    if "w/o MTP" in str(mapping_at(row, "model").get("name")):
        mapping["model"] = {"base": name, "name": name, "mtp_layers": 0}
    gpu = text_at(row, "gpu").lower().removeprefix("dgx-")
    parallel, training = mapping["parallel"], mapping["training"]
    if name == "deepseek-v3" and gpu == "h100" and training["dtype"] == "fp8-tensorwise":
        # Its recipe is FP8_SC, scaled by blocks.
        training.pop("fp8_scaling", None)
        training["dtype"] = "fp8-blockwise"
    release = release_of(text_at(row, "table"))
    recipe = bridge_recipe(name, gpu, training["dtype"], training["micro_batch_size"], parallel, release)
    training["recompute"] = recipe.recompute_setting
    training["cuda_graphs"] = list(recipe.cuda_graphs) or None
    training["bf16_last_layers"] = recipe.bf16_last_layers
    training["fp8_head"] = recipe.fp8_head
    drops = "tokendrop" in str(mapping_at(row, "model").get("name"))
    if drops:
        base = mapping["model"]
        mapping["model"] = {"base": base, "name": base, "moe": {"capacity_factor": 1.0}}
    if parallel["ep"] > 1:
        # Experts padded to their capacity need the all-to-all dispatcher.
        parallel["ep_dispatcher"] = "alltoall" if drops else recipe.dispatcher
        mapping["libraries"]["router_fusion"] = recipe.router_fusion
        mapping["libraries"]["weighted_squared_relu_fusion"] = recipe.weighted_squared_relu_fusion
        mapping["libraries"]["grouped_mlp_fusion"] = recipe.fuses_experts
        if recipe.overlaps_experts:
            mapping["overlap"] = {**mapping["overlap"], "ep": True}
            mapping["schedule"] = "1f1b-overlap"


def _place_layers(mapping: dict[str, Any], row: Mapping[str, Any], settings: SourceSettings) -> None:
    """A pipeline layout where the layers do not divide over the stages, or the ends hold fewer."""
    parallel = mapping["parallel"]
    stages = parallel["pp"] * parallel["vpp"]
    if stages == 1 or not (settings.uneven_stages or settings.embedding_counts_as_layer):
        return
    model = read_model_of(mapping["model"])
    heads = model.mtp_layers
    if model.layers % stages == 0 and not heads and not settings.embedding_counts_as_layer:
        return
    ends = None if heads else ends_count_as_layers(model.layers, stages)
    if ends is None and settings.embedding_counts_as_layer:
        raise RowSkippedError(f"{model.layers} layers and the two ends do not divide over {stages} stages")
    if ends is None:
        ends = _with_prediction_heads(model.layers, stages) if heads else evenly(model.layers, stages)
    parallel["layout"] = layout_text(ends, heads)


def _with_prediction_heads(layers: int, stages: int) -> list[int]:
    """Layers of the stages in Megatron-Bridge's layouts of DeepSeek-V3: the last stage makes room for the heads."""
    each = -(-(layers + 2) // stages)
    held = [each] * (stages - 1)
    return [*held, layers - sum(held)] if layers > sum(held) else evenly(layers, stages)


def _parallel(row: Mapping[str, Any], settings: SourceSettings) -> dict[str, Any]:
    stated = {
        key: _first_figure(value)
        for key, value in mapping_at(row, "parallel").items()
        if value not in _NOT_GIVEN
    }
    stated = _named_scheme(stated)
    if stated.get("dp_replicate", 1) == 1 and "dp_shard" in stated:
        stated.pop("dp_replicate", None)
        stated["fsdp"] = stated.pop("dp_shard")
    refuse_unknown(stated, _DEGREES, "the parallel plan")
    degrees = {key: count_at(stated, key, default=1) for key in ("tp", "pp", "cp", "ep", "etp")}
    gpus = _gpus(row, stated)
    block = degrees["tp"] * degrees["pp"] * degrees["cp"]
    dp = count_at(stated, "dp", default=max(gpus // block, 1))
    if block * dp != gpus:
        raise RowSkippedError(f"tp * pp * cp * dp = {block * dp} is not its number of GPUs, {gpus}")
    plan = {**degrees, "dp": dp, "vpp": _chunks(stated, row), "sp": bool(stated.get("sp", settings.sp))}
    sharding = _sharding(stated, dp * degrees["cp"], settings)
    if settings.shards_over_context and sharding.get("hsdp_shard") is not None:
        shard = sharding["hsdp_shard"] * degrees["cp"]
        sharding["hsdp_shard"] = shard if shard < dp * degrees["cp"] else None
    return {
        **plan,
        **sharding,
        "cp_comm": settings.cp_comm,
        "flat_parameters": settings.flat_parameters and sharding["zero"] == 3,
        "root_unit": settings.root_unit and sharding["zero"] == 3,
        "whole_tensors": settings.whole_tensors and sharding["zero"] == 1,
    }


def _gpus(row: Mapping[str, Any], stated: Mapping[str, Any]) -> int:
    """Number of GPUs; of Grace-Blackwell nodes with four each, of others with eight, where only nodes are given."""
    nodes = stated.get("nodes")
    if row.get("num_gpus") is None and isinstance(nodes, int):
        return nodes * (4 if text_at(row, "gpu").lower().startswith("gb") else 8)
    return count_at(row, "num_gpus")


def _named_scheme(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Degrees of the two schemes of Table 2 of arXiv:2104.04473, which gives the product: tp is 8 (section 5.2)."""
    rest = {key: value for key, value in stated.items() if key not in ("scheme", "model_parallel_size")}
    size = stated.get("model_parallel_size")
    if stated.get("scheme") == "ZeRO-3" and size == 1:
        return {**rest, "zero": 3}
    if stated.get("scheme") == "PTD" and isinstance(size, int) and size % 8 == 0:
        return {**rest, "tp": 8, "pp": size // 8}
    return dict(stated)


def _first_figure(value: object) -> object:
    """The figure outside of parentheses: ``2 (4)`` gives a second one for another precision."""
    found = re.fullmatch(r"(\d+) \(\d+\)", value) if isinstance(value, str) else None
    return int(found.group(1)) if found else value


def _chunks(stated: Mapping[str, Any], row: Mapping[str, Any]) -> int:
    value = stated.get("vpp", stated.get("vp"))
    if value is None:
        # torchtitan gives a rank two stages where the schedule needs several and nobody says how many.
        schedule = _SCHEDULES.get(text_at(row, "schedule").lower(), "")
        return 2 if schedule.startswith(("interleaved", "looped", "zb-v", "dualpipev")) else 1
    if value == "layers per stage":
        # Every layer a chunk of its own; embedding and loss take the place of one each.
        layers = count_at(mapping_at(row, "model"), "layers") + 2
        return max(1, layers // count_at(stated, "pp", default=1))
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RowSkippedError(f"the number of model chunks is given as {value!r}")
    return value


def _sharding(stated: Mapping[str, Any], dp: int, settings: SourceSettings) -> dict[str, Any]:
    fsdp = stated.get("fsdp")
    if isinstance(fsdp, str) and fsdp.upper() in _FSDP_ZERO:
        # PyTorch's hybrid sharding is over the GPUs of a node unless told otherwise.
        hybrid = fsdp.upper() in _HYBRID and dp > _NODE
        return {"zero": _FSDP_ZERO[fsdp.upper()], "hsdp_shard": _NODE if hybrid else None}
    if fsdp in ("True", "Yes"):
        return {"zero": 3}
    if isinstance(fsdp, int) and fsdp > 1 and dp % fsdp == 0:
        return {"zero": 3, "hsdp_shard": fsdp if fsdp < dp else None}
    if fsdp not in (None, 0, 1, "False", "No"):
        raise RowSkippedError(f"sharding fsdp = {fsdp!r} is not expressed")
    group = stated.get("zero1_group", -1)
    if group not in (-1, dp):
        if not isinstance(group, int) or group < 1 or dp % group:
            raise RowSkippedError(
                f"ZeRO-1 over groups of {group!r} of {dp} data-parallel ranks does not divide"
            )
        return {"zero": 1, "hsdp_shard": group}
    zero = stated.get("zero", settings.zero if settings.zero is not None else (0 if dp == 1 else None))
    if zero is None:
        raise RowSkippedError("the row does not say how the optimizer is sharded")
    return {"zero": zero}


def _training(
    row: Mapping[str, Any], parallel: Mapping[str, Any], settings: SourceSettings
) -> dict[str, Any]:
    model = mapping_at(row, "model")
    seq_len = count_at(model, "seq", default=settings.seq_len)
    attention = settings.attention
    if attention is None:
        raise RowSkippedError("neither the row nor its source says which attention kernel ran")
    training: dict[str, Any] = {
        "seq_len": seq_len,
        "micro_batch_size": count_at(row, "mbs", "local_batch"),
        **_precision(_precision_text(row), settings),
        "grad_reduce_dtype": settings.grad_reduce_dtype,
        "recompute": recompute_of(row, settings),
        "attention": attention,
        "cross_entropy_fusion": _loss(row, settings),
        "gradient_accumulation_fusion": settings.gradient_accumulation_fusion,
    }
    stated = re.search(r"\bGBS=(\d+)", text_at(row, "notes"))
    if row.get("gbs") is None and row.get("num_microbatches") is None and stated is not None:
        training["global_batch_size"] = int(stated.group(1))
    elif row.get("gbs") is not None and row.get("local_batch") is None:
        # A row's own may be the batch of the whole table, or one rounded down to its ranks: the smaller one ran. For
        # rows of BigScience below a heading with 512, TFLOP/s times iteration time is the work of 512 sequences.
        training["global_batch_size"] = count_at(row, "gbs")
        if stated is not None:
            training["global_batch_size"] = min(training["global_batch_size"], int(stated.group(1)))
    else:
        training["num_microbatches"] = count_at(
            row, "num_microbatches", default=1 if row.get("local_batch") is not None else None
        )
    if row.get("local_batch") is not None:
        _cut_into_microbatches(training, parallel, row, settings)
    return training


def _offload(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """What is kept on the host: ``optimizer 50%, no overlap``; None for nothing."""
    text = row.get("offload")
    if text in (None, "none", "activation CPU offload False", "optimizer off"):
        return None
    found = re.fullmatch(r"optimizer (\d+)%(, (no )?overlap)?", str(text))
    if found is None:
        raise RowSkippedError(f"offload {text!r} is not expressed")
    return {"optimizer": int(found.group(1)) / 100, "optimizer_overlap": found.group(3) is None}


def _loss(row: Mapping[str, Any], settings: SourceSettings) -> bool | str:
    """The kernels of the loss."""
    compiled = "compile" in text_at(row, "technique")
    if compiled and settings.loss_compiled_in and text_at(row, "table").startswith(settings.loss_compiled_in):
        return "compiled"
    return settings.cross_entropy_fusion


def _precision_text(row: Mapping[str, Any]) -> str:
    """The precision, or what the technique says of it."""
    stated = re.search(r"float8( rowwise| tensorwise)?", text_at(row, "technique").lower())
    return text_at(row, "precision") or (stated.group() if stated else "")


def _cut_into_microbatches(
    training: dict[str, Any], parallel: Mapping[str, Any], row: Mapping[str, Any], settings: SourceSettings
) -> None:
    """Cut the local batch of torchtitan where there is a pipeline: into one sequence each, or one for each stage."""
    if parallel["pp"] == 1:
        return
    batch, early = training["micro_batch_size"], settings.microbatch_a_stage_in
    count = parallel["pp"] if early and text_at(row, "table").startswith(early) else batch
    if batch % count:
        raise RowSkippedError(f"a local batch of {batch} does not divide into {count} microbatches")
    training.update(num_microbatches=count, micro_batch_size=batch // count)


def _precision(precision: str, settings: SourceSettings) -> dict[str, str]:
    text = precision.lower()
    if "fp4" in text:
        return {"dtype": "nvfp4"}
    if "fp8" in text or "float8" in text:
        return _fp8(text, settings)
    for name in ("bf16", "fp16"):
        if name in text:
            return {"dtype": name}
    if "fp32" in text:
        # Four times the rate with TF32 products, which frameworks switch on or not.
        raise RowSkippedError("whether the products of an fp32 run are TF32 is not stated")
    if settings.dtype is None:
        raise RowSkippedError(f"the precision is given as {precision or 'nothing'!r}")
    return {"dtype": settings.dtype}


def _fp8(text: str, settings: SourceSettings) -> dict[str, str]:
    """The recipe an fp8 row names; without a name it is tensorwise, scaled as its source does."""
    text = text.partition(" (")[0] if text.startswith(("fp8-cs (", "fp8 (")) else text
    if re.search(r"float8 rowwise", text):
        return {"dtype": "fp8-rowwise"}
    stated = {recipe for recipe, pattern in _FP8_RECIPES.items() if re.search(pattern, text)}
    if len(stated) > 1:
        raise RowSkippedError(f"its fp8 recipe is given as {text!r}")
    if stated & {"mxfp8", "fp8-blockwise"}:
        return {"dtype": stated.pop()}
    return {"dtype": "fp8-tensorwise", "fp8_scaling": stated.pop() if stated else settings.fp8_scaling}


def _schedule(row: Mapping[str, Any], parallel: Mapping[str, Any], settings: SourceSettings) -> str:
    stated = text_at(row, "schedule") or settings.schedule or ""
    if parallel["vpp"] > 1 and stated.lower() in ("", "1f1b"):
        return "interleaved-1f1b"
    if not stated:
        return "1f1b"
    if stated.lower() not in _SCHEDULES:
        raise RowSkippedError(f"schedule {stated} is not expressed")
    pp = parallel["pp"]
    return _SCHEDULES[stated.lower()].format(pp=pp, twice=2 * pp, kept=_kept_for_weights(row))


def _kept_for_weights(row: Mapping[str, Any]) -> float:
    """Share of a layer's activations that its weight gradients wait for, with stored scores.

    32 of 34 h + 5 a s bytes a token (arXiv:2401.10241, table 1, which is what its runtime reckons with).
    """
    hidden, heads, seq = (number_at(mapping_at(row, "model"), key) for key in ("hidden", "heads", "seq"))
    if not (hidden and heads and seq):
        return 1.0
    return 32 * hidden / (34 * hidden + 5 * heads * seq)


def _overlap(
    row: Mapping[str, Any], parallel: Mapping[str, Any], settings: SourceSettings
) -> dict[str, bool | str]:
    overlap = dict(settings.overlap)
    for beginning, changes in settings.overlap_by_schedule.items():
        if text_at(row, "schedule").lower().startswith(beginning):
            overlap.update(changes)
    if parallel["pp"] > 1:
        overlap.update(settings.overlap_in_pipelines)
    if parallel["zero"] >= 2:
        # Weights and gradients of units travel beside compute in every microbatch, and take SMs and memory from it.
        overlap["contention"] = True
    if _is_composed(row, settings):
        overlap["p2p"] = True
    if "no overlap of gradient" in text_at(row, "notes"):
        overlap["grad_reduce"] = False
    if "async" in text_at(row, "technique").lower() and parallel["tp"] > 1:
        overlap["tp"] = "async-tp"
    if settings.cp_comm.startswith("dtensor") and "compile" in text_at(row, "technique"):
        # The blocks are compiled as full graphs (parallelisms/parallelize_llama.py), in which collectives are awaited
        # where they start (torch/distributed/_functional_collectives.py, _maybe_wrap_tensor).
        overlap["cp"] = "in-place"
    return overlap


def _eager(row: Mapping[str, Any], settings: SourceSettings) -> bool | list[str]:
    """What runs one by one, also where a row says that it is compiled."""
    if "compile" in text_at(row, "technique"):
        return list(settings.eager_when_compiled) or False
    return settings.eager if isinstance(settings.eager, bool) else list(settings.eager)


def _is_composed(row: Mapping[str, Any], settings: SourceSettings) -> bool:
    """Whether the time of a row was put together from parts."""
    return bool(settings.composed_in) and text_at(row, "table").startswith(settings.composed_in)


def _gib(gigabytes: float | None) -> float | None:
    return gigabytes * 1e9 / 2**30 if gigabytes is not None else None
