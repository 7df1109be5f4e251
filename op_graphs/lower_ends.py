"""Lowering of the two ends of the model: embedding on the first stage, final norm, head and loss on the last.

Embedding and head are vocabulary-parallel (Megatron-Core ``tensor_parallel/layers.py`` and ``cross_entropy.py``).
The embedding's gradient is dense: PyTorch zeroes and fills a table-sized tensor for each microbatch, which is then
added to the main gradient. The loss is either Megatron's sequence of kernels on fp32 logits, or Transformer
Engine's fused cross entropy, which works in place on the logits.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import pointwise
from .lower_linear import (
    Linear,
    column_parallel_backward,
    column_parallel_forward,
    gather_sequence,
    gathered_input,
    linear_forward,
    reduce_partial_sums,
)
from .lowering_context import LoweringContext
from .program import ProgramBuilder, Tensor
from .vocabulary import Communication, Dimension, DType, OpKind, Phase

FINAL_NORM = "decoder.final_layernorm"
"""Module of the norm behind the last layer."""


@dataclass
class HeadSaved:
    """What final norm, head and loss keep for their backward pass."""

    norm_input: Tensor
    normalized: Tensor
    logits: Tensor
    """bf16 logits turned into their gradient in place (fused), or the fp32 softmax (unfused)."""


@dataclass
class EmbeddingSaved:
    """What the embedding keeps: a dropout mask, if there is dropout."""

    dropout_mask: Tensor | None


# -- embedding ---------------------------------------------------------------------------------------------------


def embedding_forward(
    builder: ProgramBuilder, context: LoweringContext, *, whole: bool = False
) -> tuple[EmbeddingSaved, Tensor]:
    """Emit the embedding; returns what it keeps and the hidden states.

    ``whole`` leaves the sequence uncut under sequence parallelism, for what is still to be put into it.
    """
    builder.layer, builder.module = -1, "embedding"
    model = context.model
    gathered = context.gathered_bytes
    row = builder.memory_bound(
        "word_embedding",
        OpKind.EMBEDDING,
        read=gathered,
        written=gathered,
        access="strided",
        dtype=context.dtype,
    )
    builder.parameter_rows["embedding.word_embeddings"] = row
    current = builder.temporary("word_embeddings", gathered, row)
    # Position rows are added over the whole sequence, so the sum is reduced unsharded and cut afterwards.
    scatter = context.sequence_parallel and model.positions != "learned" and not whole
    output_bytes = gathered if whole else context.hidden_bytes
    if context.tp > 1:
        reduced = reduce_partial_sums(builder, context, "embedding", scatter=scatter)
        builder.wait_for(reduced)
    if model.positions == "learned":
        row = builder.memory_bound(
            "position_embedding",
            OpKind.EMBEDDING,
            read=2 * gathered,
            written=output_bytes,
            dtype=context.dtype,
        )
        builder.parameter_rows["embedding.position_embeddings"] = row
    else:
        # The reduced embedding is the hidden state itself.
        row = len(builder) - 1
    builder.release(current, row)
    if model.hidden_dropout == 0:
        return EmbeddingSaved(None), builder.activation("hidden_states", output_bytes, row)
    mask_bytes = context.sharded_tokens * model.hidden_size
    row = builder.memory_bound(
        "embedding_dropout",
        OpKind.ELEMENTWISE,
        read=context.hidden_bytes,
        written=context.hidden_bytes + mask_bytes,
        dtype=context.dtype,
    )
    mask = builder.activation("embedding_dropout_mask", mask_bytes, row)
    if context.freezes_weights:
        builder.discard(mask, row)
    return EmbeddingSaved(mask), builder.activation("hidden_states", output_bytes, row)


def embedding_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    saved: EmbeddingSaved,
    gradient: Tensor,
    *,
    whole: bool = False,
) -> None:
    """Emit the embedding's weight gradient: a dense table-sized gradient, added to the main gradient.

    ``whole`` says that ``gradient`` is of the whole sequence already.
    """
    builder.layer, builder.module = -1, "embedding"
    model = context.model
    if context.freezes_weights:
        builder.release(gradient, builder.last_row)
        return
    if saved.dropout_mask is not None:
        row = builder.memory_bound(
            "embedding_dropout_backward",
            OpKind.ELEMENTWISE,
            read=context.hidden_bytes + context.sharded_tokens * model.hidden_size,
            written=context.hidden_bytes,
            dtype=context.dtype,
        )
        builder.release(saved.dropout_mask, row)
    gathered: Tensor | None = None
    if context.sequence_parallel and not whole:
        row = gather_sequence(builder, context, "embedding_gradient_all_gather")
        builder.wait_for(row)
        gathered = builder.temporary("gathered_gradient", context.gathered_bytes, row)
    if model.positions == "learned":
        rows = model.max_positions or context.training.seq_len
        dense_table_gradient(builder, context, "position", rows)
    dense_table_gradient(builder, context, "word", context.local_vocab)
    builder.release(gradient, builder.last_row)
    if gathered is not None:
        builder.release(gathered, builder.last_row)


def dense_table_gradient(
    builder: ProgramBuilder, context: LoweringContext, table: str, table_rows: int
) -> None:
    """Emit the gradient of a lookup in the ``word`` or ``position`` table, added to its main gradient."""
    elements = table_rows * context.model.hidden_size
    dense = context.item * elements
    main = context.gradient_dtype.itemsize * elements
    row = builder.memory_bound(
        f"{table}_embedding_gradient_zero",
        OpKind.MEMSET,
        read=0,
        written=dense,
        dtype=context.dtype,
        phase=Phase.BACKWARD_WEIGHT,
    )
    tensor = builder.temporary(f"{table}_embedding_gradient", dense, row)
    builder.memory_bound(
        f"{table}_embedding_backward",
        OpKind.EMBEDDING,
        read=context.gathered_bytes,
        written=context.gathered_bytes,
        access="strided",
        dtype=context.dtype,
        phase=Phase.BACKWARD_WEIGHT,
    )
    row = builder.memory_bound(
        f"{table}_embedding_accumulate",
        OpKind.ELEMENTWISE,
        read=dense + main,
        written=main,
        dtype=context.gradient_dtype,
        phase=Phase.BACKWARD_WEIGHT,
    )
    builder.release(tensor, row)
    builder.gradient_rows[f"embedding.{table}_embeddings"] = row


# -- head and loss -----------------------------------------------------------------------------------------------


def _head_linear(context: LoweringContext) -> Linear:
    sizes = context.model.hidden_size, context.local_vocab, context.tokens
    return Linear("head", "output_layer", *sizes, quantized=context.training.fp8_head)


def norm_forward(builder: ProgramBuilder, context: LoweringContext, name: str, module: str) -> Tensor:
    """Emit a norm outside of the decoder's layers; returns its output."""
    size = context.hidden_bytes
    row = pointwise.norm(builder, context, name, size)
    builder.parameter_rows[module] = row
    return builder.activation(f"{name}_output", size, row)


def norm_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    name: str,
    module: str,
    norm_input: Tensor,
    d_normalized: Tensor,
) -> Tensor:
    """Emit the backward pass of such a norm; returns the gradient of its input, which the caller releases."""
    size = context.hidden_bytes
    row = pointwise.norm_backward(builder, context, f"{name}_backward", size)
    builder.gradient_rows[module] = row
    builder.release(d_normalized, row)
    builder.release(norm_input, row)
    return builder.temporary("hidden_state_gradient", size, row)


def final_norm_forward(builder: ProgramBuilder, context: LoweringContext) -> Tensor:
    """Emit the norm behind the last layer; returns its output."""
    builder.layer, builder.module = -1, "head"
    return norm_forward(builder, context, "final_norm", context.module_prefix + FINAL_NORM)


def head_forward(builder: ProgramBuilder, context: LoweringContext, hidden: Tensor) -> HeadSaved:
    """Emit final norm, head and loss; returns what they keep."""
    normalized = final_norm_forward(builder, context)
    logits = logits_forward(builder, context, normalized)
    if context.freezes_weights or context.training.fp8_head:
        # Only the weight gradient of the head reads it again, or a quantised copy in its place.
        builder.discard(normalized, builder.parameter_rows[_head_linear(context).parameter])
    return HeadSaved(hidden, normalized, logits)


def logits_forward(builder: ProgramBuilder, context: LoweringContext, normalized: Tensor) -> Tensor:
    """Emit output head and loss of normalised hidden states; returns what the loss keeps."""
    builder.layer, builder.module = -1, "head"
    if context.training.fp8_head:
        row = column_parallel_forward(builder, context, _head_linear(context), normalized, keep_input=True)
    else:
        gathered = gathered_input(builder, context, "head")
        row = linear_forward(builder, context, _head_linear(context))
        if gathered is not None:
            builder.release(gathered, row)
    logits = builder.activation("logits", context.item * context.tokens * context.local_vocab, row)
    return loss_forward(builder, context, logits, context.tokens)


def loss_forward(builder: ProgramBuilder, context: LoweringContext, logits: Tensor, rows: int) -> Tensor:
    """Emit the loss of so many rows of logits; returns what it keeps: the logits, or in their place a softmax."""
    builder.module = "loss"
    if context.training.cross_entropy in ("te", "compiled"):
        _fused_loss_forward(builder, context, rows)
        return logits
    if context.training.cross_entropy == "native":
        return _native_loss_forward(builder, context, logits, rows)
    if context.training.cross_entropy == "torch":
        return _torch_loss_forward(builder, context, logits, rows)
    return _unfused_loss_forward(builder, context, logits, rows)


def _fused_loss_forward(builder: ProgramBuilder, context: LoweringContext, rows: int) -> None:
    logits = context.item * rows * context.local_vocab
    builder.memory_bound(
        "cross_entropy_online_softmax",
        OpKind.LOSS,
        read=logits,
        written=12.0 * rows,
        access="reduction",
        dtype=context.dtype,
    )
    if context.tp > 1:
        row = builder.collective(
            "loss_all_gather",
            Communication.ALL_GATHER,
            12.0 * rows * context.tp,
            Dimension.TP,
            context.group(Dimension.TP),
            dtype=DType.FP32,
        )
        builder.wait_for(row)
    builder.memory_bound(
        "cross_entropy_gradient",
        OpKind.LOSS,
        read=logits,
        written=logits,
        access="reduction",
        dtype=context.dtype,
    )


def _unfused_loss_forward(
    builder: ProgramBuilder, context: LoweringContext, logits: Tensor, rows: int
) -> Tensor:
    """Megatron's vocab-parallel cross entropy: fp32 copy, maximum, exponentials in place, sum, division."""
    elements = float(rows) * context.local_vocab
    half, single = context.item * elements, 4 * elements

    def reduce_over_ranks(name: str) -> None:
        _reduce_loss(builder, context, name, 4.0 * rows)

    def kernel(name: str, read: float, written: float, access: str = "stream") -> int:
        kind = OpKind.CAST if name == "logits_to_fp32" else OpKind.LOSS
        return builder.memory_bound(name, kind, read=read, written=written, access=access, dtype=DType.FP32)

    row = kernel("logits_to_fp32", half, single)
    softmax = builder.activation("softmax_fp32", single, row)
    kernel("logits_maximum", single, 4.0 * rows, "reduction")
    reduce_over_ranks("loss_maximum_all_reduce")
    kernel("logits_subtract_maximum", single, single)
    kernel("predicted_logits", 4.0 * rows, 4.0 * rows, "strided")
    reduce_over_ranks("loss_predicted_all_reduce")
    kernel("logits_exponential", single, single)
    kernel("exponential_sum", single, 4.0 * rows, "reduction")
    reduce_over_ranks("loss_sum_all_reduce")
    row = kernel("softmax_divide", single, single)
    builder.release(logits, row)
    return softmax


def _native_loss_forward(
    builder: ProgramBuilder, context: LoweringContext, logits: Tensor, rows: int
) -> Tensor:
    """The same, compiled into three kernels (Megatron-Core ``fusions/fused_cross_entropy.py``).

    What is compiled does not work in place: the exponentials lie beside the fp32 logits, and in backward the fp32
    gradient beside the softmax, so that it takes fewer kernels but 10 bytes a logit where the other takes 6.
    """
    elements = float(rows) * context.local_vocab
    half, single = context.item * elements, 4 * elements
    row = builder.memory_bound(
        "cross_entropy_maximum",
        OpKind.LOSS,
        read=half,
        written=single + 4.0 * rows,
        access="reduction",
        dtype=DType.FP32,
    )
    in_fp32 = builder.temporary("logits_fp32", single, row)
    _reduce_loss(builder, context, "loss_maximum_all_reduce", 4.0 * rows)
    row = builder.memory_bound(
        "cross_entropy_exponential",
        OpKind.LOSS,
        read=single,
        written=single + 8.0 * rows,
        access="reduction",
        dtype=DType.FP32,
    )
    softmax = builder.activation("softmax_fp32", single, row)
    _reduce_loss(builder, context, "loss_sum_all_reduce", 8.0 * rows)
    row = builder.memory_bound("softmax_divide", OpKind.LOSS, read=single, written=single, dtype=DType.FP32)
    builder.release(in_fp32, row)
    builder.release(logits, row)
    return softmax


def _torch_loss_forward(
    builder: ProgramBuilder, context: LoweringContext, logits: Tensor, rows: int
) -> Tensor:
    """``torch.nn.functional.cross_entropy`` of logits cast to fp32: their logarithmic softmax is kept.

    The logits are the model's output, which the training loop holds until it has the loss.

    Over ranks that share the vocabulary, maximum and sum are reduced (``torch/distributed/tensor/parallel/loss.py``),
    which takes the kernel apart into three, with one more tensor of the logits' size between them.
    """
    elements = float(rows) * context.local_vocab
    half, single = context.item * elements, 4 * elements
    cast = builder.memory_bound(
        "logits_to_fp32", OpKind.CAST, read=half, written=single, access="stream", dtype=DType.FP32
    )
    in_fp32 = builder.temporary("logits_fp32", single, cast)
    kernels = 1
    if context.tp > 1:
        kernels = 3
        _reduce_loss(builder, context, "loss_maximum_all_reduce", 4.0 * rows)
        _reduce_loss(builder, context, "loss_sum_all_reduce", 4.0 * rows)
    row = builder.memory_bound(
        "log_softmax",
        OpKind.LOSS,
        read=kernels * single,
        written=kernels * single,
        access="stream",
        passes=kernels,
        dtype=DType.FP32,
    )
    kept = builder.activation("log_softmax_fp32", single, row)
    if context.tp > 1:
        builder.temporary("shifted_logits", single, row, until=row)
    builder.release(in_fp32, row)
    if not context.held_outputs:
        builder.release(logits, row)
    return kept


def _torch_loss_backward(
    builder: ProgramBuilder, context: LoweringContext, kept: Tensor, rows: int
) -> Tensor:
    """A dense gradient of the picked logarithms, that of the softmax, and the cast to the type of the logits."""
    elements = float(rows) * context.local_vocab
    half, single = context.item * elements, 4 * elements
    row = builder.memory_bound(
        "picked_gradient_zero", OpKind.MEMSET, read=0, written=single, dtype=DType.FP32
    )
    picked = builder.temporary("picked_gradient", single, row)
    row = builder.memory_bound(
        "log_softmax_backward",
        OpKind.LOSS,
        read=2 * single,
        written=single,
        access="stream",
        dtype=DType.FP32,
    )
    in_fp32 = builder.temporary("logit_gradient_fp32", single, row)
    if context.tp > 1:
        builder.temporary("exponentials", single, row, until=row)
    builder.release(kept, row)
    builder.release(picked, row)
    row = builder.memory_bound(
        "logit_gradient_cast",
        OpKind.CAST,
        read=single,
        written=half,
        access="stream",
        dtype=context.dtype,
    )
    builder.release(in_fp32, row)
    return builder.temporary("logit_gradient", half, row)


def _reduce_loss(builder: ProgramBuilder, context: LoweringContext, name: str, size: float) -> None:
    """All-reduce of a few numbers a token over the ranks that share the vocabulary."""
    if context.tp > 1:
        row = builder.collective(
            name,
            Communication.ALL_REDUCE,
            size,
            Dimension.TP,
            context.group(Dimension.TP),
            dtype=DType.FP32,
        )
        builder.wait_for(row)


def head_backward(builder: ProgramBuilder, context: LoweringContext, saved: HeadSaved) -> Tensor:
    """Emit the backward pass of loss, head and final norm; returns the gradient of the last hidden state."""
    d_normalized = logits_backward(builder, context, saved.normalized, saved.logits)
    return final_norm_backward(builder, context, saved.norm_input, d_normalized)


def final_norm_backward(
    builder: ProgramBuilder, context: LoweringContext, norm_input: Tensor, d_normalized: Tensor
) -> Tensor:
    """Emit the backward pass of the norm behind the last layer; returns the gradient of the last hidden state."""
    builder.layer, builder.module = -1, "head"
    module = context.module_prefix + FINAL_NORM
    return norm_backward(builder, context, "final_norm", module, norm_input, d_normalized)


def logits_backward(
    builder: ProgramBuilder, context: LoweringContext, normalized: Tensor, kept: Tensor
) -> Tensor:
    """Emit the backward pass of loss and output head; returns the gradient of the normalised hidden states.

    ``kept`` is what :func:`logits_forward` returned.
    """
    d_logits = loss_backward(builder, context, kept, context.tokens)
    builder.module = "head"
    return column_parallel_backward(builder, context, _head_linear(context), normalized, d_logits)


def loss_backward(builder: ProgramBuilder, context: LoweringContext, kept: Tensor, rows: int) -> Tensor:
    """Emit the gradient of the logits; ``kept`` is what :func:`loss_forward` returned."""
    builder.layer, builder.module = -1, "loss"
    if context.training.cross_entropy == "torch":
        return _torch_loss_backward(builder, context, kept, rows)
    elements = float(rows) * context.local_vocab
    half = context.item * elements
    if context.training.cross_entropy in ("te", "compiled"):
        row = builder.memory_bound(
            "cross_entropy_backward", OpKind.LOSS, read=half, written=half, dtype=context.dtype
        )
        d_logits = kept
        if context.training.cross_entropy == "compiled":
            # A compiler does not write into what autograd keeps.
            d_logits = builder.temporary("logit_gradient", half, row)
            if not context.held_outputs:
                builder.release(kept, row)
    else:
        row = builder.memory_bound(
            "cross_entropy_backward", OpKind.LOSS, read=4 * elements, written=4 * elements, dtype=DType.FP32
        )
        in_fp32: Tensor | None = None
        if context.training.cross_entropy == "native":
            in_fp32 = builder.temporary("logit_gradient_fp32", 4 * elements, row)
        row = builder.memory_bound(
            "logit_gradient_cast", OpKind.CAST, read=4 * elements, written=half, dtype=context.dtype
        )
        d_logits = builder.temporary("logit_gradient", half, row)
        builder.release(kept, row)
        if in_fp32 is not None:
            builder.release(in_fp32, row)
    return d_logits
