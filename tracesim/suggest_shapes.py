"""Shapes of the operators of a measured trace that tell of a transformer: products, attention, embeddings, routers.

Only the first rank is looked at. What lies inside a backward node does not count as forward: a product there runs again
(recompute). Of operators inside each other the outermost counts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from op_graphs.timeline import Timeline
from op_graphs.vocabulary import TrackRole
from tracesim.readers.nesting import Nesting

_BACKWARD = re.compile(r"^autograd::engine::evaluate_function|Backward\d*$")
_PRODUCT = re.compile(r"^aten::(linear|matmul|mm|addmm|bmm|baddbmm)$")
_HEADS_FIRST = re.compile(r"scaled_dot_product_attention$|_scaled_dot_product_\w*attention$")
"""Attention over [batch, heads, sequence, head size]."""
_HEADS_THIRD = re.compile(r"flash_attn\w*::\w*forward$|^aten::_(flash|efficient)_attention_forward$")
"""Attention over [batch, sequence, heads, head size], or [tokens, heads, head size]."""
_OTHERS = re.compile(r"^aten::(embedding|topk)$")

Pair = tuple[int, int]


@dataclass
class Shapes:
    """What the operators of the first rank show, over all of its steps. Numbers are calls."""

    linear: Counter[Pair] = field(default_factory=Counter)
    """By (input, output) features; forward only, as everything but the last four."""
    bias: Counter[Pair] = field(default_factory=Counter)
    tokens: Counter[Pair] = field(default_factory=Counter)
    """By the two dimensions before the features of linear inputs."""
    indices: Counter[Pair] = field(default_factory=Counter)
    """By (batch, sequence) of what an embedding looks up."""
    attention: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    """By (heads, key-value heads, head size)."""
    scores: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    """Products of queries and keys of unfused attention whose batch and heads are one: (both, sequence, head size)."""
    embedding: Counter[Pair] = field(default_factory=Counter)
    """By (rows, features) of tables."""
    choices: Counter[Pair] = field(default_factory=Counter)
    """Of top-k by (number that is chosen from, k; 0 where it is not recorded)."""
    types: Counter[str] = field(default_factory=Counter)
    again: Counter[Pair] = field(default_factory=Counter)
    """Products inside backward nodes by (input, output) features."""
    attention_again: int = 0
    steps: int = 1
    microbatches: int = 0
    """Distinct microbatches a step where annotations number them, else 0."""


def collect_shapes(timeline: Timeline) -> Shapes:
    """The shapes of a timeline that was read with ``keep_origins``."""
    shapes = Shapes()
    slices, tracks = timeline.slices, timeline.tracks
    host = (tracks.rank == 0) & (tracks.role == TrackRole.HOST)
    rows = np.flatnonzero(host[slices.track])
    nesting = Nesting.build(slices.track[rows], slices.start[rows], (slices.start + slices.duration)[rows])
    ordered = rows[nesting.order]
    names = slices.name[ordered]

    def matching(*patterns: re.Pattern[str]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        told = [any(pattern.search(name) for pattern in patterns) for name in timeline.strings]
        return np.array(told, dtype=np.bool_)[names]

    backward = nesting.nearest_marked(matching(_BACKWARD)) >= 0
    telling = matching(_PRODUCT, _HEADS_FIRST, _HEADS_THIRD, _OTHERS)
    around = nesting.nearest_marked(telling)
    above = np.where(nesting.parent >= 0, around[nesting.parent], -1)
    outermost = np.flatnonzero(telling & (above < 0))
    for at in outermost.tolist():
        _count(shapes, timeline, int(ordered[at]), bool(backward[at]))
    shapes.steps = max(int((timeline.steps.rank == 0).sum()), 1)
    numbered = slices.microbatch[(tracks.rank == 0)[slices.track]]
    shapes.microbatches = len(np.unique(numbered[numbered >= 0]))
    return shapes


def _count(shapes: Shapes, timeline: Timeline, row: int, backward: bool) -> None:
    name = timeline.string(int(timeline.slices.name[row]))
    arguments = _arguments(timeline, row)
    dims, types = (_listed(arguments.get(key)) for key in ("Input Dims", "Input type"))
    sizes = [tuple(d) if _is_shape(d) else () for d in dims]
    if _PRODUCT.search(name):
        _product(shapes, name.removeprefix("aten::"), sizes, types, backward)
    elif name == "aten::embedding" and not backward:
        _embedding(shapes, sizes)
    elif name == "aten::topk" and not backward and sizes and sizes[0]:
        concrete = _listed(arguments.get("Concrete Inputs"))
        k = str(concrete[1]) if len(concrete) > 1 else ""
        shapes.choices[sizes[0][-1], int(k) if k.isdigit() else 0] += 1
    elif _HEADS_FIRST.search(name) or _HEADS_THIRD.search(name):
        _attention(shapes, 1 if _HEADS_FIRST.search(name) else -2, sizes, backward)


def _product(
    shapes: Shapes, name: str, sizes: Sequence[tuple[int, ...]], types: Sequence[Any], backward: bool
) -> None:
    first = 1 if name in ("addmm", "baddbmm") else 0
    if len(sizes) < first + 2 or len(sizes[first]) < 2 or len(sizes[first + 1]) < 2:
        return
    left, right = sizes[first], sizes[first + 1]
    if len(right) > 2:
        _scores(shapes, left, right, backward)
        return
    key = (right[1], right[0]) if name == "linear" else (right[0], right[1])
    if left[-1] != key[0]:
        return
    if backward:
        # Gradients are products too, but never by a call that a forward pass makes.
        if name == "linear":
            shapes.again[key] += 1
        return
    shapes.linear[key] += 1
    if (name == "linear" and len(sizes) > 2 and sizes[2]) or first:
        shapes.bias[key] += 1
    if len(left) == 3:
        shapes.tokens[left[0], left[1]] += 1
    if len(types) > first and isinstance(types[first], str):
        shapes.types[types[first]] += 1


def _scores(shapes: Shapes, left: tuple[int, ...], right: tuple[int, ...], backward: bool) -> None:
    """A product of queries ``[..., sequence, head size]`` and keys ``[..., head size, sequence]``."""
    queries, size = left[-2:]
    if right[-2] != size or right[-1] != queries or size >= queries:
        return
    if backward:
        shapes.attention_again += 1
    elif len(left) == len(right) == 4:
        shapes.attention[left[1], right[1], size] += 1
    elif len(left) == len(right) == 3:
        shapes.scores[left[0], queries, size] += 1


def _attention(shapes: Shapes, heads: int, sizes: Sequence[tuple[int, ...]], backward: bool) -> None:
    if len(sizes) < 2 or len(sizes[0]) != len(sizes[1]) or len(sizes[0]) not in (3, 4):
        return
    if backward:
        shapes.attention_again += 1
    else:
        shapes.attention[sizes[0][heads], sizes[1][heads], sizes[0][-1]] += 1


def _embedding(shapes: Shapes, sizes: Sequence[tuple[int, ...]]) -> None:
    if sizes and len(sizes[0]) == 2:
        shapes.embedding[sizes[0][0], sizes[0][1]] += 1
        if len(sizes) > 1 and len(sizes[1]) == 2:
            shapes.indices[sizes[1][0], sizes[1][1]] += 1


def _arguments(timeline: Timeline, row: int) -> dict[str, Any]:
    if timeline.origins is None:
        return {}
    try:
        found = msgspec.json.decode(timeline.origins.arguments(row) or b"{}")
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _listed(value: Any) -> list[Any]:  # noqa: ANN401
    return value if isinstance(value, list) else []


def _is_shape(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, list) and all(type(size) is int and size > 0 for size in value)
