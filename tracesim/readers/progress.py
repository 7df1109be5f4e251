"""A progress bar while large files are read, on standard error and only if that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

Show: TypeAlias = Callable[[Path], Callable[[int], None]]
"""Given a file, what takes the bytes of it that are done."""

SMALLEST = 32 << 20
"""Bytes on disk above which a file gets a bar."""


@contextmanager
def reading_progress() -> Iterator[Show]:
    """Bars for the files that are large enough; nothing at all where standard error is no terminal."""
    if not sys.stderr.isatty():
        yield lambda file: _silent
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[done]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:

        def show(file: Path) -> Callable[[int], None]:
            size = file.stat().st_size
            if size < SMALLEST:
                return _silent
            task = progress.add_task(f"reading {file.name}", total=None, done="")

            def advance(done: int) -> None:
                progress.update(task, done=f"{done / 2**20:.0f} MiB")
                # Decoding holds the interpreter, so the bar is redrawn here and not by its thread.
                progress.refresh()

            return advance

        yield show


def _silent(done: int) -> None:
    """Nothing to show."""
