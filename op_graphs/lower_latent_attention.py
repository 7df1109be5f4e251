"""Lowering of the projections of multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434, section 2.1).

Order and sharding are Megatron-Core's (``transformer/multi_latent_attention.py``): the down-projections are replicated
and run on the sequence shard; their outputs are normalised, gathered, and brought up to the heads of this rank by
column-parallel linears. Queries and keys get their rotary part and are laid out contiguously for the kernel.
Kept for backward: the norm's output, both latents before and behind their norms, and q, k and v at the full number of
heads, unless the up-projections are recomputed (``mla_up_proj``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .lower_checkpoint import dropped, host_enters, host_runs_again, restored
from .lower_linear import (
    Linear,
    column_parallel_backward,
    column_parallel_forward,
    linear_backward,
    linear_forward,
)
from .lowering_context import LoweringContext
from .model import LatentAttention
from .program import ProgramBuilder, Tensor
from .recompute import Part
from .vocabulary import OpKind, Phase


@dataclass
class LatentPath:
    """One of the two chains: down-projection, norm, up-projection."""

    latent: Tensor
    """Output of the down-projection."""
    normalized: Tensor
    """Input of the up-projection, behind its norm."""


@dataclass
class LatentSaved:
    """What the projections keep."""

    query: LatentPath | None
    """None where queries are projected from the hidden state directly."""
    key_value: LatentPath
    qkv: Tensor
    up_recomputed: bool
    made_again: Tensor | None = None
    """q, k and v as they were made again in the backward program that is lowered, beside their copies."""

    def tensors(self) -> list[Tensor]:
        """What lies between the norm's output and q, k and v."""
        paths = [path for path in (self.query, self.key_value) if path is not None]
        return [tensor for path in paths for tensor in (path.latent, path.normalized)]


def latent_of(context: LoweringContext) -> LatentAttention:
    """The latent attention of a model that has it."""
    latent = context.model.latent_attention
    assert latent is not None, "only called for models with latent attention"
    return latent


def _down(context: LoweringContext, layer: int, which: str) -> Linear:
    latent = latent_of(context)
    outputs = latent.q_lora_rank if which == "q" else latent.kv_lora_rank + latent.qk_rope_head_size
    module = context.module(layer, f"self_attention.linear_{which}_down_proj")
    return Linear(f"{which}_down", module, context.model.hidden_size, outputs, context.sharded_tokens)


def up_projection(context: LoweringContext, layer: int, which: str) -> Linear:
    """The linear that brings queries (``q``), or keys and values (``kv``), up to the heads of this rank."""
    latent, heads = latent_of(context), context.model.heads // context.tp
    if which == "q":
        inputs = latent.q_lora_rank or context.model.hidden_size
        outputs = heads * latent.qk_head_size
        name = "linear_q_up_proj" if latent.q_lora_rank else "linear_q_proj"
    else:
        inputs = latent.kv_lora_rank
        outputs = heads * (latent.qk_nope_head_size + latent.v_head_size)
        name = "linear_kv_up_proj"
    return Linear(
        f"{which}_up", context.module(layer, f"self_attention.{name}"), inputs, outputs, context.tokens
    )


def _qkv_bytes(context: LoweringContext) -> float:
    latent, heads = latent_of(context), context.model.heads // context.tp
    return context.token_bytes(heads * (2 * latent.qk_head_size + latent.v_head_size))


def down_paths(
    builder: ProgramBuilder, context: LoweringContext, layer: int, normalized: Tensor, *, keep_input: bool
) -> tuple[LatentPath | None, LatentPath]:
    """Emit the ways down to the latents of queries, None where they have none, and of keys and values."""
    latent = latent_of(context)
    query: LatentPath | None = None
    if latent.q_lora_rank:
        query = down_and_norm(
            builder, context, layer, "q", latent.q_lora_rank, normalized, keep_input=keep_input
        )
    key_value = down_and_norm(
        builder, context, layer, "kv", latent.kv_lora_rank, normalized, keep_input=keep_input
    )
    if query is not None and not keep_input:
        builder.release(normalized, builder.last_row)
    return query, key_value


def latent_projections_forward(
    builder: ProgramBuilder, context: LoweringContext, layer: int, normalized: Tensor, *, keep_input: bool
) -> tuple[LatentSaved, Tensor]:
    """Emit the projections; returns what is kept, and q, k, v."""
    query, key_value = down_paths(builder, context, layer, normalized, keep_input=keep_input)
    up_recomputed = context.recomputes(Part.LATENT_UP_PROJECTIONS) and builder.keep_activations
    inputs = {"q": normalized if query is None else query.normalized, "kv": key_value.normalized}
    keep, builder.keep_activations = builder.keep_activations, builder.keep_activations and not up_recomputed
    qkv = _up_projections(builder, context, layer, inputs, keep_query_input=keep_input or query is not None)
    builder.keep_activations = keep
    if up_recomputed:
        host_enters(builder, context)
    if query is None and not keep_input:
        builder.release(normalized, builder.last_row)
    for path in (query, key_value):
        if path is not None:
            builder.forget_unless_kept(path.latent, builder.last_row)
            builder.forget_unless_kept(path.normalized, builder.last_row)
            if context.recipe is not None and keep and not up_recomputed:
                builder.discard(path.normalized)
    return LatentSaved(query, key_value, qkv, up_recomputed), qkv


def down_and_norm(
    builder: ProgramBuilder,
    context: LoweringContext,
    layer: int,
    which: str,
    rank: int,
    normalized: Tensor,
    *,
    keep_input: bool,
) -> LatentPath:
    """The down-projection of queries (``q``) or keys and values (``kv``), and its norm over ``rank`` elements."""
    linear = _down(context, layer, which)
    row = linear_forward(builder, context, linear, normalized if keep_input else None)
    latent = builder.activation(f"{which}_latent", context.sharded_token_bytes(linear.outputs), row)
    size = context.sharded_token_bytes(rank)
    row = builder.memory_bound(
        f"{which}_latent_norm", OpKind.NORM, read=size, written=size, access="reduction", dtype=context.dtype
    )
    builder.parameter_rows.setdefault(context.module(layer, f"self_attention.{which}_layernorm"), row)
    return LatentPath(latent, builder.activation(f"{which}_latent_normalized", size, row))


def _up_projections(
    builder: ProgramBuilder,
    context: LoweringContext,
    layer: int,
    inputs: Mapping[str, Tensor],
    *,
    keep_query_input: bool,
) -> Tensor:
    """Both up-projections, rotary positions, and the copy into contiguous q, k and v."""
    latent, heads = latent_of(context), context.model.heads // context.tp
    raw: list[Tensor] = []
    for which in ("q", "kv"):
        linear = up_projection(context, layer, which)
        width = linear.inputs + (latent.qk_rope_head_size if which == "kv" else 0)
        keep_input = keep_query_input or which == "kv"
        row = column_parallel_forward(
            builder, context, linear, inputs[which], keep_input=keep_input, width=width
        )
        raw.append(builder.temporary(f"{which}_up_output", context.token_bytes(linear.outputs), row))
    size = _qkv_bytes(context)
    read = context.token_bytes(
        heads * (latent.qk_head_size + latent.qk_nope_head_size + latent.v_head_size)
        + latent.qk_rope_head_size
    )
    row = builder.memory_bound(
        "rotary_and_layout",
        OpKind.ELEMENTWISE,
        read=read,
        written=size,
        access="strided",
        passes=2,
        function=True,
        dtype=context.dtype,
    )
    for tensor in raw:
        builder.release(tensor, row)
    return builder.activation("qkv", size, row)


def latent_projections_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    layer: int,
    saved: LatentSaved,
    normalized: Tensor,
    d_qkv: Tensor,
) -> Tensor:
    """Emit the backward pass of the projections; returns the gradient of the norm's output."""
    latent = latent_of(context)
    size = _qkv_bytes(context)
    row = builder.memory_bound(
        "rotary_and_layout_backward",
        OpKind.ELEMENTWISE,
        read=size,
        written=size,
        access="strided",
        passes=2,
        function=True,
        dtype=context.dtype,
    )
    builder.release(d_qkv, row)
    up = {which: up_projection(context, layer, which) for which in ("kv", "q")}
    d_up = {
        which: builder.temporary(f"{which}_up_gradient", context.token_bytes(linear.outputs), row)
        for which, linear in up.items()
    }
    kv_gradient = path_backward(
        builder, context, layer, "kv", saved.key_value, up["kv"], d_up["kv"], normalized
    )
    if saved.query is not None:
        q_gradient = path_backward(builder, context, layer, "q", saved.query, up["q"], d_up["q"], normalized)
    else:
        q_gradient = column_parallel_backward(builder, context, up["q"], normalized, d_up["q"])
    dropped(builder, saved.made_again)
    saved.made_again = None
    hidden = context.hidden_bytes
    row = builder.memory_bound(
        "latent_gradient_sum", OpKind.ELEMENTWISE, read=2 * hidden, written=hidden, dtype=context.dtype
    )
    builder.release(kv_gradient, row)
    if latent.q_lora_rank:
        builder.release(normalized, row)
    return q_gradient


def path_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    layer: int,
    which: str,
    path: LatentPath,
    up: Linear,
    d_up: Tensor,
    normalized: Tensor,
) -> Tensor:
    """Backward of up-projection, latent norm and down-projection; returns the gradient of the norm's output."""
    d_latent = column_parallel_backward(builder, context, up, path.normalized, d_up)
    return path_behind_norm_backward(builder, context, layer, which, path, d_latent, normalized)


def path_behind_norm_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    layer: int,
    which: str,
    path: LatentPath,
    d_latent: Tensor,
    normalized: Tensor,
) -> Tensor:
    """Backward of latent norm and down-projection; returns the gradient of the norm's output."""
    down = _down(context, layer, which)
    size = context.sharded_token_bytes(down.outputs)
    row = builder.memory_bound(
        f"{which}_latent_norm_backward",
        OpKind.NORM,
        read=2 * size,
        written=size,
        access="reduction",
        dtype=context.dtype,
    )
    builder.gradient_rows[context.module(layer, f"self_attention.{which}_layernorm")] = row
    builder.release(d_latent, row)
    builder.release(path.latent, row)
    d_down = builder.temporary(f"{which}_latent_gradient", size, row)
    return linear_backward(builder, context, down, d_down, consumed=(d_down,), borrowed=(normalized,))


def recompute_up_projections(
    builder: ProgramBuilder, context: LoweringContext, layer: int, saved: LatentSaved, normalized: Tensor
) -> Tensor:
    """Run the up-projections again inside the backward program; returns q, k and v."""
    phase, builder.phase = builder.phase, Phase.RECOMPUTE
    query = normalized if saved.query is None else saved.query.normalized
    inputs = {"q": query, "kv": saved.key_value.normalized}
    qkv = _up_projections(builder, context, layer, inputs, keep_query_input=True)
    builder.phase = phase
    host_runs_again(builder, context)
    saved.made_again = restored(
        builder, context, Part.LATENT_UP_PROJECTIONS, "qkv", _qkv_bytes(context), outputs=3
    )
    return qkv
