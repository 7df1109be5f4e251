"""Rows of bytes with one fixed layout, filled column by column and scattered to where they belong in a buffer.

A *template* is the constant part of a row with slots for the values. Rows of one template form a 2-D byte array; a
slot is written for all rows at once as machine words of 1, 2, 4 or 8 bytes. Rows of different widths are then put
into one output buffer at their byte offsets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from op_graphs.columns import Int64

Bytes = npt.NDArray[np.uint8]

WORDS: dict[int, str] = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}


@dataclass(frozen=True)
class Slot:
    """Where a column goes in a row: ``width`` bytes from ``offset`` on."""

    column: str
    offset: int
    width: int


class Column(Protocol):
    """Values that can be written into a slot."""

    def write(self, rows_to: Bytes, slot: Slot, rows: slice) -> None:
        """Write the values of ``rows`` into their slot."""


@dataclass(frozen=True)
class Template:
    """The constant bytes of a row and its slots. Templates concatenate with ``+``."""

    constant: bytes
    slots: tuple[Slot, ...] = ()

    def __add__(self, other: Template | bytes) -> Template:
        if isinstance(other, bytes):
            return Template(self.constant + other, self.slots)
        moved = tuple(Slot(s.column, s.offset + len(self.constant), s.width) for s in other.slots)
        return Template(self.constant + other.constant, self.slots + moved)

    def __len__(self) -> int:
        return len(self.constant)

    def fill(self, columns: Mapping[str, Column], rows: slice) -> Bytes:
        """Rows of this template with the values of the columns at ``rows``."""
        filled = rows_of(self.constant, rows.stop - rows.start)
        for slot in self.slots:
            columns[slot.column].write(filled, slot, rows)
        return filled


def rows_of(template: bytes, count: int) -> Bytes:
    """``count`` copies of a template, shape ``[count, len(template)]``."""
    rows = np.empty((count, len(template)), dtype=np.uint8)
    rows[:] = np.frombuffer(template, dtype=np.uint8)
    return rows


def put_words(rows: Bytes, offset: int, width: int, words: npt.NDArray[Any]) -> None:
    """Write one machine word a row at byte ``offset``, little-endian, cut to ``width`` (1, 2, 4 or 8) bytes."""
    column: npt.NDArray[Any] = np.ndarray(
        (len(rows),), WORDS[width], buffer=rows.data, offset=offset, strides=(rows.strides[0],)
    )
    column[...] = words


def scatter_rows(buffer: Bytes, offsets: Int64, rows: Bytes) -> None:
    """Copy row ``i`` to ``buffer[offsets[i]:]``."""
    if len(rows):
        width = rows.shape[1]
        _windows(buffer, width)[offsets] = np.ascontiguousarray(rows).view(f"V{width}")[:, 0]


def scatter_strings(buffer: Bytes, offsets: Int64, pool: Bytes, begins: Int64, lengths: Int64) -> None:
    """Copy ``pool[begins[i]:begins[i] + lengths[i]]`` to ``buffer[offsets[i]:]``."""
    for length in np.unique(lengths):
        if length:
            rows = np.flatnonzero(lengths == length)
            _windows(buffer, int(length))[offsets[rows]] = _windows(pool, int(length))[begins[rows]]


def _windows(buffer: Bytes, width: int) -> npt.NDArray[Any]:
    """Every run of ``width`` bytes of a buffer, as one overlapping item a byte: an item is copied in one move."""
    windows: npt.NDArray[Any] = np.ndarray(
        (len(buffer) - width + 1,), f"V{width}", buffer=buffer.data, strides=(1,)
    )
    return windows
