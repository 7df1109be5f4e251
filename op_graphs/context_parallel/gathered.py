"""Gathered keys and values (``allgather``; Llama 3, section 3.3.2); their gradients are reduce-scattered."""

from __future__ import annotations

from ..lower_core_attention import AttentionSizes, flash_backward, flash_forward
from ..lowering_context import LoweringContext
from ..program import ProgramBuilder, Tensor
from ..vocabulary import Communication, Dimension
from .algorithm import ContextParallelAlgorithm, CoreSaved, exchange


def _gather_kv(builder: ProgramBuilder, context: LoweringContext, sizes: AttentionSizes) -> Tensor:
    size = sizes.kv_bytes * context.parallel.cp
    row = exchange(
        builder, context, "kv_all_gather", Communication.ALL_GATHER, size, context.group(Dimension.CP)
    )
    builder.wait_for(row)
    return builder.temporary("gathered_kv", size, row)


def _gathered_forward(
    builder: ProgramBuilder, context: LoweringContext, sizes: AttentionSizes, qkv: Tensor, keep: bool
) -> tuple[CoreSaved, Tensor]:
    gathered = _gather_kv(builder, context, sizes)
    # The front and the back chunk of a rank see different lengths of keys: a kernel each.
    flash_forward(builder, context, sizes.part(2))
    row = flash_forward(builder, context, sizes.part(2))
    output = builder.activation("attention_output", sizes.output_bytes, row - 1)
    log_sum_exp = builder.activation("log_sum_exp", 4.0 * sizes.batch * sizes.length * sizes.heads, row - 1)
    builder.release(gathered, row)
    if not keep:
        builder.release(log_sum_exp, row)
    return CoreSaved(qkv, output, [log_sum_exp] if keep else []), output


def _gathered_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    sizes: AttentionSizes,
    saved: CoreSaved,
    d_output: Tensor,
) -> Tensor:
    gathered = _gather_kv(builder, context, sizes)
    flash_backward(builder, context, sizes.part(2))
    row = flash_backward(builder, context, sizes.part(2))
    d_qkv = builder.temporary("qkv_gradient", sizes.qkv_bytes, row - 1)
    size = sizes.kv_bytes * context.parallel.cp
    d_gathered = builder.temporary("gathered_kv_gradient", size, row - 1)
    builder.release(gathered, row)
    scattered = exchange(
        builder,
        context,
        "kv_gradient_reduce_scatter",
        Communication.REDUCE_SCATTER,
        size,
        context.group(Dimension.CP),
    )
    builder.wait_for(scattered)
    builder.release(d_gathered, scattered)
    for tensor in (*saved.inner, d_output):
        builder.release(tensor, row)
    return d_qkv


GATHERED = ContextParallelAlgorithm(_gathered_forward, _gathered_backward)
