"""Columnar tables: frozen dataclasses whose fields are numpy arrays of one common length."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

Int8 = npt.NDArray[np.int8]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

_TableType = TypeVar("_TableType", bound="Table")

_DTYPES: dict[str, type[np.generic]] = {
    "Int8": np.int8,
    "Int32": np.int32,
    "Int64": np.int64,
    "Float64": np.float64,
    "Bool": np.bool_,
}


class Table:
    """Base of the columnar tables.

    A subclass is a frozen dataclass whose fields are annotated with the array aliases of this module. On
    construction every column is brought to its dtype, its length is checked, and it is made read-only.

    Raises:
        ValueError: if the columns differ in length; the message names two columns and both lengths.
    """

    _known_columns: ClassVar[tuple[tuple[str, type[np.generic]], ...]] = ()

    @classmethod
    def _columns(cls) -> tuple[tuple[str, type[np.generic]], ...]:
        """Name and dtype of each column; kept, since a large step asks a hundred thousand times."""
        if "_known_columns" not in cls.__dict__:
            cls._known_columns = tuple((c.name, _DTYPES[str(c.type)]) for c in fields(cls))  # type: ignore[arg-type]
        return cls._known_columns

    def __post_init__(self) -> None:
        length: int | None = None
        first = ""
        for name, dtype in self._columns():
            array = np.ascontiguousarray(getattr(self, name), dtype=dtype)
            if array.ndim != 1:
                raise ValueError(f"{type(self).__name__}.{name} must be one-dimensional, not {array.ndim}-d")
            if length is None:
                length, first = len(array), name
            elif len(array) != length:
                raise ValueError(
                    f"{type(self).__name__}: column {name} has {len(array)} rows, {first} has {length}"
                )
            if array.flags.writeable:
                # A view, so that freezing the column does not freeze the caller's array under its feet.
                array = array.view()
                array.flags.writeable = False
            object.__setattr__(self, name, array)

    def __len__(self) -> int:
        return len(getattr(self, self._columns()[0][0]))

    def take(self: _TableType, rows: npt.NDArray[Any]) -> _TableType:
        """The rows selected by an index or boolean array, in that order."""
        return type(self)(**{name: getattr(self, name)[rows] for name, _ in self._columns()})

    def with_columns(self: _TableType, **columns: npt.NDArray[Any]) -> _TableType:
        """A copy with some columns replaced."""
        current = {name: getattr(self, name) for name, _ in self._columns()}
        return type(self)(**{**current, **columns})

    @classmethod
    def empty(cls: type[_TableType]) -> _TableType:
        """A table without rows."""
        return cls(**{name: np.empty(0) for name, _ in cls._columns()})

    @classmethod
    def concatenate(cls: type[_TableType], tables: Iterable[_TableType]) -> _TableType:
        """The rows of several tables after one another."""
        parts = list(tables)
        if not parts:
            return cls.empty()
        return cls(
            **{name: np.concatenate([getattr(part, name) for part in parts]) for name, _ in cls._columns()}
        )

    @classmethod
    def from_rows(cls: type[_TableType], rows: Iterable[dict[str, Any]], **defaults: Any) -> _TableType:  # noqa: ANN401
        """A table from one dict a row, for edges and tests; a missing key takes the value in ``defaults``."""
        listed = list(rows)
        return cls(
            **{
                name: np.array(
                    [row[name] if name in row else defaults[name] for row in listed],
                    dtype=dtype,
                )
                for name, dtype in cls._columns()
            }
        )


class StringTable:
    """Grows while a table is built: interns strings to int32 ids, in order of first appearance."""

    def __init__(self, strings: Iterable[str] = ()) -> None:
        self._ids: dict[str, int] = {}
        for string in strings:
            self.intern(string)

    def intern(self, string: str) -> int:
        """The id of a string, new or already known."""
        return self._ids.setdefault(string, len(self._ids))

    def strings(self) -> tuple[str, ...]:
        """All interned strings, at the index that is their id."""
        return tuple(self._ids)
