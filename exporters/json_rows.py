"""Numbers of JSON texts as fixed-layout columns: right-aligned digits with spaces before them, which JSON allows.

Four digits are one machine word, taken from a table, so a number costs a division and a look-up per four digits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from op_graphs.columns import Float64, Int64

from .byte_rows import Bytes, Slot, Template, put_words

_DIGITS = 4
_BASE = 10**_DIGITS


def _words(texts: list[str]) -> npt.NDArray[np.uint32]:
    return np.frombuffer("".join(texts).encode("ascii"), dtype="<u4").astype(np.uint32)


# Entry v is v with leading zeros; entry 10,000 + v is v with leading spaces, for the first digits of a number.
_INNER = _words([f"{v:04d}" for v in range(_BASE)] + ["    "] + [f"{v:4d}" for v in range(1, _BASE)])
_LAST = _words([f"{v:04d}" for v in range(_BASE)] + [f"{v:4d}" for v in range(_BASE)])
_THOUSANDTHS = _words([f".{v:03d}" for v in range(1000)])


def json_text(value: object) -> bytes:
    """A value as compact JSON in raw UTF-8, without NaN; what UTF-8 cannot hold becomes a question mark."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", errors="replace")


def number_slot(column: str, width: int) -> Template:
    """``width`` spaces that a column fills."""
    return Template(b" " * width, (Slot(column, 0, width),))


def digits_width(largest: int) -> int:
    """Bytes that hold a number up to ``largest``: a multiple of four."""
    return -(-len(str(largest)) // _DIGITS) * _DIGITS


@dataclass(frozen=True)
class DigitColumn:
    """Whole numbers of 0 or more; ``values`` must fit in the width of the slot."""

    values: Int64

    def write(self, rows_to: Bytes, slot: Slot, rows: slice) -> None:
        """Write the values of ``rows`` into their slot, four digits at a time from the right."""
        rest, table = self.values[rows], _LAST
        for offset in range(slot.offset + slot.width - _DIGITS, slot.offset - 1, -_DIGITS):
            higher = rest // _BASE
            part = rest - higher * _BASE
            part += np.where(higher == 0, _BASE, 0)
            put_words(rows_to, offset, _DIGITS, table.take(part))
            rest, table = higher, _INNER


@dataclass(frozen=True)
class MicrosecondColumn:
    """Nanoseconds of 0 or more as microseconds with three decimals."""

    nanoseconds: Int64

    def write(self, rows_to: Bytes, slot: Slot, rows: slice) -> None:
        """Write the values of ``rows`` into their slot."""
        values = self.nanoseconds[rows]
        whole = values // 1000
        point = slot.offset + slot.width - _DIGITS
        put_words(rows_to, point, _DIGITS, _THOUSANDTHS.take(values - whole * 1000))
        DigitColumn(whole).write(
            rows_to, Slot(slot.column, slot.offset, slot.width - _DIGITS), slice(0, len(whole))
        )


@dataclass(frozen=True)
class TextColumn:
    """Numbers that are no plain digits (fractions, negative): ``texts[index[row]]``, padded to one length."""

    texts: npt.NDArray[np.bytes_]
    index: Int64

    @classmethod
    def of(cls, values: npt.NDArray[Any] | Float64) -> TextColumn:
        """The shortest texts that read back as the same finite numbers; each distinct value is formatted once."""
        distinct, index = np.unique(values, return_inverse=True)
        finite = np.where(np.isfinite(distinct), distinct, 0)
        texts = [repr(value).encode() for value in finite.tolist()]
        width = max(map(len, texts), default=1)
        return cls(np.array([text.rjust(width) for text in texts], dtype=f"S{width}"), index)

    def write(self, rows_to: Bytes, slot: Slot, rows: slice) -> None:
        """Write the values of ``rows`` into their slot."""
        texts = self.texts.take(self.index[rows])
        rows_to[:, slot.offset : slot.offset + slot.width] = texts.view(np.uint8).reshape(
            len(texts), slot.width
        )


@dataclass(frozen=True)
class NumberColumn:
    """Numbers of any sort with the width they need: digits where all are whole and 0 or more, else texts."""

    values: Int64
    width: int
    texts: TextColumn | None = None

    @classmethod
    def of(cls, values: npt.NDArray[Any] | Float64) -> NumberColumn:
        """A column for all of these values."""
        with np.errstate(invalid="ignore"):
            whole = bool(np.all((values >= 0) & (values < 1 << 53) & (values == np.floor(values))))
        if whole or (values.dtype.kind == "i" and bool(np.all(values >= 0))):
            integers = values.astype(np.int64)
            return cls(integers, digits_width(int(integers.max(initial=0))))
        texts = TextColumn.of(values)
        return cls(np.empty(0, dtype=np.int64), texts.texts.dtype.itemsize, texts)

    def at(self, rows: Int64) -> DigitColumn | TextColumn:
        """The values at some rows."""
        if self.texts is None:
            return DigitColumn(self.values.take(rows))
        return TextColumn(self.texts.texts, self.texts.index.take(rows))
