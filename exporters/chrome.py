"""Timeline -> Chrome JSON in the shape of a ``torch.profiler`` (Kineto) file, one file a rank.

Tools that read real PyTorch traces read these. A rank that came from such a file is written as it was
(:mod:`.chrome_origins`), any other with what the timeline knows. What the format cannot draw (flows between ranks,
arrows that point back in time, samples that are not finite) is left out and counted. See ``docs/trace_layout.md``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from op_graphs.columns import Int32, Int64
from op_graphs.timeline import Origins, Timeline
from op_graphs.vocabulary import FlowKind

from .byte_rows import Bytes, Column, Template
from .chrome_arguments import distributed_info
from .chrome_origins import EventList, OriginEvents
from .chrome_slices import ChromeSlices
from .chrome_tracks import STEPS_TID, ChromeTracks, sides
from .files import ByteSink, ExportError, Output, opened
from .json_rows import MicrosecondColumn, NumberColumn, json_text, number_slot
from .lanes import place_slices
from .perfetto import WrittenCounts, check_slices, time_shift
from .perfetto_tracks import FORMAT

_DRAWN_FLOWS = (FlowKind.LAUNCH, FlowKind.FORWARD_BACKWARD)


def write_chrome(
    timeline: Timeline, path: str | os.PathLike[str], *, compressed: bool = False
) -> WrittenCounts:
    """Write one profiler-like JSON file a rank.

    Args:
        timeline: simulated or measured; times in ns, memory in bytes.
        path: folder for ``rank_012.json`` files, made if it is not there; or, for a timeline of one rank, a file
            ``*.json`` or ``*.json.gz``.
        compressed: write ``rank_012.json.gz`` into the folder instead.

    Returns:
        What was written in all files together.

    Raises:
        ExportError: if one file is asked for several ranks, a slice has a negative duration, or a file cannot be
            written.
    """
    target = Path(path)
    writer = _writer(timeline)
    if target.name.endswith((".json", ".json.gz")):
        if len(timeline.ranks) != 1:
            raise ExportError(
                f"cannot write {len(timeline.ranks)} ranks into {target}: a profiler file holds one rank; "
                f"give a folder, or choose one rank"
            )
        return writer(0, target)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"cannot make folder {target}: {error.strerror}; choose another place") from error
    counts = WrittenCounts()
    for row, name in enumerate(file_names(timeline)):
        counts += writer(row, target / (f"{name}.json.gz" if compressed else f"{name}.json"))
    return counts


def file_names(timeline: Timeline) -> list[str]:
    """``rank_012`` for each rank; by row where ranks are not known or repeat."""
    ranks = timeline.ranks.rank
    numbers = (
        ranks
        if len(ranks) and ranks.min() >= 0 and len(set(ranks.tolist())) == len(ranks)
        else np.arange(len(ranks))
    )
    digits = max(3, len(str(max([timeline.world_size - 1, *numbers.tolist()]))))
    return [f"rank_{number:0{digits}d}" for number in numbers.tolist()]


def _writer(timeline: Timeline) -> Callable[[int, Output], WrittenCounts]:
    """What writes the file of one row of the ranks."""
    origins = timeline.origins
    if origins is None:
        return ChromeWriter(timeline).write
    ours = None if all(origins.headers) else ChromeWriter(timeline)

    def write(row: int, out: Output) -> WrittenCounts:
        if ours is not None and not origins.headers[row]:
            return ours.write(row, out)
        return _write_origin(timeline, origins, row, out)

    return write


def _write_origin(timeline: Timeline, origins: Origins, row: int, out: Output) -> WrittenCounts:
    """Write one rank as the profiler file that it came from."""
    check_slices(timeline)
    events = OriginEvents(timeline, origins, row, time_shift(timeline))
    on_rank = np.flatnonzero(timeline.slice_ranks()[timeline.flows.source] == row)
    flows = drawn_flows(timeline, on_rank)
    counters, samples = timeline.counter_tracks, timeline.counter_samples
    written = dropped = 0
    with opened(out) as sink:
        sink.write(events.head())
        listed = EventList(sink)
        for chunk in events.slice_events():
            listed.write(chunk.data)
        for chunk in events.flow_events(flows):
            listed.write(chunk.data)
        for counter in np.flatnonzero(counters.rank == row).tolist():
            every = np.flatnonzero(samples.track == counter)
            kept = every[np.isfinite(samples.value[every])]
            written, dropped = written + len(kept), dropped + len(every) - len(kept)
            if len(kept):
                listed.write(events.counter_events(counter, kept).data)
        listed.write(events.metadata_events())
        sink.write(b"\n]}\n")
    return WrittenCounts(
        slices=len(events.rows),
        counter_samples=written,
        flows=len(flows),
        extra_lanes=events.placement.extra_lanes,
        dropped_samples=dropped,
        dropped_flows=len(on_rank) - len(flows),
    )


class ChromeWriter:
    """Holds what all ranks of a timeline share, and writes the file of each."""

    def __init__(self, timeline: Timeline) -> None:
        check_slices(timeline)
        slices = timeline.slices
        self.timeline, self.shift = timeline, time_shift(timeline)
        self.placement = place_slices(slices.track, slices.start, slices.duration, len(timeline.tracks))
        self.tracks = ChromeTracks.of(timeline, self.placement)
        start = slices.start + self.shift
        self.slices = ChromeSlices(timeline, self.placement, self.tracks, start)
        ranks = len(timeline.ranks)
        order = self.placement.order
        self.rows = _by_group(timeline.slice_ranks()[order], ranks, order)
        flow_ranks = timeline.slice_ranks()[timeline.flows.source]
        self.flows = _by_group(flow_ranks, ranks, np.arange(len(timeline.flows)))
        samples = timeline.counter_samples
        self.samples = _by_group(samples.track, len(timeline.counter_tracks), np.arange(len(samples)))
        self.on_device, self.on_host = sides(timeline)

    def write(self, row: int, out: Output) -> WrittenCounts:
        """Write the file of one row of the ranks to a stream or path."""
        timeline, rows = self.timeline, self.rows[row]
        track = timeline.slices.track[rows]
        flows = drawn_flows(timeline, self.flows[row])
        with opened(out) as sink:
            sink.write(self._head(row))
            for chunk in self.slices.events(rows[self.on_host[track]], on_device=False):
                sink.write(chunk.data)
            for chunk in self.slices.events(rows[self.on_device[track]], on_device=True):
                sink.write(chunk.data)
            for chunk in self.slices.flow_events(flows):
                sink.write(chunk.data)
            written, dropped = self._write_counters(row, sink)
            for event in self._steps(row):
                sink.write(json_text(event) + b",\n")
            metadata = self.tracks.metadata(timeline, self.placement, row)
            sink.write(b",\n".join(json_text(event) for event in metadata))
            sink.write(b'\n],\n"traceName":' + json_text(timeline.name) + b"}\n")
        lanes = timeline.tracks.rank[self.placement.lane_track] == row
        return WrittenCounts(
            slices=len(rows),
            counter_samples=written,
            flows=len(flows),
            extra_lanes=int(np.count_nonzero(self.placement.lane_number[lanes])),
            dropped_samples=dropped,
            dropped_flows=len(self.flows[row]) - len(flows),
        )

    def _head(self, row: int) -> bytes:
        timeline = self.timeline
        rank = int(timeline.ranks.rank[row])
        facts = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": timeline.device}],
            "distributedInfo": distributed_info(timeline, rank),
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": timeline.time_base_ns - self.shift,
            "tracesim": {
                "format": FORMAT,
                "name": timeline.name,
                "simulated": timeline.simulated,
                "coordinates": {
                    d: int(getattr(timeline.ranks, d)[row]) for d in ("rank", "tp", "cp", "ep", "pp", "dp")
                },
                "properties": dict(timeline.properties),
            },
        }
        return json_text(facts)[:-1] + b',\n"traceEvents":[\n'

    def _steps(self, row: int) -> Iterator[dict[str, object]]:
        steps = self.timeline.steps
        for step in np.flatnonzero(steps.rank == row).tolist():
            begin, end = int(steps.start[step]), int(steps.end[step])
            yield {
                "ph": "X",
                "cat": "user_annotation",
                "name": f"ProfilerStep#{int(steps.number[step])}",
                "pid": int(self.tracks.host_pid[row]),
                "tid": STEPS_TID,
                "ts": (begin + self.shift) / 1000,
                "dur": (end - begin) / 1000,
                "args": {"role": "step"},
            }

    def _write_counters(self, row: int, sink: ByteSink) -> tuple[int, int]:
        """Samples of the counters of a rank; returns how many were written and left out."""
        counters, samples = self.timeline.counter_tracks, self.timeline.counter_samples
        written = dropped = 0
        for counter in np.flatnonzero(counters.rank == row).tolist():
            every = self.samples[counter]
            rows = every[np.isfinite(samples.value[every])]
            written, dropped = written + len(rows), dropped + len(every) - len(rows)
            if len(rows):
                name = self.timeline.string(int(counters.name[counter]))
                head = {"ph": "C", "name": name, "pid": int(self.tracks.device_pid[row])}
                unit = "bytes" if counters.is_bytes[counter] else "value"
                sink.write(self._counter_rows(head, unit, rows).data)
        return written, dropped

    def _counter_rows(self, head: dict[str, object], unit: str, rows: Int64) -> Bytes:
        samples = self.timeline.counter_samples
        time = samples.time[rows] + self.shift
        values = NumberColumn.of(samples.value[rows])
        times = NumberColumn.of(time // 1000)
        template = Template(json_text(head)[:-1] + b',"ts":') + number_slot("ts", times.width + 4)
        template = template + f',"args":{{"{unit}":'.encode() + number_slot("value", values.width) + b"}},\n"
        every = np.arange(len(rows))
        columns: dict[str, Column] = {"ts": MicrosecondColumn(time), "value": values.at(every)}
        filled: Bytes = template.fill(columns, slice(0, len(rows))).reshape(-1)
        return filled


def drawn_flows(timeline: Timeline, rows: Int64) -> Int64:
    """Those of some flows whose ends are on one rank, differ, and come one after the other."""
    flows, start = timeline.flows, timeline.slices.start
    source, target = flows.source[rows], flows.target[rows]
    ranks = timeline.slice_ranks()
    drawn = np.isin(flows.kind[rows], _DRAWN_FLOWS) & (ranks[source] == ranks[target])
    drawn &= (source != target) & (start[source] <= start[target])
    return rows.compress(drawn)


def _by_group(group: Int32, groups: int, rows: Int64) -> list[Int64]:
    """The rows of each group, in their order."""
    order = np.argsort(group, kind="stable")
    bounds = np.cumsum(np.bincount(group, minlength=groups)).tolist()
    return [rows[order[begin:end]] for begin, end in zip([0, *bounds], bounds, strict=False)]
