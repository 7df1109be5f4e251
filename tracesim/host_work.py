"""What launching an operation costs the host, by what the framework runs for it.

The unit is the forward call of one module: Python of the module and of its autograd function, its checks, and the
launch of its kernel. ``host.operation_us`` of a profile is its time. Everything else is a share of it, which does not
depend on the machine: both are Python and C++ of the same interpreter and libraries. The shares are measured in public
traces (``python -m benchmarks.host_kinds`` prints them; ``docs/modeling.md`` has the table):

- a product of a linear, forward or either product of its backward node: one module;
- another module or a fused function (norm, attention, activation, rotation, permutation, exchange): one module, its
  backward node half as much again;
- an operation of PyTorch itself with its kernel, forward or as a node of the engine: ``PLAIN`` for each kernel;
- a kernel that a module launches besides from C++ (casts and their maxima): ``INSIDE``;
- a collective that a module issues: ``COLLECTIVE``; a ring inside a product is launched from C++;
- a checkpoint: ``CHECKPOINT`` in the forward pass, ``CHECKPOINT_AGAIN`` when its part runs again.

Kernels of which a rank has one for each of its experts are launched in a loop of C++ and take ``host.launch_us`` each.
"""

from __future__ import annotations

import numpy as np

from op_graphs.columns import Float64, Int64
from op_graphs.graph import GemmShape, MemoryShape, OpGraph, Shape
from op_graphs.vocabulary import OpKind, Phase, Stream

MODULE = 1.0
BACKWARD = 1.5
PLAIN = 0.3
INSIDE = 0.25
COLLECTIVE = 0.25
"""In traces 0.55 of a module, with what the profiler records of a collective inside it."""
CHECKPOINT, CHECKPOINT_AGAIN = 1.5, 0.9
"""149 and 94 us where an operation of PyTorch takes 30 (``tracelens/mi300__resnet_act_checkpoint``)."""

_INSIDE = (OpKind.CAST, OpKind.REDUCTION)
_PLAIN = (
    OpKind.ELEMENTWISE,
    OpKind.MEMCPY,
    OpKind.MEMSET,
    OpKind.LOSS,
    OpKind.ROUTER,
    OpKind.PERMUTE,
)
_BACKWARD = (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)


def launch_work(graph: OpGraph, rows: Int64, *, launches_experts: bool) -> tuple[Float64, Int64]:
    """Host work of launching each row.

    Args:
        graph: whose rows.
        rows: row numbers.
        launches_experts: whether a grouped product is launched expert by expert.

    Returns:
        Shares of the time of a module, and how many more kernels are launched in a loop.
    """
    operations = graph.operations
    columns = (operations.kind, operations.stream, operations.phase, operations.shape)
    key = np.stack([column[rows].astype(np.int64) for column in columns], axis=1)
    kinds, inverse = np.unique(key, axis=0, return_inverse=True)
    found = [
        _work(
            OpKind(kind),
            Stream(stream),
            Phase(phase),
            graph.shapes[shape] if shape >= 0 else None,
            launches_experts,
        )
        for kind, stream, phase, shape in kinds.tolist()
    ]
    shares = np.array([share for share, _ in found], dtype=np.float64)
    further = np.array([count for _, count in found], dtype=np.int64)
    return shares[inverse.ravel()], further[inverse.ravel()]


def _work(
    kind: OpKind, stream: Stream, phase: Phase, shape: Shape, launches_experts: bool
) -> tuple[float, int]:
    module = BACKWARD if phase in _BACKWARD else MODULE
    if stream == Stream.TP:
        # Rings inside a product are launched by C++.
        return (COLLECTIVE, 0) if kind == OpKind.COLLECTIVE else (0.0, 1)
    if kind == OpKind.HOST:
        return _of_host(phase, shape), 0
    if kind.is_communication:
        return module + COLLECTIVE, 0
    if isinstance(shape, GemmShape):
        grouped = kind == OpKind.GROUPED_GEMM and launches_experts
        return MODULE, shape.count - 1 if grouped else 0
    if not isinstance(shape, MemoryShape):
        return module, 0
    kernels = max(1, shape.passes)
    launches = shape.launches or kernels
    if kind in _INSIDE and phase != Phase.OPTIMIZER:
        return INSIDE, kernels - 1
    if shape.function:
        return module + PLAIN * (launches - 1), 0
    if kind in _PLAIN or (kind == OpKind.NORM and shape.access == "stream"):
        return PLAIN * launches, 0
    return module * (kernels if kind == OpKind.NORM else 1), 0


def _of_host(phase: Phase, shape: Shape) -> float:
    if shape is None:
        return CHECKPOINT_AGAIN if phase == Phase.RECOMPUTE else CHECKPOINT
    return PLAIN * max(1, shape.launches) if isinstance(shape, MemoryShape) else 0.0
