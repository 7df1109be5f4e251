"""Output files and folders: a file is whole or not there, and what stands in the way is said in words."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from .errors import OutputError

_ADVICE = {
    errno.ENOENT: "create its folder first, or choose a path in a folder that exists",
    errno.ENOTDIR: "a part of the path is a file; choose another path",
    errno.EISDIR: "this is a folder; give the path of a file in it",
    errno.EACCES: "choose a folder you may write to",
    errno.EPERM: "choose a folder you may write to",
    errno.EROFS: "the file system is read-only; choose a path on another one",
    errno.ENOSPC: "free some space, or choose a path on another disk",
    errno.EDQUOT: "your quota is used up; free some space, or choose a path on another disk",
    errno.ENAMETOOLONG: "choose a shorter name",
}
_serial = itertools.count()


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A binary file that takes its place under ``path`` when the block ends, and vanishes if the block fails.

    Whatever lay under ``path`` stays untouched until then. A device or pipe (``/dev/null``, ``/dev/stdout``) is written
    to directly, since it must not be replaced. An :class:`OSError` of the block about some other file passes through.

    Raises:
        OutputError: if the file cannot be written; the message names the path, the reason and what to do.
    """
    target = Path(path)
    if target.is_dir():
        raise _error(target, OSError(errno.EISDIR, os.strerror(errno.EISDIR)))
    direct = target.exists() and not target.is_file()
    written = target if direct else target.with_name(f".tracesim-{os.getpid()}-{next(_serial)}.partial")
    try:
        with open(written, "wb") as file:
            yield file
        if not direct:
            written.replace(target)
    except OSError as error:
        if error.filename in (None, str(written), written):
            raise _error(target, error) from error
        raise
    finally:
        if not direct:
            _remove(written)


def output_folder(path: str | os.PathLike[str]) -> Path:
    """The folder ``path``, created with its parents where missing, in which a file can be written.

    Raises:
        OutputError: if a file is in the way or the folder is not writable; the message says what to do.
    """
    if not os.fspath(path):
        raise OutputError("the output folder has an empty name; give a path, or . for the present folder")
    folder = Path(path)
    probe = folder / f".tracesim-{os.getpid()}-{next(_serial)}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch(exist_ok=False)
    except FileExistsError as error:
        # Raised for a path that exists and is not a folder; "file exists" alone would not say what is wrong.
        raise OutputError(
            f"cannot use {folder} as output folder: a file of this name exists; choose another folder or remove it"
        ) from error
    except OSError as error:
        raise _error(folder, error) from error
    finally:
        _remove(probe)
    return folder


def _error(path: Path, error: OSError) -> OutputError:
    reason = (error.strerror or str(error)).lower()
    advice = _ADVICE.get(error.errno or 0, "choose another path")
    return OutputError(f"cannot write {path}: {reason}; {advice}")


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except OSError:
        # It was renamed, or never made; where it cannot be removed the first error is the one worth reading.
        return
