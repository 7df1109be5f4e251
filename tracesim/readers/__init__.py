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
from tracesim.readers import (
    chakra,
    kineto,
    memory_snapshot,
    memory_timeline,
    micro_operations,
    nsys_sqlite,
    perfetto_foreign,
    pftrace,
    pytorch_execution_trace,
)
from tracesim.readers.merge import merge
from tracesim.readers.progress import Show, reading_progress
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
    "micro-operations": micro_operations,
    "kineto": kineto,
    "other Perfetto": perfetto_foreign,
    "pftrace": pftrace,
    "nsys": nsys_sqlite,
    "memory snapshot": memory_snapshot,
    "memory timeline": memory_timeline,
    "PyTorch execution trace": pytorch_execution_trace,
    "Chakra": chakra,
}
"""Formats by name, in the order they are tried; of a folder with several formats only the first of them is read."""


def read_trace(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, keep_origins: bool = False
) -> Timeline:
    """Read a trace: one file, several files, or a folder with a file a rank.

    A folder written by ``tracesim run`` is read from its ``trace.pftrace``. Files of a folder that are no traces are
    left out and counted as a quirk; a damaged trace is an error. With ``keep_origins`` the timeline also holds what a
    conversion needs and an analysis does not (:class:`~op_graphs.timeline.Origins`).

    Raises:
        TraceError: one message with the file, what is wrong with it, and what to do.
    """
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    roots = [Path(p) for p in paths]
    if not roots:
        raise TraceError("no trace given. Name a file, several files, or a folder.")
    read = _Read(keep_origins)
    with reading_progress() as show:
        for root in roots:
            files, is_folder = trace_files(root)
            for file in files:
                read.file(file, is_folder, show)
    if not read.parts:
        raise TraceError(
            f"{describe_paths(roots)}: none of its {len(read.ignored)} files is a trace of a known format "
            f"({', '.join(READERS)}). Give the folder that holds the rank files."
        )
    timeline = merge(read.parts, describe_paths(roots))
    if keep_origins:
        # What a conversion writes shall not depend on the folder that its input lies in.
        timeline = replace(timeline, name=read.parts[0].name if len(read.parts) == 1 else roots[0].name)
    quirks = [
        Quirk(what, len(names), ", ".join(names[:3]))
        for what, names in (
            ("files left out, no trace", read.ignored),
            ("files left out, of another format", read.others),
        )
        if names
    ]
    return replace(timeline, quirks=(*timeline.quirks, *quirks))


class _Read:
    """The parts read so far, and the files left out."""

    def __init__(self, keep_origins: bool) -> None:
        self.keep_origins = keep_origins
        self.parts: list[Timeline] = []
        self.ignored: list[str] = []
        self.others: list[str] = []
        self._of_folder: list[tuple[int, Path, Timeline]] = []
        self._best = len(READERS)

    def file(self, file: Path, is_folder: bool, show: Show) -> None:
        """Read one file; in a folder only files of the format that stands first."""
        if is_folder and not _may_be_trace(file):
            self.ignored.append(file.name)
            return
        progress = show(file)
        source = replace(load(file, progress), keep_origins=self.keep_origins, progress=progress)
        place, reader = next(
            ((i, r) for i, r in enumerate(READERS.values()) if r.recognise(source)), (len(READERS), None)
        )
        if reader is None and is_folder:
            self.ignored.append(file.name)
        elif reader is None:
            raise TraceError(
                f"{file}: not a trace of a known format ({', '.join(READERS)}); it begins with "
                f"{bytes(source.data[:24])!r}. Export it with torch.profiler's export_chrome_trace."
            )
        elif not is_folder:
            self.parts.append(reader.read(source))
        elif place > self._best:
            self.others.append(file.name)
        else:
            if place < self._best:
                self._best = place
                self.others += [name.name for _, name, _ in self._of_folder]
                self.parts = [p for p in self.parts if all(p is not part for _, _, part in self._of_folder)]
                self._of_folder = []
            part = reader.read(source)
            self._of_folder.append((place, file, part))
            self.parts.append(part)


_SUFFIXES = frozenset(
    (
        "", ".json", ".gz", ".zst", ".trace", ".pftrace", ".perfetto-trace", ".et", ".parquet", ".pickle", ".pkl",
        ".sqlite",
    )
)  # fmt: skip


def _may_be_trace(file: Path) -> bool:
    return file.suffix.lower() in _SUFFIXES
