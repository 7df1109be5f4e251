"""What the documentation shows is what the commands print and draw.

- A picture in ``docs/pictures/`` has the bytes that its command on ``docs/pictures/README.md`` writes.
- In README.md and docs/*.md, the lines behind ``$ tracesim ...`` in a ``console`` block are lines of its output, in
  order; ``...`` stands for any number of lines.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from test_docs import REPOSITORY, blocks, pages

from tracesim.cli import main

PICTURES = REPOSITORY / "docs" / "pictures"
COPY = re.compile(r"^\$ cp (\S+/pipeline\.svg) docs/pictures/(\S+\.svg)$", re.MULTILINE)


def run(command: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "120")  # the width of a pipe
    return CliRunner().invoke(main, shlex.split(command, comments=True)[1:]).output


def quoted_output(text: str) -> Iterator[tuple[str, list[str]]]:
    """``tracesim`` commands of a page in order, with the lines shown behind each."""
    for block in blocks(text):
        if not block.run or block.language != "console":
            continue
        joined = block.text.replace("\\\n", " ")
        for part in re.split(r"^(?=\$ )", joined, flags=re.MULTILINE):
            command, _, shown = part.partition("\n")
            if command.startswith("$ tracesim "):
                yield command.removeprefix("$ "), shown.splitlines()


def first_difference(shown: list[str], printed: list[str]) -> str | None:
    """The first shown line that is not where it should be; None if all are."""
    at, anywhere = 0, False
    for line in (line.rstrip() for line in shown):
        if line == "...":
            anywhere = True
            continue
        ahead = printed[at:] if anywhere else printed[at : at + 1]
        if line not in ahead:
            return line
        at += ahead.index(line) + 1
        anywhere = False
    return None


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_shown_output_is_printed(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks(page.read_text("utf-8")):
        if block.run and block.language == "yaml" and (name := re.match(r"# scenario: (\S+)", block.text)):
            Path(name[1]).write_text(block.text, "utf-8")
    commands = list(quoted_output(page.read_text("utf-8")))
    last_shown = max((number for number, (_, shown) in enumerate(commands) if shown), default=-1)
    for command, shown in commands[: last_shown + 1]:
        printed = [line.rstrip() for line in run(command, monkeypatch).splitlines()]
        assert first_difference(shown, printed) is None, f"{command} prints:\n" + "\n".join(printed)


@pytest.mark.parametrize("picture", sorted(path.name for path in PICTURES.glob("*.svg")))
def test_a_picture_is_what_its_command_draws(
    picture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (PICTURES / "README.md").read_text("utf-8")
    drawn = {name: path for path, name in COPY.findall(page)}
    assert picture in drawn, "docs/pictures/README.md has no command for it"
    folder = str(Path(drawn[picture]).parent)
    command = next(c for c, _ in quoted_output(page) if shlex.split(c)[-2:] == ["-o", folder])
    run(command, monkeypatch)
    assert Path(drawn[picture]).read_bytes() == (PICTURES / picture).read_bytes(), (
        f"{command} draws another picture: run it at the root of the repository and copy the file"
    )


def test_every_picture_of_the_page_is_there() -> None:
    page = (PICTURES / "README.md").read_text("utf-8")
    assert sorted(name for _, name in COPY.findall(page)) == sorted(p.name for p in PICTURES.glob("*.svg"))


@pytest.mark.parametrize(
    ("shown", "difference"),
    [
        ([], None),
        (["a", "b"], None),
        (["b"], "b"),
        (["...", "c"], None),
        (["a", "...", "d"], None),
        (["...", "c", "b"], "b"),
        (["a", "...", "x"], "x"),
    ],
)
def test_how_shown_lines_are_compared(shown: list[str], difference: str | None) -> None:
    assert first_difference(shown, ["a", "b", "c", "d"]) == difference
