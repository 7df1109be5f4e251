"""The JSON of a torch.profiler (Kineto) trace, decoded into plain columns.

Complete events (``ph: X``), instant events and counters are kept; metadata and flow events are not: a launch is
joined to its kernels by their common correlation. ``args`` stay undecoded until a later step asks for those of the
events it needs. Times become int64 nanoseconds without passing through a float where a float would lose any.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from op_graphs.columns import Int64
from tracesim.errors import TraceError

Number: TypeAlias = int | float | str | None

_EXACT_MICROSECONDS = 2.0**43
"""Above this a double of microseconds is coarser than a nanosecond, so the digits themselves are read."""

_NO_ARGUMENTS = msgspec.Raw(b"{}")


class Event(msgspec.Struct, gc=False):
    """One entry of ``traceEvents``."""

    ph: str | None = None
    cat: str | None = None
    name: str | int | float | None = None
    pid: int | str | float | None = None
    tid: int | str | float | None = None
    ts: Number = None
    dur: Number = None
    args: msgspec.Raw = _NO_ARGUMENTS


class _Header(msgspec.Struct, gc=False, rename="camel"):
    device_properties: Any = None
    distributed_info: Any = None
    base_time_nanoseconds: Any = None
    trace_name: Any = None
    world_size: Any = None
    tracesim: Any = None


class _Document(_Header, gc=False, rename="camel"):
    trace_events: list[Event] | None = None


class _ExactEvent(msgspec.Struct, gc=False):
    ph: str | None = None
    ts: msgspec.Raw = msgspec.Raw(b"null")
    dur: msgspec.Raw = msgspec.Raw(b"null")


class _ExactDocument(msgspec.Struct, gc=False, rename="camel"):
    trace_events: list[_ExactEvent] | None = None


@dataclass
class Columns:
    """Events of one phase as columns of length ``len(name)``; ids point into ``strings``."""

    strings: list[str]
    name: Int64
    category: Int64
    process: Int64
    thread: Int64
    time: Int64
    """Nanoseconds on the file's own clock."""
    duration: Int64
    arguments: list[msgspec.Raw]


@dataclass
class KinetoDocument:
    """A decoded file."""

    path: Path
    complete: Columns
    instants: list[Event]
    instant_times: Int64
    device_properties: list[dict[str, Any]]
    distributed: dict[str, Any]
    extra: dict[str, Any]
    """What our own exporter adds under the top-level key ``tracesim``."""
    base_ns: int
    quirks: dict[str, tuple[int, str]] = field(default_factory=dict)

    def note(self, name: str, count: int, example: str = "") -> None:
        """Count something odd; nothing is recorded for a count of 0."""
        if count:
            self.quirks[name] = (count, example)


def looks_like_kineto(data: bytes) -> bool:
    """Whether bytes are Chrome-format JSON: an object with ``traceEvents`` or a list of events with ``ph``."""
    head = data[:4096].lstrip(b"\xef\xbb\xbf \t\r\n")
    if head.startswith(b"{"):
        return b'"traceEvents"' in data
    return head.startswith(b"[") and b'"ph"' in data[:65536]


def decode(path: Path, data: bytes) -> KinetoDocument:
    """A Kineto file's bytes as columns.

    Raises:
        TraceError: if the bytes are truncated or not JSON, or if the events are not shaped as trace events.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        notes: dict[str, tuple[int, str]] = {}
        document, data = _decode_document(path, data, notes)
        return _to_columns(path, data, document, notes)
    finally:
        if collecting:
            gc.enable()


def _decode_document(path: Path, data: bytes, notes: dict[str, tuple[int, str]]) -> tuple[_Document, bytes]:
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        return _parse(data), data
    except UnicodeDecodeError:
        data = data.decode("utf-8", errors="replace").encode()
        notes["invalid UTF-8 replaced"] = (1, "")
    except msgspec.ValidationError as error:
        raise TraceError(f"{path}: not shaped as a profiler trace ({error}).") from error
    except msgspec.DecodeError as error:
        if "truncated" in str(error):
            raise _damaged(path, data, error) from error
        # Profilers print bandwidths of zero-length copies as inf or nan, which JSON does not know.
        data, count = re.subn(rb'(":\s*)-?(?:nan|NaN|inf|Infinity)(?=\s*[,}])', rb"\1null", data)
        if not count:
            raise _damaged(path, data, error) from error
        notes["values that are not numbers (nan, inf)"] = (count, "")
    try:
        return _parse(data), data
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _damaged(path, data, error) from error


def _parse(data: bytes) -> _Document:
    if _is_list(data):
        return _Document(trace_events=msgspec.json.decode(data, type=list[Event]))
    return msgspec.json.decode(data, type=_Document)


def _is_list(data: bytes) -> bool:
    first = re.match(rb"\s*(.)", data)
    return first is not None and first.group(1) == b"["


def _damaged(path: Path, data: bytes, error: Exception) -> TraceError:
    if "truncated" in str(error):
        return TraceError(
            f"{path}: the JSON ends early after {len(data)} bytes; the file is truncated. Copy it again."
        )
    if "trailing characters" in str(error):
        return TraceError(
            f"{path}: more than one JSON document in the file ({error}). Split it into one file a document."
        )
    return TraceError(f"{path}: not valid JSON ({error}). Export the trace again.")


def _to_columns(
    path: Path, data: bytes, document: _Document, notes: dict[str, tuple[int, str]]
) -> KinetoDocument:
    events = document.trace_events
    if events is None:
        raise TraceError(f"{path}: the JSON has no list `traceEvents`; this is not a profiler trace.")
    usable = [e for e in events if e.ts is not None]
    complete = [e for e in usable if e.ph == "X"]
    instants = [e for e in usable if e.ph in ("i", "I", "C")]
    if not complete:
        raise TraceError(
            f"{path}: none of its {len(events)} events is a slice (`ph: X` with `ts`); nothing to show."
        )
    times, durations, instant_times, read_digits = _all_times(path, data, complete, instants)
    columns = _columns(complete, times, durations)
    distributed = document.distributed_info if isinstance(document.distributed_info, dict) else {}
    properties = document.device_properties if isinstance(document.device_properties, list) else []
    result = KinetoDocument(
        path=path,
        complete=columns,
        instants=instants,
        instant_times=instant_times,
        device_properties=[p for p in properties if isinstance(p, dict)],
        distributed=distributed,
        extra=document.tracesim if isinstance(document.tracesim, dict) else {},
        base_ns=integer(document.base_time_nanoseconds, 0),
        quirks=notes,
    )
    missing = sum(1 for e in events if e.ts is None and e.ph == "X")
    result.note("slices without a time dropped", missing)
    result.note("begin/end pairs dropped", sum(1 for e in usable if e.ph in ("B", "E")))
    result.note("times written as strings", sum(1 for e in complete if isinstance(e.ts, str)))
    result.note("epoch times with a fraction", read_digits)
    unsorted = int((np.diff(times) < 0).sum())
    result.note("events not sorted by time", unsorted)
    negative = columns.duration < 0
    if negative.any():
        result.note(
            "negative durations set to 0", int(negative.sum()), columns.strings[columns.name[negative][0]]
        )
        columns.duration = np.maximum(columns.duration, 0)
    return result


def _columns(events: Sequence[Event], times: Int64, durations: Int64) -> Columns:
    ids: dict[Any, int] = {}

    def intern(values: list[Any]) -> Int64:
        for value in dict.fromkeys(values):
            ids.setdefault(value, len(ids))
        return np.fromiter(map(ids.__getitem__, values), dtype=np.int64, count=len(values))

    name = intern([e.name for e in events])
    category = intern([e.cat for e in events])
    process = intern([e.pid for e in events])
    thread = intern([e.tid for e in events])
    strings = ["" if value is None else str(value) for value in ids]
    return Columns(strings, name, category, process, thread, times, durations, [e.args for e in events])


def _all_times(
    path: Path, data: bytes, complete: Sequence[Event], instants: Sequence[Event]
) -> tuple[Int64, Int64, Int64, int]:
    """Start and duration of slices, time of instants, and how many were read digit by digit."""
    coarse = [e for e in complete if isinstance(e.ts, float) and e.ts >= _EXACT_MICROSECONDS]
    if not coarse:
        return (
            _nanoseconds(path, [e.ts for e in complete]),
            _nanoseconds(path, [e.dur for e in complete]),
            _nanoseconds(path, [e.ts for e in instants]),
            0,
        )
    events: list[_ExactEvent]
    if _is_list(data):
        events = msgspec.json.decode(data, type=list[_ExactEvent])
    else:
        events = msgspec.json.decode(data, type=_ExactDocument).trace_events or []
    usable = [e for e in events if bytes(e.ts) != b"null"]
    kept = [e for e in usable if e.ph == "X"]
    others = [e for e in usable if e.ph in ("i", "I", "C")]
    start = np.array([_exact(path, bytes(e.ts)) for e in kept], dtype=np.int64)
    return (
        start,
        _nanoseconds(path, [e.dur for e in complete]),
        np.array([_exact(path, bytes(e.ts)) for e in others], dtype=np.int64),
        len(coarse),
    )


def _nanoseconds(path: Path, values: list[Number]) -> Int64:
    """Microseconds as ints, floats or strings to int64 nanoseconds; None counts as 0."""
    kinds = set(map(type, values))
    if str in kinds:
        return np.array(
            [_exact(path, v.encode()) if isinstance(v, str) else round((v or 0) * 1000) for v in values],
            dtype=np.int64,
        )
    if type(None) in kinds:
        values = [0 if v is None else v for v in values]
    try:
        if float in kinds:
            number = np.array(values, dtype=np.float64)
            if not np.isfinite(number).all() or (np.abs(number) > 9e15).any():
                raise OverflowError
            whole = np.floor(number)
            return whole.astype(np.int64) * 1000 + np.rint((number - whole) * 1000).astype(np.int64)
        integers = np.array(values, dtype=np.int64)
        if len(integers) and np.abs(integers).max() > 9_000_000_000_000_000:
            raise OverflowError
        return integers * 1000
    except OverflowError as error:
        raise TraceError(
            f"{path}: a time of {max(values, key=_magnitude)} us is out of range (limit 9e15 us, 285 years). "
            "Are the times in nanoseconds? Kineto writes microseconds."
        ) from error


def _magnitude(value: Number) -> float:
    return abs(float(value or 0))


def _exact(path: Path, digits: bytes) -> int:
    try:
        value = Decimal(digits.decode().strip('" '))
        nanoseconds = round(value * 1000)
    except (InvalidOperation, ValueError, OverflowError) as error:
        raise TraceError(
            f"{path}: {digits.decode(errors='replace')!r} is not a time in microseconds."
        ) from error
    if abs(nanoseconds) > 9_000_000_000_000_000_000:
        raise TraceError(f"{path}: a time of {value} us is out of range (limit 9e15 us, 285 years).")
    return nanoseconds


def integer(value: Any, default: int) -> int:  # noqa: ANN401
    """An int out of what exporters write for one: int, float, ``"12"``, ``"stream 7"``; else the default."""
    if isinstance(value, bool) or value is None:
        return default
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if value == value and abs(value) < 9e18 else default
    match = re.search(r"-?\d+", str(value))
    return int(match.group()) if match else default
