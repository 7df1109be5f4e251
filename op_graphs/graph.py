"""OpGraph: what must happen, in which order, at what cost. One row an operation, columnar and immutable.

Rows of one rank and stream execute in row order (streams are FIFO). A *segment* is a run of consecutive rows
that belong to one action (``0F3``: stage 0, forward, microbatch 3). Segments with the same ``template`` are equal
but for the microbatch, so whatever is computed once for a template (durations, its inner timing) holds for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import TypeAlias

import numpy as np

from .columns import Bool, Float64, Int8, Int32, Int64, Table
from .timeline import CommunicationGroup
from .vocabulary import Communication, DType, OpKind


@dataclass(frozen=True)
class GemmShape:
    """Matrix product ``[m, k] x [k, n]``, ``count`` of them (experts of a grouped GEMM, else 1).

    ``layout`` is ``TN`` for a forward, ``NN`` for a data gradient, ``NT`` for a weight gradient; ``accumulate`` says
    that the output is added to what is there (fused accumulation into the main gradient, dtype ``output``).
    """

    m: int
    n: int
    k: int
    layout: str = "TN"
    dtype: DType = DType.BF16
    output: DType = DType.BF16
    accumulate: bool = False
    count: int = 1


@dataclass(frozen=True)
class AttentionShape:
    """Fused (flash) attention of ``batch`` sequences: queries ``[batch, query_length, heads, head_size]``."""

    batch: int
    query_length: int
    key_length: int
    heads: int
    kv_heads: int
    head_size: int
    value_head_size: int
    causal: bool = True
    backward: bool = False
    dtype: DType = DType.BF16
    window: int = 0
    """Sliding-window length in tokens; 0 for full attention."""
    kernel: str = "flash"
    """``flash``: the machine's best; ``flash-2``, ``flash-1``: the FlashAttention of that generation."""


@dataclass(frozen=True)
class MemoryShape:
    """A kernel bound by memory traffic. ``access`` is the pattern that decides the bandwidth it achieves.

    ``stream``: contiguous elementwise and optimizer kernels; ``reduction``: norms, softmax, sums; ``strided``:
    permutes, transposes, gathers and casts between layouts; ``columns``: casts with a scale for each column, as PyTorch
    compiles them. ``passes`` counts kernels launched back to back.

    What launching it costs the host (:mod:`tracesim.host_work`): ``function`` says that an autograd function written in
    Python launches it, ``launches`` how many kernels or operations of the framework there are, where that is not
    ``passes``: some move next to nothing.
    """

    access: str = "stream"
    passes: int = 1
    function: bool = False
    launches: int = 0


@dataclass(frozen=True)
class ScanShape:
    """A kernel of a chunked scan, given by its FLOPs and traffic.

    ``steps``: chunks that it goes through one after the other; 0 where it runs all at once. ``backward``: whether it
    computes gradients.
    """

    steps: int = 0
    backward: bool = False


@dataclass(frozen=True)
class HostCopyShape:
    """``copies`` asynchronous copies between a device and pinned memory of its host, one behind the other."""

    to_host: bool
    copies: int = 1


@dataclass(frozen=True)
class HostUpdateShape:
    """Work of the processor on memory of the host, bound by that memory's bandwidth."""


@dataclass(frozen=True)
class ExchangeShape:
    """An exchange of tokens with experts that sends a token once to a domain, and there once to a rank.

    A token chooses ``top_k`` experts, spread evenly over ``top_groups`` of ``groups`` equal groups of experts. Which
    ranks share a domain is known to who costs it.
    """

    token_bytes: float
    """All tokens of a rank, once each."""
    top_k: int
    groups: int = 1
    top_groups: int = 1
    most: float = 1.0
    """What the most loaded rank sends or gets, over what a rank does on average."""
    score_bytes: float = 0.0
    """Scores of all tokens of a rank for every expert, of which each copy carries those of the domain it goes to."""
    map_bytes: float = 0.0
    """What a rank says of its tokens to every other in front of the exchange."""

    def copy_bytes(self, domains: int) -> float:
        """Bytes of all tokens of a rank, once each, with the scores for the experts of one of ``domains``."""
        return self.token_bytes + self.score_bytes / domains

    def chance(self, parts: int) -> float:
        """Chance that a token has any of its experts on one of ``parts`` equal parts of the ranks.

        Of the groups that lie on the part, a hypergeometric number is among the token's; each choice falls on those
        with the share that they have of the token's groups.
        """
        if parts >= self.groups:
            hit = self.groups / (parts * self.top_groups)
            return self.top_groups / self.groups * (1 - (1 - min(1.0, hit)) ** self.top_k)
        mine, chosen = self.groups // parts, self.top_groups
        ways = comb(self.groups, chosen)
        missed = sum(
            comb(mine, own) * comb(self.groups - mine, chosen - own) / ways * (1 - own / chosen) ** self.top_k
            for own in range(min(mine, chosen) + 1)
        )
        return 1 - missed


Shape: TypeAlias = (
    GemmShape
    | AttentionShape
    | MemoryShape
    | ScanShape
    | HostCopyShape
    | HostUpdateShape
    | ExchangeShape
    | None
)


@dataclass(frozen=True)
class Operations(Table):
    """Columns of the operations. ``-1`` stands for "none" in id columns."""

    rank: Int32
    """Row of :attr:`OpGraph.ranks` (not the global rank number)."""
    stream: Int8
    """:class:`~op_graphs.vocabulary.Stream`."""
    name: Int32
    """String id."""
    kind: Int8
    phase: Int8
    layer: Int32
    module: Int32
    """String id of the module path."""
    chunk: Int32
    microbatch: Int32
    flops: Float64
    bytes_read: Float64
    bytes_written: Float64
    shape: Int32
    """Index into :attr:`OpGraph.shapes`."""
    dtype: Int8
    communication: Int8
    communication_bytes: Int64
    """Full message: the unsharded buffer of a gather, scatter or reduction, the payload of a send."""
    group: Int32
    """Index into :attr:`OpGraph.groups`."""
    rendezvous: Int32
    """Operations of different ranks that carry the same id (>= 0) start together, when all have been reached."""
    cuda_graph: Int32
    """Neighbours with the same number (>= 0) are launched together, as one CUDA graph; -1 is launched by itself."""


OPERATION_DEFAULTS: dict[str, int] = {
    "rank": 0,
    "stream": 0,
    "kind": 0,
    "phase": 0,
    "layer": -1,
    "module": -1,
    "chunk": -1,
    "microbatch": -1,
    "flops": 0,
    "bytes_read": 0,
    "bytes_written": 0,
    "shape": -1,
    "dtype": DType.NONE,
    "communication": Communication.NONE,
    "communication_bytes": 0,
    "group": -1,
    "rendezvous": -1,
    "cuda_graph": -1,
}


@dataclass(frozen=True)
class Segments(Table):
    """Runs of rows ``[begin, end)`` that are one action of one rank."""

    begin: Int64
    end: Int64
    template: Int32
    """Equal for segments whose operations, inner dependencies and streams are equal; -1 for a segment of its own."""
    name: Int32
    """String id of the action as drawn on the pipeline track (``F0``, ``B3``, ``optimizer``)."""
    rank: Int32
    stage: Int32
    """Global stage (chunk * pp + pipeline rank), -1 outside the pipeline."""
    microbatch: Int32


@dataclass(frozen=True)
class Buffers(Table):
    """Device memory: allocated when operation ``allocate`` starts, released when ``release`` ends."""

    rank: Int32
    allocate: Int64
    """Row of the operation, or -1: there before the step begins."""
    release: Int64
    """Row of the operation, or -1: still there when the step ends."""
    size: Int64
    """Bytes."""
    category: Int8
    """:class:`~op_graphs.vocabulary.MemoryCategory`."""
    name: Int32
    """String id."""
    pool: Int8
    """The :class:`~op_graphs.vocabulary.Stream` on which it is allocated: the allocator has free blocks for each."""


@dataclass(frozen=True)
class Startup(Table):
    """What a rank allocates once in a job, in that order: what stays, and what is gone before its first step."""

    row: Int64
    """Row of the operation of the first step that allocates it, or -1: before the first step."""
    size: Int64
    """Bytes."""
    until: Int64
    """Entry before whose allocation it is released, or -1: it stays."""
    pool: Int8
    """Of which stream's blocks it is, as :attr:`Buffers.pool`."""


@dataclass(frozen=True)
class RankStartup:
    """The start of the job on one rank."""

    rank: int
    """Global rank."""
    allocations: Startup


@dataclass(frozen=True)
class OpGraph:
    """A training step as operations, dependencies and buffers of each represented rank."""

    strings: tuple[str, ...]
    ranks: Int64
    """Global rank numbers of the represented ranks."""
    operations: Operations
    dependency_offsets: Int64
    """CSR: row ``i`` waits for ``dependencies[dependency_offsets[i]:dependency_offsets[i + 1]]`` to end."""
    dependencies: Int64
    segments: Segments
    buffers: Buffers
    shapes: tuple[Shape, ...] = ()
    groups: tuple[CommunicationGroup, ...] = ()
    host_bytes: tuple[int, ...] = ()
    """Bytes in the memory of the host that each represented rank holds over the whole step; empty for none."""
    startups: tuple[tuple[RankStartup, ...], ...] = ()
    """For each represented rank how its job began, and how on ranks of its stage that hold other shards of the
    optimizer's states; empty where that is not known."""

    def __post_init__(self) -> None:
        rows = len(self.operations)
        if len(self.dependency_offsets) != rows + 1 or self.dependency_offsets[-1] != len(self.dependencies):
            raise ValueError(
                f"OpGraph: {len(self.dependency_offsets)} dependency offsets ending at "
                f"{self.dependency_offsets[-1] if len(self.dependency_offsets) else 'nothing'} do not describe "
                f"{rows} operations with {len(self.dependencies)} dependencies"
            )
        if len(self.dependencies) and not 0 <= self.dependencies.min() <= self.dependencies.max() < rows:
            raise ValueError(f"OpGraph: a dependency lies outside the {rows} operations")

    def dependencies_of(self, row: int) -> Int64:
        """Rows that must have ended before ``row`` starts."""
        return self.dependencies[self.dependency_offsets[row] : self.dependency_offsets[row + 1]]

    def is_communication(self) -> Bool:
        """Which operations move data between ranks."""
        return np.isin(self.operations.kind, (OpKind.COLLECTIVE, OpKind.P2P))
