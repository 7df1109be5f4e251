"""Speed figures: ``python -m benchmarks.speed [--json] [FIGURE...]``.

Each figure is one function that returns values by name, units in the names, and one line in :data:`FIGURES`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.comparing import trace_comparison
from benchmarks.reading import kineto_reading
from exporters import write_perfetto
from op_graphs.columns import StringTable
from op_graphs.timeline import (
    SLICE_DEFAULTS,
    CounterSamples,
    CounterTracks,
    Flows,
    Ranks,
    Slices,
    Steps,
    Timeline,
    Tracks,
)
from op_graphs.vocabulary import OpKind, Phase, TrackRole

Figure = dict[str, float]

_SLICES, _TRACKS, _REPEATS = 200_000, 32, 3


class _CountingSink:
    """Takes bytes as a file would, and keeps only how many there were."""

    size = 0

    def write(self, data: bytes | memoryview) -> None:
        self.size += len(data)


def perfetto_export() -> Figure:
    """Slices with four arguments each (two strings, two integers) to Perfetto protobuf, against the official builder.

    Both write a begin and an end packet a slice with interned names and strings; the official side is
    ``perfetto.trace_builder.proto_builder.TraceProtoBuilder``. Best of three runs each, in one process.
    """
    timeline = timeline_with_four_arguments(_SLICES)
    ours, ours_bytes = _best(lambda: _export(timeline))
    official, official_bytes = _best(lambda: len(official_perfetto(timeline)))
    return {
        "slices": _SLICES,
        "slices_per_s": _SLICES / ours,
        "official_slices_per_s": _SLICES / official,
        "times_official": official / ours,
        "bytes_per_slice": ours_bytes / _SLICES,
        "official_bytes_per_slice": official_bytes / _SLICES,
    }


def large_model_step() -> Figure:
    """llama3-405b, tp8 pp8, 64 microbatches: everything ``tracesim run -o`` does, in a process of its own.

    The limits are 15 s and 2 GiB; ``python_start_s`` is what starting an interpreter with numpy costs in the same run.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tracesim", "run", "llama3-405b-tp8-pp8-dp8", "-o", folder]
        seconds, memory = _child(command)
        trace = Path(folder) / "trace.pftrace"
        report = json.loads((Path(folder) / "report.json").read_text())
        size = trace.stat().st_size
    start, _ = _child([sys.executable, "-c", "import numpy"])
    return {
        "run_and_export_s": seconds,
        "python_start_s": start,
        "peak_memory_mib": memory / 2**20,
        "trace_mib": size / 2**20,
        "iteration_time_ms": report["iteration_time_ms"],
    }


def _child(command: list[str]) -> tuple[float, int]:
    """Wall seconds and peak resident bytes of a child process."""
    before = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - before
    if os.waitstatus_to_exitcode(status):
        raise RuntimeError(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    # Linux counts KiB, macOS bytes.
    return seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


FIGURES: dict[str, Callable[[], Figure]] = {
    "perfetto_export": perfetto_export,
    "large_model_step": large_model_step,
    "kineto_reading": kineto_reading,
    "trace_comparison": trace_comparison,
}


def timeline_with_four_arguments(count: int) -> Timeline:
    """Back-to-back slices on 32 tracks of one rank, each with kind, phase, layer and microbatch."""
    names = StringTable(f"operation {index}" for index in range(200))
    tracks = [names.intern(f"stream {index}") for index in range(_TRACKS)]
    row = np.arange(count)
    columns = {name: np.full(count, value) for name, value in SLICE_DEFAULTS.items()}
    columns.update(
        kind=row % (len(OpKind) - 1) + 1,
        phase=row % (len(Phase) - 1) + 1,
        layer=row % 126,
        microbatch=row // 126 % 64,
    )
    per_track = -(-count // _TRACKS)
    slices = Slices(
        track=(row // per_track).astype(np.int32),
        start=row % per_track * 25_000,
        duration=np.full(count, 25_000),
        name=(row % 200).astype(np.int32),
        **columns,
    )
    return Timeline(
        strings=names.strings(),
        ranks=Ranks(*([0] for _ in range(6))),  # type: ignore[arg-type]
        tracks=Tracks(
            rank=np.zeros(_TRACKS, dtype=np.int32),
            role=np.full(_TRACKS, TrackRole.DEVICE, dtype=np.int8),
            stream=np.arange(_TRACKS),
            name=np.array(tracks, dtype=np.int32),
        ),
        slices=slices,
        flows=Flows.empty(),
        counter_tracks=CounterTracks.empty(),
        counter_samples=CounterSamples.empty(),
        steps=Steps.empty(),
    )


def official_perfetto(timeline: Timeline) -> bytes:
    """The same slices, names and four arguments, written with the official Python builder."""
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent
    from perfetto.trace_builder.proto_builder import TraceProtoBuilder

    builder = TraceProtoBuilder()
    slices = timeline.slices
    for track, name in enumerate(timeline.tracks.name.tolist()):
        packet = builder.add_packet()
        packet.track_descriptor.uuid = track + 1
        packet.track_descriptor.name = timeline.strings[name]
    packet = builder.add_packet()
    packet.trusted_packet_sequence_id = 1
    packet.sequence_flags = 1
    for iid, string in enumerate(timeline.strings, 1):
        packet.interned_data.event_names.add(iid=iid, name=string)
    for iid, string in enumerate(("kind", "phase", "layer", "microbatch"), 1):
        packet.interned_data.debug_annotation_names.add(iid=iid, name=string)
    for iid, string in enumerate([*(kind.name for kind in OpKind), *(phase.name for phase in Phase)], 1):
        packet.interned_data.debug_annotation_string_values.add(iid=iid, str=string.encode())
    columns = ("track", "start", "duration", "name", "kind", "phase", "layer", "microbatch")
    for track, start, duration, name, kind, phase, layer, microbatch in zip(
        *(getattr(slices, column).tolist() for column in columns), strict=True
    ):
        packet = builder.add_packet()
        packet.timestamp = start
        packet.trusted_packet_sequence_id = 1
        packet.sequence_flags = 2
        event = packet.track_event
        event.type = TrackEvent.TYPE_SLICE_BEGIN
        event.track_uuid = track + 1
        event.name_iid = name + 1
        event.debug_annotations.add(name_iid=1, string_value_iid=kind + 1)
        event.debug_annotations.add(name_iid=2, string_value_iid=len(OpKind) + phase + 1)
        event.debug_annotations.add(name_iid=3, int_value=layer)
        event.debug_annotations.add(name_iid=4, int_value=microbatch)
        packet = builder.add_packet()
        packet.timestamp = start + duration
        packet.trusted_packet_sequence_id = 1
        packet.sequence_flags = 2
        packet.track_event.type = TrackEvent.TYPE_SLICE_END
        packet.track_event.track_uuid = track + 1
    serialized: bytes = builder.serialize()
    return serialized


def _export(timeline: Timeline) -> int:
    sink = _CountingSink()
    write_perfetto(timeline, sink)
    return sink.size


def _best(run: Callable[[], int]) -> tuple[float, int]:
    """Shortest of some runs in seconds, and what the last returned."""
    seconds, result = float("inf"), 0
    for _ in range(_REPEATS):
        before = time.perf_counter()
        result = run()
        seconds = min(seconds, time.perf_counter() - before)
    return seconds, result


@click.command()
@click.argument("figures", nargs=-1, type=click.Choice(sorted(FIGURES)))
@click.option("--json", "as_json", is_flag=True, help='Print {"figures": {NAME: {...}}}.')
def main(figures: tuple[str, ...], as_json: bool) -> None:
    """Measure speed figures: the named ones, or all."""
    measured = {name: FIGURES[name]() for name in figures or FIGURES}
    if as_json:
        click.echo(json.dumps({"figures": measured}, indent=2))
        return
    table = RichTable("figure", "value", "measured")
    for name, values in measured.items():
        for index, (what, value) in enumerate(values.items()):
            table.add_row("" if index else name, what, f"{value:,.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
