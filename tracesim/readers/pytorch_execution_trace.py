"""Reader of PyTorch execution traces (``ExecutionTraceObserver``), schemas 1.0.1 to 1.1.1: operators in their order.

They hold no times. ``record_param_comms`` nodes become transfers with their bytes and group.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from op_graphs.timeline import CommunicationGroup, Timeline
from op_graphs.vocabulary import Communication
from tracesim.errors import TraceError
from tracesim.readers.assembled import AssembledTimeline
from tracesim.readers.execution_traces import Node, communication_of, place_by_order
from tracesim.readers.kineto_json import integer
from tracesim.readers.sources import Source

_ELEMENT_BYTES = 4
"""Position of the element size in the six numbers that describe a tensor; its number of elements stands before it."""

_RANK_IN_NAME = re.compile(r"(?:rank|et|eg|trace)[-_.]?(\d{1,6})(?=[._]|$)", re.IGNORECASE)


class _Node(msgspec.Struct, gc=False):
    id: int
    name: str
    parent: int | None = None
    ctrl_deps: int | list[int] | None = None
    tid: int | None = None
    inputs: Any = None
    attrs: Any = None


class _Document(msgspec.Struct, gc=False):
    schema: str
    nodes: list[_Node]
    start_ts: Any = None


def recognise(source: Source) -> bool:
    """Whether a file is a JSON object with ``schema`` and ``nodes``."""
    head = source.data[:4096].lstrip()
    return head.startswith(b"{") and b'"schema"' in head and b'"nodes"' in head


def read(source: Source) -> Timeline:
    """Operators as nested host slices, in the order in which they ran.

    Raises:
        TraceError: if the file is damaged or of another schema.
    """
    try:
        document = msgspec.json.decode(source.data, type=_Document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(
            f"{source.path}: not a PyTorch execution trace that can be read ({error}). Record it again."
        ) from error
    nodes = [_node(n) for n in document.nodes]
    if not nodes:
        raise TraceError(f"{source.path}: the execution trace holds no node. Record it again.")
    built = AssembledTimeline(source.path)
    found = _RANK_IN_NAME.search(source.path.name)
    rank = built.rank(int(found[1]) if found else -1)
    return place_by_order(
        built, rank, nodes, properties={"format": "PyTorch execution trace", "schema": document.schema[:80]}
    )


def _node(raw: _Node) -> Node:
    attributes = {}
    if isinstance(raw.attrs, list):
        attributes = {
            a.get("name"): a.get("value")
            for a in raw.attrs
            if isinstance(a, dict) and isinstance(a.get("name"), str)
        }
    parent = raw.parent if raw.parent is not None else raw.ctrl_deps
    if isinstance(parent, list):
        parent = parent[0] if parent else None
    thread = raw.tid if raw.tid is not None else integer(attributes.get("tid"), 0)
    node = Node(
        raw.id,
        raw.name,
        parent=-1 if parent is None else parent,
        thread=thread if abs(thread) < 1 << 62 else 0,
    )
    if raw.name == "record_param_comms":
        _describe_transfer(node, raw.inputs, attributes)
    return node


def _describe_transfer(node: Node, inputs: Any, attributes: dict[Any, Any]) -> None:  # noqa: ANN401
    """Transfer, bytes and group, from the attributes or else from the inputs of the call."""
    values = inputs.get("values") if isinstance(inputs, dict) else inputs
    values = values if isinstance(values, list) else []
    texts = [v for v in values if isinstance(v, str)]
    name = str(attributes.get("collective_name") or next(iter(texts), ""))
    node.communication = communication_of(name)
    if node.communication == Communication.NONE:
        return
    node.name = f"record_param_comms {name}"[:200]
    size, elements = _tensors(values[0] if values else None)
    told = max(integer(attributes.get("in_msg_nelems"), 0), integer(attributes.get("out_msg_nelems"), 0))
    node.communication_bytes = max(told, elements) * size
    if attributes.get("pg_name") is not None:
        description = str(attributes.get("pg_desc") or "")
        label = description if description not in ("", "undefined") else str(attributes["pg_name"])
        node.group = CommunicationGroup(label[:200], (), max(integer(attributes.get("pg_size"), 0), 0))


def _tensors(value: Any) -> tuple[int, int]:  # noqa: ANN401
    """Bytes of an element and number of elements of a tensor, or of a list of them."""
    if not isinstance(value, list) or not value:
        return 0, 0
    if isinstance(value[0], list):
        found = [
            _tensors(v)
            for v in value[:10_000]
            if isinstance(v, list) and not any(isinstance(w, list) for w in v)
        ]
        return max((s for s, _ in found), default=0), sum(n for _, n in found)
    if len(value) < _ELEMENT_BYTES + 1:
        return 0, 0
    return integer(value[_ELEMENT_BYTES], 0), integer(value[_ELEMENT_BYTES - 1], 0)
