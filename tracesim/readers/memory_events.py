"""Counters out of the instant and counter events of a Kineto file: ``[memory]`` events and ``ph: C``."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np

from op_graphs.columns import Int64, StringTable
from op_graphs.timeline import CounterSamples, CounterTracks
from tracesim.readers.kineto_arguments import MemoryArguments, decode_arguments
from tracesim.readers.kineto_json import Event, KinetoDocument, integer

_DEVICE_TYPE = 1
"""``c10::DeviceType::CUDA``; 0 is the host."""


class Curve(NamedTuple):
    """A counter of one rank; times in ns, in any order."""

    name: str
    times: Int64
    values: list[float]
    is_bytes: bool = True


def memory_counters(
    document: KinetoDocument, strings: StringTable, base: int
) -> tuple[CounterTracks, CounterSamples]:
    """Counter tracks of one rank (row 0): allocated and reserved device memory in bytes.

    Where the file has no totals (first form of the format) the allocated curve is the running sum of the changes, so
    it starts at 0. Without memory events both tables are empty.
    """
    chosen = [i for i, event in enumerate(document.instants) if event.name == "[memory]"]
    decoded = decode_arguments([document.instants[i].args for i in chosen], MemoryArguments)
    times = document.instant_times[chosen] - base if chosen else np.zeros(0, dtype=np.int64)
    on_device = [k for k, a in enumerate(decoded) if integer(a.device_type, 0) == _DEVICE_TYPE]
    curves: list[Curve] = []
    for device in sorted({integer(decoded[k].device_id, 0) for k in on_device}):
        mine = [k for k in on_device if integer(decoded[k].device_id, 0) == device]
        mine = [mine[i] for i in np.argsort(times[mine], kind="stable")]
        label = "" if device <= 0 else f" of device {device}"
        curves += _curves([decoded[k] for k in mine], times[mine], label)
    curves += _counters(document.instants, document.instant_times - base)
    return _tables(curves, strings)


def _curves(events: list[MemoryArguments], times: Int64, label: str) -> list[Curve]:
    totals = [a.allocated for a in events]
    if all(isinstance(total, int) for total in totals):
        reserved = [float(integer(a.reserved, 0)) for a in events]
        return [
            Curve(f"allocated{label}", times, [float(t) for t in totals]),
            Curve(f"reserved{label}", times, reserved),
        ]
    running = np.cumsum([integer(a.change, 0) for a in events], dtype=np.float64)
    return [Curve(f"allocated since the start of the trace{label}", times, running.tolist())]


def _counters(events: list[Event], times: Int64) -> list[Curve]:
    """Counter events (``ph: C``): a curve for each name and each of its arguments."""
    found: dict[str, tuple[list[int], list[float], bool]] = {}
    for event, time in zip(events, times.tolist(), strict=True):
        if event.ph != "C":
            continue
        values: Any = msgspec.json.decode(event.args)
        for key, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, (int, float)):
                name = str(event.name) if len(values) == 1 else f"{event.name} {key}"
                curve = found.setdefault(name, ([], [], key == "bytes"))
                curve[0].append(time)
                curve[1].append(float(value))
    return [
        Curve(name, np.array(at, dtype=np.int64), values, in_bytes)
        for name, (at, values, in_bytes) in found.items()
    ]


def _tables(curves: list[Curve], strings: StringTable) -> tuple[CounterTracks, CounterSamples]:
    if not curves:
        return CounterTracks.empty(), CounterSamples.empty()
    tracks = CounterTracks.from_rows(
        {"rank": 0, "name": strings.intern(curve.name), "category": -1, "is_bytes": curve.is_bytes}
        for curve in curves
    )
    parts = []
    for track, curve in enumerate(curves):
        order = np.argsort(curve.times, kind="stable")
        values = np.array(curve.values)[order]
        parts.append(CounterSamples(np.full(len(order), track), curve.times[order], values))
    samples = CounterSamples.concatenate(parts)
    return tracks, samples
