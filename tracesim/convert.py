"""Conversion between trace files: profiler JSON, Perfetto protobuf, one rank or many in one file.

Everything goes through :class:`~op_graphs.timeline.Timeline` with its origins, so that a slice keeps its category,
place and arguments. What is repaired on the way, and what a format cannot hold, is counted and said.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exporters import ExportError, WrittenCounts, write_chrome, write_perfetto
from exporters.chrome import file_names
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import FlowKind
from tracesim.errors import OutputError
from tracesim.event_counts import EventCounts, count_events, slices_by_category
from tracesim.readers import kineto, read_trace
from tracesim.readers.progress import reading_progress
from tracesim.readers.sources import FileBytes, load, trace_files

FORMATS = ("pftrace", "json", "json.gz")
"""What ``to`` may be: Perfetto protobuf, or profiler JSON plain or compressed."""

_ENDINGS = {
    ".pftrace": "pftrace",
    ".pftrace.gz": "pftrace",
    ".perfetto-trace": "pftrace",
    ".json": "json",
    ".json.gz": "json.gz",
}
_REPAIRS = (
    "set to 0",
    "joined",
    "ended with",
    "replaced",
    "written as strings",
    "not numbers",
    "with a fraction",
)
_LOSSES = ("dropped", "left out", "ignored")


@dataclass(frozen=True)
class CategoryCount:
    """How many things of one category went in and came out."""

    what: str
    """``slices``, ``arrows`` or ``counter samples``."""
    category: str
    read: int
    written: int


@dataclass(frozen=True)
class Conversion:
    """What a conversion read, wrote, repaired and could not keep."""

    inputs: tuple[Path, ...]
    outputs: tuple[Path, ...]
    format: str
    ranks: int
    time_base_ns: int
    counts: tuple[CategoryCount, ...]
    repaired: dict[str, int] = field(default_factory=dict)
    not_kept: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """JSON-ready data, in stable order."""
        return {
            "inputs": [str(path) for path in self.inputs],
            "outputs": [str(path) for path in self.outputs],
            "format": self.format,
            "ranks": self.ranks,
            "time_base_ns": self.time_base_ns,
            "counts": [
                {"what": c.what, "category": c.category, "read": c.read, "written": c.written}
                for c in self.counts
            ],
            "repaired": self.repaired,
            "not_kept": self.not_kept,
        }


def convert(
    inputs: Sequence[Path],
    output: Path,
    to: str | None = None,
    announce: Callable[[str], None] = lambda text: None,
) -> Conversion:
    """Convert traces into one file, or a folder with a profiler file a rank.

    Args:
        inputs: files or folders; several are put on a common clock, a rank each.
        output: file to write, or folder for several ranks of profiler JSON.
        to: one of :data:`FORMATS`; told by the ending of ``output`` where None.
        announce: is told what is being done, for long work.

    Raises:
        TraceError: if an input is no trace, or damaged.
        OutputError: if the output is an input, its ending names no format, or a folder holds other files.
        ExportError: if the output cannot be written, or several ranks are asked for in one profiler file.
    """
    chosen = _format(output, to)
    sources = [file for path in inputs for file in trace_files(path)[0]]
    announce(f"counting the events of {len(sources)} file{'s'[: len(sources) != 1]}")
    counted, uncounted = _count(sources)
    announce("reading")
    timeline = read_trace(list(inputs), keep_origins=True)
    targets = _targets(timeline, output, chosen)
    _refuse_input(targets, sources)
    announce(f"writing {output}")
    written = _write(timeline, output, chosen, targets)
    return Conversion(
        inputs=tuple(inputs),
        outputs=tuple(targets),
        format=chosen,
        ranks=len(timeline.ranks),
        time_base_ns=timeline.time_base_ns,
        counts=tuple(_compare(timeline, counted if uncounted == 0 else None, written)),
        repaired=_repaired(timeline, written, counted),
        not_kept=_not_kept(timeline, written, counted if uncounted == 0 else None),
    )


def _format(output: Path, to: str | None) -> str:
    told = next((name for ending, name in _ENDINGS.items() if output.name.lower().endswith(ending)), None)
    if to is not None and to not in FORMATS:
        raise OutputError(f"no format {to!r}; choose one of {', '.join(FORMATS)}")
    if to is not None and told not in (None, to):
        raise OutputError(f"the ending of {output} says {told}, --to says {to}; leave out --to or rename it")
    if to is not None or told is not None:
        return to or told or ""
    if output.is_dir() or not output.suffix:
        return "json"
    raise OutputError(
        f"cannot tell the format of {output} by its ending {output.suffix!r}; name it *.pftrace, *.json, *.json.gz "
        f"or a folder, or say --to {'|'.join(FORMATS)}"
    )


def _count(sources: Sequence[Path]) -> tuple[EventCounts, int]:
    """Events of all profiler files, and how many of the files are none and can only be counted as they are read."""
    counted, uncounted = EventCounts(), 0
    with reading_progress() as show:
        for path in sources:
            source = load(path)
            if kineto.recognise(source) and not _is_ours(source.data):
                counted += count_events(path, source.data, show(path))
            else:
                uncounted += 1
    return counted, uncounted


def _is_ours(data: FileBytes) -> bool:
    """Whether a profiler file was written from a simulation: steps and pipeline actions stand in it twice."""
    return b'"tracesim.trace/' in data[:1_000_000]


def _targets(timeline: Timeline, output: Path, chosen: str) -> list[Path]:
    """The files that will be written."""
    single = output.name.lower().endswith((".json", ".json.gz")) and not output.is_dir()
    if chosen == "pftrace" or single:
        if output.is_dir():
            raise OutputError(f"cannot write {output}: it is a folder; give the path of a file in it")
        return [output]
    targets = [output / f"{name}.{chosen}" for name in file_names(timeline)]
    if output.is_dir():
        others = sorted({path.name for path in output.iterdir()} - {path.name for path in targets})
        if others:
            raise OutputError(
                f"cannot write the ranks into {output}: it holds other files ({', '.join(others[:3])}), which would "
                f"be read as part of the trace; choose a new folder"
            )
    elif output.exists():
        raise OutputError(f"cannot write the ranks into {output}: it is a file; choose a new folder")
    return targets


def _refuse_input(targets: Sequence[Path], sources: Sequence[Path]) -> None:
    for target in targets:
        for source in sources:
            if target.exists() and target.samefile(source):
                raise OutputError(
                    f"cannot write {target}: it is the input; choose another name, so that the original stays"
                )


def _write(timeline: Timeline, output: Path, chosen: str, targets: Sequence[Path]) -> WrittenCounts:
    if chosen == "pftrace":
        return write_perfetto(timeline, output)
    if targets == [output]:
        return write_chrome(timeline, output)
    # All files are written beside the folder first: half a job's ranks would look like a smaller job.
    staging = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        counts = write_chrome(timeline, staging, compressed=chosen == "json.gz")
        output.mkdir(exist_ok=True)
        for target in targets:
            (staging / target.name).replace(target)
    except OSError as error:
        raise ExportError(
            f"cannot write into {output}: {error.strerror or error}; choose a folder that is writable"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return counts


def _compare(timeline: Timeline, counted: EventCounts | None, written: WrittenCounts) -> list[CategoryCount]:
    out = slices_by_category(timeline)
    into = counted.slices if counted is not None else out
    # Exporters write every slice or none at all.
    assert written.slices == len(timeline.slices), "an exporter lost slices"
    rows = [CategoryCount("slices", c, into[c], out[c]) for c in sorted(into | out)]
    kinds = Counter(FlowKind(kind).name.lower() for kind in timeline.flows.kind.tolist())
    arrows = sum(counted.arrows.values()) if counted is not None else len(timeline.flows)
    rows.append(CategoryCount("arrows", ", ".join(sorted(kinds)), arrows, written.flows))
    samples = len(timeline.counter_samples)
    rows.append(CategoryCount("counter samples", "", samples, written.counter_samples))
    return rows


def _repaired(timeline: Timeline, written: WrittenCounts, counted: EventCounts) -> dict[str, int]:
    found = {q.name: q.count for q in timeline.quirks if any(mark in q.name for mark in _REPAIRS)}
    if written.extra_lanes:
        found["lanes added, because slices of one thread cross"] = written.extra_lanes
    if counted.slices:
        found["times counted from the first event of the trace"] = len(timeline.slices)
    if counted.slices and (made := len(timeline.flows) - sum(counted.arrows.values())) > 0:
        found["arrows drawn from common correlation ids, where the file has none"] = made
    if counted.shared_ids:
        found["arrows that share an id with another, given one of their own"] = counted.shared_ids
    return {name: count for name, count in found.items() if count}


def _not_kept(timeline: Timeline, written: WrittenCounts, counted: EventCounts | None) -> dict[str, int]:
    found = {q.name: q.count for q in timeline.quirks if any(mark in q.name for mark in _LOSSES)}
    if counted is not None:
        kept = slices_by_category(timeline)
        lost = sum((counted.slices - counted.untimed - kept).values())
        arrows = sum(counted.arrows.values()) - len(timeline.flows)
        found |= {
            "slices without a time": sum(counted.untimed.values()),
            "slices lost": lost,
            "arrows between events that are no launch and kernel": max(arrows, 0),
            "ends of arrows without another end": sum(counted.lone_ends.values()),
            "instant events": counted.instants,
            **{f"events of phase {phase}": count for phase, count in sorted(counted.others.items())},
        }
    found["arrows that the format cannot draw (between ranks, or back in time)"] = written.dropped_flows
    found["counter samples that are not finite"] = written.dropped_samples
    return {name: count for name, count in found.items() if count}
