"""A scenario file from a measured trace: what its operators, process groups and device tell, and what they do not.

Dimensions come from the shapes of linear layers and attention among the host's operators (``record_shapes=True`` of the
profiler), degrees from process groups whose names tell their dimension. Everything else is left at its default and said
to be unknown. Inside backward nodes nothing counts as forward; what repeats there is recompute.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from hardware_profiles import profile_for_device
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import Dimension, TrackRole
from tracesim.analysis import group_dimension
from tracesim.errors import TraceError
from tracesim.readers.nesting import Nesting

_BACKWARD = re.compile(r"^autograd::engine::evaluate_function|Backward\d*$")
_ATTENTION = re.compile(r"scaled_dot_product_attention$|_scaled_dot_product_\w*attention$")
_NAMES = re.compile(r"^aten::(linear|embedding)$|" + _ATTENTION.pattern)
_TYPES = {"c10::BFloat16": "bf16", "c10::Half": "fp16", "float": "fp32"}
_DEGREES = {Dimension.TP: "tp", Dimension.CP: "cp", Dimension.PP: "pp", Dimension.EP: "ep"}


@dataclass(frozen=True)
class Suggestion:
    """A scenario file, and in words what the trace does not tell."""

    text: str
    unknown: tuple[str, ...]


@dataclass
class _Shapes:
    """What the operators of one step of one rank show, forward only."""

    linear: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Calls by (input, output) features."""
    bias: Counter[tuple[int, int]] = field(default_factory=Counter)
    tokens: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Calls by (batch, sequence) of linear inputs."""
    attention: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    """Calls by (heads, key-value heads, head size)."""
    embedding: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Calls by (rows, features) of tables."""
    types: Counter[str] = field(default_factory=Counter)
    recomputed: int = 0
    """Linear layers that run inside backward nodes."""
    steps: int = 1


def suggest_scenario(timeline: Timeline) -> Suggestion:
    """Propose a scenario that would simulate what a trace shows.

    Args:
        timeline: read with ``keep_origins``; of several ranks the first is looked at.

    Raises:
        TraceError: if no operator of the trace has shapes from which a transformer's dimensions follow.
    """
    shapes = _collect(timeline)
    degrees, unknown = _degrees(timeline)
    model, of_model = _model(shapes, degrees.get("tp", 1))
    unknown += of_model
    training, of_training = _training(shapes, model)
    unknown += of_training
    lines = [f"# Suggested from {timeline.name or 'a trace'}. What the trace does not tell:"]
    hardware = profile_for_device(timeline.device)
    if not hardware:
        unknown.append(f"hardware: no profile is known for {timeline.device or 'a device without a name'}")
    lines += [f"# - {text}" for text in unknown]
    lines += [
        f"model: {{{', '.join(f'{key}: {_yaml(value)}' for key, value in model.items())}}}",
        f"hardware: {hardware or 'h100-sxm'}",
        f"parallel: {{{', '.join(f'{key}: {value}' for key, value in degrees.items())}}}",
        f"training: {{{', '.join(f'{key}: {value}' for key, value in training.items())}}}",
    ]
    return Suggestion("\n".join(lines) + "\n", tuple(unknown))


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _collect(timeline: Timeline) -> _Shapes:
    shapes = _Shapes()
    rank = 0
    mine = timeline.tracks.rank == rank
    host = mine & (timeline.tracks.role == TrackRole.HOST)
    slices = timeline.slices
    rows = np.flatnonzero(host[slices.track])
    nesting = Nesting.build(slices.track[rows], slices.start[rows], (slices.start + slices.duration)[rows])
    ordered = rows[nesting.order]
    backward = np.array([bool(_BACKWARD.search(name)) for name in timeline.strings], dtype=np.bool_)
    inside = nesting.nearest_marked(backward[slices.name[ordered]]) >= 0
    steps = int((timeline.steps.rank == rank).sum())
    shapes.steps = max(steps, 1)
    for row, late in zip(ordered.tolist(), inside.tolist(), strict=True):
        name = timeline.string(int(slices.name[row]))
        if not _NAMES.search(name):
            continue
        dims, types = _arguments(timeline, row)
        if name == "aten::linear" and late:
            shapes.recomputed += 1
        elif not late:
            _count(shapes, name, dims, types)
    return shapes


def _arguments(timeline: Timeline, row: int) -> tuple[list[Any], list[Any]]:
    if timeline.origins is None:
        return [], []
    try:
        arguments = msgspec.json.decode(timeline.origins.arguments(row) or b"{}")
    except msgspec.DecodeError:
        return [], []
    dims, types = arguments.get("Input Dims"), arguments.get("Input type")
    return (dims if isinstance(dims, list) else []), (types if isinstance(types, list) else [])


def _count(shapes: _Shapes, name: str, dims: Sequence[Any], types: Sequence[Any]) -> None:
    sizes = [tuple(d) for d in dims if isinstance(d, list) and all(isinstance(x, int) for x in d)]
    if name == "aten::linear" and len(sizes) >= 2 and len(sizes[1]) == 2 and sizes[0]:
        key = (sizes[1][1], sizes[1][0])
        shapes.linear[key] += 1
        if len(sizes) > 2 and sizes[2]:
            shapes.bias[key] += 1
        if len(sizes[0]) == 3:
            shapes.tokens[sizes[0][:2]] += 1
        if types:
            shapes.types[str(types[0])] += 1
    elif name == "aten::embedding" and sizes and len(sizes[0]) == 2:
        shapes.embedding[sizes[0]] += 1
    elif _ATTENTION.search(name) and len(sizes) >= 2 and len(sizes[0]) == len(sizes[1]) == 4:
        shapes.attention[sizes[0][1], sizes[1][1], sizes[0][3]] += 1


def _hidden_size(shapes: _Shapes) -> int:
    """The features that most products begin or end with, among those that some product leads back to."""
    weight: Counter[int] = Counter()
    for (inner, outer), count in shapes.linear.items():
        if any(a == outer and b == inner for a, b in shapes.linear):
            weight[inner] += count
            weight[outer] += count
    if not weight:
        raise TraceError(
            "no scenario can be suggested: the operators of the trace show no linear layers that lead to a wider size "
            "and back. Profile with record_shapes=True, with PyTorch's linear layers not hidden in a compiled graph."
        )
    return min(weight, key=lambda size: (-weight[size], size))


def _model(shapes: _Shapes, tp: int) -> tuple[dict[str, Any], list[str]]:
    hidden = _hidden_size(shapes)
    unknown = []
    model: dict[str, Any] = {"hidden_size": hidden}
    heads, kv_heads, head_size = 0, 0, 0
    if shapes.attention:
        heads, kv_heads, head_size = shapes.attention.most_common(1)[0][0]
        model |= {"heads": heads * tp, "kv_heads": kv_heads * tp, "head_size": head_size}
    else:
        unknown.append("heads: no attention operator has shapes; a head size of 128 is assumed")
        model |= {
            "heads": max(hidden // 128, 1),
            "kv_heads": max(hidden // 128, 1),
            "head_size": min(128, hidden),
        }
    back = {
        inner: count
        for (inner, outer), count in shapes.linear.items()
        if outer == hidden and inner not in (hidden, heads * head_size)
    }
    ffn = max(back, key=lambda size: (back[size] * size, size), default=0)
    if not ffn:
        raise TraceError(
            f"no scenario can be suggested: no linear layer leads from a wider size back to the hidden size {hidden}. "
            "A model of experts in grouped kernels does not show its sizes; write the scenario by hand."
        )
    microbatches = max((n for (_, width), n in shapes.embedding.items() if width == hidden), default=1)
    gated = shapes.linear[hidden, ffn] >= 2 * back[ffn] or (hidden, 2 * ffn) in shapes.linear
    model |= {"ffn_size": ffn * tp, "layers": max(round(back[ffn] / max(microbatches, shapes.steps)), 1)}
    model["activation"] = "swiglu" if gated else "gelu"
    rows = max((rows for rows, width in shapes.embedding if width == hidden), default=0)
    if rows:
        model["vocab_size"] = rows * tp
    else:
        unknown.append("vocab_size: no embedding of the hidden size is shown; 32000 is assumed")
        model["vocab_size"] = 32_000
    if heads and shapes.bias[hidden, heads * head_size]:
        model["qkv_bias"] = True
    unknown += [
        f"activation: {'gated; whether by SiLU or GELU' if gated else 'not gated; which function'}",
        "norm, positions, tied_embeddings: operators do not tell; the defaults are used",
    ]
    return model, unknown


def _degrees(timeline: Timeline) -> tuple[dict[str, int], list[str]]:
    sizes: dict[str, int] = {}
    data = 0
    for group in timeline.groups:
        size = group.size or len(group.ranks)
        dimension = group_dimension(group.name)
        if dimension in _DEGREES and size > 1:
            sizes[_DEGREES[dimension]] = max(size, sizes.get(_DEGREES[dimension], 1))
        elif dimension == Dimension.DP:
            data = max(data, size)
    dense = int(np.prod([size for key, size in sizes.items() if key != "ep"], dtype=np.int64))
    world = max(timeline.world_size, len(timeline.ranks), 1)
    sizes["dp"] = world // dense if world % dense == 0 else max(data, 1)
    unknown = []
    if not any(group_dimension(group.name) for group in timeline.groups) and world > 1:
        unknown.append(
            f"parallel: no process group tells its dimension; data parallel over {world} ranks is assumed"
        )
    unknown.append("parallel.zero, parallel.sp and the schedule: not looked for; the defaults are used")
    return sizes, unknown


def _training(shapes: _Shapes, model: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    training: dict[str, Any] = {}
    unknown = []
    if shapes.tokens:
        batch, sequence = shapes.tokens.most_common(1)[0][0]
        training |= {"micro_batch_size": batch, "seq_len": sequence}
        unknown.append(f"order of micro_batch_size and seq_len: inputs are [{batch}, {sequence}, ...]")
    else:
        unknown.append(
            "micro_batch_size and seq_len: linear inputs have no three dimensions; the defaults are used"
        )
    of_model = [n for (_, width), n in shapes.embedding.items() if width == model["hidden_size"]]
    training["num_microbatches"] = max(round(max(of_model, default=1) / shapes.steps), 1)
    known = [name for name, _ in shapes.types.most_common() if name in _TYPES]
    if known:
        training["dtype"] = _TYPES[known[0]]
    forward = sum(shapes.linear.values())
    if shapes.recomputed > forward // 2:
        training["recompute"] = "full"
    elif shapes.recomputed:
        unknown.append(
            f"recompute: {shapes.recomputed} of {forward} linear layers run again in the backward pass"
        )
    return training, unknown
