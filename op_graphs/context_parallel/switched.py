"""All-to-all around attention: ``a2a`` (DeepSpeed-Ulysses; Jacobs et al. 2023) and ``a2a+p2p``.

Sequence shards become head shards, attention sees whole sequences, another all-to-all turns its output back. In
``a2a+p2p`` that happens inside subgroups, with a ring across them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..lower_core_attention import AttentionSizes, kernel_backward, kernel_forward
from ..lowering_context import LoweringContext
from ..program import ProgramBuilder, Tensor
from ..vocabulary import Dimension, MemoryCategory, Stream
from .algorithm import ContextParallelAlgorithm, CoreSaved, all_to_all
from .ring import ring_attention, ring_attention_backward

_POOL = Stream.CP
"""Transformer Engine puts what an all-to-all brought into order on a stream of its own, and what it makes there comes
from that stream's blocks (``context_parallel.py``, ``flash_attn_a2a_communicate``)."""


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
    row = all_to_all(builder, context, "qkv_all_to_all", sizes.qkv_bytes, switch.group)
    switched = builder.allocate("qkv_by_head", inner_sizes.qkv_bytes, row, MemoryCategory.ACTIVATIONS, _POOL)
    switch_row = row
    if switch.ring > 1:
        inner_output, log_sum_exp = ring_attention(
            builder, context, inner_sizes, switch.ring, switch.ring_group
        )
        inner = [log_sum_exp]
        if not keep:
            builder.release(log_sum_exp, builder.last_row)
            inner = []
    else:
        inner_output, inner = kernel_forward(builder, context, inner_sizes, keep=keep)
    row = all_to_all(builder, context, "attention_output_all_to_all", sizes.output_bytes, switch.group)
    output = builder.allocate("attention_output", sizes.output_bytes, row, MemoryCategory.ACTIVATIONS, _POOL)
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
    row = all_to_all(
        builder, context, "attention_output_gradient_all_to_all", sizes.output_bytes, switch.group
    )
    builder.release(d_output, row)
    d_inner = builder.allocate(
        "attention_output_gradient", inner_sizes.output_bytes, row, MemoryCategory.TEMPORARY, _POOL
    )
    if switch.ring > 1:
        d_switched = ring_attention_backward(builder, context, inner_sizes, switch.ring, switch.ring_group)
        for tensor in saved.inner:
            builder.release(tensor, builder.last_row)
    else:
        d_switched = kernel_backward(builder, context, inner_sizes, saved.inner)
    builder.release(d_inner, builder.last_row)
    row = all_to_all(builder, context, "qkv_gradient_all_to_all", sizes.qkv_bytes, switch.group)
    builder.release(d_switched, row)
    return builder.allocate("qkv_gradient", sizes.qkv_bytes, row, MemoryCategory.TEMPORARY, _POOL)


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


def _algorithm(switch: Callable[[LoweringContext], _Switch]) -> ContextParallelAlgorithm:
    return ContextParallelAlgorithm(
        lambda builder, context, sizes, qkv, keep: _switched_forward(
            builder, context, sizes, qkv, keep, switch(context)
        ),
        lambda builder, context, sizes, saved, d_output: _switched_backward(
            builder, context, sizes, saved, d_output, switch(context)
        ),
    )


ALL_TO_ALL = _algorithm(_whole_group)
ALL_TO_ALL_AND_RING = _algorithm(_two_levels)
