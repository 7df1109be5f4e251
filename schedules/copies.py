"""A graph is copies of few programs: their columns, copied in one pass each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Int64
from op_graphs.graph import Operations
from op_graphs.program import Program

from .actions import Action


@dataclass
class Part:
    """A copied program, or a single transfer."""

    program: Program
    base: int
    rank: int
    microbatch: int
    name: str
    stage: int
    action: Action | None

    @property
    def begin(self) -> int:
        """First row that does not start ahead of the action."""
        return self.base + self.program.lead


@dataclass(frozen=True)
class ProgramCopies:
    """Programs laid out after one another, most of them many times."""

    programs: tuple[Program, ...]
    """Each program once."""
    copied: Int64
    """For each copy, which of the programs."""
    base: Int64
    """For each copy, its first row."""

    @classmethod
    def of(cls, programs: Sequence[Program], bases: Sequence[int]) -> ProgramCopies:
        """The copies, from the program and the first row of each."""
        numbers: dict[int, int] = {}
        copied = [numbers.setdefault(id(program), len(numbers)) for program in programs]
        each_once = {id(program): program for program in programs}
        return cls(tuple(each_once.values()), np.array(copied, np.int64), np.array(bases, np.int64))

    def spread(self, values: Sequence[int]) -> Int64:
        """One value a copy, repeated for each of its operations."""
        return np.repeat(np.array(values, np.int64), self._lengths([len(item) for item in self.programs]))

    def operations(self) -> Operations:
        """The operations of all copies."""
        table = Operations.concatenate(program.operations for program in self.programs)
        return table.take(self._taken([len(program) for program in self.programs]))

    def dependencies(self) -> tuple[Int64, Int64]:
        """For each dependency inside a copy: the row that waits, and the one it waits for."""
        counts = [len(program.dependency_rows) for program in self.programs]
        taken = self._taken(counts)
        base = np.repeat(self.base, self._lengths(counts))
        rows = np.concatenate([program.dependency_rows for program in self.programs])
        sources = np.concatenate([program.dependencies for program in self.programs])
        return rows[taken] + base, sources[taken] + base

    def _lengths(self, sizes: Sequence[int]) -> Int64:
        """For each copy, how many entries its program has."""
        return np.array(sizes, np.int64)[self.copied]

    def _taken(self, sizes: Sequence[int]) -> Int64:
        """For each entry of each copy, where it is among the entries of all programs."""
        first = np.cumsum([0, *sizes[:-1]])[self.copied]
        lengths = self._lengths(sizes)
        taken: Int64 = np.arange(lengths.sum()) + np.repeat(first - np.cumsum(lengths) + lengths, lengths)
        return taken
