"""A linear as one rank runs it: sizes after tensor-parallel cutting, and the signatures of its three GEMMs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .graph import GemmShape
from .lowering_context import LoweringContext
from .vocabulary import DType


@dataclass(frozen=True)
class Linear:
    """A linear as one rank runs it: ``[tokens, inputs] -> [tokens, outputs]``, sizes after tensor-parallel cutting."""

    name: str
    parameter: str
    """Module that holds its weight."""
    inputs: int
    outputs: int
    tokens: int
    """Tokens of each of ``count`` linears."""
    count: int = 1
    """Experts of a grouped linear."""
    quantized: bool = True
    """Whether a low-precision recipe quantises it; embedding, head and router stay in bf16."""
    row_parallel: bool = False
    """Whether tensor parallelism cuts its inputs, and its outputs are partial sums; else it cuts its outputs."""
    reads_attention: bool = False
    """Whether attention makes its input; else a norm, an activation or a collective."""
    parts: tuple[tuple[str, int], ...] = ()
    """Names and outputs of the products that it is made of, where they are not fused into one; together ``outputs``."""

    @property
    def weight_elements(self) -> int:
        """Elements of all its weights."""
        return self.count * self.inputs * self.outputs


def products(linear: Linear) -> list[Linear]:
    """The products that a linear runs as: itself, or each of its parts."""
    if not linear.parts:
        return [linear]
    return [
        replace(linear, name=f"{linear.name}_{name}", outputs=width, parts=()) for name, width in linear.parts
    ]


def is_quantized_linear(context: LoweringContext, linear: Linear) -> bool:
    """Whether the GEMMs of a linear run on quantised operands."""
    return context.recipe is not None and linear.quantized


def operand_dtype(context: LoweringContext, linear: Linear) -> DType:
    """Element type of the operands of its GEMMs."""
    return context.gemm_dtype if linear.quantized else context.dtype


def forward_shape(context: LoweringContext, linear: Linear) -> GemmShape:
    """The forward GEMM."""
    return GemmShape(
        linear.tokens,
        linear.outputs,
        linear.inputs,
        "TN",
        dtype=operand_dtype(context, linear),
        output=context.dtype,
        count=linear.count,
    )


def input_gradient_shape(context: LoweringContext, linear: Linear) -> GemmShape:
    """The GEMM of the input gradient."""
    return replace(forward_shape(context, linear), n=linear.inputs, k=linear.outputs, layout="NN")


def weight_gradient_shape(context: LoweringContext, linear: Linear) -> GemmShape:
    """The GEMM of the weight gradient: added to the main gradient, or written out.

    It is written out where units are sharded, and without ``gradient_accumulation_fusion``.
    """
    accumulate = context.parallel.zero <= 1 and context.training.gradient_accumulation_fusion
    return GemmShape(
        linear.outputs,
        linear.inputs,
        linear.tokens,
        "NT",
        operand_dtype(context, linear),
        context.gradient_dtype if accumulate else context.dtype,
        accumulate,
        linear.count,
    )


def accumulated_type(context: LoweringContext) -> DType | None:
    """Type of the sums to which the written-out gradients of linears are added; None if there is no need."""
    fused = context.parallel.zero <= 1 and context.training.gradient_accumulation_fusion
    return None if fused else sum_type(context)


def sum_type(context: LoweringContext) -> DType | None:
    """Type of the sums of gradients over microbatches; None where each microbatch reduces its own.

    Sharded units of a pipeline wait for its last microbatch: FSDP2 adds each gradient to a sum in the type of the
    reduction (``accumulate_unsharded_grad_if_needed``).
    """
    parallel = context.parallel
    return context.gradient_dtype if parallel.zero <= 1 or parallel.keeps_gradients_whole else None


def scale_bytes(context: LoweringContext, linear: Linear, layout: str) -> float:
    """Bytes of scales that a GEMM of the linear reads beside its operands; ``layout`` as in ``GemmShape``."""
    recipe = context.recipe
    if recipe is None or not linear.quantized:
        return 0.0
    item = recipe.element.itemsize
    rows = linear.count * linear.tokens
    activation, weight = recipe.activation_bytes - item, recipe.weight_bytes - item
    if layout == "NT":
        return activation * rows * (linear.inputs + linear.outputs)
    width = linear.inputs if layout == "TN" else linear.outputs
    return activation * rows * width + weight * linear.weight_elements
