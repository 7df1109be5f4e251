"""Convolution and chunked gated delta rule of a Gated DeltaNet layer, kernel by kernel.

Sizes: T tokens in chunks of Q = 64, H value heads with keys of K and values of V elements; queries and keys of fewer
heads are repeated first. A chunk's triangle is fp32 until its inverse, states are in the training dtype. The two passes
from state to state go through a sequence's chunks one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ..graph import ScanShape
from ..lowering_context import LoweringContext
from ..program import ProgramBuilder, Tensor
from ..vocabulary import OpKind

CHUNK = 64
"""Tokens of a chunk (``chunk_size`` in ``fla/ops/gated_delta_rule/chunk.py``)."""
_FP32 = 4.0


@dataclass(frozen=True)
class DeltaSizes:
    """The delta rule of one rank."""

    tokens: int
    chunks: int
    chunks_of_one: int
    """Chunks of one sequence, whose states follow from one another."""
    chunk: int
    heads: int
    """Value heads."""
    key_heads: int
    key_size: int
    value_size: int
    conv_width: int
    item: float

    @classmethod
    def of(cls, context: LoweringContext) -> DeltaSizes:
        """Sizes of the ranks of a context."""
        net, training = context.model.delta_net, context.training
        assert net is not None, "only called for models with such layers"
        chunk = min(CHUNK, training.seq_len)
        return cls(
            tokens=context.tokens,
            chunks=training.micro_batch_size * -(-training.seq_len // chunk),
            chunks_of_one=-(-training.seq_len // chunk),
            chunk=chunk,
            heads=net.value_heads // context.tp,
            key_heads=net.key_heads // context.tp,
            key_size=net.key_head_size,
            value_size=net.value_head_size,
            conv_width=net.conv_width,
            item=context.item,
        )

    @property
    def raw_key_bytes(self) -> float:
        """Bytes of the keys, and of the queries, before they are repeated."""
        return self.item * self.tokens * self.key_heads * self.key_size

    @property
    def key_bytes(self) -> float:
        """Bytes of the keys, and of the queries, of all value heads."""
        return self.item * self.tokens * self.heads * self.key_size

    @property
    def value_bytes(self) -> float:
        """Bytes of the values, of the gate and of the output."""
        return self.item * self.tokens * self.heads * self.value_size

    @property
    def channel_bytes(self) -> float:
        """Bytes of what the convolution reads: queries, keys and values."""
        return 2 * self.raw_key_bytes + self.value_bytes

    @property
    def step_bytes(self) -> float:
        """Bytes of one number a token and head in the training dtype."""
        return self.item * self.tokens * self.heads

    @property
    def decay_bytes(self) -> float:
        """Bytes of the decay, fp32."""
        return _FP32 * self.tokens * self.heads

    @property
    def projection_bytes(self) -> float:
        """Bytes of the projection: queries, keys, values, gate and two numbers a head."""
        return self.channel_bytes + self.value_bytes + 2 * self.step_bytes

    @property
    def triangle_bytes(self) -> float:
        """Bytes of the inverse triangles of all chunks."""
        return self.item * self.tokens * self.heads * self.chunk

    @property
    def state_bytes(self) -> float:
        """Bytes of the states at the beginning of each chunk."""
        return self.item * self.chunks * self.heads * self.key_size * self.value_size

    def inside(self, key: float, value: float) -> float:
        """FLOPs of so many products over the keys and over the values inside the chunks."""
        return 2.0 * self.tokens * self.chunk * self.heads * (key * self.key_size + value * self.value_size)

    def across(self, products: float) -> float:
        """FLOPs of so many products between tokens and states."""
        return 2.0 * products * self.tokens * self.heads * self.key_size * self.value_size

    def inverse(self, products: float) -> float:
        """FLOPs of so many products of two triangles, a sixth of those of squares."""
        return products * self.tokens * self.heads * self.chunk**2 / 3


@dataclass
class DeltaSaved:
    """What convolution, delta rule, norm and gate keep."""

    channels: Tensor
    """Input of the convolution."""
    normed: Tensor
    """Queries and keys in front of their norm."""
    queries: Tensor
    """Queries and keys of all value heads."""
    values: Tensor
    rule: Tensor
    """Decay, step sizes and inverse triangles."""
    norm_input: Tensor
    norm_output: Tensor
    gate: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """All of it."""
        return (
            *(self.channels, self.normed, self.queries, self.values, self.rule),
            *(self.norm_input, self.norm_output, self.gate),
        )


class _Kernels:
    """Emits the kernels of one delta rule."""

    def __init__(self, builder: ProgramBuilder, context: LoweringContext, sizes: DeltaSizes) -> None:
        self._builder = builder
        self._dtype = context.dtype
        self.sizes = sizes

    def rule(
        self,
        name: str,
        read: float,
        written: float,
        flops: float = 0.0,
        steps: int = 0,
        *,
        backward: bool = False,
    ) -> int:
        """One kernel of the rule; ``steps`` are the chunks that it goes through one after the other."""
        return self._builder.compute(
            f"gdn_{name}",
            OpKind.SCAN,
            read=read,
            written=written,
            flops=flops,
            shape=ScanShape(steps, backward),
            dtype=self._dtype,
        )

    def moves(
        self, name: str, kind: OpKind, read: float, written: float, passes: int = 1, access: str = "stream"
    ) -> int:
        """Kernels bound by what they move."""
        return self._builder.memory_bound(
            f"gdn_{name}", kind, read=read, written=written, access=access, passes=passes, dtype=self._dtype
        )

    def convolution(self, name: str, read: float, passes: int) -> int:
        """The causal convolution, or with two passes its backward."""
        sizes = self.sizes
        flops = passes * 2.0 * sizes.conv_width * sizes.channel_bytes / sizes.item
        return self._builder.compute(
            f"gdn_{name}",
            OpKind.CONVOLUTION,
            read=read,
            written=sizes.channel_bytes,
            flops=flops,
            dtype=self._dtype,
        )

    def states(self) -> tuple[int, list[Tensor]]:
        """New keys and values of the chunks, and their states; returns the last row and what they take."""
        sizes, builder = self.sizes, self._builder
        key, value = sizes.key_bytes, sizes.value_bytes
        row = self.rule(
            "new_keys_values", key + value + sizes.triangle_bytes, key + value, sizes.inside(1, 1)
        )
        live = [builder.temporary("gdn_new_keys_values", key + value, row)]
        row = self.rule(
            "states", 2 * key + value, sizes.state_bytes + value, sizes.across(2), sizes.chunks_of_one
        )
        live.append(builder.temporary("gdn_states", sizes.state_bytes + value, row))
        return row, live


def delta_forward(
    builder: ProgramBuilder, context: LoweringContext, sizes: DeltaSizes, projection: Tensor, module: str
) -> tuple[DeltaSaved, Tensor]:
    """Emit everything between the projections; releases ``projection``, returns what is kept and the gated output."""
    kernels = _Kernels(builder, context, sizes)
    raw, key, value, channels = sizes.raw_key_bytes, sizes.key_bytes, sizes.value_bytes, sizes.channel_bytes
    row = kernels.moves("channels_first", OpKind.MEMCPY, channels, channels, access="strided")
    conv_input = builder.activation("gdn_channels", channels, row)
    row = kernels.convolution("convolution", channels, 1)
    builder.parameter_rows.setdefault(f"{module}.conv1d", row)
    convolved = builder.temporary("gdn_convolved", channels, row)
    row = kernels.moves("split_queries_keys", OpKind.MEMCPY, 2 * raw, 2 * raw, 2, "strided")
    normed = builder.activation("gdn_queries_keys", 2 * raw, row)
    kernels.moves("queries_keys_norm", OpKind.NORM, 2 * raw, 2 * raw, 2, "reduction")
    row = kernels.moves("repeat_queries_keys", OpKind.MEMCPY, 2 * raw, 2 * key, 2)
    queries = builder.activation("gdn_repeated_queries_keys", 2 * key, row)
    row = kernels.moves("split_values", OpKind.MEMCPY, 2 * value, 2 * value, 2, "strided")
    values = builder.activation("gdn_values", value, row)
    gate = builder.activation("gdn_gate", value, row)
    builder.release(convolved, row)
    row = kernels.moves("decay", OpKind.ELEMENTWISE, 2 * sizes.step_bytes, sizes.decay_bytes, 5)
    builder.parameter_rows.setdefault(module, row)
    builder.release(projection, row)
    rule, norm_input = _rule_forward(builder, kernels)
    row = kernels.moves("norm", OpKind.NORM, value, value, 1, "reduction")
    builder.parameter_rows.setdefault(f"{module}.out_norm", row)
    norm_output = builder.activation("gdn_norm_output", value, row)
    row = kernels.moves("gate", OpKind.ELEMENTWISE, 2 * value, value)
    output = builder.activation("gdn_output", value, row)
    saved = DeltaSaved(conv_input, normed, queries, values, rule, norm_input, norm_output, gate)
    for tensor in saved.tensors():
        builder.forget_unless_kept(tensor, row)
    if context.training.micro_batch_size > 1:
        row = kernels.moves("output_turned", OpKind.MEMCPY, value, value, access="strided")
        builder.release(output, row)
        output = builder.activation("gdn_output", value, row)
    return saved, output


def _rule_forward(builder: ProgramBuilder, kernels: _Kernels) -> tuple[Tensor, Tensor]:
    """The rule itself; returns what it keeps of its own, and its output."""
    sizes = kernels.sizes
    key, value, fp32 = sizes.key_bytes, sizes.value_bytes, _FP32 / sizes.item * sizes.triangle_bytes
    kernels.rule("decay_sums", sizes.decay_bytes, sizes.decay_bytes)
    row = kernels.rule("key_products", key + sizes.decay_bytes, fp32, sizes.inside(1, 0))
    triangle = builder.temporary("gdn_triangle", fp32, row)
    row = kernels.rule("triangle_inverse", fp32, sizes.triangle_bytes, sizes.inverse(2))
    builder.release(triangle, row)
    kept = sizes.triangle_bytes + sizes.decay_bytes + sizes.step_bytes
    rule = builder.activation("gdn_decay_steps_inverse", kept, row)
    _, live = kernels.states()
    read = 2 * key + value + sizes.state_bytes + sizes.decay_bytes
    row = kernels.rule("chunk_output", read, value, sizes.across(1) + sizes.inside(1, 1))
    for tensor in live:
        builder.release(tensor, row)
    return rule, builder.activation("gdn_rule_output", value, row)


def delta_backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    sizes: DeltaSizes,
    saved: DeltaSaved,
    d_output: Tensor,
    module: str,
) -> Tensor:
    """Emit the backward pass of :func:`delta_forward`; releases ``d_output``, returns the projection's gradient."""
    kernels = _Kernels(builder, context, sizes)
    raw, key, value, channels = sizes.raw_key_bytes, sizes.key_bytes, sizes.value_bytes, sizes.channel_bytes
    if context.training.micro_batch_size > 1:
        row = kernels.moves("output_gradient_turned", OpKind.MEMCPY, value, value, access="strided")
        builder.release(d_output, row)
        d_output = builder.temporary("gdn_output_gradient", value, row)
    row = kernels.moves("gate_backward", OpKind.ELEMENTWISE, 3 * value, 2 * value)
    for tensor in (d_output, saved.norm_output, saved.gate):
        builder.release(tensor, row)
    d_gate = builder.temporary("gdn_gate_gradient", value, row)
    d_normed = builder.temporary("gdn_norm_output_gradient", value, row)
    row = kernels.moves("norm_backward", OpKind.NORM, 2 * value, value, 1, "reduction")
    builder.gradient_rows[f"{module}.out_norm"] = row
    for tensor in (d_normed, saved.norm_input):
        builder.release(tensor, row)
    d_rule = builder.temporary("gdn_rule_output_gradient", value, row)
    gradients = _rule_backward(builder, kernels, saved, d_rule)
    row = kernels.moves("decay_backward", OpKind.ELEMENTWISE, 3 * sizes.decay_bytes, 2 * sizes.step_bytes, 6)
    builder.gradient_rows[module] = row
    kernels.moves("repeat_backward", OpKind.REDUCTION, 2 * key, 2 * raw, 2)
    row = kernels.moves("queries_keys_norm_backward", OpKind.NORM, 4 * raw, 2 * raw, 2, "reduction")
    builder.release(saved.normed, row)
    row = kernels.moves("join_channels", OpKind.MEMCPY, channels, channels, access="strided")
    builder.release(gradients, row)
    d_channels = builder.temporary("gdn_channel_gradient", channels, row)
    row = kernels.convolution("convolution_backward", 2 * channels, 2)
    builder.gradient_rows[f"{module}.conv1d"] = row
    builder.release(saved.channels, row)
    size = sizes.projection_bytes
    row = kernels.moves("join_projection", OpKind.MEMCPY, size, size, access="strided")
    for tensor in (d_channels, d_gate):
        builder.release(tensor, row)
    return builder.temporary("gdn_projection_gradient", size, row)


def _rule_backward(builder: ProgramBuilder, kernels: _Kernels, saved: DeltaSaved, d_output: Tensor) -> Tensor:
    """Backward of the rule; returns the gradients of queries, keys and values of all value heads."""
    sizes = kernels.sizes
    key, value, state = sizes.key_bytes, sizes.value_bytes, sizes.state_bytes
    _, live = kernels.states()
    rule = partial(kernels.rule, backward=True)
    row = rule("value_gradient_inside", 2 * key + value, value, sizes.inside(1, 1))
    live.append(builder.temporary("gdn_value_gradient", value, row))
    row = rule("state_gradients", 3 * key + 2 * value, state + value, sizes.across(3), sizes.chunks_of_one)
    live.append(builder.temporary("gdn_state_gradients", state + value, row))
    read = 3 * key + 3 * value + 2 * state
    row = rule("key_gradients", read, 3 * key, sizes.across(3) + sizes.inside(2, 1))
    gradients = builder.temporary("gdn_gradients", 3 * key + value, row)
    builder.release(d_output, row)
    read = 2 * key + 2 * value + sizes.triangle_bytes
    flops = sizes.inside(4, 2) + 2 * sizes.inverse(6)
    row = rule("new_keys_values_backward", read, 2 * key + value, flops)
    for tensor in (*live, saved.queries, saved.values, saved.rule):
        builder.release(tensor, row)
    kernels.moves("gradient_sums", OpKind.ELEMENTWISE, 2 * key + 2 * sizes.decay_bytes, key, 2)
    kernels.rule("decay_sums_backward", sizes.decay_bytes, sizes.decay_bytes)
    return gradients
