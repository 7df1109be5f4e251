"""Slices as events of a Chrome JSON trace, in bulk.

An event is a row of fixed layout with its numbers, followed by a *tail*: its name, category and constant arguments,
rendered once for all events that agree in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from op_graphs.columns import Bool, Int64
from op_graphs.timeline import SLICE_DEFAULTS, Timeline
from op_graphs.vocabulary import Communication, FlowKind, OpKind, Phase, TrackRole

from .byte_rows import Bytes, Column, Template, scatter_rows, scatter_strings
from .chrome_arguments import category, communication_arguments, kernel_name, message_elements
from .chrome_tracks import ChromeTracks
from .json_rows import DigitColumn, MicrosecondColumn, NumberColumn, digits_width, json_text, number_slot
from .lanes import Placement

_EVENTS_IN_CHUNK = 8_192


class ChromeSlices:
    """Encodes slices, each on the host or the device side of its rank."""

    def __init__(self, timeline: Timeline, placement: Placement, tracks: ChromeTracks, start: Int64) -> None:
        slices = timeline.slices
        self.timeline, self.tracks, self.start = timeline, tracks, start
        self.lane = np.empty(len(slices), dtype=np.int64)
        self.lane[placement.order] = placement.lane
        last = int((start + slices.duration).max(initial=0))
        self.time_width = digits_width(last // 1000) + 4
        correlation = correlations(timeline)
        self.is_launch = (correlation >= 0) | timeline.simulated
        self.numbers: list[tuple[str, NumberColumn]] = []
        self.shape = np.zeros(len(slices), dtype=np.int32)
        self._add_number("External id", np.where(correlation >= 0, correlation, 0), correlation >= 0)
        self._add_number("correlation", np.where(correlation >= 0, correlation, 0), correlation >= 0)
        for name in ("layer", "chunk", "microbatch", "flops", "bytes", "wait"):
            values: npt.NDArray[Any] = getattr(slices, name)
            known = (values != SLICE_DEFAULTS[name]) & np.isfinite(values)
            self._add_number("wait_ns" if name == "wait" else name, np.where(known, values, 0), known)
        communicates = slices.communication != Communication.NONE
        self._add_number("communication_bytes", slices.communication_bytes, slices.communication_bytes != 0)
        given, got = message_elements(timeline)
        self._add_number("In msg nelems", given, communicates)
        self._add_number("Out msg nelems", got, communicates)
        numbered = slices.sequence >= 0
        self._add_number("Seq", np.where(numbered, slices.sequence, 0), numbered)
        for name, transfer in (("Dst Rank", Communication.SEND), ("Src Rank", Communication.RECEIVE)):
            known = (slices.communication == transfer) & (slices.peer >= 0)
            self._add_number(name, np.where(known, slices.peer, 0), known)
        self.tail_key = _number_combinations(
            (slices.name, slices.module),
            (self.lane, slices.kind, slices.phase),
            (slices.communication, slices.group, self.is_launch),
        )
        self.tails: tuple[dict[int, bytes], dict[int, bytes]] = ({}, {})
        """Rendered tails by key, of the host and the device side."""
        self.shapes, self.shape_of = np.unique(self.shape, return_inverse=True)
        self.templates = [self._template(int(shape)) for shape in self.shapes]

    def _add_number(self, name: str, values: npt.NDArray[Any], known: Bool) -> None:
        if known.any():
            self.shape |= known.astype(np.int32) << len(self.numbers)
            self.numbers.append((name, NumberColumn.of(values)))

    def _template(self, shape: int) -> Template:
        template = Template(b'{"ph":"X","ts":') + number_slot("ts", self.time_width)
        template = template + b',"dur":' + number_slot("dur", self.time_width) + b',"args":{'
        for bit, (name, column) in enumerate(self.numbers):
            if shape >> bit & 1:
                template = template + json_text(name) + b":" + number_slot(name, column.width) + b","
        return template

    def events(self, rows: Int64, on_device: bool) -> Iterator[Bytes]:
        """Events of some rows, each followed by a comma and a line end."""
        for first in range(0, len(rows), _EVENTS_IN_CHUNK):
            yield self._encode(rows[first : first + _EVENTS_IN_CHUNK], on_device)

    def _encode(self, rows: Int64, on_device: bool) -> Bytes:
        shape = self.shape_of.take(rows)
        keys, examples, tail = np.unique(self.tail_key.take(rows), return_index=True, return_inverse=True)
        rendered, tails = self.tails[on_device], []
        for key, example in zip(keys.tolist(), rows.take(examples).tolist(), strict=True):
            if key not in rendered:
                rendered[key] = self._tail(example, on_device)
            tails.append(rendered[key])
        tail_lengths = np.array([len(t) for t in tails], dtype=np.int64)
        heads = np.array([len(template) for template in self.templates], dtype=np.int64).take(shape)
        lengths = heads + tail_lengths.take(tail)
        ends = np.cumsum(lengths)
        offsets = ends - lengths
        buffer = np.empty(int(ends[-1]), dtype=np.uint8)
        pool = np.frombuffer(b"".join(tails), dtype=np.uint8)
        tail_begins = np.cumsum(tail_lengths) - tail_lengths
        scatter_strings(buffer, offsets + heads, pool, tail_begins.take(tail), tail_lengths.take(tail))
        for index in np.flatnonzero(np.bincount(shape)).tolist():
            members = np.flatnonzero(shape == index)
            columns = self._columns(self.templates[index], rows.take(members))
            filled = self.templates[index].fill(columns, slice(0, len(members)))
            scatter_rows(buffer, offsets.take(members), filled)
        return buffer

    def _columns(self, template: Template, rows: Int64) -> dict[str, Column]:
        used = {slot.column for slot in template.slots}
        columns: dict[str, Column] = {name: column.at(rows) for name, column in self.numbers if name in used}
        columns["ts"] = MicrosecondColumn(self.start.take(rows))
        columns["dur"] = MicrosecondColumn(self.timeline.slices.duration.take(rows))
        return columns

    def _tail(self, row: int, on_device: bool) -> bytes:
        """The constant part of the event of a row: the rest of its arguments, its name, category and place."""
        timeline, slices = self.timeline, self.timeline.slices
        track, lane = int(slices.track[row]), int(self.lane[row])
        role, kind = TrackRole(int(timeline.tracks.role[track])), OpKind(int(slices.kind[row]))
        communication = Communication(int(slices.communication[row]))
        name = shown = timeline.string(int(slices.name[row]))
        tid = int(self.tracks.device_tid[lane] if on_device else self.tracks.host_tid[lane])
        found = category(role, kind, bool(self.is_launch[row]), on_device)
        arguments: dict[str, object] = {
            "role": role.name.lower(),
            "track": timeline.string(int(timeline.tracks.name[track])),
        }
        if on_device and role.is_device:
            arguments |= {"device": 0, "stream": tid}
        if kind is not OpKind.OTHER:
            arguments["kind"] = kind.name.lower()
        if slices.phase[row]:
            arguments["phase"] = Phase(int(slices.phase[row])).name.lower()
        if slices.module[row] >= 0:
            arguments["module"] = timeline.string(int(slices.module[row]))
        if communication is not Communication.NONE:
            arguments["communication"] = communication.name.lower()
            arguments |= communication_arguments(timeline, communication, int(slices.group[row]))
            if timeline.simulated and found == "kernel":
                shown = kernel_name(communication)
                arguments["name"] = name
        rank = int(timeline.tracks.rank[track])
        pid = int(self.tracks.device_pid[rank] if on_device else self.tracks.host_pid[rank])
        place = {"cat": found, "name": shown, "pid": pid, "tid": tid}
        return json_text(arguments)[1:] + b"," + json_text(place)[1:] + b",\n"

    def flow_events(self, rows: Int64) -> Iterator[Bytes]:
        """Starts and finishes of some rows of :attr:`Timeline.flows`, whose ends lie on one rank."""
        flows, slices = self.timeline.flows, self.timeline.slices
        on_device = self.timeline.on_device()
        for kind, name in ((FlowKind.LAUNCH, "ac2g"), (FlowKind.FORWARD_BACKWARD, "fwdbwd")):
            members = rows[flows.kind[rows] == kind]
            if not len(members):
                continue
            for phase, ends in (("s", flows.source[members]), ("f", flows.target[members])):
                device = on_device[ends]
                lane, rank = self.lane[ends], self.timeline.tracks.rank[slices.track[ends]]
                place = {
                    "pid": np.where(device, self.tracks.device_pid[rank], self.tracks.host_pid[rank]),
                    "tid": np.where(device, self.tracks.device_tid[lane], self.tracks.host_tid[lane]),
                    "id": members.astype(np.int64) + 1,
                }
                template = Template(f'{{"ph":"{phase}","cat":"{name}","name":"{name}"'.encode())
                if phase == "f":
                    template = template + b',"bp":"e"'
                for key, values in place.items():
                    template = (
                        template
                        + f',"{key}":'.encode()
                        + number_slot(key, digits_width(int(values.max(initial=0))))
                    )
                template = template + b',"ts":' + number_slot("ts", self.time_width) + b"},\n"
                columns: dict[str, Column] = {key: DigitColumn(values) for key, values in place.items()}
                columns["ts"] = MicrosecondColumn(self.start[ends])
                yield template.fill(columns, slice(0, len(ends))).reshape(-1)


def correlations(timeline: Timeline) -> Int64:
    """A correlation id for each device slice and its launch: the one of the profiler, or else a number of our own.

    -1 for host slices and annotations that launch nothing.
    """
    slices, flows = timeline.slices, timeline.flows
    found: Int64 = slices.correlation.copy()
    needs = (found < 0) & timeline.on_device()
    found[needs] = max(int(found.max(initial=0)), 0) + 1 + np.arange(int(np.count_nonzero(needs)))
    launches = flows.kind == FlowKind.LAUNCH
    source, target = flows.source[launches], flows.target[launches]
    unnamed = found[source] < 0
    found[source[unnamed]] = found[target[unnamed]]
    return found


def _number_combinations(*parts: tuple[npt.NDArray[Any], ...]) -> Int64:
    """One number for each distinct combination of columns; combined part by part to stay within 64 bits."""
    total: Int64 = np.zeros(len(parts[0][0]), dtype=np.int64)
    for columns in parts:
        for column in columns:
            shifted = column.astype(np.int64) - int(column.min(initial=0))
            total = total * (int(shifted.max(initial=0)) + 1) + shifted
        total = np.asarray(np.unique(total, return_inverse=True)[1], dtype=np.int64)
    return total
