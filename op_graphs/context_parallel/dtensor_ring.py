"""PyTorch's own context parallelism: ``dtensor-allgather`` and ``dtensor-alltoall``.

What ``torch.distributed.tensor.experimental.context_parallel`` makes of ``scaled_dot_product_attention``, which
torchtitan runs (PyTorch 2.6, ``torch/distributed/tensor/experimental/_attention.py``: ``_templated_ring_attention`` and
its backward). It is a ring by its kernels, one a rank whose keys and values are looked at, and differs from
Transformer Engine's in what is around them:

- Models repeat keys and values for the heads that share them before they call attention, so all heads travel.
- They are gathered at once (``allgather``, its default), or passed on as all-to-alls of one pair each (``alltoall``).
- Outputs are merged in fp32 by their log-sum-exp, gradients added up in fp32; gradients of keys and values travel in
  fp32, cp times, the last of which brings them home.

A compiler that traces it waits for a collective where it was started (``_functional_collectives.py``,
``_maybe_wrap_tensor``), which is ``overlap.cp: in-place``. Eagerly each waits for its reader.

What is merged and added up is that of the last rank, whose queries all take part in every step; on others it is half of
them in some steps. Log-sum-exps, a head's width smaller than outputs, are left out of the traffic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..lower_core_attention import AttentionSizes, flash_backward, flash_forward
from ..lowering_context import LoweringContext
from ..overlap.policy import RingPlacement
from ..overlap.registry import RING
from ..program import ProgramBuilder, Tensor
from ..vocabulary import Communication, Dimension, DType, OpKind
from .algorithm import ContextParallelAlgorithm, CoreSaved, exchange


@dataclass(frozen=True)
class _Ring:
    """A ring under construction: its sizes, with keys and values of all heads, and how they come round."""

    builder: ProgramBuilder
    context: LoweringContext
    sizes: AttentionSizes
    gathers: bool

    @property
    def steps(self) -> int:
        return self.context.parallel.cp

    @property
    def placement(self) -> RingPlacement:
        return RING.chosen(self.context.overlap.cp)

    @property
    def eager(self) -> bool:
        return self.context.libraries.runs_eagerly("attention")

    @property
    def part(self) -> AttentionSizes:
        return self.sizes.part(self.steps)

    def wide(self, size: float) -> float:
        """Bytes in fp32 of what has ``size`` bytes in the training dtype."""
        return 4 / self.sizes.item * size

    def pass_over(self, name: str, read: float, written: float, passes: int = 1) -> int:
        """Elementwise kernels; returns the row."""
        return self.builder.memory_bound(
            name,
            OpKind.ELEMENTWISE,
            read=read,
            written=written,
            passes=passes,
            dtype=self.context.dtype,
        )

    def exchange(
        self, name: str, communication: Communication, size: float, dtype: DType | None = None
    ) -> int:
        """A collective behind the kernel that made its buffer, awaited as the policy has it; returns its row."""
        builder, group = self.builder, self.context.group(Dimension.CP)
        row = exchange(builder, self.context, name, communication, size, group, dtype=dtype)
        self.placement.behind_step(builder, row)
        return row


class _KeysAndValues:
    """Keys and values on their way round: one gather of all, or a step for each rank."""

    def __init__(self, ring: _Ring) -> None:
        self._ring = ring
        self._row = -1
        self._arriving: Tensor | None = None
        self._read: Tensor | None = None

    def begin(self, step: int) -> None:
        """Wait for the keys and values of a step, and start what brings those of the next."""
        ring, size = self._ring, self._ring.sizes.kv_bytes
        if step > 0:
            ring.builder.wait_for(self._row)
            self._read = self._arriving
        if step + 1 == ring.steps or (ring.gathers and step > 0):
            return
        ring.pass_over("ring_kv_copy", size, size)
        if ring.gathers:
            size *= ring.steps
            self._row = ring.exchange("ring_kv_gather", Communication.ALL_GATHER, size)
        else:
            self._row = ring.exchange("ring_kv", Communication.SEND_RECEIVE, size)
        self._arriving = ring.builder.temporary("received_kv", size, self._row)

    def end(self, step: int, row: int) -> None:
        """Drop what the kernel of a step was the last to read."""
        if self._read is not None and (step + 1 == self._ring.steps or not self._ring.gathers):
            self._ring.builder.release(self._read, row)


def _expanded(sizes: AttentionSizes) -> AttentionSizes:
    return replace(sizes, kv_heads=sizes.heads)


def _expand(ring: _Ring, kv_bytes: float) -> list[Tensor]:
    """Repeat keys and values for the heads that share them, and lay them out head by head; what it makes."""
    size = ring.sizes.kv_bytes
    repeats = size > kv_bytes
    if repeats and ring.eager:
        ring.pass_over("repeat_kv", kv_bytes, size)
    # ``contiguous()``; a compiler repeats in the same kernel.
    row = ring.pass_over("contiguous_kv_copy", size if ring.eager else kv_bytes, size)
    return [ring.builder.activation("contiguous_kv", size, row)]


def _merge(ring: _Ring, step: int, merged: Tensor | None) -> Tensor | None:
    """Merge the output of a step into that of the steps before; returns the merged output, None behind the last.

    Eagerly: a cast to fp32, the difference, its product with a sigmoid, and another difference, each a kernel.
    """
    builder, size = ring.builder, ring.sizes.output_bytes
    wide, last = ring.wide(size), step + 1 == ring.steps
    if ring.eager:
        ring.pass_over("attention_output_cast", size, wide)
        row = builder.last_row
        if step > 0:
            row = ring.pass_over("attention_merge", 5 * wide, 3 * wide, passes=3)
            # The step's output in fp32, and its difference times the sigmoid.
            builder.temporary("attention_merge_terms", 2 * wide, row, until=row)
    elif step == 0:
        return None
    else:
        before = size if step == 1 else wide
        row = ring.pass_over("attention_merge", size + before, size if last else wide)
    if merged is not None:
        builder.release(merged, row)
    if last:
        if ring.eager:
            ring.pass_over("attention_output_cast", wide, size)
        return None
    return builder.temporary("merged_attention_output", wide, row)


def _forward(
    builder: ProgramBuilder,
    context: LoweringContext,
    sizes: AttentionSizes,
    qkv: Tensor,
    keep: bool,
    *,
    gathers: bool,
) -> tuple[CoreSaved, Tensor]:
    ring = _Ring(builder, context, _expanded(sizes), gathers)
    inner = _expand(ring, sizes.kv_bytes)
    travelling = _KeysAndValues(ring)
    merged: Tensor | None = None
    for step in range(ring.steps):
        travelling.begin(step)
        row = flash_forward(builder, context, ring.part)
        travelling.end(step, row)
        own = builder.temporary("step_attention_output", sizes.output_bytes, row)
        merged = _merge(ring, step, merged)
        builder.release(own, builder.last_row)
    output = builder.activation("attention_output", sizes.output_bytes, builder.last_row)
    inner.append(
        builder.activation("log_sum_exp", 4.0 * sizes.batch * sizes.length * sizes.heads, builder.last_row)
    )
    if not keep:
        for tensor in inner:
            builder.release(tensor, builder.last_row)
    return CoreSaved(qkv, output, inner if keep else []), output


def _add_gradients(ring: _Ring, name: str, size: float, *, first: bool, copies: int) -> int:
    """Add a step's gradient of ``size`` bytes to the sum in fp32, and copy the sum ``copies`` times into a buffer.

    A compiler makes one kernel of it, and of the first one a cast.
    """
    wide = ring.wide(size)
    if not ring.eager:
        return ring.pass_over(name, size + (0 if first else wide), wide)
    row = ring.pass_over(name, size + wide, wide)
    return ring.pass_over(f"{name}_copy", copies * wide, copies * wide, passes=copies) if copies else row


def _backward(
    builder: ProgramBuilder,
    context: LoweringContext,
    sizes: AttentionSizes,
    saved: CoreSaved,
    d_output: Tensor,
    *,
    gathers: bool,
) -> Tensor:
    ring = _Ring(builder, context, _expanded(sizes), gathers)
    kv_bytes, query_bytes = ring.sizes.kv_bytes, sizes.query_bytes
    travelling = _KeysAndValues(ring)
    sums, arriving = _zeroed_sums(ring), -1
    received: Tensor | None = None
    for step in range(ring.steps):
        travelling.begin(step)
        row = flash_backward(builder, context, ring.part)
        travelling.end(step, row)
        own = builder.temporary("step_qkv_gradient", kv_bytes + query_bytes, row)
        builder.temporary("query_gradient_fp32", ring.wide(query_bytes), row, until=row)
        builder.wait_for(arriving)
        row = _add_gradients(ring, "kv_gradient_sum", kv_bytes, first=step == 0, copies=1)
        if received is not None:
            builder.release(received, row)
        arriving = ring.exchange(
            "ring_kv_gradient", Communication.SEND_RECEIVE, ring.wide(kv_bytes), DType.FP32
        )
        received = builder.temporary("received_kv_gradient", ring.wide(kv_bytes), arriving)
        row = _add_gradients(ring, "query_gradient_sum", query_bytes, first=step == 0, copies=0)
        builder.release(own, row)
    builder.wait_for(arriving)
    row = ring.pass_over("query_gradient_cast", ring.wide(query_bytes), query_bytes)
    d_qkv = builder.temporary("qkv_gradient", sizes.qkv_bytes, row)
    _gather_shared_heads(ring, sizes.kv_bytes)
    assert received is not None
    for tensor in (*sums, received, *saved.inner, d_output):
        builder.release(tensor, builder.last_row)
    return d_qkv


def _zeroed_sums(ring: _Ring) -> list[Tensor]:
    """The sums of gradients in fp32, which a compiler need not zero."""
    builder, size = ring.builder, ring.wide(ring.sizes.qkv_bytes)
    row = ring.pass_over("ring_gradient_zeros", 0, size, passes=3) if ring.eager else builder.end_row
    return [builder.temporary("ring_gradients_fp32", size, row)]


def _gather_shared_heads(ring: _Ring, kv_bytes: float) -> None:
    """Round gradients of keys and values, and add up those of the heads that share one."""
    size = ring.sizes.kv_bytes
    if not ring.eager:
        ring.pass_over("kv_gradient_cast", ring.wide(size), kv_bytes)
        return
    ring.pass_over("kv_gradient_cast", ring.wide(size), size)
    if size > kv_bytes:
        ring.pass_over("repeat_kv_backward", size, kv_bytes)


def _algorithm(*, gathers: bool) -> ContextParallelAlgorithm:
    return ContextParallelAlgorithm(
        lambda builder, context, sizes, qkv, keep: _forward(
            builder, context, sizes, qkv, keep, gathers=gathers
        ),
        lambda builder, context, sizes, saved, d_output: _backward(
            builder, context, sizes, saved, d_output, gathers=gathers
        ),
    )


DTENSOR_ALLGATHER = _algorithm(gathers=True)
DTENSOR_ALLTOALL = _algorithm(gathers=False)
