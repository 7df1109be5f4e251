"""Lowering of one layer: norm, mixer, residual, norm, MLP or experts, residual; either half may be missing.

What mixes tokens (attention, a state space) is in ``op_graphs.mixers``. Granularity and order are those of
Megatron-Core with Transformer Engine: layer norms as kernels of their own, fused activation and rotary embedding,
fused bias-dropout-add, weight gradients accumulated into the main gradient by the GEMM. Saved activations follow the
same sources: the inputs of both norms and their outputs, what mixer and MLP keep, and dropout masks. Parts named in
``recompute`` keep less and run again in backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from . import pointwise
from .cuda_graphs import captures_mixer, captures_mlp, captures_router
from .linear_gemms import forward_again
from .lower_checkpoint import dropped, host_enters, host_runs_again, is_checkpoint, restored
from .lower_experts import ExpertsSaved, experts_backward, experts_forward
from .lower_linear import layer_linear
from .lower_mlp import Mlp, MlpSaved, mlp_backward, mlp_forward, recompute_mlp
from .lowering_context import LoweringContext
from .mixers import MIXERS, BlockGradient
from .model import MixerName
from .offload_activations import begin_part, end_part, offload
from .program import ProgramBuilder, Tensor
from .recompute import Part
from .vocabulary import OpKind, Phase


@dataclass
class _NormSaved:
    """Input and output of a norm; the output is None where it is recomputed."""

    block_input: Tensor
    normalized: Tensor | None
    inner: Tensor | None = None
    """What lies between them, where a norm is a sequence of kernels."""
    made_again: Tensor | None = None
    """The output as it was made again in the backward program that is lowered, beside its copy."""


@dataclass
class _MixerSaved:
    """What the half of a layer that mixes tokens keeps."""

    name: MixerName
    norm: _NormSaved
    inner: Any
    mask: Tensor | None
    """Dropout mask of the residual behind it."""


@dataclass
class _FeedForwardSaved:
    """What the half of a layer with an MLP or experts keeps."""

    norm: _NormSaved
    inner: MlpSaved | ExpertsSaved | None
    """None where the whole MLP is recomputed."""
    mask: Tensor | None
    output: Tensor | None = None
    """Output of the second linear, where outputs of matrix products are kept though nothing reads them."""


@dataclass
class LayerSaved:
    """Activations a layer keeps for its backward pass; None for the half that it does not have."""

    mixer: _MixerSaved | None
    feed_forward: _FeedForwardSaved | None


# -- forward -----------------------------------------------------------------------------------------------------


def layer_forward(
    builder: ProgramBuilder,
    context: LoweringContext,
    layer: int,
    block_input: Tensor,
    *,
    keep_input: bool = False,
) -> tuple[LayerSaved, Tensor]:
    """Emit the forward pass of a layer; returns what it keeps and its output.

    ``keep_input`` keeps the layer's input even where the builder keeps no activations (a recomputed layer keeps
    just that).
    """
    builder.layer, context = layer, context.of_layer(layer)
    name = context.model.mixer(layer)
    mixer: _MixerSaved | None = None
    feed_forward: _FeedForwardSaved | None = None
    hidden = block_input
    if name is not None:
        mixer, hidden = _mixer_block_forward(builder, context, layer, name, hidden, keep_input=keep_input)
    if context.model.has_feed_forward(layer):
        keep = keep_input and mixer is None
        feed_forward, hidden = _feed_forward_block_forward(builder, context, layer, hidden, keep_input=keep)
    builder.capture(False)
    return LayerSaved(mixer, feed_forward), hidden


def _mixer_block_forward(
    builder: ProgramBuilder,
    context: LoweringContext,
    layer: int,
    name: MixerName,
    block_input: Tensor,
    *,
    keep_input: bool,
) -> tuple[_MixerSaved, Tensor]:
    mixer = MIXERS[name]
    builder.module = mixer.module
    builder.capture(captures_mixer(context, name))
    keep_normalized = builder.keep_activations and not (mixer.recomputes_norm and _recomputes_norms(context))
    normalized = _norm(builder, context, mixer.norm, layer)
    inside = _inside_norm(builder, context) if keep_normalized else None
    inner, projected = mixer.forward(builder, context, layer, normalized, keep_input=keep_normalized)
    if builder.keep_activations and not keep_normalized and is_checkpoint(context, Part.NORMS):
        host_enters(builder, context)
    output, mask = _bias_dropout_add(builder, context, mixer.residual, projected)
    if not keep_input:
        builder.forget_unless_kept(block_input, builder.last_row)
    offload(builder, context, layer, "attn_norm", [block_input])
    norm = _NormSaved(block_input, normalized if keep_normalized else None, inside)
    return _MixerSaved(name, norm, inner, mask), output


def _feed_forward_block_forward(
    builder: ProgramBuilder, context: LoweringContext, layer: int, block_input: Tensor, *, keep_input: bool
) -> tuple[_FeedForwardSaved, Tensor]:
    builder.module = "mlp"
    builder.capture(_captures_second_norm(context, layer))
    keep_normalized = builder.keep_activations and not _recomputes_norms(context)
    normalized = _norm(builder, context, "pre_mlp_layernorm", layer)
    inside = _inside_norm(builder, context) if keep_normalized else None
    mlp, projected = _mlp_forward(builder, context, layer, normalized, keep_input=keep_normalized)
    if builder.keep_activations and not keep_normalized and is_checkpoint(context, Part.NORMS):
        host_enters(builder, context)
    # The router reads the norm's output as it is; so does an MLP that runs again.
    if keep_normalized and context.keeps_copies and isinstance(mlp, MlpSaved):
        builder.discard(normalized)
    norm = _NormSaved(block_input, normalized if keep_normalized else None, inside)
    output, mask = projected, None
    if not context.ends_early or context.model.hidden_dropout > 0:
        output, mask = _bias_dropout_add(builder, context, "mlp_residual", projected)
    kept_output: Tensor | None = None
    if (
        builder.keep_activations
        and context.recomputes(Part.RESIDUAL)
        and context.libraries.runs_eagerly("mlp")
    ):
        # Nothing reads it, which a compiler sees and a checkpoint that keeps what operators return does not.
        kept_output = builder.activation("mlp_output", context.hidden_bytes, builder.last_row)
    if builder.keep_activations and _projects_again(context):
        builder.release(block_input, builder.last_row)
    if not keep_input:
        builder.forget_unless_kept(block_input, builder.last_row)
    offload(builder, context, layer, "mlp_norm", [block_input])
    return _FeedForwardSaved(norm, mlp, mask, kept_output), output


def _captures_second_norm(context: LoweringContext, layer: int) -> bool:
    """Whether the norm in front of the MLP or the experts is captured."""
    return captures_router(context) if context.model.is_moe_layer(layer) else captures_mlp(context, layer)


def _norm(builder: ProgramBuilder, context: LoweringContext, name: str, layer: int) -> Tensor:
    size = context.hidden_bytes
    row = pointwise.norm(builder, context, name, size)
    builder.parameter_rows.setdefault(context.module(layer, name), row)
    return builder.activation(f"{name}_output", size, row)


def _inside_norm(builder: ProgramBuilder, context: LoweringContext) -> Tensor | None:
    """What a norm of several kernels keeps between its input and its output."""
    size = pointwise.inside_norm_bytes(context, context.hidden_bytes)
    return builder.activation("norm_intermediates", size, builder.last_row) if size else None


def _recomputes_norms(context: LoweringContext) -> bool:
    return context.recomputes(Part.NORMS)


def _recomputes_mlp(context: LoweringContext, layer: int) -> bool:
    return context.recomputes(Part.EXPERTS if context.model.is_moe_layer(layer) else Part.MLP)


def _mlp_forward(
    builder: ProgramBuilder, context: LoweringContext, layer: int, normalized: Tensor, *, keep_input: bool
) -> tuple[MlpSaved | ExpertsSaved | None, Tensor]:
    keep = builder.keep_activations
    recomputed = keep and _recomputes_mlp(context, layer)
    builder.keep_activations = keep and not recomputed
    saved: MlpSaved | ExpertsSaved
    if context.model.is_moe_layer(layer):
        saved, output = experts_forward(builder, context, layer, normalized, keep_input=keep_input)
    else:
        mlp = Mlp.dense(context, layer)
        saved, output = mlp_forward(builder, context, mlp, normalized, keep_input=keep_input)
    builder.keep_activations = keep
    if recomputed:
        host_enters(builder, context)
    return None if recomputed else saved, output


def _bias_dropout_add(
    builder: ProgramBuilder, context: LoweringContext, name: str, projected: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The fused bias, dropout and residual addition behind a block; returns the hidden state and dropout's mask."""
    size = context.hidden_bytes
    mask_bytes = context.sharded_tokens * context.model.hidden_size if context.model.hidden_dropout > 0 else 0
    row = builder.memory_bound(
        name, OpKind.ELEMENTWISE, read=2 * size, written=size + mask_bytes, dtype=context.dtype
    )
    builder.release(projected, row)
    mask = None
    if mask_bytes:
        mask = builder.activation(f"{name}_dropout_mask", mask_bytes, row)
        builder.forget_unless_kept(mask, row)
    return builder.activation("hidden_states", size, row), mask


# -- backward ----------------------------------------------------------------------------------------------------


def layer_backward(
    builder: ProgramBuilder, context: LoweringContext, layer: int, saved: LayerSaved, gradient: Tensor
) -> Tensor:
    """Emit the backward pass of a layer; takes the gradient of its output, returns the gradient of its input."""
    builder.layer, context = layer, context.of_layer(layer)
    if saved.feed_forward is not None:
        again = saved.mixer is not None and context.recomputes(Part.RESIDUAL)
        gradient = _feed_forward_block_backward(
            builder, context, layer, saved.feed_forward, gradient, again=again
        )
    if saved.mixer is not None:
        gradient = _mixer_block_backward(builder, context, layer, saved.mixer, gradient)
    builder.capture(False)
    return gradient


def _feed_forward_block_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    layer: int,
    saved: _FeedForwardSaved,
    gradient: Tensor,
    *,
    again: bool,
) -> Tensor:
    """Of an MLP or experts; with ``again`` the residual in front of them is computed again first."""
    builder.module = "mlp"
    builder.capture(captures_mlp(context, layer))
    begin_part(builder, context, layer, "mlp_norm")
    if again:
        saved = _residual_again(builder, context, layer, saved)
    branch = _residual_backward(builder, context, "mlp_residual", "fc2", saved.mask, gradient)
    normalized = _normalized(builder, context, "pre_mlp_layernorm", layer, saved.norm)
    d_normalized = _mlp_backward(
        builder, context, layer, saved.inner, normalized, branch, owned=branch != gradient
    )
    builder.capture(_captures_second_norm(context, layer))
    gradient = _norm_backward(
        builder, context, "pre_mlp_layernorm", layer, saved.norm, d_normalized, gradient
    )
    end_part(builder, context, layer, "mlp_norm")
    return gradient


def _mixer_block_backward(
    builder: ProgramBuilder, context: LoweringContext, layer: int, saved: _MixerSaved, gradient: Tensor
) -> Tensor:
    mixer = MIXERS[saved.name]
    builder.module = mixer.module
    builder.capture(captures_mixer(context, saved.name))
    begin_part(builder, context, layer, "attn_norm")
    branch = _residual_backward(builder, context, mixer.residual, mixer.output_linear, saved.mask, gradient)
    normalized = partial(_normalized, builder, context, mixer.norm, layer, saved.norm)
    d_normalized = mixer.backward(
        builder, context, layer, saved.inner, BlockGradient(branch, gradient), normalized
    )
    gradient = _norm_backward(builder, context, mixer.norm, layer, saved.norm, d_normalized, gradient)
    end_part(builder, context, layer, "attn_norm")
    return gradient


def _projects_again(context: LoweringContext) -> bool:
    """Whether the output projection runs again; under tensor parallelism its reduced output is kept."""
    return context.recomputes(Part.SECOND_PRODUCTS) and context.tp == 1


def _residual_again(
    builder: ProgramBuilder, context: LoweringContext, layer: int, saved: _FeedForwardSaved
) -> _FeedForwardSaved:
    """The residual behind attention, computed again from kept outputs (what is kept of it stands for those).

    Where the output projection is not kept, it runs again in front of it; returns what then is kept.
    """
    size = context.hidden_bytes
    projected: Tensor | None = None
    if _projects_again(context):
        linear = layer_linear(context, layer, "proj")
        row = forward_again(builder, context, linear)
        projected = builder.temporary("projected", size, row)
    row = builder.memory_bound(
        "attention_residual",
        OpKind.ELEMENTWISE,
        read=2 * size,
        written=size,
        dtype=context.dtype,
        phase=Phase.RECOMPUTE,
    )
    if saved.output is not None:
        builder.release(saved.output, row)
    if projected is None:
        return saved
    builder.release(projected, row)
    # Released behind the norm's backward, which reads it last.
    again = builder.temporary("hidden_states", size, row)
    return replace(saved, norm=replace(saved.norm, block_input=again))


def _normalized(
    builder: ProgramBuilder, context: LoweringContext, name: str, layer: int, saved: _NormSaved
) -> Tensor:
    """The norm's output: kept, or computed again."""
    if saved.normalized is not None:
        return saved.normalized
    phase, builder.phase = builder.phase, Phase.RECOMPUTE
    normalized = _norm(builder, context, name, layer)
    builder.phase = phase
    if is_checkpoint(context, Part.NORMS):
        host_runs_again(builder, context)
        saved.made_again = restored(builder, context, Part.NORMS, name, context.hidden_bytes)
    return normalized


def _mlp_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    layer: int,
    saved: MlpSaved | ExpertsSaved | None,
    normalized: Tensor,
    d_output: Tensor,
    *,
    owned: bool,
) -> Tensor:
    """Backward of MLP or experts, run again first where they kept nothing; returns the gradient of their input."""
    if context.model.is_moe_layer(layer):
        if saved is None:
            phase, builder.phase = builder.phase, Phase.RECOMPUTE
            saved, output = experts_forward(builder, context, layer, normalized, keep_input=True)
            builder.release(output, builder.end_row)
            builder.phase = phase
            host_runs_again(builder, context)
        assert isinstance(saved, ExpertsSaved)
        return experts_backward(builder, context, layer, saved, normalized, d_output, owned=owned)
    mlp = Mlp.dense(context, layer)
    if saved is None:
        saved = recompute_mlp(builder, context, mlp, normalized)
        host_runs_again(builder, context)
    assert isinstance(saved, MlpSaved)
    return mlp_backward(builder, context, mlp, saved, normalized, d_output, owned=owned)


def _residual_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    name: str,
    linear: str,
    mask: Tensor | None,
    gradient: Tensor,
) -> Tensor:
    """Backward of bias-dropout-add on the branch of the block; returns the gradient of the linear's output.

    Dropout's mask is applied and the bias gradient summed; without either the gradient passes through untouched.
    """
    size = context.hidden_bytes
    if mask is not None:
        row = builder.memory_bound(
            f"{name}_dropout_backward",
            OpKind.ELEMENTWISE,
            read=size + context.sharded_tokens * context.model.hidden_size,
            written=size,
            dtype=context.dtype,
        )
        builder.release(mask, row)
        gradient = builder.temporary(f"{name}_gradient", size, row)
    if _has_bias(context, linear):
        pointwise.sum_bias_gradient(builder, context, linear, size, context.model.hidden_size)
    return gradient


def _norm_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    name: str,
    layer: int,
    saved: _NormSaved,
    d_normalized: Tensor,
    residual_gradient: Tensor,
) -> Tensor:
    """Backward of a norm, joined with the residual path; returns the gradient of the block's input."""
    size = context.hidden_bytes
    row = pointwise.norm_backward(builder, context, f"{name}_backward", size)
    builder.gradient_rows[context.module(layer, name)] = row
    builder.release(d_normalized, row)
    builder.release(saved.block_input, row)
    dropped(builder, saved.made_again)
    saved.made_again = None
    if saved.inner is not None:
        builder.release(saved.inner, row)
    d_input = builder.temporary("input_gradient", size, row)
    row = builder.memory_bound(
        "residual_gradient", OpKind.ELEMENTWISE, read=2 * size, written=size, dtype=context.dtype
    )
    builder.release(residual_gradient, row)
    return d_input


def _has_bias(context: LoweringContext, linear: str) -> bool:
    """Whether the last linear of a block has a bias that the residual addition adds."""
    biases = {"fc2": context.model.mlp_bias, "proj": context.model.attention_output_bias}
    return biases.get(linear, False)
