"""Programs: the operations of one action of one model chunk, before a schedule gives them a place.

A program is a template. Assembly (``schedules.assembly``) copies it once for each microbatch, shifts its row
numbers and joins the copies. Everything that repeats is therefore lowered once, in plain Python, and multiplied in
numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from .columns import Int8, Int32, Int64, Table
from .graph import OPERATION_DEFAULTS, GemmShape, MemoryShape, Operations, Shape
from .graph_names import GraphNames as GraphNames
from .vocabulary import Communication, Dimension, DType, MemoryCategory, OpKind, Phase, Stream

_DIMENSION_STREAMS: dict[Dimension, Stream] = {
    Dimension.TP: Stream.TP,
    Dimension.CP: Stream.CP,
    Dimension.EP: Stream.EP,
    Dimension.ETP: Stream.EP,
    Dimension.ETP_EP: Stream.EP,
    Dimension.DP: Stream.DP,
    Dimension.EDP: Stream.DP,
    Dimension.WORLD: Stream.DP,
    Dimension.PP: Stream.DP,
}


@dataclass(frozen=True)
class ProgramBuffers(Table):
    """Buffers of a program. ``release`` is -1 for what the matching backward program releases (saved activations)."""

    allocate: Int64
    release: Int64
    size: Int64
    category: Int8
    name: Int32
    pool: Int8


@dataclass(frozen=True)
class Program:
    """The operations of one action, with row numbers that start at 0."""

    operations: Operations
    dependency_rows: Int64
    """Pairs ``(row, dependency)``: this side is the row that waits."""
    dependencies: Int64
    buffers: ProgramBuffers
    forward_release: Int64
    """For each buffer of the matching forward program: the row here that releases it, or -1."""
    input_release: Int64
    """For each buffer of the matching backward-for-input program (split backward): the row here that releases it."""
    input_row: int = 0
    """Row that consumes the tensor received from the neighbouring stage."""
    output_row: int = -1
    """Row that produces the tensor sent to the neighbouring stage; -1 if nothing is sent."""
    gradient_rows: dict[str, int] = field(default_factory=dict)
    """Parameter name -> row that completes its gradient."""
    parameter_rows: dict[str, int] = field(default_factory=dict)
    """Parameter name -> first row that reads it."""
    lead: int = 0
    """Rows in front that are started beside the action before: copies from the host that are needed first."""
    first_reload: int = -1
    """First row that copies kept activations from the host; -1 without one."""
    last_offload: int = -1
    """Last row that copies kept activations to the host; -1 without one."""

    def __len__(self) -> int:
        return len(self.operations)


@dataclass(frozen=True)
class Tensor:
    """A buffer of a program under construction."""

    owner: ProgramBuilder
    index: int


@dataclass(frozen=True)
class DeferredGemm:
    """A weight-gradient GEMM that a split backward runs in its second half."""

    name: str
    shape: GemmShape
    parameter: str
    """Module whose gradient it completes."""
    layer: int
    module: str
    reads: tuple[Tensor, ...]
    """Buffers it reads, released behind it."""
    scale_bytes: float = 0.0
    """Bytes of block scales it reads."""
    accumulates_in: DType | None = None
    """Type of the main gradient to which its result is added afterwards; None if it writes where it belongs."""
    kind: OpKind | None = None
    """As in :meth:`ProgramBuilder.gemm`."""
    rescaled: DType | None = None
    """Type of its result where a kernel multiplies that by the scales of its operands; None if it does so itself."""


@dataclass(frozen=True)
class HostGroup:
    """Activations of a part of a layer that spend the time until their backward pass in the memory of the host."""

    part: str
    layer: int
    tensors: tuple[Tensor, ...] = ()
    """Empty where they stay on the device."""
    size: int = 0
    """Bytes of all of them."""
    row: int = -1
    """Row of the forward program that copies them to the host."""


class ProgramBuilder:
    """Collects the operations of a program in the order the framework launches them.

    Compute runs on one stream in program order, so only cross-stream dependencies are stored: a collective waits
    for the compute before it, and the next compute operation waits for the collectives named in :meth:`wait_for`.
    """

    def __init__(
        self,
        names: GraphNames,
        *,
        chunk: int,
        phase: Phase,
        forward: ProgramBuilder | None = None,
        backward_input: ProgramBuilder | None = None,
    ) -> None:
        self.names = names
        self.phase = phase
        self.keep_activations = True
        self.layer = -1
        self.module = ""
        self.cuda_graph = -1
        """Number of the CUDA graph that what is added belongs to; -1 for none."""
        self._cuda_graphs = 0
        self.module_prefix = ""
        """Put before every module: what belongs to a model inside the model."""
        self.input_row = 0
        self.output_row = -1
        self.gradient_rows: dict[str, int] = {}
        self.parameter_rows: dict[str, int] = {}
        self._chunk = chunk
        self._forward = forward
        self._backward_input = backward_input
        self.deferred: list[DeferredGemm] | None = None
        """Weight-gradient GEMMs put off to a program of their own, where the backward is split; None if it is not."""
        self.host_groups: dict[tuple[str, int], HostGroup] = {}
        """Of a forward program: what is moved to the host, by part and layer, in the order of the copies."""
        self.reload_rows: dict[tuple[str, int], int] = {}
        """Of a backward program: the row that brings each back."""
        self.lead = 0
        self._reloaded: dict[Tensor, Tensor] = {}
        self._arrivals: list[int] = []
        self._held: set[Tensor] = set()
        self.casts_weights = False
        """Whether linears quantise their weights here, where a low-precision recipe does."""
        self._copies: dict[tuple[Tensor | None, str], Tensor] = {}
        self._copied_at: dict[Tensor | None, int] = {}
        self._discarded: set[Tensor] = set()
        self._rows: list[dict[str, float]] = []
        self._dependencies: list[tuple[int, int]] = []
        self._pending: list[int] = []
        self._last_compute = -1
        self._buffers: list[list[int]] = []
        self._foreign_release: dict[Tensor, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def forward(self) -> ProgramBuilder | None:
        """The forward program that this one continues; None for a forward program."""
        return self._forward

    @property
    def buffer_count(self) -> int:
        """Buffers allocated so far."""
        return len(self._buffers)

    @property
    def last_row(self) -> int:
        """Row of the compute operation added last; -1 before the first."""
        return self._last_compute

    @property
    def end_row(self) -> int:
        """Row added last, on any stream; -1 before the first."""
        return len(self._rows) - 1

    # -- operations ------------------------------------------------------------------------------------------

    def capture(self, captured: bool) -> None:
        """Whether what is added from here on is captured into a CUDA graph; the one that is open goes on."""
        if captured and self.cuda_graph < 0:
            self._cuda_graphs += 1
        self.cuda_graph = self._cuda_graphs if captured else -1

    def compute(
        self,
        name: str,
        kind: OpKind,
        *,
        read: float = 0,
        written: float = 0,
        flops: float = 0,
        shape: Shape = None,
        dtype: DType = DType.BF16,
        phase: Phase | None = None,
    ) -> int:
        """Add a kernel to the compute stream and return its row. ``read`` and ``written`` are bytes."""
        row = self._add(
            name,
            kind,
            Stream.COMPUTE,
            phase,
            bytes_read=read,
            bytes_written=written,
            flops=flops,
            shape=self.names.shape(shape),
            dtype=dtype,
        )
        self._dependencies += [(row, source) for source in (*self._pending, *self._arrivals)]
        self._pending.clear()
        self._arrivals.clear()
        self._last_compute = row
        return row

    def beside(
        self,
        name: str,
        kind: OpKind,
        stream: Stream,
        *,
        after: Sequence[int],
        read: float = 0,
        written: float = 0,
        shape: Shape = None,
        dtype: DType = DType.NONE,
        phase: Phase | None = None,
    ) -> int:
        """Add an operation to a stream beside compute, behind the rows in ``after`` (-1 for none); returns its row."""
        index = self.names.shape(shape)
        row = self._add(
            name, kind, stream, phase, bytes_read=read, bytes_written=written, shape=index, dtype=dtype
        )
        self._dependencies += [(row, source) for source in after if source >= 0]
        return row

    def gemm(
        self,
        name: str,
        shape: GemmShape,
        *,
        scale_bytes: float = 0.0,
        phase: Phase | None = None,
        kind: OpKind | None = None,
    ) -> int:
        """Add a matrix product; FLOPs and traffic follow from its shape, and from the block scales it reads.

        Several at once are a grouped product, unless ``kind`` says that one kernel computes them as a batch.
        """
        elements_in = shape.count * (shape.m * shape.k + shape.k * shape.n)
        elements_out = shape.count * shape.m * shape.n
        output_bytes = elements_out * shape.output.itemsize
        return self.compute(
            name,
            kind or (OpKind.GROUPED_GEMM if shape.count > 1 else OpKind.GEMM),
            read=elements_in * shape.dtype.itemsize + scale_bytes + (output_bytes if shape.accumulate else 0),
            written=output_bytes,
            flops=2.0 * shape.count * shape.m * shape.n * shape.k,
            shape=shape,
            dtype=shape.dtype,
            phase=phase,
        )

    def memory_bound(
        self,
        name: str,
        kind: OpKind,
        *,
        read: float,
        written: float,
        access: str = "stream",
        passes: int = 1,
        function: bool = False,
        launches: int = 0,
        dtype: DType = DType.BF16,
        phase: Phase | None = None,
    ) -> int:
        """Add a kernel whose time is its memory traffic; ``function`` and ``launches`` as in :class:`MemoryShape`."""
        shape = MemoryShape(access, passes, function, launches)
        return self.compute(name, kind, read=read, written=written, shape=shape, dtype=dtype, phase=phase)

    def collective(
        self,
        name: str,
        communication: Communication,
        size: float,
        dimension: Dimension,
        group: int,
        *,
        after: Sequence[int] | None = None,
        phase: Phase | None = None,
        dtype: DType = DType.BF16,
        kind: OpKind = OpKind.COLLECTIVE,
        shape: Shape = None,
    ) -> int:
        """Add a collective over a full message of ``size`` bytes on its dimension's stream; returns its row.

        It waits for the rows in ``after``, by default for the compute operation added last. A ``shape`` says how the
        message travels, where ``size`` alone does not.
        """
        row = self._add(
            name,
            kind,
            _DIMENSION_STREAMS[dimension],
            phase,
            communication=communication,
            communication_bytes=size,
            group=group,
            shape=self.names.shape(shape),
            dtype=dtype,
        )
        sources = [self._last_compute] if after is None else list(after)
        if after is None or _DIMENSION_STREAMS[dimension] != Stream.DP:
            sources += self._arrivals
        self._dependencies += [(row, source) for source in sources if source >= 0]
        return row

    def wait_for(self, *rows: int) -> None:
        """Make the next compute operation wait for these rows; -1 stands for no row."""
        self._pending.extend(row for row in rows if row >= 0)

    def wait_for_arrival(self, row: int) -> None:
        """Make the next compute operation wait for a copy from the host, and collectives on activations until then."""
        self._arrivals.append(row)

    def depend(self, row: int, source: int) -> None:
        """Make one row wait for another."""
        self._dependencies.append((row, source))

    # -- memory ----------------------------------------------------------------------------------------------

    def allocate(self, name: str, size: float, row: int, category: MemoryCategory, pool: int = 0) -> Tensor:
        """A buffer of ``size`` bytes, of the blocks of stream ``pool``, from the start of ``row`` until its release."""
        self._buffers.append([row, -1, round(size), category, self.names.strings.intern(name), pool])
        return Tensor(self, len(self._buffers) - 1)

    def activation(self, name: str, size: float, row: int) -> Tensor:
        """A buffer for an activation."""
        return self.allocate(name, size, row, MemoryCategory.ACTIVATIONS)

    def temporary(self, name: str, size: float, row: int, until: int | None = None) -> Tensor:
        """A buffer that this program releases itself, at the end of ``until`` if that is known already."""
        tensor = self.allocate(name, size, row, MemoryCategory.TEMPORARY)
        if until is not None:
            self.release(tensor, until)
        return tensor

    def promote(self, tensor: Tensor, name: str) -> None:
        """Count a buffer of this program as an activation from its allocation on."""
        assert tensor.owner is self
        buffer = self._buffers[tensor.index]
        buffer[3], buffer[4] = int(MemoryCategory.ACTIVATIONS), self.names.strings.intern(name)

    def release(self, tensor: Tensor, row: int) -> None:
        """Release a buffer of this program, or of a program this one continues (its forward, its input gradient).

        A buffer that a deferred GEMM still reads is left to that GEMM.
        """
        tensor = self._reloaded.get(tensor, tensor)
        if tensor in self._held or tensor in tensor.owner._discarded:
            return
        if tensor.owner is self:
            self._buffers[tensor.index][1] = row
        elif tensor.owner in (self._forward, self._backward_input):
            self._foreign_release[tensor] = row
        else:
            raise AssertionError("a buffer can be released by its own program or one that continues it")

    def defer(self, gemm: DeferredGemm) -> None:
        """Put a weight-gradient GEMM off to another program; what it reads stays alive until then."""
        assert self.deferred is not None
        reads = tuple(self._reloaded.get(tensor, tensor) for tensor in gemm.reads)
        self.deferred.append(replace(gemm, module=self.module_prefix + gemm.module, reads=reads))
        for tensor in reads:
            self._held.add(tensor)
            if tensor.owner is self:
                self._buffers[tensor.index][1] = -1
            self._foreign_release.pop(tensor, None)

    def keep_copy(self, source: Tensor | None, reader: str, copy: Tensor) -> None:
        """Note that ``copy`` is kept for the backward pass of ``reader`` in the place of ``source``, if of any."""
        self._copies[source, reader] = copy
        self._copied_at[source] = self._buffers[copy.index][0]

    def kept_copy(self, source: Tensor | None, reader: str) -> Tensor | None:
        """What is kept for a reader in the place of ``source``, here or in the forward program; None if nothing."""
        for builder in (self, self._forward):
            if builder is not None and (source, reader) in builder._copies:
                return builder._copies[source, reader]
        return None

    def discard(self, tensor: Tensor, row: int | None = None) -> None:
        """Release a buffer of this program for good at ``row``, by default where its last copy was made."""
        assert tensor.owner is self
        self.release(tensor, self._copied_at[tensor] if row is None else row)
        self._discarded.add(tensor)

    def kept_among(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Buffers of this program that are left to the backward pass: those given, and copies kept in their place."""
        copies = [copy for (source, _), copy in self._copies.items() if source in tensors]
        return [
            tensor
            for tensor in dict.fromkeys((*tensors, *copies))
            if self._buffers[tensor.index][1] < 0 and tensor not in self._discarded
        ]

    def kept_since(self, index: int) -> list[Tensor]:
        """Activations allocated since there were ``index`` buffers that are left to the backward pass."""
        found = [Tensor(self, at) for at in range(index, len(self._buffers))]
        activations = int(MemoryCategory.ACTIVATIONS)
        return self.kept_among([one for one in found if self._buffers[one.index][3] == activations])

    def size_of(self, tensor: Tensor) -> int:
        """Bytes of a buffer of this program."""
        return self._buffers[tensor.index][2]

    def reload(self, tensor: Tensor, row: int) -> None:
        """Let a new buffer, from ``row`` on, stand for one that the forward program moved to the host."""
        _, _, size, category, name, pool = tensor.owner._buffers[tensor.index]
        self._buffers.append([row, -1, size, category, name, pool])
        self._reloaded[tensor] = Tensor(self, len(self._buffers) - 1)

    def forget_unless_kept(self, tensor: Tensor, row: int) -> None:
        """Release an activation after its last use in forward, unless it is kept for the backward pass."""
        if not self.keep_activations:
            self.release(tensor, row)

    # -- result ----------------------------------------------------------------------------------------------

    def build(self) -> Program:
        """The finished program."""
        pairs = np.array(self._dependencies, dtype=np.int64).reshape(-1, 2)
        buffers = np.array(self._buffers, dtype=np.int64).reshape(-1, 6)
        return Program(
            operations=Operations.from_rows(self._rows, **OPERATION_DEFAULTS),
            dependency_rows=pairs[:, 0].copy(),
            dependencies=pairs[:, 1].copy(),
            buffers=ProgramBuffers(
                allocate=buffers[:, 0],
                release=buffers[:, 1],
                size=buffers[:, 2],
                category=buffers[:, 3].astype(np.int8),
                name=buffers[:, 4].astype(np.int32),
                pool=buffers[:, 5].astype(np.int8),
            ),
            forward_release=self._releases_of(self._forward),
            input_release=self._releases_of(self._backward_input),
            input_row=self.input_row,
            output_row=self.output_row,
            gradient_rows=dict(self.gradient_rows),
            parameter_rows=dict(self.parameter_rows),
            lead=self.lead,
            first_reload=min(self.reload_rows.values(), default=-1),
            last_offload=max((group.row for group in self.host_groups.values()), default=-1),
        )

    def _releases_of(self, owner: ProgramBuilder | None) -> Int64:
        releases = np.full(len(owner._buffers) if owner else 0, -1, dtype=np.int64)
        for tensor, row in self._foreign_release.items():
            if tensor.owner is owner:
                releases[tensor.index] = row
        return releases

    def _add(self, name: str, kind: OpKind, stream: Stream, phase: Phase | None, **columns: float) -> int:
        strings = self.names.strings
        self._rows.append(
            {
                "name": strings.intern(name),
                "kind": kind,
                "stream": stream,
                "phase": self.phase if phase is None else phase,
                "layer": self.layer,
                "module": strings.intern(self.module_prefix + self.module) if self.module else -1,
                "chunk": self._chunk,
                "cuda_graph": self.cuda_graph,
                **columns,
            }
        )
        return len(self._rows) - 1
