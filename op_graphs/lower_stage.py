"""Lowering of one model chunk: forward and backward programs with recompute, and data-parallel communication.

Two variants exist of each: the first microbatch's forward gathers the parameters (distributed optimizer with
overlapped gather), the last microbatch's backward reduces the gradients (overlapped reduction). All other
microbatches use the plain programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .buckets import Bucket, form_buckets
from .lower_ends import (
    EmbeddingSaved,
    HeadSaved,
    embedding_backward,
    embedding_forward,
    head_backward,
    head_forward,
)
from .lower_layer import LayerSaved, layer_backward, layer_forward
from .lowering_context import LoweringContext
from .parameters import ParameterTensor, parameters_on_stage
from .program import Program, ProgramBuilder, Tensor
from .vocabulary import Communication, Dimension, MemoryCategory, OpKind, Phase


@dataclass(frozen=True)
class Chunk:
    """Which part of the model a program covers."""

    stage: int
    """Global stage: chunk * pp + pipeline rank."""
    index: int
    """Model chunk on its rank."""
    layers: range
    has_embedding: bool
    has_head: bool


@dataclass(frozen=True)
class ChunkPrograms:
    """Programs of a chunk; ``first``/``last`` are the variants with data-parallel communication."""

    chunk: Chunk
    forward: Program
    forward_first: Program
    backward: Program
    backward_last: Program
    parameters: tuple[ParameterTensor, ...]
    buckets: tuple[Bucket, ...]


@dataclass
class _Recomputed:
    """A group of layers of which only the input is kept."""

    layers: range
    block_input: Tensor


@dataclass
class _ForwardSaved:
    embedding: EmbeddingSaved | None
    blocks: list[tuple[int, LayerSaved] | _Recomputed]
    head: HeadSaved | None


def lower_chunk(context: LoweringContext, chunk: Chunk) -> ChunkPrograms:
    """Lower a model chunk to its programs."""
    parameters = parameters_on_stage(
        context.model,
        chunk.layers,
        context.tp,
        context.sequence_parallel,
        chunk.has_embedding,
        chunk.has_head,
        seq_len=context.training.seq_len,
    )
    parallel = context.parallel
    group_size = parallel.dp * parallel.cp
    split = chunk.stage == 0 and context.overlap.grad_reduce
    buckets = form_buckets(parameters, group_size, split=split)
    builder, saved = _forward(context, chunk)
    forward = builder.build()
    gathers = parallel.zero >= 1 and group_size > 1 and context.overlap.param_gather
    reduces = group_size > 1 and context.overlap.grad_reduce
    return ChunkPrograms(
        chunk=chunk,
        forward=forward,
        forward_first=_with_parameter_gather(context, chunk, buckets) if gathers else forward,
        backward=_backward(context, chunk, builder, saved, ()).build(),
        backward_last=_backward(context, chunk, builder, saved, buckets if reduces else ()).build(),
        parameters=tuple(parameters),
        buckets=buckets,
    )


def recompute_groups(context: LoweringContext, layers: range) -> list[range]:
    """Groups of layers that are recomputed together, in layer order; the other layers keep their activations."""
    recompute = context.training.recompute
    if recompute.mode != "full":
        return []
    if recompute.method == "block":
        return [range(layer, layer + 1) for layer in layers[: recompute.layers]]
    step = recompute.layers
    return [layers[start : start + step] for start in range(0, len(layers), step)]


# -- forward -----------------------------------------------------------------------------------------------------


def _forward(context: LoweringContext, chunk: Chunk) -> tuple[ProgramBuilder, _ForwardSaved]:
    builder = ProgramBuilder(context.names, chunk=chunk.index, phase=Phase.FORWARD)
    embedding: EmbeddingSaved | None = None
    if chunk.has_embedding:
        embedding, hidden = embedding_forward(builder, context)
    else:
        # The receive buffer; it exists from the moment the first kernel of the chunk reads it.
        hidden = builder.allocate("received_activation", context.hidden_bytes, 0, MemoryCategory.ACTIVATIONS)
    groups = {group.start: group for group in recompute_groups(context, chunk.layers)}
    blocks: list[tuple[int, LayerSaved] | _Recomputed] = []
    layer = chunk.layers.start
    while layer < chunk.layers.stop:
        group = groups.get(layer)
        if group is None:
            saved, hidden = layer_forward(builder, context, layer, hidden)
            blocks.append((layer, saved))
            layer += 1
            continue
        blocks.append(_Recomputed(group, hidden))
        builder.keep_activations = False
        for inner in group:
            _, hidden = layer_forward(builder, context, inner, hidden, keep_input=inner == group.start)
        builder.keep_activations = True
        layer = group.stop
    head: HeadSaved | None = None
    if chunk.has_head:
        head = head_forward(builder, context, hidden)
    else:
        builder.output_row = builder.last_row
        # The output is handed to the next stage; the framework frees it once it is sent.
        builder.release(hidden, builder.last_row)
    return builder, _ForwardSaved(embedding, blocks, head)


def _with_parameter_gather(context: LoweringContext, chunk: Chunk, buckets: Sequence[Bucket]) -> Program:
    """The forward program with a gather of each bucket, in order of use, before the first kernel that reads it."""
    builder, _ = _forward(context, chunk)
    builder.layer, builder.module = -1, "data_parallel"
    for bucket in reversed(buckets):
        row = builder.collective(
            "parameter_all_gather",
            Communication.ALL_GATHER,
            context.item * bucket.elements,
            Dimension.DP,
            context.group(Dimension.DP),
            after=(),
            phase=Phase.PARAM_SYNC,
            dtype=context.dtype,
        )
        for module in bucket.modules:
            reader = builder.parameter_rows.get(module)
            if reader is not None:
                builder.depend(reader, row)
    return builder.build()


# -- backward ----------------------------------------------------------------------------------------------------


def _backward(
    context: LoweringContext,
    chunk: Chunk,
    forward: ProgramBuilder,
    saved: _ForwardSaved,
    buckets: Sequence[Bucket],
) -> ProgramBuilder:
    """The backward program; the gradients of ``buckets`` are reduced as soon as each is complete."""
    builder = ProgramBuilder(context.names, chunk=chunk.index, phase=Phase.BACKWARD_INPUT, forward=forward)
    reduction = _GradientReduction(builder, context, buckets)
    if saved.head is not None:
        gradient = head_backward(builder, context, saved.head)
        reduction.emit_complete()
    else:
        gradient = builder.allocate("received_gradient", context.hidden_bytes, 0, MemoryCategory.TEMPORARY)
    for block in reversed(saved.blocks):
        if isinstance(block, _Recomputed):
            layers = _recompute(builder, context, block)
        else:
            layers = [block]
        for layer, layer_saved in reversed(layers):
            gradient = layer_backward(builder, context, layer, layer_saved, gradient)
            reduction.emit_complete()
    if saved.embedding is not None:
        embedding_backward(builder, context, saved.embedding, gradient)
        reduction.emit_complete()
    else:
        builder.output_row = builder.last_row
        builder.release(gradient, builder.last_row)
    return builder


def _recompute(
    builder: ProgramBuilder, context: LoweringContext, block: _Recomputed
) -> list[tuple[int, LayerSaved]]:
    """Run the forward pass of a group of layers again, keeping its activations inside the backward program."""
    builder.phase = Phase.RECOMPUTE
    hidden = block.block_input
    layers = []
    for layer in block.layers:
        layer_saved, hidden = layer_forward(builder, context, layer, hidden)
        layers.append((layer, layer_saved))
    builder.release(hidden, builder.last_row)
    builder.phase = Phase.BACKWARD_INPUT
    return layers


class _GradientReduction:
    """Emits the reduction of each bucket once every gradient in it is complete."""

    def __init__(self, builder: ProgramBuilder, context: LoweringContext, buckets: Sequence[Bucket]) -> None:
        self._builder = builder
        self._context = context
        self._open = list(buckets)

    def emit_complete(self) -> None:
        done = self._builder.gradient_rows
        while self._open and all(module in done for module in self._open[0].modules):
            emit_gradient_reduction(self._builder, self._context, self._open.pop(0).elements)


def emit_gradient_reduction(builder: ProgramBuilder, context: LoweringContext, elements: int) -> int:
    """Scale a bucket of gradients by the data-parallel size and reduce it; returns the collective's row.

    With the distributed optimizer (``zero`` >= 1) each rank keeps only its shard of the sum.
    """
    layer, module = builder.layer, builder.module
    builder.layer, builder.module = -1, "data_parallel"
    size = context.gradient_dtype.itemsize * elements
    scale = builder.memory_bound(
        "gradient_scale",
        OpKind.ELEMENTWISE,
        read=size,
        written=size,
        dtype=context.gradient_dtype,
        phase=Phase.GRADIENT_SYNC,
    )
    sharded = context.parallel.zero >= 1
    row = builder.collective(
        f"gradient_{'reduce_scatter' if sharded else 'all_reduce'}",
        Communication.REDUCE_SCATTER if sharded else Communication.ALL_REDUCE,
        size,
        Dimension.DP,
        context.group(Dimension.DP),
        after=[scale],
        phase=Phase.GRADIENT_SYNC,
        dtype=context.gradient_dtype,
    )
    builder.layer, builder.module = layer, module
    return row
