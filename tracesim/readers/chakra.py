"""Reader of Chakra execution traces: protobuf ``.et``, its JSON form (documents after one another), ``workload_graph``.

The schema is ``et_def.proto`` of https://github.com/mlcommons/chakra; the messages are small, so they are walked by
hand. Durations come from the file (microseconds), starts from the dependencies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from op_graphs.timeline import CommunicationGroup, Timeline
from op_graphs.vocabulary import Communication
from tracesim.errors import TraceError
from tracesim.readers.assembled import AssembledTimeline
from tracesim.readers.execution_traces import Node, place_by_dependencies
from tracesim.readers.kineto_json import integer
from tracesim.readers.protobuf_columns import DamagedMessageError, message_values
from tracesim.readers.sources import Source

_METADATA, _SEND, _RECEIVE, _COLLECTIVE = 1, 5, 6, 7
_NODE_TYPES = {"METADATA_NODE": 1, "MEM_LOAD_NODE": 2, "MEM_STORE_NODE": 3, "COMP_NODE": 4,
               "COMM_SEND_NODE": 5, "COMM_RECV_NODE": 6, "COMM_COLL_NODE": 7}  # fmt: skip
_COLLECTIVES = (
    Communication.ALL_REDUCE, Communication.REDUCE, Communication.ALL_GATHER, Communication.GATHER,
    Communication.SCATTER, Communication.BROADCAST, Communication.ALL_TO_ALL, Communication.REDUCE_SCATTER,
    Communication.REDUCE_SCATTER, Communication.BARRIER,
)  # fmt: skip
"""Transfers in the order of ``CollectiveCommType``."""

_RANK_IN_NAME = re.compile(r"\.(\d{1,6})\.(?:et|json)(?:\.gz|\.zst)?$")
_LONGEST_US = 1 << 50


def recognise(source: Source) -> bool:
    """Whether a file is a Chakra trace in one of its forms."""
    data = source.data
    head = data[:65536].lstrip()
    if head.startswith(b"{"):
        return b'"workload_graph"' in head or (b'"ctrlDeps"' in head and b'"attr"' in head)
    return b"\n\x06schema\xea\x01" in data[:64] or (_is_chakra_name(source) and not head.startswith(b"["))


def _is_chakra_name(source: Source) -> bool:
    return re.search(r"\.et(\.gz|\.zst)?$", source.path.name) is not None


def read(source: Source) -> Timeline:
    """Operations placed by their dependencies: host threads, device streams.

    Raises:
        TraceError: if the file is damaged or of another schema.
    """
    data = bytes(source.data)
    is_json = data[:65536].lstrip().startswith(b"{")
    try:
        nodes = list(_json_nodes(data) if is_json else _protobuf_nodes(data))
    except (
        DamagedMessageError,
        msgspec.DecodeError,
        UnicodeDecodeError,
        RecursionError,
        ValueError,
    ) as error:
        raise TraceError(
            f"{source.path}: damaged or truncated Chakra trace ({str(error)[:200]}). Copy or convert it again."
        ) from error
    if not nodes:
        raise TraceError(f"{source.path}: the Chakra trace holds no operation. Convert it again.")
    found = _RANK_IN_NAME.search(source.path.name)
    built = AssembledTimeline(source.path)
    rank = built.rank(int(found[1]) if found else -1)
    return place_by_dependencies(built, rank, nodes, properties={"format": "Chakra execution trace"})


def _protobuf_nodes(data: bytes) -> Iterator[Node]:
    for number, message in enumerate(_messages(data)):
        if not number:
            continue
        fields: dict[int, Any] = {}
        lists: dict[int, list[int]] = {4: [], 5: []}
        attributes: dict[str, Any] = {}
        for (tag,), value in message_values(message):
            if tag in lists:
                lists[tag] += _varints(value) if isinstance(value, bytes) else [value]
            elif tag == 10 and isinstance(value, bytes):
                key, content = _attribute(value)
                attributes[key] = content
            else:
                fields[tag] = value
        name = fields.get(2, b"")
        node = _node(
            integer(fields.get(1), 0),
            name.decode("utf-8", "replace") if isinstance(name, bytes) else "",
            integer(fields.get(3), 0),
            attributes,
        )
        if node is not None:
            node.dependencies = lists[4] + lists[5]
            node.duration = _nanoseconds(fields.get(7))
            yield node


def _messages(data: bytes) -> Iterator[bytes]:
    """Messages of a file, each with its length before it."""
    position = 0
    while position < len(data):
        length = shift = 0
        while True:
            if position >= len(data) or shift > 63:
                raise DamagedMessageError(f"a length is cut off at byte {position}")
            byte = data[position]
            position += 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        if position + length > len(data):
            raise DamagedMessageError(f"a message runs {position + length - len(data)} bytes past the end")
        yield data[position : position + length]
        position += length


def _varints(packed: bytes) -> list[int]:
    found, value, shift = [], 0, 0
    for byte in packed:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            found.append(value)
            value = shift = 0
    return found


def _attribute(message: bytes) -> tuple[str, Any]:
    """Name and value of an attribute; lists and floats stay undecoded."""
    name, content = "", None
    for (tag,), value in message_values(message):
        if tag == 1 and isinstance(value, bytes):
            name = value.decode("utf-8", "replace")
        elif tag > 2:
            content = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return name, content


def _json_nodes(data: bytes) -> Iterator[Node]:
    for entry in _json_entries(data):
        if not isinstance(entry, dict):
            continue
        # The oldest form writes Id, Name and NodeType, and its attributes beside them.
        attributes = {a.get("name"): _json_value(a) for a in _dicts(entry.get("attr"))} or entry
        kind = entry.get("type", entry.get("NodeType", 0))
        node = _node(
            integer(entry.get("id", entry.get("Id")), 0),
            str(entry.get("name", entry.get("Name", ""))),
            _NODE_TYPES.get(kind, 0) if isinstance(kind, str) else integer(kind, 0),
            attributes,
        )
        if node is None or not ("type" in entry or "NodeType" in entry):
            continue
        for key in ("ctrlDeps", "dataDeps", "data_deps", "ctrl_deps"):
            found = entry.get(key)
            node.dependencies += [integer(d, -1) for d in found] if isinstance(found, list) else []
        node.duration = _nanoseconds(entry.get("durationMicros", entry.get("runtime")))
        yield node


def _json_entries(data: bytes) -> Iterator[Any]:
    """The nodes: of one ``workload_graph``, or one document each."""
    text = data.decode()
    if '"workload_graph"' in text[:4096]:
        document = msgspec.json.decode(data)
        nodes = document.get("workload_graph")
        yield from nodes if isinstance(nodes, list) else []
        return
    # A document begins where a brace stands first in its line; the form has no other way to tell.
    for part in re.split(r"(?<=\n\})\s*(?=\{)", text):
        yield msgspec.json.decode(part)


def _dicts(value: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _json_value(attribute: dict[str, Any]) -> Any:  # noqa: ANN401
    return next((v for k, v in attribute.items() if k not in ("name", "docString")), None)


def _node(identifier: int, name: str, kind: int, attributes: dict[Any, Any]) -> Node | None:
    """A node without its dependencies; None for metadata."""
    if kind == _METADATA:
        return None
    node = Node(identifier, name[:100_000], thread=_stream(attributes.get("tid")))
    on_host = attributes.get("is_cpu_op")
    on_host = int(on_host) if isinstance(on_host, bool) else on_host
    described = "comm_type" in attributes or "comm_size" in attributes
    is_transfer = kind in (_SEND, _RECEIVE) or (kind == _COLLECTIVE and described)
    node.on_device = is_transfer or (
        on_host is not None and not integer(int(on_host) if isinstance(on_host, bool) else on_host, 0)
    )
    node.stream = _stream(attributes.get("stream"))
    if is_transfer:
        place = integer(attributes.get("comm_type"), -1)
        if kind == _COLLECTIVE:
            node.communication = (
                _COLLECTIVES[place] if 0 <= place < len(_COLLECTIVES) else Communication.UNKNOWN
            )
        else:
            node.communication = Communication.SEND if kind == _SEND else Communication.RECEIVE
        node.communication_bytes = integer(attributes.get("comm_size"), 0)
        group = attributes.get("pg_name", attributes.get("pg_id"))
        node.group = CommunicationGroup(str(group)[:200]) if group is not None else None
        if "stream" not in attributes:
            node.stream = 1000 + kind
    return node


def _stream(value: Any) -> int:  # noqa: ANN401
    found = integer(value, 0)
    return found if abs(found) < 1 << 62 else 0


def _nanoseconds(microseconds: Any) -> int:  # noqa: ANN401
    found = integer(microseconds, 0)
    return found * 1000 if 0 < found < _LONGEST_US else 0
