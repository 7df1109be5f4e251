"""Rules of a hardware profile: its closed key set, the range of each figure, and a source for every one.

The fields of :mod:`hardware_profiles.profile` are the keys; this module adds what their types do not say. All errors
of a document are collected, so that a user corrects a file once.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from difflib import get_close_matches
from typing import Any

DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8")
"""Element types a profile may give a peak for; names of ``op_graphs.vocabulary.DType`` in lower case."""

_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")

CHOICES: dict[str, tuple[str, ...]] = {
    "layout": ("TN", "NN", "NT"),
    "dtype": DTYPES,
    "output": DTYPES,
    "tier": ("domain", "fabric"),
    "communication": (*_COLLECTIVES, "gather", "scatter", "p2p"),
}
"""Values of text fields that name something; ``p2p`` stands for every send."""

IDENTITY: dict[str, tuple[str, ...]] = {
    "measured_gemms": ("m", "n", "k", "layout", "dtype", "output", "accumulate", "count"),
    "measured_attentions": (
        *("batch", "query_length", "key_length", "heads", "kv_heads", "head_size", "value_head_size"),
        *("causal", "backward", "dtype"),
    ),
    "measured_collectives": ("communication", "tier", "group_size"),
}
"""What makes two measurements of one table the same; the same thing measured twice is an error."""

_BY_DTYPE = ("peak_tflops", "dtype_ratio", "sustained_dtype_ratio", "dtypes")
"""Tables with a figure for each element type."""

_FIGURES_IN_ONE = ("gemm.tiles", *IDENTITY)
"""Tables that have one source for all their rows."""

_NOT_FIGURES = ("name", "description", "vendor", "sources", "extra")


@dataclass(frozen=True)
class _Range:
    low: float
    high: float = math.inf
    low_included: bool = True

    def holds(self, value: float) -> bool:
        above = value >= self.low if self.low_included else value > self.low
        return above and value <= self.high

    def __str__(self) -> str:
        low = f"{self.low:g} or more" if self.low_included else f"more than {self.low:g}"
        return low if self.high == math.inf else f"{low} and at most {self.high:g}"


_FRACTION = _Range(0, 1.5, low_included=False)
_SHARE = _Range(0, 1.5)
_POSITIVE = _Range(0, low_included=False)
_NOT_NEGATIVE = _Range(0)

# Achieved over nominal may exceed 1: NVSwitch reductions and boosted clocks do, so 1.5 is the limit of a slip.
_RANGE_BY_NAME: dict[str, _Range] = {
    "exposed_epilogue": _SHARE,
    "grouped_exposed_traffic": _SHARE,
    "time_us": _POSITIVE,
    "compute_capability": _NOT_NEGATIVE,
    "collective_sms": _NOT_NEGATIVE,
    "group_size": _NOT_NEGATIVE,
    "gpus_per_bridge_side": _NOT_NEGATIVE,
    "domains_per_leaf": _NOT_NEGATIVE,
    "oversubscription": _Range(1),
}
_RANGE_BY_ENDING: tuple[tuple[str, _Range], ...] = (
    ("efficiency", _FRACTION),
    ("_ratio", _FRACTION),
    ("_rate", _FRACTION),
    ("_us", _NOT_NEGATIVE),
    ("_k", _NOT_NEGATIVE),
)


def nearest(name: str, valid: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the valid name closest to ``name``, or the empty string."""
    matches = get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def has_default(field: Field[Any]) -> bool:
    """Whether a file may leave the field out."""
    return field.default is not MISSING or field.default_factory is not MISSING


def default_of(field: Field[Any]) -> object:
    """What a file means that leaves the field out; only for fields with :func:`has_default`."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    return typing.cast(object, field.default)


def _range_of(field: Field[Any]) -> _Range:
    """Range of a numeric field: by its name, else by its ending, else more than 0; a default of 0 admits 0."""
    found = _RANGE_BY_NAME.get(field.name)
    if found is None:
        found = next((limit for ending, limit in _RANGE_BY_ENDING if field.name.endswith(ending)), _POSITIVE)
    if field.default == 0 and not found.low_included:
        return _Range(found.low, found.high)
    return found


class Check:
    """Reads plain values into records and collects everything that is wrong on the way."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def read_record(self, kind: type[Any], document: object, path: str) -> object:
        """The record that a mapping of plain values describes, or None with an error for each thing wrong."""
        if not isinstance(document, Mapping):
            place = path.rstrip(".") or "the file"
            self.errors.append(
                f"{place}: a mapping of {kind.__name__} fields was expected, not {_show(document)}"
            )
            return None
        known = {field.name: field for field in fields(kind)}
        for key, value in document.items():
            if key not in known:
                guess = nearest(str(key), known) or f"; valid keys: {', '.join(known)}"
                self.errors.append(f"{path}{key}: unknown key (value {_show(value)}){guess}")
        hints = _hints(kind)
        values: dict[str, Any] = {}
        before = len(self.errors)
        for name, field in known.items():
            if name in document:
                values[name] = self._read(hints[name], document[name], f"{path}{name}", field)
            elif not has_default(field):
                self.errors.append(f"{path}{name} is missing")
        return kind(**values) if len(self.errors) == before else None

    def _read(self, hint: object, value: object, path: str, field: Field[Any]) -> object:
        if is_dataclass(hint):
            return self.read_record(typing.cast("type[Any]", hint), value, f"{path}.")
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin is tuple:
            return self._read_rows(arguments[0], value, path, field)
        if origin is Mapping:
            return self._read_names(arguments[1], value, path, field)
        if hint is str:
            return self._read_text(value, path, field.name)
        if hint is bool:
            if not isinstance(value, bool):
                self.errors.append(f"{path}: true or false was expected, not {_show(value)}")
            return value
        return self._read_number(hint, value, path, _range_of(field))

    def _read_rows(self, kind: object, value: object, path: str, field: Field[Any]) -> object:
        if not isinstance(value, list):
            self.errors.append(f"{path}: a list was expected, not {_show(value)}")
            return ()
        if not value and not has_default(field):
            self.errors.append(f"{path}: at least one row is needed")
        return tuple(
            self.read_record(typing.cast("type[Any]", kind), row, f"{path}[{index}].")
            for index, row in enumerate(value)
        )

    def _read_names(self, kind: object, value: object, path: str, field: Field[Any]) -> object:
        if not isinstance(value, Mapping):
            self.errors.append(f"{path}: a mapping was expected, not {_show(value)}")
            return {}
        if not value and not has_default(field) and field.name != "sources":
            self.errors.append(f"{path}: at least one entry is needed")
        entries: dict[str, Any] = {}
        for key, entry in value.items():
            if not isinstance(key, str):
                self.errors.append(f"{path}.{key}: the key is not text; put it in quotes")
            elif field.name in _BY_DTYPE and key not in DTYPES:
                guess = nearest(key, DTYPES) or f"; valid keys: {', '.join(DTYPES)}"
                self.errors.append(f"{path}.{key}: unknown dtype (value {_show(entry)}){guess}")
            elif kind is str:
                entries[key] = self._read_text(entry, f"{path}.{key}", "")
            elif is_dataclass(kind):
                entries[key] = self.read_record(typing.cast("type[Any]", kind), entry, f"{path}.{key}.")
            else:
                limit = _FRACTION if field.name.endswith("_ratio") else _POSITIVE
                entries[key] = self._read_number(kind, entry, f"{path}.{key}", limit)
        return entries

    def _read_text(self, value: object, path: str, name: str) -> object:
        if not isinstance(value, str):
            self.errors.append(f"{path}: text was expected, not {_show(value)}; put it in quotes")
        elif not value.strip() and name != "description":
            self.errors.append(f"{path} is empty")
        elif name in CHOICES and value not in CHOICES[name]:
            guess = nearest(value, CHOICES[name]) or f"; valid: {', '.join(CHOICES[name])}"
            self.errors.append(f"{path}: {value!r} is not known{guess}")
        return value

    def _read_number(self, kind: object, value: object, path: str, limit: _Range) -> object:
        if isinstance(value, str) and _is_number(value):
            self.errors.append(
                f"{path}: {value!r} is text to YAML; write it with a point and a sign (1.0e+3)"
            )
        elif isinstance(value, bool) or not isinstance(value, (int, float)):
            self.errors.append(f"{path}: a number was expected, not {_show(value)}")
        elif kind is int and not isinstance(value, int):
            self.errors.append(f"{path}: a whole number was expected, not {_show(value)}")
        elif not _is_finite(value):
            self.errors.append(f"{path}: {_show(value)} is not a finite number")
        elif not limit.holds(value):
            self.errors.append(f"{path}: {_show(value)} is out of range; it must be {limit}")
        else:
            return float(value) if kind is float else value
        return value

    def require_sources(self, document: Mapping[Any, Any]) -> None:
        """Every figure of the file needs a source under its own path or under a path above it."""
        sources = document.get("sources")
        if not isinstance(sources, Mapping):
            return
        figures = list(_figure_paths(document))
        covering = {str(key) for key in sources}
        bare = [figure for figure in figures if covering.isdisjoint(_path_and_above(figure))]
        if bare:
            self.errors.append(
                f"sources: nothing says where {', '.join(bare)} come{'s' * (len(bare) == 1)} from; "
                "name the datasheet, the measurement or the fit"
            )
        paths = {above for figure in figures for above in _path_and_above(figure)}
        for key in sorted(covering - paths):
            self.errors.append(f"sources.{key}: there is no such figure in this file{nearest(key, paths)}")

    def compare_figures(self, document: Mapping[Any, Any]) -> None:
        """Figures that limit each other."""
        network, available = document.get("network"), document.get("sm_count")
        taken = network.get("collective_sms") if isinstance(network, Mapping) else None
        if isinstance(taken, int) and isinstance(available, int) and 0 < available <= taken:
            self.errors.append(
                f"network.collective_sms: {taken} SMs of a collective do not fit in sm_count: {available}"
            )
        if isinstance(network, Mapping):
            self._compare_bridge(network)
            self._compare_leaf(network)

    def _compare_bridge(self, network: Mapping[Any, Any]) -> None:
        side, rate, domain = (
            network.get(key) or 0 for key in ("gpus_per_bridge_side", "bridge_gb_per_s", "gpus_per_domain")
        )
        if not all(isinstance(value, (int, float)) for value in (side, rate, domain)):
            return
        if bool(side) != bool(rate):
            self.errors.append(
                f"network: gpus_per_bridge_side is {side} and bridge_gb_per_s {rate}; give both or neither"
            )
        if side and side >= domain:
            self.errors.append(
                f"network.gpus_per_bridge_side: a side of {side} GPUs leaves none of {domain} on the other"
            )

    def _compare_leaf(self, network: Mapping[Any, Any]) -> None:
        leaf, ratio = network.get("domains_per_leaf", 0), network.get("oversubscription", 1.0)
        if isinstance(leaf, int) and isinstance(ratio, (int, float)) and ratio > 1 and leaf == 0:
            self.errors.append(
                f"network.oversubscription: {ratio} of what? domains_per_leaf says which domains share the uplinks; "
                "give it, or leave both out"
            )

    def refuse_repeats(self, document: Mapping[Any, Any]) -> None:
        """The same thing measured twice leaves open which row holds."""
        for table, identity in IDENTITY.items():
            rows = document.get(table)
            first: dict[str, int] = {}
            for index, row in enumerate(rows if isinstance(rows, list) else ()):
                if isinstance(row, Mapping):
                    key = repr([row.get(name, 0) for name in identity])
                    if first.setdefault(key, index) != index:
                        self.errors.append(
                            f"{table}[{index}] measures the same as {table}[{first[key]}]; keep one"
                        )


_HINTS: dict[type[Any], dict[str, Any]] = {}


def _hints(kind: type[Any]) -> dict[str, Any]:
    # Resolving annotations costs more than reading a row, and a table has thousands of rows.
    if kind not in _HINTS:
        _HINTS[kind] = typing.get_type_hints(kind)
    return _HINTS[kind]


def _figure_paths(document: Mapping[Any, Any], path: str = "") -> Iterator[str]:
    for key, value in document.items():
        here = f"{path}{key}"
        if here in _NOT_FIGURES:
            continue
        if isinstance(value, Mapping):
            yield from _figure_paths(value, f"{here}.")
        elif here in _FIGURES_IN_ONE:
            if value:
                yield here
        elif isinstance(value, (int, float)):
            yield here


def _path_and_above(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _show(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."
