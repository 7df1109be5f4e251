"""Which family of sources a row belongs to, decided by what the row holds."""

from __future__ import annotations

from collections.abc import Mapping

from . import layer_rows, megatron_rows, memory_part_rows, simumax_rows, training_rows
from .row import MeasuredRow, RowFile, RowSkippedError


def source_name(row: object, file: RowFile) -> str:
    """Name of the source of a row: what the row says, else the name of its file."""
    named = row.get("source") if isinstance(row, Mapping) else None
    return named if isinstance(named, str) and named else file.path.stem


def row_label(row: object, index: int) -> str:
    """A name by which a reader finds the row in its file."""
    if not isinstance(row, Mapping):
        return f"row {index}"
    for key in ("case", "row"):
        if isinstance(row.get(key), str):
            return str(row[key])
    model = row.get("model")
    parts = [str(row["table"])] if isinstance(row.get("table"), str) else []
    parts += [str(model["name"])] if isinstance(model, Mapping) and isinstance(model.get("name"), str) else []
    parallel = row.get("parallel")
    if isinstance(parallel, Mapping):
        parts += [f"{key}{parallel[key]}" for key in ("tp", "pp", "dp") if isinstance(parallel.get(key), int)]
    parts += [f"on {row['num_gpus']}"] if isinstance(row.get("num_gpus"), int) else []
    return f"row {index}: {' '.join(parts)}" if parts else f"row {index}"


def express(row: object, index: int, file: RowFile) -> MeasuredRow:
    """The scenario and measured figures of row number ``index`` of a file.

    Raise RowSkippedError with the reason if the row cannot be read or expressed.
    """
    if not isinstance(row, Mapping):
        raise RowSkippedError(f"the row is a {type(row).__name__}, a mapping was expected")
    label, source = row_label(row, index), source_name(row, file)
    try:
        if "strategy" in row:
            return simumax_rows.express(row, label, file)
        if megatron_rows.is_megatron_row(row):
            return megatron_rows.express(row, label)
        if memory_part_rows.is_memory_part_row(row):
            return memory_part_rows.express(row, label, source)
        if layer_rows.is_layer_row(row):
            return layer_rows.express(row, label, source)
        return training_rows.express(row, label, source)
    except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise RowSkippedError(f"the row cannot be read ({type(error).__name__}: {error})") from error
