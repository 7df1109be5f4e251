"""What may import what, how long files and functions may be, and what names are not given.

The tables are the rules. A number in an exception table is the present count: it may fall, and then the table must
follow, but it may not rise.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

ALLOWED_IMPORTS: dict[str, frozenset[str]] = {
    "hardware_profiles": frozenset(),
    "op_graphs": frozenset(),
    "schedules": frozenset({"op_graphs"}),
    "exporters": frozenset({"op_graphs"}),
    "tracesim": frozenset({"hardware_profiles", "op_graphs", "schedules", "exporters"}),
}
"""Package -> the others that it may import."""
PACKAGES = tuple(ALLOWED_IMPORTS)

FILE_LIMIT = 500
LONG_FILES: dict[str, tuple[int, str]] = {}
"""File -> (its lines, why they belong together)."""

FUNCTION_LIMIT = 60
LONG_FUNCTIONS: dict[str, tuple[int, str]] = {}
"""``file::function`` -> (its lines without docstring, why it is not split)."""

EMPTY_NAMES = frozenset(
    {"util", "utils", "helper", "helpers", "common", "misc", "shared", "lib", "core", "tools"}
)
"""File names that say nothing about what a file holds."""


@cache
def sources(*folders: str) -> dict[Path, ast.Module]:
    """Parsed Python files of the folders, by path relative to the repository."""
    paths = sorted(path for folder in folders for path in (REPOSITORY / folder).rglob("*.py"))
    return {path.relative_to(REPOSITORY): ast.parse(path.read_text("utf-8")) for path in paths}


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Full names of what a file imports, with the line: ``from a import b`` gives ``a.b``."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - (node.level - 1)] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def module_arrows(trees: dict[Path, ast.Module]) -> dict[str, set[str]]:
    """Module -> modules that it imports, of those in ``trees``."""
    modules = {module_name(path) for path in trees}
    arrows: dict[str, set[str]] = {}
    for path, tree in trees.items():
        found = arrows.setdefault(module_name(path), set())
        for name, _ in imports(path, tree):
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules and target != module_name(path):
                found.add(target)
    return arrows


def find_cycle(arrows: dict[str, set[str]]) -> list[str]:
    """The nodes of some cycle, its first node again at the end; empty if there is none."""
    done: set[str] = set()

    def visit(node: str, way: list[str]) -> list[str]:
        if node in way:
            return [*way[way.index(node) :], node]
        if node in done:
            return []
        for target in sorted(arrows.get(node, ())):
            if cycle := visit(target, [*way, node]):
                return cycle
        done.add(node)
        return []

    return next((cycle for node in sorted(arrows) if (cycle := visit(node, []))), [])


def functions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Name and lines, without docstring, of every function and method."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0]
            documented = ast.get_docstring(node, clean=False) is not None
            docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
            yield node.name, (node.end_lineno or 0) - node.lineno + 1 - docstring


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_the_table_allows(package: str) -> None:
    allowed = ALLOWED_IMPORTS[package] | {package}
    wrong = [
        f"{path}:{line} imports {name}"
        for path, tree in sources(package).items()
        for name, line in imports(path, tree)
        if (top := name.partition(".")[0]) in {*PACKAGES, "tests", "benchmarks"} and top not in allowed
    ]
    assert wrong == [], f"{package} may import {sorted(ALLOWED_IMPORTS[package]) or 'nothing of ours'}"


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_need_only_what_is_declared(package: str) -> None:
    project = (REPOSITORY / "pyproject.toml").read_text("utf-8")
    block = re.search(r"^dependencies = \[(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    assert block is not None
    # Extras that are asked for by name when a file needs them; the import stands inside a function.
    extras = re.findall(r"^(?:zstd|parquet|png) = \[(.*?)\]", project, re.MULTILINE)
    declared = {name.lower() for name in re.findall(r'"([A-Za-z0-9_-]+)', " ".join([block[1], *extras]))}
    imported_as = {"yaml": "pyyaml", "google": "protobuf", "PIL": "pillow"}
    wrong = [
        f"{path}:{line} imports {name}"
        for path, tree in sources(package).items()
        for name, line in imports(path, tree)
        if (top := name.partition(".")[0]) not in {*sys.stdlib_module_names, *PACKAGES}
        and imported_as.get(top, top) not in declared
    ]
    assert wrong == [], f"pyproject.toml declares {sorted(declared)}"


def test_no_cycles_between_files() -> None:
    assert find_cycle(module_arrows(sources(*PACKAGES))) == []


def test_no_cycles_between_folders() -> None:
    """A folder inside a package counts as one node, a file directly in the package as another."""
    arrows: dict[str, set[str]] = {}
    trees = sources(*PACKAGES)
    folders = {".".join(path.parts[:2]) for path in trees if len(path.parts) > 2}

    def node(module: str) -> str:
        inner = ".".join(module.split(".")[:2])
        return inner if inner in folders else module

    for module, targets in module_arrows(trees).items():
        arrows.setdefault(node(module), set()).update(node(t) for t in targets if node(t) != node(module))
    assert find_cycle(arrows) == []


@pytest.mark.parametrize(
    ("arrows", "cycle"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b", "c"}, "b": {"c"}, "c": {"b"}}, ["b", "c", "b"]),
        ({"a": {"a"}}, ["a", "a"]),
    ],
)
def test_the_search_for_cycles_finds_them(arrows: dict[str, set[str]], cycle: list[str]) -> None:
    assert find_cycle(arrows) == cycle


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("tracesim/memory/curve.py", "from ..errors import TraceError", ["tracesim.errors.TraceError"]),
        ("tracesim/memory/__init__.py", "from .curve import peak", ["tracesim.memory.curve.peak"]),
        ("tracesim/engine.py", "from . import errors", ["tracesim.errors"]),
        ("tracesim/engine.py", "def f():\n    import op_graphs.graph", ["op_graphs.graph"]),
    ],
)
def test_imports_are_resolved(path: str, text: str, expected: list[str]) -> None:
    assert [name for name, _ in imports(Path(path), ast.parse(text))] == expected


def test_files_are_named_for_what_they_hold() -> None:
    every = sources(*PACKAGES, "benchmarks", "tests")
    wrong = [str(path) for path in every if EMPTY_NAMES & {path.stem.lstrip("_"), *path.parts[1:-1]}]
    assert wrong == []


def check_budget(
    counts: dict[str, int], limit: int, exceptions: dict[str, tuple[int, str]], table: str
) -> None:
    over = {name: count for name, count in counts.items() if count > limit}
    grown = {name: count for name, count in over.items() if count > exceptions.get(name, (limit, ""))[0]}
    assert grown == {}, f"over {limit} lines, or over their entry in {table}: split them"
    stale = {
        name: (lines, over.get(name)) for name, (lines, _) in exceptions.items() if over.get(name) != lines
    }
    assert stale == {}, f"these became shorter (entry, now): lower or remove the entry in {table}"
    assert all(reason for _, reason in exceptions.values()), f"every entry in {table} has a reason"


def test_files_stay_short() -> None:
    every = sources(*PACKAGES, "benchmarks", "tests")
    counts = {path.as_posix(): len((REPOSITORY / path).read_text("utf-8").splitlines()) for path in every}
    check_budget(counts, FILE_LIMIT, LONG_FILES, "LONG_FILES")


def test_functions_stay_short() -> None:
    counts: dict[str, int] = {}
    for path, tree in sources(*PACKAGES, "benchmarks", "tests").items():
        for name, lines in functions(tree):
            key = f"{path.as_posix()}::{name}"
            counts[key] = max(lines, counts.get(key, 0))
    check_budget(counts, FUNCTION_LIMIT, LONG_FUNCTIONS, "LONG_FUNCTIONS")


def exported(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
        ):
            return [str(name) for name in ast.literal_eval(node.value)]
    return None


def defined(tree: ast.Module) -> set[str]:
    """Names that a module's own statements bind, also under ``if TYPE_CHECKING`` and the like."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def test_what_a_module_exports_exists_once() -> None:
    wrong = []
    for path, tree in sources(*PACKAGES).items():
        names = exported(tree) or []
        missing = sorted(set(names) - defined(tree))
        twice = sorted({name for name in names if names.count(name) > 1})
        if missing or twice:
            wrong.append(f"{path}: not defined {missing}, twice {twice}")
    assert wrong == []


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_say_what_they_export(package: str) -> None:
    names = exported(sources(package)[Path(package) / "__init__.py"])
    assert names, f"{package}/__init__.py has no __all__"
    assert not [name for name in names if name.startswith("_") and name != "__version__"]


def test_every_module_opens_with_what_it_is_about() -> None:
    every = sources(*PACKAGES, "benchmarks")
    assert [str(path) for path, tree in every.items() if tree.body and not ast.get_docstring(tree)] == []
