"""Experts that work in a latent space: a projection of the hidden state in front of them, and one back behind them.

Tokens travel at the latent width, and each expert's matrices have it on their outer side; the router and shared experts
read the hidden state itself (LatentMoE; Nemotron 3, arXiv:2512.20856; Megatron-Core ``transformer/moe/moe_layer.py``,
``fc1_latent_proj`` and ``fc2_latent_proj``). Both projections are replicated and run on the sequence shard.
"""

from __future__ import annotations

from .linear import Linear, is_quantized_linear
from .lower_linear import linear_backward, linear_forward
from .lowering_context import LoweringContext
from .program import ProgramBuilder, Tensor


def _projection(context: LoweringContext, layer: int, which: str) -> Linear:
    """The projection into the latent space (``fc1``), or out of it (``fc2``)."""
    sizes = (context.model.hidden_size, context.experts.latent_size)
    inputs, outputs = sizes if which == "fc1" else sizes[::-1]
    module = context.module(layer, f"mlp.{which}_latent_proj")
    return Linear(f"latent_{which}", module, inputs, outputs, context.sharded_tokens)


def into_latent(
    builder: ProgramBuilder, context: LoweringContext, layer: int, normalized: Tensor, *, keep_input: bool
) -> Tensor | None:
    """What is dispatched in the place of the hidden state, for the caller to release; None without latent space."""
    if not context.experts.latent_size:
        return None
    linear = _projection(context, layer, "fc1")
    keeps = keep_input and builder.keep_activations
    row = linear_forward(builder, context, linear, normalized if keeps else None)
    return builder.temporary("latent_tokens", context.sharded_token_bytes(linear.outputs), row)


def out_of_latent(
    builder: ProgramBuilder, context: LoweringContext, layer: int, combined: Tensor
) -> tuple[Tensor | None, Tensor]:
    """What is kept of the experts' results for the projection's weight gradient, and the results in hidden width."""
    if not context.experts.latent_size:
        return None, combined
    linear = _projection(context, layer, "fc2")
    keep = builder.keep_activations
    if keep:
        builder.promote(combined, "latent_output")
    row = linear_forward(builder, context, linear, combined if keep else None)
    if not keep:
        builder.release(combined, row)
    elif is_quantized_linear(context, linear):
        builder.discard(combined)
    output = builder.temporary("expert_output", context.hidden_bytes, row)
    return (combined if keep else None), output


def out_of_latent_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    layer: int,
    latent_output: Tensor,
    d_output: Tensor,
    *,
    owned: bool,
) -> Tensor:
    """Backward of :func:`out_of_latent`; ``d_output`` is released here if ``owned``. Returns the latent gradient."""
    consumed, borrowed = ((latent_output, d_output), ()) if owned else ((latent_output,), (d_output,))
    linear = _projection(context, layer, "fc2")
    return linear_backward(builder, context, linear, d_output, consumed=consumed, borrowed=borrowed)


def into_latent_backward(
    builder: ProgramBuilder, context: LoweringContext, layer: int, normalized: Tensor, d_latent: Tensor
) -> Tensor:
    """Backward of :func:`into_latent`; releases the latent gradient, returns that of the hidden state."""
    linear = _projection(context, layer, "fc1")
    return linear_backward(builder, context, linear, d_latent, consumed=(d_latent,), borrowed=(normalized,))
