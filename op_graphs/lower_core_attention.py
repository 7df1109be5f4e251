"""Lowering of core attention, the part between projections: fused (flash) or unfused, on one rank's tokens.

Fused attention keeps q, k, v, its output and the log-sum-exp of each row (FlashAttention-2, Dao 2023). Unfused
attention is the sequence of kernels Megatron-LM ran before fused attention (``megatron/legacy/model/transformer.py``,
``CoreAttention``): scores GEMM, fused scale-mask-softmax, dropout, context GEMM, and a copy that brings the heads of a
token together. Its backward scales the gradients of queries and keys, and joins them and that of the values to the
one tensor that the projection made. It keeps the softmax, the dropout mask and the dropped softmax, 5 bytes a score
(Korthikanti et al. 2022, section 4.1), unless core attention is recomputed. Where the fused softmax cannot run
:mod:`.lower_score_softmax` has what does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .graph import AttentionShape, GemmShape
from .imbalance import Documents
from .lower_score_softmax import kernel_runs, softmax_backward, softmax_forward
from .lowering_context import LoweringContext
from .program import ProgramBuilder, Tensor
from .vocabulary import OpKind


@dataclass(frozen=True)
class AttentionSizes:
    """Core attention of one layer on one rank: lengths in tokens, sizes in elements, heads after tensor parallelism."""

    batch: int
    length: int
    """Queries of a sequence on this rank."""
    key_length: int
    heads: int
    kv_heads: int
    head_size: int
    value_head_size: int
    item: float
    causal: bool = True
    window: int = 0
    chunked: bool = False
    share: float = 1.0
    """Part of the score square that this rank computes: 1 / cp under context parallelism."""
    values_in_keys: bool = False
    """Whether values are the first elements of keys, so that they are not there twice."""
    documents: Documents | None = None
    """Documents that a sequence is packed from, outside of which no token attends; None if it is one."""

    @classmethod
    def of_layer(cls, context: LoweringContext, layer: int) -> AttentionSizes:
        """Sizes of a layer, without context parallelism applied to the work."""
        model, latent = context.model, context.model.latent_attention
        heads = model.heads // context.tp
        kv_heads, head, values = context.local_kv_heads, model.head_size, model.value_head_size
        if latent is not None:
            kv_heads = heads
        if latent is not None and context.absorbs_latents:
            kv_heads, values = 1, latent.kv_lora_rank
            head = values + latent.qk_rope_head_size
        return cls(
            batch=context.training.micro_batch_size,
            length=context.training.seq_len // context.parallel.cp,
            key_length=context.training.seq_len,
            heads=heads,
            kv_heads=kv_heads,
            head_size=head,
            value_head_size=values,
            item=context.item,
            causal=model.causal,
            window=model.attention_window(layer),
            chunked=model.window_kind == "chunked",
            share=1 / context.parallel.cp,
            values_in_keys=context.absorbs_latents,
            documents=context.load.documents,
        )

    @property
    def query_bytes(self) -> float:
        """Bytes of the queries."""
        return self.item * self.batch * self.length * self.heads * self.head_size

    @property
    def kv_bytes(self) -> float:
        """Bytes of keys and values together, of as many tokens as there are queries."""
        width = self.head_size + (0 if self.values_in_keys else self.value_head_size)
        return self.item * self.batch * self.length * self.kv_heads * width

    @property
    def qkv_bytes(self) -> float:
        """Bytes of queries, keys and values."""
        return self.query_bytes + self.kv_bytes

    @property
    def output_bytes(self) -> float:
        """Bytes of the attention output."""
        return self.item * self.batch * self.length * self.heads * self.value_head_size

    @property
    def pairs(self) -> float:
        """Query-key pairs of a head that are really computed on this rank, over the batch."""
        one = self._pairs_of
        whole = one(self.key_length) if self.documents is None else self.documents.total(one)
        return self.batch * whole * self.share

    def _pairs_of(self, length: int) -> float:
        """Pairs that the mask leaves in one document."""
        whole = float(length) * length
        if self.window and self.window < length:
            if self.chunked:
                whole = length * self.window / (2 if self.causal else 1)
            elif self.causal:
                whole = length * self.window - self.window**2 / 2
            else:
                whole = 2.0 * length * self.window - self.window**2
        elif self.causal:
            whole /= 2
        return whole

    @property
    def forward_flops(self) -> float:
        """Two products over the pairs of all heads."""
        return 2 * self.pairs * self.heads * (self.head_size + self.value_head_size)

    @property
    def backward_flops(self) -> float:
        """Five products, the recomputed scores among them: three over the query size, two over the value size."""
        return 2 * self.pairs * self.heads * (3 * self.head_size + 2 * self.value_head_size)

    def shape(self, context: LoweringContext, *, backward: bool) -> AttentionShape:
        """The signature of one kernel over all of it."""
        return AttentionShape(
            batch=self.batch,
            query_length=self.length,
            # Measured kernels of whole sequences say nothing of packed ones.
            key_length=self.key_length if self.documents is None else round(self.documents.effective_length),
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_size=self.head_size,
            value_head_size=self.value_head_size,
            causal=self.causal,
            backward=backward,
            dtype=context.dtype,
            window=self.window,
            kernel=context.training.attention,
        )

    def part(self, steps: int) -> AttentionSizes:
        """One of several equal kernels the work is cut into."""
        return replace(self, share=self.share / steps)


def kernel_forward(
    builder: ProgramBuilder, context: LoweringContext, sizes: AttentionSizes, *, keep: bool
) -> tuple[Tensor, list[Tensor]]:
    """Core attention in one go; returns its output and the inner tensors that are kept."""
    if context.training.attention == "unfused":
        return _unfused_forward(builder, context, sizes, keep=keep)
    row = flash_forward(builder, context, sizes)
    output = builder.activation("attention_output", sizes.output_bytes, row)
    log_sum_exp = builder.activation("log_sum_exp", 4.0 * sizes.batch * sizes.length * sizes.heads, row)
    inner = [log_sum_exp]
    if context.copies_attention_output:
        copied = builder.memory_bound(
            "attention_output_copy",
            OpKind.MEMCPY,
            read=sizes.output_bytes,
            written=sizes.output_bytes,
            access="strided",
            dtype=context.dtype,
        )
        inner.append(output)
        output, row = builder.activation("attention_output", sizes.output_bytes, copied), copied
    if not keep:
        for tensor in inner:
            builder.release(tensor, row)
        return output, []
    return output, inner


def kernel_backward(
    builder: ProgramBuilder, context: LoweringContext, sizes: AttentionSizes, inner: Sequence[Tensor]
) -> Tensor:
    """Backward of core attention in one go; returns the gradient of q, k and v."""
    if context.training.attention != "unfused":
        row = flash_backward(builder, context, sizes)
        d_qkv = builder.temporary("qkv_gradient", sizes.qkv_bytes, row)
        # Blocks of keys add to the gradient of the queries in fp32 before it is rounded (FlashAttention's dq_accum, the
        # same in cuDNN's kernels).
        builder.temporary("query_gradient_fp32", 4 / sizes.item * sizes.query_bytes, row, until=row)
    else:
        row, d_qkv = _unfused_backward(builder, context, sizes)
    for tensor in inner:
        builder.release(tensor, row)
    return d_qkv


def flash_forward(
    builder: ProgramBuilder, context: LoweringContext, sizes: AttentionSizes, name: str = "flash_attention"
) -> int:
    """One fused attention kernel; returns its row."""
    return builder.compute(
        name,
        OpKind.ATTENTION,
        flops=sizes.forward_flops,
        read=sizes.qkv_bytes,
        written=sizes.output_bytes,
        shape=sizes.shape(context, backward=False),
        dtype=context.dtype,
    )


def flash_backward(builder: ProgramBuilder, context: LoweringContext, sizes: AttentionSizes) -> int:
    """One fused attention backward kernel; returns its row."""
    return builder.compute(
        "flash_attention_backward",
        OpKind.ATTENTION,
        flops=sizes.backward_flops,
        read=sizes.qkv_bytes + 2 * sizes.output_bytes,
        written=sizes.qkv_bytes,
        shape=sizes.shape(context, backward=True),
        dtype=context.dtype,
    )


# -- unfused -----------------------------------------------------------------------------------------------------


def _batched_gemm(
    builder: ProgramBuilder,
    context: LoweringContext,
    sizes: AttentionSizes,
    name: str,
    mnk: tuple[int, int, int],
    layout: str,
) -> int:
    """A product for every head and sequence of the microbatch: one strided-batched kernel, so the kind is GEMM."""
    m, n, k = mnk
    count = sizes.batch * sizes.heads
    shape = GemmShape(m, n, k, layout, dtype=context.dtype, output=context.dtype, count=count)
    return builder.compute(
        name,
        OpKind.GEMM,
        read=count * (m * k + k * n) * sizes.item,
        written=count * m * n * sizes.item,
        flops=2.0 * count * m * n * k,
        shape=shape,
        dtype=context.dtype,
    )


def _score_elements(sizes: AttentionSizes) -> float:
    return float(sizes.batch) * sizes.heads * sizes.length * sizes.key_length


def _read_share(sizes: AttentionSizes) -> float:
    """Part of the score square that the softmax reads: with a causal mask what lies below the diagonal.

    ``scaled_upper_triang_masked_softmax`` of Megatron-LM loads no more of a row, either direction, and writes zeros
    behind it.
    """
    return 0.5 if sizes.causal and not sizes.window and sizes.length == sizes.key_length else 1.0


def _softmax_is_fused(sizes: AttentionSizes) -> bool:
    return kernel_runs(sizes.batch * sizes.heads, sizes.length, sizes.key_length, causal=sizes.causal)


def _unfused_forward(
    builder: ProgramBuilder, context: LoweringContext, sizes: AttentionSizes, *, keep: bool
) -> tuple[Tensor, list[Tensor]]:
    length, keys = sizes.length, sizes.key_length
    elements = _score_elements(sizes)
    score_bytes = sizes.item * elements
    row = _batched_gemm(builder, context, sizes, "attention_scores", (length, keys, sizes.head_size), "TN")
    raw = builder.temporary("attention_scores", score_bytes, row)
    fused = _softmax_is_fused(sizes)
    row, kept = softmax_forward(builder, context, elements, raw, read_share=_read_share(sizes), fused=fused)
    if context.model.attention_dropout > 0:
        row = builder.memory_bound(
            "attention_dropout",
            OpKind.ELEMENTWISE,
            read=score_bytes,
            written=score_bytes + elements,
            dtype=context.dtype,
        )
        if not fused:
            builder.release(kept.pop(), row)
        kept.append(builder.activation("attention_dropout_mask", elements, row))
        kept.append(builder.activation("dropped_softmax", score_bytes, row))
    mnk = (length, sizes.value_head_size, keys)
    row = _batched_gemm(builder, context, sizes, "attention_context", mnk, "NN")
    of_heads = builder.temporary("context_of_heads", sizes.output_bytes, row)
    row = builder.memory_bound(
        "attention_context_copy",
        OpKind.MEMCPY,
        read=sizes.output_bytes,
        written=sizes.output_bytes,
        access="strided",
        dtype=context.dtype,
    )
    builder.release(of_heads, row)
    output = builder.activation("attention_output", sizes.output_bytes, row)
    if not keep:
        for tensor in kept:
            builder.release(tensor, row)
        return output, []
    return output, kept


def _unfused_backward(
    builder: ProgramBuilder, context: LoweringContext, sizes: AttentionSizes
) -> tuple[int, Tensor]:
    """Gradients of values, scores, queries and keys; returns the last row and the gradient of QKV."""
    length, keys = sizes.length, sizes.key_length
    head, value = sizes.head_size, sizes.value_head_size
    elements = _score_elements(sizes)
    score_bytes = sizes.item * elements
    row = _batched_gemm(builder, context, sizes, "attention_context_dgrad", (length, keys, value), "TN")
    d_scores = builder.temporary("score_gradient", score_bytes, row)
    _batched_gemm(builder, context, sizes, "attention_value_grad", (keys, value, length), "NT")
    if context.model.attention_dropout > 0:
        builder.memory_bound(
            "attention_dropout_backward",
            OpKind.ELEMENTWISE,
            read=score_bytes + elements,
            written=score_bytes,
            dtype=context.dtype,
        )
    softmax_backward(
        builder, context, elements, read_share=_read_share(sizes), fused=_softmax_is_fused(sizes)
    )
    row = _batched_gemm(builder, context, sizes, "attention_query_grad", (length, head, keys), "NN")
    apart = builder.temporary("qkv_gradients_of_heads", sizes.qkv_bytes, row)
    row = _batched_gemm(builder, context, sizes, "attention_key_grad", (keys, head, length), "NT")
    builder.release(d_scores, row)
    # ``baddbmm`` took the scale of the scores, which its backward multiplies the gradients of both operands by.
    scaled = 2 * sizes.query_bytes
    row = builder.memory_bound(
        "qkv_gradient_join",
        OpKind.MEMCPY,
        read=scaled + sizes.qkv_bytes,
        written=scaled + sizes.qkv_bytes,
        access="strided",
        passes=3,
        dtype=context.dtype,
    )
    builder.release(apart, row)
    return row, builder.temporary("qkv_gradient", sizes.qkv_bytes, row)
