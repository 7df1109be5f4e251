"""Timeline -> Perfetto protobuf trace (``.pftrace``), for ui.perfetto.dev and Perfetto's trace processor.

A process for each rank, a thread track for each track of slices, counters below; see ``docs/trace_layout.md`` for
what is where. The file holds all of the timeline, so it can be read back. Left out are counter samples that are not
finite, and flows from a slice to itself; both are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Bool, Float64, Int32, Int64
from op_graphs.timeline import Timeline

from .byte_rows import Template
from .files import ByteSink, ExportError, Output, opened
from .lanes import place_slices
from .perfetto_slices import NEEDS_STATE, SEQUENCE_ID, SliceEncoder
from .perfetto_tracks import FACTS_EVENT, TrackPlan, descriptors, facts
from .protobuf_rows import (
    PackedColumn,
    bytes_field,
    embedded,
    fixed64_slot,
    pack_varints,
    string_field,
    varint_field,
    varint_slot,
    varint_width,
)

_INSTANT, _COUNTER = 3, 4
_SAMPLES_IN_CHUNK = 16_384


@dataclass(frozen=True)
class WrittenCounts:
    """What an exporter wrote, and what it had to leave out or move."""

    slices: int = 0
    counter_samples: int = 0
    flows: int = 0
    extra_lanes: int = 0
    """Tracks added because slices on one track crossed."""
    dropped_samples: int = 0
    """Counter samples that are not finite."""
    dropped_flows: int = 0
    """Flows that the format cannot draw."""

    def __add__(self, other: WrittenCounts) -> WrittenCounts:
        return WrittenCounts(
            self.slices + other.slices,
            self.counter_samples + other.counter_samples,
            self.flows + other.flows,
            self.extra_lanes + other.extra_lanes,
            self.dropped_samples + other.dropped_samples,
            self.dropped_flows + other.dropped_flows,
        )


def write_perfetto(timeline: Timeline, out: Output) -> WrittenCounts:
    """Write a timeline as a Perfetto trace to a stream or a path (``.gz`` is compressed).

    Args:
        timeline: simulated or measured; times in ns, memory in bytes.
        out: binary stream, or path of a file that appears once it is complete.

    Returns:
        How many slices, samples and flows were written, and how many lanes were added.

    Raises:
        ExportError: if a slice has a negative duration, a time does not fit in 63 bits, or the file cannot be
            written.
    """
    check_slices(timeline)
    shift = time_shift(timeline)
    slices = timeline.slices
    placement = place_slices(slices.track, slices.start, slices.duration, len(timeline.tracks))
    plan = TrackPlan.of(timeline, placement)
    encoder = SliceEncoder(timeline, placement, plan, shift)
    samples = timeline.counter_samples
    finite = np.isfinite(samples.value)
    with opened(out) as sink:
        _write_head(sink, descriptors(timeline, placement, plan), encoder)
        event = varint_field(9, _INSTANT) + varint_field(11, plan.facts) + string_field(23, FACTS_EVENT)
        for annotation in facts(timeline, placement, plan, shift, encoder.origin_facts):
            event += bytes_field(4, annotation)
        sink.write(_packet(varint_field(8, 0) + NEEDS_STATE + bytes_field(11, event)))
        for chunk in encoder.chunks():
            sink.write(chunk.data)
        for data in _counter_packets(
            plan.counter, samples.track, samples.time + shift, samples.value, finite
        ):
            sink.write(data)
    real_flows = int(np.count_nonzero(timeline.flows.source != timeline.flows.target))
    return WrittenCounts(
        slices=len(slices),
        counter_samples=int(np.count_nonzero(finite)),
        flows=real_flows,
        extra_lanes=placement.extra_lanes,
        dropped_samples=int(len(samples) - np.count_nonzero(finite)),
        dropped_flows=len(timeline.flows) - real_flows,
    )


def check_slices(timeline: Timeline) -> None:
    """Refuse what no trace file can express.

    Raises:
        ExportError: naming the first slice of negative duration, or that ends after the largest time.
    """
    slices = timeline.slices
    wrong = np.flatnonzero((slices.duration < 0) | (slices.start + slices.duration < slices.start))
    if len(wrong):
        row = int(wrong[0])
        raise ExportError(
            f"slice {row} ({timeline.string(int(slices.name[row]))!r}) starts at {slices.start[row]} ns and lasts "
            f"{slices.duration[row]} ns; a duration must be 0 or more and the end below 2**63 ns "
            f"({len(wrong)} such slices)"
        )


def time_shift(timeline: Timeline) -> int:
    """What must be added to all times so that none is negative, in ns: 0 unless something lies before time 0."""
    first = min(
        int(timeline.slices.start.min(initial=0)),
        int(timeline.counter_samples.time.min(initial=0)),
    )
    return -min(first, 0)


def _packet(fields: bytes) -> bytes:
    return bytes_field(1, fields)


def _write_head(sink: ByteSink, tracks: list[bytes], encoder: SliceEncoder) -> None:
    """Tracks and interned strings. The first packet clears the state of the sequence, which all others need."""
    cleared = varint_field(10, SEQUENCE_ID) + varint_field(13, 1) + varint_field(87, 1)
    sink.write(_packet(cleared + bytes_field(60, tracks[0])))
    sink.write(b"".join(_packet(NEEDS_STATE + bytes_field(60, track)) for track in tracks[1:]))
    for data in encoder.interned:
        sink.write(_packet(NEEDS_STATE + data))


def _counter_packets(
    uuids: Int64, track: Int32, time: Int64, value: Float64, finite: Bool
) -> Iterator[memoryview]:
    """One packet a sample: whole numbers as integers, others as doubles."""
    rows = np.flatnonzero(finite)
    if not len(rows):
        return
    kept = value[rows]
    whole = bool(np.all((kept == np.floor(kept)) & (np.abs(kept) < 1 << 53)))
    widths = [varint_width(0, int(time[rows].max())), varint_width(0, int(uuids.max()))]
    value_width = varint_width(int(kept.min()), int(kept.max())) if whole else 8
    event = Template(varint_field(9, _COUNTER)) + varint_slot(11, "track", widths[1])
    event = event + (varint_slot(30, "value", value_width) if whole else fixed64_slot(44, "value"))
    template = embedded(1, varint_slot(8, "time", widths[0]) + NEEDS_STATE + embedded(11, event))
    for first in range(0, len(rows), _SAMPLES_IN_CHUNK):
        chunk = rows[first : first + _SAMPLES_IN_CHUNK]
        values = value[chunk]
        columns = {
            "time": pack_varints(time[chunk], widths[0]),
            "track": pack_varints(uuids[track[chunk]], widths[1]),
            "value": pack_varints(values.astype(np.int64), value_width)
            if whole
            else PackedColumn(values.view(np.uint64)),
        }
        yield template.fill(columns, slice(0, len(chunk))).reshape(-1).data
