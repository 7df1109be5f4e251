"""Counters out of the instant and counter events of a Kineto file: ``[memory]`` events and ``ph: C``."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np

from op_graphs.columns import Float64, Int64, StringTable
from op_graphs.timeline import CounterSamples, CounterTracks
from tracesim.readers.kineto_arguments import MemoryArguments, decode_arguments, integers
from tracesim.readers.kineto_columns import KinetoDocument
from tracesim.readers.kineto_json import Event

_DEVICE_TYPE = 1
"""``c10::DeviceType::CUDA``; 0 is the host."""


class Curve(NamedTuple):
    """A counter of one rank; times in ns, in any order."""

    name: str
    times: Int64
    values: Float64
    is_bytes: bool = True


def memory_counters(
    document: KinetoDocument, strings: StringTable, base: int, host_only: bool = False
) -> tuple[CounterTracks, CounterSamples]:
    """Counter tracks of one rank (row 0): allocated and reserved device memory in bytes.

    Where the file has no totals (first form of the format) the allocated curve is the running sum of the changes, so
    it starts at 0. Without memory events both tables are empty. In a trace without a device (``host_only``) the memory
    is the host's.
    """
    chosen = [i for i, event in enumerate(document.instants) if event.name == "[memory]"]
    decoded = decode_arguments([document.instants[i].args for i in chosen], MemoryArguments)
    times = document.instant_times[chosen] - base if chosen else np.zeros(0, dtype=np.int64)
    on_device = integers([a.device_type for a in decoded], 0) == _DEVICE_TYPE
    if host_only and not on_device.any():
        on_device = np.ones(len(decoded), dtype=np.bool_)
    device_id = np.where(on_device, integers([a.device_id for a in decoded], 0), -2)
    curves: list[Curve] = []
    for device in np.unique(device_id[on_device]).tolist():
        mine = np.flatnonzero(device_id == device)
        mine = mine[np.argsort(times[mine], kind="stable")]
        label = "" if device <= 0 else f" of device {device}"
        curves += _curves([decoded[k] for k in mine.tolist()], times[mine], label)
    curves += _counters(document.instants, document.instant_times - base)
    return curve_tables(curves, strings)


def _curves(events: list[MemoryArguments], times: Int64, label: str) -> list[Curve]:
    totals = [a.allocated for a in events]
    if None not in totals:
        allocated, reserved = integers(totals, 0), integers([a.reserved for a in events], 0)
        return [
            Curve(f"allocated{label}", times, allocated.astype(np.float64)),
            Curve(f"reserved{label}", times, reserved.astype(np.float64)),
        ]
    running = np.cumsum(integers([a.change for a in events], 0).astype(np.float64))
    return [Curve(f"allocated since the start of the trace{label}", times, running)]


def _counters(events: list[Event], times: Int64) -> list[Curve]:
    """Counter events (``ph: C``): a curve for each name and each of its arguments."""
    found: dict[str, tuple[list[int], list[float], bool]] = {}
    for event, time in zip(events, times.tolist(), strict=True):
        if event.ph != "C":
            continue
        values = _decoded(event.args)
        for key, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, (int, float)) and abs(value) < 1e300:
                name = str(event.name) if len(values) == 1 else f"{event.name} {key}"
                curve = found.setdefault(name, ([], [], key == "bytes"))
                curve[0].append(time)
                curve[1].append(float(value))
    return [
        Curve(name, np.array(at, dtype=np.int64), np.array(values), in_bytes)
        for name, (at, values, in_bytes) in found.items()
    ]


def _decoded(raw: msgspec.Raw) -> Any:  # noqa: ANN401
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def curve_tables(curves: list[Curve], strings: StringTable) -> tuple[CounterTracks, CounterSamples]:
    """The counter tracks and samples of one rank (row 0)."""
    if not curves:
        return CounterTracks.empty(), CounterSamples.empty()
    tracks = CounterTracks.from_rows(
        {"rank": 0, "name": strings.intern(curve.name), "category": -1, "is_bytes": curve.is_bytes}
        for curve in curves
    )
    parts = []
    for track, curve in enumerate(curves):
        order = np.argsort(curve.times, kind="stable")
        values = curve.values[order]
        parts.append(CounterSamples(np.full(len(order), track), curve.times[order], values))
    samples = CounterSamples.concatenate(parts)
    return tracks, samples
