"""The closed vocabularies of tracesim: what an operation, stream, buffer or collective *is*.

Every enum value is stored in a column of small integers, so the numbers are part of the file formats: append,
never renumber. What an operation is, is a field here and is never read out of its name.
"""

from __future__ import annotations

from enum import IntEnum


class OpKind(IntEnum):
    """What an operation computes, at the granularity of one kernel (or one host call)."""

    OTHER = 0
    GEMM = 1
    GROUPED_GEMM = 2
    ATTENTION = 3
    NORM = 4
    SOFTMAX = 5
    ELEMENTWISE = 6
    REDUCTION = 7
    EMBEDDING = 8
    LOSS = 9
    ROUTER = 10
    PERMUTE = 11
    CAST = 12
    CONVOLUTION = 13
    OPTIMIZER = 14
    MEMCPY = 15
    MEMSET = 16
    COLLECTIVE = 17
    P2P = 18
    HOST = 19
    ANNOTATION = 20
    SCAN = 21
    """A kernel of a recurrence over chunks of a sequence (state spaces)."""

    @property
    def is_communication(self) -> bool:
        """Whether the operation moves data between ranks."""
        return self in (OpKind.COLLECTIVE, OpKind.P2P)


class Phase(IntEnum):
    """The part of the training step an operation belongs to."""

    UNKNOWN = 0
    FORWARD = 1
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3
    RECOMPUTE = 4
    OPTIMIZER = 5
    GRADIENT_SYNC = 6
    PARAM_SYNC = 7


class Communication(IntEnum):
    """Which transfer a communication operation performs; ``NONE`` for everything else."""

    NONE = 0
    ALL_REDUCE = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    ALL_TO_ALL = 4
    BROADCAST = 5
    REDUCE = 6
    SEND = 7
    RECEIVE = 8
    SEND_RECEIVE = 9
    BARRIER = 10
    GATHER = 11
    SCATTER = 12
    UNKNOWN = 13


class Dimension(IntEnum):
    """The parallel dimension a communication group spans."""

    NONE = 0
    TP = 1
    CP = 2
    EP = 3
    PP = 4
    DP = 5
    WORLD = 6
    EDP = 7
    """Expert data parallel: ranks that hold the same experts."""
    ETP = 8
    """Expert tensor parallel: ranks that share the cut of an expert."""
    ETP_EP = 9
    """All ranks among which the experts of a layer are dealt out and cut."""


class Stream(IntEnum):
    """Logical streams of one simulated rank, in the order their tracks are drawn.

    Sends and receives to each neighbour have a stream of their own, so a send never queues behind a receive
    whose partner has not arrived. Copies to and from the memory of the host have one each, because a link carries
    both directions at once.
    """

    COMPUTE = 0
    TP = 1
    CP = 2
    EP = 3
    PP_RECEIVE_PREVIOUS = 4
    PP_SEND_NEXT = 5
    PP_RECEIVE_NEXT = 6
    PP_SEND_PREVIOUS = 7
    DP = 8
    HOST = 9
    COPY_TO_HOST = 10
    COPY_TO_DEVICE = 11


REDUCTION_POOL = len(Stream)
"""Blocks of the stream on which PyTorch's FSDP reduces gradients. It gathers on another; both are drawn as one, but the
allocator has free blocks for each."""


class TrackRole(IntEnum):
    """What a track of a :class:`~op_graphs.timeline.Timeline` shows.

    A simulated rank has one track for each logical stream; the streams of a measured device carry ``DEVICE``
    because a real stream may hold kernels of any kind.
    """

    PIPELINE = 0
    COMPUTE = 1
    COMMUNICATION_TP = 2
    COMMUNICATION_CP = 3
    COMMUNICATION_EP = 4
    COMMUNICATION_PP = 5
    COMMUNICATION_DP = 6
    DEVICE = 7
    HOST = 8
    ANNOTATION = 9

    @property
    def is_device(self) -> bool:
        """Whether slices on such a track occupy the device (kernels, copies, communication)."""
        return TrackRole.COMPUTE <= self <= TrackRole.DEVICE


STREAM_ROLES: dict[Stream, TrackRole] = {
    Stream.COMPUTE: TrackRole.COMPUTE,
    Stream.TP: TrackRole.COMMUNICATION_TP,
    Stream.CP: TrackRole.COMMUNICATION_CP,
    Stream.EP: TrackRole.COMMUNICATION_EP,
    Stream.PP_RECEIVE_PREVIOUS: TrackRole.COMMUNICATION_PP,
    Stream.PP_SEND_NEXT: TrackRole.COMMUNICATION_PP,
    Stream.PP_RECEIVE_NEXT: TrackRole.COMMUNICATION_PP,
    Stream.PP_SEND_PREVIOUS: TrackRole.COMMUNICATION_PP,
    Stream.DP: TrackRole.COMMUNICATION_DP,
    Stream.HOST: TrackRole.HOST,
    Stream.COPY_TO_HOST: TrackRole.DEVICE,
    Stream.COPY_TO_DEVICE: TrackRole.DEVICE,
}

ROLE_DIMENSIONS: dict[TrackRole, Dimension] = {
    TrackRole.COMMUNICATION_TP: Dimension.TP,
    TrackRole.COMMUNICATION_CP: Dimension.CP,
    TrackRole.COMMUNICATION_EP: Dimension.EP,
    TrackRole.COMMUNICATION_PP: Dimension.PP,
    TrackRole.COMMUNICATION_DP: Dimension.DP,
}


class MemoryCategory(IntEnum):
    """What a buffer holds; the memory of a rank is reported and drawn by these categories."""

    WEIGHTS = 0
    GRADIENTS = 1
    OPTIMIZER_STATES = 2
    ACTIVATIONS = 3
    TEMPORARY = 4
    COMMUNICATION = 5


class FlowKind(IntEnum):
    """Why two slices are joined by an arrow."""

    P2P = 0
    COLLECTIVE = 1
    LAUNCH = 2
    FORWARD_BACKWARD = 3
    MATCH = 4


class DType(IntEnum):
    """Element types, with their size in bytes as :attr:`itemsize`."""

    NONE = 0
    FP32 = 1
    TF32 = 2
    FP16 = 3
    BF16 = 4
    FP8 = 5
    FP4 = 6
    INT64 = 7
    INT32 = 8
    INT8 = 9

    @property
    def itemsize(self) -> float:
        """Bytes an element takes (0.5 for 4-bit types, 0 for ``NONE``)."""
        return _ITEM_SIZES[self]


_ITEM_SIZES: dict[DType, float] = {
    DType.NONE: 0,
    DType.FP32: 4,
    DType.TF32: 4,
    DType.FP16: 2,
    DType.BF16: 2,
    DType.FP8: 1,
    DType.FP4: 0.5,
    DType.INT64: 8,
    DType.INT32: 4,
    DType.INT8: 1,
}
