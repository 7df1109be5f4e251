"""Reader of PyTorch memory snapshots (``torch.cuda.memory._dump_snapshot``): what the allocator did, as curves.

The pickle is read by an unpickler that can create dicts, lists, tuples, strings and numbers and nothing else. The
curves end at what the segments hold and go back from there by the recorded events, so that memory taken before
recording began is in them. Segments that come and go, out-of-memory errors and annotations become slices.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import Any

import numpy as np

from op_graphs.columns import Int64
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import OpKind, TrackRole
from tracesim.errors import TraceError
from tracesim.readers.assembled import AssembledTimeline
from tracesim.readers.kineto_json import integer
from tracesim.readers.sources import Source

_ROUND = 512
"""Bytes to which PyTorch's allocator rounds a request up."""

_LARGEST = 1 << 52
"""Largest time in us (142 years) and size in bytes that is believed."""

_STEP = re.compile(r"ProfilerStep#?\s*(\d{1,18})")
_ALLOCATED = {"alloc": 1, "free_requested": -1}
_RESERVED = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


class _PlainUnpickler(pickle.Unpickler):
    """Reads plain containers and refuses to import anything."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401
        raise pickle.UnpicklingError(f"it would import {module}.{name}, which a snapshot does not")


def recognise(source: Source) -> bool:
    """Whether a file is a pickle of protocol 2 to 5."""
    return source.data[:1] == b"\x80" and source.data[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")


def read(source: Source) -> Timeline:
    """Curves of allocated and reserved memory; one rank, named by the file.

    Raises:
        TraceError: if the pickle is damaged, holds anything but plain containers, or is no snapshot.
    """
    try:
        snapshot = _PlainUnpickler(io.BytesIO(source.data)).load()
    # A damaged pickle can fail in any of the ways a stack machine can.
    except Exception as error:
        text = str(error)[:200] or type(error).__name__
        raise TraceError(f"{source.path}: not a readable memory snapshot ({text}). Dump it again.") from error
    if not isinstance(snapshot, dict) or not isinstance(snapshot.get("device_traces"), list):
        raise TraceError(
            f"{source.path}: a pickle without `device_traces`, so no memory snapshot. "
            "Write one with torch.cuda.memory._dump_snapshot."
        )
    built = AssembledTimeline(source.path)
    rank = built.rank(-1)
    segments = _dicts(snapshot.get("segments"))
    traces = snapshot["device_traces"]
    devices = {d for d, trace in enumerate(traces) if trace} | {integer(s.get("device"), 0) for s in segments}
    for device in sorted(devices):
        label = "" if len(devices) == 1 else f" of device {device}"
        events = _dicts(traces[device]) if 0 <= device < len(traces) else []
        mine = [s for s in segments if integer(s.get("device"), 0) == device]
        _curves(built, rank, label, events, mine)
        _slices(built, rank, label, device, events)
    _annotations(built, rank, _dicts(snapshot.get("external_annotations")))
    settings = snapshot.get("allocator_settings")
    described = (
        {k: str(v)[:200] for k, v in settings.items() if not isinstance(v, dict)}
        if isinstance(settings, dict)
        else {}
    )
    return built.timeline(
        properties={"format": "memory snapshot", **{f"allocator {k}": v for k, v in described.items() if v}}
    )


def _dicts(value: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, (list, tuple)) else []


def _curves(
    built: AssembledTimeline,
    rank: int,
    label: str,
    events: list[dict[str, Any]],
    segments: list[dict[str, Any]],
) -> None:
    actions = [e.get("action") for e in events]
    times, sizes = _bounded([e.get("time_us") for e in events]), _bounded([e.get("size") for e in events])
    sizes = np.maximum(sizes, 0)
    built.notes.add("allocator events without a time", sum("time_us" not in e for e in events))
    for name, signs, rounded, key in (
        ("allocated", _ALLOCATED, _ROUND, "allocated_size"),
        ("reserved", _RESERVED, 1, "total_size"),
    ):
        sign = np.array([signs.get(a, 0) if isinstance(a, str) else 0 for a in actions], dtype=np.int64)
        change = (sign * (-(-sizes // rounded) * rounded)).astype(np.float64)
        end = float(np.maximum(_bounded([s.get(key) for s in segments]), 0).astype(np.float64).sum())
        level = end - float(change.sum()) + np.cumsum(change)
        moved = np.flatnonzero(sign)
        below = -min(float(level.min()) if len(level) else 0.0, 0.0)
        if below:
            built.notes.add(
                f"{name} memory lifted so that it is never below 0", 1, f"by {below / 2**20:.3g} MiB"
            )
        at, values = (times[moved] * 1000, level[moved] + below) if len(moved) else (times[:1] * 1000, [end])
        if len(at) or end:
            built.counter(rank, f"{name}{label}", at if len(at) else [0], values if len(at) else [end])


def _bounded(values: list[Any]) -> Int64:
    found = [integer(v, 0) for v in values]
    return np.array([v if abs(v) < _LARGEST else 0 for v in found], dtype=np.int64)


def _slices(
    built: AssembledTimeline, rank: int, label: str, device: int, events: list[dict[str, Any]]
) -> None:
    shown = [
        e
        for e in events
        if str(e.get("action")).startswith("segment_") or e.get("action") in ("oom", "snapshot")
    ]
    for event in shown:
        track = built.track(rank, TrackRole.ANNOTATION, device, f"allocator{label}")
        size = max(int(_bounded([event.get("size")])[0]), 0)
        name = f"{event['action']} {size / 2**20:.3g} MiB"
        at = int(_bounded([event.get("time_us")])[0]) * 1000
        built.add(track, at, 0, name, kind=OpKind.ANNOTATION, bytes=float(size))
    built.notes.add("out-of-memory errors", sum(e.get("action") == "oom" for e in events))


def _annotations(built: AssembledTimeline, rank: int, entries: list[dict[str, Any]]) -> None:
    """Begin and end marks of user annotations, matched by name, last in, first out."""
    open_marks: dict[str, list[int]] = {}
    for entry in entries:
        name, at = str(entry.get("name"))[:200], int(_bounded([entry.get("time_us")])[0]) * 1000
        if entry.get("stage") == "START":
            open_marks.setdefault(name, []).append(at)
        elif open_marks.get(name):
            start = open_marks[name].pop()
            track = built.track(rank, TrackRole.ANNOTATION, -1, "annotations")
            built.add(track, start, max(at - start, 0), name, kind=OpKind.ANNOTATION)
            step = _STEP.match(name)
            if step:
                built.step(rank, int(step[1]), start, max(at, start))
