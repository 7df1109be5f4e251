"""Softmax attention as a mixer: projections and core attention (``op_graphs.lower_attention``), output projection."""

from __future__ import annotations

from collections.abc import Callable

from ..flops_conventions import FlopsConvention, attended_tokens
from ..lower_attention import (
    AttentionSaved,
    attention_backward,
    attention_forward,
    restored_attention,
    stored_attention,
)
from ..lower_linear import layer_linear, row_parallel_forward
from ..lowering_context import LoweringContext
from ..model import LatentAttention, ModelDescription
from ..offload_activations import begin_part, end_part, offload
from ..parameters_tensors import ParameterTensor, TensorCuts, local_kv_heads
from ..program import ProgramBuilder, Tensor
from ..recompute import Part
from .mixer import BlockGradient, Mixer, output_projection_backward


class Attention(Mixer):
    """Multi-head, grouped-query and latent attention."""

    module = "self_attention"
    norm = "input_layernorm"
    residual = "attention_residual"
    output_linear = "proj"
    recomputes_norm = True

    def forward(
        self,
        builder: ProgramBuilder,
        context: LoweringContext,
        layer: int,
        normalized: Tensor,
        *,
        keep_input: bool,
    ) -> tuple[AttentionSaved, Tensor]:
        """Emit projections, core attention and the output projection."""
        attention = attention_forward(builder, context, layer, normalized, keep_input=keep_input)
        if keep_input and context.keeps_copies and _copies_suffice(context, attention):
            builder.discard(normalized)
        latents = attention.latent.tensors() if attention.latent is not None else []
        offload(builder, context, layer, "qkv_linear", [normalized, *latents])
        offload(builder, context, layer, "core_attn", [attention.core.qkv, *attention.core.inner])
        projected = row_parallel_forward(
            builder,
            context,
            layer_linear(context, layer, "proj"),
            attention.output,
            discard_input=attention.output != attention.core.output,
            keep_copy=not context.stores_quantized,
        )
        builder.forget_unless_kept(attention.output, builder.last_row)
        if builder.keep_activations and context.stores_quantized:
            attention = stored_attention(builder, context, attention)
        offload(builder, context, layer, "attn_proj", [attention.output])
        return attention, projected

    def backward(
        self,
        builder: ProgramBuilder,
        context: LoweringContext,
        layer: int,
        saved: AttentionSaved,
        gradient: BlockGradient,
        normalized: Callable[[], Tensor],
    ) -> Tensor:
        """Emit the backward pass of :meth:`forward`."""
        if context.stores_quantized:
            saved = restored_attention(builder, context, saved)
        begin_part(builder, context, layer, "attn_proj")
        # Without a copy behind core attention its backward still reads what the projection read.
        d_core = output_projection_backward(
            builder,
            context,
            layer_linear(context, layer, "proj"),
            saved.output,
            gradient,
            reads_output_again=saved.output == saved.core.output,
        )
        end_part(builder, context, layer, "attn_proj")
        source = normalized()
        begin_part(builder, context, layer, "core_attn")
        begin_part(builder, context, layer, "qkv_linear")
        d_input = attention_backward(builder, context, layer, saved, source, d_core)
        end_part(builder, context, layer, "core_attn")
        end_part(builder, context, layer, "qkv_linear")
        return d_input

    def parameters(self, cuts: TensorCuts, path: str, layer: int) -> list[ParameterTensor]:
        """Column-parallel projections in, a row-parallel one out, and norms."""
        latent = cuts.model.latent_attention
        if latent is not None:
            return _latent_parameters(cuts, path, layer, latent)
        return _parameters(cuts, path, layer)

    def misfits(self, model: ModelDescription, tp: int) -> list[str]:
        """Heads must divide by ``tp``; key-value heads by it, or it by them."""
        reasons = [f"{model.heads} heads do not divide by it"] if model.heads % tp else []
        if model.kv_heads % tp and tp % model.kv_heads:
            reasons.append(f"{model.kv_heads} key-value heads do not divide by it, nor it by them")
        return reasons

    def most_ranks(self, model: ModelDescription) -> int:
        """A rank has a head at least."""
        return model.heads

    def matrix_elements(self, model: ModelDescription, convention: FlopsConvention) -> int:
        """Projections of queries, keys and values, and the one behind."""
        hidden, latent = model.hidden_size, model.latent_attention
        if latent is None:
            queries = 3 if model.attention_output_gate else 2
            return hidden * (queries * model.query_size + 2 * model.kv_size)
        norm = 1 if convention == "megatron" else 0
        rank = latent.q_lora_rank
        query = rank * (hidden + model.query_size + norm) if rank else hidden * model.query_size
        up = model.heads * (latent.qk_nope_head_size + latent.v_head_size)
        key_value = latent.kv_lora_rank * (hidden + up + norm) + hidden * latent.qk_rope_head_size
        return query + key_value + model.attention_output_size * hidden

    def mixing_flops(
        self, model: ModelDescription, layer: int, seq_len: int, convention: FlopsConvention, *, causal: bool
    ) -> float:
        """The two products of attention: scores, and scores times values."""
        window = model.attention_window(layer)
        if convention == "palm":
            attended = attended_tokens(seq_len, 0, model.window_kind, causal)
        elif convention == "megatron":
            attended = attended_tokens(min(seq_len, window or seq_len), 0, model.window_kind, causal)
        else:
            attended = attended_tokens(seq_len, window, model.window_kind, causal)
        return 2.0 * (model.query_size + model.attention_output_size) * attended

    def widths(self, model: ModelDescription, tp: int) -> dict[str, int]:
        """Of the queries."""
        return {"query width": model.query_size // tp}


def _copies_suffice(context: LoweringContext, attention: AttentionSaved) -> bool:
    """Whether all that reads the norm's output in the backward of attention reads quantised copies of it."""
    latent = attention.latent
    reads_again = latent is not None and latent.query is None
    return context.recipe is not None and not (reads_again and context.recomputes(Part.LATENT_UP_PROJECTIONS))


def _parameters(cuts: TensorCuts, path: str, layer: int) -> list[ParameterTensor]:
    model, hidden, head = cuts.model, cuts.model.hidden_size, cuts.model.head_size
    query = model.query_size // cuts.tp
    gate = query if model.attention_output_gate else 0
    qkv = query + gate + 2 * local_kv_heads(model, cuts.tp) * head
    tensors = cuts.column(f"{path}.linear_qkv", layer, qkv, hidden, model.qkv_bias)
    if model.has_qk_norm(layer) and model.qk_norm_weight:
        for name in ("q_layernorm", "k_layernorm"):
            norm = f"{path}.{name}.weight"
            tensors.append(ParameterTensor(norm, (head,), "norm", layer, reduced_over_tp=cuts.tp > 1))
    if model.attention_sinks:
        sinks, heads = f"{path}.core_attention.softmax_offset", model.heads // cuts.tp
        tensors.append(ParameterTensor(sinks, (heads,), "bias", layer, tp_axis=0))
    return tensors + cuts.row(f"{path}.linear_proj", layer, hidden, query, model.attention_output_bias)


def _latent_parameters(
    cuts: TensorCuts, path: str, layer: int, latent: LatentAttention
) -> list[ParameterTensor]:
    model, hidden, heads = cuts.model, cuts.model.hidden_size, cuts.model.heads // cuts.tp
    query = heads * latent.qk_head_size
    tensors: list[ParameterTensor] = []
    if latent.q_lora_rank:
        rank = latent.q_lora_rank
        tensors.append(cuts.replicated(f"{path}.linear_q_down_proj.weight", (rank, hidden), layer))
        tensors.append(cuts.replicated(f"{path}.q_layernorm.weight", (rank,), layer, "norm"))
        tensors += cuts.column(f"{path}.linear_q_up_proj", layer, query, rank, bias=False)
    else:
        tensors += cuts.column(f"{path}.linear_q_proj", layer, query, hidden, model.qkv_bias)
    rank = latent.kv_lora_rank
    down = (rank + latent.qk_rope_head_size, hidden)
    tensors.append(cuts.replicated(f"{path}.linear_kv_down_proj.weight", down, layer))
    tensors.append(cuts.replicated(f"{path}.kv_layernorm.weight", (rank,), layer, "norm"))
    up = heads * (latent.qk_nope_head_size + latent.v_head_size)
    tensors += cuts.column(f"{path}.linear_kv_up_proj", layer, up, rank, bias=False)
    values, bias = heads * latent.v_head_size, model.attention_output_bias
    return tensors + cuts.row(f"{path}.linear_proj", layer, hidden, values, bias)
