"""Begin and end events (``ph: B`` and ``E``) of Chrome JSON as the slices they mean.

An end closes the innermost open begin of its thread. A begin that never ends lasts until the last event of its thread;
an end without a begin means nothing and is left out. Both are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from op_graphs.columns import Int64


class Paired(NamedTuple):
    """The rows that are slices, the durations and arguments of all rows, and how many did (not) pair."""

    rows: Int64
    durations: Int64
    arguments: list[msgspec.Raw]
    pairs: int
    never_ended: int
    never_begun: int


def pair(
    phases: Sequence[str | None],
    threads: Sequence[object],
    times: Int64,
    durations: Int64,
    arguments: Sequence[msgspec.Raw],
) -> Paired:
    """Pair the begins and ends among some events; complete events (``ph: X``) stay as they are.

    Args:
        phases: ``X``, ``B`` or ``E`` of each event, in the order of the file; all arguments have one length.
        threads: what tells its process and thread.
        times: its time in ns.
        durations: duration of complete events in ns, 0 for the others.
        arguments: its raw arguments.
    """
    last_time: dict[object, int] = {}
    for thread, end in zip(threads, (times + durations).tolist(), strict=True):
        last_time[thread] = max(last_time.get(thread, end), end)
    durations, merged = durations.copy(), list(arguments)
    still_open: dict[object, list[int]] = {}
    pairs = never_begun = 0
    partial = np.array([i for i, phase in enumerate(phases) if phase != "X"], dtype=np.int64)
    for row in partial[np.argsort(times[partial], kind="stable")].tolist():
        stack = still_open.setdefault(threads[row], [])
        if phases[row] == "B":
            stack.append(row)
        elif stack:
            begin = stack.pop()
            durations[begin] = times[row] - times[begin]
            merged[begin] = _together(merged[begin], merged[row])
            pairs += 1
        else:
            never_begun += 1
    never_ended = [row for stack in still_open.values() for row in stack]
    for row in never_ended:
        durations[row] = last_time[threads[row]] - times[row]
    rows = np.array([i for i, phase in enumerate(phases) if phase != "E"], dtype=np.int64)
    return Paired(rows, durations, merged, pairs, len(never_ended), never_begun)


def _together(begin: msgspec.Raw, end: msgspec.Raw) -> msgspec.Raw:
    """The arguments of both events; where they disagree the end is right, being later."""
    if bytes(end) in (b"{}", b"null"):
        return begin
    first, second = msgspec.json.decode(begin), msgspec.json.decode(end)
    if not isinstance(first, dict) or not isinstance(second, dict):
        return begin if isinstance(first, dict) else end
    return msgspec.Raw(msgspec.json.encode({**first, **second}))
