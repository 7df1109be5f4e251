"""Scenario: one training step to simulate - model, machine, parallel plan, training settings, schedule, overlap.

A scenario is read from a YAML file, a bundled name or a mapping; ``docs/scenarios.md`` documents every key. All
problems of a scenario are told at once. :func:`scenario_to_mapping` writes one back so that it loads equal.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from hardware_profiles.profile import HardwareProfile
from op_graphs.model import ModelDescription
from op_graphs.plan import LibraryPlan, OverlapPlan, ParallelPlan, Recompute, TrainingPlan

from .cuda_graph_fields import cuda_graphs_mapping, read_cuda_graphs
from .errors import ScenarioError
from .imbalance_fields import imbalance_mapping, read_routing, read_sequence_lengths
from .lora_fields import lora_mapping, read_lora
from .offload_fields import offload_mapping, read_offload
from .precision_fields import precision_mapping, read_optimizer_dtypes, recipe_name
from .scenario_checks import Draft, check_combinations, resolve_microbatches
from .scenario_fields import (
    CROSS_ENTROPIES,
    DTYPES,
    FIELDS,
    REDUCE_DTYPES,
    SCHEDULES,
    TOP_KEYS,
    Problems,
    check_keys,
    nearest_key,
    read_recompute,
    read_section,
)
from .scenario_overrides import apply_overrides
from .scenario_parts import hardware_reference, model_reference, read_hardware, read_model
from .vision_fields import image_length
from .yaml_reading import describe_type, read_yaml_mapping


@dataclass(frozen=True)
class Scenario:
    """One training step: what is trained, on what, split how."""

    name: str
    model: ModelDescription
    hardware: HardwareProfile
    parallel: ParallelPlan
    training: TrainingPlan
    schedule: str
    """Name of a pipeline schedule, or the absolute path of a schedule CSV file."""
    overlap: OverlapPlan
    libraries: LibraryPlan = field(default_factory=LibraryPlan)

    @property
    def global_batch_size(self) -> int:
        """Sequences of a step over all data-parallel ranks."""
        return self.training.micro_batch_size * self.training.num_microbatches * self.parallel.dp

    @property
    def tokens(self) -> int:
        """Tokens of a step over all data-parallel ranks."""
        return self.global_batch_size * self.training.seq_len


def list_scenarios() -> tuple[str, ...]:
    """Names of the bundled scenarios, sorted."""
    folder = resources.files("tracesim") / "scenarios"
    return tuple(sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".yaml")))


def load_scenario(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Scenario:
    """The scenario of a bundled name, a YAML file or a mapping, with ``key.path=value`` overrides applied.

    A path of a model or hardware file inside a scenario file is relative to that file's folder.

    Raise ScenarioError listing every problem, one a line, each with the field, its value, where the value comes
    from, the rule it breaks and the nearest valid choice.
    """
    raw, origin, folder, stem = _read_source(source)
    problems = Problems(source=origin)
    raw, problems.overrides = apply_overrides(raw, overrides, problems)
    scenario = _build(raw, folder, stem, problems)
    if problems.lines or scenario is None:
        count = "a problem" if len(problems.lines) == 1 else f"{len(problems.lines)} problems"
        raise ScenarioError("\n  ".join([f"{origin} has {count}:", *problems.lines]))
    return scenario


def scenario_to_mapping(scenario: Scenario) -> dict[str, Any]:
    """The scenario as plain data with every key written out, such that ``load_scenario`` gives it back equal.

    Model and hardware are written as their preset names where they equal the preset, else in full.
    """
    training, overlap = scenario.training, scenario.overlap
    return {
        "name": scenario.name,
        "model": model_reference(scenario.model),
        "hardware": hardware_reference(scenario.hardware),
        "parallel": dataclasses.asdict(scenario.parallel),
        "training": {
            "seq_len": training.seq_len,
            "micro_batch_size": training.micro_batch_size,
            "num_microbatches": training.num_microbatches,
            "global_batch_size": scenario.global_batch_size,
            **precision_mapping(training),
            "grad_reduce_dtype": training.grad_reduce_dtype.name.lower(),
            "optimizer": training.optimizer,
            "recompute": _recompute_mapping(training.recompute),
            **offload_mapping(training),
            "cross_entropy_fusion": _loss_name(training.cross_entropy),
            "gradient_accumulation_fusion": training.gradient_accumulation_fusion,
            "deferred_head_gradients": training.deferred_head_gradients,
            "post_validation": training.post_validation,
            "attention_mask": training.attention_mask,
            "attention": training.attention,
            "mla": training.mla,
            "images_per_sample": training.images_per_sample,
            **cuda_graphs_mapping(training),
            **imbalance_mapping(training),
            **lora_mapping(training),
        },
        "schedule": scenario.schedule,
        "overlap": dataclasses.asdict(overlap),
        "libraries": dataclasses.asdict(scenario.libraries),
    }


def scenario_to_yaml(scenario: Scenario) -> str:
    """The scenario as a YAML text that loads back equal."""
    return yaml.safe_dump(scenario_to_mapping(scenario), sort_keys=False, allow_unicode=True)


def _read_source(source: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], str, Path, str | None]:
    """The raw mapping, its name in messages, the folder its paths are relative to, and its file stem if any."""
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source)), "scenario", Path.cwd(), None
    if isinstance(source, str) and source in list_scenarios():
        path = Path(str(resources.files("tracesim") / "scenarios" / f"{source}.yaml"))
        return read_yaml_mapping(path), f"{source}.yaml", path.parent, source
    path = Path(source)
    if isinstance(source, str) and not path.suffix and not os.path.exists(path) and len(path.parts) == 1:
        near = difflib.get_close_matches(source, list_scenarios(), n=1, cutoff=0.5)
        advice = f"did you mean {near[0]}?" if near else f"bundled: {', '.join(list_scenarios())}"
        raise ScenarioError(f"{source!r} is neither a bundled scenario nor a file; {advice}")
    return read_yaml_mapping(path), path.name, path.resolve().parent, path.stem


def _build(raw: Mapping[str, Any], folder: Path, stem: str | None, problems: Problems) -> Scenario | None:
    problems.given.update(str(key) for key in raw)
    check_keys("", raw, TOP_KEYS, problems)
    model = read_model(raw.get("model"), folder, problems)
    hardware = read_hardware(raw.get("hardware"), folder, problems)
    sections = {section: read_section(section, raw, problems) for section in FIELDS}
    parallel = ParallelPlan(**sections["parallel"])
    dtype = sections["training"]["dtype"]
    draft = Draft(
        model=model,
        hardware=hardware,
        parallel=parallel,
        training=_training(sections["training"], model, parallel, folder, problems),
        schedule=_schedule(raw.get("schedule", "1f1b"), folder, problems),
        overlap=OverlapPlan(**sections["overlap"]),
        dtype=dtype,
        fp8_scaling=sections["training"]["fp8_scaling"],
        libraries=_libraries(sections["libraries"]),
    )
    check_combinations(draft, problems)
    name = _name(raw.get("name"), stem, draft, problems)
    if model is None or hardware is None:
        return None
    plans = draft.training, draft.schedule, draft.overlap, draft.libraries
    return Scenario(name, model, hardware, parallel, *plans)


def _libraries(values: Mapping[str, Any]) -> LibraryPlan:
    eager = values["eager"]
    return LibraryPlan(**{**values, "eager": eager if isinstance(eager, bool) else tuple(eager)})


def _training(
    values: Mapping[str, Any],
    model: ModelDescription | None,
    parallel: ParallelPlan,
    folder: Path,
    problems: Problems,
) -> TrainingPlan:
    microbatches = resolve_microbatches(
        parallel,
        values["micro_batch_size"],
        values["num_microbatches"],
        values["global_batch_size"],
        problems,
    )
    return TrainingPlan(
        seq_len=image_length(model, values["seq_len"], problems),
        micro_batch_size=values["micro_batch_size"],
        num_microbatches=microbatches,
        dtype=DTYPES[values["dtype"]],
        recipe=recipe_name(values["dtype"], values["fp8_scaling"]),
        fp8_param_gather=values["fp8_param_gather"],
        bf16_first_layers=values["bf16_first_layers"],
        bf16_last_layers=values["bf16_last_layers"],
        fp8_head=values["fp8_head"],
        fp8_dispatch=values["fp8_dispatch"],
        fp8_storage=values["fp8_storage"],
        router_padding=values["router_padding"],
        grad_reduce_dtype=REDUCE_DTYPES[values["grad_reduce_dtype"]],
        optimizer=values["optimizer"],
        optimizer_dtypes=read_optimizer_dtypes(values["optimizer_dtypes"], problems),
        recompute=read_recompute(values["recompute"], problems),
        offload=read_offload(values["offload"], problems),
        cross_entropy=CROSS_ENTROPIES[values["cross_entropy_fusion"]],
        gradient_accumulation_fusion=values["gradient_accumulation_fusion"],
        deferred_head_gradients=values["deferred_head_gradients"],
        post_validation=values["post_validation"],
        attention_mask=values["attention_mask"],
        attention=values["attention"],
        mla=values["mla"],
        images_per_sample=values["images_per_sample"],
        cuda_graphs=read_cuda_graphs(values["cuda_graphs"], problems),
        routing=read_routing(values["routing"], folder, problems),
        sequence_lengths=read_sequence_lengths(values["sequence_lengths"], folder, problems),
        lora=read_lora(values["lora"], problems),
    )


def _schedule(value: object, folder: Path, problems: Problems) -> str:
    if not isinstance(value, str):
        problems.add("schedule", value, f"is a {describe_type(value)}, must be a schedule name or a CSV file")
    elif value.partition(":")[0] in SCHEDULES:
        return value
    elif not value.lower().endswith(".csv"):
        problems.add(
            "schedule", value, f"is not a schedule; {nearest_key(value, SCHEDULES)} (or a .csv file)"
        )
    elif not (folder / value).is_file():
        problems.add(
            "schedule", value, f"is not a file in {folder}; give a schedule CSV file or {SCHEDULES[1]}"
        )
    else:
        return str((folder / value).resolve())
    return "1f1b"


def _name(value: object, stem: str | None, draft: Draft, problems: Problems) -> str:
    if value is None:
        parallel = draft.parallel
        model = draft.model.name if draft.model is not None else "model"
        return stem or f"{model}-tp{parallel.tp}-pp{parallel.pp}-dp{parallel.dp}"
    if not isinstance(value, str) or not value.strip() or len(value) > 200 or not value.isprintable():
        problems.add(
            "name", value, f"is a {describe_type(value)}, must be 1 to 200 characters of text on one line"
        )
    elif "/" in value or "\\" in value:
        problems.add("name", value, "must not hold / or \\ because output files are named after it")
    return str(value)


def _loss_name(kernels: str) -> bool | str:
    """What ``training.cross_entropy_fusion`` says for these kernels."""
    return next(name for name, meant in CROSS_ENTROPIES.items() if meant == kernels)  # type: ignore[return-value]


def _recompute_mapping(recompute: Recompute) -> str | dict[str, Any]:
    if recompute.mode == "none" or recompute == Recompute("full"):
        return recompute.mode
    if recompute.method == "every":
        return {"every": recompute.layers}
    if recompute.keep:
        return {"keep": recompute.keep}
    if recompute.mode == "full":
        early = {"stops_early": True} if recompute.stops_early else {}
        return {"layers": recompute.layers, "method": recompute.method, **early}
    return {"modules": list(recompute.modules)}
