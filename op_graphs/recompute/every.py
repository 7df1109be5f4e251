"""Every n-th layer (torchtitan ``selective_ac_option`` of a number)."""

from __future__ import annotations


def every(layers: range, step: int) -> list[range]:
    """Every ``step``-th layer of the model, counted from 1, one by one."""
    return [range(layer, layer + 1) for layer in layers if (layer + 1) % step == 0]
