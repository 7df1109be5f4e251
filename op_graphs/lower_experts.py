"""Lowering of a mixture-of-experts MLP: router, dispatch, grouped GEMMs over local experts, combine, shared experts.

Kernels are Megatron-Core's with Transformer Engine (``transformer/moe``): scores multiply the activation inside the
experts, so the second GEMM's output is not kept. Shared experts run as one dense MLP on all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .cuda_graphs import captures_experts, captures_router
from .dispatchers import DISPATCHERS, Dispatcher, RoutedSizes, kept_bytes
from .linear import Linear, is_quantized_linear
from .lower_checkpoint import dropped, host_enters, host_runs_again, is_checkpoint, restored
from .lower_expert_activation import (
    Activated,
    activate,
    activate_backward,
    add_bias,
    add_bias_backward,
    expert_widths,
)
from .lower_fused_experts import fused_backward, fused_forward
from .lower_latent_experts import (
    into_latent,
    into_latent_backward,
    out_of_latent,
    out_of_latent_backward,
)
from .lower_linear import forward_gemm, input_gradient_gemm, weight_gradient
from .lower_mlp import Mlp, MlpSaved, mlp_backward, mlp_forward, recompute_mlp
from .lower_quantization import (
    GradientOperands,
    quantize_gradient,
    quantize_input,
    restore,
    store,
    transpose,
    weight_gradient_input,
)
from .lower_router import router_backward, router_forward
from .lowering_context import LoweringContext
from .offload_activations import begin_part, end_part, offload
from .program import ProgramBuilder, Tensor
from .recompute import Part
from .vocabulary import OpKind, Phase


@dataclass
class ExpertsSaved:
    """What a mixture keeps behind the norm."""

    routing: tuple[Tensor, ...]
    """Scores of the router, and what reordering by them keeps."""
    expert_input: Tensor
    fc1_output: Tensor
    activated: Activated | None
    """None where the activation is recomputed (``moe_act``)."""
    shared: MlpSaved | None
    latent_output: Tensor | None = None
    """What the projection out of a latent space reads, where experts work in one."""


def _dispatcher(context: LoweringContext) -> Dispatcher:
    return DISPATCHERS[context.parallel.ep_dispatcher]


def experts_forward(
    builder: ProgramBuilder, context: LoweringContext, layer: int, normalized: Tensor, *, keep_input: bool
) -> tuple[ExpertsSaved, Tensor]:
    """Emit a mixture; returns what it keeps, and its output, which the caller releases."""
    moe, sizes, dispatcher = context.experts, RoutedSizes.of(context), _dispatcher(context)
    keep = builder.keep_activations
    routing = [router_forward(builder, context, layer, sizes)]
    shared_saved: MlpSaved | None = None
    shared_output: Tensor | None = None
    if moe.shared_ffn_size:
        builder.keep_activations = keep and not context.recomputes(Part.SHARED_EXPERTS)
        shared_saved, shared_output = _shared_forward(
            builder, context, layer, normalized, keep_copy=keep_input
        )
        builder.keep_activations = keep
        if keep and context.recomputes(Part.SHARED_EXPERTS):
            host_enters(builder, context)
    latent = into_latent(builder, context, layer, normalized, keep_input=keep_input)
    builder.capture(captures_experts(context))
    expert_input = dispatcher.dispatch(builder, context, sizes, "dispatch")
    if latent is not None:
        builder.release(latent, builder.last_row)
    kept = kept_bytes(context, dispatcher.permutation(context, sizes))
    if kept:
        routing.append(builder.activation("permutation", kept, builder.last_row))
    if not keep_input:
        builder.release(normalized, builder.last_row)
    expert_input = _with_padding(builder, context, sizes, expert_input, "expert_pad")
    builder.promote(expert_input, "expert_input")
    saved_inner, output = _expert_linears_forward(builder, context, layer, sizes, expert_input)
    latent_output: Tensor | None = None
    combined = output
    if not context.ends_early or latent is not None:
        output = _without_padding(builder, context, sizes, output, "expert_unpad")
        combined = dispatcher.combine(builder, context, sizes, output, "combine")
        for tensor in routing:
            builder.forget_unless_kept(tensor, builder.last_row)
        latent_output, combined = out_of_latent(builder, context, layer, combined)
    if shared_output is not None and context.ends_early:
        builder.release(shared_output, builder.last_row)
    elif shared_output is not None:
        size = context.hidden_bytes
        row = builder.memory_bound(
            "shared_expert_add", OpKind.ELEMENTWISE, read=2 * size, written=size, dtype=context.dtype
        )
        builder.release(shared_output, row)
    fc1_output, activated = saved_inner
    saved = ExpertsSaved(tuple(routing), expert_input, fc1_output, activated, shared_saved, latent_output)
    return saved, combined


def _with_padding(
    builder: ProgramBuilder, context: LoweringContext, sizes: RoutedSizes, source: Tensor, name: str
) -> Tensor:
    """Rows of each expert padded for quantised products (Transformer Engine ``Fp8Padding``), where they need it."""
    return source if sizes.rows == sizes.copies else _resized(builder, context, source, name, sizes.rows)


def _without_padding(
    builder: ProgramBuilder, context: LoweringContext, sizes: RoutedSizes, source: Tensor, name: str
) -> Tensor:
    """What was padded, cut again."""
    return source if sizes.rows == sizes.copies else _resized(builder, context, source, name, sizes.copies)


def _resized(
    builder: ProgramBuilder, context: LoweringContext, source: Tensor, name: str, rows: int
) -> Tensor:
    written = context.item * rows * context.routed_size
    read = min(written, float(builder.size_of(source)))
    row = builder.memory_bound(name, OpKind.PERMUTE, read=read, written=written, dtype=context.dtype)
    builder.release(source, row)
    return builder.temporary(f"{name}_output", written, row)


def _shared_forward(
    builder: ProgramBuilder, context: LoweringContext, layer: int, normalized: Tensor, *, keep_copy: bool
) -> tuple[MlpSaved, Tensor]:
    module, builder.module = builder.module, "mlp.shared_experts"
    mlp, context = Mlp.shared(context, layer), replace(context, ends_early=False)
    saved, output = mlp_forward(builder, context, mlp, normalized, keep_input=True, keep_copy=keep_copy)
    if context.experts.shared_gate:
        row = builder.memory_bound(
            "shared_expert_gate",
            OpKind.ELEMENTWISE,
            read=2 * context.hidden_bytes,
            written=context.hidden_bytes,
            dtype=context.dtype,
        )
        builder.parameter_rows.setdefault(context.module(layer, "mlp.shared_experts"), row)
    builder.module = module
    return saved, output


def _expert_linear(context: LoweringContext, layer: int, sizes: RoutedSizes, which: str) -> Linear:
    """The first (``fc1``) or second (``fc2``) linear of the local experts."""
    first, width = expert_widths(context)
    outer = context.routed_size
    inputs, outputs = (outer, first) if which == "fc1" else (width, outer)
    return Linear(
        f"expert_{which}",
        context.module(layer, f"mlp.experts.linear_{which}"),
        inputs,
        outputs,
        sizes.per_expert,
        sizes.local_experts,
    )


def _grouped_forward(
    builder: ProgramBuilder,
    context: LoweringContext,
    linear: Linear,
    sizes: RoutedSizes,
    source: Tensor,
    *,
    keep_copy: bool,
) -> int:
    """The grouped GEMM of a linear; a quantised copy stands in for its input. Returns its row."""
    if not is_quantized_linear(context, linear) or _arrives_quantized(context, linear, "fc1"):
        return forward_gemm(builder, context, linear)
    elements = float(sizes.rows * linear.inputs)
    operand = quantize_input(builder, context, linear, elements, source if keep_copy else None)
    if keep_copy:
        builder.discard(source)
    row = forward_gemm(builder, context, linear)
    if operand is not None:
        builder.release(operand, row)
    return row


def _arrives_quantized(context: LoweringContext, linear: Linear, which: str) -> bool:
    """Whether a linear reads what the dispatcher brought in 8 bits: ``fc1`` in forward, ``fc2`` in backward."""
    return context.dispatches_quantized and linear.name == f"expert_{which}"


def _quantized_along_columns(
    builder: ProgramBuilder, context: LoweringContext, linear: Linear, what: str, elements: float
) -> Tensor:
    """The copy for the weight gradient of what arrived quantised along rows."""
    assert context.recipe is not None
    size = context.recipe.activation_size(elements)
    row = transpose(builder, context, f"{linear.name}_{what}", size)
    return builder.temporary(f"{linear.name}_quantized_{what}", size, row)


def _grouped_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    linear: Linear,
    sizes: RoutedSizes,
    source: Tensor,
    d_output: Tensor,
) -> Tensor:
    """Input and weight gradient of a grouped linear; releases both tensors, returns the gradient of its input."""
    size = context.item * sizes.rows * linear.inputs
    name = "expert_input_gradient" if linear.name == "expert_fc1" else f"{linear.name}_input_gradient"
    if not is_quantized_linear(context, linear):
        row = input_gradient_gemm(builder, context, linear)
        d_input = builder.temporary(name, size, row)
        weight_gradient(builder, context, linear, (d_output, source))
        return d_input
    outputs = float(sizes.rows * linear.outputs)
    if _arrives_quantized(context, linear, "fc2"):
        gradient = GradientOperands(
            None, _quantized_along_columns(builder, context, linear, "gradient", outputs)
        )
    else:
        gradient = quantize_gradient(builder, context, linear, outputs)
    row = input_gradient_gemm(builder, context, linear)
    d_input = builder.temporary(name, size, row)
    if gradient.rowwise is not None:
        builder.release(gradient.rowwise, row)
    inputs = float(sizes.rows * linear.inputs)
    if _arrives_quantized(context, linear, "fc1"):
        operand = _quantized_along_columns(builder, context, linear, "input", inputs)
    else:
        operand = weight_gradient_input(builder, context, linear, inputs, source)
    weight_gradient(builder, context, linear, (gradient.columnwise, operand))
    builder.release(d_output, builder.last_row)
    builder.release(source, builder.last_row)
    return d_input


def _expert_linears_forward(
    builder: ProgramBuilder, context: LoweringContext, layer: int, sizes: RoutedSizes, expert_input: Tensor
) -> tuple[tuple[Tensor, Activated | None], Tensor]:
    """First linear, activation, second linear; returns what is kept of them and the output."""
    keep = builder.keep_activations
    fc1, fc2 = (_expert_linear(context, layer, sizes, which) for which in ("fc1", "fc2"))
    builder.module = "mlp.experts"
    if context.libraries.grouped_mlp_fusion:
        fc1_output, fc2_input, output = fused_forward(builder, context, fc1, fc2, sizes.rows, expert_input)
        builder.module = "mlp"
        return (fc1_output, Activated(fc2_input)), output
    row = _grouped_forward(builder, context, fc1, sizes, expert_input, keep_copy=keep)
    builder.forget_unless_kept(expert_input, row)
    offload(builder, context, layer, "expert_fc1", [expert_input])
    fc1_output = builder.activation("expert_fc1_output", context.item * sizes.rows * fc1.outputs, row)
    activated = activate(builder, context, sizes)
    builder.forget_unless_kept(fc1_output, builder.last_row)
    if keep and context.stores_quantized:
        assert context.recipe is not None
        elements = float(sizes.rows * fc1.outputs)
        width = context.recipe.activation_bytes
        fc1_output = store(builder, context, "expert_fc1_output", elements, fc1_output, width)
    recomputed = keep and context.recomputes(Part.EXPERT_ACTIVATION)
    row = _grouped_forward(
        builder, context, fc2, sizes, activated.fc2_input, keep_copy=keep and not recomputed
    )
    output = builder.temporary("expert_fc2_output", context.item * sizes.rows * fc2.outputs, row)
    for tensor in activated.tensors:
        if recomputed:
            builder.release(tensor, row)
        else:
            builder.forget_unless_kept(tensor, row)
    if recomputed and is_checkpoint(context, Part.EXPERT_ACTIVATION):
        host_enters(builder, context)
    offload(builder, context, layer, "moe_act", [fc1_output])
    output = add_bias(builder, context, sizes, output)
    builder.module = "mlp"
    return (fc1_output, None if recomputed else activated), output


# -- backward ----------------------------------------------------------------------------------------------------


def experts_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    layer: int,
    saved: ExpertsSaved,
    normalized: Tensor,
    d_output: Tensor,
    *,
    owned: bool,
) -> Tensor:
    """Emit the backward pass of a mixture; returns the gradient of the norm's output."""
    moe, sizes, dispatcher = context.experts, RoutedSizes.of(context), _dispatcher(context)
    d_shared: Tensor | None = None
    builder.capture(captures_router(context))
    if moe.shared_ffn_size:
        d_shared = _shared_backward(builder, context, layer, saved, normalized, d_output)
    if saved.latent_output is not None:
        d_output = out_of_latent_backward(builder, context, layer, saved.latent_output, d_output, owned=owned)
        owned = True
    builder.capture(captures_experts(context))
    # Backward of combine is a dispatch of the gradients, backward of dispatch a combine.
    d_fc2_output = dispatcher.dispatch(builder, context, sizes, "combine_backward")
    if owned:
        builder.release(d_output, builder.last_row)
    d_fc2_output = _with_padding(builder, context, sizes, d_fc2_output, "expert_unpad_backward")
    d_input = _expert_linears_backward(builder, context, layer, sizes, saved, d_fc2_output)
    d_input = _without_padding(builder, context, sizes, d_input, "expert_pad_backward")
    gradient = dispatcher.combine(builder, context, sizes, d_input, "dispatch_backward")
    builder.capture(captures_router(context))
    scores, *permutation = saved.routing
    for tensor in permutation:
        builder.release(tensor, builder.last_row)
    if saved.latent_output is not None:
        gradient = into_latent_backward(builder, context, layer, normalized, gradient)
    router_backward(builder, context, layer, sizes, scores, normalized)
    size = context.hidden_bytes
    branches = 2 if d_shared is None else 3
    row = builder.memory_bound(
        "expert_gradient_sum",
        OpKind.ELEMENTWISE,
        read=branches * size,
        written=size,
        dtype=context.dtype,
    )
    if d_shared is not None:
        builder.release(d_shared, row)
    builder.release(normalized, row)
    return gradient


def _shared_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    layer: int,
    saved: ExpertsSaved,
    normalized: Tensor,
    d_output: Tensor,
) -> Tensor:
    module, builder.module = builder.module, "mlp.shared_experts"
    mlp = Mlp.shared(context, layer)
    kept = saved.shared
    if context.recomputes(Part.SHARED_EXPERTS):
        kept = recompute_mlp(builder, context, mlp, normalized)
        host_runs_again(builder, context)
    assert kept is not None
    if context.experts.shared_gate:
        row = builder.memory_bound(
            "shared_expert_gate_backward",
            OpKind.ELEMENTWISE,
            read=3 * context.hidden_bytes,
            written=context.hidden_bytes,
            dtype=context.dtype,
        )
        builder.gradient_rows[context.module(layer, "mlp.shared_experts")] = row
    gradient = mlp_backward(builder, context, mlp, kept, normalized, d_output, owned=False)
    builder.module = module
    return gradient


def _expert_linears_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    layer: int,
    sizes: RoutedSizes,
    saved: ExpertsSaved,
    d_output: Tensor,
) -> Tensor:
    fc1, fc2 = (_expert_linear(context, layer, sizes, which) for which in ("fc1", "fc2"))
    builder.module = "mlp.experts"
    fc1_output, activated = saved.fc1_output, saved.activated
    if context.libraries.grouped_mlp_fusion:
        assert activated is not None, "what is fused does not run again"
        kept = (saved.expert_input, fc1_output, activated.fc2_input)
        d_input = fused_backward(builder, context, (fc1, fc2), sizes.rows, kept, d_output)
        builder.module = "mlp"
        return d_input
    d_output = add_bias_backward(builder, context, sizes, d_output)
    begin_part(builder, context, layer, "moe_act")
    if context.stores_quantized:
        assert context.recipe is not None
        elements = float(sizes.rows * fc1.outputs)
        width = context.recipe.activation_bytes
        fc1_output = restore(builder, context, "expert_fc1_output", elements, fc1_output, width)
    again: Tensor | None = None
    if activated is None:
        phase, builder.phase = builder.phase, Phase.RECOMPUTE
        activated = activate(builder, context, sizes)
        builder.phase = phase
        if is_checkpoint(context, Part.EXPERT_ACTIVATION):
            host_runs_again(builder, context)
        size = builder.size_of(activated.fc2_input)
        again = restored(builder, context, Part.EXPERT_ACTIVATION, "expert_fc2_input", size)
    d_fc2_input = _grouped_backward(builder, context, fc2, sizes, activated.fc2_input, d_output)
    d_fc1 = activate_backward(builder, context, sizes, activated, fc1_output, d_fc2_input)
    dropped(builder, again)
    end_part(builder, context, layer, "moe_act")
    begin_part(builder, context, layer, "expert_fc1")
    d_input = _grouped_backward(builder, context, fc1, sizes, saved.expert_input, d_fc1)
    end_part(builder, context, layer, "expert_fc1")
    builder.module = "mlp"
    return d_input
