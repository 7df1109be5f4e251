"""Which layers are recomputed as wholes: rules by name, each a function from layers and a number to groups of layers.

A group is recomputed together: only the input of its first layer is kept. Layers in no group keep their activations.
Sources: Megatron-LM ``--recompute-method`` (``uniform``, ``block``; ``transformer/transformer_block.py``), torchtitan's
``selective_ac_option`` (``every``).
"""

from __future__ import annotations

from collections.abc import Callable

from .plan import Recompute


def _uniform(layers: range, size: int) -> list[range]:
    """Groups of ``size`` layers, the last perhaps smaller."""
    return [layers[start : start + size] for start in range(0, len(layers), size)]


def _block(layers: range, count: int) -> list[range]:
    """The first ``count`` layers of a chunk, one by one."""
    return [range(layer, layer + 1) for layer in layers[:count]]


def _every(layers: range, step: int) -> list[range]:
    """Every ``step``-th layer of the model, counted from 1, one by one."""
    return [range(layer, layer + 1) for layer in layers if (layer + 1) % step == 0]


LAYER_RULES: dict[str, Callable[[range, int], list[range]]] = {
    "uniform": _uniform,
    "block": _block,
    "every": _every,
}
"""Rules by name; ``Recompute.method`` is one of them, ``Recompute.layers`` their number."""


def recomputed_layers(recompute: Recompute, layers: range) -> list[range]:
    """Groups of a chunk's layers that are recomputed together, in layer order."""
    return LAYER_RULES[recompute.method](layers, recompute.layers) if recompute.mode == "full" else []
