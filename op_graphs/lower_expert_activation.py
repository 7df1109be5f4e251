"""Lowering of what stands between and behind the two linears of experts: activation, routing scores, bias.

Kernels are Megatron-Core's (``transformer/moe/experts.py``, ``TEGroupedMLP``; ``fusions/fused_bias_*.py``):

- SwiGLU times the scores is one kernel, squared ReLU with ``libraries.weighted_squared_relu_fusion`` too; of other
  activations the product is a kernel of its own.
- The clamped SwiGLU of gpt-oss is that one kernel too, but both halves are clamped in front of it by PyTorch's kernels
  (``weighted_bias_quick_geglu_impl``: two clamps of strided halves, joined in memory; in backward comparisons and
  selections), and its offset is copied to the device, for which the host waits.
- The bias of the first linear is in the epilogue of its product. That of the second is multiplied by the scores and
  added expert by expert in fp32, joined and rounded (``TEGroupedMLP._apply_bias``).

Tokens are split among experts on the host there, which a captured graph cannot do: where experts are captured, one
fused kernel clamps and multiplies, and the products add their biases (Transformer Engine's operations).
"""

from __future__ import annotations

from dataclasses import dataclass

from .cuda_graphs import runs_experts_captured
from .dispatchers import RoutedSizes
from .graph import MemoryShape
from .lowering_context import LoweringContext
from .program import ProgramBuilder, Tensor
from .vocabulary import DType, OpKind, Stream

_FP32 = 4.0
_BOOL = 1.0


@dataclass(frozen=True)
class Activated:
    """What the activation of experts makes."""

    fc2_input: Tensor
    before: Tensor | None = None
    """What the kernel that multiplies by the routing scores reads, where that is not the first linear's output."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that is kept."""
        return (self.fc2_input,) if self.before is None else (self.fc2_input, self.before)


@dataclass(frozen=True)
class _Bytes:
    """Bytes of all rows of a rank's experts."""

    first: float
    """Output of the first linear."""
    width: float
    """Input of the second."""
    scores: float

    @classmethod
    def of(cls, context: LoweringContext, sizes: RoutedSizes) -> _Bytes:
        first, width = expert_widths(context)
        return cls(context.item * sizes.rows * first, context.item * sizes.rows * width, _FP32 * sizes.rows)


def expert_widths(context: LoweringContext) -> tuple[int, int]:
    """Outputs of the first and inputs of the second linear of an expert on this rank."""
    width = context.experts.expert_ffn_size // context.parallel.etp
    return width * (2 if context.model.gated else 1), width


def _multiplies_scores(context: LoweringContext) -> bool:
    """Whether the kernel of the activation multiplies by the routing scores."""
    name = context.model.activation
    return name in ("swiglu", "clamped_swiglu") or (
        name == "squared_relu" and context.libraries.weighted_squared_relu_fusion
    )


def activate(builder: ProgramBuilder, context: LoweringContext, sizes: RoutedSizes) -> Activated:
    """Emit the activation, multiplied by the routing scores."""
    name, size = context.model.activation, _Bytes.of(context, sizes)
    clamped = _clamp(builder, context, size) if _clamps_apart(context) else None
    fused = _multiplies_scores(context)
    row = builder.memory_bound(
        f"expert_{name}",
        OpKind.ELEMENTWISE,
        read=size.first + (size.scores if fused else 0),
        written=size.width,
        function=True,
        dtype=context.dtype,
    )
    if fused:
        return Activated(builder.activation("expert_fc2_input", size.width, row), clamped)
    unscaled = builder.activation("expert_activation_output", size.width, row)
    row = builder.memory_bound(
        "expert_score_product",
        OpKind.ELEMENTWISE,
        read=size.width + size.scores,
        written=size.width,
        dtype=context.dtype,
    )
    return Activated(builder.activation("expert_fc2_input", size.width, row), unscaled)


def activate_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    sizes: RoutedSizes,
    activated: Activated,
    fc1_output: Tensor,
    d_fc2_input: Tensor,
) -> Tensor:
    """Emit the backward of :func:`activate`; releases the tensors but the second linear's input.

    Returns the gradient of the first linear's output.
    """
    name, size = context.model.activation, _Bytes.of(context, sizes)
    fused = _multiplies_scores(context)
    if activated.before is not None and not fused:
        d_fc2_input = _score_product_backward(builder, context, size, activated.before, d_fc2_input)
    row = builder.memory_bound(
        f"expert_{name}_backward",
        OpKind.ELEMENTWISE,
        read=size.first + size.width,
        written=size.first + size.scores,
        function=True,
        dtype=context.dtype,
    )
    builder.release(d_fc2_input, row)
    if activated.before is None or not fused:
        builder.release(fc1_output, row)
        return builder.temporary("expert_fc1_gradient", size.first, row)
    builder.release(activated.before, row)
    d_clamped = builder.temporary("expert_clamped_gradient", size.first, row)
    return _clamp_backward(builder, context, size, fc1_output, d_clamped)


def _score_product_backward(
    builder: ProgramBuilder, context: LoweringContext, size: _Bytes, unscaled: Tensor, gradient: Tensor
) -> Tensor:
    """Gradients of scores and activation where a kernel of its own multiplies them."""
    row = builder.memory_bound(
        "expert_score_product_backward",
        OpKind.ELEMENTWISE,
        read=2 * size.width + size.scores,
        written=size.width + size.scores,
        access="reduction",
        dtype=context.dtype,
    )
    builder.release(unscaled, row)
    builder.release(gradient, row)
    return builder.temporary("expert_activation_gradient", size.width, row)


# -- clamps ------------------------------------------------------------------------------------------------------


def _clamps_apart(context: LoweringContext) -> bool:
    return context.model.activation == "clamped_swiglu" and not runs_experts_captured(context)


def _clamp(builder: ProgramBuilder, context: LoweringContext, size: _Bytes) -> Tensor:
    """Both halves clamped and joined; what is added next is launched when the host has copied the offset."""
    row = builder.memory_bound(
        "expert_clamp",
        OpKind.ELEMENTWISE,
        read=size.first,
        written=size.first,
        access="strided",
        passes=2,
        dtype=context.dtype,
    )
    halves = builder.temporary("expert_clamped_halves", size.first, row)
    row = builder.memory_bound(
        "expert_clamp_join", OpKind.MEMCPY, read=size.first, written=size.first, dtype=context.dtype
    )
    builder.release(halves, row)
    clamped = builder.activation("expert_clamped", size.first, row)
    builder.beside(
        "activation_offset_to_device",
        OpKind.HOST,
        Stream.HOST,
        after=[row],
        written=context.item,
        shape=MemoryShape("stream"),
        dtype=context.dtype,
    )
    return clamped


def _clamp_backward(
    builder: ProgramBuilder, context: LoweringContext, size: _Bytes, fc1_output: Tensor, d_clamped: Tensor
) -> Tensor:
    """One half is compared with one limit, the other with two; each selects its gradient, then they are joined."""
    elements, item = size.width / context.item, context.item
    row = builder.memory_bound(
        "expert_clamp_backward",
        OpKind.ELEMENTWISE,
        read=elements * (5 * item + 4 * _BOOL),
        written=elements * (2 * item + 4 * _BOOL),
        access="strided",
        passes=6,
        dtype=context.dtype,
    )
    builder.release(fc1_output, row)
    builder.release(d_clamped, row)
    halves = builder.temporary("expert_clamp_gradients", size.first, row)
    row = builder.memory_bound(
        "expert_clamp_gradient_join", OpKind.MEMCPY, read=size.first, written=size.first, dtype=context.dtype
    )
    builder.release(halves, row)
    return builder.temporary("expert_fc1_gradient", size.first, row)


# -- bias of the second linear -----------------------------------------------------------------------------------


def _adds_bias_apart(context: LoweringContext) -> bool:
    return context.experts.expert_bias and not runs_experts_captured(context)


def add_bias(builder: ProgramBuilder, context: LoweringContext, sizes: RoutedSizes, output: Tensor) -> Tensor:
    """The output of the second linear with its bias, which it releases; the output itself where there is none apart.

    Scores times the bias and their sum with the output, expert by expert in fp32, which are joined and rounded.
    """
    if not _adds_bias_apart(context):
        return output
    elements, item = float(sizes.rows * context.routed_size), context.item
    row = builder.memory_bound(
        "expert_bias",
        OpKind.CAST,
        read=elements * (_FP32 + item),
        written=2 * elements * _FP32,
        access="strided",
        passes=2 * sizes.local_experts,
        dtype=context.dtype,
    )
    builder.release(output, row)
    sums = builder.temporary("expert_biased", elements * _FP32, row)
    row = builder.memory_bound(
        "expert_bias_join",
        OpKind.MEMCPY,
        read=2 * elements * _FP32,
        written=elements * (_FP32 + item),
        passes=2,
        dtype=context.dtype,
    )
    builder.temporary("expert_biased_joined", elements * _FP32, row, until=row)
    builder.release(sums, row)
    return builder.temporary("expert_fc2_output", elements * item, row)


def add_bias_backward(
    builder: ProgramBuilder, context: LoweringContext, sizes: RoutedSizes, d_output: Tensor
) -> Tensor:
    """Gradients of bias and scores; releases ``d_output`` and returns the gradient of the second linear's output."""
    if not _adds_bias_apart(context):
        return d_output
    elements, item = float(sizes.rows * context.routed_size), context.item
    fp32, experts = elements * _FP32, sizes.local_experts
    row = builder.memory_bound(
        "expert_bias_gradient_cast",
        OpKind.ELEMENTWISE,
        read=elements * item,
        written=fp32,
        dtype=context.dtype,
    )
    builder.release(d_output, row)
    whole = builder.temporary("expert_bias_gradient_fp32", fp32, row)
    row = builder.memory_bound(
        "expert_bias_products",
        OpKind.CAST,
        read=2 * fp32,
        written=2 * fp32,
        access="strided",
        passes=2 * experts,
        dtype=DType.FP32,
    )
    builder.memory_bound(
        "expert_bias_sums",
        OpKind.REDUCTION,
        read=2 * fp32,
        written=_FP32 * sizes.rows,
        access="reduction",
        passes=2 * experts,
        dtype=DType.FP32,
    )
    row = builder.memory_bound(
        "expert_bias_gradient_join",
        OpKind.CAST,
        read=fp32 + elements * item,
        written=2 * elements * item,
        access="stream",
        passes=experts + 1,
        dtype=context.dtype,
    )
    builder.release(whole, row)
    return builder.temporary("expert_fc2_gradient", elements * item, row)
