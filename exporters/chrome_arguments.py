"""What a profiler file says of a slice: its category, name and arguments, as PyTorch and Kineto write them.

Argument names: ``libkineto/src/output_json.cpp`` of Kineto and ``torch/csrc/distributed/c10d/ParamCommsUtils.hpp`` of
PyTorch.
"""

from __future__ import annotations

import numpy as np

from op_graphs.columns import Int64
from op_graphs.timeline import CommunicationGroup, Timeline
from op_graphs.vocabulary import Communication, OpKind, TrackRole

COLLECTIVE_NAMES: dict[Communication, str] = {
    Communication.ALL_REDUCE: "allreduce",
    Communication.ALL_GATHER: "_allgather_base",
    Communication.REDUCE_SCATTER: "_reduce_scatter_base",
    Communication.ALL_TO_ALL: "all_to_all",
    Communication.BROADCAST: "broadcast",
    Communication.REDUCE: "reduce",
    Communication.SEND: "send",
    Communication.RECEIVE: "recv",
    Communication.SEND_RECEIVE: "send_recv",
    Communication.BARRIER: "barrier",
    Communication.GATHER: "gather",
    Communication.SCATTER: "scatter",
}

_KERNELS: dict[Communication, str] = {
    Communication.ALL_REDUCE: "AllReduce_Sum_u8_RING_LL",
    Communication.BARRIER: "AllReduce_Sum_u8_RING_LL",
    Communication.ALL_GATHER: "AllGather_RING_LL",
    Communication.REDUCE_SCATTER: "ReduceScatter_Sum_u8_RING_LL",
    Communication.BROADCAST: "Broadcast_RING_LL",
    Communication.REDUCE: "Reduce_Sum_u8_RING_LL",
}
"""Kernels of NCCL by collective; all others are its ``SendRecv``."""


def kernel_name(communication: Communication) -> str:
    """The name under which tools look for the kernel of a collective; the element type is bytes."""
    return f"ncclDevKernel_{_KERNELS.get(communication, 'SendRecv')}(ncclDevKernelArgsStorage<4096ul>)"


def group_size(group: CommunicationGroup) -> int:
    """Members of a group, 0 if unknown."""
    return len(group.ranks) or group.size


def message_elements(timeline: Timeline) -> tuple[Int64, Int64]:
    """``In msg nelems`` and ``Out msg nelems`` of each slice, counted in bytes (``dtype`` is ``Byte``).

    Timelines hold the full message; a rank gives its shard to a gather and gets its shard of a reduce-scatter.
    """
    slices = timeline.slices
    sizes = np.array([max(group_size(group), 1) for group in timeline.groups] + [1], dtype=np.int64)
    size = sizes[slices.group]
    full = slices.communication_bytes
    shard = full // size
    gives_shard = np.isin(slices.communication, (Communication.ALL_GATHER, Communication.GATHER))
    gets_shard = np.isin(slices.communication, (Communication.REDUCE_SCATTER, Communication.SCATTER))
    return np.where(gives_shard, shard, full), np.where(gets_shard, shard, full)


def communication_arguments(
    timeline: Timeline, communication: Communication, group: int
) -> dict[str, object]:
    """The constant arguments of a communication kernel."""
    found: dict[str, object] = {}
    if communication in COLLECTIVE_NAMES:
        found["Collective name"] = COLLECTIVE_NAMES[communication]
    found["dtype"] = "Byte"
    if group >= 0:
        members = timeline.groups[group]
        found["Group size"] = group_size(members)
        found["Process Group Name"] = str(group)
        found["Process Group Description"] = members.name
        found["Process Group Ranks"] = str(list(members.ranks))
    return found


def category(role: TrackRole, kind: OpKind, is_launch: bool, on_device: bool) -> str:
    """The ``cat`` of a slice on a track of this role, drawn on the device or the host side."""
    if kind is OpKind.ANNOTATION or role in (TrackRole.PIPELINE, TrackRole.ANNOTATION):
        return "gpu_user_annotation" if on_device else "user_annotation"
    if on_device:
        return {OpKind.MEMCPY: "gpu_memcpy", OpKind.MEMSET: "gpu_memset"}.get(kind, "kernel")
    return "cuda_runtime" if is_launch else "cpu_op"


def distributed_info(timeline: Timeline, rank: int) -> dict[str, object]:
    """``distributedInfo``: the groups that this rank is a member of, or whose members are not known."""
    groups = [
        {
            "pg_name": str(index),
            "pg_desc": group.name,
            "backend_config": "cuda:nccl",
            "pg_size": group_size(group),
            "ranks": list(group.ranks),
        }
        for index, group in enumerate(timeline.groups)
        if not group.ranks or rank in group.ranks
    ]
    return {
        "backend": "nccl",
        "rank": max(rank, 0),
        "world_size": max(timeline.world_size, len(timeline.ranks)),
        "pg_count": len(groups),
        "pg_config": groups,
    }
