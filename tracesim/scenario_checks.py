"""Which combinations of scenario fields are possible, and which of the possible ones can be simulated so far.

The rules on degrees, layers and batches are those Megatron-LM enforces when it starts (``training/arguments.py``,
``TransformerConfig.__post_init__``), so a scenario that passes is one that could be launched.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from hardware_profiles.profile import HardwareProfile
from op_graphs.model import ModelDescription
from op_graphs.overlap.registry import OVERLAP_POINTS
from op_graphs.parameters import tensor_parallel_problem
from op_graphs.plan import LibraryPlan, OverlapPlan, ParallelPlan, TrainingPlan
from op_graphs.stage_layout import layers_per_stage
from schedules.actions import ScheduleError
from schedules.costs import ActionCosts
from schedules.registry import build_schedule, takes_profiled_times, with_times

from .cost.attention import kernel_ratio
from .cuda_graph_fields import check_cuda_graphs
from .imbalance_fields import check_imbalance
from .lora_fields import check_lora
from .offload_fields import check_offload
from .parallel_checks import (
    check_context_parallel,
    check_experts,
    check_grouped_mlp,
    check_latent_attention,
    check_permutation,
    check_recompute,
    check_sharding,
    check_whole_tensors,
)
from .precision_fields import check_precision
from .scenario_fields import Problems, show_value
from .vision_fields import check_vision

MAX_WORLD_SIZE = 1 << 20
MAX_ACTIONS = 1 << 20
"""Forward passes of all stages in a step; more would neither fit in memory nor be read by anybody."""
_CHECKED_ACTIONS = 1 << 16
"""Schedules up to this size are built to check them; larger ones are checked when they are simulated."""
_LARGEST_ADVICE = 1 << 10


@dataclass(frozen=True)
class Draft:
    """A scenario whose fields are sound one by one; ``model`` and ``hardware`` are None where they could not be read.

    ``dtype`` is the name of the training precision, ``fp8_scaling`` how its scales are found.
    """

    model: ModelDescription | None
    hardware: HardwareProfile | None
    parallel: ParallelPlan
    training: TrainingPlan
    schedule: str
    overlap: OverlapPlan
    dtype: str
    fp8_scaling: str
    libraries: LibraryPlan = field(default_factory=LibraryPlan)


def check_combinations(draft: Draft, problems: Problems) -> None:
    """Note every combination of fields that cannot exist, with its limit and the nearest choice."""
    if draft.model is not None:
        _check_tensor_parallel(draft.model, draft, problems)
        _check_stages(draft.model, draft.parallel, problems)
        _check_positions(draft.model, draft, problems)
        _check_prediction_heads(draft.model, problems)
        check_experts(draft.model, draft.parallel, problems)
        check_permutation(draft.model, draft.libraries, problems)
        check_grouped_mlp(draft.model, draft.parallel, draft.training, draft.libraries, problems)
        check_context_parallel(draft.model, draft.parallel, draft.training, problems)
        check_latent_attention(draft.model, draft.parallel, draft.training, problems)
        check_recompute(draft.model, draft.training, problems)
        check_imbalance(draft.model, draft.training, problems)
        check_vision(draft.model, draft.parallel, draft.training, problems)
    check_sharding(draft.parallel, problems)
    check_whole_tensors(draft.parallel, draft.overlap, problems)
    check_lora(draft.model, draft.parallel, draft.training, problems)
    _check_sequence(draft, problems)
    _check_chunks(draft, problems)
    check_precision(
        draft.dtype,
        draft.fp8_scaling,
        draft.hardware,
        draft.model,
        draft.parallel,
        draft.training,
        problems,
    )
    _check_attention_kernel(draft, problems)
    _check_overlap(draft, problems)
    check_offload(draft.model, draft.hardware, draft.training, problems)
    check_cuda_graphs(draft.model, draft.training, problems)
    _check_reserved_sms(draft, problems)
    _check_size(draft, problems)


def resolve_microbatches(
    parallel: ParallelPlan,
    micro_batch_size: int,
    num_microbatches: int | None,
    global_batch_size: int | None,
    problems: Problems,
) -> int:
    """Microbatches of one data-parallel rank, from either of the two fields; noted and 1 where they do not fit.

    Without either there are as many as fill the pipeline once: pp.
    """
    if not problems.sound(
        "parallel.dp",
        "training.micro_batch_size",
        "training.num_microbatches",
        "training.global_batch_size",
    ):
        return 1
    step = micro_batch_size * parallel.dp
    sizes = f"micro_batch_size * dp = {micro_batch_size} * {parallel.dp} = {step}"
    nearest = _nearest_multiples(global_batch_size or step, step)
    if global_batch_size is None:
        return num_microbatches or parallel.pp
    if global_batch_size % step:
        problems.add(
            "training.global_batch_size",
            global_batch_size,
            f"is not a multiple of {sizes} ({_world(parallel)}); nearest: {nearest}",
        )
        return num_microbatches or 1
    found = global_batch_size // step
    if num_microbatches is not None and num_microbatches != found:
        problems.add(
            "training.num_microbatches",
            num_microbatches,
            f"does not agree with global_batch_size {global_batch_size}: {sizes}, so it is {found} microbatches; "
            "give one of the two",
        )
    return found


def _check_tensor_parallel(model: ModelDescription, draft: Draft, problems: Problems) -> None:
    if not problems.sound("parallel.tp"):
        return
    problem = tensor_parallel_problem(model, draft.parallel.tp)
    if problem:
        problems.add("parallel.tp", draft.parallel.tp, problem.removeprefix(f"tp {draft.parallel.tp} "))


def _check_stages(model: ModelDescription, parallel: ParallelPlan, problems: Problems) -> None:
    paths = ("parallel.pp", "parallel.vpp", "parallel.first_stage_layers", "parallel.last_stage_layers")
    if not problems.sound(*paths, "parallel.layout"):
        return
    if parallel.layout is not None:
        try:
            layers_per_stage(model.layers, parallel, model.mtp_layers, model.vision is not None)
        except ValueError as error:
            problems.add("parallel.layout", parallel.layout, f"does not fit {model.name}: {error}")
        return
    try:
        layers_per_stage(model.layers, parallel)
    except ValueError as error:
        uneven = parallel.first_stage_layers is not None or parallel.last_stage_layers is not None
        given = f", first_stage_layers = {show_value(parallel.first_stage_layers)}" if uneven else ""
        given += f", last_stage_layers = {show_value(parallel.last_stage_layers)}" if uneven else ""
        problems.add(
            "parallel.pp",
            parallel.pp,
            f"with vpp = {parallel.vpp}{given} does not fit the {model.layers} layers of {model.name}: {error}; "
            f"{_stage_advice(model.layers, parallel)}",
        )


def _stage_advice(layers: int, parallel: ParallelPlan) -> str:
    tried = range(1, min(layers, _LARGEST_ADVICE) + 1)
    if parallel.first_stage_layers is not None or parallel.last_stage_layers is not None:
        named = "last_stage_layers" if parallel.first_stage_layers is None else "first_stage_layers"
        wanted = getattr(parallel, named)
        fitting = [n for n in tried if _splits(layers, _with_end(parallel, named, n))]
        if fitting:
            return f"nearest {named}: {_nearest_of(wanted, fitting)}"
    even = replace(parallel, first_stage_layers=None, last_stage_layers=None)
    fitting = [pp for pp in tried if _splits(layers, replace(even, pp=pp))]
    advice = f"nearest pp: {_nearest_of(parallel.pp, fitting)}" if fitting else ""
    chunks = [vpp for vpp in tried if _splits(layers, replace(even, vpp=vpp))]
    if parallel.vpp > 1 and chunks:
        advice += f"{', or ' if advice else ''}nearest vpp: {_nearest_of(parallel.vpp, chunks)}"
    if parallel.first_stage_layers is None and parallel.pp > 1 and parallel.stages <= layers:
        ends = [n for n in tried if _splits(layers, replace(even, first_stage_layers=n))]
        if ends:
            advice += f", or first_stage_layers: {_nearest_of(layers // parallel.pp, ends)}"
    return advice


def _with_end(parallel: ParallelPlan, named: str, layers: int) -> ParallelPlan:
    if named == "first_stage_layers":
        return replace(parallel, first_stage_layers=layers)
    return replace(parallel, last_stage_layers=layers)


def _splits(layers: int, parallel: ParallelPlan) -> bool:
    try:
        layers_per_stage(layers, parallel)
    except ValueError:
        return False
    return True


def _check_positions(model: ModelDescription, draft: Draft, problems: Problems) -> None:
    seq_len = draft.training.seq_len
    if (
        model.positions == "learned"
        and 0 < model.max_positions < seq_len
        and problems.sound("training.seq_len")
    ):
        problems.add(
            "training.seq_len",
            seq_len,
            f"is longer than the table of {model.max_positions} learned positions of {model.name}; "
            f"nearest: {model.max_positions}",
        )


def _check_prediction_heads(model: ModelDescription, problems: Problems) -> None:
    if model.mtp_layers and model.positions == "learned" and problems.sound("model"):
        problems.note(
            "model",
            f"{model.name} has heads for multi-token prediction and learned positions, which Megatron-LM does not "
            "combine; set mtp_layers: 0 or positions: rotary",
        )


def _check_sequence(draft: Draft, problems: Problems) -> None:
    parallel, seq_len = draft.parallel, draft.training.seq_len
    if not problems.sound("training.seq_len", "parallel.tp", "parallel.cp", "parallel.sp"):
        return
    if draft.model is not None and draft.model.patches is not None:
        return
    step = (parallel.tp if parallel.sp else 1) * (2 * parallel.cp if parallel.cp > 1 else 1)
    if seq_len % step:
        shares = [f"tp = {parallel.tp} (sp is true)"] if parallel.sp else []
        shares += [f"2 * cp = {2 * parallel.cp}"] if parallel.cp > 1 else []
        problems.add(
            "training.seq_len",
            seq_len,
            f"is not a multiple of {' times '.join(shares)}; nearest: {_nearest_multiples(seq_len, step)}",
        )


def _check_chunks(draft: Draft, problems: Problems) -> None:
    parallel, schedule = draft.parallel, draft.schedule
    paths = (
        "parallel.pp",
        "parallel.vpp",
        "schedule",
        "training.global_batch_size",
        "training.num_microbatches",
    )
    if not problems.sound(*paths) or parallel.stages * draft.training.num_microbatches > _CHECKED_ACTIONS:
        return
    try:
        if takes_profiled_times(schedule):
            schedule = with_times(schedule, ActionCosts())
        build_schedule(schedule, parallel.pp, parallel.vpp, draft.training.num_microbatches)
    except ScheduleError as error:
        problems.add("schedule", schedule, f"cannot be built: {error}")


def _check_reserved_sms(draft: Draft, problems: Problems) -> None:
    path, reserved = "overlap.reserved_sms", draft.overlap.reserved_sms
    if draft.hardware is None or not problems.sound(path) or reserved < draft.hardware.sm_count:
        return
    problems.add(
        path,
        reserved,
        f"leaves matrix products no SM: {draft.hardware.name} has {draft.hardware.sm_count}; "
        f"give 0 to {draft.hardware.sm_count - 1}",
    )


def _check_attention_kernel(draft: Draft, problems: Problems) -> None:
    if draft.hardware is None or not problems.sound("training.attention"):
        return
    try:
        kernel_ratio(draft.training.attention, draft.hardware.attention)
    except ValueError as error:
        problems.add("training.attention", draft.training.attention, f"on {draft.hardware.name}: {error}")


def _check_overlap(draft: Draft, problems: Problems) -> None:
    for key, point in OVERLAP_POINTS.items():
        value = getattr(draft.overlap, key)
        if not problems.sound(f"overlap.{key}", "parallel.tp", "parallel.sp"):
            continue
        refusal = point.chosen(value).refusal(draft.parallel, draft.schedule)
        if refusal is not None:
            problems.add(f"overlap.{key}", value, refusal)


def _check_size(draft: Draft, problems: Problems) -> None:
    parallel = draft.parallel
    if parallel.world_size > MAX_WORLD_SIZE and problems.sound("parallel.tp", "parallel.pp", "parallel.dp"):
        problems.note("parallel", f"{_world(parallel)} ranks are more than the limit of {MAX_WORLD_SIZE}")
    actions = parallel.stages * draft.training.num_microbatches
    if actions > MAX_ACTIONS and problems.sound("parallel.pp", "parallel.vpp"):
        problems.note(
            "training",
            f"pp * vpp * num_microbatches = {actions} forward passes are more than the limit of {MAX_ACTIONS}; "
            "simulate fewer microbatches",
        )


def _world(parallel: ParallelPlan) -> str:
    return f"world size tp*cp*pp*dp = {parallel.tp}*{parallel.cp}*{parallel.pp}*{parallel.dp} = {parallel.world_size}"


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, min(number, _LARGEST_ADVICE) + 1) if number % divisor == 0]


def _nearest_of(value: int, choices: Iterable[int]) -> str:
    """The nearest choice below and the nearest above a value."""
    below = [choice for choice in choices if choice <= value]
    above = [choice for choice in choices if choice > value]
    return " or ".join(
        str(choice) for choice in ([max(below)] if below else []) + ([min(above)] if above else [])
    )


def _nearest_multiples(value: int, step: int) -> str:
    return _nearest_of(
        value, [multiple for multiple in (value // step * step, (value // step + 1) * step) if multiple]
    )


def _join(values: tuple[object, ...]) -> str:
    return ", ".join(show_value(value) for value in values)
