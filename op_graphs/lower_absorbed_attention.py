"""Lowering of latent attention with absorbed up-projections: attention over the latent, one head of keys for all.

The up-projection of keys is applied to the queries and that of values to the output of attention, each a product a
head with the slice of the weight that belongs to it. So keys and values stay the latent and the rotary part, shared by
all heads, and a query is as wide as both. Order and kept tensors are Megatron-Core's
(``transformer/experimental_attention_variant/absorbed_mla.py``): products are ``einsum`` on the weights, copied into
the layout of attention; autograd makes their gradients, which are added to the main gradients afterwards. With
sequence parallelism the latent is gathered, and its gradient, a sum over the heads of all ranks, reduce-scattered.

What comes before, down-projections, their norms and the queries' up-projection, is that of
``lower_latent_attention``; so is what ``mla_up_proj`` recomputes: everything between latents and attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from .graph import GemmShape
from .linear import sum_type
from .lower_checkpoint import dropped, host_enters, host_runs_again, restored
from .lower_core_attention import AttentionSizes
from .lower_latent_attention import (
    LatentPath,
    down_paths,
    latent_of,
    path_backward,
    path_behind_norm_backward,
    up_projection,
)
from .lower_linear import (
    column_parallel_backward,
    column_parallel_forward,
    gather_sequence,
    reduce_partial_sums,
    run_weight_gradient,
)
from .lowering_context import LoweringContext
from .program import DeferredGemm, ProgramBuilder, Tensor
from .recompute import Part
from .vocabulary import OpKind, Phase


@dataclass
class AbsorbedSaved:
    """What the projections keep."""

    query: LatentPath | None
    """None where queries are projected from the hidden state directly."""
    key_value: LatentPath
    up_output: Tensor | None
    """Queries before the keys' up-projection; None where they are recomputed."""
    up_recomputed: bool
    made_again: Tensor | None = None
    """What attention reads as it was made again in the backward program that is lowered, beside its copy."""

    def tensors(self) -> list[Tensor]:
        """What lies between the norm's output and what attention reads."""
        found = [self.key_value.latent]
        if self.query is not None:
            found += [self.query.latent, self.query.normalized]
        if self.up_recomputed:
            found.append(self.key_value.normalized)
        return found if self.up_output is None else [*found, self.up_output]


def _heads(context: LoweringContext) -> int:
    return context.model.heads // context.tp


def _weight(context: LoweringContext, layer: int) -> str:
    """Module of the up-projections of keys and values."""
    return context.module(layer, "self_attention.linear_kv_up_proj")


# -- products with the weights of each head ----------------------------------------------------------------------


def _product(
    builder: ProgramBuilder, context: LoweringContext, name: str, sizes: tuple[int, int], layout: str
) -> int:
    """``[tokens, inputs] -> [tokens, outputs]`` in every head: one strided-batched product."""
    inputs, outputs = sizes
    shape = GemmShape(
        context.tokens,
        outputs,
        inputs,
        layout,
        dtype=context.dtype,
        output=context.dtype,
        count=_heads(context),
    )
    return builder.gemm(name, shape, kind=OpKind.GEMM)


def _weight_product(
    builder: ProgramBuilder,
    context: LoweringContext,
    layer: int,
    name: str,
    sizes: tuple[int, int],
    consumed: tuple[Tensor, ...],
    borrowed: tuple[Tensor, ...] = (),
) -> None:
    """The weight gradient of a product in every head, made by autograd and added to the main gradient."""
    shape = GemmShape(
        *sizes, context.tokens, "NT", dtype=context.dtype, output=context.dtype, count=_heads(context)
    )
    gemm = DeferredGemm(
        name,
        shape,
        _weight(context, layer),
        builder.layer,
        builder.module,
        (*consumed, *borrowed),
        accumulates_in=sum_type(context),
        kind=OpKind.GEMM,
    )
    if builder.deferred is not None:
        builder.defer(gemm)
    else:
        run_weight_gradient(builder, gemm, consumed)


def _copy(
    builder: ProgramBuilder, context: LoweringContext, name: str, size: float, source: Tensor
) -> Tensor:
    """A copy into another layout; releases its source."""
    row = builder.memory_bound(
        name, OpKind.MEMCPY, read=size, written=size, access="strided", dtype=context.dtype
    )
    builder.release(source, row)
    return builder.temporary(name, size, row)


# -- projections -------------------------------------------------------------------------------------------------


def absorbed_projections_forward(
    builder: ProgramBuilder,
    context: LoweringContext,
    layer: int,
    normalized: Tensor,
    *,
    keep_input: bool,
) -> tuple[AbsorbedSaved, Tensor]:
    """Emit the projections; returns what is kept, and queries with latent and rotary key."""
    query, key_value = down_paths(builder, context, layer, normalized, keep_input=keep_input)
    up_recomputed = context.recomputes(Part.LATENT_UP_PROJECTIONS) and builder.keep_activations
    keep, builder.keep_activations = builder.keep_activations, builder.keep_activations and not up_recomputed
    source = normalized if query is None else query.normalized
    up_output, qkv = _absorbed(
        builder, context, layer, source, key_value, keep_input=keep_input or query is not None
    )
    builder.forget_unless_kept(up_output, builder.last_row)
    builder.keep_activations = keep
    if up_recomputed:
        host_enters(builder, context)
    if query is None and not keep_input:
        builder.release(normalized, builder.last_row)
    for path in (query, key_value):
        if path is not None:
            builder.forget_unless_kept(path.latent, builder.last_row)
            builder.forget_unless_kept(path.normalized, builder.last_row)
    if not up_recomputed:
        # It is copied into what attention reads, and its norm needs only its input.
        builder.release(key_value.normalized, builder.last_row)
    return AbsorbedSaved(query, key_value, None if up_recomputed else up_output, up_recomputed), qkv


def _absorbed(
    builder: ProgramBuilder,
    context: LoweringContext,
    layer: int,
    source: Tensor,
    key_value: LatentPath,
    *,
    keep_input: bool,
) -> tuple[Tensor, Tensor]:
    """Up-projection of queries, that of keys absorbed into them, positions.

    The latent is gathered with the rotary part beside it. Returns the output of the former, and what attention reads.
    """
    latent, heads = latent_of(context), _heads(context)
    rank, rope = latent.kv_lora_rank, latent.qk_rope_head_size
    gathered: Tensor | None = None
    if context.sequence_parallel:
        row = gather_sequence(builder, context, "kv_latent_all_gather", rank + rope)
        builder.wait_for(row)
        gathered = builder.temporary("gathered_latent", context.token_bytes(rank + rope), row)
    up = up_projection(context, layer, "q")
    row = column_parallel_forward(builder, context, up, source, keep_input=keep_input)
    up_output = builder.activation("q_up_output", context.token_bytes(up.outputs), row)
    row = _product(builder, context, "k_absorb", (latent.qk_nope_head_size, rank), "NN")
    builder.parameter_rows.setdefault(_weight(context, layer), row)
    size = context.token_bytes(heads * rank)
    raw = builder.temporary("k_absorb_output", size, row)
    absorbed = _copy(builder, context, "absorbed_query_copy", size, raw)
    sizes = AttentionSizes.of_layer(context, layer)
    row = _rotary(builder, context, sizes, "rotary_and_layout")
    builder.release(absorbed, row)
    if gathered is not None:
        builder.release(gathered, row)
    return up_output, builder.activation("qkv", sizes.qkv_bytes, row)


def _rotary(builder: ProgramBuilder, context: LoweringContext, sizes: AttentionSizes, name: str) -> int:
    """Positions of queries and of the one key, and both joined with what has none: two kernels each."""
    return builder.memory_bound(
        name,
        OpKind.ELEMENTWISE,
        read=sizes.qkv_bytes,
        written=sizes.qkv_bytes,
        access="strided",
        passes=4,
        function=True,
        dtype=context.dtype,
    )


def recompute_absorbed(
    builder: ProgramBuilder, context: LoweringContext, layer: int, saved: AbsorbedSaved, normalized: Tensor
) -> Tensor:
    """Run everything between latents and attention again inside the backward program; returns what attention reads."""
    phase, builder.phase = builder.phase, Phase.RECOMPUTE
    source = normalized if saved.query is None else saved.query.normalized
    saved.up_output, qkv = _absorbed(builder, context, layer, source, saved.key_value, keep_input=True)
    builder.phase = phase
    host_runs_again(builder, context)
    saved.made_again = restored(
        builder, context, Part.LATENT_UP_PROJECTIONS, "qkv", builder.size_of(qkv), outputs=2
    )
    return qkv


def absorbed_projections_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    layer: int,
    saved: AbsorbedSaved,
    normalized: Tensor,
    d_qkv: Tensor,
) -> Tensor:
    """Emit the backward pass of the projections; returns the gradient of the norm's output."""
    latent, heads = latent_of(context), _heads(context)
    rank, rope, nope = latent.kv_lora_rank, latent.qk_rope_head_size, latent.qk_nope_head_size
    sizes = AttentionSizes.of_layer(context, layer)
    row = _rotary(builder, context, sizes, "rotary_and_layout_backward")
    builder.release(d_qkv, row)
    d_latent = builder.temporary("kv_latent_gradient_sum", context.token_bytes(rank + rope), row)
    d_absorbed = builder.temporary("absorbed_query_gradient", context.token_bytes(heads * rank), row)
    d_rotary = builder.temporary("rotary_query_gradient", context.token_bytes(heads * rope), row)
    row = _product(builder, context, "k_absorb_dgrad", (rank, nope), "TN")
    d_nope = builder.temporary("k_absorb_input_gradient", context.token_bytes(heads * nope), row)
    assert saved.up_output is not None
    _weight_product(builder, context, layer, "k_absorb_wgrad", (nope, rank), (d_absorbed, saved.up_output))
    size = context.token_bytes(heads * latent.qk_head_size)
    d_up = _copy(builder, context, "q_up_gradient", size, d_nope)
    builder.release(d_rotary, builder.last_row)
    if saved.query is not None:
        up = up_projection(context, layer, "q")
        q_gradient = path_backward(builder, context, layer, "q", saved.query, up, d_up, normalized)
    else:
        up = up_projection(context, layer, "q")
        q_gradient = column_parallel_backward(builder, context, up, normalized, d_up)
    if context.sequence_parallel:
        reduced = reduce_partial_sums(builder, context, "kv_latent_gradient", scatter=True, width=rank + rope)
        builder.wait_for(reduced)
        builder.release(d_latent, reduced)
        d_latent = builder.temporary(
            "kv_latent_reduced_gradient", context.sharded_token_bytes(rank + rope), reduced
        )
    kv_gradient = path_behind_norm_backward(
        builder, context, layer, "kv", saved.key_value, d_latent, normalized
    )
    dropped(builder, saved.made_again)
    saved.made_again = None
    if saved.up_recomputed:
        builder.release(saved.key_value.normalized, builder.last_row)
    hidden = context.hidden_bytes
    row = builder.memory_bound(
        "latent_gradient_sum", OpKind.ELEMENTWISE, read=2 * hidden, written=hidden, dtype=context.dtype
    )
    builder.release(kv_gradient, row)
    builder.release(normalized, row)
    return q_gradient


# -- values ------------------------------------------------------------------------------------------------------


def absorbed_output_forward(
    builder: ProgramBuilder, context: LoweringContext, layer: int, core_output: Tensor
) -> Tensor:
    """The values' up-projection on the output of attention; returns what the output projection reads."""
    latent = latent_of(context)
    row = _product(builder, context, "v_up", (latent.kv_lora_rank, latent.v_head_size), "TN")
    size = context.token_bytes(_heads(context) * latent.v_head_size)
    raw = builder.temporary("v_up_output", size, row)
    builder.forget_unless_kept(core_output, row)
    output = _copy(builder, context, "attention_values_copy", size, raw)
    builder.promote(output, "attention_values")
    return output


def absorbed_output_backward(
    builder: ProgramBuilder, context: LoweringContext, layer: int, core_output: Tensor, d_output: Tensor
) -> Tensor:
    """Gradients of the values' up-projection; returns that of the output of attention."""
    latent = latent_of(context)
    rank, values = latent.kv_lora_rank, latent.v_head_size
    row = _product(builder, context, "v_up_dgrad", (values, rank), "NN")
    size = context.token_bytes(_heads(context) * rank)
    raw = builder.temporary("v_up_input_gradient", size, row)
    _weight_product(builder, context, layer, "v_up_wgrad", (values, rank), (d_output,), (core_output,))
    return _copy(builder, context, "attention_gradient_copy", size, raw)
