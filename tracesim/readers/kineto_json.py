"""The JSON of a torch.profiler (Kineto) trace, decoded event by event in chunks.

A large file is cut between events, so that the decoded objects of one chunk are gone before the next is decoded: memory
stays near the size of the file and progress can be shown. ``args`` stay undecoded: they are views of the file's bytes,
of which no copy is made. What a chunk needs around it to be JSON is written over its neighbours while it is decoded.
Several documents in one file are read one after another; what follows the last one is ignored and counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import msgspec

from tracesim.errors import TraceError
from tracesim.readers.sources import FileBytes

Number: TypeAlias = int | float | str | None

CHUNK = 8 << 20
"""Bytes decoded at once."""

_NO_ARGUMENTS = msgspec.Raw(b"{}")
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN_EVENTS = re.compile(rb'\}\s*,\s*\{\s*"(?:ph|name|cat|pid|tid|ts|id|dur|args)"')
_NOT_NUMBERS = re.compile(rb'(":\s*)-?(?:nan|NaN|inf|Infinity)(?=\s*[,}])')
_OPENING = re.compile(rb"\s*([\[{])")
_AHEAD = re.compile(rb"(?:\xef\xbb\xbf)?\s*")
_MOST_TRIES = 8
_LARGEST = 9_000_000_000_000_000_000
_SPACE = b"\xef\xbb\xbf \t\r\n"


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
    id: Number = None


_KnownPhase = Literal["X", "B", "E", "i", "I", "C", "M", "s", "t", "f", "b", "e", "n", None]
_KnownCategory = Literal[
    "cpu_op", "kernel", "cuda_runtime", "cuda_driver", "python_function", "ac2g", "fwdbwd", "async_cpu_to_gpu",
    "user_annotation", "gpu_user_annotation", "gpu_memcpy", "gpu_memset", "cpu_instant_event", "Trace", "overhead",
    "cuda_sync", "mtia_ccp_events", "mtia_runtime", "xpu_runtime", "Kernel", "Operator", "Runtime", "Memcpy", "Memset",
    None,
]  # fmt: skip


class _KnownEvent(Event, gc=False):
    """An event of a phase and category that are usual: their texts are shared, not made anew for each event."""

    ph: _KnownPhase = None
    cat: _KnownCategory = None
    name: str | int | float | None = None
    pid: int | str | float | None = None
    tid: int | str | float | None = None
    ts: Number = None
    dur: Number = None
    args: msgspec.Raw = _NO_ARGUMENTS
    id: Number = None


class TimeDigits(msgspec.Struct, gc=False):
    """The time of an event as it is written."""

    ts: msgspec.Raw = msgspec.Raw(b"null")


class Header(msgspec.Struct, gc=False, rename="camel"):
    """What stands beside the events."""

    device_properties: Any = None
    distributed_info: Any = None
    base_time_nanoseconds: Any = None
    tracesim: Any = None


class _Document(Header, gc=False, rename="camel"):
    trace_events: list[Event] | None = None


class _KnownDocument(Header, gc=False, rename="camel"):
    trace_events: list[_KnownEvent] | None = None


class _LooseDocument(Header, gc=False, rename="camel"):
    trace_events: list[msgspec.Raw] | None = None


class _TimeDocument(msgspec.Struct, gc=False, rename="camel"):
    trace_events: list[TimeDigits] | None = None


@dataclass
class Notes:
    """Oddities found while reading: how often, and one example."""

    found: dict[str, tuple[int, str]] = field(default_factory=dict)

    def add(self, name: str, count: int, example: str = "") -> None:
        """Count something odd, on top of what was counted before; nothing is recorded for a count of 0."""
        if count:
            before, first = self.found.get(name, (0, ""))
            self.found[name] = (before + count, first or example)


@dataclass(frozen=True)
class Chunk:
    """Some events of a file, in order."""

    events: list[Event]
    _piece: bytes | memoryview
    """JSON of a list of the events, or of a document with them; while the chunk is handed over."""

    def time_digits(self) -> list[TimeDigits]:
        """The times of the events as they are written."""
        if _is_list(self._piece):
            return msgspec.json.decode(self._piece, type=list[TimeDigits])
        return msgspec.json.decode(self._piece, type=_TimeDocument).trace_events or []


def looks_like_kineto(data: FileBytes) -> bool:
    """Whether bytes are Chrome-format JSON: an object with ``traceEvents`` or a list of events with ``ph``."""
    head = data[:4096].lstrip(_SPACE)
    if head.startswith(b"{"):
        return b'"traceEvents"' in data
    return head.startswith(b"[") and b'"ph"' in data[:65536]


def decode(
    path: Path,
    data: FileBytes,
    sink: Callable[[Chunk], None],
    notes: Notes,
    progress: Callable[[int], None] = lambda position: None,
) -> Header:
    """Hand the events of a file to ``sink`` chunk by chunk, and return what stands beside them.

    Args:
        path: named in messages.
        data: the file, unpacked. A bytearray is written to in passing; when this returns or raises it is as it was.
        sink: takes each chunk.
        notes: takes what was odd.
        progress: is told how many bytes are done.

    Raises:
        TraceError: if the bytes are truncated or not JSON, or if the events are not shaped as trace events.
    """
    return _Decoder(path, data, sink, notes, progress).run()


class _Decoder:
    """One pass over the documents of a file."""

    def __init__(
        self,
        path: Path,
        data: FileBytes,
        sink: Callable[[Chunk], None],
        notes: Notes,
        progress: Callable[[int], None],
    ) -> None:
        data = data if isinstance(data, bytearray) else bytearray(data)
        self.path, self.data, self.sink, self.notes, self.progress = path, data, sink, notes, progress
        self.event = msgspec.json.Decoder(Event)
        self.events = msgspec.json.Decoder(list[Event])
        self.document = msgspec.json.Decoder(_Document)
        self.known_events = msgspec.json.Decoder(list[_KnownEvent])
        self.known_document = msgspec.json.Decoder(_KnownDocument)
        self.all_known = True

    def run(self) -> Header:
        header, end = self._document(_AHEAD.match(self.data).end())  # type: ignore[union-attr]
        while end < len(self.data):
            rest = self.data[end : end + 65536].lstrip(_SPACE + b",\0")
            if not rest:
                break
            if not looks_like_kineto(rest):
                self.notes.add("bytes after the end of the JSON ignored", len(self.data) - end)
                break
            self.notes.add("further JSON documents in the file, joined", 1)
            following, end = self._document(self.data.index(rest[:1], end))
            for name in Header.__struct_fields__:
                if getattr(header, name) is None:
                    setattr(header, name, getattr(following, name))
        return header

    def _document(self, start: int) -> tuple[Header, int]:
        """Decode the document that begins at ``start``; its header, and where it ends."""
        head, position = self._chunks(start)
        opening = b"" if head is None else b"[" if _is_list(self.data, start) else b'{"traceEvents": ['
        with self._framed(opening, position, len(self.data)) as piece:
            tail, used = self._last(piece, position - len(opening))
        self.progress(len(self.data))
        if head is not None:
            for name in Header.__struct_fields__:
                if getattr(tail, name) is None:
                    setattr(tail, name, getattr(head, name))
        return tail, position - len(opening) + used

    def _chunks(self, start: int) -> tuple[Header | None, int]:
        """Decode chunks while there is enough left; the head of the document (None if untouched), and how far."""
        data = self.data
        if len(data) - start <= 2 * CHUNK:
            return None, start
        if _is_list(data, start):
            head, position = Header(), data.index(b"[", start) + 1
        else:
            found = _EVENTS_KEY.search(data, start)
            if found is None:
                return None, start
            try:
                head = msgspec.json.decode(data[start : found.end() - 1] + b"null}", type=Header)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return None, start
            position = found.end()
        first = position
        while len(data) - position > 2 * CHUNK:
            after = self._one_chunk(position)
            if after < 0:
                break
            position = after
            self.progress(position)
        return (head, position) if position > first else (None, start)

    @contextmanager
    def _framed(self, opening: bytes, start: int, stop: int, closing: bytes = b"") -> Iterator[memoryview]:
        """The bytes from ``start`` to ``stop`` with others over those before and after, which come back in the end."""
        data = self.data
        before, after = slice(start - len(opening), start), slice(stop, stop + len(closing))
        was_before, was_after = data[before], data[after]
        with memoryview(data) as view:
            view[before], view[after] = opening, closing
            try:
                yield view[before.start : after.stop]
            finally:
                view[before], view[after] = was_before, was_after

    def _one_chunk(self, position: int) -> int:
        """Decode events from ``position`` on, and return where the next one begins; -1 if no cut was found."""
        for tries, found in enumerate(_BETWEEN_EVENTS.finditer(self.data, position + CHUNK)):
            if tries == _MOST_TRIES:
                return -1
            with self._framed(b"[", position, found.start() + 1, b"]") as piece:
                try:
                    events, repaired = self._repaired(piece, self._list)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    # A look-alike inside a string or an argument: what precedes it does not balance.
                    continue
                self.sink(Chunk(events, repaired))
            return self.data.index(b",", found.start()) + 1
        return -1

    def _last(self, piece: memoryview, offset: int) -> tuple[Header, int]:
        """Decode the end of a document: its header, and the bytes of the piece that it takes."""
        used = len(piece)
        decode = self._list_document if _is_list(piece) else self._object_document
        try:
            try:
                document, repaired = self._repaired(piece, decode)
            except msgspec.DecodeError as error:
                position = _trailing(error)
                if position is None:
                    raise
                used = position
                document, repaired = self._repaired(piece[:used], decode)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._damaged(error, offset) from error
        except RecursionError as error:
            raise TraceError(
                f"{self.path}: nested too deeply to be a profiler trace. Export it again."
            ) from error
        if document.trace_events is None:
            raise TraceError(
                f"{self.path}: the JSON has no list `traceEvents`; this is not a profiler trace."
            )
        self.sink(Chunk(document.trace_events, repaired))
        return document, used

    def _repaired(
        self, piece: bytes | memoryview, decode: Callable[[bytes | memoryview], Any]
    ) -> tuple[Any, bytes | memoryview]:
        """What ``decode`` makes of a piece, after what JSON forbids and profilers write was replaced."""
        try:
            return decode(piece), piece
        except UnicodeDecodeError:
            repaired = bytes(piece).decode("utf-8", errors="replace").encode()
            what, count = "invalid UTF-8 replaced", 1
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError as error:
            if "truncated" in str(error) or _trailing(error) is not None:
                raise
            # Profilers print bandwidths of zero-length copies as inf or nan, which JSON does not know.
            repaired, count = _NOT_NUMBERS.subn(rb"\1null", bytes(piece))
            what = "values that are not numbers (nan, inf)"
            if not count:
                raise
        result = self._repaired(repaired, decode)
        self.notes.add(what, count)
        return result

    def _list(self, piece: bytes | memoryview) -> list[Event]:
        if self.all_known:
            try:
                return cast(list[Event], self.known_events.decode(piece))
            except msgspec.ValidationError:
                self.all_known = False
        try:
            return self.events.decode(piece)
        except msgspec.ValidationError:
            return self._one_by_one(msgspec.json.decode(piece, type=list[msgspec.Raw]))

    def _list_document(self, piece: bytes | memoryview) -> _Document:
        return _Document(trace_events=self._list(piece))

    def _object_document(self, piece: bytes | memoryview) -> _Document | _KnownDocument:
        if self.all_known:
            try:
                return self.known_document.decode(piece)
            except msgspec.ValidationError:
                self.all_known = False
        try:
            return self.document.decode(piece)
        except msgspec.ValidationError as error:
            try:
                loose = msgspec.json.decode(piece, type=_LooseDocument)
            except msgspec.ValidationError:
                raise TraceError(f"{self.path}: not shaped as a profiler trace ({error}).") from error
            values = {name: getattr(loose, name) for name in Header.__struct_fields__}
            return _Document(**values, trace_events=self._one_by_one(loose.trace_events or []))

    def _one_by_one(self, raw: list[msgspec.Raw]) -> list[Event]:
        """Events decoded each for itself; one that is shaped wrongly becomes an empty event."""
        return [self._alone(entry) for entry in raw]

    def _alone(self, raw: msgspec.Raw) -> Event:
        try:
            return self.event.decode(raw)
        except msgspec.ValidationError:
            example = bytes(raw)[:60].decode("utf-8", "replace")
            self.notes.add("events with values of a wrong type dropped", 1, example)
            return Event()

    def _damaged(self, error: Exception, offset: int) -> TraceError:
        text = re.sub(r"byte (\d+)", lambda found: f"byte {int(found[1]) + offset}", str(error))
        if "truncated" in text:
            return TraceError(
                f"{self.path}: the JSON ends early after {len(self.data)} bytes; the file is truncated. Copy it again."
            )
        return TraceError(f"{self.path}: not valid JSON ({text}). Export the trace again.")


def _is_list(data: FileBytes | memoryview, start: int = 0) -> bool:
    found = _OPENING.match(data, start)
    return found is not None and found.group(1) == b"["


def _trailing(error: Exception) -> int | None:
    """Where the bytes begin that follow a document, if they are the error."""
    found = re.search(r"trailing characters \(byte (\d+)\)", str(error))
    return int(found.group(1)) - 1 if found else None


def integer(value: Any, default: int) -> int:  # noqa: ANN401
    """An int out of what exporters write for one: int, float, ``"12"``, ``"stream 7"``; else the default."""
    if isinstance(value, bool) or value is None:
        return default
    if isinstance(value, float):
        return int(value) if abs(value) < _LARGEST else default
    if not isinstance(value, int):
        match = re.search(r"-?\d{1,30}", str(value))
        if match is None:
            return default
        value = int(match.group())
    return value if abs(value) < _LARGEST else default
