"""Trace files as bytes: what a path, several paths or a folder hold, decompressed, with damage named."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TypeAlias

from tracesim.errors import TraceError

DECOMPRESSION_LIMIT = 8 << 30
"""Bytes a compressed trace may unpack to; far above real traces, far below what an archive bomb unpacks to."""

_CHUNK = 16 << 20
# Small enough that the allocator gives the same warm memory for piece after piece.
_PACKED_CHUNK = 64 << 10
_GZIP_CHUNK = 256 << 10
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
FileBytes: TypeAlias = bytes | bytearray
"""What a file holds. That which is loaded can be written to, which a reader does that would else have to copy it."""

_SKIPPED_SUFFIXES = {".yaml", ".yml", ".csv", ".md", ".txt", ".png", ".svg", ".html", ".log", ".py"}


@dataclass(frozen=True)
class Source:
    """One file, decompressed."""

    path: Path
    data: FileBytes
    keep_origins: bool = False
    """Whether the reader shall fill :attr:`Timeline.origins` and keep every slice, for a conversion."""
    progress: Callable[[int], None] = field(default=lambda done: None, compare=False, repr=False)
    """Is told how many of the bytes a reader has worked through."""


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


def load(path: Path, progress: Callable[[int], None] = lambda done: None) -> Source:
    """A file's bytes, unpacked if it is gzip or Zstandard (told by content, not by name).

    Raises:
        TraceError: if it cannot be read, is empty, a git-LFS pointer, damaged, unpacks over the limit, or is Zstandard
            where the package for it is missing.
    """
    try:
        with path.open("rb") as file:
            data = _whole(file)
    except OSError as error:
        raise TraceError(
            f"{path}: cannot be read ({error.strerror}). Check the path and its permissions."
        ) from error
    if data.startswith(_GZIP_MAGIC):
        data = _unpack(path, data, "gzip", _gzip_pieces(data), progress)
    elif data.startswith(_ZSTD_MAGIC):
        data = _unpack(path, data, "Zstandard", _zstd_pieces(path, data), progress)
    if not data or data.isspace():
        raise TraceError(f"{path}: the file is empty. Export the trace again.")
    if data.startswith(_LFS_POINTER):
        raise TraceError(
            f"{path}: a git-LFS pointer of {len(data)} bytes, not the trace. Run `git lfs pull` in its checkout."
        )
    return Source(path, data)


def _whole(file: BinaryIO) -> bytearray:
    """All of a file, at its size at once where it has one."""
    data = bytearray(os.fstat(file.fileno()).st_size)
    read = 0
    with memoryview(data) as room:
        while read < len(data) and (taken := file.readinto(room[read:])):  # type: ignore[attr-defined]
            read += taken
    del data[read:]
    # A pipe has no size, and a file can grow.
    data += file.read()
    return data


def _unpack(
    path: Path, packed: FileBytes, form: str, pieces: Iterator[bytes], progress: Callable[[int], None]
) -> bytearray:
    # Grows in place, unlike a list of pieces that are joined.
    unpacked = bytearray()
    try:
        for piece in pieces:
            unpacked += piece
            progress(len(unpacked))
            if len(unpacked) > DECOMPRESSION_LIMIT:
                raise TraceError(
                    f"{path}: unpacks to more than {DECOMPRESSION_LIMIT / 2**30:g} GiB from {len(packed)} bytes. "
                    "If it really is a trace, unpack it and profile fewer steps."
                )
    except EOFError as error:
        raise TraceError(
            f"{path}: the {form} stream ends early after {len(unpacked)} unpacked bytes; the file is truncated. "
            "Copy it again."
        ) from error
    except (zlib.error, _DamagedZstdError) as error:
        raise TraceError(f"{path}: damaged {form} ({error}). Copy or export the trace again.") from error
    return unpacked


class _DamagedZstdError(Exception):
    """Zstandard's own error, whose class is only there with the package."""


def _gzip_pieces(packed: FileBytes) -> Iterator[bytes]:
    """The pieces of all members; zlib itself checks their sums, which :mod:`gzip` would do in a second pass.

    Raises:
        EOFError: if the last member is cut off.
        zlib.error: if a member is damaged; bytes after the last member that begin none are left out.
    """
    at = 0
    while packed.startswith(_GZIP_MAGIC, at):
        member = zlib.decompressobj(wbits=31)
        while not member.eof:
            taken = packed[at : at + _PACKED_CHUNK]
            if not taken:
                raise EOFError
            piece = member.decompress(taken, _GZIP_CHUNK)
            at += len(taken) - len(member.unconsumed_tail) - len(member.unused_data)
            if piece:
                yield piece


def _zstd_pieces(path: Path, packed: FileBytes) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise TraceError(
            f"{path}: packed with Zstandard, and the package to unpack it is not installed. "
            "Run `pip install tracesim[zstd]`, or unpack it with `zstd -d`."
        ) from error
    try:
        with zstandard.ZstdDecompressor().stream_reader(
            io.BytesIO(packed), read_across_frames=True
        ) as stream:
            while piece := stream.read(_CHUNK):
                yield piece
    except zstandard.ZstdError as error:
        raise _DamagedZstdError(str(error)) from error


def describe_paths(paths: Sequence[Path]) -> str:
    """Short text for messages and for the name of a timeline."""
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
