"""Reader of memory timelines (``export_memory_timeline`` of torch.profiler, as JSON): bytes by category over time."""

from __future__ import annotations

import msgspec
import numpy as np

from op_graphs.timeline import Timeline
from op_graphs.vocabulary import MemoryCategory
from tracesim.errors import TraceError
from tracesim.readers.assembled import AssembledTimeline
from tracesim.readers.sources import Source

_CATEGORIES = (
    "parameter", "optimizer state", "input", "temporary", "activation", "gradient", "autograd detail", "unknown",
)  # fmt: skip
"""Names of the columns behind the first, which is always 0 (the lower edge of the stacked plot)."""
_MEANING = {
    "parameter": MemoryCategory.WEIGHTS,
    "optimizer state": MemoryCategory.OPTIMIZER_STATES,
    "temporary": MemoryCategory.TEMPORARY,
    "activation": MemoryCategory.ACTIVATIONS,
    "gradient": MemoryCategory.GRADIENTS,
}
"""The names that mean what ours do; the others (inputs, details of autograd, what is not known) have no category."""


def recognise(source: Source) -> bool:
    """Whether a file is a pair of lists, the first one of whole numbers."""
    head = source.data[:64].lstrip()
    return head.startswith(b"[[") and head[2:3].isdigit()


def read(source: Source) -> Timeline:
    """A curve for each category and one for their sum; no slices.

    Raises:
        TraceError: if the file is damaged or of another shape.
    """
    try:
        times, sizes = msgspec.json.decode(source.data, type=tuple[list[int], list[list[int]]])
        at = np.array(times, dtype=np.int64)
        table = np.array(sizes, dtype=np.float64)
        if table.ndim != 2 or len(table) != len(at) or not len(at) or np.abs(at).max() > 4e15:
            raise ValueError(f"{len(at)} times and sizes of shape {table.shape}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, OverflowError) as error:
        raise TraceError(
            f"{source.path}: not a memory timeline ({str(error)[:200]}). Export it again."
        ) from error
    built = AssembledTimeline(source.path)
    rank = built.rank(-1)
    # Times are in us where they are that long, else already in ns.
    at = at * 1000 if at.max() < 1 << 53 else at
    built.counter(rank, "allocated", at, table.sum(axis=1))
    for column in range(1, table.shape[1]):
        name = _CATEGORIES[column - 1] if column <= len(_CATEGORIES) else f"category {column}"
        built.counter(rank, name, at, table[:, column], category=_MEANING.get(name, -1))
    return built.timeline(properties={"format": "memory timeline"})
