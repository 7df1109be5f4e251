"""Several timelines of one job, one a rank, put together on a common time base."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from op_graphs.columns import Int32, StringTable
from op_graphs.timeline import (
    CommunicationGroup,
    CounterSamples,
    CounterTracks,
    Flows,
    Quirk,
    Ranks,
    Slices,
    Steps,
    Timeline,
    Tracks,
)
from tracesim.readers import origins

_RANK_IN_NAME = re.compile(r"(?:rank|worker|trainer|gpu|device)[-_. ]?(\d+)", re.IGNORECASE)
_FAR_APART_NS = 3_600_000_000_000


def rank_from_name(name: str) -> int:
    """The rank a file name tells (``rank12.json``, ``worker7_step_3.pt.trace.json.gz``), -1 if it tells none."""
    found = _RANK_IN_NAME.findall(name)
    return int(found[-1]) if found else -1


def merge(parts: Sequence[Timeline], name: str) -> Timeline:
    """One timeline of several, ordered by rank.

    Ranks come from the files, else from the file names, else from the order given; where that makes two parts the same
    rank, all are numbered in order and a quirk says so. The earliest time base becomes 0; parts that lie more than an
    hour apart (clocks that cannot be compared) are aligned at their starts instead, which a quirk says too.
    """
    parts, notes = _with_ranks(parts)
    if len(parts) == 1:
        return replace(parts[0], name=name)
    parts = sorted(parts, key=lambda part: int(part.ranks.rank[0]) if len(part.ranks) else -1)
    shifts, base, quirk = _shifts(parts)
    notes += quirk
    strings = StringTable()
    groups: dict[CommunicationGroup, int] = {}
    tables = _Tables()
    string_maps = []
    for part, shift in zip(parts, shifts, strict=True):
        string_map = np.array([strings.intern(s) for s in part.strings] + [-1], dtype=np.int32)
        group_map = np.array([groups.setdefault(g, len(groups)) for g in part.groups] + [-1], dtype=np.int32)
        string_maps.append(string_map)
        tables.add(part, shift, string_map, group_map)
    first = parts[0]
    devices = list(dict.fromkeys(p.device for p in parts if p.device))
    return Timeline(
        strings=strings.strings(),
        ranks=Ranks.concatenate(tables.ranks),
        tracks=Tracks.concatenate(tables.tracks),
        slices=Slices.concatenate(tables.slices),
        flows=Flows.concatenate(tables.flows),
        counter_tracks=CounterTracks.concatenate(tables.counter_tracks),
        counter_samples=CounterSamples.concatenate(tables.samples),
        steps=Steps.concatenate(tables.steps),
        groups=tuple(groups),
        name=name,
        simulated=all(p.simulated for p in parts),
        device=", ".join(devices),
        world_size=max(max(p.world_size for p in parts), sum(len(p.ranks) for p in parts)),
        time_base_ns=base,
        quirks=_quirks(parts, notes),
        properties=first.properties,
        origins=origins.joined(parts, string_maps),
    )


class _Tables:
    """The tables of all parts, renumbered as they are added."""

    def __init__(self) -> None:
        self.ranks: list[Ranks] = []
        self.tracks: list[Tracks] = []
        self.slices: list[Slices] = []
        self.flows: list[Flows] = []
        self.counter_tracks: list[CounterTracks] = []
        self.samples: list[CounterSamples] = []
        self.steps: list[Steps] = []
        self._rank = self._track = self._slice = self._counter = 0

    def add(self, part: Timeline, shift: int, string: Int32, group: Int32) -> None:
        slices = part.slices
        waited = np.where(slices.waited_for >= 0, slices.waited_for + self._slice, -1)
        self.ranks.append(part.ranks)
        self.tracks.append(
            part.tracks.with_columns(rank=part.tracks.rank + self._rank, name=string[part.tracks.name])
        )
        self.slices.append(
            slices.with_columns(
                track=slices.track + self._track,
                start=slices.start + shift,
                name=string[slices.name],
                module=string[slices.module],
                group=group[slices.group],
                waited_for=waited,
            )
        )
        self.flows.append(
            part.flows.with_columns(
                source=part.flows.source + self._slice, target=part.flows.target + self._slice
            )
        )
        counters = part.counter_tracks
        self.counter_tracks.append(
            counters.with_columns(rank=counters.rank + self._rank, name=string[counters.name])
        )
        samples = part.counter_samples
        self.samples.append(
            samples.with_columns(track=samples.track + self._counter, time=samples.time + shift)
        )
        steps = part.steps
        self.steps.append(
            steps.with_columns(rank=steps.rank + self._rank, start=steps.start + shift, end=steps.end + shift)
        )
        self._rank += len(part.ranks)
        self._track += len(part.tracks)
        self._slice += len(slices)
        self._counter += len(counters)


def _with_ranks(parts: Sequence[Timeline]) -> tuple[list[Timeline], list[Quirk]]:
    numbers = [
        int(part.ranks.rank[0]) if len(part.ranks) and part.ranks.rank[0] >= 0 else rank_from_name(part.name)
        for part in parts
    ]
    notes = []
    if len(set(numbers)) < len(numbers) or -1 in numbers:
        if len(parts) > 1:
            shared = sorted({n for n in numbers if numbers.count(n) > 1})
            notes.append(
                Quirk("ranks numbered in the order of the files", len(parts), f"the files say {shared[:8]}")
            )
        numbers = list(range(len(parts)))
    placed = []
    for part, number in zip(parts, numbers, strict=True):
        unknown = len(part.ranks) == 1 and int(part.ranks.rank[0]) != number
        ranks = part.ranks.with_columns(rank=np.array([number])) if unknown else part.ranks
        placed.append(replace(part, ranks=ranks))
    return placed, notes


def _shifts(parts: Sequence[Timeline]) -> tuple[list[int], int, list[Quirk]]:
    """Nanoseconds to add to each part's times, the common base, and what was odd."""
    bases = [part.time_base_ns for part in parts]
    base = min(bases)
    if max(bases) - base > _FAR_APART_NS:
        hours = (max(bases) - base) / _FAR_APART_NS
        quirk = Quirk("clocks of the files too far apart, starts aligned", len(parts), f"{hours:.3g} hours")
        return [0] * len(parts), base, [quirk]
    spans = [(b + p.span_ns[0], b + p.span_ns[1]) for b, p in zip(bases, parts, strict=True)]
    apart = max(start for start, _ in spans) > min(end for _, end in spans)
    notes = (
        [Quirk("files that do not overlap in time", len(parts), "traced one after another?")] if apart else []
    )
    return [b - base for b in bases], base, notes


def _quirks(parts: Sequence[Timeline], notes: list[Quirk]) -> tuple[Quirk, ...]:
    counts: dict[str, int] = {}
    examples: dict[str, str] = {}
    for part in parts:
        for quirk in part.quirks:
            counts[quirk.name] = counts.get(quirk.name, 0) + quirk.count
            examples.setdefault(quirk.name, quirk.example)
    return (*(Quirk(name, counts[name], examples[name]) for name in sorted(counts)), *notes)
