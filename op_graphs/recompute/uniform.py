"""Groups of equal size (Megatron-LM ``--recompute-method uniform``, ``transformer/transformer_block.py``)."""

from __future__ import annotations


def uniform(layers: range, size: int) -> list[range]:
    """Groups of ``size`` layers, the last perhaps smaller."""
    return [layers[start : start + size] for start in range(0, len(layers), size)]
