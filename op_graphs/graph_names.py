"""Strings, shapes and process groups that the programs of a graph share."""

from __future__ import annotations

from .columns import StringTable
from .graph import Shape
from .timeline import CommunicationGroup


class GraphNames:
    """Strings, shapes and groups shared by all programs of a graph, interned in order of first use."""

    def __init__(self) -> None:
        self.strings = StringTable()
        self._groups: dict[CommunicationGroup, int] = {}
        self._shapes: dict[Shape, int] = {}

    def shape(self, shape: Shape) -> int:
        """Index of a shape signature; -1 for none."""
        if shape is None:
            return -1
        return self._shapes.setdefault(shape, len(self._shapes))

    def shapes(self) -> tuple[Shape, ...]:
        """All shape signatures, at their index."""
        return tuple(self._shapes)

    def group(self, name: str, ranks: tuple[int, ...]) -> int:
        """Index of a process group."""
        return self._groups.setdefault(CommunicationGroup(name, ranks, len(ranks)), len(self._groups))

    def groups(self) -> tuple[CommunicationGroup, ...]:
        """All process groups, at their index."""
        return tuple(self._groups)
