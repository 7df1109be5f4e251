"""Readers of traces: one file a format, each with its own recognition; adding a format is one file and one line here.

A reader is a module with ``recognise(source) -> bool`` (cheap, by content) and ``read(source) -> Timeline``; the first
that recognises a file reads it. Files of several ranks become one timeline on a common clock (:mod:`.merge`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from op_graphs.timeline import Quirk, Timeline
from tracesim.errors import TraceError
from tracesim.readers import kineto, pftrace
from tracesim.readers.merge import merge
from tracesim.readers.sources import Source, describe_paths, load, trace_files


class Reader(Protocol):
    """What a module of this package offers."""

    def recognise(self, source: Source) -> bool:
        """Whether the content of a file is of this format."""
        ...

    def read(self, source: Source) -> Timeline:
        """The timeline a file holds; raises TraceError where it is damaged."""
        ...


READERS: dict[str, Reader] = {
    "kineto": kineto,
    "pftrace": pftrace,
}
"""Formats by name, in the order they are tried."""


def read_trace(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> Timeline:
    """Read a trace: one file, several files, or a folder with a file a rank.

    A folder written by ``tracesim run`` is read from its ``trace.pftrace``. Files of a folder that are no traces are
    left out and counted as a quirk; a damaged trace is an error.

    Raises:
        TraceError: one message with the file, what is wrong with it, and what to do.
    """
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    roots = [Path(p) for p in paths]
    if not roots:
        raise TraceError("no trace given. Name a file, several files, or a folder.")
    parts: list[Timeline] = []
    ignored: list[str] = []
    for root in roots:
        files, is_folder = trace_files(root)
        for file in files:
            if is_folder and not _may_be_trace(file):
                ignored.append(file.name)
                continue
            source = load(file)
            reader = next((r for r in READERS.values() if r.recognise(source)), None)
            if reader is not None:
                parts.append(reader.read(source))
            elif is_folder:
                ignored.append(file.name)
            else:
                raise TraceError(
                    f"{file}: not a trace of a known format ({', '.join(READERS)}); it begins with "
                    f"{source.data[:24]!r}. Export it with torch.profiler's export_chrome_trace."
                )
    if not parts:
        raise TraceError(
            f"{describe_paths(roots)}: none of its {len(ignored)} files is a trace of a known format "
            f"({', '.join(READERS)}). Give the folder that holds the rank files."
        )
    timeline = merge(parts, describe_paths(roots))
    if ignored:
        quirk = Quirk("files left out, no trace", len(ignored), ", ".join(ignored[:3]))
        timeline = replace(timeline, quirks=(*timeline.quirks, quirk))
    return timeline


def _may_be_trace(file: Path) -> bool:
    return file.suffix.lower() in {
        ".json",
        ".gz",
        ".pftrace",
        ".perfetto-trace",
        ".trace",
        "",
    } or file.name.endswith(".json.gz")
