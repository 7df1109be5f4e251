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


class PlaceArguments(msgspec.Struct, gc=False):
    """The arguments of every kernel, copy or fill that are used; the rest is skipped while decoding."""

    device: Any = None
    stream: Any = None
    correlation: Any = None
    bytes: Any = None
    external: Any = msgspec.field(default=None, name="External id")
    collective: Any = msgspec.field(default=None, name="Collective name")


class CommunicationArguments(msgspec.Struct, gc=False):
    """What torch.profiler says of a transfer, on its kernel and on ``record_param_comms``."""

    collective: Any = msgspec.field(default=None, name="Collective name")
    in_elements: Any = msgspec.field(default=None, name="In msg nelems")
    out_elements: Any = msgspec.field(default=None, name="Out msg nelems")
    dtype: Any = None
    group_size: Any = msgspec.field(default=None, name="Group size")
    group_name: Any = msgspec.field(default=None, name="Process Group Name")
    group_description: Any = msgspec.field(default=None, name="Process Group Description")
    group_ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    input_dims: Any = msgspec.field(default=None, name="Input Dims")
    input_types: Any = msgspec.field(default=None, name="Input type")
    sequence: Any = msgspec.field(default=None, name="Seq")
    destination: Any = msgspec.field(default=None, name="Dst Rank")
    origin: Any = msgspec.field(default=None, name="Src Rank")


class DeviceArguments(CommunicationArguments, gc=False):
    """Arguments that our own exporter writes on device slices."""

    device: Any = None
    stream: Any = None
    correlation: Any = None
    bytes: Any = None
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


class ShapeArguments(msgspec.Struct, gc=False):
    """The shapes of the inputs of an operator, undecoded."""

    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(b"null"), name="Input Dims")
    old_dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(b"null"), name="Input dims")


class ExternalArgument(msgspec.Struct, gc=False):
    """The number by which device events name the operator that launched them."""

    external: Any = msgspec.field(default=None, name="External id")


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
        return list(map(decode, raw))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return [_lenient(decode, arguments, structure) for arguments in raw]


def _lenient(decode: Any, raw: msgspec.Raw, structure: type[_Structure]) -> _Structure:  # noqa: ANN401
    try:
        value: _Structure = decode(raw)
        return value
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return structure()


def integers(values: Sequence[Any], default: int = -1) -> Int64:
    """A column of ints out of whatever was written; the default where nothing was."""
    try:
        # Raises for None and text; a float would be cut, so it must not get here.
        if float not in set(map(type, values)):
            return np.fromiter(values, dtype=np.int64, count=len(values))
    except (TypeError, ValueError, OverflowError):
        pass
    return np.array([default if v is None else integer(v, default) for v in values], dtype=np.int64)


@dataclass(frozen=True)
class Transfers:
    """What arguments say of some communication kernels, row for row."""

    communication: Int8
    """NONE where they do not say."""
    bytes: Int64
    group: Int32
    groups: tuple[CommunicationGroup, ...]
    sequence: Int64
    """-1 where they do not say: PyTorch has written it since 2026."""
    peer: Int32
    """Global rank that a send goes to or a receive comes from; -1 where they do not say."""


def read_transfers(
    arguments: Sequence[CommunicationArguments], configured: dict[str, CommunicationGroup]
) -> Transfers:
    """Columns out of decoded arguments; ``configured`` are the groups of ``distributedInfo`` by name."""
    communication = np.zeros(len(arguments), dtype=np.int8)
    sizes = np.zeros(len(arguments), dtype=np.int64)
    group = np.full(len(arguments), -1, dtype=np.int32)
    groups: dict[CommunicationGroup, int] = {}
    known: dict[tuple[str, str, str, str], int] = {}
    for row, a in enumerate(arguments):
        own = getattr(a, "communication", None)
        if own is not None:
            communication[row] = _member(Communication, own)
        elif a.collective is not None:
            communication[row] = parse_communication(str(a.collective)[:200]) or Communication.UNKNOWN
        else:
            continue
        size = getattr(a, "communication_bytes", None)
        sizes[row] = integer(size, 0) if isinstance(size, int) else message_bytes(a)
        key = (str(a.group_name), str(a.group_description), str(a.group_ranks), str(a.group_size))
        if key not in known:
            found = _group(a, configured)
            known[key] = -1 if found is None else groups.setdefault(found, len(groups))
        group[row] = known[key]
    sequence = np.maximum(integers([a.sequence for a in arguments]), -1)
    peer = np.where(
        communication == Communication.SEND,
        _small([a.destination for a in arguments]),
        np.where(communication == Communication.RECEIVE, _small([a.origin for a in arguments]), -1),
    )
    return Transfers(
        communication, sizes, group, tuple(groups), sequence, np.maximum(peer, -1).astype(np.int32)
    )


@dataclass(frozen=True)
class Facts:
    """What our own arguments say of each slice, ``-1``, 0 or NONE where they say nothing."""

    kind: Int8
    """OTHER where the file does not say."""
    phase: Int8
    layer: Int32
    module: list[str]
    chunk: Int32
    microbatch: Int32
    flops: Float64
    bytes: Float64
    wait: Int64
    transfers: Transfers


def read_facts(arguments: Sequence[DeviceArguments], configured: dict[str, CommunicationGroup]) -> Facts:
    """Columns out of decoded arguments; ``configured`` are the groups of ``distributedInfo`` by name."""
    return Facts(
        kind=np.array([_member(OpKind, a.kind) for a in arguments], dtype=np.int8),
        phase=np.array([_member(Phase, a.phase) for a in arguments], dtype=np.int8),
        layer=_small([a.layer for a in arguments]),
        module=[str(a.module) if a.module is not None else "" for a in arguments],
        chunk=_small([a.chunk for a in arguments]),
        microbatch=_small([a.microbatch for a in arguments]),
        flops=floats([a.flops for a in arguments]),
        bytes=floats([a.bytes for a in arguments]),
        wait=integers([a.wait_ns for a in arguments], 0),
        transfers=read_transfers(arguments, configured),
    )


def matrix_flops(operators: Sequence[str], shapes: Sequence[ShapeArguments]) -> list[float]:
    """Floating-point operations of matrix products by the shapes of their inputs, 2 m n k each; 0 if not known."""
    known: dict[tuple[str, bytes], float] = {}
    found = []
    for operator, arguments in zip(operators, shapes, strict=True):
        written = bytes(arguments.dims)
        key = (operator, written if written != b"null" else bytes(arguments.old_dims))
        if key not in known:
            known[key] = _product_flops(operator, _decoded(key[1]))
        found.append(known[key])
    return found


def _decoded(raw: bytes) -> Any:  # noqa: ANN401
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _product_flops(operator: str, dims: Any) -> float:  # noqa: ANN401
    place = _FIRST_MATRIX.get(operator.removeprefix("aten::"))
    if place is None or not isinstance(dims, list) or len(dims) < place + 2:
        return 0.0
    left, right = dims[place], dims[place + 1]
    if not (_is_shape(left) and _is_shape(right)) or not left or not right:
        return 0.0
    columns = right[-1] if len(right) > 1 else 1
    return 2.0 * float(np.prod([float(n) for n in left])) * columns


_FIRST_MATRIX = {
    "mm": 0, "bmm": 0, "_scaled_mm": 0, "_int_mm": 0, "mv": 0,
    "addmm": 1, "baddbmm": 1, "addbmm": 1, "addmv": 1, "_addmm_activation": 1,
}  # fmt: skip


def _is_shape(value: Any) -> bool:  # noqa: ANN401
    return (
        isinstance(value, list)
        and all(type(n) is int and 0 <= n < 1 << 40 for n in value)
        and len(value) <= 8
    )


def _small(values: Sequence[Any]) -> Int32:
    """A column of ints that fit 32 bits; -1 for others."""
    wide = integers(values)
    return np.where(np.abs(wide) < 1 << 31, wide, -1).astype(np.int32)


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


def _group(a: CommunicationArguments, configured: dict[str, CommunicationGroup]) -> CommunicationGroup | None:
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
    return () if "..." in text else tuple(int(v) for v in re.findall(r"\d{1,9}", text))


def message_bytes(a: CommunicationArguments) -> int:
    """Bytes of the full message: a gather's output and a reduction's or scatter's input, so the larger of the two."""
    elements = max(integer(a.in_elements, 0), integer(a.out_elements, 0))
    if a.in_elements is None and a.out_elements is None:
        elements = _elements(a.input_dims)
    dtype = str(a.dtype or _first_text(a.input_types)).lower()
    dtype = dtype.removeprefix("c10::").removeprefix("tensor(").rstrip(")")
    size = elements * (1 if dtype.startswith("float8") else _ELEMENT_BYTES.get(dtype, 0))
    return size if size < 1 << 62 else 0


def _elements(dims: Any) -> int:  # noqa: ANN401
    """Elements of the first input: its shape, or those of a list of tensors."""
    first = dims[0] if isinstance(dims, list) and dims else None
    shapes = [first] if _is_shape(first) else first
    if not isinstance(shapes, list):
        return 0
    return sum(int(np.prod([float(n) for n in s])) for s in shapes if _is_shape(s) and s)


def _first_text(value: Any) -> str:  # noqa: ANN401
    return str(value[0]) if isinstance(value, list) and value else ""


def _member(vocabulary: Any, value: Any) -> int:  # noqa: ANN401
    """Number of an enum member written by name, 0 if it is none of them (ROCm has a ``kind`` of its own)."""
    if not isinstance(value, str):
        return 0
    found = vocabulary.__members__.get(value.upper())
    return int(found) if found is not None else 0


def floats(values: Sequence[Any]) -> Float64:
    """A column of finite numbers; 0 where there is none."""
    return np.array([_finite(v) for v in values], dtype=np.float64)


def _finite(value: Any) -> float:  # noqa: ANN401
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e300 else 0.0
