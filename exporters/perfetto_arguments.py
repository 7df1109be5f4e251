"""The arguments of slices as a measured trace wrote them, as debug annotations named ``args.KEY``.

Slices whose arguments have the same keys and types share a *structure*; the values of one key and type are a column.
Numbers, texts and booleans keep their type, nested objects are flattened (``args.outer.inner``), and lists, nulls and
integers beyond 64 bits are JSON text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from op_graphs.columns import Int64
from op_graphs.timeline import Origins

from .byte_rows import Bytes, Slot, Template
from .json_rows import json_text
from .perfetto_annotations import Interned
from .protobuf_rows import (
    PackedColumn,
    embedded,
    fixed64_slot,
    pack_varints,
    varint_field,
    varint_slot,
    varint_width,
)

MAX_STRUCTURES = 1_000
"""Arguments of any further structure are written as one JSON text: each structure costs a template."""

_BOOL, _INTEGER, _DOUBLE, _TEXT = 2, 4, 5, 17
_FIELDS: dict[type, int] = {bool: _BOOL, int: _INTEGER, float: _DOUBLE, str: _TEXT}
_PREFIX = "args"

_Path = tuple[str, ...]


@dataclass
class _Structure:
    """Slices whose arguments have the same paths and types."""

    paths: tuple[_Path, ...]
    types: tuple[type, ...]
    rows: list[int] = field(default_factory=list)
    values: list[tuple[Any, ...]] = field(default_factory=list)


@dataclass(frozen=True)
class ArgumentColumn:
    """The values of one key and type, for the slices that have it."""

    slot_name: str
    name_iid: int
    field: int
    width: int
    rows: Int64
    """Rows of the slices, rising."""
    packed: PackedColumn

    def template(self) -> Template:
        """DebugAnnotation of the name and a slot for the value."""
        head = Template(varint_field(1, self.name_iid))
        if self.field == _DOUBLE:
            return embedded(4, head + fixed64_slot(_DOUBLE, self.slot_name))
        return embedded(4, head + varint_slot(self.field, self.slot_name, self.width))


@dataclass(frozen=True)
class ArgumentValues:
    """A column of arguments at the rows of a chunk; only the rows that are written must have it."""

    column: ArgumentColumn
    rows: Int64

    def write(self, rows_to: Bytes, slot: Slot, rows: slice) -> None:
        """Write the values of ``rows`` into their slot."""
        at = np.searchsorted(self.column.rows, self.rows[rows])
        self.column.packed.take(at).write(rows_to, slot, slice(0, len(at)))


class SliceArguments:
    """The arguments of all slices, by structure and column.

    ``structure[i]`` is the structure of slice ``i`` and ``structures[s]`` its columns, in the order of the keys.
    """

    def __init__(self, origins: Origins, order: Int64, names: Interned, strings: Interned) -> None:
        # In file order, so that a trace that was read from its file numbers everything as before.
        self.structure: Int64 = np.zeros(len(origins), dtype=np.int64)
        self.structures: list[list[ArgumentColumn]] = [[]]
        self.names: dict[int, tuple[_Path, bool]] = {}
        """By iid of an annotation name: path of the key, and whether the text is JSON."""
        pieces: dict[tuple[_Path, int, bool], list[tuple[Int64, npt.NDArray[Any]]]] = {}
        keys: list[list[tuple[_Path, int, bool]]] = []
        for number, structure in enumerate(_structures(origins, order), start=1):
            rows = np.array(structure.rows, dtype=np.int64)
            self.structure[rows] = number
            keys.append([])
            columns = zip(*structure.values, strict=True)
            for path, kind, values in zip(structure.paths, structure.types, columns, strict=True):
                number_field, is_json, array = _encoded(kind, values, strings)
                key = (path, number_field, is_json)
                pieces.setdefault(key, []).append((rows, array))
                keys[-1].append(key)
        made = {
            key: self._column(index, key, parts, names) for index, (key, parts) in enumerate(pieces.items())
        }
        self.structures += [[made[key] for key in structure] for structure in keys]
        self.by_slot = {column.slot_name: column for column in made.values()}

    def _column(
        self,
        index: int,
        key: tuple[_Path, int, bool],
        parts: list[tuple[Int64, npt.NDArray[Any]]],
        names: Interned,
    ) -> ArgumentColumn:
        path, number_field, is_json = key
        iid = names.add(".".join((_PREFIX, *path)), (path, is_json))
        self.names[iid] = (path, is_json)
        rows = np.concatenate([rows for rows, _ in parts])
        order = np.argsort(rows)
        values = np.concatenate([values for _, values in parts])[order]
        width = 8 if number_field == _DOUBLE else varint_width(int(values.min()), int(values.max()))
        packed = (
            PackedColumn(values.view(np.uint64)) if number_field == _DOUBLE else pack_varints(values, width)
        )
        return ArgumentColumn(f"argument {index}", iid, number_field, width, rows[order], packed)


def _structures(origins: Origins, order: Int64) -> list[_Structure]:
    """The structures that occur, in the order of their first slice; slices are looked at in ``order``."""
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    found: dict[Any, _Structure] = {}
    whole = _Structure(((),), (dict,))
    begins, ends = origins.offsets[order].tolist(), origins.offsets[order + 1].tolist()
    for row, begin, end in zip(order.tolist(), begins, ends, strict=True):
        if begin == end:
            continue
        arguments: dict[Any, Any] = decode(origins.text[begin:end])
        types = tuple(map(type, arguments.values()))
        nested = dict in types
        if nested:
            arguments = dict(_flat(arguments))
            types = tuple(map(type, arguments.values()))
        key = (nested, tuple(arguments), types)
        structure = found.get(key)
        if structure is None:
            if len(found) >= MAX_STRUCTURES:
                whole.rows.append(row)
                whole.values.append((decode(origins.text[begin:end]),))
                continue
            paths = tuple(arguments) if nested else tuple((name,) for name in arguments)
            structure = found[key] = _Structure(paths, types)
        structure.rows.append(row)
        structure.values.append(tuple(arguments.values()))
    return [*found.values(), whole] if whole.rows else list(found.values())


def _flat(arguments: dict[str, Any], above: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    """Path and value of each leaf; an empty object is a leaf. Deep nesting stays a JSON text."""
    for name, value in arguments.items():
        if isinstance(value, dict) and value and len(above) < 16:
            yield from _flat(value, (*above, name))
        else:
            yield (*above, name), value


def _encoded(kind: type, values: tuple[Any, ...], strings: Interned) -> tuple[int, bool, npt.NDArray[Any]]:
    """Field of the annotation, whether it holds JSON text, and the numbers to write."""
    number_field = _FIELDS.get(kind, 0)
    if number_field == _TEXT:
        return _TEXT, False, np.array([strings.add(value) for value in values], dtype=np.int64)
    if number_field == _DOUBLE:
        return _DOUBLE, False, np.array(values, dtype=np.float64)
    if number_field:
        try:
            return number_field, False, np.array(values, dtype=np.int64)
        except OverflowError:
            number_field = 0
    texts = [json_text(value).decode() for value in values]
    return _TEXT, True, np.array([strings.add(text) for text in texts], dtype=np.int64)
