"""Lowering of the router of a mixture of experts: scores, choice of experts, and their backward pass.

Megatron-Core ``transformer/moe/router.py``: scores are computed by a GEMM (in fp32 where the model asks), chosen and
normalised by memory-bound kernels: PyTorch's, or with ``libraries.router_fusion`` one of Transformer Engine each way,
where a warp works on the scores of a token in shared memory (``fused_router/fused_topk_with_score_function.cu``).

With Transformer Engine the GEMM of an fp32 router reads its bf16 operands and writes fp32 scores; backward casts them
to fp32 first and multiplies in TF32, as Transformer Engine does wherever operands and result are fp32
(``moe_utils.py``, ``RouterGatingLinearFunction``; Transformer Engine ``cublaslt_gemm.cu``). Without it PyTorch
multiplies in fp32.
"""

from __future__ import annotations

from dataclasses import replace

from .dispatchers import RoutedSizes
from .expert_tokens import capacity
from .graph import GemmShape
from .linear import Linear, accumulated_type, weight_gradient_shape
from .lower_linear import run_weight_gradient
from .lowering_context import LoweringContext
from .program import DeferredGemm, ProgramBuilder, Tensor
from .vocabulary import DType, OpKind

_SELECT_PASSES = 18
"""Times that a radix select reads its row: once for each two bits of an fp32 key, and twice to gather what it found
(PyTorch ``TensorTopK.cu``, ``sbtopk``)."""
_GROUPED_SCORE_KERNELS, _GROUPED_TOP_K_KERNELS, _GROUPED_BACKWARD_KERNELS = 12, 18, 25
"""Kernels of routing limited to groups, counted in a public trace of DeepSeek-V3: scores up to the mask of the groups,
both selections with what gathers and normalises their results, and the backward pass."""

_SCORE_LAUNCHES, _TOP_K_LAUNCHES, _AUX_LOSS_LAUNCHES, _BACKWARD_LAUNCHES = 4, 12, 12, 20
"""Operations of PyTorch without groups, as Megatron-Core writes them (``moe_utils.py``): casts, scores and bias; the
choice, its scores, their sum and division, and both maps by zeros and scatter; the same for the loss with its sums; the
nodes of those that have a gradient."""
_FUNCTION = 3
"""Operations of PyTorch whose launches take the host as long as another function in Python does."""


def router_forward(
    builder: ProgramBuilder, context: LoweringContext, layer: int, sizes: RoutedSizes
) -> Tensor:
    """Scores, choice of experts and routing map."""
    moe = context.experts
    if context.libraries.experts_in_turn:
        return _in_turn(builder, context, layer, sizes)
    output = DType.FP32 if moe.router_fp32 else context.dtype
    dtype = context.dtype if context.libraries.transformer_engine else output
    shape = GemmShape(sizes.tokens, moe.experts, context.model.hidden_size, "TN", dtype=dtype, output=output)
    row = builder.gemm("router", shape)
    builder.parameter_rows.setdefault(context.module(layer, "mlp.router"), row)
    logits = 4.0 * sizes.tokens * moe.experts
    if context.libraries.router_fusion:
        return _fused_choice(builder, context, sizes, logits)
    row = builder.memory_bound(
        "router_scores",
        OpKind.ROUTER,
        read=logits,
        written=logits,
        access="reduction",
        passes=_GROUPED_SCORE_KERNELS if moe.routing_groups > 1 else 1,
        launches=0 if moe.routing_groups > 1 else _SCORE_LAUNCHES,
        dtype=DType.FP32,
    )
    # fp32 scores and the routing map with its indices: 8 bytes for each pair of token and expert.
    scores = builder.activation("router_scores", 2 * logits, row)
    selections = 2 if moe.routing_groups > 1 else 1
    builder.memory_bound(
        "router_top_k",
        OpKind.ROUTER,
        read=selections * _SELECT_PASSES * logits,
        written=logits / 4,
        access="reduction",
        passes=_GROUPED_TOP_K_KERNELS if moe.routing_groups > 1 else 2,
        launches=0 if moe.routing_groups > 1 else _TOP_K_LAUNCHES,
        dtype=DType.FP32,
    )
    if capacity(moe, sizes.tokens) is not None:
        _drop_tokens(builder, context, sizes)
    if moe.aux_loss:
        builder.memory_bound(
            "router_aux_loss",
            OpKind.ROUTER,
            read=logits,
            written=4.0 * moe.experts,
            access="reduction",
            passes=2,
            launches=_AUX_LOSS_LAUNCHES,
            dtype=DType.FP32,
        )
    return scores


def _in_turn(builder: ProgramBuilder, context: LoweringContext, layer: int, sizes: RoutedSizes) -> Tensor:
    """Numbers of experts counted up over the tokens, the remainder by their number, and equal weights."""
    chosen = float(sizes.tokens * context.experts.top_k)
    row = builder.memory_bound(
        "router_in_turn", OpKind.ROUTER, read=16 * chosen, written=28 * chosen, passes=4, dtype=DType.INT64
    )
    # Such a gate has no weight; what the model counts for one is never read.
    builder.parameter_rows.setdefault(context.module(layer, "mlp.router"), row)
    return builder.activation("router_choice", 10 * chosen, row)


def _fused_choice(
    builder: ProgramBuilder, context: LoweringContext, sizes: RoutedSizes, logits: float
) -> Tensor:
    """Scores, choice and routing map by one kernel; returns what it keeps: scores before and behind the choice, map."""
    moe = context.experts
    row = builder.memory_bound(
        "router_fused_top_k",
        OpKind.ROUTER,
        read=logits,
        written=2.25 * logits,
        access="reduction",
        function=True,
        dtype=DType.FP32,
    )
    scores = builder.activation("router_scores", 2.25 * logits, row)
    if capacity(moe, sizes.tokens) is not None:
        _drop_tokens(builder, context, sizes)
    if moe.aux_loss:
        # Scores of all experts for the loss (``fused_score_for_moe_aux_loss.cu``), then the loss itself.
        builder.memory_bound(
            "router_aux_loss",
            OpKind.ROUTER,
            read=2 * logits,
            written=2.25 * logits,
            access="reduction",
            passes=2,
            function=True,
            launches=1 + _FUNCTION,
            dtype=DType.FP32,
        )
    return scores


def _drop_tokens(builder: ProgramBuilder, context: LoweringContext, sizes: RoutedSizes) -> None:
    """Keep what each expert has room for: a selection along its column, and scores and map cut by it.

    Megatron-Core ``apply_router_token_dropping``. Where an expert has room for every token nothing is selected.
    """
    moe, entries = context.experts, float(sizes.tokens * context.experts.experts)
    limit = capacity(moe, sizes.tokens)
    assert limit is not None
    # A mask of ones or of the places found, as booleans, and the product of scores and mask.
    read, written, passes = 4 * entries + 5 * entries, 4 * entries + entries + 4 * entries, 3
    if limit < sizes.tokens:
        read += _SELECT_PASSES * 4 * entries + 8.0 * limit * moe.experts
        written += 16.0 * limit * moe.experts
        passes += 2
        if moe.drop_policy == "position":
            # The map is what is sorted, as numbers.
            read, written, passes = read + entries, written + 4 * entries, passes + 1
    if not moe.pad_to_capacity:
        read, written, passes = read + 2 * entries, written + entries, passes + 1
    builder.memory_bound(
        "router_drop",
        OpKind.ROUTER,
        read=read,
        written=written,
        access="reduction",
        passes=passes,
        dtype=DType.FP32,
    )


def router_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    layer: int,
    sizes: RoutedSizes,
    scores: Tensor,
    normalized: Tensor,
) -> None:
    """Backward of choice and scores; releases ``scores``, reads the router's input ``normalized``."""
    moe, hidden = context.experts, context.model.hidden_size
    if context.libraries.experts_in_turn:
        builder.release(scores, builder.last_row)
        builder.gradient_rows[context.module(layer, "mlp.router")] = builder.last_row
        return
    dtype, output = _backward_types(context)
    logits = 4.0 * sizes.tokens * moe.experts
    if moe.capacity_factor is not None:
        builder.memory_bound(
            "router_drop_backward", OpKind.ROUTER, read=1.25 * logits, written=logits, dtype=DType.FP32
        )
    fused = context.libraries.router_fusion
    kernels = 1 if fused else _GROUPED_BACKWARD_KERNELS if moe.routing_groups > 1 else 2
    row = builder.memory_bound(
        "router_backward",
        OpKind.ROUTER,
        read=2.25 * logits if fused else 2 * logits,
        written=logits,
        access="reduction",
        passes=kernels,
        function=fused,
        launches=1 + _FUNCTION * moe.aux_loss if fused else max(kernels, _BACKWARD_LAUNCHES),
        dtype=DType.FP32,
    )
    builder.release(scores, row)
    d_logits = builder.temporary("router_logit_gradient", logits, row)
    builder.gemm(
        "router_dgrad", GemmShape(sizes.tokens, hidden, moe.experts, "NN", dtype=dtype, output=output)
    )
    parameter = context.module(layer, "mlp.router")
    router = Linear("router", parameter, hidden, moe.experts, sizes.tokens, quantized=False)
    shape = replace(weight_gradient_shape(context, router), dtype=dtype)
    reads = (d_logits, normalized)
    gemm = DeferredGemm(
        "router_wgrad", shape, parameter, layer, builder.module, reads, 0.0, accumulated_type(context)
    )
    if builder.deferred is not None:
        builder.defer(gemm)
    else:
        run_weight_gradient(builder, gemm, (d_logits,))


def _backward_types(context: LoweringContext) -> tuple[DType, DType]:
    """Element types of the operands and of the results of the router's backward products."""
    if not context.experts.router_fp32:
        return context.dtype, context.dtype
    return (DType.TF32 if context.libraries.transformer_engine else DType.FP32), DType.FP32
