"""Gated DeltaNet: projection, causal convolution, chunked gated delta rule, norm and gate, projection back.

Kernels, their order and what is kept are those of Megatron-Core's ``GatedDeltaNet`` (``ssm/gated_delta_net.py``) with
flash-linear-attention (``fla/ops/gated_delta_rule/chunk.py``); Yang et al. 2024, arXiv:2412.06464. Of the delta rule
queries, keys and values of all value heads, the decay, step sizes and the inverse of each chunk's triangle are kept;
what follows from them is computed again in backward. Tensor parallelism cuts heads. Context parallelism has no rule.
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
from ..model import GatedDeltaNet, ModelDescription
from ..parameters_tensors import ParameterTensor, TensorCuts
from ..program import ProgramBuilder, Tensor
from .delta_rule import CHUNK, DeltaSaved, DeltaSizes, delta_backward, delta_forward
from .mixer import BlockGradient, Mixer, output_projection_backward


@dataclass
class DeltaNetSaved:
    """What a Gated DeltaNet mixer keeps."""

    delta: DeltaSaved
    output: Tensor
    """Input of the projection back."""


class DeltaNetMixer(Mixer):
    """Gated DeltaNet."""

    module = "self_attention"
    norm = "input_layernorm"
    residual = "attention_residual"
    output_linear = "out_proj"
    recomputes_norm = True

    def forward(
        self,
        builder: ProgramBuilder,
        context: LoweringContext,
        layer: int,
        normalized: Tensor,
        *,
        keep_input: bool,
    ) -> tuple[DeltaNetSaved, Tensor]:
        """Emit projection, convolution and delta rule, norm and gate, and projection back."""
        linear = _in_projection(context, layer)
        row = column_parallel_forward(builder, context, linear, normalized, keep_input=keep_input)
        if keep_input and context.keeps_copies:
            builder.discard(normalized)
        projection = builder.temporary("gdn_projection", context.token_bytes(linear.outputs), row)
        sizes, module = DeltaSizes.of(context), context.module(layer, "self_attention")
        delta, output = delta_forward(builder, context, sizes, projection, module)
        result = row_parallel_forward(
            builder, context, _out_projection(context, layer), output, discard_input=True
        )
        builder.forget_unless_kept(output, builder.last_row)
        return DeltaNetSaved(delta, output), result

    def backward(
        self,
        builder: ProgramBuilder,
        context: LoweringContext,
        layer: int,
        saved: DeltaNetSaved,
        gradient: BlockGradient,
        normalized: Callable[[], Tensor],
    ) -> Tensor:
        """Emit the backward pass of :meth:`forward`."""
        d_output = output_projection_backward(
            builder, context, _out_projection(context, layer), saved.output, gradient
        )
        sizes, module = DeltaSizes.of(context), context.module(layer, "self_attention")
        d_projection = delta_backward(builder, context, sizes, saved.delta, d_output, module)
        return column_parallel_backward(
            builder, context, _in_projection(context, layer), normalized(), d_projection
        )

    def parameters(self, cuts: TensorCuts, path: str, layer: int) -> list[ParameterTensor]:
        """Projections, filters and two numbers a value head, cut by heads; one norm over the size of a head."""
        net, tp, hidden = _net(cuts.model), cuts.tp, cuts.model.hidden_size
        heads, filters = net.value_heads // tp, (net.conv_channels // tp, 1, net.conv_width)
        norm, size = f"{path}.out_norm.weight", (net.value_head_size,)
        return [
            *cuts.column(f"{path}.in_proj", layer, net.projection_size // tp, hidden, bias=False),
            ParameterTensor(f"{path}.conv1d.weight", filters, "bias", layer, tp_axis=0),
            *(cuts.cut_vector(f"{path}.{name}", heads, layer) for name in ("dt_bias", "A_log")),
            ParameterTensor(norm, size, "norm", layer, reduced_over_tp=tp > 1),
            *cuts.row(f"{path}.out_proj", layer, hidden, net.value_size // tp, bias=False),
        ]

    def misfits(self, model: ModelDescription, tp: int) -> list[str]:
        """Heads of keys and of values must divide by ``tp``."""
        net = _net(model)
        named = (("delta-rule key heads", net.key_heads), ("delta-rule value heads", net.value_heads))
        return [f"{count} {name} do not divide by it" for name, count in named if count % tp]

    def most_ranks(self, model: ModelDescription) -> int:
        """A rank has a key head at least."""
        return _net(model).key_heads

    def context_parallel_problem(self, model: ModelDescription, tp: int, cp: int) -> str:
        """There is no rule for sequences of several ranks."""
        return "cannot share the sequences of gated delta-rule layers, which have no rule for it; nearest: 1"

    def matrix_elements(self, model: ModelDescription, convention: FlopsConvention) -> int:
        """The two projections."""
        net = _net(model)
        return model.hidden_size * (net.projection_size + net.value_size)

    def mixing_flops(
        self, model: ModelDescription, layer: int, seq_len: int, convention: FlopsConvention, *, causal: bool
    ) -> float:
        """Products of the chunked rule; Megatron counts the convolution and 4 squares of a head's size."""
        net = _net(model)
        if convention == "megatron":
            return 2.0 * (net.conv_width * net.conv_channels + 4 * net.value_heads * net.value_head_size**2)
        chunk, key, value = min(CHUNK, seq_len), net.key_head_size, net.value_head_size
        inside = 2.0 * chunk * (3 * key + 2 * value) + 2.0 * chunk**2 / 3
        return net.value_heads * (inside + 6.0 * key * value)

    def widths(self, model: ModelDescription, tp: int) -> dict[str, int]:
        """Of both projections."""
        net = _net(model)
        return {
            "delta-rule projection": net.projection_size // tp,
            "width of its values": net.value_size // tp,
        }


def _net(model: ModelDescription) -> GatedDeltaNet:
    assert model.delta_net is not None, "only called for models with such layers"
    return model.delta_net


def _in_projection(context: LoweringContext, layer: int) -> Linear:
    outputs = _net(context.model).projection_size // context.tp
    module = context.module(layer, "self_attention.in_proj")
    return Linear("in_proj", module, context.model.hidden_size, outputs, context.tokens)


def _out_projection(context: LoweringContext, layer: int) -> Linear:
    inputs = _net(context.model).value_size // context.tp
    module = context.module(layer, "self_attention.out_proj")
    return Linear("out_proj", module, inputs, context.model.hidden_size, context.tokens)
