"""Lowering of a dense MLP: column-parallel first linear, fused activation, row-parallel second linear.

The shared experts of a mixture run the same operations at their own width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from . import pointwise
from .linear_gemms import forward_again
from .lower_last_linear import last_linear_forward
from .lower_linear import (
    Linear,
    column_parallel_backward,
    column_parallel_forward,
    row_parallel_backward,
    row_parallel_forward,
)
from .lower_quantization import restore, store
from .lowering_context import LoweringContext
from .program import ProgramBuilder, Tensor
from .recompute import Part
from .vocabulary import Phase


@dataclass
class MlpSaved:
    """What the MLP keeps behind the norm; None where it is recomputed in backward."""

    fc1_output: Tensor
    fc2_input: Tensor | None
    """None where the activation is recomputed."""
    activated: Tensor | None = None
    """The activated half of a gated MLP, where its product with the other half is a kernel of its own."""


@dataclass(frozen=True)
class Mlp:
    """The two linears of an MLP on one rank."""

    fc1: Linear
    fc2: Linear
    name: str

    @classmethod
    def dense(cls, context: LoweringContext, layer: int) -> Mlp:
        """The MLP of a dense layer."""
        return cls._of(context, layer, "mlp", "", context.model.layer_ffn_size(layer))

    @classmethod
    def shared(cls, context: LoweringContext, layer: int) -> Mlp:
        """The shared experts of a layer, as one MLP."""
        moe = context.model.moe
        assert moe is not None
        return cls._of(context, layer, "mlp.shared_experts", "shared_", moe.shared_ffn_size)

    @classmethod
    def _of(cls, context: LoweringContext, layer: int, path: str, prefix: str, width: int) -> Mlp:
        hidden, local = context.model.hidden_size, width // context.tp
        first, separate = local * (2 if context.model.gated else 1), context.libraries.separate_projections
        return cls(
            Linear(
                f"{prefix}fc1",
                context.module(layer, f"{path}.linear_fc1"),
                hidden,
                first,
                context.tokens,
                parts=(("gate", local), ("up", local)) if first > local and separate else (),
            ),
            Linear(
                f"{prefix}fc2",
                context.module(layer, f"{path}.linear_fc2"),
                local,
                hidden,
                context.tokens,
                row_parallel=True,
            ),
            f"{prefix}{context.model.activation}",
        )


def mlp_forward(
    builder: ProgramBuilder,
    context: LoweringContext,
    mlp: Mlp,
    normalized: Tensor,
    *,
    keep_input: bool,
    keep_copy: bool = True,
) -> tuple[MlpSaved, Tensor]:
    """Emit an MLP; returns what it keeps, and its output, which the caller releases.

    ``normalized`` is released behind its last reader unless ``keep_input``; ``keep_copy`` is as in
    :func:`column_parallel_forward`.
    """
    row = column_parallel_forward(
        builder, context, mlp.fc1, normalized, keep_input=keep_input, keep_copy=keep_copy
    )
    first = context.token_bytes(mlp.fc1.outputs)
    apart = first / 2 if builder.keep_activations and _up_again(context) else 0.0
    fc1_output = builder.activation(f"{mlp.fc1.name}_output", first - apart, row)
    up = builder.temporary(f"{mlp.fc1.name}_up", apart, row) if apart else None
    fc2_input = _activation(builder, context, mlp)
    if up is not None:
        builder.release(up, builder.last_row)
    activated: Tensor | None = None
    if context.libraries.runs_eagerly("mlp") and context.model.gated:
        activated = builder.activation(
            "activated_gate", context.token_bytes(mlp.fc2.inputs), builder.last_row
        )
    builder.forget_unless_kept(fc1_output, builder.last_row)
    if builder.keep_activations and context.stores_quantized:
        assert context.recipe is not None
        elements, width = float(mlp.fc1.tokens * mlp.fc1.outputs), context.recipe.activation_bytes
        fc1_output = store(builder, context, f"{mlp.fc1.name}_output", elements, fc1_output, width)
    again = context.recomputes(Part.MLP_ACTIVATION)
    second = last_linear_forward if context.ends_early else row_parallel_forward
    output = second(builder, context, mlp.fc2, fc2_input, discard_input=True, keep_copy=not again)
    if builder.keep_activations and again:
        builder.release(fc2_input, builder.last_row)
        if activated is not None:
            builder.release(activated, builder.last_row)
        return MlpSaved(fc1_output, None), output
    builder.forget_unless_kept(fc2_input, builder.last_row)
    if activated is not None:
        builder.forget_unless_kept(activated, builder.last_row)
    return MlpSaved(fc1_output, fc2_input, activated), output


def _activation(builder: ProgramBuilder, context: LoweringContext, mlp: Mlp) -> Tensor:
    first, second = context.token_bytes(mlp.fc1.outputs), context.token_bytes(mlp.fc2.inputs)
    row = pointwise.activation(builder, context, mlp.name, first, second)
    return builder.activation(f"{mlp.fc2.name}_input", second, row)


def mlp_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    mlp: Mlp,
    saved: MlpSaved,
    normalized: Tensor,
    d_output: Tensor,
    *,
    owned: bool,
) -> Tensor:
    """Emit the backward pass of an MLP; returns the gradient of its input.

    ``owned`` says that ``d_output`` is nobody else's and released here.
    """
    fc1_output, fc2_input = saved.fc1_output, saved.fc2_input
    if context.stores_quantized:
        assert context.recipe is not None
        elements, width = float(mlp.fc1.tokens * mlp.fc1.outputs), context.recipe.activation_bytes
        fc1_output = restore(builder, context, f"{mlp.fc1.name}_output", elements, fc1_output, width)
    up: Tensor | None = None
    if _up_again(context):
        half = replace(mlp.fc1, name=f"{mlp.fc1.name}_up", outputs=mlp.fc1.outputs // 2, parts=())
        row = forward_again(builder, context, half)
        up = builder.temporary(half.name, context.token_bytes(half.outputs), row)
    if fc2_input is None:
        phase, builder.phase = builder.phase, Phase.RECOMPUTE
        fc2_input = _activation(builder, context, mlp)
        builder.phase = phase
    consumed: tuple[Tensor, ...] = (fc2_input, d_output) if owned else (fc2_input,)
    borrowed = () if owned else (d_output,)
    d_fc2_input = row_parallel_backward(
        builder, context, mlp.fc2, d_output, consumed=consumed, borrowed=borrowed
    )
    first, second = context.token_bytes(mlp.fc1.outputs), context.token_bytes(mlp.fc2.inputs)
    row = pointwise.activation_backward(builder, context, f"{mlp.name}_backward", first, second)
    builder.release(d_fc2_input, row)
    builder.release(fc1_output, row)
    for tensor in (up, saved.activated):
        if tensor is not None:
            builder.release(tensor, row)
    d_fc1 = builder.temporary(f"{mlp.fc1.name}_gradient", first, row)
    if context.model.mlp_bias and context.libraries.separate_biases:
        pointwise.sum_bias_gradient(builder, context, mlp.fc1.name, first, mlp.fc1.outputs)
    gradient = column_parallel_backward(builder, context, mlp.fc1, normalized, d_fc1)
    pointwise.input_gradients(builder, context, "mlp", products=2 if context.model.gated else 1)
    return gradient


def _up_again(context: LoweringContext) -> bool:
    """Whether the half of a gated first linear that is not activated runs again, the sixth product of a layer."""
    return context.recomputes(Part.SECOND_PRODUCTS) and context.model.gated


def recompute_mlp(
    builder: ProgramBuilder, context: LoweringContext, mlp: Mlp, normalized: Tensor
) -> MlpSaved:
    """Run an MLP again inside the backward program for what it did not keep."""
    phase, builder.phase = builder.phase, Phase.RECOMPUTE
    saved, output = mlp_forward(builder, context, mlp, normalized, keep_input=True)
    builder.release(output, builder.end_row)
    builder.phase = phase
    return saved
