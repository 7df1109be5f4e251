"""Lowering of the last stage of a model with heads for multi-token prediction (DeepSeek-V3, arXiv:2412.19437, 2.2).

The heads lie behind the final norm and form a chain. Each looks its shifted tokens up in the embedding (a copy of the
table where the stage has none), norms them and the hidden states before it, projects both together to one hidden
state, and runs a layer and a norm of its own. All layers run first; then output head and loss run once for each head,
and last for the model itself. Backward goes the same way back.

Kernels and order are Megatron-Core's (``transformer/multi_token_prediction.py``): ``eh_proj`` is column-parallel and
its outputs are gathered. Full recompute keeps the two inputs of a head and runs it again up to its final norm
(``uniform``); ``block`` does not reach the heads. The shift of the tokens themselves is a few bytes and left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .lower_ends import (
    dense_table_gradient,
    final_norm_backward,
    final_norm_forward,
    logits_backward,
    logits_forward,
    norm_backward,
    norm_forward,
)
from .lower_layer import LayerSaved, layer_backward, layer_forward
from .lower_linear import (
    Linear,
    column_parallel_backward,
    column_parallel_forward,
    gather_sequence,
    reduce_partial_sums,
)
from .lowering_context import LoweringContext
from .program import ProgramBuilder, Tensor
from .vocabulary import Communication, Dimension, OpKind, Phase

_WORD_EMBEDDINGS = "embedding.word_embeddings"


class UnitWeights(Protocol):
    """Who is told when a unit of weights starts and stops being used (sharded weights are gathered for it)."""

    def enter(self, unit: str, *, prefetch: bool = True) -> None:
        """Before the first operation that reads the unit; ``prefetch`` also gathers the unit behind it."""

    def leave(self, unit: str) -> None:
        """Behind the last operation that reads the unit."""


@dataclass
class _InnerSaved:
    """What a head keeps between its inputs and its final norm; nothing of it where the head is recomputed."""

    joined: Tensor
    layers: list[LayerSaved]


@dataclass
class _HeadSaved:
    """What one prediction head keeps."""

    embedded: Tensor
    previous: Tensor
    """Normalised hidden states before it: of the model, or of the head before."""
    inner: _InnerSaved | None
    layer_output: Tensor
    normalized: Tensor
    kept_by_loss: Tensor | None = None


@dataclass
class PredictionSaved:
    """What the end of a model with prediction heads keeps for its backward pass."""

    norm_input: Tensor
    normalized: Tensor
    kept_by_loss: Tensor
    heads: list[_HeadSaved]


def prediction_units(context: LoweringContext) -> list[str]:
    """Units of weights of the heads, in forward order."""
    heads = range(context.model.distinct_prediction_heads)
    return [str(context.model.layers + index) for index in heads]


def _unit(context: LoweringContext, index: int) -> str:
    """The unit of one head, which may be that of all."""
    return prediction_units(context)[min(index, context.model.distinct_prediction_heads - 1)]


def _inner_layers(context: LoweringContext, index: int) -> range:
    """Layers of one head, by the numbers that continue those of the model."""
    inner = context.model.prediction_layers
    first = context.model.layers + index * inner
    return range(first, first + inner)


# -- forward -----------------------------------------------------------------------------------------------------


def prediction_forward(
    builder: ProgramBuilder, context: LoweringContext, hidden: Tensor, weights: UnitWeights
) -> PredictionSaved:
    """Emit final norm, prediction heads, output heads and losses; returns what they keep."""
    weights.enter("head")
    normalized = final_norm_forward(builder, context)
    heads: list[_HeadSaved] = []
    previous = normalized
    for index in range(context.model.mtp_layers):
        unit = _unit(context, index)
        weights.enter("embedding", prefetch=False)
        embedded = _embed_shifted_tokens(builder, context, index)
        weights.leave("embedding")
        weights.enter(unit)
        heads.append(_head_forward(builder, context, index, embedded, previous))
        weights.leave(unit)
        previous = heads[-1].normalized
    for head in heads:
        head.kept_by_loss = logits_forward(builder, context, head.normalized)
    kept_by_loss = logits_forward(builder, context, normalized)
    weights.leave("head")
    return PredictionSaved(hidden, normalized, kept_by_loss, heads)


def _embed_shifted_tokens(builder: ProgramBuilder, context: LoweringContext, index: int) -> Tensor:
    builder.layer, builder.module = _inner_layers(context, index).start, "mtp.embedding"
    gathered = context.gathered_bytes
    row = builder.memory_bound(
        "mtp_word_embedding",
        OpKind.EMBEDDING,
        read=gathered,
        written=gathered,
        access="strided",
        dtype=context.dtype,
    )
    builder.parameter_rows.setdefault(_WORD_EMBEDDINGS, row)
    if context.model.tied_embeddings:
        # A last stage that shares one matrix between head and embedding reads it here first.
        builder.parameter_rows.setdefault("output_layer", row)
    if context.tp == 1:
        return builder.activation("mtp_embedded_tokens", gathered, row)
    partial = builder.temporary("mtp_word_embeddings", gathered, row)
    row = reduce_partial_sums(builder, context, "mtp_embedding", scatter=context.sequence_parallel)
    builder.wait_for(row)
    builder.release(partial, row)
    return builder.activation("mtp_embedded_tokens", context.hidden_bytes, row)


def _head_forward(
    builder: ProgramBuilder, context: LoweringContext, index: int, embedded: Tensor, previous: Tensor
) -> _HeadSaved:
    recompute = context.training.recompute
    recomputed = recompute.mode == "full" and recompute.method == "uniform"
    builder.keep_activations = not recomputed
    inner, output = _inner_forward(builder, context, index)
    builder.keep_activations = True
    builder.layer, builder.module = _inner_layers(context, index).start, "mtp"
    module = _module(context, index, "final_layernorm")
    normalized = norm_forward(builder, context, "mtp_final_norm", module)
    return _HeadSaved(embedded, previous, None if recomputed else inner, output, normalized)


def _inner_forward(
    builder: ProgramBuilder, context: LoweringContext, index: int
) -> tuple[_InnerSaved, Tensor]:
    """Both norms, their concatenation, the projection and the layer."""
    layer = _inner_layers(context, index).start
    builder.layer, builder.module = layer, "mtp"
    embedded = norm_forward(builder, context, "mtp_embedding_norm", _module(context, index, "enorm"))
    hidden = norm_forward(builder, context, "mtp_hidden_norm", _module(context, index, "hnorm"))
    size = 2 * context.hidden_bytes
    row = builder.memory_bound("mtp_concatenate", OpKind.MEMCPY, read=size, written=size, dtype=context.dtype)
    builder.release(embedded, row)
    builder.release(hidden, row)
    joined = builder.activation("mtp_joined_states", size, row)
    linear = _projection(context, index)
    keep = builder.keep_activations
    row = column_parallel_forward(builder, context, linear, joined, keep_input=keep)
    if keep and context.recipe is not None:
        builder.discard(joined)
    projected = _gather_outputs(builder, context, linear, row)
    hidden, layers = projected, list[LayerSaved]()
    for inner in _inner_layers(context, index):
        saved, hidden = layer_forward(builder, context, inner, hidden)
        layers.append(saved)
    return _InnerSaved(joined, layers), hidden


def _projection(context: LoweringContext, index: int) -> Linear:
    hidden = context.model.hidden_size
    return Linear(
        "eh_proj", _module(context, index, "eh_proj"), 2 * hidden, hidden // context.tp, context.tokens
    )


def _gather_outputs(builder: ProgramBuilder, context: LoweringContext, linear: Linear, row: int) -> Tensor:
    """Gather the columns of a column-parallel linear, and cut the sequence again with sequence parallelism."""
    whole, hidden = context.gathered_bytes, context.hidden_bytes
    if context.tp == 1:
        return builder.activation("hidden_states", whole, row)
    cut = builder.temporary("eh_proj_output", context.token_bytes(linear.outputs), row)
    row = builder.collective(
        "eh_proj_all_gather",
        Communication.ALL_GATHER,
        whole,
        Dimension.TP,
        context.group(Dimension.TP),
        dtype=context.dtype,
    )
    builder.wait_for(row)
    builder.release(cut, row)
    gathered = builder.temporary("eh_proj_gathered", whole, row)
    # What is gathered lies rank after rank and is brought into column order.
    row = builder.memory_bound(
        "eh_proj_columns", OpKind.MEMCPY, read=whole, written=whole, dtype=context.dtype
    )
    builder.release(gathered, row)
    if not context.sequence_parallel:
        return builder.activation("hidden_states", whole, row)
    ordered = builder.temporary("eh_proj_columns", whole, row)
    row = builder.memory_bound(
        "eh_proj_scatter", OpKind.MEMCPY, read=hidden, written=hidden, dtype=context.dtype
    )
    builder.release(ordered, row)
    return builder.activation("hidden_states", hidden, row)


# -- backward ----------------------------------------------------------------------------------------------------


def prediction_backward(
    builder: ProgramBuilder, context: LoweringContext, saved: PredictionSaved, weights: UnitWeights
) -> Tensor:
    """Emit the backward pass of :func:`prediction_forward`; returns the gradient of the last hidden state."""
    weights.enter("head")
    d_model = logits_backward(builder, context, saved.normalized, saved.kept_by_loss)
    d_normalized = _losses_backward(builder, context, saved.heads)
    d_previous: Tensor | None = None
    for index in reversed(range(len(saved.heads))):
        unit = _unit(context, index)
        gradient = d_normalized[index]
        if d_previous is not None:
            _add_gradient(builder, context, d_previous)
        weights.enter(unit)
        d_embedded, d_previous = _head_backward(builder, context, index, saved.heads[index], gradient)
        weights.leave(unit)
        _embedding_backward(builder, context, d_embedded)
    assert d_previous is not None
    builder.layer, builder.module = -1, "head"
    _add_gradient(builder, context, d_previous)
    gradient = final_norm_backward(builder, context, saved.norm_input, d_model)
    weights.leave("head")
    return gradient


def _losses_backward(
    builder: ProgramBuilder, context: LoweringContext, heads: Sequence[_HeadSaved]
) -> list[Tensor]:
    """Backward of the losses of all heads, the last first; returns the gradients of what they normalised."""
    gradients = []
    for head in reversed(heads):
        assert head.kept_by_loss is not None
        gradients.append(logits_backward(builder, context, head.normalized, head.kept_by_loss))
    return gradients[::-1]


def _add_gradient(builder: ProgramBuilder, context: LoweringContext, other: Tensor) -> None:
    """Add the gradient that came through a head to the gradient of the loss, in place."""
    size = context.hidden_bytes
    row = builder.memory_bound(
        "mtp_gradient_sum", OpKind.ELEMENTWISE, read=2 * size, written=size, dtype=context.dtype
    )
    builder.release(other, row)


def _head_backward(
    builder: ProgramBuilder, context: LoweringContext, index: int, saved: _HeadSaved, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the embedded tokens and of the hidden states before the head."""
    layer = _inner_layers(context, index).start
    builder.layer, builder.module = layer, "mtp"
    gradient = norm_backward(
        builder,
        context,
        "mtp_final_norm",
        _module(context, index, "final_layernorm"),
        saved.layer_output,
        gradient,
    )
    inner = saved.inner
    if inner is None:
        builder.phase = Phase.RECOMPUTE
        inner, output = _inner_forward(builder, context, index)
        builder.release(output, builder.last_row)
        builder.phase = Phase.BACKWARD_INPUT
    for number, saved_layer in zip(_inner_layers(context, index)[::-1], inner.layers[::-1], strict=True):
        gradient = layer_backward(builder, context, number, saved_layer, gradient)
    builder.layer, builder.module = layer, "mtp"
    linear = _projection(context, index)
    d_projected = _cut_columns(builder, context, linear, gradient)
    d_joined = column_parallel_backward(builder, context, linear, inner.joined, d_projected)
    size = 2 * context.hidden_bytes
    row = builder.memory_bound(
        "mtp_concatenate_backward", OpKind.MEMCPY, read=size, written=size, dtype=context.dtype
    )
    builder.release(d_joined, row)
    halves = [builder.temporary(f"mtp_{name}_gradient", size / 2, row) for name in ("hidden", "embedding")]
    d_previous = norm_backward(
        builder, context, "mtp_hidden_norm", _module(context, index, "hnorm"), saved.previous, halves[0]
    )
    d_embedded = norm_backward(
        builder, context, "mtp_embedding_norm", _module(context, index, "enorm"), saved.embedded, halves[1]
    )
    return d_embedded, d_previous


def _cut_columns(
    builder: ProgramBuilder, context: LoweringContext, linear: Linear, gradient: Tensor
) -> Tensor:
    """Backward of :func:`_gather_outputs`: the whole sequence, of which each rank takes its columns."""
    if context.tp == 1:
        return gradient
    whole = gradient
    if context.sequence_parallel:
        row = gather_sequence(builder, context, "eh_proj_gradient_all_gather")
        builder.wait_for(row)
        builder.release(gradient, row)
        whole = builder.temporary("gathered_gradient", context.gathered_bytes, row)
    size = context.token_bytes(linear.outputs)
    row = builder.memory_bound("eh_proj_cut", OpKind.MEMCPY, read=size, written=size, dtype=context.dtype)
    builder.release(whole, row)
    return builder.temporary("eh_proj_output_gradient", size, row)


def _embedding_backward(builder: ProgramBuilder, context: LoweringContext, gradient: Tensor) -> None:
    builder.module = "mtp.embedding"
    gathered: Tensor | None = None
    if context.sequence_parallel:
        row = gather_sequence(builder, context, "embedding_gradient_all_gather")
        builder.wait_for(row)
        gathered = builder.temporary("gathered_gradient", context.gathered_bytes, row)
    dense_table_gradient(builder, context, "word", context.local_vocab)
    builder.release(gradient, builder.last_row)
    if gathered is not None:
        builder.release(gathered, builder.last_row)


def _module(context: LoweringContext, index: int, name: str) -> str:
    return f"mtp.layers.{0 if context.model.mtp_repeated else index}.{name}"
