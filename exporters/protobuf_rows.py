"""Protobuf messages: a plain encoder for the few, and fixed-layout rows for the many.

Wire format: https://protobuf.dev/programming-guides/encoding/. A varint may be padded: continuation bits on and
zeros on top; all parsers accept it. So a varint slot has one width for all rows, messages have one length, and
lengths are constants of the template.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from op_graphs.columns import Int32, Int64

from .byte_rows import Bytes, Slot, Template, put_words

Words = npt.NDArray[np.uint64]

_PIECES: dict[int, tuple[int, ...]] = {
    1: (1,),
    2: (2,),
    3: (2, 1),
    4: (4,),
    5: (4, 1),
    6: (4, 2),
    7: (4, 2, 1),
    8: (8,),
}
"""Machine words that a slot of each width is written with."""


def varint(value: int) -> bytes:
    """A base-128 varint; a negative value as its 64-bit two's complement, as ``int64`` fields want it."""
    value &= (1 << 64) - 1
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def tag(field: int, wire_type: int) -> bytes:
    """Key of a field; wire type 0 is a varint, 1 is 64 bits, 2 is length-delimited."""
    return varint(field << 3 | wire_type)


def varint_field(field: int, value: int) -> bytes:
    """An integer, boolean or enum field."""
    return tag(field, 0) + varint(value)


def double_field(field: int, value: float) -> bytes:
    """A ``double`` field."""
    return tag(field, 1) + struct.pack("<d", value)


def bytes_field(field: int, value: bytes) -> bytes:
    """A ``bytes`` field or an embedded message."""
    return tag(field, 2) + varint(len(value)) + value


def string_field(field: int, value: str) -> bytes:
    """A ``string`` field; what UTF-8 cannot hold (lone surrogates) becomes a question mark."""
    return bytes_field(field, value.encode("utf-8", errors="replace"))


def embedded(field: int, message: Template) -> Template:
    """A message with slots as an embedded message in a field of another."""
    return Template(tag(field, 2) + varint(len(message))) + message


def varint_slot(field: int, column: str, width: int) -> Template:
    """An integer field whose value comes from a column, in a varint of ``width`` bytes."""
    key = tag(field, 0)
    return Template(key + bytes(width), (Slot(column, len(key), width),))


def fixed64_slot(field: int, column: str) -> Template:
    """A ``double`` or ``fixed64`` field whose value comes from a column."""
    key = tag(field, 1)
    return Template(key + bytes(8), (Slot(column, len(key), 8),))


@dataclass(frozen=True)
class PackedColumn:
    """Values of one column as the bytes they take in a row: ``low`` the first eight, ``high`` those after."""

    low: Words
    high: Words | None = None

    def write(self, rows_to: Bytes, slot: Slot, rows: slice) -> None:
        """Write the values of ``rows`` into their slot."""
        values, done = self.low[rows], 0
        for piece in _PIECES[min(slot.width, 8)]:
            put_words(rows_to, slot.offset + done, piece, values >> np.uint64(8 * done) if done else values)
            done += piece
        if self.high is not None:
            put_words(rows_to, slot.offset + 8, 2, self.high[rows])

    def take(self, indices: Int32 | Int64) -> PackedColumn:
        """The values at some indices."""
        return PackedColumn(self.low.take(indices), None if self.high is None else self.high.take(indices))


def varint_width(smallest: int, largest: int) -> int:
    """Bytes of a varint that holds every value between two limits: 1 to 8, or 10 for negative or huge values."""
    if smallest < 0 or largest >= 1 << 56:
        return 10
    return max(1, -(-int(largest).bit_length() // 7))


def pack_varints(values: Int64, width: int) -> PackedColumn:
    """Integers as varints padded to ``width`` bytes; the values must fit (see :func:`varint_width`)."""
    words: Words = values.view(np.uint64)
    if width == 10:
        low = _spread(words & np.uint64((1 << 56) - 1)) | np.uint64(0x8080808080808080)
        ninth = words >> np.uint64(56) & np.uint64(0x7F) | np.uint64(0x80)
        return PackedColumn(low, ninth | words >> np.uint64(63) << np.uint64(8))
    if width == 1:
        return PackedColumn(words)
    continuation = np.uint64(int.from_bytes(b"\x80" * (width - 1), "little"))
    if width == 2:
        return PackedColumn(
            words & np.uint64(0x7F) | (words & np.uint64(0x3F80)) << np.uint64(1) | continuation
        )
    return PackedColumn(_spread(words) | continuation)


def _spread(words: Words) -> Words:
    """Move each 7 bits of a 56-bit number to a byte of their own, halving the groups three times."""
    for low, high, shift in _SPREAD_STEPS:
        upper = words & high
        upper <<= shift
        words = words & low
        words |= upper
    return words


_SPREAD_STEPS: tuple[tuple[np.uint64, np.uint64, np.uint64], ...] = (
    (np.uint64(0x0FFFFFFF), np.uint64(0xFFFFFFF0000000), np.uint64(4)),
    (np.uint64(0x00003FFF00003FFF), np.uint64(0x0FFFC0000FFFC000), np.uint64(2)),
    (np.uint64(0x007F007F007F007F), np.uint64(0x3F803F803F803F80), np.uint64(1)),
)
