"""Copies of kept activations to the host beside compute, and back where the backward that reads them begins."""

from __future__ import annotations

from .copies_ahead import CopiesAhead


class CopiesOnDemand(CopiesAhead):
    """What leaves is hidden, what comes back is not."""

    name = "on-demand"
    beside = "a copy to the host beside the compute behind it; a backward waits for what it asked for when it began"
    follows = "torchtune OffloadActivations with use_streams"
    announces = False
