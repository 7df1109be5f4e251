"""What if slices launched by operators of certain shapes took longer or shorter.

The shape of a slice is that of the inputs of the operator that launched it, which a profiler writes if asked
(``record_shapes=True``). As text: ``aten::mm 4096x1024 1024x4096``, the name of the innermost operator with shapes
and one word for each input that is a tensor.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np

from op_graphs.columns import Int64
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import TrackRole
from tracesim.errors import ScenarioError
from tracesim.readers.kineto_arguments import ShapeArguments, decode_arguments
from tracesim.readers.nesting import Nesting
from tracesim.replay.graph import EdgeKind, Rebuilt
from tracesim.replay.what_if.selection import factor, regular_expression, scaled, some

_MOST_SHOWN = 4


def scale_shape(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """Slices whose operator and shapes match: ``mm 4096x:0.5``."""
    pattern, _, by = value.rpartition(":")
    what = f"scale.shape={pattern}"
    compiled = regular_expression(pattern, what)
    shapes = slice_shapes(rebuilt)
    known = sorted({text for text in shapes if text})
    if not known:
        raise ScenarioError(
            f"{what}: the trace holds no shapes; looked for Input Dims of the operators that launch its slices. Record "
            "with record_shapes=True, and in Python read with read_trace(..., keep_origins=True)"
        )
    chosen = np.array([bool(text and compiled.search(text)) for text in shapes], dtype=np.bool_)
    if not chosen.any():
        raise ScenarioError(
            f"{what}: no slice has such shapes; {len(known)} are there, as {'; '.join(known[:_MOST_SHOWN])}"
        )
    return scaled(rebuilt, some(chosen, what), factor(by, what))


def slice_shapes(rebuilt: Rebuilt) -> list[str]:
    """The shape of each row of a run as text; "" where the trace does not tell it, and for rows of the host."""
    timeline, edges = rebuilt.timeline, rebuilt.edges
    found = [""] * len(rebuilt.rows)
    if timeline.origins is None:
        return found
    launches = np.flatnonzero(edges.kind == EdgeKind.LAUNCH)
    call = rebuilt.rows.slice_row[edges.source[launches]]
    target = edges.target[launches][call >= 0]
    operators = _operators(timeline, call[call >= 0])
    texts = {row: _text(timeline, row) for row in np.unique(operators).tolist() if row >= 0}
    for row, operator in zip(target.tolist(), operators.tolist(), strict=True):
        found[row] = texts.get(operator, "")
    return found


def _operators(timeline: Timeline, calls: Int64) -> Int64:
    """The innermost host slice with shapes around each call, -1 if none."""
    assert timeline.origins is not None
    slices = timeline.slices
    rows = np.flatnonzero(timeline.tracks.role[slices.track] == TrackRole.HOST)
    nesting = Nesting.build(slices.track[rows], slices.start[rows], (slices.start + slices.duration)[rows])
    ordered = rows[nesting.order]
    shaped = np.array([_has_shapes(timeline, row) for row in ordered.tolist()], dtype=np.bool_)
    nearest = np.append(nesting.nearest_marked(shaped), -1)
    position = nesting.innermost(slices.track[calls], slices.start[calls])
    around = nearest[position]
    return np.where(around >= 0, np.append(ordered, -1)[around], -1)


def _has_shapes(timeline: Timeline, row: int) -> bool:
    assert timeline.origins is not None
    written = timeline.origins.arguments(row)
    return b'"Input Dims"' in written or b'"Input dims"' in written


def _text(timeline: Timeline, row: int) -> str:
    assert timeline.origins is not None
    arguments = decode_arguments([msgspec.Raw(timeline.origins.arguments(row))], ShapeArguments)[0]
    raw = arguments.dims if bytes(arguments.dims) != b"null" else arguments.old_dims
    try:
        dims = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return ""
    words = [_words(one) for one in dims] if isinstance(dims, list) else []
    name = re.sub(r"\s+", "_", timeline.string(int(timeline.slices.name[row])))
    return " ".join([name, *(word for word in words if word)])


def _words(shape: Any) -> str:  # noqa: ANN401
    """``4096x1024``; lists of tensors with a plus between them; "" for a scalar."""
    if not isinstance(shape, list) or not shape:
        return ""
    if all(isinstance(size, int) for size in shape):
        return "x".join(map(str, shape))
    return "+".join(word for word in map(_words, shape) if word)
