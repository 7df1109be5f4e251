"""Protobuf packets as columns, without a Python step per packet.

A trace is one message of many packets (field 1). Packets of one length are laid under one another as the rows of a
byte matrix; the first row is walked field by field, and all rows whose tags and lengths stand at the same places are
read column by column. What is left starts the next round. Wire format:
https://protobuf.dev/programming-guides/encoding/; padded varints are read as any others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from op_graphs.columns import Int64
from tracesim.readers.sources import FileBytes

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
Path: TypeAlias = tuple[int, ...]

VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5
_PACKET_TAG = 0x0A


class DamagedMessageError(ValueError):
    """The bytes are no protobuf message, or end in the middle of one; the message says where."""


@dataclass(frozen=True)
class Field:
    """A field of one packet: where its value lies, relative to the packet, and the messages it lies in."""

    path: Path
    """Field numbers from the packet inwards."""
    wire: int
    begin: int
    end: int
    parent: int
    """Position of the enclosing message, so that fields of one message can be told from those of its sibling."""


@dataclass(frozen=True)
class Shape:
    """Packets whose fields stand at the same places: their numbers in the file and their bytes, one row a packet."""

    packets: Int64
    rows: Bytes
    fields: tuple[Field, ...]

    def column(self, field: Field) -> Words:
        """The values of a number field; shape [packets]."""
        return read_numbers(self.rows, field)


def read_numbers(rows: Bytes, field: Field) -> Words:
    """Varints or 64-bit numbers of one field in all rows, as unsigned words."""
    if field.wire == FIXED64:
        return np.ascontiguousarray(rows[:, field.begin : field.end]).view("<u8")[:, 0]
    value = np.zeros(len(rows), dtype=np.uint64)
    for index in range(field.end - field.begin):
        low = (rows[:, field.begin + index] & 0x7F).astype(np.uint64)
        value |= low << np.uint64(7 * index)
    return value


def packet_bounds(data: FileBytes) -> tuple[Int64, Int64]:
    """First byte and length of each packet of a trace.

    Raises:
        DamagedMessageError: if the packets do not fill the data exactly.
    """
    begins: list[int] = []
    lengths: list[int] = []
    position, size = 0, len(data)
    # One step a packet: each length says where the next one lies.
    while position < size:
        if data[position] != _PACKET_TAG:
            raise DamagedMessageError(f"byte {position} begins no packet")
        position += 1
        length = shift = 0
        while True:
            if position >= size or shift > 63:
                raise DamagedMessageError(f"the length of packet {len(begins)} is cut off at byte {position}")
            byte = data[position]
            position += 1
            length |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
        begins.append(position)
        lengths.append(length)
        position += length
    if position != size:
        raise DamagedMessageError(
            f"packet {len(begins) - 1} needs {position - size} more bytes than there are"
        )
    return np.array(begins, dtype=np.int64), np.array(lengths, dtype=np.int64)


def shapes(
    data: FileBytes, begins: Int64, lengths: Int64, messages: frozenset[Path], fixed: frozenset[Path]
) -> Iterator[Shape]:
    """Groups of packets with equal layout.

    Args:
        data: the whole trace.
        begins: first byte of each packet, shape [packets].
        lengths: bytes of each packet, shape [packets].
        messages: paths of fields that are messages to look into; other delimited fields count as text.
        fixed: paths of number fields that must be equal in a group (such as the name of an annotation).
    """
    buffer = np.frombuffer(data, dtype=np.uint8)
    order = np.argsort(lengths, kind="stable")
    edges = np.nonzero(np.diff(lengths[order]))[0] + 1
    for packets in np.split(order, edges):
        if not len(packets) or not lengths[packets[0]]:
            continue
        width = int(lengths[packets[0]])
        windows = np.lib.stride_tricks.sliding_window_view(buffer, width)
        left, rows = packets, windows[begins[packets]]
        while len(left):
            fields = tuple(walk(rows[0].tobytes(), messages))
            alike = _alike(rows, fields, fixed)
            yield Shape(left[alike], rows[alike], fields)
            left, rows = left[~alike], rows[~alike]


def _alike(rows: Bytes, fields: Sequence[Field], fixed: frozenset[Path]) -> npt.NDArray[np.bool_]:
    """Rows that agree with the first in everything but the values of its number fields."""
    width = rows.shape[1]
    structural = np.ones(width, dtype=np.bool_)
    continued = np.zeros(width, dtype=np.uint8)
    varint = np.zeros(width, dtype=np.bool_)
    for field in fields:
        if field.wire == DELIMITED or field.path in fixed:
            continue
        structural[field.begin : field.end] = False
        if field.wire == VARINT:
            varint[field.begin : field.end] = True
            continued[field.begin : field.end - 1] = 0x80
    same = (rows[:, structural] == rows[0, structural]).all(axis=1)
    bits = (rows[:, varint] & 0x80) == continued[varint]
    return np.asarray(same & bits.all(axis=1))


def walk(
    packet: bytes, messages: frozenset[Path], begin: int = 0, end: int = -1, path: Path = ()
) -> Iterator[Field]:
    """The fields of one message in order, entering those whose path is among ``messages``.

    Raises:
        DamagedMessageError: if a field does not end where its message does.
    """
    end = len(packet) if end < 0 else end
    position = begin
    while position < end:
        key, position = _varint(packet, position, end)
        number, wire = (*path, key >> 3), key & 7
        start = position
        if wire == VARINT:
            _, position = _varint(packet, position, end)
        elif wire == FIXED64:
            position += 8
        elif wire == FIXED32:
            position += 4
        elif wire == DELIMITED:
            length, start = _varint(packet, position, end)
            position = start + length
        else:
            raise DamagedMessageError(f"wire type {wire} at byte {position} of a packet")
        if position > end:
            raise DamagedMessageError(
                f"field {number} runs {position - end} bytes past the end of its message"
            )
        if wire == DELIMITED and number in messages:
            yield from walk(packet, messages, start, position, number)
        else:
            yield Field(number, wire, start, position, begin)


def _varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while position < end and shift < 70:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise DamagedMessageError(f"a number is cut off at byte {position} of a packet")


def message_values(packet: bytes, messages: frozenset[Path] = frozenset()) -> list[tuple[Path, int | bytes]]:
    """The fields of one packet with their values: unsigned ints, or bytes for delimited fields."""
    found: list[tuple[Path, int | bytes]] = []
    for field in walk(packet, messages):
        if field.wire == VARINT:
            found.append((field.path, _varint(packet, field.begin, field.end)[0]))
        elif field.wire == DELIMITED:
            found.append((field.path, packet[field.begin : field.end]))
        else:
            found.append((field.path, int.from_bytes(packet[field.begin : field.end], "little")))
    return found
