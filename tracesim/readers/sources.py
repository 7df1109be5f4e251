"""Trace files as bytes: what a path, several paths or a folder hold, decompressed, with damage named."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tracesim.errors import TraceError

DECOMPRESSION_LIMIT = 8 << 30
"""Bytes a compressed trace may unpack to; far above real traces, far below what an archive bomb unpacks to."""

_CHUNK = 16 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_SKIPPED_SUFFIXES = {".yaml", ".yml", ".csv", ".md", ".txt", ".png", ".svg", ".html", ".log", ".py"}


@dataclass(frozen=True)
class Source:
    """One file, decompressed."""

    path: Path
    data: bytes


def trace_files(path: Path) -> tuple[list[Path], bool]:
    """The files a path means, in the order of their names, and whether it is a folder.

    In a folder that ``tracesim run`` wrote, ``trace.pftrace`` stands for all that lies there.

    Raises:
        TraceError: if the path does not exist or the folder has no file that could be a trace.
    """
    if not path.exists():
        raise TraceError(
            f"{path}: no such file or folder. Check the path; a trace is a file or a folder of ranks."
        )
    if not path.is_dir():
        return [path], False
    whole = path / "trace.pftrace"
    if whole.is_file():
        return [whole], True
    found = sorted(p for p in path.iterdir() if p.is_file() and p.suffix.lower() not in _SKIPPED_SUFFIXES)
    found = [p for p in found if not p.name.startswith(".")]
    if not found:
        raise TraceError(
            f"{path}: no file in this folder could be a trace. Give the folder that holds the rank files."
        )
    return found, True


def load(path: Path) -> Source:
    """A file's bytes, unpacked if it is gzip (told by content, not by name).

    Raises:
        TraceError: if it cannot be read, is empty, a git-LFS pointer, damaged gzip, or unpacks over the limit.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(
            f"{path}: cannot be read ({error.strerror}). Check the path and its permissions."
        ) from error
    if data.startswith(_GZIP_MAGIC):
        data = _unpack(path, data)
    if not data or (data[:1].isspace() and not data.strip()):
        raise TraceError(f"{path}: the file is empty. Export the trace again.")
    if data.startswith(_LFS_POINTER):
        raise TraceError(
            f"{path}: a git-LFS pointer of {len(data)} bytes, not the trace. Run `git lfs pull` in its checkout."
        )
    return Source(path, data)


def _unpack(path: Path, packed: bytes) -> bytes:
    pieces = []
    size = 0
    try:
        for piece in _members(packed):
            pieces.append(piece)
            size += len(piece)
            if size > DECOMPRESSION_LIMIT:
                raise TraceError(
                    f"{path}: unpacks to more than {DECOMPRESSION_LIMIT / 2**30:g} GiB from {len(packed)} bytes. "
                    "If it really is a trace, unpack it and profile fewer steps."
                )
    except EOFError as error:
        raise TraceError(
            f"{path}: the gzip stream ends early after {size} unpacked bytes; the file is truncated. Copy it again."
        ) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path}: damaged gzip ({error}). Copy or export the trace again.") from error
    return b"".join(pieces)


def _members(packed: bytes) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=io.BytesIO(packed)) as stream:
        while piece := stream.read(_CHUNK):
            yield piece


def describe_paths(paths: Sequence[Path]) -> str:
    """Short text for messages and for the name of a timeline."""
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
