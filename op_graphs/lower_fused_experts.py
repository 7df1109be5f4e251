"""The experts of a mixture as fused grouped products (``libraries.grouped_mlp_fusion``).

Transformer Engine's operation fuser on Blackwell (``NVTE_CUTEDSL_FUSED_GROUPED_MLP``,
``ops/fused/forward_grouped_mlp.py`` and ``backward_grouped_mlp.py``): SwiGLU, the routing scores and the quantisation
of what comes out lie in the epilogue of the first grouped product, in forward, and of the second one's input gradient,
in backward. What the linears read and keep is that of separate kernels; one kernel for all experts quantises the input
of the first linear, and one the gradient of the second.

The epilogues cost nothing here: cuDNN's benchmark of these kernels (``benchmark/cutedsl_fusion_kernels``: 32,768
tokens, 8 experts) has 1.33 ms on GB300 and 1.54 ms on GB200 for 4.4e12 FLOPs with SwiGLU, what the product takes alone.
"""

from __future__ import annotations

from dataclasses import replace

from .linear import Linear
from .lower_linear import forward_gemm, input_gradient_gemm, weight_gradient
from .lower_quantization import quantize_gradient, quantize_input, weight_gradient_input
from .lowering_context import LoweringContext
from .program import ProgramBuilder, Tensor


def fused_forward(
    builder: ProgramBuilder, context: LoweringContext, fc1: Linear, fc2: Linear, rows: int, source: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Both linears with what lies between them.

    Returns:
        Output of the first linear and quantised input of the second, both kept, and the output.
    """
    recipe, keep = context.recipe, builder.keep_activations
    assert recipe is not None, "only called where a recipe quantises"
    elements = float(rows * fc1.inputs)
    operand = quantize_input(builder, context, _of_one_kernel(fc1), elements, source if keep else None)
    if keep:
        builder.discard(source)
    row = forward_gemm(builder, context, fc1)
    if operand is not None:
        builder.release(operand, row)
    builder.forget_unless_kept(source, row)
    fc1_output = builder.activation("expert_fc1_output", context.item * rows * fc1.outputs, row)
    size = recipe.activation_size(float(rows * fc2.inputs))
    fc2_input = builder.activation("expert_fc2_quantized_input", size, row)
    operand = builder.temporary("quantized_input", size, row)
    row = forward_gemm(builder, context, fc2)
    builder.release(operand, row)
    for tensor in (fc1_output, fc2_input):
        builder.forget_unless_kept(tensor, row)
    return (
        fc1_output,
        fc2_input,
        builder.temporary("expert_fc2_output", context.item * rows * fc2.outputs, row),
    )


def fused_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    linears: tuple[Linear, Linear],
    rows: int,
    kept: tuple[Tensor, Tensor, Tensor],
    d_output: Tensor,
) -> Tensor:
    """Gradients of both linears; releases what they kept (``source`` of forward first), returns that of the input."""
    (fc1, fc2), (source, fc1_output, fc2_input) = linears, kept
    assert context.recipe is not None, "only called where a recipe quantises"
    gradient = quantize_gradient(builder, context, _of_one_kernel(fc2), float(rows * fc2.outputs))
    row = input_gradient_gemm(builder, context, fc2)
    size = context.recipe.activation_size(float(rows * fc1.outputs))
    along_rows = builder.temporary("quantized_gradient_rows", size, row)
    along_columns = builder.temporary("quantized_gradient_columns", size, row)
    builder.release(fc1_output, row)
    if gradient.rowwise is not None:
        builder.release(gradient.rowwise, row)
    weight_gradient(builder, context, fc2, (gradient.columnwise, fc2_input))
    builder.release(d_output, builder.last_row)
    row = input_gradient_gemm(builder, context, fc1)
    d_input = builder.temporary("expert_input_gradient", context.item * rows * fc1.inputs, row)
    builder.release(along_rows, row)
    operand = weight_gradient_input(builder, context, _of_one_kernel(fc1), float(rows * fc1.inputs), source)
    weight_gradient(builder, context, fc1, (along_columns, operand))
    builder.release(source, builder.last_row)
    return d_input


def _of_one_kernel(linear: Linear) -> Linear:
    """For the quantisation of all experts at once."""
    return replace(linear, count=1)
