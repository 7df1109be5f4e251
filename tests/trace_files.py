"""A small whole file of every format that is read, for tests of the readers."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import sqlite3
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def kineto() -> dict[str, Any]:
    """One launch, one communication kernel, one annotation, arrows, memory, a begin and end pair."""
    place = {"pid": 1, "tid": 2}
    transfer = {
        "Collective name": "allreduce",
        "In msg nelems": 64,
        "dtype": "Float",
        "Process Group Ranks": "[0, 1]",
    }
    memory = {"Bytes": 8, "Total Allocated": 64, "Total Reserved": 128, "Device Type": 1, "Device Id": 0}
    shapes = {"Input Dims": [[2, 3], [3, 4]], "External id": 5}
    return {
        "deviceProperties": [{"id": 0, "name": "GPU"}],
        "distributedInfo": {"rank": 1, "world_size": 2, "pg_config": [{"pg_name": "0", "ranks": [0, 1]}]},
        "baseTimeNanoseconds": 1000,
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
            {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", **place, "ts": 0, "dur": 50.5},
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", **place, "ts": 1.5, "dur": 9, "args": shapes},
            {"ph": "X", "cat": "cuda_runtime", "name": "launch", **place, "ts": 2, "dur": 1,
             "args": {"correlation": 9}},
            {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 12, "dur": 5,
             "args": {"stream": 7, "device": 0, "correlation": 9, "External id": 5}},
            {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce", "pid": 0, "tid": 8, "ts": 13, "dur": 5,
             "args": {"stream": 8, "device": 0, "correlation": 10, **transfer}},
            {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "id": 1, **place, "ts": 2},
            {"ph": "f", "cat": "fwdbwd", "name": "fwdbwd", "id": 1, **place, "ts": 3, "bp": "e"},
            {"ph": "i", "name": "[memory]", **place, "ts": 3, "s": "t", "args": memory},
            {"ph": "C", "name": "power", **place, "ts": 4, "args": {"W": 300}},
            {"ph": "B", "name": "phase", **place, "ts": 60}, {"ph": "E", **place, "ts": 70},
        ],
    }  # fmt: skip


def micro_operations() -> list[dict[str, Any]]:
    """Two stages of one data-parallel rank: stage 1 runs what stage 0 sends."""

    def event(name: str, tid: int, ts: float, dur: float, microbatch: int | None = 0) -> dict[str, Any]:
        args = {"step": 4, "model_chunk": 0, "mb_id": microbatch, "seq_id": 0}
        return {
            "name": name,
            "cat": name,
            "pid": 0,
            "tid": tid,
            "ts": ts,
            "dur": dur,
            "ph": "X",
            "args": args,
        }

    names = {
        0: "PP rank 0, TP rank 0, compute",
        1: "PP rank 0, TP rank 0, pp-comm",
        10: "PP rank 1, TP rank 0, compute",
    }
    return [
        event("forward-compute", 0, 10.0, 5.0), event("forward-send", 1, 15.0, 1.0, -1),
        event("forward-compute", 10, 16.0, 20.0), event("backward-compute", 10, 36.0, 40.0),
        *({"name": "thread_name", "pid": 0, "tid": t, "ph": "M", "args": {"name": name}} for t, name in names.items()),
    ]  # fmt: skip


def pytorch_execution_trace() -> dict[str, Any]:
    """A root with an operator in an operator, and a transfer of 64 floats in group ``tp``."""

    def node(identifier: int, name: str, parent: int, **more: Any) -> dict[str, Any]:
        return {"id": identifier, "name": name, "ctrl_deps": parent, "tid": 1, **more}

    inputs = {
        "values": [[[1, 2, 0, 64, 4, "cuda:0"]], 79, ["13", "tp"], 0, "allreduce"],
        "shapes": [],
        "types": [],
    }
    attributes = [{"name": "collective_name", "value": "allreduce"}, {"name": "pg_name", "value": "13"},
                  {"name": "pg_desc", "value": "tp"}, {"name": "pg_size", "value": 2}]  # fmt: skip
    nodes = [node(2, "root", 1), node(3, "aten::linear", 2), node(5, "aten::addmm", 3)]
    return {
        "schema": "1.1.0",
        "pid": 1,
        "nodes": [*nodes, node(7, "record_param_comms", 2, inputs=inputs, attrs=attributes)],
    }


def varint(value: int) -> bytes:
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def chakra_message(*fields: bytes) -> bytes:
    message = b"".join(fields)
    return varint(len(message)) + message


def chakra_node(
    identifier: int, name: str, kind: int, needs: Iterable[int], us: int, **attributes: int
) -> bytes:
    """A node of ``et_def.proto`` with 64-bit integer attributes."""
    packed = b"".join(varint(n) for n in needs)
    written = [field(10, field(1, key.encode()) + field(9, value)) for key, value in attributes.items()]
    return chakra_message(
        field(1, identifier),
        field(2, name.encode()),
        field(3, kind),
        field(5, packed),
        field(7, us),
        *written,
    )


def chakra() -> bytes:
    """Host operator (3 us), its kernel (5 us), and an all-reduce of 256 bytes (2 us) behind the kernel."""
    header = chakra_message(field(2, field(1, b"schema") + field(29, b"1.1.0")))
    return b"".join([
        header,
        chakra_node(1, "aten::mm", 4, [], 3, is_cpu_op=1, tid=2),
        chakra_node(2, "gemm_kernel", 4, [1], 5, is_cpu_op=0, stream=7),
        chakra_node(3, "nccl_all_reduce", 7, [2], 2, is_cpu_op=0, stream=8, comm_type=0, comm_size=256),
    ])  # fmt: skip


def chakra_documents() -> str:
    """The same as JSON, one document a node."""

    def attributes(**values: int) -> list[dict[str, Any]]:
        return [{"name": key, "int64Val": str(value)} for key, value in values.items()]

    nodes = [
        {"id": "1", "name": "aten::mm", "type": "COMP_NODE", "ctrlDeps": [], "durationMicros": "3",
         "attr": attributes(is_cpu_op=1, tid=2)},
        {"id": "2", "name": "gemm_kernel", "type": "COMP_NODE", "dataDeps": ["1"], "durationMicros": "5",
         "attr": attributes(is_cpu_op=0, stream=7)},
        {"id": "3", "name": "nccl_all_reduce", "type": "COMM_COLL_NODE", "ctrlDeps": [], "dataDeps": ["2"],
         "durationMicros": "2",
         "attr": attributes(is_cpu_op=0, stream=8, comm_type=0, comm_size=256)},
    ]  # fmt: skip
    documents = [{"attr": [{"name": "schema", "stringVal": "1.1.0"}]}, *nodes]
    return "".join(json.dumps(document, indent=2) for document in documents)


def memory_snapshot() -> dict[str, Any]:
    """100 bytes are there before recording, 1000 come, 1000 go; a 2 MiB segment comes, then an error."""

    def event(action: str, us: int, size: int) -> dict[str, Any]:
        return {"action": action, "addr": 1, "size": size, "stream": 0, "time_us": us, "frames": []}

    events = [
        event("segment_alloc", 10, 2 << 20), event("alloc", 11, 1000), event("free_requested", 20, 1000),
        event("free_completed", 21, 1000), event("oom", 30, 1 << 30),
    ]  # fmt: skip
    marks = [
        {"stage": stage, "name": "ProfilerStep#2", "time_us": us} for stage, us in (("START", 5), ("END", 40))
    ]
    segment = {"device": 0, "address": 1, "total_size": 3 << 20, "allocated_size": 512, "blocks": []}
    return {"segments": [segment], "device_traces": [events], "external_annotations": marks}


def memory_timeline() -> list[Any]:
    """Two instants, in us: 100 bytes of parameters, then 50 of gradients too."""
    return [
        [1_700_000_000_000_000, 1_700_000_000_000_010],
        [[0, 100, 0, 0, 0, 0, 0, 0, 0], [0, 100, 0, 0, 0, 0, 50, 0, 0]],
    ]


def nsys() -> bytes:
    """A launch, its kernel on stream 7 of GPU 0, a copy of 64 bytes and an NVTX range."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.sqlite"
        database = sqlite3.connect(path)
        database.executescript("""
            CREATE TABLE StringIds (id INTEGER, value TEXT);
            INSERT INTO StringIds VALUES (1, 'cudaLaunchKernel_v7000'), (2, 'volta_sgemm_128x32_nn');
            CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT);
            INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA A100');
            CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, end, globalTid, correlationId, nameId);
            INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (100, 110, 16777218, 5, 1);
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, streamId, correlationId, demangledName);
            INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (120, 150, 0, 7, 5, 2);
            CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start, end, deviceId, streamId, correlationId, bytes, copyKind);
            INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (150, 160, 0, 7, 6, 64, 1);
            CREATE TABLE NVTX_EVENTS (start, end, text, textId, globalTid);
            INSERT INTO NVTX_EVENTS VALUES (90, 200, 'step', NULL, 16777218), (91, NULL, 'mark', NULL, 16777218);
        """)
        database.commit()
        database.close()
        return path.read_bytes()


def foreign_perfetto() -> bytes:
    """A named GPU track with a slice, a host thread with an interned name, and a counter."""
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent
    from perfetto.trace_builder.proto_builder import TraceProtoBuilder

    builder = TraceProtoBuilder()
    for uuid, name in ((1, "GPU stream 7"), (2, "main")):
        packet = builder.add_packet()
        packet.track_descriptor.uuid, packet.track_descriptor.name = uuid, name
    packet = builder.add_packet()
    packet.track_descriptor.uuid, packet.track_descriptor.name = 3, "bytes in use"
    packet.track_descriptor.counter.unit = 3

    def event(time: int, kind: int, track: int, **more: Any) -> None:
        packet = builder.add_packet()
        packet.timestamp, packet.trusted_packet_sequence_id = time, 1
        packet.track_event.type, packet.track_event.track_uuid = kind, track
        for key, value in more.items():
            setattr(packet.track_event, key, value)

    packet = builder.add_packet()
    packet.trusted_packet_sequence_id, packet.sequence_flags = 1, 1
    packet.interned_data.event_names.add(iid=4, name="loop")
    event(1000, TrackEvent.TYPE_SLICE_BEGIN, 1, name="volta_sgemm_128x32_nn")
    event(1000, TrackEvent.TYPE_SLICE_BEGIN, 2, name_iid=4)
    event(3000, TrackEvent.TYPE_SLICE_END, 1)
    event(4000, TrackEvent.TYPE_COUNTER, 3, counter_value=64)
    event(9000, TrackEvent.TYPE_SLICE_END, 2)
    return builder.serialize()


def parquet() -> bytes:
    """The first two operations of :func:`micro_operations`, as a table; needs pyarrow."""
    import pyarrow
    from pyarrow import parquet as writer

    columns = {
        "dp_rank": [0, 0], "stage": [0, 1], "optype": ["forward-compute", "forward-compute"], "start_ts": [0.0, 1.0],
        "duration": [1.0, 2.0], "step": [4, 4], "mb_id": [0, 0], "mc": [0, 0],
    }  # fmt: skip
    buffer = io.BytesIO()
    writer.write_table(pyarrow.table(columns), buffer)
    return buffer.getvalue()


JSON_FILES = {
    "kineto.json": kineto,
    "kineto_list.json": lambda: kineto()["traceEvents"],
    "micro.json": micro_operations,
    "et.json": pytorch_execution_trace,
    "memory.json": memory_timeline,
}
"""Files whose text is JSON: name -> what makes the document."""


def all_files() -> dict[str, bytes]:
    """Name -> content of one file of every format (without those that need an optional package)."""
    return {
        **{name: json.dumps(make()).encode() for name, make in JSON_FILES.items()},
        "kineto.json.gz": gzip.compress(json.dumps(kineto()).encode()),
        "chakra.et": chakra(),
        "chakra.0.json": chakra_documents().encode(),
        "snapshot.pickle": pickle.dumps(memory_snapshot()),
        "nsys.sqlite": nsys(),
        "foreign.pftrace": foreign_perfetto(),
    }
