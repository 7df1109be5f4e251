"""The debug annotations of a slice: which columns of a timeline become which annotation, in which order.

What is not known is left out. The meaning of each annotation is in ``docs/trace_layout.md``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from op_graphs.columns import Bool, Int32, Int64
from op_graphs.timeline import SLICE_DEFAULTS, Origins, Timeline
from op_graphs.vocabulary import Communication, OpKind, Phase

from .byte_rows import Template
from .json_rows import json_text
from .lanes import Placement
from .perfetto_tracks import group_labels, rank_names
from .protobuf_rows import (
    PackedColumn,
    bytes_field,
    embedded,
    fixed64_slot,
    pack_varints,
    string_field,
    varint_field,
    varint_slot,
    varint_width,
)

_STRINGS_IN_PACKET = 8_192


class Interned:
    """Strings of one interning table, numbered from 1."""

    def __init__(self) -> None:
        self._ids: dict[tuple[str, object], int] = {}

    def add(self, string: str, meaning: object = None) -> int:
        """The iid of a string; one string has as many as there are meanings."""
        return self._ids.setdefault((string, meaning), len(self._ids) + 1)

    def __len__(self) -> int:
        return len(self._ids)

    def packets(self, field: int) -> Iterator[bytes]:
        """InternedData fields of a TracePacket, some thousand strings each."""
        strings = list(self._ids.items())
        for first in range(0, len(strings), _STRINGS_IN_PACKET):
            entries = (
                bytes_field(field, varint_field(1, iid) + string_field(2, string))
                for (string, _), iid in strings[first : first + _STRINGS_IN_PACKET]
            )
            yield bytes_field(12, b"".join(entries))


@dataclass(frozen=True)
class Annotation:
    """A debug annotation: a column of the slices, and which of its rows are known.

    With ``iids`` the column holds ids, and ``iids[id]`` is the interned string to write; without, it holds numbers.
    """

    name: str
    values: npt.NDArray[Any]
    known: Bool
    iids: Int64 | None = None

    def template(self, name_iid: int, width: int) -> Template:
        """DebugAnnotation of the name and a slot for the value."""
        head = Template(varint_field(1, name_iid))
        if self.iids is not None:
            return embedded(4, head + varint_slot(17, self.name, width))
        if self.values.dtype.kind == "f":
            return embedded(4, head + fixed64_slot(5, self.name))
        return embedded(4, head + varint_slot(4, self.name, width))

    def width(self) -> int:
        """Bytes of its varints."""
        if self.iids is not None:
            return varint_width(0, int(self.iids.max(initial=0)))
        known = self.values if self.known.all() else self.values[self.known]
        return varint_width(int(known.min()), int(known.max()))

    def packer(self, width: int) -> Callable[[Int64], PackedColumn]:
        """From rows to the bytes to write; what is not known becomes anything."""
        values = self.values
        if self.iids is not None:
            words = pack_varints(self.iids, width)
            return lambda rows: words.take(values.take(rows))
        if values.dtype.kind == "f":
            return lambda rows: PackedColumn(values.take(rows).view(np.uint64))
        return lambda rows: pack_varints(values.take(rows).astype(np.int64, copy=False), width)


def annotations_of(timeline: Timeline, placement: Placement, strings: Interned) -> list[Annotation]:
    """The annotations that some slice has, in the order in which they are shown; strings are interned."""
    slices = timeline.slices
    found: list[Annotation] = []

    def known(name: str) -> Bool:
        column: npt.NDArray[Any] = getattr(slices, name)
        return np.asarray(column != SLICE_DEFAULTS[name])

    def add_enum(name: str, values: type[IntEnum]) -> None:
        iids = np.zeros(128, dtype=np.int64)
        column = getattr(slices, name)
        if (rows := known(name)).any():
            for value in np.flatnonzero(np.bincount(column, minlength=1)).tolist():
                iids[value] = strings.add(values(value).name.lower())
            found.append(Annotation(name, column, rows, iids))

    def add_number(name: str, shown_as: str = "") -> None:
        if (rows := known(name)).any():
            found.append(Annotation(shown_as or name, _whole(getattr(slices, name)), rows))

    add_enum("kind", OpKind)
    add_enum("phase", Phase)
    add_number("layer")
    if (rows := known("module")).any():
        found.append(Annotation("module", slices.module, rows, string_iids(timeline, slices.module, strings)))
    for name in ("chunk", "microbatch", "flops", "bytes"):
        add_number(name)
    add_enum("communication", Communication)
    add_number("communication_bytes")
    if (rows := known("group")).any():
        labels = [strings.add(label) for label in group_labels(timeline.groups)]
        found.append(Annotation("group", slices.group, rows, np.array([*labels, 0], dtype=np.int64)))
    add_number("sequence")
    add_number("peer")
    add_number("wait", "wait_ns")
    if (rows := known("waited_for")).any():
        found += _waits(timeline, placement, rows, strings)
    add_number("correlation")
    return found


@dataclass(frozen=True)
class CategoryAnnotation(Annotation):
    """The category of a slice, which has a field of its own beside the debug annotations."""

    def template(self, name_iid: int, width: int) -> Template:
        """The field ``category_iids`` with a slot for the value."""
        return varint_slot(3, self.name, width)


def origin_annotations(
    timeline: Timeline, origins: Origins, categories: Interned, strings: Interned
) -> list[Annotation]:
    """Category of each slice, and its process and thread where they are not those of its track."""
    found: list[Annotation] = []
    if (known := origins.category >= 0).any():
        iids = string_iids(timeline, origins.category, categories)
        found.append(CategoryAnnotation("category", origins.category, known, iids))
    code = origins.process.astype(np.int64) * (len(timeline.strings) + 1) + origins.thread
    differs = (origins.process >= 0) & (code != _common_places(timeline, code)[timeline.slices.track])
    if differs.any():
        rows = np.flatnonzero(differs)
        _, first, number = np.unique(code[rows], return_index=True, return_inverse=True)
        texts = [place_text(timeline, origins, row) for row in rows[first].tolist()]
        # Numbered by text, so that string ids, which differ from reader to reader, do not show.
        iid_of = {text: strings.add(text) for text in sorted(texts)}
        places = np.zeros(len(code), dtype=np.int64)
        places[rows] = number
        iids = np.array([iid_of[text] for text in texts], dtype=np.int64)
        found.append(Annotation("place", places, differs, iids))
    return found


def place_text(timeline: Timeline, origins: Origins, row: int) -> str:
    """Process and thread of a slice as a JSON list."""
    return json_text(
        [timeline.string(int(origins.process[row])), timeline.string(int(origins.thread[row]))]
    ).decode()


def _common_places(timeline: Timeline, code: Int64) -> Int64:
    """The place of the first slice of each track, -1 where it has none."""
    tracks, first = np.unique(timeline.slices.track, return_index=True)
    common = np.full(len(timeline.tracks), -1, dtype=np.int64)
    common[tracks] = code[first]
    return common


def origin_facts(timeline: Timeline, origins: Origins, names: dict[int, tuple[tuple[str, ...], bool]]) -> str:
    """What is needed to read origins back, as JSON: headers, the place of each track, and the argument names."""
    places: list[Any] = [None] * len(timeline.tracks)
    tracks, first = np.unique(timeline.slices.track, return_index=True)
    for track, row in zip(tracks.tolist(), first.tolist(), strict=True):
        if origins.process[row] >= 0:
            places[track] = json.loads(place_text(timeline, origins, row))
    arguments = [{"iid": iid, "path": list(path), "json": is_json} for iid, (path, is_json) in names.items()]
    facts = {"headers": list(origins.headers), "places": places, "arguments": arguments}
    return json_text(facts).decode()


def _whole(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Floats as integers where all are whole and below 2**53: shorter, and shown without an exponent."""
    if column.dtype.kind != "f":
        return column
    with np.errstate(invalid="ignore"):
        whole = np.all((column == np.floor(column)) & (np.abs(column) < 1 << 53))
    return column.astype(np.int64) if whole else column


def _waits(timeline: Timeline, placement: Placement, waits: Bool, strings: Interned) -> list[Annotation]:
    """What a slice waited for: as text where it is on another track, and as its number in file order."""
    slices, tracks = timeline.slices, timeline.tracks
    waited = np.where(waits, slices.waited_for, 0)
    elsewhere = waits & (slices.track[waited] != slices.track)
    rows = waited[elsewhere]
    keys, inverse = np.unique(
        slices.name[rows].astype(np.int64) * len(tracks) + slices.track[rows], return_inverse=True
    )
    ranks = rank_names(timeline)
    iids = np.zeros(len(keys) + 1, dtype=np.int64)
    for index, key in enumerate(keys.tolist()):
        name, track = divmod(key, len(tracks))
        place = f"{ranks[tracks.rank[track]]} {timeline.string(int(tracks.name[track]))}"
        iids[index] = strings.add(f"{timeline.string(name)} on {place}")
    texts = np.full(len(slices), len(keys), dtype=np.int64)
    texts[elsewhere] = inverse
    numbers = file_positions(placement)[waited]
    by_text = [Annotation("waited_for", texts, elsewhere, iids)] if len(keys) else []
    return [*by_text, Annotation("waited_for_slice", numbers, waits)]


def string_iids(timeline: Timeline, ids: Int32, interned: Interned) -> Int64:
    """Iid of each string id that occurs; id -1 finds the last entry, the empty string."""
    found = np.zeros(len(timeline.strings) + 1, dtype=np.int64)
    for identifier in np.flatnonzero(np.bincount(ids + 1, minlength=1)).tolist():
        found[identifier - 1] = interned.add(timeline.string(identifier - 1))
    return found


def file_positions(placement: Placement) -> Int64:
    """The number in file order of each row."""
    position = np.empty(len(placement.order), dtype=np.int64)
    position[placement.order] = np.arange(len(position))
    return position
