"""The documentation runs: its commands, its Python and its YAML are executed as printed.

In README.md, CONTRIBUTING.md and docs/*.md, in the order of the page and in one temporary folder per page:

- ```` ```console ```` blocks: every line ``$ tracesim ...`` must exit 0, or with the code of a comment
  ``# exits 1`` behind it. Other commands of the shell are not run; other lines are output.
- ```` ```bash ```` blocks: the same, with or without ``$``.
- ```` ```python ```` blocks are executed; the blocks of one page share their names.
- ```` ```yaml ```` blocks that begin with ``# scenario`` or ``# hardware profile`` are loaded as such. A file name
  behind it (``# scenario: mine.yaml``) keeps the block under that name for the commands that follow.

Files below ``tests/data`` of the repository are there under that name.

``<!-- not run: reason -->`` on the line before a block leaves it out.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from op_graphs.context_parallel.registry import ALGORITHMS
from op_graphs.dispatchers import DISPATCHERS
from op_graphs.huggingface import READERS
from op_graphs.recompute import LAYER_RULES, MODULE_RULES

REPOSITORY = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^(`{3,}|~{3,})\s*(\w*)")
NOT_RUN = re.compile(r"^<!-- not run: \S.* -->$")
YAML_HEAD = re.compile(r"^# (scenario|hardware profile)(?::\s*(\S+))?\s*$")
EXITS = re.compile(r"#\s*exits (\d)\s*$")
RUNNABLE = {"console", "bash", "sh", "python", "yaml"}


@dataclass(frozen=True)
class Block:
    line: int
    language: str
    text: str
    run: bool


def pages() -> list[Path]:
    top = [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md")]
    return [path for path in [*top, *sorted((REPOSITORY / "docs").rglob("*.md"))] if path.is_file()]


def blocks(text: str) -> Iterator[Block]:
    """Fenced blocks of a Markdown text."""
    fence = language = before = ""
    begin, run = 0, True
    body: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if fence and stripped != fence:
            body.append(line)
            continue
        if fence:
            yield Block(begin, language, dedent("\n".join(body) + "\n"), run)
            fence = ""
        elif found := FENCE.match(stripped):
            fence, language, begin, body = found[1], found[2], number, []
            run = not NOT_RUN.match(before)
        before = stripped or before
    assert not fence, f"the block that begins in line {begin} has no end"


def commands(block: Block) -> Iterator[tuple[list[str], int]]:
    """Arguments and expected exit code of the ``tracesim`` commands of a block."""
    for line in block.text.replace("\\\n", " ").splitlines():
        command = line.strip()
        prompted = command.startswith("$ ")
        command = command.removeprefix("$ ")
        if command.split(" ")[0] != "tracesim" or not (prompted or block.language != "console"):
            continue
        expected = EXITS.search(command)
        words = shlex.split(command, comments=True)
        assert not {"|", ">", ">>", "<", "&&", "||", ";"} & set(words), (
            f"{command}: needs a shell; write it without"
        )
        yield words[1:], int(expected[1]) if expected else 0


def run_command(arguments: list[str], expected: int) -> None:
    from click.testing import CliRunner

    from tracesim.cli import main

    result = CliRunner().invoke(main, arguments)
    if result.exit_code != expected:
        pytest.fail(
            f"tracesim {shlex.join(arguments)} exits {result.exit_code}, not {expected}:\n"
            f"{result.output[-2000:]}{result.exception or ''}",
            pytrace=False,
        )


def load_yaml(block: Block) -> None:
    head = YAML_HEAD.match(block.text.partition("\n")[0])
    if head is None:
        return
    path = Path(head[2] or f"line-{block.line}.yaml")
    path.write_text(block.text, "utf-8")
    if head[1] == "scenario":
        from tracesim.scenario import load_scenario

        assert load_scenario(path)
    else:
        from hardware_profiles import load_profile

        assert load_profile(path)


def run_block(block: Block, page: Path, names: dict[str, Any]) -> None:
    if block.language == "python":
        # Padded with empty lines, so that a traceback names the line of the page.
        exec(compile("\n" * block.line + block.text, str(page), "exec"), names)
    elif block.language == "yaml":
        load_yaml(block)
    else:
        for arguments, expected in commands(block):
            run_command(arguments, expected)


@pytest.fixture
def registries() -> Iterator[None]:
    """What a page adds to the program is taken out again: other tests list what there is."""
    found: list[dict[str, Any]] = [READERS, LAYER_RULES, MODULE_RULES, DISPATCHERS, ALGORITHMS]
    before = [dict(registry) for registry in found]
    yield
    for registry, entries in zip(found, before, strict=True):
        registry.clear()
        registry.update(entries)


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_a_page_runs_as_printed(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "data").symlink_to(REPOSITORY / "tests" / "data")
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page.read_text("utf-8")):
        if block.run and block.language in RUNNABLE:
            sys.stdout.write(f"{page.relative_to(REPOSITORY)}:{block.line} ({block.language})\n")
            run_block(block, page, names)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"(`{3,}).*?\1", "", page.read_text("utf-8"), flags=re.DOTALL)
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", prose)]
    local = [link for link in links if link and "://" not in link and not link.startswith("mailto:")]
    assert [link for link in local if not (page.parent / link).exists()] == []


def test_the_module_runs_as_the_command_from_any_folder(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    shown = subprocess.run(
        [sys.executable, "-m", "tracesim", "--help"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert "run" in shown.stdout
    assert list(tmp_path.iterdir()) == []


PAGE = """
Text.
```console
$ pip install tracesim
$ tracesim run small.yaml \\
    --set parallel.pp=2   # two stages
iteration time 1 ms
$ tracesim diff a b --fail-over 1  # exits 1
```
<!-- not run: needs a trace of yours -->
```bash
tracesim read mine.json
```
  ```bash
  tracesim models
  ```
```yaml
# scenario: small.yaml
name: x
```
````text
```python
````
"""


def test_how_a_page_is_read() -> None:
    found = list(blocks(PAGE))
    assert [(block.line, block.language, block.run) for block in found] == [
        (3, "console", True),
        (11, "bash", False),
        (14, "bash", True),
        (17, "yaml", True),
        (21, "text", True),
    ]
    assert list(commands(found[0])) == [
        (["run", "small.yaml", "--set", "parallel.pp=2"], 0),
        (["diff", "a", "b", "--fail-over", "1"], 1),
    ]
    assert list(commands(found[2])) == [(["models"], 0)]


def test_a_command_that_needs_a_shell_is_refused() -> None:
    with pytest.raises(AssertionError, match="needs a shell"):
        list(commands(Block(1, "bash", "tracesim models | head\n", True)))


def test_a_page_with_an_open_block_is_refused() -> None:
    with pytest.raises(AssertionError, match="the block that begins in line 2 has no end"):
        list(blocks("\n```python\nx = 1\n"))
