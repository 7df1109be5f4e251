"""What a profiler file says beyond the columns of a timeline, kept for conversion: categories, places, arguments.

Arguments are brought to one form (compact, raw UTF-8, keys in their order), so that equal arguments are equal text
whatever program wrote them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from op_graphs.columns import Int32, Int64, StringTable
from op_graphs.timeline import Origins, Timeline
from tracesim.readers.kineto_columns import KinetoDocument

METADATA = "metadata events"
"""Entry of a header that holds the metadata events of the file."""


def canonical_arguments(raw: Iterable[bytes | msgspec.Raw]) -> tuple[Int64, bytes]:
    """Offsets and text of arguments in one form; what is no object is kept under the key ``args``."""
    decode, encode = msgspec.json.decode, msgspec.json.encode
    known: dict[bytes, bytes] = {b"{}": b"", b"": b"", b"null": b""}
    pieces = []
    for arguments in raw:
        piece = bytes(arguments)
        found = known.get(piece)
        if found is None:
            value = decode(piece)
            found = (
                encode(value if isinstance(value, dict) else {"args": value})
                if value not in ({}, None)
                else b""
            )
        pieces.append(found)
    lengths = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)]), b"".join(pieces)


def file_header(document: KinetoDocument) -> str:
    """The JSON object of what a file holds beside its events, with the metadata events (``ph: M``) as one entry."""
    try:
        entries = msgspec.json.decode(document.data, type=dict[str, msgspec.Raw])
        header = {key: msgspec.json.decode(value) for key, value in entries.items() if key != "traceEvents"}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # A bare list, or a file that the reader had to repair: what it made of the head is what there is.
        header = {"deviceProperties": document.device_properties, "distributedInfo": document.distributed}
    header[METADATA] = [
        {"ph": "M", "name": e.name, "pid": e.pid, "tid": e.tid, "args": _value(e.args)}
        for e in document.metadata
    ]
    return msgspec.json.encode(header).decode()


def _value(raw: msgspec.Raw) -> Any:  # noqa: ANN401
    return msgspec.json.decode(raw)


def with_origins(timeline: Timeline, document: KinetoDocument, event: Int64) -> Timeline:
    """The timeline of one file with its origins.

    Args:
        timeline: of one rank; its strings begin with those of the document.
        document: the file it was read from.
        event: row of each slice in the document's columns, shape [slices].
    """
    columns = document.complete
    offsets, text = canonical_arguments([columns.arguments[i] for i in event.tolist()])
    category = columns.category[event]
    unnamed = columns.strings.index("") if "" in columns.strings else -1
    origins = Origins(
        np.where(category == unnamed, -1, category).astype(np.int32),
        columns.process[event].astype(np.int32),
        columns.thread[event].astype(np.int32),
        offsets,
        text,
        (file_header(document),),
    )
    return _with_thread_names(replace(timeline, origins=origins))


def _with_thread_names(timeline: Timeline) -> Timeline:
    """Tracks of threads that have a text for a number are named by it; equal names tell their process."""
    origins, tracks, strings = timeline.origins, timeline.tracks, StringTable(timeline.strings)
    assert origins is not None
    used, first = np.unique(timeline.slices.track, return_index=True)
    names = tracks.name.copy()
    unnumbered = tracks.stream[used] < -1
    names[used[unnumbered]] = origins.thread[first[unnumbered]]
    often = np.bincount(names[used], minlength=len(timeline.strings)) > 1
    for track, row in zip(used.tolist(), first.tolist(), strict=True):
        if often[names[track]]:
            process = timeline.string(int(origins.process[row]))
            names[track] = strings.intern(f"{timeline.string(int(names[track]))} of process {process}")
    return replace(timeline, tracks=tracks.with_columns(name=names), strings=strings.strings())


def joined(parts: Sequence[Timeline], string_maps: Sequence[Int32]) -> Origins | None:
    """The origins of several timelines after one another, their string ids mapped; None where no part has any.

    The last entry of a string map stands for -1.
    """
    if all(part.origins is None for part in parts):
        return None
    kept = [part.origins if part.origins is not None else without_origin(part) for part in parts]
    ends = np.cumsum([0] + [len(o.text) for o in kept])
    offsets = [o.offsets[:-1] + end for o, end in zip(kept, ends, strict=False)]
    return Origins(
        np.concatenate([m[o.category] for o, m in zip(kept, string_maps, strict=True)]).astype(np.int32),
        np.concatenate([m[o.process] for o, m in zip(kept, string_maps, strict=True)]).astype(np.int32),
        np.concatenate([m[o.thread] for o, m in zip(kept, string_maps, strict=True)]).astype(np.int32),
        np.concatenate([*offsets, ends[-1:]]).astype(np.int64),
        b"".join(o.text for o in kept),
        tuple(header for o in kept for header in o.headers),
    )


def without_origin(part: Timeline) -> Origins:
    """Origins that say nothing, for a part that has none beside others that have."""
    count = len(part.slices)
    unknown = np.full(count, -1, dtype=np.int32)
    return Origins(
        unknown, unknown, unknown, np.zeros(count + 1, dtype=np.int64), b"", ("",) * len(part.ranks)
    )
