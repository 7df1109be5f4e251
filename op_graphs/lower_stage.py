"""Lowering of one model chunk: forward and backward programs with recompute, and data-parallel communication.

Two variants exist of each: the first microbatch's forward gathers the parameters (distributed optimizer with
overlapped gather), the last microbatch's backward reduces the gradients (overlapped reduction). Others are plain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .adapters import with_adapters
from .buckets import Bucket
from .chunk import Chunk, ChunkPrograms
from .chunk_buffers import chunk_buffers
from .data_parallel import DataParallelism
from .lower_checkpoint import host_enters, host_runs_again
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
from .lower_vision import (
    VISION_PREFIX,
    ClassifierSaved,
    PatchSaved,
    ProjectorSaved,
    classifier_backward,
    classifier_forward,
    encoder_context,
    image_token_bytes,
    image_token_gradient,
    insert_image_tokens,
    patch_embedding_backward,
    patch_embedding_forward,
    projector_backward,
    projector_forward,
    vision_units,
)
from .lowering_context import LoweringContext
from .offload_activations import LAYER, begin_backward, begin_part, offload
from .overlap.registry import GRADIENTS, PARAMETERS
from .parameters import parameters_on_stage
from .precision import mark_unquantized
from .program import Program, ProgramBuilder, Tensor
from .recompute import recomputed_layers
from .unit_communication import GradientReduction, ShardedWeights
from .vocabulary import MemoryCategory, OpKind, Phase


@dataclass
class _Recomputed:
    """A group of layers of which only the input is kept."""

    layers: range
    block_input: Tensor


_Block = tuple[int, LayerSaved] | _Recomputed


@dataclass
class _VisionSaved:
    """What the vision encoder of a vision-language model and its projector keep."""

    embedding: PatchSaved
    blocks: list[_Block]
    projector: ProjectorSaved


@dataclass
class _ForwardSaved:
    vision: _VisionSaved | None
    embedding: EmbeddingSaved | PatchSaved | None
    blocks: list[_Block]
    head: HeadSaved | PredictionSaved | ClassifierSaved | None
    weights: dict[str, list[Tensor]]
    """Gathered weights that stay until the backward pass, by unit."""
    output: Tensor | None = None
    """What was sent, where that stays until the backward pass."""


def lower_chunk(context: LoweringContext, chunk: Chunk, *, splits_backward: bool = True) -> ChunkPrograms:
    """Lower a model chunk to its programs; the split backward only with ``splits_backward``."""
    parameters = parameters_on_stage(
        context.model,
        chunk.layers,
        context.tp,
        context.sequence_parallel,
        chunk.has_embedding,
        chunk.has_head,
        has_vision=chunk.encodes(context),
        seq_len=context.training.seq_len,
        ep=context.parallel.ep,
        etp=context.parallel.etp,
    )
    parameters = with_adapters(parameters, context.model, context.training.lora, context.tp)
    parameters = mark_unquantized(parameters, context.training, context.model.layers)
    rules = DataParallelism(context)
    in_backward = GRADIENTS.chosen(context.overlap.grad_reduce).in_backward
    in_forward = PARAMETERS.chosen(context.overlap.param_gather).in_forward
    buckets = rules.buckets(parameters, split=chunk.stage == 0 and in_backward)
    lowering = _ChunkLowering(context, chunk, rules, buckets)
    builder, saved = lowering.forward()
    forward = builder.build()
    gathers = rules.zero >= 1 and not rules.gathers_by_unit and in_forward
    always = tuple(filter(rules.reduces, buckets)) if rules.reduces_every_microbatch else ()
    last = always or (tuple(filter(rules.reduces, buckets)) if in_backward else ())
    split = lowering.backward(builder, saved, (), split=True) if splits_backward else None
    backward = lowering.backward(builder, saved, always).build()
    return ChunkPrograms(
        chunk=chunk,
        forward=forward,
        forward_first=lowering.forward_first(gathers=gathers) if gathers or context.recipe else forward,
        backward=backward,
        backward_last=lowering.backward(builder, saved, last).build() if last != always else backward,
        backward_input=split.build() if split is not None else None,
        backward_weight=lowering.backward_weight(builder, split, always) if split is not None else None,
        backward_weight_last=lowering.backward_weight(builder, split, last) if split is not None else None,
        parameters=tuple(parameters),
        buckets=buckets,
        sent_bytes=round(image_token_bytes(context)) if lowering.encodes_alone else None,
        held=chunk_buffers(rules, buckets),
    )


@dataclass(frozen=True)
class _ChunkLowering:
    """Emits the programs of one chunk."""

    context: LoweringContext
    chunk: Chunk
    rules: DataParallelism
    buckets: Sequence[Bucket]

    @property
    def encodes_alone(self) -> bool:
        """Whether the chunk is a vision encoder on a stage of its own."""
        return self.chunk.encodes(self.context) and not self.chunk.has_embedding

    def _units(self, *, backward: bool = False) -> list[str]:
        """Units of the chunk in the order in which a pass uses them first."""
        first = vision_units(self.context) if self.chunk.encodes(self.context) else []
        first += ["embedding"] if self.chunk.has_embedding else []
        layers = [str(layer) for layer in self.chunk.layers]
        head = ["head"] if self.chunk.has_head else []
        predictions = prediction_units(self.context) if self.chunk.has_head else []
        if backward:
            return [*head, *predictions[::-1], *layers[::-1], *first[::-1]]
        return [*first, *layers, *head, *predictions]

    # -- forward ---------------------------------------------------------------------------------------------

    def forward(self, *, first: bool = False) -> tuple[ProgramBuilder, _ForwardSaved]:
        """The forward program under construction, and what it keeps; ``first`` is that of the first microbatch."""
        context, chunk = self.context, self.chunk
        builder = ProgramBuilder(context.names, chunk=chunk.index, phase=Phase.FORWARD)
        builder.casts_weights = first or self.context.quantizes_weights_anew
        weights = ShardedWeights(builder, self.rules, self._units()).with_buckets(self.buckets)
        vision: _VisionSaved | None = None
        embedding: EmbeddingSaved | PatchSaved | None = None
        mask = self._attention_mask(builder)
        if chunk.has_embedding:
            vision, embedding, hidden = self._inputs_forward(builder, weights)
        elif self.encodes_alone:
            vision, hidden = self._vision_forward(builder, weights)
        else:
            # The receive buffer; it exists from the moment the first kernel of the chunk reads it.
            # Where each microbatch has a buffer of its own, it is there already.
            size = 0.0 if context.held_outputs else context.hidden_bytes
            hidden = builder.allocate("received_activation", size, 0, MemoryCategory.ACTIVATIONS)
        blocks, hidden = self._layers_forward(builder, weights, hidden)
        head: HeadSaved | PredictionSaved | ClassifierSaved | None = None
        output: Tensor | None = None
        if chunk.has_head and context.model.mtp_layers:
            head = prediction_forward(builder, context, hidden, weights)
        elif chunk.has_head:
            weights.enter("head")
            forward = classifier_forward if context.model.patches else head_forward
            head = forward(builder, context, hidden)
            weights.leave("head")
        else:
            if not len(builder):
                hidden = _copy_through(builder, context, hidden)
            # Of an embedding alone the collective behind it is the last to write the output.
            builder.output_row = builder.last_row if chunk.layers else builder.end_row
            # The output is handed to the next stage; the framework frees it once it is sent.
            output = hidden if context.held_outputs and chunk.layers else None
            if output is None:
                builder.release(hidden, builder.output_row)
        if mask is not None:
            builder.release(mask, builder.last_row)
        return builder, _ForwardSaved(vision, embedding, blocks, head, weights.kept(), output)

    def _attention_mask(self, builder: ProgramBuilder) -> Tensor | None:
        """The mask of the data loader, a byte a pair of tokens, which first and last stage hold during forward."""
        training, chunk = self.context.training, self.chunk
        if not training.attention_mask or not (chunk.has_embedding or chunk.has_head):
            return None
        size = float(training.micro_batch_size) * training.seq_len**2 / self.context.parallel.cp
        return builder.allocate("attention_mask", size, 0, MemoryCategory.TEMPORARY)

    def _inputs_forward(
        self, builder: ProgramBuilder, weights: ShardedWeights
    ) -> tuple[_VisionSaved | None, EmbeddingSaved | PatchSaved, Tensor]:
        """What lies before the first layer: a vision encoder, where there is one, and the embedding."""
        context = self.context
        vision: _VisionSaved | None = None
        images: Tensor | None = None
        if self.chunk.encodes(context):
            vision, images = self._vision_forward(builder, weights)
        elif context.model.vision is not None:
            size = image_token_bytes(context)
            images = builder.allocate("received_images", size, 0, MemoryCategory.TEMPORARY)
        weights.enter("embedding")
        embedding: EmbeddingSaved | PatchSaved
        if context.model.patches is not None:
            embedding, hidden = patch_embedding_forward(builder, context)
        else:
            embedding, hidden = embedding_forward(builder, context, whole=images is not None)
        if images is not None:
            hidden = insert_image_tokens(builder, context, hidden, images)
        weights.leave("embedding")
        return vision, embedding, hidden

    def _encoder(self) -> _ChunkLowering:
        """The lowering of the vision encoder, all of whose layers lie in this chunk."""
        context = encoder_context(self.context)
        return replace(self, context=context, chunk=replace(self.chunk, layers=range(context.model.layers)))

    def _vision_forward(
        self, builder: ProgramBuilder, weights: ShardedWeights
    ) -> tuple[_VisionSaved, Tensor]:
        encoder = self._encoder()
        builder.module_prefix = VISION_PREFIX
        weights.enter("vision_embedding")
        embedding, hidden = patch_embedding_forward(builder, encoder.context)
        weights.leave("vision_embedding")
        blocks, hidden = encoder._layers_forward(builder, weights, hidden)
        weights.enter("vision_projection")
        projector, images = projector_forward(builder, self.context, hidden)
        weights.leave("vision_projection")
        return _VisionSaved(embedding, blocks, projector), images

    def _layers_forward(
        self, builder: ProgramBuilder, weights: ShardedWeights, hidden: Tensor
    ) -> tuple[list[_Block], Tensor]:
        context, layers = self.context, self.chunk.layers
        groups = {group.start: group for group in recomputed_layers(context.training.recompute, layers)}
        blocks: list[_Block] = []
        layer = layers.start
        while layer < layers.stop:
            group = groups.get(layer)
            if group is not None:
                blocks.append(_Recomputed(group, hidden))
            block_input, buffers = hidden, builder.buffer_count
            builder.keep_activations = group is None
            for inner in group or range(layer, layer + 1):
                weights.enter(context.unit(inner))
                keep_input = group is not None and inner == group.start
                saved, hidden = layer_forward(builder, context, inner, hidden, keep_input=keep_input)
                weights.leave(context.unit(inner))
            builder.keep_activations = True
            kept = [tensor for tensor in builder.kept_since(buffers) if tensor != hidden]
            offload(builder, context, layer, LAYER, [block_input, *kept])
            if group:
                host_enters(builder, context)
            else:
                blocks.append((layer, saved))
            layer = group.stop if group else layer + 1
        return blocks, hidden

    def forward_first(self, *, gathers: bool) -> Program:
        """The forward program of a step's first microbatch, which quantises weights where a recipe does.

        With ``gathers`` each bucket is gathered, in order of use, before its first reader.
        """
        builder, _ = self.forward(first=True)
        placement = PARAMETERS.chosen(self.context.overlap.param_gather)
        readers: list[int] = []
        for bucket in filter(self.rules.gathers, reversed(self.buckets) if gathers else ()):
            row = self.rules.emit_gather(builder, bucket, after=placement.gather_after(readers))
            found = (builder.parameter_rows.get(module) for module in bucket.modules)
            readers = [reader for reader in found if reader is not None]
            for reader in readers:
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
        begin_backward(builder, context)
        builder.casts_weights = self.context.quantizes_weights_anew
        weights = ShardedWeights(builder, self.rules, self._units(backward=True), saved.weights)
        weights.with_buckets(self.buckets)
        reduction = GradientReduction(builder, self.rules, buckets, self.buckets)
        if isinstance(saved.head, PredictionSaved):
            gradient = prediction_backward(builder, context, saved.head, weights)
            if self.chunk.has_embedding:
                # The table's gradient is complete only once its first lookup has added its part.
                builder.gradient_rows.pop("embedding.word_embeddings")
            reduction.emit_complete()
        elif saved.head is not None:
            weights.enter("head")
            if isinstance(saved.head, ClassifierSaved):
                gradient = classifier_backward(builder, context, saved.head)
            else:
                gradient = head_backward(builder, context, saved.head)
            weights.leave("head")
            reduction.emit_complete()
        else:
            size = image_token_bytes(context) if self.encodes_alone else context.hidden_bytes
            size = 0.0 if context.held_outputs else size
            gradient = builder.allocate("received_gradient", size, builder.lead, MemoryCategory.TEMPORARY)
        gradient = self._layers_backward(builder, weights, reduction, saved.blocks, gradient)
        if saved.embedding is not None:
            self._inputs_backward(builder, weights, reduction, saved, gradient)
        elif saved.vision is not None:
            self._vision_backward(builder, weights, reduction, saved.vision, gradient)
        else:
            if not len(builder):
                gradient = _copy_through(builder, context, gradient)
            builder.output_row = builder.last_row
            builder.release(gradient, builder.last_row)
        if saved.output is not None:
            builder.release(saved.output, builder.last_row)
        return builder

    def _layers_backward(
        self,
        builder: ProgramBuilder,
        weights: ShardedWeights,
        reduction: GradientReduction,
        blocks: Sequence[_Block],
        gradient: Tensor,
    ) -> Tensor:
        context = self.context
        for block in reversed(blocks):
            held = block.layers if isinstance(block, _Recomputed) else range(block[0], block[0] + 1)
            for layer in held:
                weights.enter(context.unit(layer))
            begin_part(builder, context, held.start, LAYER)
            layers = _recompute(builder, context, block) if isinstance(block, _Recomputed) else [block]
            for layer, layer_saved in reversed(layers):
                gradient = layer_backward(builder, context, layer, layer_saved, gradient)
                weights.leave(context.unit(layer))
                reduction.emit_complete()
        return gradient

    def _inputs_backward(
        self,
        builder: ProgramBuilder,
        weights: ShardedWeights,
        reduction: GradientReduction,
        saved: _ForwardSaved,
        gradient: Tensor,
    ) -> None:
        """Backward of :meth:`_inputs_forward`."""
        context, images = self.context, self.context.model.vision is not None
        weights.enter("embedding")
        d_images: Tensor | None = None
        if images:
            d_images, gradient = image_token_gradient(builder, context, gradient)
            if saved.vision is None:
                builder.output_row = builder.last_row
                builder.release(d_images, builder.output_row)
        if isinstance(saved.embedding, PatchSaved):
            patch_embedding_backward(builder, context, saved.embedding, gradient)
        elif saved.embedding is not None:
            embedding_backward(builder, context, saved.embedding, gradient, whole=images)
        weights.leave("embedding")
        reduction.emit_complete()
        if saved.vision is not None and d_images is not None:
            self._vision_backward(builder, weights, reduction, saved.vision, d_images)

    def _vision_backward(
        self,
        builder: ProgramBuilder,
        weights: ShardedWeights,
        reduction: GradientReduction,
        vision: _VisionSaved,
        d_images: Tensor,
    ) -> None:
        """Backward of :meth:`_vision_forward`."""
        weights.enter("vision_projection")
        gradient = projector_backward(builder, self.context, vision.projector, d_images)
        weights.leave("vision_projection")
        encoder = self._encoder()
        builder.module_prefix = VISION_PREFIX
        gradient = encoder._layers_backward(builder, weights, reduction, vision.blocks, gradient)
        weights.enter("vision_embedding")
        patch_embedding_backward(builder, encoder.context, vision.embedding, gradient)
        weights.leave("vision_embedding")
        builder.module_prefix = ""
        reduction.emit_complete()

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
        reduction = GradientReduction(builder, self.rules, buckets, self.buckets)
        assert backward_input.deferred is not None
        left = Counter(gemm.parameter for gemm in backward_input.deferred)
        done = run_deferred(builder, backward_input.deferred)
        for gemm, _ in zip(backward_input.deferred, done, strict=True):
            left[gemm.parameter] -= 1
            if left[gemm.parameter]:
                # A matrix that is used several times is complete with its last GEMM.
                builder.gradient_rows.pop(gemm.parameter)
            reduction.emit_complete()
        # A stage without layers may have put off nothing.
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
        last = layer == block.layers[-1] and context.training.recompute.stops_early
        layer_saved, hidden = layer_forward(builder, replace(context, ends_early=last), layer, hidden)
        layers.append((layer, layer_saved))
    builder.release(hidden, builder.last_row)
    host_runs_again(builder, context)
    builder.phase = Phase.BACKWARD_INPUT
    return layers


def _copy_through(builder: ProgramBuilder, context: LoweringContext, received: Tensor) -> Tensor:
    """What a stage that holds nothing does with what it receives: Megatron-Core's empty block clones it."""
    size = context.hidden_bytes
    row = builder.memory_bound(
        "empty_stage_copy", OpKind.MEMCPY, read=size, written=size, dtype=context.dtype
    )
    builder.release(received, row)
    return builder.temporary("empty_stage_output", size, row)
