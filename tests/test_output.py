"""Output files are whole or absent, and what stands in the way is named with a way out."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from tracesim.errors import OutputError
from tracesim.output import atomic_write, output_folder


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_the_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "report.json") as file:
        file.write(b"{}")
        assert "report.json" not in names(tmp_path)
    assert (tmp_path / "report.json").read_bytes() == b"{}"
    assert names(tmp_path) == ["report.json"]


@pytest.mark.parametrize(
    "failure", [RuntimeError("broken"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()]
)
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, failure: BaseException) -> None:
    target = tmp_path / "trace.pftrace"
    target.write_bytes(b"old")

    def write() -> None:
        with atomic_write(target) as file:
            file.write(b"half of the n")
            raise failure

    with pytest.raises(type(failure)):
        write()
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["trace.pftrace"]


def test_files_get_the_permissions_of_ordinary_files(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "written") as file:
        file.write(b"1")
    (tmp_path / "ordinary").write_bytes(b"1")
    modes = {name: stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in names(tmp_path)}
    assert modes["written"] == modes["ordinary"]


def test_two_files_of_one_folder_can_be_open_at_once(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "a") as a, atomic_write(tmp_path / "b") as b:
        a.write(b"1")
        b.write(b"2")
    assert [(tmp_path / name).read_bytes() for name in "ab"] == [b"1", b"2"]


@pytest.mark.skipif(os.name != "posix", reason="devices in the file system are a POSIX idea")
def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with atomic_write(tmp_path / "pipe") as file:
            file.write(b"through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)


BAD_FILES = [
    ("missing/report.json", "cannot write {path}: no such file or directory; create its folder first"),
    ("file/report.json", "cannot write {path}: not a directory; a part of the path is a file"),
    ("folder", "cannot write {path}: is a directory; this is a folder; give the path of a file in it"),
]


@pytest.mark.parametrize(("name", "message"), BAD_FILES)
def test_paths_that_cannot_be_written(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError) as caught, atomic_write(tmp_path / name):
        pytest.fail("the block must not run")
    assert str(caught.value).startswith(message.format(path=tmp_path / name))
    assert names(tmp_path) == ["file", "folder"]


def test_a_full_disk_is_named_and_other_files_are_not_blamed_on_the_output(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"out: no space left on device; free some space"):  # noqa: SIM117
        with atomic_write(tmp_path / "out"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(FileNotFoundError, match="input"):  # noqa: SIM117
        with atomic_write(tmp_path / "out"):
            (tmp_path / "input").read_bytes()
    assert names(tmp_path) == []


def test_folders_are_made_with_their_parents_and_left_empty(tmp_path: Path) -> None:
    folder = output_folder(tmp_path / "runs" / "monday")
    assert folder == tmp_path / "runs" / "monday"
    assert names(folder) == []
    (folder / "kept").write_bytes(b"")
    assert names(output_folder(folder)) == ["kept"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "file",
            "cannot use {path} as output folder: a file of this name exists; choose another folder or remove it",
        ),
        (
            "file/below",
            "cannot write {path}: not a directory; a part of the path is a file; choose another path",
        ),
    ],
)
def test_a_file_in_the_way_of_a_folder(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file").write_bytes(b"kept")
    with pytest.raises(OutputError) as caught:
        output_folder(tmp_path / name)
    assert str(caught.value) == message.format(path=tmp_path / name)
    assert (tmp_path / "file").read_bytes() == b"kept"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that even root cannot write to")
def test_a_folder_that_is_not_writable() -> None:
    with pytest.raises(OutputError, match=r"^cannot write /proc: .+; (choose|create) "):
        output_folder("/proc")
    with (
        pytest.raises(OutputError, match=r"^cannot write /proc/report.json: "),
        atomic_write("/proc/report.json"),
    ):
        pytest.fail("the block must not run")
