"""Lowering of core attention, on one rank or under context parallelism: how queries meet the keys of other ranks.

Sequences are cut into 2 * cp chunks of which each rank holds one from the front and one from the back, so that causal
work is equal on all ranks (Megatron-Core, context parallelism guide). The algorithms are those of
``op_graphs.context_parallel``.
"""

from __future__ import annotations

from .context_parallel.algorithm import CoreSaved
from .context_parallel.registry import ALGORITHMS
from .lower_checkpoint import host_enters, host_runs_again
from .lower_core_attention import AttentionSizes, kernel_backward, kernel_forward
from .lowering_context import LoweringContext
from .program import ProgramBuilder, Tensor
from .recompute import Part
from .vocabulary import Phase

__all__ = ["CoreSaved", "core_backward", "core_forward"]


def core_forward(
    builder: ProgramBuilder, context: LoweringContext, sizes: AttentionSizes, qkv: Tensor
) -> tuple[CoreSaved, Tensor]:
    """Emit core attention; returns what is kept, and the output that the projection reads."""
    recomputed = context.recomputes(Part.CORE_ATTENTION) and builder.keep_activations
    keep = builder.keep_activations and not recomputed
    saved, output = _forward(builder, context, sizes, qkv, keep)
    row = builder.end_row
    if recomputed:
        host_enters(builder, context)
        _release_inside(builder, saved, qkv, output, row)
        return CoreSaved(qkv, output, recomputed=True), output
    if saved.switch_row >= 0:
        builder.release(qkv, saved.switch_row)
    builder.forget_unless_kept(saved.qkv, row)
    return saved, output


def core_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    sizes: AttentionSizes,
    saved: CoreSaved,
    d_output: Tensor,
) -> Tensor:
    """Emit the backward pass of core attention; returns the gradient of q, k and v.

    Releases everything that was kept, the output and its gradient included.
    """
    state = saved
    if saved.recomputed:
        phase, builder.phase = builder.phase, Phase.RECOMPUTE
        state, output = _forward(builder, context, sizes, saved.qkv, True)
        builder.phase = phase
        host_runs_again(builder, context)
        builder.release(output, builder.end_row)
        if state.output == output:
            state = CoreSaved(saved.qkv, saved.output, state.inner)
    if context.parallel.cp == 1:
        d_qkv = kernel_backward(builder, context, sizes, state.inner)
        builder.release(d_output, builder.last_row)
    else:
        d_qkv = ALGORITHMS[context.parallel.cp_comm].backward(builder, context, sizes, state, d_output)
    for tensor in (state.qkv, state.output, saved.qkv, saved.output):
        builder.release(tensor, builder.end_row)
    return d_qkv


def _forward(
    builder: ProgramBuilder, context: LoweringContext, sizes: AttentionSizes, qkv: Tensor, keep: bool
) -> tuple[CoreSaved, Tensor]:
    if context.parallel.cp > 1:
        return ALGORITHMS[context.parallel.cp_comm].forward(builder, context, sizes, qkv, keep)
    output, inner = kernel_forward(builder, context, sizes, keep=keep)
    return CoreSaved(qkv, output, inner), output


def _release_inside(builder: ProgramBuilder, saved: CoreSaved, qkv: Tensor, output: Tensor, row: int) -> None:
    """Release what lies between two all-to-alls."""
    if saved.qkv != qkv:
        builder.release(saved.qkv, row)
    if saved.output != output:
        builder.release(saved.output, row)
