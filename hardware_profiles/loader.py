"""Reading, checking and writing hardware profiles.

A profile is a YAML file whose keys are the fields of :mod:`hardware_profiles.profile`. The key set is closed at every
level, every figure has a range and a source, and all that is wrong with a file is said in one
:class:`~hardware_profiles.ProfileError`. ``docs/adding_hardware.md`` is the manual.

Left out on purpose: includes, inheritance between files, anchors and aliases. A profile is read top to bottom.
"""

from __future__ import annotations

import os
import re
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from .checking import IDENTITY, Check, default_of, has_default
from .profile import HardwareProfile, ProfileError

PRESETS = Path(__file__).resolve().parent
"""Folder of the profiles that are installed with the package."""

SIZE_LIMIT_BYTES = 16 * 2**20
"""Files over this are refused; a table of ten thousand measured shapes takes about 1 MiB."""

_NESTING_LIMIT = 8


def list_profiles() -> list[str]:
    """Names of the installed profiles, in alphabetical order."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def profile_for_device(device: str) -> str:
    """Name of the installed profile that begins with a word of a device's name, the SXM form first; "" for none."""
    words = {match.group().lower() for match in re.finditer(r"[A-Za-z]+\d+[A-Za-z]?", device)}
    fitting = [name for name in list_profiles() if name.partition("-")[0] in words]
    return min(fitting, key=lambda name: ("sxm" not in name, len(name), name), default="")


def load_profile(name_or_path: str | os.PathLike[str]) -> HardwareProfile:
    """The installed profile of that name, or the profile in a YAML file.

    Args:
        name_or_path: a name of :func:`list_profiles`, or a path. An installed name wins over a file of the same name.

    Raises:
        ProfileError: if there is no such profile or file, or with everything that is wrong in the file.
    """
    if isinstance(name_or_path, str) and name_or_path in list_profiles():
        return _load_file(PRESETS / f"{name_or_path}.yaml")
    path = Path(name_or_path)
    if isinstance(name_or_path, str) and not _looks_like_a_path(name_or_path):
        raise ProfileError(_unknown_name(name_or_path))
    return _load_file(path)


def profile_from_mapping(document: object, where: str) -> HardwareProfile:
    """The profile that a mapping of plain values describes, keys as in a YAML file.

    Args:
        document: nested mappings, lists and scalars, as a YAML or JSON parser gives them.
        where: what the mapping was read from, for the error message.

    Raises:
        ProfileError: with everything that is wrong in the mapping.
    """
    check = Check()
    profile = check.read_record(HardwareProfile, document, "")
    if isinstance(document, Mapping):
        check.compare_figures(document)
        check.require_sources(document)
        check.refuse_repeats(document)
        if {"accelerator", "networks"} <= {str(key) for key in document}:
            raise ProfileError(f"{where} is a SimuMax machine file; convert it with import_simumax first")
    if check.errors:
        count = f"{len(check.errors)} error" + "s" * (len(check.errors) > 1)
        lines = "".join(f"\n  - {error}" for error in check.errors)
        raise ProfileError(f"{where}: {count} in the hardware profile (see docs/adding_hardware.md){lines}")
    return typing.cast(HardwareProfile, profile)


def profile_to_mapping(profile: HardwareProfile) -> dict[str, Any]:
    """Plain values that :func:`profile_from_mapping` turns back into an equal profile.

    Fields at their default are left out unless they have a source of their own.
    """
    return _plain_record(profile, "", profile.sources)


def profile_to_yaml(profile: HardwareProfile) -> str:
    """A YAML file that :func:`load_profile` reads back as an equal profile.

    Raises:
        ProfileError: if the profile breaks a rule of the file format, for instance has a figure without a source.
    """
    mapping = profile_to_mapping(profile)
    profile_from_mapping(mapping, f"profile {profile.name!r}")
    for table in IDENTITY:
        if table in mapping:
            mapping[table] = [_FlowRow(row) for row in mapping[table]]
    return yaml.dump(mapping, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def read_bounded(path: Path, what: str) -> str:
    """Text of a file of at most 16 MiB.

    Args:
        path: the file.
        what: what it should be, for the error message.

    Raises:
        ProfileError: if it is missing, not a regular file, too large, unreadable or not text.
    """
    try:
        if not path.exists():
            raise ProfileError(f"{path}: no such file; a {what} was expected there")
        if not path.is_file():
            raise ProfileError(f"{path} is not a file; a {what} is one file")
        with path.open("rb") as file:
            content = file.read(SIZE_LIMIT_BYTES + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, ProfileError):
            raise
        raise ProfileError(f"{str(path)!r} cannot be read as a {what}: {error}") from error
    if len(content) > SIZE_LIMIT_BYTES:
        limit = SIZE_LIMIT_BYTES // 2**20
        raise ProfileError(f"{path} is larger than the limit of {limit} MiB for a {what}; drop measured rows")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ProfileError(f"{path} is not a {what}: byte {error.start} is not UTF-8 text") from error
    if "\0" in text:
        raise ProfileError(f"{path} is not a {what}: it holds binary data")
    return text


def _looks_like_a_path(name: str) -> bool:
    if "/" in name or os.sep in name or Path(name).suffix in (".yaml", ".yml", ".json"):
        return True
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        return False


def _unknown_name(name: str) -> str:
    near = get_close_matches(name.lower().replace("_", "-"), list_profiles(), n=3, cutoff=0.4)
    guess = f" Nearest: {', '.join(near)}." if near else ""
    return (
        f"no hardware profile {name!r}.{guess} Installed: {', '.join(list_profiles())}. "
        f"For a profile of your own give the path of its YAML file"
    )


def _load_file(path: Path) -> HardwareProfile:
    text = read_bounded(path, "hardware profile (YAML)")
    try:
        _refuse_expansion(text, path)
        document = yaml.load(text, Loader=_Loader)
    except ProfileError:
        raise
    except RecursionError as error:
        raise ProfileError(f"{path}: nested too deeply for a hardware profile") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ProfileError(f"{path} is not valid YAML: {_one_line(error)}") from error
    return profile_from_mapping(document, str(path))


def _one_line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
    return " ".join(str(problem).split()) + place


def _refuse_expansion(text: str, path: Path) -> None:
    """Refuse aliases and deep nesting on the event stream, before anything is expanded."""
    depth = 0
    for event in yaml.parse(text, Loader=_BASE_LOADER):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise ProfileError(
                f"{path}: {_line(event)} uses a YAML anchor or alias; write the value out instead"
            )
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _NESTING_LIMIT:
            raise ProfileError(
                f"{path}: {_line(event)} is nested deeper than the {_NESTING_LIMIT} levels of a profile"
            )


def _line(event: yaml.Event) -> str:
    mark = event.start_mark
    return f"line {mark.line + 1}" if mark is not None else "a line"


_BASE_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_BASE_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Loader(_BASE_LOADER):  # type: ignore[misc]  # the C loader is chosen at run time
    """Safe loader that refuses a key given twice, where YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key.value!r} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return typing.cast("dict[Any, Any]", super().construct_mapping(node, deep))


class _FlowRow(dict[str, Any]):
    """A row of a table, written on one line."""


class _Dumper(_BASE_DUMPER):  # type: ignore[misc]  # as above
    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_representer(
    _FlowRow,
    lambda dumper, row: dumper.represent_mapping("tag:yaml.org,2002:map", row, flow_style=True),
)


def _plain_record(record: object, path: str, sources: Mapping[str, str]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for field in fields(typing.cast(Any, record)):
        value = getattr(record, field.name)
        here = f"{path}{field.name}"
        named = any(source == here or source.startswith(f"{here}.") for source in sources)
        if has_default(field) and value == default_of(field) and not named:
            continue
        if is_dataclass(value):
            plain[field.name] = _plain_record(value, f"{here}.", sources)
        elif isinstance(value, tuple):
            plain[field.name] = [_plain_record(row, f"{here}[].", sources) for row in value]
        elif isinstance(value, Mapping):
            plain[field.name] = {
                key: _plain_record(entry, f"{here}.{key}.", sources) if is_dataclass(entry) else entry
                for key, entry in value.items()
            }
        else:
            plain[field.name] = value
    return plain
