"""Lowering of what reads images: patch embedding, classifier, and the projector of a vision-language model.

A model of image patches (ViT; Dosovitskiy et al. 2021, arXiv:2010.11929) has this embedding in place of a table of
words, and its head sees one vector an image: that of the class token, or the mean of the patches. A vision-language
model runs such an encoder, without a head, in front of its embedding on the first stage; neighbouring patches are
joined, projected to the model's width and put in the place of image tokens (Megatron-LM ``models/multimodal``).

The patch embedding is a linear over unfolded patches that every tensor-parallel rank computes whole; the projector's
linears alternate between column- and row-parallel, a last one without partner is computed by every rank. With sequence
parallelism an encoder's sequence is padded to a multiple of tp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .imbalance import BALANCED
from .lower_ends import (
    final_norm_backward,
    final_norm_forward,
    loss_backward,
    loss_forward,
    norm_backward,
    norm_forward,
)
from .lower_linear import (
    Linear,
    gather_sequence,
    input_gradient,
    linear_forward,
    weight_gradient,
)
from .lowering_context import LoweringContext
from .model import PatchInput, VisionEncoder
from .program import ProgramBuilder, Tensor
from .vocabulary import Communication, Dimension, OpKind, Phase

VISION_PREFIX = "vision_model."
"""Module path of a vision-language model's encoder."""
_PATCH_EMBEDDING = "embedding.patch_embedding"
_POSITIONS = "embedding.position_embeddings"
_PRE_NORM = "embedding.pre_layernorm"


def encoder_context(context: LoweringContext) -> LoweringContext:
    """The context of a vision-language model's encoder: its images are the samples, its patches the tokens."""
    vision = context.model.vision
    assert vision is not None
    assert vision.encoder.patches is not None
    tokens, step = vision.encoder.patches.tokens, context.tp if context.sequence_parallel else 1
    training = replace(
        context.training,
        seq_len=-(-tokens // step) * step,
        micro_batch_size=_images(context),
        sequence_lengths=None,
    )
    return replace(
        context, model=vision.encoder, training=training, load=BALANCED, module_prefix=VISION_PREFIX
    )


def vision_units(context: LoweringContext) -> list[str]:
    """Units of weights of a vision-language model's encoder and projector, in forward order."""
    if context.model.vision is None:
        return []
    layers = [f"vision.{layer}" for layer in range(context.model.vision.encoder.layers)]
    return ["vision_embedding", *layers, "vision_projection"]


def _images(context: LoweringContext) -> int:
    """Images of a microbatch of a vision-language model."""
    return context.training.micro_batch_size * context.training.images_per_sample


# -- patches -----------------------------------------------------------------------------------------------------


@dataclass
class PatchSaved:
    """What the patch embedding keeps."""

    patches: Tensor
    norm_input: Tensor | None
    dropout_mask: Tensor | None


def _patches(context: LoweringContext) -> PatchInput:
    assert context.model.patches is not None, "only called for models of image patches"
    return context.model.patches


def _patch_linear(context: LoweringContext) -> Linear:
    patches = _patches(context)
    return Linear(
        "patch_embedding",
        context.module_prefix + _PATCH_EMBEDDING,
        patches.patch_elements,
        context.model.hidden_size,
        context.training.micro_batch_size * patches.patches,
        quantized=False,
    )


def patch_embedding_forward(builder: ProgramBuilder, context: LoweringContext) -> tuple[PatchSaved, Tensor]:
    """Emit the embedding of image patches; returns what it keeps and the hidden states."""
    builder.layer, builder.module = -1, "embedding"
    linear, patches = _patch_linear(context), _patches(context)
    pixels = context.item * linear.tokens * linear.inputs
    row = builder.memory_bound(
        "unfold_patches", OpKind.PERMUTE, read=pixels, written=pixels, access="strided", dtype=context.dtype
    )
    unfolded = builder.activation("patches", pixels, row)
    row = linear_forward(builder, context, linear)
    current = builder.temporary("patch_embeddings", context.item * linear.tokens * linear.outputs, row)
    whole = context.gathered_bytes
    if patches.class_token or patches.position_rows:
        # Joins the class token and adds the positions.
        row = builder.memory_bound(
            "patch_positions", OpKind.EMBEDDING, read=2 * whole, written=whole, dtype=context.dtype
        )
        builder.release(current, row)
        current = builder.temporary("positioned_patches", whole, row)
        for module in _position_modules(context):
            builder.parameter_rows[module] = row
    if context.sequence_parallel:
        row = _copy(builder, context, "patch_scatter", context.hidden_bytes)
        builder.release(current, row)
        current = builder.temporary("scattered_patches", context.hidden_bytes, row)
    mask: Tensor | None = None
    if context.model.hidden_dropout:
        size = context.sharded_tokens * context.model.hidden_size
        row = builder.memory_bound(
            "embedding_dropout",
            OpKind.ELEMENTWISE,
            read=context.hidden_bytes,
            written=context.hidden_bytes + size,
            dtype=context.dtype,
        )
        mask = builder.activation("embedding_dropout_mask", size, row)
    builder.promote(current, "hidden_states")
    if not patches.pre_norm:
        return PatchSaved(unfolded, None, mask), current
    normalized = norm_forward(builder, context, "patch_norm", context.module_prefix + _PRE_NORM)
    return PatchSaved(unfolded, current, mask), normalized


def patch_embedding_backward(
    builder: ProgramBuilder, context: LoweringContext, saved: PatchSaved, gradient: Tensor
) -> None:
    """Emit the weight gradients of the patch embedding; images have no gradient."""
    builder.layer, builder.module = -1, "embedding"
    if saved.norm_input is not None:
        module = context.module_prefix + _PRE_NORM
        gradient = norm_backward(builder, context, "patch_norm", module, saved.norm_input, gradient)
    if saved.dropout_mask is not None:
        row = builder.memory_bound(
            "embedding_dropout_backward",
            OpKind.ELEMENTWISE,
            read=context.hidden_bytes + context.sharded_tokens * context.model.hidden_size,
            written=context.hidden_bytes,
            dtype=context.dtype,
        )
        builder.release(saved.dropout_mask, row)
    if context.sequence_parallel:
        row = gather_sequence(builder, context, "patch_gradient_all_gather")
        builder.wait_for(row)
        builder.release(gradient, row)
        gradient = builder.temporary("gathered_gradient", context.gathered_bytes, row)
    modules = _position_modules(context)
    if modules:
        patches = _patches(context)
        rows = patches.position_rows or 1
        row = builder.memory_bound(
            "patch_positions_backward",
            OpKind.REDUCTION,
            read=context.gathered_bytes,
            written=context.gradient_dtype.itemsize * rows * context.model.hidden_size,
            access="reduction",
            dtype=context.dtype,
            phase=Phase.BACKWARD_WEIGHT,
        )
        for module in modules:
            builder.gradient_rows[module] = row
    weight_gradient(builder, context, _patch_linear(context), (gradient, saved.patches))


def _position_modules(context: LoweringContext) -> list[str]:
    patches = _patches(context)
    modules = ["embedding"] if patches.class_token else []
    modules += [_POSITIONS] if patches.position_rows else []
    return [context.module_prefix + module for module in modules]


# -- classifier --------------------------------------------------------------------------------------------------


@dataclass
class ClassifierSaved:
    """What final norm, pooling, classifier and loss keep; without a head, the output that waits for its gradient."""

    norm_input: Tensor
    output: Tensor
    kept_by_loss: Tensor | None


def _classifier(context: LoweringContext) -> Linear:
    images = context.training.micro_batch_size
    sizes = context.model.hidden_size, context.local_vocab, images
    return Linear("head", "output_layer", *sizes, quantized=False)


def classifier_forward(builder: ProgramBuilder, context: LoweringContext, hidden: Tensor) -> ClassifierSaved:
    """Emit final norm, pooling to one vector an image, classifier and loss; a model without head ends at the norm."""
    normalized = final_norm_forward(builder, context)
    if not context.model.has_head:
        return ClassifierSaved(hidden, normalized, None)
    linear = _classifier(context)
    size = context.item * linear.tokens * linear.inputs
    source = normalized
    if context.sequence_parallel:
        row = gather_sequence(builder, context, "pooling_all_gather")
        builder.wait_for(row)
        builder.release(normalized, row)
        source = builder.temporary("gathered_output", context.gathered_bytes, row)
    if _patches(context).class_token:
        row = _copy(builder, context, "pool_class_token", size)
    else:
        row = builder.memory_bound(
            "pool_mean",
            OpKind.REDUCTION,
            read=context.gathered_bytes,
            written=size,
            access="reduction",
            dtype=context.dtype,
        )
    builder.release(source, row)
    pooled = builder.activation("pooled_output", size, row)
    row = linear_forward(builder, context, linear)
    logits = builder.activation("logits", context.item * linear.tokens * linear.outputs, row)
    return ClassifierSaved(hidden, pooled, loss_forward(builder, context, logits, linear.tokens))


def classifier_backward(builder: ProgramBuilder, context: LoweringContext, saved: ClassifierSaved) -> Tensor:
    """Emit the backward pass of :func:`classifier_forward`; returns the gradient of the last hidden state."""
    if saved.kept_by_loss is None:
        builder.release(saved.output, len(builder))
        gradient = builder.temporary("output_gradient", context.hidden_bytes, len(builder))
        return final_norm_backward(builder, context, saved.norm_input, gradient)
    linear = _classifier(context)
    d_logits = loss_backward(builder, context, saved.kept_by_loss, linear.tokens)
    builder.module = "head"
    d_pooled = input_gradient(builder, context, linear)
    if context.tp > 1:
        _all_reduce(
            builder, context, "head_gradient_all_reduce", context.item * linear.tokens * linear.inputs
        )
    weight_gradient(builder, context, linear, (d_logits, saved.output))
    row = builder.memory_bound(
        "pooling_backward",
        OpKind.ELEMENTWISE,
        read=context.item * linear.tokens * linear.inputs,
        written=context.hidden_bytes,
        dtype=context.dtype,
    )
    builder.release(d_pooled, row)
    gradient = builder.temporary("final_norm_output_gradient", context.hidden_bytes, row)
    return final_norm_backward(builder, context, saved.norm_input, gradient)


# -- projector ---------------------------------------------------------------------------------------------------


@dataclass
class ProjectorSaved:
    """What final norm and projector of a vision encoder keep."""

    norm_input: Tensor
    inputs: list[Tensor]
    """Input of each linear."""
    outputs: list[Tensor]
    """Output of each linear but the last, in front of its activation."""


def _projector(context: LoweringContext) -> tuple[VisionEncoder, list[tuple[Linear, int | None]]]:
    """The linears of the projector with the axis of their weight that is cut over the ranks."""
    vision = context.model.vision
    assert vision is not None
    shapes = vision.projector_shapes(context.model.hidden_size)
    linears: list[tuple[Linear, int | None]] = []
    for index, (outputs, inputs) in enumerate(shapes):
        cut = None if index % 2 == 0 and index + 1 == len(shapes) else index % 2
        name, tokens = f"projector_fc{index + 1}", _images(context) * vision.tokens_per_image
        linear = Linear(
            name,
            f"vision_projection.linear_fc{index + 1}",
            inputs // (context.tp if cut == 1 else 1),
            outputs // (context.tp if cut == 0 else 1),
            tokens,
            quantized=False,
        )
        linears.append((linear, cut))
    return vision, linears


def projector_forward(
    builder: ProgramBuilder, context: LoweringContext, hidden: Tensor
) -> tuple[ProjectorSaved, Tensor]:
    """Emit the encoder's final norm, the joining of patches and the projector; returns the image tokens.

    ``context`` is that of the language model, ``hidden`` the encoder's last hidden state.
    """
    encoder = encoder_context(context)
    builder.module_prefix = VISION_PREFIX
    source = final_norm_forward(builder, encoder)
    if encoder.sequence_parallel:
        row = gather_sequence(builder, encoder, "vision_output_all_gather")
        builder.wait_for(row)
        builder.release(source, row)
        source = builder.temporary("gathered_output", encoder.gathered_bytes, row)
    builder.module_prefix, builder.module = "", "vision_projection"
    _, linears = _projector(context)
    size = _merged_bytes(context)
    row = builder.memory_bound(
        "join_patches", OpKind.PERMUTE, read=size, written=size, access="strided", dtype=context.dtype
    )
    builder.release(source, row)
    saved = ProjectorSaved(hidden, [builder.activation("joined_patches", size, row)], [])
    for index, (linear, cut) in enumerate(linears):
        row = linear_forward(builder, context, linear)
        size = context.item * linear.tokens * linear.outputs
        output = builder.temporary(f"{linear.name}_output", size, row)
        if cut == 1 and context.tp > 1:
            _all_reduce(builder, context, f"{linear.name}_all_reduce", size)
        if index + 1 == len(linears):
            break
        builder.promote(output, f"{linear.name}_output")
        row = builder.memory_bound(
            "projector_gelu", OpKind.ELEMENTWISE, read=size, written=size, dtype=context.dtype
        )
        saved.outputs.append(output)
        saved.inputs.append(builder.activation(f"{linears[index + 1][0].name}_input", size, row))
    return saved, output


def projector_backward(
    builder: ProgramBuilder, context: LoweringContext, saved: ProjectorSaved, gradient: Tensor
) -> Tensor:
    """Emit the backward pass of :func:`projector_forward`; returns the gradient of the encoder's last hidden state."""
    builder.layer, builder.module = -1, "vision_projection"
    _, linears = _projector(context)
    for index, (linear, cut) in reversed(list(enumerate(linears))):
        d_input = input_gradient(builder, context, linear)
        size = context.item * linear.tokens * linear.inputs
        if cut == 0 and context.tp > 1:
            _all_reduce(builder, context, f"{linear.name}_gradient_all_reduce", size)
        weight_gradient(builder, context, linear, (gradient, saved.inputs[index]))
        gradient = d_input
        if index:
            row = builder.memory_bound(
                "projector_gelu_backward",
                OpKind.ELEMENTWISE,
                read=2 * size,
                written=size,
                dtype=context.dtype,
            )
            builder.release(gradient, row)
            builder.release(saved.outputs[index - 1], row)
            gradient = builder.temporary(f"{linear.name}_activation_gradient", size, row)
    encoder = encoder_context(context)
    size = _merged_bytes(context)
    row = builder.memory_bound(
        "join_patches_backward",
        OpKind.PERMUTE,
        read=size,
        written=size,
        access="strided",
        dtype=context.dtype,
    )
    builder.release(gradient, row)
    gradient = builder.temporary("patch_gradient", encoder.gathered_bytes, row)
    if encoder.sequence_parallel:
        row = _copy(builder, context, "vision_output_scatter", encoder.hidden_bytes)
        builder.release(gradient, row)
        gradient = builder.temporary("scattered_gradient", encoder.hidden_bytes, row)
    builder.module_prefix = VISION_PREFIX
    gradient = final_norm_backward(builder, encoder, saved.norm_input, gradient)
    builder.module_prefix = ""
    return gradient


def _merged_bytes(context: LoweringContext) -> float:
    vision = context.model.vision
    assert vision is not None
    return context.item * _images(context) * vision.tokens_per_image * vision.merged_size


def image_token_bytes(context: LoweringContext) -> float:
    """Bytes of the image tokens of a microbatch, at the width of the language model."""
    vision = context.model.vision
    assert vision is not None
    return context.item * _images(context) * vision.tokens_per_image * context.model.hidden_size


def insert_image_tokens(
    builder: ProgramBuilder, context: LoweringContext, embedded: Tensor, images: Tensor
) -> Tensor:
    """Put image tokens in their places among embedded words; returns the hidden states, cut as the plan has it."""
    builder.layer, builder.module = -1, "embedding"
    size = image_token_bytes(context)
    row = builder.memory_bound(
        "insert_image_tokens", OpKind.PERMUTE, read=size, written=size, access="strided", dtype=context.dtype
    )
    builder.release(images, row)
    if not context.sequence_parallel:
        return embedded
    row = _copy(builder, context, "embedding_scatter", context.hidden_bytes)
    builder.release(embedded, row)
    return builder.activation("hidden_states", context.hidden_bytes, row)


def image_token_gradient(
    builder: ProgramBuilder, context: LoweringContext, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """Pick the gradient of the image tokens out of that of the hidden states; returns it and the latter, made whole."""
    builder.layer, builder.module = -1, "embedding"
    if context.sequence_parallel:
        row = gather_sequence(builder, context, "embedding_gradient_all_gather")
        builder.wait_for(row)
        builder.release(gradient, row)
        gradient = builder.temporary("gathered_gradient", context.gathered_bytes, row)
    size = image_token_bytes(context)
    row = builder.memory_bound(
        "image_token_gradient", OpKind.PERMUTE, read=size, written=size, access="strided", dtype=context.dtype
    )
    return builder.temporary("image_token_gradient", size, row), gradient


def _copy(builder: ProgramBuilder, context: LoweringContext, name: str, size: float) -> int:
    return builder.memory_bound(name, OpKind.MEMCPY, read=size, written=size, dtype=context.dtype)


def _all_reduce(builder: ProgramBuilder, context: LoweringContext, name: str, size: float) -> None:
    row = builder.collective(
        name,
        Communication.ALL_REDUCE,
        size,
        Dimension.TP,
        context.group(Dimension.TP),
        dtype=context.dtype,
    )
    builder.wait_for(row)
