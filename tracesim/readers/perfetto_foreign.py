"""Reader of Perfetto traces that other programs wrote: track events and counters, by the official bindings.

Slow (some microseconds an event) and therefore only for files that are not ours. Read are slices (begin and end, with
interned or plain names), instants and counters on tracks of processes and threads. Other data sources are counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from op_graphs.timeline import Timeline
from op_graphs.vocabulary import Communication, OpKind, TrackRole
from tracesim.errors import TraceError
from tracesim.kernel_kinds import classify_kernels
from tracesim.readers.assembled import AssembledTimeline
from tracesim.readers.pftrace import FACTS_EVENT
from tracesim.readers.sources import Source

_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4
_BYTES = 3
"""``CounterDescriptor.UNIT_SIZE_BYTES``."""

_LARGEST = 4_000_000_000_000_000_000
_DEVICE_WORDS = ("stream", "gpu", "cuda", "kernel", "compute", "nccl", "hip")


@dataclass
class _Track:
    """A track descriptor."""

    name: str
    parent: int = 0
    thread: int = 0
    unit: int = 0
    is_counter: bool = False


@dataclass
class _Sequence:
    """Interned names and defaults of one packet sequence."""

    names: dict[int, str] = field(default_factory=dict)
    default_track: int = 0


def recognise(source: Source) -> bool:
    """Whether the file begins with a trace packet and holds no facts of ours."""
    data = source.data
    return data[:1] == b"\x0a" and not data[:64].lstrip().startswith((b"{", b"[")) and FACTS_EVENT not in data


def read(source: Source) -> Timeline:
    """All slices and counters of the file, as one rank.

    Raises:
        TraceError: if it is damaged, or holds neither slices nor counters.
    """
    from google.protobuf.message import DecodeError
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    trace = Trace()
    try:
        trace.ParseFromString(source.data)
    except DecodeError as error:
        raise TraceError(
            f"{source.path}: damaged or truncated Perfetto trace ({error}). Record or copy it again."
        ) from error
    reading = _Reading(source)
    for packet in trace.packet:
        reading.packet(packet)
    return reading.timeline()


class _Reading:
    """State while the packets go by."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.tracks: dict[int, _Track] = {}
        self.sequences: dict[int, _Sequence] = {}
        self.open: dict[int, list[tuple[int, str]]] = {}
        self.found: list[tuple[int, int, int, str]] = []
        self.samples: dict[int, list[tuple[int, float]]] = {}
        self.skipped: dict[str, int] = {}
        self.strays = 0

    def packet(self, packet: Any) -> None:  # noqa: ANN401
        sequence = self.sequences.setdefault(packet.trusted_packet_sequence_id, _Sequence())
        if packet.sequence_flags & 1 or packet.incremental_state_cleared:
            sequence.names.clear()
        for entry in packet.interned_data.event_names:
            sequence.names[entry.iid] = _text(entry.name)
        if packet.HasField("trace_packet_defaults"):
            sequence.default_track = packet.trace_packet_defaults.track_event_defaults.track_uuid
        if packet.HasField("track_descriptor"):
            self._describe(packet.track_descriptor)
        elif packet.HasField("track_event"):
            self._event(packet.timestamp, packet.track_event, sequence)
        else:
            kind = packet.WhichOneof("data")
            if kind is not None and kind not in (
                "clock_snapshot",
                "trace_config",
                "trace_stats",
                "system_info",
            ):
                self.skipped[kind] = self.skipped.get(kind, 0) + 1

    def _describe(self, descriptor: Any) -> None:  # noqa: ANN401
        thread = descriptor.thread
        name = (
            descriptor.name or descriptor.static_name or thread.thread_name or descriptor.process.process_name
        )
        is_counter = descriptor.HasField("counter")
        unit = descriptor.counter.unit if is_counter else 0
        self.tracks[descriptor.uuid] = _Track(
            _text(name)[:1000], descriptor.parent_uuid, thread.tid, unit, is_counter
        )

    def _event(self, time: int, event: Any, sequence: _Sequence) -> None:  # noqa: ANN401
        if time > _LARGEST:
            raise TraceError(f"{self.source.path}: a time of {time} ns is out of range (limit {_LARGEST}).")
        track = event.track_uuid or sequence.default_track
        name = _text(event.name) or sequence.names.get(event.name_iid, "")
        if event.type == _BEGIN:
            self.open.setdefault(track, []).append((time, name))
        elif event.type == _END:
            if self.open.get(track):
                start, begun = self.open[track].pop()
                self.found.append((track, start, max(time - start, 0), begun))
            else:
                self.strays += 1
        elif event.type == _INSTANT:
            self.found.append((track, time, 0, name))
        elif event.type == _COUNTER:
            value = (
                event.double_counter_value if event.HasField("double_counter_value") else event.counter_value
            )
            self.samples.setdefault(track, []).append((time, float(value)))

    def timeline(self) -> Timeline:
        last = max((start + length for _, start, length, _ in self.found), default=0)
        unended = 0
        for track, stack in self.open.items():
            for start, name in stack:
                self.found.append((track, start, max(last - start, 0), name))
                unended += 1
        if not self.found and not self.samples:
            raise TraceError(
                f"{self.source.path}: a Perfetto trace without track events. tracesim reads slices and counters "
                f"of track events only; it holds {', '.join(sorted(self.skipped)[:5]) or 'nothing'}."
            )
        built = AssembledTimeline(self.source.path)
        rank = built.rank(-1)
        built.notes.add("slices that never end, ended with the trace", unended)
        built.notes.add("end events without a begin dropped", self.strays)
        skipped = ", ".join(sorted(self.skipped)[:5])
        built.notes.add("packets of other data sources left out", sum(self.skipped.values()), skipped)
        self._add_slices(built, rank)
        for uuid, samples in self.samples.items():
            described = self.tracks.get(uuid, _Track(""))
            finite = [(t, v) for t, v in samples if abs(v) < 1e300]
            name = described.name or f"counter {uuid}"
            built.counter(
                rank, name, [t for t, _ in finite], [v for _, v in finite], described.unit == _BYTES
            )
        return built.timeline(properties={"format": "perfetto"})

    def _add_slices(self, built: AssembledTimeline, rank: int) -> None:
        numbers = {uuid: number for number, uuid in enumerate(sorted({f[0] for f in self.found}))}
        kinds, transfers = classify_kernels([f[3] for f in self.found])
        for (uuid, start, length, name), kind, transfer in zip(
            self.found, kinds.tolist(), transfers.tolist(), strict=True
        ):
            label, on_device = self._label(uuid)
            thread = self.tracks[uuid].thread if uuid in self.tracks else 0
            role = TrackRole.DEVICE if on_device else TrackRole.HOST
            track = built.track(rank, role, thread or numbers[uuid], label)
            if on_device:
                built.add(
                    track, start, length, name, kind=OpKind(kind), communication=Communication(transfer)
                )
            else:
                built.add(track, start, length, name, kind=OpKind.HOST)

    def _label(self, uuid: int) -> tuple[str, bool]:
        """Name of a track with those of its parents, and whether it looks like one of a device."""
        names = []
        for _ in range(8):
            described = self.tracks.get(uuid)
            if described is None:
                break
            names.append(described.name)
            uuid = described.parent
        label = " / ".join(reversed([n for n in names if n])) or f"track {uuid}"
        return label, any(word in label.lower() for word in _DEVICE_WORDS)


def _text(value: str | bytes) -> str:
    """Text of a string field; the bindings give bytes where it is no valid UTF-8."""
    return value if isinstance(value, str) else value.decode("utf-8", "replace")
