"""The first layers of a chunk (Megatron-LM ``--recompute-method block``, ``transformer/transformer_block.py``)."""

from __future__ import annotations


def block(layers: range, count: int) -> list[range]:
    """The first ``count`` layers of a chunk, one by one."""
    return [range(layer, layer + 1) for layer in layers[:count]]
