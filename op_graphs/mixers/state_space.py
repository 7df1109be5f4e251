"""Mamba-2 layers: projection, causal convolution, chunked scan with gate, grouped norm, projection back.

Kernels, their order and what is kept are those of Megatron-Core's ``MambaMixer`` (``ssm/mamba_mixer.py``) with the
memory-saving kernels of mamba_ssm (``ops/triton/ssd_combined.py``, ``MambaSplitConv1dScanCombinedFn``): of the
convolution and the scan only the projection in front and the scan's output before the gate are kept, and backward runs
both again up to the states. The products of a scan over chunks of Q tokens are those of Dao and Gu 2024
(arXiv:2405.21060, section 6): C B^T inside a chunk, what a chunk adds to the state, the state's part of the output, and
the product with the masked square, whose kernels stop at the diagonal.

Tensor parallelism cuts heads and groups; the two projections are column- and row-parallel. Context parallelism is
Megatron-Core's (``ssm/mamba_context_parallel.py``): all-to-alls turn shards of the sequence into shards of the heads,
groups being repeated where there are fewer than ranks, and back behind the scan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..flops_conventions import FlopsConvention
from ..linear import Linear
from ..lower_linear import (
    column_parallel_backward,
    column_parallel_forward,
    row_parallel_forward,
)
from ..lowering_context import LoweringContext
from ..model import ModelDescription, StateSpace
from ..parameters_tensors import ParameterTensor, TensorCuts
from ..program import ProgramBuilder, Tensor
from ..vocabulary import OpKind
from .mixer import BlockGradient, Mixer, output_projection_backward
from .sequence_switch import sequences_to_shards, shards_to_sequences
from .state_space_scan import ScanSizes, scan_backward, scan_forward


@dataclass
class StateSpaceSaved:
    """What a Mamba-2 mixer keeps."""

    projection: Tensor
    """Gate, x, B, C and step sizes, as the scan reads them."""
    ungated: Tensor
    """Output of the scan before the gate."""
    norm_input: Tensor
    norm_output: Tensor


class StateSpaceMixer(Mixer):
    """Mamba-2 (state-space duality)."""

    module = "mixer"
    norm = "norm"
    residual = "mixer_residual"
    output_linear = "out_proj"
    # The norm is part of the module of the projection behind it (TELayerNormColumnParallelLinear).
    recomputes_norm = False

    def forward(
        self,
        builder: ProgramBuilder,
        context: LoweringContext,
        layer: int,
        normalized: Tensor,
        *,
        keep_input: bool,
    ) -> tuple[StateSpaceSaved, Tensor]:
        """Emit projection, convolution and scan, norm, and projection back."""
        sizes = ScanSizes.of(context)
        linear = _in_projection(context, layer)
        row = column_parallel_forward(builder, context, linear, normalized, keep_input=keep_input)
        if keep_input and context.keeps_copies:
            builder.discard(normalized)
        projection = builder.activation("ssm_projection", context.token_bytes(linear.outputs), row)
        projection = shards_to_sequences(builder, context, "ssm_projection", projection, sizes.parts)
        ungated, output = scan_forward(builder, context, sizes, context.module(layer, "mixer"))
        builder.forget_unless_kept(projection, builder.last_row)
        builder.forget_unless_kept(ungated, builder.last_row)
        output = sequences_to_shards(builder, context, "ssm_output", output, sizes.output_parts)
        normalized_output = _gated_norm(builder, context, layer)
        builder.forget_unless_kept(output, builder.last_row)
        result = row_parallel_forward(
            builder, context, _out_projection(context, layer), normalized_output, discard_input=True
        )
        builder.forget_unless_kept(normalized_output, builder.last_row)
        return StateSpaceSaved(projection, ungated, output, normalized_output), result

    def backward(
        self,
        builder: ProgramBuilder,
        context: LoweringContext,
        layer: int,
        saved: StateSpaceSaved,
        gradient: BlockGradient,
        normalized: Callable[[], Tensor],
    ) -> Tensor:
        """Emit the backward pass of :meth:`forward`."""
        sizes = ScanSizes.of(context)
        d_normed = output_projection_backward(
            builder, context, _out_projection(context, layer), saved.norm_output, gradient
        )
        d_output = _gated_norm_backward(builder, context, layer, saved.norm_input, d_normed)
        d_output = shards_to_sequences(builder, context, "ssm_output_gradient", d_output, sizes.output_parts)
        module = context.module(layer, "mixer")
        d_projection = scan_backward(
            builder, context, sizes, (saved.projection, saved.ungated), d_output, module
        )
        d_projection = sequences_to_shards(
            builder, context, "ssm_projection_gradient", d_projection, sizes.parts
        )
        return column_parallel_backward(
            builder, context, _in_projection(context, layer), normalized(), d_projection
        )

    def parameters(self, cuts: TensorCuts, path: str, layer: int) -> list[ParameterTensor]:
        """Projections, the convolution's filters, three numbers a head, and the norm's weight: all cut by heads."""
        space, tp, hidden = _space(cuts.model), cuts.tp, cuts.model.hidden_size
        channels, heads, inner = space.conv_channels // tp, space.heads // tp, space.inner_size // tp
        filters = (channels, 1, space.conv_width)
        return [
            *cuts.column(f"{path}.in_proj", layer, space.projection_size // tp, hidden, bias=False),
            ParameterTensor(f"{path}.conv1d.weight", filters, "bias", layer, tp_axis=0),
            cuts.cut_vector(f"{path}.conv1d.bias", channels, layer),
            *(cuts.cut_vector(f"{path}.{name}", heads, layer) for name in ("dt_bias", "A_log", "D")),
            cuts.cut_vector(f"{path}.norm.weight", inner, layer, "norm"),
            *cuts.row(f"{path}.out_proj", layer, hidden, inner, bias=False),
        ]

    def misfits(self, model: ModelDescription, tp: int) -> list[str]:
        """Heads and groups must divide by ``tp``."""
        space = _space(model)
        named = (("state-space heads", space.heads), ("state-space groups", space.groups))
        return [f"{count} {name} do not divide by it" for name, count in named if count % tp]

    def most_ranks(self, model: ModelDescription) -> int:
        """A rank has a group at least."""
        return _space(model).groups

    def context_parallel_problem(self, model: ModelDescription, tp: int, cp: int) -> str:
        """Why shards of a sequence cannot become shards of heads over ``cp`` ranks, with the nearest degree; or ''."""
        heads, groups = _space(model).heads // tp, _space(model).groups // tp
        fitting = [degree for degree in range(1, heads + 1) if _switches(heads, groups, degree)]
        if cp in fitting:
            return ""
        nearest = min(fitting, key=lambda degree: (abs(degree - cp), degree))
        return (
            f"does not divide the {heads} state-space heads of a rank (tp = {tp}), or neither divides its {groups} "
            f"groups nor is divided by them; nearest: {nearest}"
        )

    def matrix_elements(self, model: ModelDescription, convention: FlopsConvention) -> int:
        """The two projections.

        Megatron takes twice the hidden size for the width of all heads, whatever they are (``mamba_layer_flops``).
        """
        space, hidden = _space(model), model.hidden_size
        inner = 2 * hidden if convention == "megatron" else space.inner_size
        return hidden * (3 * inner + 2 * space.groups * space.state_size + space.heads)

    def mixing_flops(
        self, model: ModelDescription, layer: int, seq_len: int, convention: FlopsConvention, *, causal: bool
    ) -> float:
        """Products of the chunked scan; Megatron counts 7 for each element of a head and of its state."""
        del layer, causal
        space = _space(model)
        if convention == "megatron":
            return 7.0 * 2 * model.hidden_size * space.state_size
        chunk = min(space.chunk_size, seq_len)
        square = 2.0 * chunk * space.groups * space.state_size + chunk * space.inner_size
        return square + 4.0 * space.inner_size * space.state_size

    def widths(self, model: ModelDescription, tp: int) -> dict[str, int]:
        """Of both projections."""
        space = _space(model)
        return {
            "state-space projection": space.projection_size // tp,
            "width of its heads": space.inner_size // tp,
        }


def _space(model: ModelDescription) -> StateSpace:
    assert model.state_space is not None, "only called for models with such layers"
    return model.state_space


def _switches(heads: int, groups: int, degree: int) -> bool:
    return heads % degree == 0 and (groups % degree == 0 or degree % groups == 0)


def _in_projection(context: LoweringContext, layer: int) -> Linear:
    outputs = _space(context.model).projection_size // context.tp
    module = context.module(layer, "mixer.in_proj")
    return Linear("in_proj", module, context.model.hidden_size, outputs, context.tokens)


def _out_projection(context: LoweringContext, layer: int) -> Linear:
    inputs = _space(context.model).inner_size // context.tp
    module = context.module(layer, "mixer.out_proj")
    return Linear("out_proj", module, inputs, context.model.hidden_size, context.tokens)


def _gated_norm(builder: ProgramBuilder, context: LoweringContext, layer: int) -> Tensor:
    """The norm over the heads of each group; the gate is applied by the scan already."""
    size = context.token_bytes(_space(context.model).inner_size // context.tp)
    row = builder.memory_bound(
        "gated_norm", OpKind.NORM, read=size, written=size, access="reduction", dtype=context.dtype
    )
    builder.parameter_rows.setdefault(context.module(layer, "mixer.norm"), row)
    return builder.activation("gated_norm_output", size, row)


def _gated_norm_backward(
    builder: ProgramBuilder, context: LoweringContext, layer: int, norm_input: Tensor, d_output: Tensor
) -> Tensor:
    size = context.token_bytes(_space(context.model).inner_size // context.tp)
    row = builder.memory_bound(
        "gated_norm_backward",
        OpKind.NORM,
        read=2 * size,
        written=size,
        access="reduction",
        dtype=context.dtype,
    )
    builder.gradient_rows[context.module(layer, "mixer.norm")] = row
    builder.release(norm_input, row)
    builder.release(d_output, row)
    return builder.temporary("gated_norm_gradient", size, row)
