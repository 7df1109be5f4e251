"""ZB-H1: 1F1B's memory at a third of its bubble (Qi et al. 2023, arXiv:2401.10241, section 2.1).

Each backward is split; rank r starts its backwards for the weight r microbatches late, so that every rank holds p
microbatches, and fills with them what would be the bubble of the cool-down. A rank's bubble is
(p - 1) (F + I - W) with equal stages and free communication. This is the interleaved order with one chunk a rank.
"""

from __future__ import annotations

from .actions import Schedule
from .interleaved_zero_bubble import zero_bubble_rows


def zb_h1(pp: int, chunks: int, microbatches: int) -> Schedule:
    """The ZB-H1 schedule of ``pp`` ranks with one stage each (``chunks`` is 1)."""
    rows = zero_bubble_rows(pp, chunks, [range(microbatches)])
    return Schedule("zb-h1", pp, pp * chunks, microbatches, rows)
