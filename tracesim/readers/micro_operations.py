"""Reader of pipeline jobs at the level of micro-operations: one row a forward, backward, send, receive or collective.

The schema of the production traces published with "Understanding Stragglers in Large Model Training Using What-if
Analysis" (https://arxiv.org/abs/2505.05713): a Chrome event list whose events carry step, microbatch and model chunk
(``timeline-*.json``), or the table it is made from (``trace-*.parquet``, needs pyarrow). All ranks lie in one file;
data-parallel rank and pipeline stage come from the process and the name of the thread.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from op_graphs.timeline import CommunicationGroup, Timeline
from op_graphs.vocabulary import Communication, OpKind, Phase, TrackRole
from tracesim.errors import TraceError
from tracesim.readers.assembled import AssembledTimeline
from tracesim.readers.sources import Source

_PARQUET = b"PAR1"
_MARKS = (b"-compute", b'"mb_id"', b'"step"')
_THREAD = re.compile(r"PP rank (\d{1,6})")
_LATEST_US = 4e15


@dataclass(frozen=True)
class _Operation:
    """What an operation type is."""

    role: TrackRole
    stream: int
    kind: OpKind
    phase: Phase = Phase.UNKNOWN
    communication: Communication = Communication.NONE


_PP, _DP = TrackRole.COMMUNICATION_PP, TrackRole.COMMUNICATION_DP
_OPERATIONS = {
    "forward-compute": _Operation(TrackRole.COMPUTE, 0, OpKind.OTHER, Phase.FORWARD),
    "backward-compute": _Operation(TrackRole.COMPUTE, 0, OpKind.OTHER, Phase.BACKWARD_INPUT),
    "optimizer": _Operation(TrackRole.COMPUTE, 0, OpKind.OPTIMIZER, Phase.OPTIMIZER),
    "forward-recv": _Operation(_PP, 4, OpKind.P2P, Phase.FORWARD, Communication.RECEIVE),
    "forward-send": _Operation(_PP, 5, OpKind.P2P, Phase.FORWARD, Communication.SEND),
    "backward-recv": _Operation(_PP, 6, OpKind.P2P, Phase.BACKWARD_INPUT, Communication.RECEIVE),
    "backward-send": _Operation(_PP, 7, OpKind.P2P, Phase.BACKWARD_INPUT, Communication.SEND),
    "params-all-gather": _Operation(_DP, 8, OpKind.COLLECTIVE, Phase.PARAM_SYNC, Communication.ALL_GATHER),
    "grads-reduce-scatter": _Operation(
        _DP, 8, OpKind.COLLECTIVE, Phase.GRADIENT_SYNC, Communication.REDUCE_SCATTER
    ),
    "layernorm-grads-all-reduce": _Operation(
        _DP, 8, OpKind.COLLECTIVE, Phase.GRADIENT_SYNC, Communication.ALL_REDUCE
    ),
    "embedding-grads-all-reduce": _Operation(
        _DP, 8, OpKind.COLLECTIVE, Phase.GRADIENT_SYNC, Communication.ALL_REDUCE
    ),
    "optimizer-clip-main-grad": _Operation(
        _DP, 8, OpKind.COLLECTIVE, Phase.OPTIMIZER, Communication.ALL_REDUCE
    ),
}
_OTHER = _Operation(TrackRole.HOST, 9, OpKind.HOST)
_TRACK_NAMES = {
    0: "compute", 4: "receive forward", 5: "send forward", 6: "receive backward", 7: "send backward",
    8: "data parallel", 9: "other",
}  # fmt: skip


class _Arguments(msgspec.Struct, gc=False):
    step: int = -1
    model_chunk: int | None = None
    mb_id: int | None = None
    name: Any = None


class _Event(msgspec.Struct, gc=False):
    name: str
    pid: int
    tid: int = -1
    ph: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: _Arguments = msgspec.field(default_factory=_Arguments)


@dataclass(frozen=True)
class _Row:
    data_rank: int
    stage: int
    name: str
    start: int
    duration: int
    step: int
    microbatch: int
    chunk: int


def recognise(source: Source) -> bool:
    """Whether a file is such a table or event list."""
    head = source.data[:65536]
    if head[:4] == _PARQUET:
        return True
    # A conversion keeps the events of a list as they are; reading them as a pipeline adds actions of its own.
    return head[:1] == b"[" and all(mark in head for mark in _MARKS) and not source.keep_origins


def read(source: Source) -> Timeline:
    """All ranks of the job.

    Raises:
        TraceError: if the file is damaged or of another schema, or pyarrow is missing for a parquet file.
    """
    columnar = source.data[:4] == _PARQUET
    rows = _parquet_rows(source) if columnar else _event_rows(source)
    if not rows:
        raise TraceError(f"{source.path}: holds no operation. Export the job again.")
    return _timeline(source, rows)


def _event_rows(source: Source) -> list[_Row]:
    try:
        events = msgspec.json.decode(source.data, type=list[_Event])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(
            f"{source.path}: not a list of micro-operations ({error}). Export it again."
        ) from error
    stages: dict[tuple[int, int], int] = {}
    for event in events:
        found = (
            _THREAD.search(str(event.args.name)) if event.ph == "M" and event.name == "thread_name" else None
        )
        if found:
            stages[event.pid, event.tid] = int(found[1])
    slices = [e for e in events if e.ph == "X"]
    stray = next((e for e in slices if (e.pid, e.tid) not in stages or not 0 <= e.pid < 1 << 20), None)
    if stray is not None:
        raise TraceError(
            f"{source.path}: no `thread_name` says which pipeline stage thread {stray.tid} of process {stray.pid} is."
        )
    late = next((e for e in slices if max(abs(e.ts), abs(e.dur)) > _LATEST_US), None)
    if late is not None:
        raise TraceError(
            f"{source.path}: a time of {late.ts:g} us is out of range (limit {_LATEST_US:g} us)."
        )
    return [
        _Row(
            e.pid,
            stages[e.pid, e.tid],
            e.name,
            round(e.ts * 1000),
            max(round(e.dur * 1000), 0),
            _small(e.args.step),
            _small(e.args.mb_id),
            _small(e.args.model_chunk),
        )
        for e in slices
    ]


def _small(value: int | None) -> int:
    """A number that fits 32 bits, else -1."""
    return int(value) if value is not None and abs(value) < 1 << 31 else -1


def _parquet_rows(source: Source) -> list[_Row]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise TraceError(
            f"{source.path}: a parquet table, and pyarrow is not installed. Run `pip install tracesim[parquet]`."
        ) from error
    columns = ("dp_rank", "stage", "optype", "start_ts", "duration", "step", "mb_id", "mc")
    try:
        table = parquet.read_table(io.BytesIO(source.data), columns=list(columns)).to_pydict()
        rows = list(zip(*(table[c] for c in columns), strict=True))
        # Every step counts its time from 0: they are laid one after another.
        found, offset = [], 0
        for step in sorted({row[5] for row in rows}):
            mine = [row for row in rows if row[5] == step]
            for dp, stage, name, start, duration, _, microbatch, chunk in mine:
                begin, length = offset + round(start * 1e9), max(round(duration * 1e9), 0)
                place = _small(dp), _small(stage)
                found.append(
                    _Row(*place, str(name), begin, length, _small(step), _small(microbatch), _small(chunk))
                )
            offset += max(round((row[3] + row[4]) * 1e9) for row in mine)
        if offset > _LATEST_US * 1000:
            raise ValueError(f"its steps last {offset / 1e9:g} s")
        return found
    except (ArrowException, KeyError, TypeError, ValueError, OverflowError, OSError) as error:
        text = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise TraceError(
            f"{source.path}: not a table of micro-operations ({text}). Export it again."
        ) from error


def _timeline(source: Source, rows: list[_Row]) -> Timeline:
    built = AssembledTimeline(source.path)
    data_ranks = sorted({r.data_rank for r in rows})
    stages = sorted({r.stage for r in rows})
    number = {(d, s): s * len(data_ranks) + i for i, d in enumerate(data_ranks) for s in stages}
    bounds: dict[int, tuple[int, int]] = {}
    unknown = 0
    for row in rows:
        rank = built.rank(number[row.data_rank, row.stage], dp=row.data_rank, pp=row.stage, tp=0, cp=0)
        what = _OPERATIONS.get(row.name, _OTHER)
        unknown += what is _OTHER and row.name != "gc"
        columns = {"kind": what.kind, "phase": what.phase, "microbatch": row.microbatch, "chunk": row.chunk}
        if what.communication:
            along = stages if what.role == _PP else data_ranks
            members = [(row.data_rank, m) if what.role == _PP else (m, row.stage) for m in along]
            ranks = tuple(sorted(number[m] for m in members))
            group = CommunicationGroup("pp" if what.role == _PP else "dp", ranks, len(ranks))
            columns.update(communication=what.communication, group=built.group(group))
        track = built.track(rank, what.role, what.stream, _TRACK_NAMES[what.stream])
        built.add(track, row.start, row.duration, row.name, **columns)
        if what.phase in (Phase.FORWARD, Phase.BACKWARD_INPUT) and what.role == TrackRole.COMPUTE:
            action = f"{'F' if what.phase == Phase.FORWARD else 'B'}{max(row.microbatch, 0)}"
            columns["kind"] = OpKind.ANNOTATION
            built.add(
                built.track(rank, TrackRole.PIPELINE, 0, "pipeline"),
                row.start,
                row.duration,
                action,
                **columns,
            )
        low, high = bounds.get(row.step, (row.start, row.start + row.duration))
        bounds[row.step] = min(low, row.start), max(high, row.start + row.duration)
    for rank in {number[r.data_rank, r.stage] for r in rows}:
        for step, (start, end) in bounds.items():
            built.step(rank, step, start, end)
    built.notes.add("operations of an unknown type, kept as host slices", unknown)
    return built.timeline(
        world_size=len(number),
        properties={"format": "micro-operations", "schedule level": "pipeline actions, no kernels"},
    )
