"""What if slices took longer or shorter."""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum

import numpy as np

from op_graphs.vocabulary import OpKind, Phase
from tracesim.errors import ScenarioError
from tracesim.replay.graph import Rebuilt, RowRole
from tracesim.replay.what_if.selection import device_names_matching, factor, scaled, some


def scale_all(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """All device slices last ``value`` times as long."""
    return scaled(rebuilt, rebuilt.on_device(), factor(value, "scale"))


def scale_kind(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """Slices of a kind: ``gemm=0.5``."""
    name, _, by = value.partition("=")
    kind = _member(OpKind, name, "scale.kind")
    chosen = some(rebuilt.on_device() & (rebuilt.graph.operations.kind == kind), f"scale.kind.{name}")
    return scaled(rebuilt, chosen, factor(by, f"scale.kind.{name}"))


def scale_phase(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """Slices of a phase: ``forward=0.5``."""
    name, _, by = value.partition("=")
    phase = _member(Phase, name, "scale.phase")
    chosen = some(rebuilt.on_device() & (rebuilt.graph.operations.phase == phase), f"scale.phase.{name}")
    return scaled(rebuilt, chosen, factor(by, f"scale.phase.{name}"))


def scale_layer(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """Slices of a layer: ``3=0.5``."""
    name, _, by = value.partition("=")
    chosen = rebuilt.on_device() & (rebuilt.graph.operations.layer == _number(name, "scale.layer"))
    return scaled(rebuilt, some(chosen, f"scale.layer.{name}"), factor(by, f"scale.layer.{name}"))


def scale_name(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """Slices whose name matches: ``flash:0.5``."""
    pattern, _, by = value.rpartition(":")
    chosen = device_names_matching(rebuilt, pattern, "scale.name")
    return scaled(rebuilt, chosen, factor(by, f"scale.name={pattern}"))


def set_name(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """Slices whose name matches last this many microseconds: ``flash:120``."""
    pattern, _, time = value.rpartition(":")
    chosen = device_names_matching(rebuilt, pattern, "set.name")
    nanoseconds = round(1000 * factor(time, f"set.name={pattern}"))
    return replace(rebuilt, durations=np.where(chosen, nanoseconds, rebuilt.durations))


def scale_rank(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """Compute and host work of one rank: ``3=1.2``. Communication keeps its transfer time."""
    name, _, by = value.partition("=")
    ranks = rebuilt.timeline.ranks.rank
    rank = _number(name, "rank")
    if rank not in ranks.tolist():
        raise ScenarioError(f"rank.{name}: the trace holds the ranks {', '.join(map(str, ranks.tolist()))}")
    mine = (ranks[rebuilt.rows.rank] == rank) & ~rebuilt.graph.is_communication()
    mine &= rebuilt.rows.role != RowRole.ANCHOR
    return scaled(rebuilt, mine, factor(by, f"rank.{name}"))


def fuse(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """Runs of elementwise kernels that follow each other on a stream become one kernel each.

    A fused kernel reads and writes memory once, so it lasts as long as the longest of its run: what they shared is then
    read for free. That is the most that fusing can give.
    """
    if value != "elementwise":
        raise ScenarioError(f"fuse={value}: only elementwise kernels can be fused; write fuse=elementwise")
    operations = rebuilt.graph.operations
    fusable = rebuilt.on_device() & (operations.kind == OpKind.ELEMENTWISE)
    fusable = some(fusable, "fuse=elementwise")
    follows = np.zeros(len(fusable), dtype=np.bool_)
    follows[1:] = fusable[1:] & fusable[:-1] & (operations.rank[1:] == operations.rank[:-1])
    run = np.cumsum(fusable & ~follows) - 1
    longest = np.zeros(int(run.max()) + 1, dtype=np.int64)
    np.maximum.at(longest, run[fusable], rebuilt.durations[fusable])
    fused = np.where(follows, 0, np.where(fusable, longest[run], rebuilt.durations))
    return replace(rebuilt, durations=fused)


def _member(kinds: type[IntEnum], name: str, what: str) -> IntEnum:
    try:
        return kinds[name.upper()]
    except KeyError:
        raise ScenarioError(
            f"{what}.{name}: not one of {', '.join(member.name.lower() for member in kinds)}"
        ) from None


def _number(text: str, what: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ScenarioError(f"{what}.{text}: {text!r} is no number") from None
