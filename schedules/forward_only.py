"""Forward only, as in evaluation: every microbatch through every stage, no backward.

With several chunks a rank, microbatches pass in groups of p as in interleaved 1F1B.
"""

from __future__ import annotations

from .actions import Schedule, forward
from .interleaved import chunk_order


def forward_only(pp: int, chunks: int, microbatches: int) -> Schedule:
    """The forwards of ``pp`` ranks with ``chunks`` stages each."""
    groups = [range(begin, min(begin + pp, microbatches)) for begin in range(0, microbatches, pp)]
    order = chunk_order(chunks, groups)
    rows = tuple(
        tuple(forward(chunk * pp + rank, microbatch) for chunk, microbatch in order) for rank in range(pp)
    )
    return Schedule("forward", pp, pp * chunks, microbatches, rows, forward_only=True)
