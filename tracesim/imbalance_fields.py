"""Reading ``training.routing`` and ``training.sequence_lengths``: parameters of a distribution, or a histogram file.

A histogram file is text: numbers apart by spaces, commas or new lines, ``#`` begins a comment. For routing it holds the
tokens of every expert in order of their numbers; for lengths, each line is a length in tokens and, if it is not one,
how many documents have it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from op_graphs.model import ModelDescription
from op_graphs.plan import Routing, SequenceLengths, TrainingPlan

from .scenario_fields import Problems, check_keys, show_value
from .yaml_reading import describe_type

ROUTING_KEYS = ("zipf", "histogram")
LENGTH_KEYS = ("mean", "sigma", "histogram")
_ROUTING, _LENGTHS = "training.routing", "training.sequence_lengths"
_MOST_BYTES = 1 << 24
_LARGEST_ZIPF = 8.0
_LARGEST_SIGMA = 4.0


def read_routing(value: object, folder: Path, problems: Problems) -> Routing | None:
    """What ``training.routing`` says; None for balanced routing, and where it is wrong, which is noted."""
    if value is None:
        return None
    mapping = _mapping(_ROUTING, value, ROUTING_KEYS, "{zipf: 1.0} or {histogram: FILE}", problems)
    if mapping is None:
        return None
    if len(mapping) != 1:
        problems.note(_ROUTING, "takes one of zipf and histogram")
        return None
    if "zipf" in mapping:
        exponent = mapping["zipf"]
        if not _is_number(exponent, 0, _LARGEST_ZIPF):
            problems.add(
                f"{_ROUTING}.zipf", exponent, f"must be a number from 0 (balanced) to {_LARGEST_ZIPF:g}"
            )
            return None
        return Routing(zipf=float(exponent))
    rows = _read_file(f"{_ROUTING}.histogram", mapping["histogram"], folder, problems)
    if rows is None:
        return None
    path, lines = rows
    counts = tuple(number for line in lines for number in line)
    if not any(counts):
        problems.add(f"{_ROUTING}.histogram", mapping["histogram"], "holds no number above 0")
        return None
    return Routing(histogram=path, counts=counts)


def read_sequence_lengths(value: object, folder: Path, problems: Problems) -> SequenceLengths | None:
    """What ``training.sequence_lengths`` says; None for whole sequences, and where it is wrong, which is noted."""
    if value is None:
        return None
    usage = "{mean: 1200, sigma: 1.0} or {histogram: FILE}"
    mapping = _mapping(_LENGTHS, value, LENGTH_KEYS, usage, problems)
    if mapping is None:
        return None
    if "histogram" not in mapping:
        return _lognormal(mapping, problems)
    if len(mapping) > 1:
        problems.note(_LENGTHS, f"takes a histogram or mean and sigma, not both; {usage}")
        return None
    path = f"{_LENGTHS}.histogram"
    found = _read_file(path, mapping["histogram"], folder, problems)
    if found is None:
        return None
    name, lines = found
    for line in lines:
        if len(line) > 2 or line[0] < 1 or line[0] != int(line[0]):
            text = " ".join(f"{number:g}" for number in line)
            problems.add(
                path,
                mapping["histogram"],
                f"has the line {show_value(text)}; a line is a length of 1 or more, "
                "and how many documents have it",
            )
            return None
    weights = tuple(line[1] if len(line) == 2 else 1.0 for line in lines)
    if not any(weights):
        problems.add(path, mapping["histogram"], "holds no documents")
        return None
    return SequenceLengths(histogram=name, lengths=tuple(int(line[0]) for line in lines), weights=weights)


def check_imbalance(model: ModelDescription, training: TrainingPlan, problems: Problems) -> None:
    """Note distributions that the model, or the rest of the training plan, has no use for."""
    routing = training.routing
    if routing is not None and problems.sound(_ROUTING, f"{_ROUTING}.histogram"):
        shown = {"zipf": routing.zipf} if routing.zipf is not None else {"histogram": routing.histogram}
        if model.moe is None:
            problems.add(_ROUTING, shown, f"{model.name} has no experts; leave it out")
        elif model.moe.capacity_factor is not None and model.moe.pad_to_capacity:
            problems.add(
                _ROUTING,
                shown,
                f"changes nothing: experts of {model.name} compute their capacity (capacity_factor "
                f"{model.moe.capacity_factor:g}) however tokens are routed; leave it out, or set pad_to_capacity: "
                "false or capacity_factor: null",
            )
        elif routing.counts and len(routing.counts) != model.moe.experts:
            problems.add(
                f"{_ROUTING}.histogram",
                routing.histogram,
                f"holds {len(routing.counts)} numbers, {model.name} has {model.moe.experts} experts",
            )
    if training.sequence_lengths is None or not problems.sound(_LENGTHS, "training.attention"):
        return
    if not model.causal:
        problems.note(_LENGTHS, f"packs texts, and {model.name} reads images; leave it out")
    if training.attention == "unfused":
        problems.add(
            "training.attention",
            training.attention,
            "computes whole squares of scores, packed documents need a fused kernel; set attention: flash",
        )


def imbalance_mapping(training: TrainingPlan) -> dict[str, Any]:
    """Both fields as a scenario file has them; empty where neither is set."""
    mapping: dict[str, Any] = {}
    routing, lengths = training.routing, training.sequence_lengths
    if routing is not None:
        zipf = routing.zipf
        mapping["routing"] = {"histogram": routing.histogram} if zipf is None else {"zipf": zipf}
    if lengths is not None:
        lognormal = {"mean": lengths.mean, "sigma": lengths.sigma}
        mapping["sequence_lengths"] = {"histogram": lengths.histogram} if lengths.mean is None else lognormal
    return mapping


def _lognormal(mapping: Mapping[str, Any], problems: Problems) -> SequenceLengths | None:
    mean, sigma = mapping.get("mean"), mapping.get("sigma", 0.0)
    sound = True
    if not _is_number(mean, 1, 1 << 24):
        problems.add(f"{_LENGTHS}.mean", mean, f"must be the mean tokens of a document, from 1 to {1 << 24}")
        sound = False
    if not _is_number(sigma, 0, _LARGEST_SIGMA):
        problems.add(
            f"{_LENGTHS}.sigma",
            sigma,
            f"must be the standard deviation of the logarithm of the length, from 0 to {_LARGEST_SIGMA:g}",
        )
        sound = False
    return SequenceLengths(mean=float(mapping["mean"]), sigma=float(sigma)) if sound else None


def _mapping(
    path: str, value: object, keys: tuple[str, ...], usage: str, problems: Problems
) -> Mapping[str, Any] | None:
    if not isinstance(value, Mapping) or not value:
        problems.add(path, value, f"is a {describe_type(value)}, must be {usage}, or null")
        return None
    problems.given.update(f"{path}.{key}" for key in value)
    before = len(problems.lines)
    check_keys(path, value, keys, problems)
    return value if len(problems.lines) == before else None


def _read_file(
    path: str, value: object, folder: Path, problems: Problems
) -> tuple[str, list[list[float]]] | None:
    """Absolute path and the numbers of each line that has any; None, noted, where it cannot be read."""
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        problems.add(path, value, f"is a {describe_type(value)}, must be a text file of numbers")
        return None
    file = folder / value
    if not file.is_file():
        problems.add(path, value, f"is not a file in {folder}")
        return None
    if file.stat().st_size > _MOST_BYTES:
        problems.add(path, value, f"has {file.stat().st_size} bytes, at most {_MOST_BYTES} are read")
        return None
    lines: list[list[float]] = []
    for number, line in enumerate(file.read_text("utf-8-sig", errors="replace").splitlines(), 1):
        words = line.partition("#")[0].replace(",", " ").split()
        row = [_float(word) for word in words]
        if any(math.isnan(held) or held < 0 or math.isinf(held) for held in row):
            problems.add(path, value, f"line {number}, {show_value(line)}: must hold numbers of 0 or more")
            return None
        if row:
            lines.append(row)
    if not lines:
        problems.add(path, value, "holds no numbers")
        return None
    return str(file.resolve()), lines


def _float(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return math.nan


def _is_number(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
