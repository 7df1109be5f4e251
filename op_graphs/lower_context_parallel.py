"""Lowering of core attention under context parallelism: how queries meet the keys of other ranks.

One function pair an algorithm, registered in :data:`ALGORITHMS`. Sequences are cut into 2 * cp chunks of which each
rank holds one from the front and one from the back, so that causal work is equal on all ranks (Megatron-Core, context
parallelism guide).

- ``p2p`` (ring attention, Liu et al. 2023): keys and values travel round the ring in cp - 1 steps, under the attention
  of the step before; in backward their gradients travel with them.
- ``a2a`` (DeepSpeed-Ulysses, Jacobs et al. 2023): an all-to-all turns sequence shards into head shards, attention sees
  whole sequences, another all-to-all turns its output back.
- ``allgather`` (Llama 3, section 3.3.2): keys and values are gathered first; their gradients are reduce-scattered.
- ``a2a+p2p``: all-to-all inside subgroups, a ring across them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from .lower_core_attention import (
    AttentionSizes,
    flash_backward,
    flash_forward,
    kernel_backward,
    kernel_forward,
)
from .lowering_context import LoweringContext
from .overlap.registry import RING
from .program import ProgramBuilder, Tensor
from .vocabulary import Communication, Dimension, OpKind, Phase


@dataclass
class CoreSaved:
    """What core attention keeps for its backward pass."""

    qkv: Tensor
    """Queries, keys and values as the kernels read them."""
    output: Tensor
    """Attention output as the kernels wrote it."""
    inner: list[Tensor] = field(default_factory=list)
    switch_row: int = -1
    """Row of the all-to-all behind which only ``qkv``, not what it was made from, is needed; -1 without one."""
    recomputed: bool = False
    """Whether the kernels run again in backward; ``qkv`` and ``output`` are then those outside of any all-to-all."""


def core_forward(
    builder: ProgramBuilder, context: LoweringContext, sizes: AttentionSizes, qkv: Tensor
) -> tuple[CoreSaved, Tensor]:
    """Emit core attention; returns what is kept, and the output that the projection reads."""
    recomputed = "core_attn" in context.training.recompute.modules and builder.keep_activations
    keep = builder.keep_activations and not recomputed
    saved, output = _forward(builder, context, sizes, qkv, keep)
    row = builder.end_row
    if recomputed:
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


# -- pieces ------------------------------------------------------------------------------------------------------


def _exchange(
    builder: ProgramBuilder,
    context: LoweringContext,
    name: str,
    communication: Communication,
    size: float,
    group: int,
    after: Sequence[int] | None = None,
) -> int:
    return builder.collective(
        name,
        communication,
        size,
        Dimension.CP,
        group,
        after=after,
        dtype=context.dtype,
        kind=OpKind.P2P if communication is Communication.SEND_RECEIVE else OpKind.COLLECTIVE,
    )


def _all_to_all(builder: ProgramBuilder, context: LoweringContext, name: str, size: float, group: int) -> int:
    """An exposed all-to-all of ``size`` bytes a rank."""
    row = _exchange(builder, context, name, Communication.ALL_TO_ALL, size, group)
    builder.wait_for(row)
    return row


# -- ring --------------------------------------------------------------------------------------------------------


def _ring_attention(
    builder: ProgramBuilder, context: LoweringContext, sizes: AttentionSizes, steps: int, group: int
) -> tuple[Tensor, Tensor]:
    """Attention against each rank's keys in turn; returns the output and its log-sum-exp."""
    part, placement = sizes.part(steps), RING.chosen(context.overlap.cp)
    arriving = -1
    output: Tensor | None = None
    received: Tensor | None = None
    for step in range(steps):
        sending = -1
        if step + 1 < steps:
            after = placement.behind(builder, arriving)
            sending = _exchange(
                builder, context, "ring_kv", Communication.SEND_RECEIVE, sizes.kv_bytes, group, after
            )
            placement.behind_step(builder, sending)
        builder.wait_for(arriving)
        row = flash_forward(builder, context, part)
        if output is None:
            output = builder.activation("attention_output", sizes.output_bytes, row)
        else:
            builder.memory_bound(
                "attention_merge",
                OpKind.ELEMENTWISE,
                read=2 * sizes.output_bytes,
                written=sizes.output_bytes,
                dtype=context.dtype,
            )
        if received is not None:
            builder.release(received, builder.last_row)
        received = builder.temporary("received_kv", sizes.kv_bytes, sending) if sending >= 0 else None
        arriving = sending
    assert output is not None
    log_sum_exp = builder.activation(
        "log_sum_exp", 4.0 * sizes.batch * sizes.length * sizes.heads, builder.last_row
    )
    return output, log_sum_exp


def _ring_backward_kernels(
    builder: ProgramBuilder, context: LoweringContext, sizes: AttentionSizes, steps: int, group: int
) -> Tensor:
    """Backward against each rank's keys in turn; keys and values travel on with the gradients they collected."""
    part, placement = sizes.part(steps), RING.chosen(context.overlap.cp)
    d_qkv: Tensor | None = None
    received: Tensor | None = None
    arriving = -1
    for step in range(steps):
        sending = -1
        after = placement.behind(builder, arriving)
        if step + 1 < steps:
            sending = _exchange(
                builder, context, "ring_kv", Communication.SEND_RECEIVE, sizes.kv_bytes, group, after
            )
            placement.behind_step(builder, sending)
        builder.wait_for(arriving)
        row = flash_backward(builder, context, part)
        if d_qkv is None:
            d_qkv = builder.temporary("qkv_gradient", sizes.qkv_bytes, row)
        if received is not None:
            builder.release(received, row)
        gradient = _exchange(
            builder, context, "ring_kv_gradient", Communication.SEND_RECEIVE, sizes.kv_bytes, group
        )
        placement.behind_step(builder, gradient)
        received = (
            builder.temporary("received_kv", 2 * sizes.kv_bytes, gradient) if step + 1 < steps else None
        )
        arriving = sending
        if step + 1 == steps:
            builder.wait_for(gradient)
    assert d_qkv is not None
    builder.memory_bound(
        "kv_gradient_sum",
        OpKind.ELEMENTWISE,
        read=2 * sizes.kv_bytes,
        written=sizes.kv_bytes,
        dtype=context.dtype,
    )
    return d_qkv


def _ring_forward(
    builder: ProgramBuilder, context: LoweringContext, sizes: AttentionSizes, qkv: Tensor, keep: bool
) -> tuple[CoreSaved, Tensor]:
    group = context.group(Dimension.CP)
    output, log_sum_exp = _ring_attention(builder, context, sizes, context.parallel.cp, group)
    if not keep:
        builder.release(log_sum_exp, builder.last_row)
    return CoreSaved(qkv, output, [log_sum_exp] if keep else []), output


def _ring_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    sizes: AttentionSizes,
    saved: CoreSaved,
    d_output: Tensor,
) -> Tensor:
    group = context.group(Dimension.CP)
    d_qkv = _ring_backward_kernels(builder, context, sizes, context.parallel.cp, group)
    for tensor in (*saved.inner, d_output):
        builder.release(tensor, builder.last_row)
    return d_qkv


# -- all-to-all --------------------------------------------------------------------------------------------------


def _head_sharded(sizes: AttentionSizes, degree: int) -> AttentionSizes:
    """Sizes behind an all-to-all over ``degree`` ranks: fewer heads, a longer part of the sequence."""
    return replace(
        sizes,
        length=sizes.length * degree,
        heads=sizes.heads // degree,
        kv_heads=max(1, sizes.kv_heads // degree),
        share=sizes.share * degree,
    )


def _switched_forward(
    builder: ProgramBuilder,
    context: LoweringContext,
    sizes: AttentionSizes,
    qkv: Tensor,
    keep: bool,
    switch: _Switch,
) -> tuple[CoreSaved, Tensor]:
    """All-to-all, attention over head shards (with a ring of ``switch.ring`` ranks), all-to-all back."""
    inner_sizes = _head_sharded(sizes, switch.degree)
    row = _all_to_all(builder, context, "qkv_all_to_all", sizes.qkv_bytes, switch.group)
    switched = builder.activation("qkv_by_head", inner_sizes.qkv_bytes, row)
    switch_row = row
    if switch.ring > 1:
        inner_output, log_sum_exp = _ring_attention(
            builder, context, inner_sizes, switch.ring, switch.ring_group
        )
        inner = [log_sum_exp]
        if not keep:
            builder.release(log_sum_exp, builder.last_row)
            inner = []
    else:
        inner_output, inner = kernel_forward(builder, context, inner_sizes, keep=keep)
    row = _all_to_all(builder, context, "attention_output_all_to_all", sizes.output_bytes, switch.group)
    output = builder.activation("attention_output", sizes.output_bytes, row)
    builder.forget_unless_kept(inner_output, row)
    return CoreSaved(switched, inner_output, inner, switch_row), output


def _switched_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    sizes: AttentionSizes,
    saved: CoreSaved,
    d_output: Tensor,
    switch: _Switch,
) -> Tensor:
    inner_sizes = _head_sharded(sizes, switch.degree)
    row = _all_to_all(
        builder, context, "attention_output_gradient_all_to_all", sizes.output_bytes, switch.group
    )
    builder.release(d_output, row)
    d_inner = builder.temporary("attention_output_gradient", inner_sizes.output_bytes, row)
    if switch.ring > 1:
        d_switched = _ring_backward_kernels(builder, context, inner_sizes, switch.ring, switch.ring_group)
        for tensor in saved.inner:
            builder.release(tensor, builder.last_row)
    else:
        d_switched = kernel_backward(builder, context, inner_sizes, saved.inner)
    builder.release(d_inner, builder.last_row)
    row = _all_to_all(builder, context, "qkv_gradient_all_to_all", sizes.qkv_bytes, switch.group)
    builder.release(d_switched, row)
    return builder.temporary("qkv_gradient", sizes.qkv_bytes, row)


@dataclass(frozen=True)
class _Switch:
    """How an all-to-all and a ring share the context-parallel group."""

    degree: int
    group: int
    ring: int
    ring_group: int


def _whole_group(context: LoweringContext) -> _Switch:
    return _Switch(context.parallel.cp, context.group(Dimension.CP), 1, -1)


def a2a_degree(cp: int, kv_heads: int) -> int:
    """Ranks of the inner all-to-all of ``a2a+p2p``: the largest proper divisor of cp that the key heads divide by."""
    return max(degree for degree in range(1, cp) if cp % degree == 0 and kv_heads % degree == 0)


def _two_levels(context: LoweringContext) -> _Switch:
    cp = context.parallel.cp
    kv_heads = AttentionSizes.of_layer(context, 0).kv_heads
    degree = a2a_degree(cp, kv_heads)
    ranks = context.parallel.group_ranks(Dimension.CP, context.rank)
    # Neighbouring ranks switch, so that the all-to-all stays inside the fast domain.
    inner = context.names.group("cp", ranks[:degree])
    return _Switch(degree, inner, cp // degree, context.names.group("cp", ranks[::degree]))


# -- all-gather --------------------------------------------------------------------------------------------------


def _gather_kv(builder: ProgramBuilder, context: LoweringContext, sizes: AttentionSizes) -> Tensor:
    size = sizes.kv_bytes * context.parallel.cp
    row = _exchange(
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
    scattered = _exchange(
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


# -- registry ----------------------------------------------------------------------------------------------------

_Forward = Callable[[ProgramBuilder, LoweringContext, AttentionSizes, Tensor, bool], tuple[CoreSaved, Tensor]]
_Backward = Callable[[ProgramBuilder, LoweringContext, AttentionSizes, CoreSaved, Tensor], Tensor]


@dataclass(frozen=True)
class ContextParallelAlgorithm:
    """Forward and backward of core attention over a context-parallel group."""

    forward: _Forward
    backward: _Backward


ALGORITHMS: dict[str, ContextParallelAlgorithm] = {
    "p2p": ContextParallelAlgorithm(_ring_forward, _ring_backward),
    "a2a": ContextParallelAlgorithm(
        lambda builder, context, sizes, qkv, keep: _switched_forward(
            builder, context, sizes, qkv, keep, _whole_group(context)
        ),
        lambda builder, context, sizes, saved, d_output: _switched_backward(
            builder, context, sizes, saved, d_output, _whole_group(context)
        ),
    ),
    "allgather": ContextParallelAlgorithm(_gathered_forward, _gathered_backward),
    "a2a+p2p": ContextParallelAlgorithm(
        lambda builder, context, sizes, qkv, keep: _switched_forward(
            builder, context, sizes, qkv, keep, _two_levels(context)
        ),
        lambda builder, context, sizes, saved, d_output: _switched_backward(
            builder, context, sizes, saved, d_output, _two_levels(context)
        ),
    ),
}
"""Context-parallel algorithms by the name ``parallel.cp_comm`` gives them."""
