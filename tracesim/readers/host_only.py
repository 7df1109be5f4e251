"""What a trace without device slices says of its host slices: phase, microbatch, work, and transfers of gloo.

A training run on CPU computes in operators (``aten::addmm``), and communicates through gloo: an operator of the calling
thread (``c10d::allreduce_``) hands over to an annotation that lasts as long as the operation (``gloo:all_reduce``, on a
thread of its own; ``gloo:send`` and ``gloo:recv`` until the caller has waited for them).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from op_graphs.columns import Int8, Int64
from op_graphs.timeline import CommunicationGroup
from op_graphs.vocabulary import Communication, OpKind
from tracesim.kernel_kinds import classify_operators, parse_communication
from tracesim.readers import kineto_arguments as arguments
from tracesim.readers import launches
from tracesim.readers.distinct import distinct
from tracesim.readers.kineto_rows import ANNOTATION, OPERATOR, Rows

CALL, OPERATION = "c10d::", "gloo:"
"""How names of calls that start communication begin, and those of what gloo runs."""
_PEER_INPUT = 2


class _CallArguments(arguments.CommunicationArguments, gc=False):
    inputs: Any = msgspec.field(default=None, name="Concrete Inputs")


def describe_host(
    columns: Mapping[str, npt.NDArray[Any]],
    rows: Rows,
    host: launches.Host,
    raw: Callable[[Int64], list[msgspec.Raw]],
    distributed: dict[str, Any],
) -> tuple[CommunicationGroup, ...]:
    """Fill the columns of operators and of gloo's annotations in place; the process groups.

    Args:
        columns: of :class:`~op_graphs.timeline.Slices`, of shape [rows].
        rows: of the file.
        host: its operators and annotations.
        raw: arguments of some rows.
        distributed: ``distributedInfo`` of the file.
    """
    operators = np.flatnonzero(rows.category == OPERATOR)
    context = launches.contexts(host, rows.thread[operators], rows.start[operators])
    none = np.zeros(len(operators), dtype=np.int8)
    columns["phase"][operators] = launches.phases(context, none, none)[0]
    columns["microbatch"][operators] = context.microbatch
    columns["chunk"][operators] = launches.chunks(context)
    used, local = distinct(rows.name[operators])
    names = [host.names[i] for i in used.tolist()]
    products = operators[(classify_operators(names) == OpKind.GEMM)[local]] if names else operators
    shapes = arguments.decode_arguments(raw(products), arguments.ShapeArguments)
    named = [host.names[i] for i in rows.name[products].tolist()]
    columns["flops"][products] = arguments.matrix_flops(named, shapes)
    return _transfers(columns, rows, host, raw, distributed)


def _transfers(
    columns: Mapping[str, npt.NDArray[Any]],
    rows: Rows,
    host: launches.Host,
    raw: Callable[[Int64], list[msgspec.Raw]],
    distributed: dict[str, Any],
) -> tuple[CommunicationGroup, ...]:
    used, local = distinct(rows.name)
    what = np.array([_communication(host.names[i]) for i in used.tolist()], dtype=np.int8)[local]
    found = np.flatnonzero((what > 0) & np.isin(rows.category, (OPERATOR, ANNOTATION)))
    said = arguments.decode_arguments(raw(found), _CallArguments)
    columns["communication"][found] = what[found]
    columns["communication_bytes"][found] = [arguments.message_bytes(a) for a in said]
    groups = tuple(arguments.configured_groups(distributed).values())
    if len(groups) != 1:
        return ()
    # With several groups a file does not say which of them a call of gloo uses.
    columns["group"][found] = 0
    columns["peer"][found] = _peers(what[found], said, groups[0].ranks)
    return groups


def _communication(name: str) -> int:
    if not name.startswith((CALL, OPERATION)):
        return Communication.NONE
    return parse_communication(name[:200])


def _peers(what: Int8, said: list[_CallArguments], members: tuple[int, ...]) -> Int64:
    """Global rank at the other end of each send and receive: an input of the call, counted in its group."""
    peers = np.full(len(said), -1, dtype=np.int64)
    for row in np.flatnonzero(np.isin(what, (Communication.SEND, Communication.RECEIVE))).tolist():
        inputs = said[row].inputs
        text = str(inputs[_PEER_INPUT]) if isinstance(inputs, list) and len(inputs) > _PEER_INPUT else ""
        if text.isdecimal() and int(text[:9]) < len(members):
            peers[row] = members[int(text[:9])]
    return peers
