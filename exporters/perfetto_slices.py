"""Slices as Perfetto packets, in bulk: every packet of one *shape* (the same annotations present) has one template.

The packets of a chunk are filled shape by shape and scattered to their places in the order of the placement.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from op_graphs.columns import Int64
from op_graphs.timeline import Timeline

from .byte_rows import Bytes, Column, Slot, Template, put_words, scatter_rows
from .lanes import Placement
from .perfetto_annotations import (
    Annotation,
    Interned,
    annotations_of,
    file_positions,
    origin_annotations,
    origin_facts,
    string_iids,
)
from .perfetto_arguments import ArgumentValues, SliceArguments
from .perfetto_tracks import TrackPlan
from .protobuf_rows import (
    embedded,
    fixed64_slot,
    pack_varints,
    varint_field,
    varint_slot,
    varint_width,
)

SEQUENCE_ID = 1
EVENTS_IN_CHUNK = 8_192

NEEDS_STATE = varint_field(10, SEQUENCE_ID) + varint_field(13, 2)
"""Sequence id and flag of every packet but the first: it refers to interned names."""

_SLICE_BEGIN, _SLICE_END = 1, 2
_FLOW = "flow "


@dataclass(frozen=True)
class _FlowColumn:
    """The ``index``-th flow id of slices, written only where a slice has so many."""

    rows: Int64
    offsets: Int64
    ids: Int64
    index: int

    def write(self, rows_to: Bytes, slot: Slot, rows: slice) -> None:
        """Write the ids of ``rows`` into their slot."""
        put_words(rows_to, slot.offset, 8, self.ids[self.offsets[self.rows[rows]] + self.index])


class SliceEncoder:
    """Encodes the slices of a timeline, with what they refer to, chunk by chunk."""

    def __init__(self, timeline: Timeline, placement: Placement, plan: TrackPlan, time_shift: int) -> None:
        slices = timeline.slices
        self.placement = placement
        self.start = slices.start + time_shift if time_shift else slices.start
        self.end = self.start + slices.duration
        self.slice_names = slices.name
        self.names, self.annotation_names, self.strings = Interned(), Interned(), Interned()
        name_iids = string_iids(timeline, slices.name, self.names)
        self.flow_offsets, self.flow_ids = _flow_ids(timeline, placement, self.start)
        self.time_width = varint_width(0, int(self.end.max(initial=0)))
        self.track_width = varint_width(0, int(plan.lane.max(initial=0)))
        self.name_width = varint_width(0, len(self.names))
        self.packed_names = pack_varints(name_iids, self.name_width)
        self.packed_tracks = pack_varints(plan.lane, self.track_width)
        self.categories = Interned()
        found = annotations_of(timeline, placement, self.strings)
        self.arguments: SliceArguments | None = None
        self.origin_facts = ""
        if (origins := timeline.origins) is not None:
            found += origin_annotations(timeline, origins, self.categories, self.strings)
            self.arguments = SliceArguments(origins, placement.order, self.annotation_names, self.strings)
            self.origin_facts = origin_facts(timeline, origins, self.arguments.names)
        self._make_templates(found)

    @property
    def interned(self) -> Iterator[bytes]:
        """InternedData fields that must come before the first slice."""
        yield from self.categories.packets(1)
        yield from self.names.packets(2)
        yield from self.annotation_names.packets(3)
        yield from self.strings.packets(29)

    def _make_templates(self, annotations: list[Annotation]) -> None:
        """Number the shapes that occur: shape ``s`` written whole is template ``3 * s``, its begin and end follow."""
        rows = len(self.start)
        widths = [annotation.width() for annotation in annotations]
        parts = [
            annotation.template(self.annotation_names.add(annotation.name), width)
            for annotation, width in zip(annotations, widths, strict=True)
        ]
        self.packers = {a.name: a.packer(width) for a, width in zip(annotations, widths, strict=True)}
        always, mask = 0, np.zeros(rows, dtype=np.int32)
        for bit, annotation in enumerate(annotations):
            if annotation.known.all():
                always |= 1 << bit
            else:
                mask |= annotation.known.astype(np.int32) << bit
        most_flows = 0
        dense, codes = _dense(mask, 1 << len(annotations))
        if len(self.flow_ids):
            flows = np.diff(self.flow_offsets)
            most_flows = int(flows.max())
            dense, shapes = _dense(dense * (most_flows + 1) + flows, len(codes) * (most_flows + 1))
        else:
            shapes = np.arange(len(codes))
        structures = self.arguments.structures if self.arguments is not None else [[]]
        combined = np.arange(len(shapes)) * len(structures)
        if self.arguments is not None:
            dense, combined = _dense(
                dense * len(structures) + self.arguments.structure, len(shapes) * len(structures)
            )
        self.templates: list[Template] = []
        end = self._end()
        for combination in combined.tolist():
            shape, structure = divmod(combination, len(structures))
            code, count = divmod(int(shapes[shape]), most_flows + 1)
            bits = int(codes[code]) | always
            chosen = [part for bit, part in enumerate(parts) if bits >> bit & 1]
            chosen += [column.template() for column in structures[structure]]
            begin = self._begin(chosen, count)
            self.templates += [begin + end, begin, end]
        self.lengths = np.array([len(template) for template in self.templates], dtype=np.int64)
        template = dense * 3
        self.template = template.astype(np.int16) if len(self.templates) < 1 << 15 else template

    def _begin(self, annotations: list[Template], flows: int) -> Template:
        event = Template(varint_field(9, _SLICE_BEGIN)) + varint_slot(11, "track", self.track_width)
        event = event + varint_slot(10, "name", self.name_width)
        for annotation in annotations:
            event = event + annotation
        for index in range(flows):
            event = event + fixed64_slot(47, f"{_FLOW}{index}")
        return embedded(1, varint_slot(8, "start", self.time_width) + NEEDS_STATE + embedded(11, event))

    def _end(self) -> Template:
        event = Template(varint_field(9, _SLICE_END)) + varint_slot(11, "track", self.track_width)
        return embedded(1, varint_slot(8, "end", self.time_width) + NEEDS_STATE + embedded(11, event))

    def chunks(self) -> Iterator[Bytes]:
        """The packets of all slices, in the order of the placement."""
        events = self.placement.events
        for first in range(0, len(events), EVENTS_IN_CHUNK):
            yield self._encode(events[first : first + EVENTS_IN_CHUNK])

    def _encode(self, events: Int64) -> Bytes:
        """Packets of a run of events of a placement."""
        slices = events >> 2
        rows = self.placement.order.take(slices)
        template = self.template.take(rows)
        template += (events & 3).astype(template.dtype)
        counts = np.bincount(template, minlength=len(self.templates))
        present = np.flatnonzero(counts).tolist()
        if len(present) == 1:
            columns = self._columns(slices, rows, present)
            packets: Bytes = self.templates[present[0]].fill(columns, slice(0, len(rows))).reshape(-1)
            return packets
        lengths = self.lengths.take(template)
        ends = np.cumsum(lengths)
        by_template = np.argsort(template, kind="stable")
        offsets = (ends - lengths).take(by_template)
        columns = self._columns(slices.take(by_template), rows.take(by_template), present)
        buffer = np.empty(int(ends[-1]), dtype=np.uint8)
        first = 0
        for index in present:
            window = slice(first, first + int(counts[index]))
            scatter_rows(buffer, offsets[window], self.templates[index].fill(columns, window))
            first = window.stop
        return buffer

    def _columns(self, slices: Int64, rows: Int64, templates: list[int]) -> dict[str, Column]:
        """Packed values of the slots of some templates, at some rows (numbered ``slices`` in file order)."""
        columns: dict[str, Column] = {}
        for name in {slot.column for index in templates for slot in self.templates[index].slots}:
            if name in self.packers:
                columns[name] = self.packers[name](rows)
            elif self.arguments is not None and name in self.arguments.by_slot:
                columns[name] = ArgumentValues(self.arguments.by_slot[name], rows)
            elif name == "start":
                columns[name] = pack_varints(self.start.take(rows), self.time_width)
            elif name == "end":
                columns[name] = pack_varints(self.end.take(rows), self.time_width)
            elif name == "track":
                columns[name] = self.packed_tracks.take(self.placement.lane.take(slices))
            elif name == "name":
                columns[name] = self.packed_names.take(self.slice_names.take(rows))
            else:
                index = int(name.removeprefix(_FLOW))
                columns[name] = _FlowColumn(rows, self.flow_offsets, self.flow_ids, index)
        return columns


def _dense(values: npt.NDArray[Any], limit: int) -> tuple[Int64, Int64]:
    """Values in ``[0, limit)`` renumbered without gaps, and the original of each number.

    Counting is much cheaper than the sort of ``np.unique``.
    """
    present = np.flatnonzero(np.bincount(values, minlength=limit))
    if len(present) == 1:
        return np.zeros(len(values), dtype=np.int64), present
    lookup = np.zeros(limit, dtype=np.int64)
    lookup[present] = np.arange(len(present))
    return lookup.take(values), present


def _flow_ids(timeline: Timeline, placement: Placement, start: Int64) -> tuple[Int64, Int64]:
    """Flow ids of each slice, as CSR offsets and values.

    The id of flow ``i`` is ``(i + 1) << 4 | kind << 1 | reversed``. A viewer draws the arrow from the slice that
    begins first; ``reversed`` says that this is the target (a kernel stamped before its launch).
    """
    flows = timeline.flows
    if not len(flows):
        return np.zeros(len(start) + 1, dtype=np.int64), np.empty(0, dtype=np.int64)
    position = file_positions(placement)
    source, target = flows.source, flows.target
    tie = (start[source] == start[target]) & (position[source] > position[target])
    backwards = (start[source] > start[target]) | tie
    number = np.arange(len(flows), dtype=np.int64) + 1
    ids = number << 4 | flows.kind.astype(np.int64) << 1 | backwards
    real = source != target
    at = np.concatenate([source[real], target[real]])
    order = np.argsort(at, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(at, minlength=len(start)))])
    return offsets, np.concatenate([ids[real], ids[real]])[order]
