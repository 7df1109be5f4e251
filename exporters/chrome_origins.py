"""A measured rank as a profiler file again: categories, places and arguments as the file had them that it came from.

Nothing of ours is added, so whatever reads the original reads this. Changed is what viewers lose or refuse: times
count from the first event (``baseTimeNanoseconds`` says which), slices that cross on one thread are on further threads
``NAME (2)``, every arrow has an id of its own and both ends, and texts are raw UTF-8.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from op_graphs.columns import Int32, Int64
from op_graphs.timeline import Origins, Timeline
from op_graphs.vocabulary import FlowKind

from .byte_rows import Bytes, Column, Template, scatter_rows, scatter_strings
from .files import ByteSink
from .json_rows import DigitColumn, MicrosecondColumn, NumberColumn, digits_width, json_text, number_slot
from .lanes import Placement, place_slices

METADATA = "metadata events"
"""Entry of a header that holds the metadata events of the file."""

_EVENTS_IN_CHUNK = 8_192
_FIRST_FREE_TID = 100_000
_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_FLOW_NAMES = {FlowKind.LAUNCH: "ac2g", FlowKind.FORWARD_BACKWARD: "fwdbwd"}


class EventList:
    """A sink of events that each begin with a comma and a line end, which the first of a list must not."""

    def __init__(self, sink: ByteSink) -> None:
        self._sink, self._empty = sink, True

    def write(self, events: bytes | memoryview) -> None:
        """Write some events."""
        if len(events):
            self._sink.write(events[2:] if self._empty else events)
            self._empty = False


class OriginEvents:
    """The events of one rank of a timeline with origins."""

    def __init__(self, timeline: Timeline, origins: Origins, row: int, shift: int) -> None:
        self.timeline, self.origins, self.shift = timeline, origins, shift
        self.rows: Int64 = np.flatnonzero(timeline.slice_ranks() == row)
        process, thread = origins.process[self.rows], origins.thread[self.rows]
        code = process.astype(np.int64) * (len(timeline.strings) + 1) + thread
        first, number = _in_order_of_appearance(code)
        slices = timeline.slices
        start, duration = slices.start[self.rows], slices.duration[self.rows]
        self.placement = place_slices(number, start, duration, len(first))
        header = json.loads(origins.headers[row])
        self.metadata: list[dict[str, Any]] = header.pop(METADATA, [])
        self.header: dict[str, Any] = header
        places = [
            (timeline.string(int(process[at])), timeline.string(int(thread[at]))) for at in first.tolist()
        ]
        lane_places = self._lane_places(places, self.placement)
        self.places = [json_text(_identifiers(*place))[1:-1] for place in lane_places]
        # Threads in the order of their ids, so that the file does not depend on how its source ordered them.
        rank_of_lane = np.argsort(sorted(range(len(lane_places)), key=lambda at: _sort_key(lane_places[at])))
        by_lane = np.argsort(rank_of_lane[self.placement.lane], kind="stable")
        self.order: Int64 = self.rows[self.placement.order[by_lane]]
        """Rows of the timeline in the order of the file."""
        self.lane: Int64 = np.empty(len(timeline.slices), dtype=np.int64)
        """Lane of each slice of the rank, by row of the timeline; likewise its number in the file."""
        self.lane[self.order] = self.placement.lane[by_lane]
        self.position: Int64 = np.empty(len(timeline.slices), dtype=np.int64)
        self.position[self.order] = np.arange(len(self.order))
        last = int((start + duration).max(initial=0)) + shift
        self.time_width = digits_width(last // 1000) + 4

    def _lane_places(self, places: list[tuple[str, str]], placement: Placement) -> list[tuple[str, str]]:
        """Process and thread of each lane; lanes beyond the first of a thread get a number and a name."""
        taken = {thread for _, thread in places}
        named = {
            (str(m.get("pid")), str(m.get("tid"))): str((m.get("args") or {}).get("name"))
            for m in self.metadata
            if m.get("name") == "thread_name" and isinstance(m.get("args"), dict)
        }
        found, next_tid = [], _FIRST_FREE_TID
        for thread_row, number in zip(
            placement.lane_track.tolist(), placement.lane_number.tolist(), strict=True
        ):
            process, thread = places[thread_row]
            if number:
                while str(next_tid) in taken:
                    next_tid += 1
                taken.add(str(next_tid))
                shown = f"{named.get((process, thread), thread)} ({number + 1})"
                event = {"ph": "M", "name": "thread_name"} | _identifiers(process, str(next_tid))
                self.metadata.append(event | {"args": {"name": shown}})
                thread = str(next_tid)
            found.append((process, thread))
        return found

    def head(self) -> bytes:
        """The beginning of the file, up to its list of events."""
        base = {"baseTimeNanoseconds": self.timeline.time_base_ns - self.shift}
        return json_text(self.header | base)[:-1] + b',\n"traceEvents":[\n'

    def metadata_events(self) -> bytes:
        """Names and order of processes and threads."""
        return b"".join(b",\n" + json_text(event) for event in self.metadata)

    def slice_events(self) -> Iterator[Bytes]:
        """The slices, thread by thread in the order of their begin."""
        for first in range(0, len(self.rows), _EVENTS_IN_CHUNK):
            yield self._slices(self.order[first : first + _EVENTS_IN_CHUNK])

    def _slices(self, rows: Int64) -> Bytes:
        slices, origins = self.timeline.slices, self.origins
        begins, ends = origins.offsets[rows], origins.offsets[rows + 1]
        lane = self.lane[rows]
        keys = np.column_stack((slices.name[rows], origins.category[rows], lane, ends > begins))
        _, example, tail = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        tails = [self._tail(int(rows[at]), bool(ends[at] > begins[at])) for at in example.tolist()]
        template = Template(b',\n{"ph":"X","ts":') + number_slot("ts", self.time_width)
        template = template + b',"dur":' + number_slot("dur", self.time_width)
        columns: dict[str, Column] = {
            "ts": MicrosecondColumn(slices.start[rows] + self.shift),
            "dur": MicrosecondColumn(slices.duration[rows]),
        }
        arguments = np.frombuffer(origins.text, dtype=np.uint8)
        return _rows_with_texts(
            template, columns, tails, tail.reshape(-1), (arguments, begins, ends - begins)
        )

    def _tail(self, row: int, has_arguments: bool) -> bytes:
        timeline, category = self.timeline, int(self.origins.category[row])
        facts = {"cat": timeline.string(category)} if category >= 0 else {}
        facts["name"] = timeline.string(int(timeline.slices.name[row]))
        place = self.places[int(self.lane[row])]
        text = b"," + json_text(facts)[1:-1] + (b"," + place if place else b"")
        return text + (b',"args":' if has_arguments else b"")

    def flow_events(self, flows: Int64) -> Iterator[Bytes]:
        """Starts and finishes of some rows of :attr:`Timeline.flows`, whose ends lie on this rank."""
        table, slices, position = self.timeline.flows, self.timeline.slices, self.position
        flows = flows[np.lexsort((position[table.target[flows]], position[table.source[flows]]))]
        first_id = 1
        for kind, name in _FLOW_NAMES.items():
            members = flows[table.kind[flows] == kind]
            if not len(members):
                continue
            identifier = np.arange(first_id, first_id + len(members), dtype=np.int64)
            first_id += len(members)
            for phase, ends in (("s", table.source[members]), ("f", table.target[members])):
                bound = b',"bp":"e"' if phase == "f" else b""
                template = Template(f',\n{{"ph":"{phase}","cat":"{name}","name":"{name}"'.encode() + bound)
                template = template + b',"id":' + number_slot("id", digits_width(int(identifier.max())))
                template = template + b',"ts":' + number_slot("ts", self.time_width)
                columns: dict[str, Column] = {
                    "id": DigitColumn(identifier),
                    "ts": MicrosecondColumn(slices.start[ends] + self.shift),
                }
                tails = [b"," + place if place else b"" for place in self.places]
                yield _rows_with_texts(template, columns, tails, self.lane[ends])

    def counter_events(self, counter: int, samples: Int64) -> Bytes:
        """Some samples of one counter, in the process of the first device slice."""
        timeline = self.timeline
        on_device = np.flatnonzero(timeline.on_device()[self.rows])
        at = int(self.rows[on_device[0]]) if len(on_device) else int(self.rows[0])
        pid = _identifiers(timeline.string(int(self.origins.process[at])), "")
        name = timeline.string(int(timeline.counter_tracks.name[counter]))
        unit = "bytes" if timeline.counter_tracks.is_bytes[counter] else "value"
        time = timeline.counter_samples.time[samples] + self.shift
        values = NumberColumn.of(timeline.counter_samples.value[samples])
        head = json_text({"ph": "C", "name": name} | pid)[:-1]
        width = digits_width(int(time.max(initial=0)) // 1000) + 4
        template = Template(b",\n" + head + b',"ts":') + number_slot("ts", width)
        template = template + f',"args":{{"{unit}":'.encode() + number_slot("value", values.width) + b"}}"
        columns: dict[str, Column] = {
            "ts": MicrosecondColumn(time),
            "value": values.at(np.arange(len(samples))),
        }
        filled: Bytes = template.fill(columns, slice(0, len(samples))).reshape(-1)
        return filled


def _in_order_of_appearance(code: Int64) -> tuple[Int64, Int32]:
    """First row of each distinct code, and the number of each row's code, counted in the order of the rows."""
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    place = np.argsort(np.argsort(first))
    return np.sort(first), place[inverse].astype(np.int32)


def _sort_key(place: tuple[str, str]) -> list[tuple[int, int, str]]:
    """Numbers by value, before texts."""
    return [(0, int(t), "") if _NUMBER.fullmatch(t) else (1, 0, t) for t in place]


def _identifiers(process: str, thread: str) -> dict[str, object]:
    """``pid`` and ``tid`` as numbers where they are; what the file did not give is left out."""
    return {
        key: int(text) if _NUMBER.fullmatch(text) else text
        for key, text in (("pid", process), ("tid", thread))
        if text
    }


def _rows_with_texts(
    template: Template,
    columns: dict[str, Column],
    tails: list[bytes],
    tail: Int64 | Int32,
    texts: tuple[Bytes, npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None,
) -> Bytes:
    """Rows of a template, each with a tail, a text (pool, begins, lengths) where there is one, and a brace."""
    count = len(tail)
    tail_lengths = np.array([len(t) for t in tails], dtype=np.int64)
    tail_begins = np.cumsum(tail_lengths) - tail_lengths
    lengths = len(template) + tail_lengths[tail] + 1
    if texts is not None:
        lengths = lengths + texts[2]
    ends = np.cumsum(lengths)
    begins = ends - lengths
    buffer = np.empty(int(ends[-1]) if count else 0, dtype=np.uint8)
    if not count:
        return buffer
    scatter_rows(buffer, begins, template.fill(columns, slice(0, count)))
    pool = np.frombuffer(b"".join(tails), dtype=np.uint8)
    scatter_strings(buffer, begins + len(template), pool, tail_begins[tail], tail_lengths[tail])
    if texts is not None:
        scatter_strings(buffer, ends - 1 - texts[2], *texts)
    buffer[ends - 1] = ord("}")
    return buffer
