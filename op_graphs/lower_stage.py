"""Lowering of one model chunk: forward and backward programs with recompute, and data-parallel communication.

Two variants exist of each: the first microbatch's forward gathers the parameters (distributed optimizer with
overlapped gather), the last microbatch's backward reduces the gradients (overlapped reduction). All other
microbatches use the plain programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .buckets import Bucket
from .data_parallel import DataParallelism
from .lower_ends import (
    EmbeddingSaved,
    HeadSaved,
    embedding_backward,
    embedding_forward,
    head_backward,
    head_forward,
)
from .lower_layer import LayerSaved, layer_backward, layer_forward
from .lower_linear import run_deferred
from .lower_mtp import PredictionSaved, prediction_backward, prediction_forward, prediction_units
from .lowering_context import LoweringContext
from .parameters import ParameterTensor, parameters_on_stage
from .program import Program, ProgramBuilder, Tensor
from .vocabulary import MemoryCategory, Phase


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
    """Programs of a chunk; ``first``/``last`` are the variants with data-parallel communication.

    The backward exists whole, and split into one for the input and one for the weights (zero-bubble schedules).
    """

    chunk: Chunk
    forward: Program
    forward_first: Program
    backward: Program
    backward_last: Program
    backward_input: Program
    backward_weight: Program
    backward_weight_last: Program
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
    head: HeadSaved | PredictionSaved | None


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
        ep=context.parallel.ep,
        etp=context.parallel.etp,
    )
    rules = DataParallelism(context)
    buckets = rules.buckets(parameters, split=chunk.stage == 0 and context.overlap.grad_reduce)
    lowering = _ChunkLowering(context, chunk, rules, buckets)
    builder, saved = lowering.forward()
    forward = builder.build()
    gathers = rules.zero >= 1 and not rules.reshards and context.overlap.param_gather
    always = tuple(filter(rules.reduces, buckets)) if rules.reduces_every_microbatch else ()
    last = always or (tuple(filter(rules.reduces, buckets)) if context.overlap.grad_reduce else ())
    split = lowering.backward(builder, saved, (), split=True)
    return ChunkPrograms(
        chunk=chunk,
        forward=forward,
        forward_first=lowering.forward_with_gather() if gathers else forward,
        backward=lowering.backward(builder, saved, always).build(),
        backward_last=lowering.backward(builder, saved, last).build(),
        backward_input=split.build(),
        backward_weight=lowering.backward_weight(builder, split, always),
        backward_weight_last=lowering.backward_weight(builder, split, last),
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


@dataclass(frozen=True)
class _ChunkLowering:
    """Emits the programs of one chunk."""

    context: LoweringContext
    chunk: Chunk
    rules: DataParallelism
    buckets: Sequence[Bucket]

    def _units(self, *, backward: bool = False) -> list[str]:
        """Units of the chunk in the order in which a pass uses them first."""
        first = ["embedding"] if self.chunk.has_embedding else []
        layers = [str(layer) for layer in self.chunk.layers]
        head = ["head"] if self.chunk.has_head else []
        predictions = prediction_units(self.context) if self.chunk.has_head else []
        if backward:
            return [*head, *predictions[::-1], *layers[::-1], *first]
        return [*first, *layers, *head, *predictions]

    # -- forward ---------------------------------------------------------------------------------------------

    def forward(self) -> tuple[ProgramBuilder, _ForwardSaved]:
        """The forward program under construction, and what it keeps."""
        context, chunk = self.context, self.chunk
        builder = ProgramBuilder(context.names, chunk=chunk.index, phase=Phase.FORWARD)
        weights = _ShardedWeights(builder, self.rules, self._units()).with_buckets(self.buckets)
        embedding: EmbeddingSaved | None = None
        if chunk.has_embedding:
            weights.enter("embedding")
            embedding, hidden = embedding_forward(builder, context)
            weights.leave("embedding")
        else:
            # The receive buffer; it exists from the moment the first kernel of the chunk reads it.
            hidden = builder.allocate(
                "received_activation", context.hidden_bytes, 0, MemoryCategory.ACTIVATIONS
            )
        blocks, hidden = self._layers_forward(builder, weights, hidden)
        head: HeadSaved | PredictionSaved | None = None
        if chunk.has_head and context.model.mtp_layers:
            head = prediction_forward(builder, context, hidden, weights)
        elif chunk.has_head:
            weights.enter("head")
            head = head_forward(builder, context, hidden)
            weights.leave("head")
        else:
            builder.output_row = builder.last_row
            # The output is handed to the next stage; the framework frees it once it is sent.
            builder.release(hidden, builder.last_row)
        return builder, _ForwardSaved(embedding, blocks, head)

    def _layers_forward(
        self, builder: ProgramBuilder, weights: _ShardedWeights, hidden: Tensor
    ) -> tuple[list[tuple[int, LayerSaved] | _Recomputed], Tensor]:
        context, layers = self.context, self.chunk.layers
        groups = {group.start: group for group in recompute_groups(context, layers)}
        blocks: list[tuple[int, LayerSaved] | _Recomputed] = []
        layer = layers.start
        while layer < layers.stop:
            group = groups.get(layer)
            if group is not None:
                blocks.append(_Recomputed(group, hidden))
            builder.keep_activations = group is None
            for inner in group or range(layer, layer + 1):
                weights.enter(str(inner))
                keep_input = group is not None and inner == group.start
                saved, hidden = layer_forward(builder, context, inner, hidden, keep_input=keep_input)
                weights.leave(str(inner))
            builder.keep_activations = True
            if group is None:
                blocks.append((layer, saved))
            layer = group.stop if group else layer + 1
        return blocks, hidden

    def forward_with_gather(self) -> Program:
        """The forward program with a gather of each bucket, in order of use, before its first reader."""
        builder, _ = self.forward()
        for bucket in filter(self.rules.gathers, reversed(self.buckets)):
            row = self.rules.emit_gather(builder, bucket, after=[])
            for module in bucket.modules:
                reader = builder.parameter_rows.get(module)
                if reader is not None:
                    builder.depend(reader, row)
        return builder.build()

    # -- backward --------------------------------------------------------------------------------------------

    def backward(
        self,
        forward: ProgramBuilder,
        saved: _ForwardSaved,
        buckets: Sequence[Bucket],
        *,
        split: bool = False,
    ) -> ProgramBuilder:
        """The backward program; the gradients of ``buckets`` are reduced as soon as each is complete.

        With ``split``, the weight-gradient GEMMs are put off to :meth:`backward_weight`.
        """
        context = self.context
        builder = ProgramBuilder(
            context.names, chunk=self.chunk.index, phase=Phase.BACKWARD_INPUT, forward=forward
        )
        builder.deferred = [] if split else None
        weights = _ShardedWeights(builder, self.rules, self._units(backward=True)).with_buckets(self.buckets)
        reduction = _GradientReduction(builder, self.rules, buckets)
        if isinstance(saved.head, PredictionSaved):
            gradient = prediction_backward(builder, context, saved.head, weights)
            if self.chunk.has_embedding:
                # The table's gradient is complete only once its first lookup has added its part.
                builder.gradient_rows.pop("embedding.word_embeddings")
            reduction.emit_complete()
        elif saved.head is not None:
            weights.enter("head")
            gradient = head_backward(builder, context, saved.head)
            weights.leave("head")
            reduction.emit_complete()
        else:
            gradient = builder.allocate(
                "received_gradient", context.hidden_bytes, 0, MemoryCategory.TEMPORARY
            )
        for block in reversed(saved.blocks):
            for layer in block.layers if isinstance(block, _Recomputed) else (block[0],):
                weights.enter(str(layer))
            layers = _recompute(builder, context, block) if isinstance(block, _Recomputed) else [block]
            for layer, layer_saved in reversed(layers):
                gradient = layer_backward(builder, context, layer, layer_saved, gradient)
                weights.leave(str(layer))
                reduction.emit_complete()
        if saved.embedding is not None:
            weights.enter("embedding")
            embedding_backward(builder, context, saved.embedding, gradient)
            weights.leave("embedding")
            reduction.emit_complete()
        else:
            builder.output_row = builder.last_row
            builder.release(gradient, builder.last_row)
        return builder

    def backward_weight(
        self, forward: ProgramBuilder, backward_input: ProgramBuilder, buckets: Sequence[Bucket]
    ) -> Program:
        """The second half of a split backward: the weight-gradient GEMMs its first half put off."""
        builder = ProgramBuilder(
            self.context.names,
            chunk=self.chunk.index,
            phase=Phase.BACKWARD_WEIGHT,
            forward=forward,
            backward_input=backward_input,
        )
        # Gradients without a GEMM (norms, biases, embeddings) are complete after the first half.
        builder.gradient_rows.update(dict.fromkeys(backward_input.gradient_rows, -1))
        reduction = _GradientReduction(builder, self.rules, buckets)
        assert backward_input.deferred is not None
        for _ in run_deferred(builder, backward_input.deferred):
            reduction.emit_complete()
        return builder.build()


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

    def __init__(self, builder: ProgramBuilder, rules: DataParallelism, buckets: Sequence[Bucket]) -> None:
        self._builder = builder
        self._rules = rules
        self._open = list(buckets)
        self._begin = 0

    def emit_complete(self) -> None:
        """Reduce every bucket whose last gradient the operations added since the last call complete."""
        builder, rules = self._builder, self._rules
        for bucket in list(self._open):
            if not all(module in builder.gradient_rows for module in bucket.modules):
                continue
            self._open.remove(bucket)
            row = rules.emit_reduction(builder, bucket)
            if not rules.context.overlap.grad_reduce:
                builder.wait_for(row)
            if rules.reduces_every_microbatch:
                # Whole gradients of the unit live from its first weight gradient until they are scattered.
                size = rules.context.item * bucket.elements
                gradients = builder.allocate(
                    "unsharded_gradients", size, self._begin, MemoryCategory.GRADIENTS
                )
                builder.release(gradients, row)
        self._begin = len(builder)


class _ShardedWeights:
    """Gathers a unit's weights before it runs and the next unit's while it runs, and drops them behind it.

    Does nothing where weights are not sharded by unit.
    """

    def __init__(self, builder: ProgramBuilder, rules: DataParallelism, units: Sequence[str]) -> None:
        self._builder = builder
        self._rules = rules
        self._units = list(units) if rules.reshards else []
        self._buckets: dict[str, list[Bucket]] = {}
        self._gathered: dict[str, tuple[list[int], list[Tensor]]] = {}

    def with_buckets(self, buckets: Sequence[Bucket]) -> _ShardedWeights:
        """Set what is gathered for each unit."""
        for bucket in buckets:
            self._buckets.setdefault(bucket.unit, []).append(bucket)
        return self

    def enter(self, unit: str, *, prefetch: bool = True) -> None:
        """Wait for the weights of a unit, and start gathering those of the unit behind it (``prefetch``)."""
        if not self._units:
            return
        self._gather(unit)
        self._builder.wait_for(*self._gathered[unit][0])
        following = self._units.index(unit) + 1
        if prefetch and following < len(self._units):
            self._gather(self._units[following])

    def leave(self, unit: str) -> None:
        """Drop the weights of a unit."""
        if not self._units:
            return
        for tensor in self._gathered.pop(unit)[1]:
            self._builder.release(tensor, self._builder.last_row)

    def _gather(self, unit: str) -> None:
        if unit in self._gathered:
            return
        rows, tensors = [], []
        for bucket in filter(self._rules.gathers, self._buckets.get(unit, [])):
            row = self._rules.emit_gather(self._builder, bucket, after=None)
            rows.append(row)
            size = self._rules.context.item * bucket.elements
            tensors.append(self._builder.allocate("gathered_weights", size, row, MemoryCategory.WEIGHTS))
        self._gathered[unit] = rows, tensors
