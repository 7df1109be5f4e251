"""Reader of Nsight Systems traces exported to SQLite (``nsys export --type sqlite``): CUPTI and NVTX tables."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from op_graphs.timeline import Timeline
from op_graphs.vocabulary import Communication, FlowKind, OpKind, TrackRole
from tracesim.errors import TraceError
from tracesim.kernel_kinds import classify_kernels
from tracesim.readers.assembled import AssembledTimeline
from tracesim.readers.sources import Source

_MAGIC = b"SQLite format 3\x00"
_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
_LARGEST = 4_000_000_000_000_000_000
_THREAD_BITS = 0xFFFFFF
"""A global thread id holds process and thread in 24 bits each."""


def recognise(source: Source) -> bool:
    """Whether a file is an SQLite database."""
    return source.data.startswith(_MAGIC)


def read(source: Source) -> Timeline:
    """Kernels, copies and fills by device and stream, runtime calls and NVTX ranges by thread.

    Raises:
        TraceError: if the database is damaged or no export of Nsight Systems.
    """
    # The module reads databases from a path only (before Python 3.11).
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.sqlite"
        path.write_bytes(source.data)
        try:
            with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
                database.text_factory = lambda data: data.decode("utf-8", "replace")
                return _Export(source, database).timeline()
        except (sqlite3.Error, TypeError, ValueError, OverflowError) as error:
            raise TraceError(
                f"{source.path}: damaged, or an export of another version ({str(error)[:200]}). Export it again."
            ) from error


class _Export:
    """One database being read."""

    def __init__(self, source: Source, database: sqlite3.Connection) -> None:
        self.source, self.database = source, database
        self.built = AssembledTimeline(source.path)
        self.rank = self.built.rank(-1)
        names = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        self.tables = {str(row[0]) for row in names}
        self.launches: dict[int, int] = {}
        self.strings: dict[int, str] = {}

    def timeline(self) -> Timeline:
        if not any(t.startswith("CUPTI_ACTIVITY_KIND_") or t == "NVTX_EVENTS" for t in self.tables):
            raise TraceError(
                f"{self.source.path}: an SQLite database without CUPTI or NVTX tables. "
                "Export the report with `nsys export --type sqlite`."
            )
        self.strings = {int(k): str(v) for k, v in self._rows("StringIds", ("id", "value"))}
        self._runtime()
        self._device()
        self._ranges()
        device = next(iter(self._rows("TARGET_INFO_GPU", ("name",))), ("",))[0]
        return self.built.timeline(device=str(device or ""), properties={"format": "nsys"})

    def _rows(self, table: str, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Rows of a table if it is there; columns that the version lacks are None."""
        if table not in self.tables:
            return
        present = {str(row[1]) for row in self.database.execute(f'PRAGMA table_info("{table}")')}
        chosen = ", ".join(f'"{c}"' if c in present else "NULL" for c in columns)
        yield from self.database.execute(f'SELECT {chosen} FROM "{table}"').fetchall()

    def _runtime(self) -> None:
        for start, end, thread, correlation, name in self._rows(
            "CUPTI_ACTIVITY_KIND_RUNTIME", ("start", "end", "globalTid", "correlationId", "nameId")
        ):
            number = int(thread or 0) & _THREAD_BITS
            track = self.built.track(self.rank, TrackRole.HOST, number, f"thread {number}")
            text = self.strings.get(name, str(name)).partition("_v")[0]
            row = self.built.add(
                track, *_span(start, end), text, kind=OpKind.HOST, correlation=_correlation(correlation)
            )
            if correlation is not None:
                self.launches.setdefault(int(correlation), row)

    def _device(self) -> None:
        kernels = list(
            self._rows(
                "CUPTI_ACTIVITY_KIND_KERNEL",
                ("start", "end", "deviceId", "streamId", "correlationId", "demangledName"),
            )
        )
        names = [self.strings.get(k[5], str(k[5])) for k in kernels]
        kinds, transfers = classify_kernels(names)
        lost = 0
        for (*place, _), name, kind, transfer in zip(
            kernels, names, kinds.tolist(), transfers.tolist(), strict=True
        ):
            lost += self._add(place, name, kind=OpKind(kind), communication=Communication(transfer))
        columns = ("start", "end", "deviceId", "streamId", "correlationId", "bytes")
        for *place, size, kind in self._rows("CUPTI_ACTIVITY_KIND_MEMCPY", (*columns, "copyKind")):
            self._add(
                place, f"Memcpy {_COPIES.get(kind, 'other')}", kind=OpKind.MEMCPY, bytes=float(size or 0)
            )
        for *place, size in self._rows("CUPTI_ACTIVITY_KIND_MEMSET", columns):
            self._add(place, "Memset", kind=OpKind.MEMSET, bytes=float(size or 0))
        self.built.notes.add("device slices without a launch", lost)

    def _add(self, place: list[Any], name: str, **columns: Any) -> bool:  # noqa: ANN401
        """A device slice and its launch arrow; whether it has no launch."""
        start, end, device, stream, correlation = place
        label = (
            f"GPU {int(device or 0)} stream {int(stream or 0)}" if device else f"stream {int(stream or 0)}"
        )
        track = self.built.track(
            self.rank, TrackRole.DEVICE, int(stream or 0) + (int(device or 0) << 32), label
        )
        row = self.built.add(
            track, *_span(start, end), name, correlation=_correlation(correlation), **columns
        )
        launch = self.launches.get(int(correlation)) if correlation is not None else None
        if launch is not None:
            self.built.flow(launch, row, FlowKind.LAUNCH)
        return launch is None

    def _ranges(self) -> None:
        marks = 0
        for start, end, text, text_id, thread in self._rows(
            "NVTX_EVENTS", ("start", "end", "text", "textId", "globalTid")
        ):
            if end is None:
                marks += 1
                continue
            number = int(thread or 0) & _THREAD_BITS
            track = self.built.track(
                self.rank, TrackRole.ANNOTATION, number, f"annotations of thread {number}"
            )
            name = str(text) if text is not None else self.strings.get(text_id, "")
            self.built.add(track, *_span(start, end), name, kind=OpKind.ANNOTATION)
        self.built.notes.add("NVTX marks and registrations without an end left out", marks)


def _correlation(value: Any) -> int:  # noqa: ANN401
    return int(value) if value is not None else -1


def _span(start: Any, end: Any) -> tuple[int, int]:  # noqa: ANN401
    """Start and duration; refuses times that do not fit."""
    first, last = int(start), int(end if end is not None else start)
    if max(abs(first), abs(last)) > _LARGEST:
        raise ValueError(f"a time of {first} ns is out of range")
    return first, max(last - first, 0)
