"""Arguments of device events: stream, correlation, and what NCCL and our own exporter say about a kernel."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np

from op_graphs.columns import Float64, Int8, Int32, Int64
from op_graphs.timeline import CommunicationGroup
from op_graphs.vocabulary import Communication, OpKind, Phase
from tracesim.kernel_kinds import parse_communication
from tracesim.readers.kineto_json import integer

_Structure = TypeVar("_Structure")

_ELEMENT_BYTES = {
    "double": 8, "float": 4, "half": 2, "bfloat16": 2, "long": 8, "int": 4, "short": 2, "char": 1, "byte": 1, "bool": 1,
    "float64": 8, "float32": 4, "float16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1,
    "complexfloat": 8, "complexdouble": 16,
}  # fmt: skip


class DeviceArguments(msgspec.Struct, gc=False):
    """The arguments of a kernel, copy or fill that are used; the rest is skipped while decoding."""

    device: Any = None
    stream: Any = None
    correlation: Any = None
    bytes: Any = None
    # torch.profiler, on communication kernels
    collective: Any = msgspec.field(default=None, name="Collective name")
    in_elements: Any = msgspec.field(default=None, name="In msg nelems")
    out_elements: Any = msgspec.field(default=None, name="Out msg nelems")
    dtype: Any = None
    group_size: Any = msgspec.field(default=None, name="Group size")
    group_name: Any = msgspec.field(default=None, name="Process Group Name")
    group_description: Any = msgspec.field(default=None, name="Process Group Description")
    group_ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    # our own exporter
    kind: Any = None
    phase: Any = None
    layer: Any = None
    module: Any = None
    chunk: Any = None
    microbatch: Any = None
    flops: Any = None
    communication: Any = None
    communication_bytes: Any = None
    wait_ns: Any = None


class CorrelationArgument(msgspec.Struct, gc=False):
    """The one argument of a launch that is used."""

    correlation: Any = None


class MemoryArguments(msgspec.Struct, gc=False):
    """Arguments of a ``[memory]`` event."""

    change: Any = msgspec.field(default=None, name="Bytes")
    allocated: Any = msgspec.field(default=None, name="Total Allocated")
    reserved: Any = msgspec.field(default=None, name="Total Reserved")
    device_type: Any = msgspec.field(default=None, name="Device Type")
    device_id: Any = msgspec.field(default=None, name="Device Id")


def decode_arguments(raw: Sequence[msgspec.Raw], structure: type[_Structure]) -> list[_Structure]:
    """Decode the arguments of some events; arguments that are no object count as empty."""
    decode = msgspec.json.Decoder(structure).decode
    try:
        return [decode(arguments) for arguments in raw]
    except msgspec.DecodeError:
        return [_lenient(decode, arguments, structure) for arguments in raw]


def _lenient(decode: Any, raw: msgspec.Raw, structure: type[_Structure]) -> _Structure:  # noqa: ANN401
    try:
        value: _Structure = decode(raw)
        return value
    except msgspec.DecodeError:
        return structure()


def integers(values: Sequence[Any], default: int = -1) -> Int64:
    """A column of ints out of whatever was written; the default where nothing was."""
    return np.array(
        [v if type(v) is int else default if v is None else integer(v, default) for v in values],
        dtype=np.int64,
    )


@dataclass(frozen=True)
class Facts:
    """What the arguments say of each device event, ``-1``, 0 or NONE where they say nothing."""

    kind: Int8
    """OTHER where the file does not say."""
    phase: Int8
    layer: Int32
    module: list[str]
    chunk: Int32
    microbatch: Int32
    flops: Float64
    bytes: Float64
    communication: Int8
    communication_bytes: Int64
    group: Int32
    wait: Int64
    groups: tuple[CommunicationGroup, ...]


def read_facts(arguments: Sequence[DeviceArguments], configured: dict[str, CommunicationGroup]) -> Facts:
    """Columns out of decoded arguments; ``configured`` are the groups of ``distributedInfo`` by name."""
    count = len(arguments)
    communication = np.zeros(count, dtype=np.int8)
    sizes = np.zeros(count, dtype=np.int64)
    group = np.full(count, -1, dtype=np.int32)
    groups: dict[CommunicationGroup, int] = {}
    known: dict[tuple[str, str, str, str], int] = {}
    for row, a in enumerate(arguments):
        if a.communication is not None:
            communication[row] = _member(Communication, a.communication)
        elif a.collective is not None:
            communication[row] = parse_communication(str(a.collective)) or Communication.UNKNOWN
        else:
            continue
        sizes[row] = a.communication_bytes if isinstance(a.communication_bytes, int) else _message_bytes(a)
        key = (str(a.group_name), str(a.group_description), str(a.group_ranks), str(a.group_size))
        if key not in known:
            found = _group(a, configured)
            known[key] = -1 if found is None else groups.setdefault(found, len(groups))
        group[row] = known[key]
    return Facts(
        kind=np.array([_member(OpKind, a.kind) for a in arguments], dtype=np.int8),
        phase=np.array([_member(Phase, a.phase) for a in arguments], dtype=np.int8),
        layer=integers([a.layer for a in arguments]).astype(np.int32),
        module=[str(a.module) if a.module is not None else "" for a in arguments],
        chunk=integers([a.chunk for a in arguments]).astype(np.int32),
        microbatch=integers([a.microbatch for a in arguments]).astype(np.int32),
        flops=_floats([a.flops for a in arguments]),
        bytes=_floats([a.bytes for a in arguments]),
        communication=communication,
        communication_bytes=sizes,
        group=group,
        wait=integers([a.wait_ns for a in arguments], 0),
        groups=tuple(groups),
    )


def configured_groups(distributed: dict[str, Any]) -> dict[str, CommunicationGroup]:
    """Process groups that ``distributedInfo.pg_config`` lists, by name."""
    found: dict[str, CommunicationGroup] = {}
    config = distributed.get("pg_config")
    for entry in config if isinstance(config, list) else []:
        if isinstance(entry, dict):
            name = str(entry.get("pg_name", ""))
            ranks = _ranks(entry.get("ranks"))
            size = integer(entry.get("pg_size"), len(ranks))
            found[name] = CommunicationGroup(_group_name(name, entry.get("pg_desc")), ranks, size)
    return found


def _group(a: DeviceArguments, configured: dict[str, CommunicationGroup]) -> CommunicationGroup | None:
    if a.group_name is None and a.group_ranks is None and a.group_description is None:
        return None
    ranks = _ranks(a.group_ranks)
    listed = configured.get(str(a.group_name))
    size = integer(a.group_size, len(ranks))
    if not ranks and listed is not None and listed.size == size:
        ranks = listed.ranks
    return CommunicationGroup(
        _group_name(str(a.group_name or ""), a.group_description), ranks, size or len(ranks)
    )


def _group_name(name: str, description: Any) -> str:  # noqa: ANN401
    """The description where it says something ("undefined" does not), else the name."""
    text = "" if description is None else str(description)
    return text if text not in ("", "undefined", "None") else name


def _ranks(value: Any) -> tuple[int, ...]:  # noqa: ANN401
    """Ranks out of a list or its text; () where the text is shortened with dots."""
    if isinstance(value, list):
        return tuple(integer(v, -1) for v in value)
    text = str(value or "")
    return () if "..." in text else tuple(int(v) for v in re.findall(r"\d+", text))


def _message_bytes(a: DeviceArguments) -> int:
    """Bytes of the full message: a gather's output and a reduction's or scatter's input, so the larger of the two."""
    elements = max(integer(a.in_elements, 0), integer(a.out_elements, 0))
    dtype = str(a.dtype or "").lower()
    return elements * (1 if dtype.startswith("float8") else _ELEMENT_BYTES.get(dtype, 0))


def _member(vocabulary: Any, value: Any) -> int:  # noqa: ANN401
    """Number of an enum member written by name, 0 if it is none of them (ROCm has a ``kind`` of its own)."""
    if not isinstance(value, str):
        return 0
    found = vocabulary.__members__.get(value.upper())
    return int(found) if found is not None else 0


def _floats(values: Sequence[Any]) -> Float64:
    return np.array([v if isinstance(v, (int, float)) else 0.0 for v in values], dtype=np.float64)
