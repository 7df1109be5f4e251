"""The model and the machine of a scenario: by preset name, by file, or written into the scenario.

A mapping with the key ``base`` starts from a preset or file and changes single figures:
``{base: llama3-70b, layers: 12}``, ``{base: h100-sxm, memory: {capacity_gib: 94}}``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hardware_profiles.loader import (
    list_profiles,
    load_profile,
    profile_from_mapping,
    profile_to_mapping,
)
from hardware_profiles.profile import HardwareProfile, ProfileError
from op_graphs.model import ModelDescription, ModelError
from op_graphs.presets import list_models, load_model, model_from_mapping

from .scenario_fields import Problems
from .scenario_overrides import BASE
from .yaml_reading import describe_type

_CHANGED = "set in the scenario"


def read_model(value: object, folder: Path, problems: Problems) -> ModelDescription | None:
    """The model a scenario names or describes; None if it cannot be read, which is noted."""
    if value is None:
        problems.note(
            "model", f"is missing; give a preset ({', '.join(list_models()[:3])}, ...), a file or a mapping"
        )
        return None
    try:
        if isinstance(value, str):
            return load_model(value, folder)
        if isinstance(value, Mapping):
            return _model_of(value, folder)
    except ModelError as error:
        problems.note("model", _indented(error))
        return None
    problems.add("model", value, f"is a {describe_type(value)}, must be a preset name, a file or a mapping")
    return None


def read_hardware(value: object, folder: Path, problems: Problems) -> HardwareProfile | None:
    """The machine a scenario names or describes; None if it cannot be read, which is noted."""
    if value is None:
        advice = f"give a preset ({', '.join(list_profiles())}), a file or a mapping"
        problems.note("hardware", f"is missing; {advice}")
        return None
    try:
        if isinstance(value, str):
            return _profile_named(value, folder)
        if isinstance(value, Mapping):
            return _profile_of(value, folder)
    except ProfileError as error:
        problems.note("hardware", _indented(error))
        return None
    problems.add(
        "hardware", value, f"is a {describe_type(value)}, must be a preset name, a file or a mapping"
    )
    return None


def model_reference(model: ModelDescription) -> str | dict[str, Any]:
    """The preset's name if the model equals the preset, else the model written out; ``read_model`` reads both."""
    if model.name in list_models() and load_model(model.name) == model:
        return model.name
    return _written_out(model)


def hardware_reference(hardware: HardwareProfile) -> str | dict[str, Any]:
    """The preset's name if the machine equals the preset, else the machine written out."""
    if hardware.name in list_profiles() and load_profile(hardware.name) == hardware:
        return hardware.name
    return profile_to_mapping(hardware)


def _model_of(value: Mapping[Any, Any], folder: Path) -> ModelDescription:
    return model_from_mapping(value, "model", folder=folder)


def _written_out(model: ModelDescription) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(model).items() if key != "source"}


def _profile_named(text: str, folder: Path) -> HardwareProfile:
    if text in list_profiles():
        return load_profile(text)
    path = folder / text
    try:
        is_file = path.is_file()
    except (OSError, ValueError):
        is_file = False
    return load_profile(path if is_file else text)


def _profile_of(value: Mapping[Any, Any], folder: Path) -> HardwareProfile:
    base = value.get(BASE)
    if base is None:
        return profile_from_mapping(value, "hardware")
    if not isinstance(base, str):
        raise ProfileError(f"base is a {describe_type(base)}, must be a preset name or a file")
    document = profile_to_mapping(_profile_named(base, folder))
    changes = {key: change for key, change in value.items() if key != BASE}
    document["sources"] = dict(document["sources"])
    document["name"] = f"{document['name']}-changed"
    _merge(document, changes, "", document["sources"])
    return profile_from_mapping(document, "hardware")


def _merge(document: dict[str, Any], changes: Mapping[Any, Any], path: str, sources: dict[str, Any]) -> None:
    """Changes into the document, in place; a changed figure loses the source it had and says so."""
    for key, change in changes.items():
        here = f"{path}{key}"
        held = document.get(key)
        if isinstance(change, Mapping) and isinstance(held, dict):
            _merge(held, change, "" if here == "sources" else f"{here}.", sources)
            continue
        document[key] = change
        if isinstance(change, (int, float)) and not isinstance(change, bool):
            sources[here] = _CHANGED


def _indented(error: Exception) -> str:
    return str(error).replace("\n", "\n    ")
