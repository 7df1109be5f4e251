"""Conventions of counting FLOPs, and how much of a sequence a token attends to."""

from __future__ import annotations

from typing import Literal

from .model import WindowKind

FlopsConvention = Literal["operators", "palm", "megatron"]

CAUSAL_BY_CONVENTION: dict[FlopsConvention, bool] = {"operators": True, "palm": False, "megatron": True}
"""Whether the convention, as its source states it, counts only the half of attention that the causal mask leaves."""


def attended_tokens(seq_len: int, window: int, kind: WindowKind, causal: bool) -> float:
    """Tokens that a token attends to, on average over a sequence; ``window`` 0 is full attention.

    Under a causal mask that is half of the sequence (the diagonal counts half, as published figures have it). A
    sliding window takes what lies before it away: the last ``window`` tokens of the triangle remain,
    window - window^2 / (2 seq_len). A chunked one leaves a triangle in each chunk.
    """
    if window == 0 or window >= seq_len:
        return seq_len / 2 if causal else float(seq_len)
    if kind == "chunked":
        rest = seq_len % window
        pairs = seq_len // window * window**2 + rest**2
        return pairs / seq_len / (2 if causal else 1)
    return window - window**2 / (2 * seq_len) if causal else float(window)
