"""Convolution and chunked scan of a Mamba-2 layer, kernel by kernel (mamba_ssm ``ops/triton``, causal_conv1d).

Sizes: T tokens in chunks of Q, H heads of P elements, G groups with states of N. States of a chunk are fp32 where they
are summed, the rest is in the training dtype; step sizes, their running sums and C B^T are fp32. Each tensor is read
once by each kernel that needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..graph import ScanShape
from ..lowering_context import LoweringContext
from ..program import ProgramBuilder, Tensor
from ..vocabulary import OpKind
from .sequence_switch import Part

_FP32 = 4.0


@dataclass(frozen=True)
class ScanSizes:
    """The scan of one rank: whole sequences of its heads."""

    tokens: int
    chunks: int
    chunk_size: int
    heads: int
    head_size: int
    groups: int
    state_size: int
    conv_width: int
    item: float
    parts: tuple[Part, ...]
    """Parts of the projection: gate, x, B, C and step sizes."""

    @classmethod
    def of(cls, context: LoweringContext) -> ScanSizes:
        """Sizes of the ranks of a context."""
        space, training, cp = context.model.state_space, context.training, context.parallel.cp
        assert space is not None, "only called for models with such layers"
        heads, groups = space.heads // context.tp, space.groups // context.tp
        chunk = min(space.chunk_size, training.seq_len)
        inner, state = heads * space.head_size, groups * space.state_size
        repeat = max(1, cp // groups)
        return cls(
            tokens=context.tokens * cp,
            chunks=training.micro_batch_size * -(-training.seq_len // chunk),
            chunk_size=chunk,
            heads=heads // cp,
            head_size=space.head_size,
            groups=max(1, groups // cp),
            state_size=space.state_size,
            conv_width=space.conv_width,
            item=context.item,
            parts=(
                Part("gate", inner, 1, cp),
                Part("x", inner, 1, cp),
                Part("b", state, repeat, cp),
                Part("c", state, repeat, cp),
                Part("dt", heads, 1, cp),
            ),
        )

    @property
    def output_parts(self) -> tuple[Part, ...]:
        """The one part of the output."""
        return self.parts[1:2]

    @property
    def projection_bytes(self) -> float:
        """Bytes of what the scan reads."""
        return self.item * self.tokens * sum(part.whole for part in self.parts)

    @property
    def x_bytes(self) -> float:
        """Bytes of x, of the gate, and of the output."""
        return self.item * self.tokens * self.heads * self.head_size

    @property
    def state_input_bytes(self) -> float:
        """Bytes of B, and of C."""
        return self.item * self.tokens * self.groups * self.state_size

    @property
    def channel_bytes(self) -> float:
        """Bytes of all channels of the convolution: x, B and C."""
        return self.x_bytes + 2 * self.state_input_bytes

    @property
    def step_bytes(self) -> float:
        """Bytes of step sizes in fp32, and of their running sums."""
        return _FP32 * self.tokens * self.heads

    @property
    def state_elements(self) -> float:
        """Elements of the states of all chunks and heads."""
        return float(self.chunks) * self.heads * self.head_size * self.state_size

    @property
    def square_bytes(self) -> float:
        """Bytes of C B^T of all chunks and groups, fp32."""
        return _FP32 * self.tokens * self.groups * self.chunk_size

    @property
    def conv_flops(self) -> float:
        """Of the causal convolution."""
        return 2.0 * self.conv_width * self.channel_bytes / self.item

    @property
    def square_flops(self) -> float:
        """C B^T of every chunk, in full."""
        return 2.0 * self.tokens * self.chunk_size * self.groups * self.state_size

    @property
    def state_flops(self) -> float:
        """One product between tokens and states: into them, or out of them."""
        return 2.0 * self.tokens * self.heads * self.head_size * self.state_size

    @property
    def masked_flops(self) -> float:
        """One product with the masked square of every head: half of it lies behind the diagonal."""
        return float(self.tokens) * self.heads * self.head_size * self.chunk_size


class _Kernels:
    """Emits the kernels of one scan."""

    def __init__(self, builder: ProgramBuilder, context: LoweringContext, sizes: ScanSizes) -> None:
        self._builder = builder
        self._context = context
        self.sizes = sizes

    def scan(
        self, name: str, read: float, written: float, flops: float = 0.0, *, backward: bool = False
    ) -> int:
        """One kernel of the scan."""
        dtype = self._context.dtype
        shape = ScanShape(backward=backward)
        return self._builder.compute(
            name, OpKind.SCAN, read=read, written=written, flops=flops, shape=shape, dtype=dtype
        )

    def gradient(self, name: str, read: float, written: float, flops: float = 0.0) -> int:
        """A kernel that computes gradients."""
        return self.scan(name, read, written, flops, backward=True)

    def convolution(self, name: str, read: float, written: float, passes: int = 1) -> int:
        """The convolution, forward or (twice the products) backward."""
        flops = passes * self.sizes.conv_flops
        return self._builder.compute(
            name, OpKind.CONVOLUTION, read=read, written=written, flops=flops, dtype=self._context.dtype
        )

    def inputs(self) -> tuple[list[Tensor], Tensor]:
        """Convolution, steps, states and squares; returns what lives to the end of the scan, and the states.

        Both passes begin with these.
        """
        sizes, builder = self.sizes, self._builder
        row = self.convolution("ssm_convolution", sizes.channel_bytes, sizes.channel_bytes)
        live = [builder.temporary("ssm_channels", sizes.channel_bytes, row)]
        steps = sizes.item * sizes.tokens * sizes.heads
        row = self.scan("ssm_chunk_cumsum", steps, 2 * sizes.step_bytes)
        live.append(builder.temporary("ssm_steps", 2 * sizes.step_bytes, row))
        summed = _FP32 * sizes.state_elements
        read = sizes.x_bytes + sizes.state_input_bytes + 2 * sizes.step_bytes
        row = self.scan("ssm_chunk_state", read, summed, sizes.state_flops)
        chunk_states = builder.temporary("ssm_chunk_states", summed, row)
        passed = sizes.item * sizes.state_elements
        row = self.scan("ssm_state_passing", summed, passed)
        builder.release(chunk_states, row)
        states = builder.temporary("ssm_states", passed, row)
        row = self.scan(
            "ssm_chunk_products", 2 * sizes.state_input_bytes, sizes.square_bytes, sizes.square_flops
        )
        live.append(builder.temporary("ssm_squares", sizes.square_bytes, row))
        return live, states


def scan_forward(
    builder: ProgramBuilder, context: LoweringContext, sizes: ScanSizes, module: str
) -> tuple[Tensor, Tensor]:
    """Emit convolution and scan of the projection, which stays; returns the output before and behind the gate."""
    kernels, first = _Kernels(builder, context, sizes), builder.end_row + 1
    live, states = kernels.inputs()
    builder.parameter_rows.setdefault(f"{module}.conv1d", first)
    builder.parameter_rows.setdefault(module, first + 1)
    # x, the gate, C, states, squares and steps in; both outputs out.
    read = 2 * sizes.x_bytes + sizes.state_input_bytes + sizes.item * sizes.state_elements
    read += sizes.square_bytes + 2 * sizes.step_bytes
    row = kernels.scan("ssm_chunk_scan", read, 2 * sizes.x_bytes, sizes.state_flops + sizes.masked_flops)
    for tensor in (*live, states):
        builder.release(tensor, row)
    ungated = builder.activation("ssm_ungated_output", sizes.x_bytes, row)
    return ungated, builder.activation("ssm_output", sizes.x_bytes, row)


def scan_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    sizes: ScanSizes,
    saved: Sequence[Tensor],
    d_output: Tensor,
    module: str,
) -> Tensor:
    """Emit the backward pass of scan and convolution, which computes the states again.

    ``saved`` are projection and ungated output, which it releases with ``d_output``; returns the gradient of the
    projection.
    """
    projection, ungated = saved
    kernels = _Kernels(builder, context, sizes)
    d_projection = builder.temporary("ssm_projection_gradient", sizes.projection_bytes, builder.end_row + 1)
    live, states = kernels.inputs()
    row = kernels.scan("ssm_gate_backward", 3 * sizes.x_bytes, 2 * sizes.x_bytes)
    d_ungated = builder.temporary("ssm_ungated_gradient", sizes.x_bytes, row)
    builder.release(ungated, row)
    builder.release(d_output, row)
    live.append(d_ungated)
    live += _state_gradients(builder, kernels, states)
    _channel_gradients(builder, kernels)
    row = kernels.scan(
        "ssm_chunk_cumsum_backward", 4 * sizes.step_bytes, sizes.item * sizes.tokens * sizes.heads
    )
    builder.gradient_rows[module] = row
    for tensor in live:
        builder.release(tensor, row)
    row = kernels.convolution("ssm_convolution_backward", 2 * sizes.channel_bytes, sizes.channel_bytes, 2)
    builder.gradient_rows[f"{module}.conv1d"] = row
    builder.release(projection, row)
    return d_projection


def _state_gradients(builder: ProgramBuilder, kernels: _Kernels, states: Tensor) -> list[Tensor]:
    """Gradients of the states, passed from the last chunk to the first; returns them and the states."""
    sizes = kernels.sizes
    summed, passed = _FP32 * sizes.state_elements, sizes.item * sizes.state_elements
    read = sizes.x_bytes + sizes.state_input_bytes + sizes.step_bytes
    row = kernels.gradient("ssm_state_gradient", read, summed, sizes.state_flops)
    raw = builder.temporary("ssm_state_gradients", summed, row)
    row = kernels.gradient("ssm_state_passing_backward", summed + passed, passed)
    builder.release(raw, row)
    return [states, builder.temporary("ssm_passed_gradients", passed, row)]


def _channel_gradients(builder: ProgramBuilder, kernels: _Kernels) -> None:
    """Gradients of x, B, C and of the decay."""
    sizes = kernels.sizes
    x, b, steps = sizes.x_bytes, sizes.state_input_bytes, 2 * sizes.step_bytes
    passed, square = sizes.item * sizes.state_elements, sizes.square_bytes
    flops, masked = sizes.state_flops, sizes.masked_flops
    kernels.gradient(
        "ssm_x_gradient", 2 * x + b + square + passed + steps, x + sizes.step_bytes, flops + masked
    )
    kernels.gradient("ssm_b_gradient", x + b + passed + steps, 2 * b, flops)
    kernels.gradient("ssm_c_gradient", x + b + passed + steps, 2 * b, flops)
    row = kernels.gradient("ssm_square_gradient", 2 * x + steps, square, masked)
    d_square = builder.temporary("ssm_square_gradients", square, row)
    for name in ("b", "c"):
        row = kernels.gradient(f"ssm_{name}_square_gradient", square + 3 * b, b, sizes.square_flops)
    builder.release(d_square, row)
    kernels.gradient("ssm_decay_gradient", 2 * x + square + steps, sizes.step_bytes, masked)
