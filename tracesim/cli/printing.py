"""How commands print: JSON to stdout, tables to stdout, progress to stderr when it is a terminal."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console

_WIDTH_IN_PIPES = 120


def print_json(data: Any) -> None:  # noqa: ANN401
    """Print JSON-ready data with stable order."""
    click.echo(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False))


def output_console() -> Console:
    """Console for tables; as wide as the terminal, or a fixed width where there is none."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    width = None if is_terminal else max(_WIDTH_IN_PIPES, shutil.get_terminal_size().columns)
    return _Console(width=width, highlight=False)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave a reader that went away to the command line's one place for it."""
        raise BrokenPipeError


@contextmanager
def progress(text: str) -> Iterator[None]:
    """Show that something long is going on, on stderr and only in a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(text):
        yield
