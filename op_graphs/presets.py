"""Model descriptions by name, from a file, or from a mapping: the presets, their reader and its checks.

A model is given as the name of a preset (one YAML file each in ``op_graphs/models``), as a YAML file with the same
keys, or as the ``config.json`` of a Hugging Face checkpoint. Which of the two a file is, is decided by what is in it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from .huggingface import is_huggingface_config, model_from_huggingface
from .model import ModelDescription, ModelError
from .model_checks import error_of, shown
from .model_consistency import inconsistencies
from .model_fields import fill_defaults, read_fields

PRESET_FOLDER = Path(__file__).parent / "models"
MAX_FILE_BYTES = 2**20
_FILE_SUFFIXES = (".yaml", ".yml", ".json")

_REQUIRED = ("layers", "hidden_size", "ffn_size", "heads", "vocab_size")
MODEL_KEYS: tuple[str, ...] = tuple(column.name for column in fields(ModelDescription))
"""Keys of a model file, beside ``base``."""


def list_models() -> list[str]:
    """Names of the presets, by family and then by size of the name's number."""
    return sorted((path.stem for path in PRESET_FOLDER.glob("*.yaml")), key=_family_then_size)


def load_model(name_or_path: str | Path, folder: Path | None = None) -> ModelDescription:
    """The model of a preset name, a model YAML file or a Hugging Face ``config.json`` (or the folder it lies in).

    A relative path is looked for in ``folder`` (that of the scenario file) if given, then in the working directory.

    Raises:
        ModelError: if there is no such preset or file (with the nearest names), or the file is not a readable model
            description (with every problem found).
    """
    text = str(name_or_path).strip()
    if text.lower() in list_models():
        return _load_file(PRESET_FOLDER / f"{text.lower()}.yaml")
    path = _existing_path(text, folder) if text else None
    if path is not None:
        return _load_file(path)
    if text.lower().endswith(_FILE_SUFFIXES) or "/" in text or "\\" in text:
        raise ModelError(f"model file {text}: there is no such file{_looked_in(text, folder)}")
    raise ModelError(f"model {shown(text)}: no preset and no file of this name; {_nearest_presets(text)}")


def model_from_mapping(
    mapping: object, where: str = "model", name: str = "", folder: Path | None = None
) -> ModelDescription:
    """The model described by a mapping with the keys of a model file, or of a Hugging Face configuration.

    ``where`` names the origin in messages, ``name`` is the model's name if the mapping has none. The key ``base``
    takes every value that is not given from a preset or file: ``{base: llama3-70b, layers: 12}``; a relative path is
    looked for as :func:`load_model` does.

    Raises:
        ModelError: naming each wrong key or value, its limit and the nearest valid one.
    """
    if not isinstance(mapping, Mapping):
        raise ModelError(f"{where}: expected keys and values such as 'layers: 32', not {shown(mapping)}")
    if is_huggingface_config(mapping):
        return model_from_huggingface(mapping, where, name)
    problems: list[str] = []
    base = _base_model(mapping, folder, problems) if "base" in mapping else None
    values = {} if base is None else {key: getattr(base, key) for key in MODEL_KEYS}
    given = read_fields(
        ModelDescription,
        {key: value for key, value in mapping.items() if key != "base"},
        problems,
        start=base,
    )
    values.update(given)
    values["name"] = given.get("name", name or values.get("name", "inline"))
    if "base" not in mapping:
        wrong = {_key_of(problem) for problem in problems}
        required = [key for key in _REQUIRED if key != "vocab_size" or not mapping.get("patches")]
        problems += [f"{key}: is missing" for key in required if key not in values and key not in wrong]
    if not problems:
        fill_defaults(values, problems)
    model = None if problems else ModelDescription(**values)
    if model is not None:
        problems += inconsistencies(model)
    if model is None or problems:
        raise error_of(where, problems)
    return model


def read_document(path: Path) -> object:
    """The content of a YAML or JSON file of at most 1 MiB, without YAML aliases and repeated keys.

    Raises:
        ModelError: if the file is missing, not a regular file, too large, binary, or neither YAML nor JSON.
    """
    text = _read_text(path)
    if text.lstrip()[:1] == "{":
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            if path.suffix.lower() == ".json":
                raise ModelError(f"{path}: is not valid JSON: {error}") from None
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{path}: cannot be read as JSON: {type(error).__name__}") from None
    try:
        return yaml.load(text, Loader=_PlainLoader)
    except yaml.YAMLError as error:
        raise ModelError(f"{path}: is not valid YAML: {' '.join(str(error).split())}") from None
    except (ValueError, RecursionError, OverflowError) as error:
        raise ModelError(
            f"{path}: cannot be read as YAML: {type(error).__name__}: {str(error)[:100]}"
        ) from None


class _PlainLoader(yaml.SafeLoader):
    """YAML without aliases (which can expand without bound) and without repeated keys."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.events.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(
                None, None, f"aliases are not allowed, *{event.anchor} is one", event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be one word", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value[:60]} is there twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def _load_file(path: Path) -> ModelDescription:
    stem = path.stem if path.stem != "config" else path.resolve().parent.name
    document = read_document(path)
    if isinstance(document, Mapping) and not is_huggingface_config(document):
        document = {"source": str(path), **document}
    return model_from_mapping(document, where=str(path), name=stem, folder=path.parent)


def _existing_path(text: str, folder: Path | None) -> Path | None:
    candidates = ([folder / text] if folder is not None else []) + [Path(text)]
    for candidate in candidates:
        if _exists(candidate / "config.json"):
            return candidate / "config.json"
        if _exists(candidate):
            if candidate.is_dir():
                raise ModelError(
                    f"model {text}: is a folder without a config.json; give the model file itself"
                )
            return candidate
    return None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long, or one no file can have
        return False


def _read_text(path: Path) -> str:
    if not _exists(path):
        raise ModelError(f"{path}: there is no such file")
    if not path.is_file():
        raise ModelError(f"{path}: is not a regular file")
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ModelError(f"{path}: is larger than 1 MiB, which no model description is")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: is not a text file (byte {error.start} is not UTF-8)") from None
    if "\0" in text:
        raise ModelError(f"{path}: is not a text file (it holds zero bytes)")
    return text


def _base_model(
    mapping: Mapping[Any, Any], folder: Path | None, problems: list[str]
) -> ModelDescription | None:
    """The model named by ``base``, with a name and source that say what was changed."""
    base = mapping["base"]
    if not isinstance(base, str):
        problems.append(f"base: must be the name of a preset or a file, not {shown(base)}")
        return None
    try:
        model = _model_without_base(base, folder)
    except ModelError as error:
        problems.append(f"base: {error}")
        return None
    changed = ", ".join(str(key) for key in mapping if key in MODEL_KEYS and key not in ("name", "source"))
    return replace(
        model, name=f"{model.name}-changed", source=f"{model.source}; changed: {changed or 'nothing'}"
    )


def _model_without_base(base: str, folder: Path | None) -> ModelDescription:
    """The model of a name or path; a file with a base of its own is refused, so that there is no cycle."""
    if base.strip().lower() not in list_models():
        path = _existing_path(base.strip(), folder) if base.strip() else None
        document = read_document(path) if path is not None else None
        if isinstance(document, Mapping) and "base" in document:
            raise ModelError(f"{path}: has a base itself; name that one, {shown(document['base'])}, instead")
    return load_model(base, folder)


def _key_of(problem: str) -> str:
    return problem.split(":", 1)[0]


def _looked_in(text: str, folder: Path | None) -> str:
    if folder is None or Path(text).is_absolute():
        return ""
    return f" in {folder} or in the working directory"


def _nearest_presets(text: str) -> str:
    near = difflib.get_close_matches(text.lower()[:100], list_models(), n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"the presets are {', '.join(list_models())}"


def _family_then_size(name: str) -> tuple[str, float, str]:
    family, _, size = name.rpartition("-")
    unit = {"m": 1e-3, "b": 1.0, "t": 1e3}.get(size[-1:], 1.0)
    try:
        return family, float(size[:-1]) * unit, name
    except ValueError:
        return name, 0.0, name
