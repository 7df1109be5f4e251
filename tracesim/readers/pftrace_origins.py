"""Categories, places and arguments of slices out of a Perfetto trace of ours, as they were when it was written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from op_graphs.columns import Int32, Int64, StringTable
from op_graphs.timeline import Origins

_BOOL, _INTEGER, _DOUBLE, _TEXT = 2, 4, 5, 17

Words = npt.NDArray[np.uint64]
Annotation = tuple[int, int, Words]
"""Interned name, field number of the value, values."""


class Begins(NamedTuple):
    """Slices whose begins have one shape."""

    rows: Int64
    categories: Words | None
    annotations: Sequence[Annotation]


class _Column(NamedTuple):
    path: tuple[str, ...]
    values: list[Any]


class OriginReader:
    """Reads the origins of all slices, shape by shape; ids point into ``strings``."""

    def __init__(
        self,
        facts: str,
        annotations: Mapping[int, str],
        values: Mapping[int, str],
        categories: Mapping[int, str],
        strings: StringTable,
    ) -> None:
        parsed = json.loads(facts)
        self.headers = tuple(parsed["headers"])
        self.places: list[list[str] | None] = parsed["places"]
        self.arguments = {
            entry["iid"]: (tuple(entry["path"]), bool(entry["json"])) for entry in parsed["arguments"]
        }
        self.place_iids = {iid for iid, name in annotations.items() if name == "place"} - set(self.arguments)
        self.values, self.strings = values, strings
        self.categories = {iid: strings.intern(text) for iid, text in categories.items()}
        self.decoded: dict[int, Any] = {}

    def read(self, begins: Sequence[Begins], track: Int32) -> Origins:
        """The origins of slices on these tracks (shape [slices])."""
        count = len(track)
        category = np.full(count, -1, dtype=np.int32)
        texts = [b""] * count
        pairs = np.array([self._pair(place) for place in self.places], dtype=np.int32).reshape(-1, 2)
        process, thread = pairs[track, 0], pairs[track, 1]
        for shape in begins:
            if shape.categories is not None:
                found = [self.categories[iid] for iid in shape.categories.tolist()]
                category[shape.rows] = found
            for iid, _, words in shape.annotations:
                if iid in self.place_iids:
                    places = [self._pair(json.loads(self.values[word])) for word in words.tolist()]
                    process[shape.rows], thread[shape.rows] = np.array(places, dtype=np.int32).T
            rows = shape.rows.tolist()
            for row, text in zip(rows, self._texts(shape.annotations), strict=False):
                texts[row] = text
        lengths = np.fromiter(map(len, texts), dtype=np.int64, count=count)
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
        return Origins(category, process, thread, offsets, b"".join(texts), self.headers)

    def _pair(self, place: list[str] | None) -> tuple[int, int]:
        if place is None:
            return -1, -1
        return self.strings.intern(place[0]), self.strings.intern(place[1])

    def _texts(self, annotations: Sequence[Annotation]) -> Iterator[bytes]:
        """The arguments of each slice of a shape; none where the shape has no arguments."""
        columns = [
            _Column(self.arguments[iid][0], self._column(number, self.arguments[iid][1], words))
            for iid, number, words in annotations
            if iid in self.arguments
        ]
        if not columns:
            return
        encode = msgspec.json.encode
        if columns[0].path == ():
            yield from map(encode, columns[0].values)
            return
        flat = all(len(column.path) == 1 for column in columns)
        names = [column.path[0] for column in columns]
        for values in zip(*(column.values for column in columns), strict=True):
            if flat:
                yield encode(dict(zip(names, values, strict=True)))
            else:
                yield encode(_nested(columns, values))

    def _column(self, number: int, is_json: bool, words: Words) -> list[Any]:
        if number == _DOUBLE:
            return list(words.view(np.float64).tolist())
        if number == _BOOL:
            return list(words.astype(np.bool_).tolist())
        if number != _TEXT:
            return list(words.view(np.int64).tolist())
        if is_json:
            return [self._decoded(iid) for iid in words.tolist()]
        return [self.values[iid] for iid in words.tolist()]

    def _decoded(self, iid: int) -> Any:  # noqa: ANN401
        if iid not in self.decoded:
            self.decoded[iid] = json.loads(self.values[iid])
        return self.decoded[iid]


def _nested(columns: Sequence[_Column], values: Sequence[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for column, value in zip(columns, values, strict=True):
        inner = found
        for name in column.path[:-1]:
            inner = inner.setdefault(name, {})
        inner[column.path[-1]] = value
    return found
