"""The events of a Kineto file as columns: names and threads interned, times as int64 nanoseconds.

Complete events (``ph: X``), begin and end pairs, instant events, counters and forward-backward flows are kept. Times do
not pass through a float where a float would lose any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from op_graphs.columns import Int64
from tracesim.errors import TraceError
from tracesim.readers import begin_end
from tracesim.readers.distinct import distinct
from tracesim.readers.kineto_json import Chunk, Event, Header, Notes, Number, decode, integer
from tracesim.readers.sources import FileBytes

_EXACT_MICROSECONDS = 2.0**43
"""Above this a double of microseconds is coarser than a nanosecond, so the digits themselves are read."""

_LARGEST_MICROSECONDS = 4_000_000_000_000_000
"""Largest time, so that a start plus a duration still fits an int64 of nanoseconds."""

_FORWARD_BACKWARD = ("fwdbwd", "forward_backward")


@dataclass
class Columns:
    """Slices as columns of length ``len(name)``; ids point into ``strings``."""

    strings: list[str]
    name: Int64
    category: Int64
    process: Int64
    """String id of the ``pid`` as written; likewise ``thread``."""
    thread: Int64
    time: Int64
    """Nanoseconds on the file's own clock."""
    duration: Int64
    arguments: list[msgspec.Raw]

    def numbers(self, identifiers: Int64) -> Int64:
        """The numbers that strings of processes or threads hold; those without one get negative numbers below -1."""
        used, place = distinct(identifiers)
        found = [integer(self.strings[i], -2 - i) for i in used.tolist()]
        return np.array(found, dtype=np.int64)[place]


@dataclass
class FlowEnds:
    """Ends of arrows: id, whether the arrow starts here (1), and the thread (string ids) and time it is bound to."""

    identifier: Int64
    starts: Int64
    process: Int64
    thread: Int64
    time: Int64


@dataclass
class KinetoDocument:
    """A decoded file."""

    path: Path
    data: FileBytes
    complete: Columns
    metadata: list[Event]
    """Names and order of processes and threads (``ph: M``)."""
    instants: list[Event]
    instant_times: Int64
    flow_ends: FlowEnds
    """Forward-backward arrows."""
    device_properties: list[dict[str, Any]]
    distributed: dict[str, Any]
    extra: dict[str, Any]
    """What our own exporter adds under the top-level key ``tracesim``."""
    base_ns: int
    notes: Notes

    def note(self, name: str, count: int, example: str = "") -> None:
        """Count something odd; nothing is recorded for a count of 0."""
        self.notes.add(name, count, example)


def read_document(
    path: Path, data: FileBytes, progress: Callable[[int], None] = lambda position: None
) -> KinetoDocument:
    """A Kineto file's bytes as columns.

    Raises:
        TraceError: if the bytes are truncated or not JSON, or if the events are not shaped as trace events.
    """
    builder = _Builder(path)
    header = decode(path, data, builder.add, builder.notes, progress)
    return builder.document(header, data)


class _Interner(dict[Any, int]):
    """Numbers values in the order of their appearance."""

    def __missing__(self, value: Any) -> int:  # noqa: ANN401
        text = value if type(value) is str else "" if value is None else str(value)
        number = self[value] = self.setdefault(text, len(self))
        return number

    def column(self, values: list[Any]) -> Int64:
        """The numbers of some values; what is no string is interned by its text."""
        return np.fromiter(map(self.__getitem__, values), dtype=np.int64, count=len(values))

    def strings(self) -> tuple[list[str], Int64 | None]:
        """The distinct strings, and the place among them of each number if numbers have gaps."""
        strings = [value for value in self if type(value) is str]
        if len(strings) == len(self):
            return strings, None
        places = np.zeros(len(self), dtype=np.int64)
        places[[self[s] for s in strings]] = np.arange(len(strings))
        return strings, places


class _Builder:
    """Takes chunks, keeps columns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes = Notes()
        self.interner = _Interner()
        self.parts: list[tuple[Int64, ...]] = []
        self.arguments: list[msgspec.Raw] = []
        self.half_parts: list[tuple[Int64, ...]] = []
        self.half_arguments: list[msgspec.Raw] = []
        self.half_phases: list[str | None] = []
        self.metadata: list[Event] = []
        self.instants: list[Event] = []
        self.instant_times: list[Int64] = []
        self.flow_parts: list[tuple[Int64, ...]] = []
        self.events = 0

    def add(self, chunk: Chunk) -> None:
        """Take over what is kept of a chunk."""
        events = chunk.events
        self.events += len(events)
        complete = [e for e in events if e.ph == "X" and e.ts is not None]
        clock = _Clock(self.path, chunk, self.notes)
        if len(complete) < len(events):
            others = [e for e in events if e.ph != "X" or e.ts is None]
            self._add_others(others, {e.ph for e in others}, clock)
        self.parts.append(self._slices(complete, clock))
        self.arguments += [e.args for e in complete]

    def _slices(self, events: list[Event], clock: _Clock) -> tuple[Int64, ...]:
        column = self.interner.column
        return (
            column([e.name for e in events]),
            column([e.cat for e in events]),
            column([e.pid for e in events]),
            column([e.tid for e in events]),
            clock.times(events),
            clock.durations(events),
        )

    def _add_others(self, events: list[Event], phases: set[str | None], clock: _Clock) -> None:
        if "X" in phases:
            self.notes.add("slices without a time dropped", sum(1 for e in events if e.ph == "X"))
        if "M" in phases:
            self.metadata += [e for e in events if e.ph == "M"]
        if not phases.isdisjoint(("i", "I", "C")):
            instants = [e for e in events if e.ph in ("i", "I", "C") and e.ts is not None]
            self.instants += instants
            self.instant_times.append(clock.times(instants))
        if not phases.isdisjoint(("B", "E")):
            halves = [e for e in events if e.ph in ("B", "E") and e.ts is not None]
            self.half_parts.append(self._slices(halves, clock))
            self.half_arguments += [e.args for e in halves]
            self.half_phases += [e.ph for e in halves]
        if phases.isdisjoint(("s", "f")):
            return
        ends = [e for e in events if e.cat in _FORWARD_BACKWARD and e.ph in ("s", "f") and e.ts is not None]
        column = self.interner.column
        self.flow_parts.append(
            (
                np.array([integer(e.id, -1) for e in ends], dtype=np.int64),
                np.array([e.ph == "s" for e in ends], dtype=np.int64),
                column([e.pid for e in ends]),
                column([e.tid for e in ends]),
                clock.times(ends),
            )
        )

    def document(self, header: Header, data: FileBytes) -> KinetoDocument:
        """Everything taken over, as one."""
        columns, places = self._columns()
        if not len(columns.name):
            raise TraceError(
                f"{self.path}: none of its {self.events} events is a slice (`ph: X` with `ts`); nothing to show."
            )
        distributed = header.distributed_info if isinstance(header.distributed_info, dict) else {}
        properties = header.device_properties if isinstance(header.device_properties, list) else []
        self.notes.add("events not sorted by time", int((np.diff(columns.time) < 0).sum()))
        identifier, starts, process, thread, time = _joined(self.flow_parts, 5)
        if places is not None:
            process, thread = places[process], places[thread]
        return KinetoDocument(
            path=self.path,
            data=data,
            complete=columns,
            metadata=self.metadata,
            instants=self.instants,
            instant_times=np.concatenate(self.instant_times)
            if self.instants
            else np.zeros(0, dtype=np.int64),
            flow_ends=FlowEnds(identifier, starts, process, thread, time),
            device_properties=[p for p in properties if isinstance(p, dict)],
            distributed=distributed,
            extra=header.tracesim if isinstance(header.tracesim, dict) else {},
            base_ns=integer(header.base_time_nanoseconds, 0),
            notes=self.notes,
        )

    def _columns(self) -> tuple[Columns, Int64 | None]:
        joined = _joined(self.parts, 6)
        arguments = self.arguments
        if self.half_phases:
            joined, arguments = self._with_pairs(joined)
        name, category, process, thread, time, duration = joined
        strings, places = self.interner.strings()
        if places is not None:
            name, category, process, thread = places[name], places[category], places[process], places[thread]
        negative = duration < 0
        if negative.any():
            self.notes.add("negative durations set to 0", int(negative.sum()), strings[name[negative][0]])
            duration = np.maximum(duration, 0)
        return Columns(strings, name, category, process, thread, time, duration, arguments), places

    def _with_pairs(self, complete: list[Int64]) -> tuple[list[Int64], list[msgspec.Raw]]:
        """Complete events together with the slices that begin and end events mean."""
        halves = _joined(self.half_parts, 6)
        columns = [np.concatenate(pair_of) for pair_of in zip(complete, halves, strict=True)]
        phases = ["X"] * len(complete[0]) + self.half_phases
        threads = list(zip(columns[2].tolist(), columns[3].tolist(), strict=True))
        paired = begin_end.pair(phases, threads, columns[4], columns[5], self.arguments + self.half_arguments)
        self.notes.add("begin and end events joined", paired.pairs)
        self.notes.add("begin events without an end, ended with their thread", paired.never_ended)
        self.notes.add("end events without a begin dropped", paired.never_begun)
        columns[5] = paired.durations
        rows = paired.rows
        return [column[rows] for column in columns], [paired.arguments[i] for i in rows.tolist()]


def _joined(parts: list[tuple[Int64, ...]], width: int) -> list[Int64]:
    if not parts:
        return [np.zeros(0, dtype=np.int64) for _ in range(width)]
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


class _Clock:
    """Times of the events of one chunk."""

    def __init__(self, path: Path, chunk: Chunk, notes: Notes) -> None:
        self.path, self.chunk, self.notes = path, chunk, notes
        self._digits: dict[int, bytes] | None = None

    def times(self, events: Sequence[Event]) -> Int64:
        """When events happened, in ns."""
        values = [e.ts for e in events]
        types = set(map(type, values))
        if str in types:
            self.notes.add("times written as strings", sum(map(str.__instancecheck__, values)))
        if float in types:
            coarse = sum(1 for v in values if type(v) is float and v >= _EXACT_MICROSECONDS)
            if coarse:
                self.notes.add("epoch times with a fraction", coarse)
                digits = self._all_digits()
                return np.array([_exact(self.path, digits[id(e)]) for e in events], dtype=np.int64)
        return nanoseconds(self.path, values, types)

    def durations(self, events: Sequence[Event]) -> Int64:
        """How long events took, in ns; 0 where the file does not say."""
        values = [e.dur for e in events]
        return nanoseconds(self.path, values, set(map(type, values)))

    def _all_digits(self) -> dict[int, bytes]:
        if self._digits is None:
            written = self.chunk.time_digits()
            self._digits = {
                id(event): bytes(digits.ts) for event, digits in zip(self.chunk.events, written, strict=True)
            }
        return self._digits


def nanoseconds(path: Path, values: list[Number], types: set[type]) -> Int64:
    """Microseconds as ints, floats or strings to int64 nanoseconds; None counts as 0.

    Raises:
        TraceError: if a value is no time, or lies out of range.
    """
    if str in types:
        return np.array(
            [_exact(path, str(v).encode()) if v is not None else 0 for v in values], dtype=np.int64
        )
    if type(None) in types:
        values = [0 if v is None else v for v in values]
    try:
        if float in types:
            number = np.array(values, dtype=np.float64)
            if not np.isfinite(number).all() or (np.abs(number) > _LARGEST_MICROSECONDS).any():
                raise OverflowError
            whole = np.floor(number)
            return whole.astype(np.int64) * 1000 + np.rint((number - whole) * 1000).astype(np.int64)
        integers = np.fromiter(values, dtype=np.int64, count=len(values))
        if len(integers) and max(integers.max(), -integers.min()) > _LARGEST_MICROSECONDS:
            raise OverflowError
        return integers * 1000
    except OverflowError as error:
        raise _out_of_range(path, str(max(values, key=_magnitude))) from error


def _magnitude(value: Number) -> float:
    try:
        return abs(float(value or 0))
    except OverflowError:
        return float("inf")


def _exact(path: Path, digits: bytes) -> int:
    try:
        value = Decimal(digits[:100].decode().strip('" '))
        nanoseconds_ = round(value * 1000) if abs(value) <= _LARGEST_MICROSECONDS else None
    except (InvalidOperation, ValueError, OverflowError) as error:
        shown = digits[:40].decode(errors="replace")
        raise TraceError(f"{path}: {shown!r} is not a time in microseconds.") from error
    if nanoseconds_ is None:
        raise _out_of_range(path, str(value))
    return nanoseconds_


def _out_of_range(path: Path, value: str) -> TraceError:
    return TraceError(
        f"{path}: a time of {value[:40]} us is out of range (limit {_LARGEST_MICROSECONDS:.0e} us, 127 years). "
        "Are the times in nanoseconds? Kineto writes microseconds."
    )
