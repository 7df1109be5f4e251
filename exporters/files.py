"""Output files: written beside their place and renamed, so that a file is either whole or not there."""

from __future__ import annotations

import contextlib
import gzip
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol, TypeAlias


class ExportError(ValueError):
    """An output file cannot be written, or a timeline holds what no trace file can express."""


class ByteSink(Protocol):
    """What an exporter writes to: anything with a ``write`` for bytes."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Take the next bytes."""


Output: TypeAlias = "BinaryIO | ByteSink | str | os.PathLike[str]"


@contextlib.contextmanager
def opened(output: Output) -> Iterator[ByteSink]:
    """A sink for bytes: the given stream, or a file that appears under its path once it is complete.

    A path ending in ``.gz`` is compressed, without the time of writing, so that equal traces are equal files.

    Raises:
        ExportError: if the file cannot be written; nothing is left behind then.
    """
    if not isinstance(output, (str, os.PathLike)):
        yield output
        return
    path = Path(output)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(beside, "wb") as file:
            if path.suffix == ".gz":
                with gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=5, mtime=0) as packed:
                    yield packed
            else:
                yield file
        beside.replace(path)
    except OSError as error:
        raise ExportError(
            f"cannot write {path}: {error.strerror or error}; choose a folder that exists and is writable"
        ) from error
    finally:
        beside.unlink(missing_ok=True)
