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
from op_graphs.vocabulary import Communication, FlowKind, OpKind, Phase, TrackRole
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
_OF_ONE_RANK = "layernorm-grads-all-reduce"
"""Over the tensor-parallel ranks of a stage, of which the job shows one."""
_OF_ENDS = "embedding-grads-all-reduce"
"""Over the first and last stage, which share the embedding."""
_OF_ALL = "optimizer-clip-main-grad"
"""The norm of all gradients: over all ranks."""
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


class _Job:
    """Stages and data-parallel ranks of a job, and which ranks an operation is shared by."""

    def __init__(self, rows: list[_Row]) -> None:
        self.data_ranks = sorted({r.data_rank for r in rows})
        self.stages = sorted({r.stage for r in rows})
        self._place = {data: place for place, data in enumerate(self.data_ranks)}

    def rank(self, data_rank: int, stage: int) -> int:
        """Stages after each other, the data-parallel ranks of each next to each other."""
        return stage * len(self.data_ranks) + self._place[data_rank]

    def group(self, row: _Row, role: TrackRole) -> CommunicationGroup:
        if row.name == _OF_ALL:
            return self._named("world", [(d, s) for d in self.data_ranks for s in self.stages])
        if row.name == _OF_ENDS:
            return self._named("embedding", [(row.data_rank, s) for s in (self.stages[0], self.stages[-1])])
        if row.name == _OF_ONE_RANK:
            return self._named("tp", [(row.data_rank, row.stage)])
        if role == _PP:
            return self._named("pp", [(row.data_rank, stage) for stage in self.stages])
        return self._named("dp", [(data, row.stage) for data in self.data_ranks])

    def _named(self, name: str, members: list[tuple[int, int]]) -> CommunicationGroup:
        ranks = tuple(sorted({self.rank(*member) for member in members}))
        return CommunicationGroup(name, ranks, len(ranks))


class _Pairs:
    """Sends and the receives of the next stage, both counted within a step: the n-th belongs to the n-th."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int, int, int], tuple[list[int], list[int]]] = {}

    def add(self, row: _Row, slice_key: int) -> None:
        direction, _, what = row.name.partition("-")
        if what not in ("send", "recv"):
            return
        onwards = 1 if direction == "forward" else -1
        receiver = row.stage + onwards if what == "send" else row.stage
        pairs = self._found.setdefault((direction, row.data_rank, row.step, receiver), ([], []))
        pairs[what == "recv"].append(slice_key)

    def flows(self) -> list[tuple[int, int]]:
        """Slices of send and receive; only of links that show as many of both."""
        return [
            pair
            for sends, receives in self._found.values()
            if len(sends) == len(receives)
            for pair in zip(sends, receives, strict=True)
        ]


def _timeline(source: Source, rows: list[_Row]) -> Timeline:
    built = AssembledTimeline(source.path)
    job, pairs = _Job(rows), _Pairs()
    bounds: dict[int, tuple[int, int]] = {}
    unknown = 0
    for row in sorted(rows, key=lambda r: r.start):
        number = job.rank(row.data_rank, row.stage)
        rank = built.rank(number, dp=row.data_rank, pp=row.stage, tp=0, cp=0)
        what = _OPERATIONS.get(row.name, _OTHER)
        unknown += what is _OTHER and row.name != "gc"
        columns = {"kind": what.kind, "phase": what.phase, "microbatch": row.microbatch, "chunk": row.chunk}
        if what.communication:
            group = built.group(job.group(row, what.role))
            columns.update(communication=what.communication, group=group)
        track = built.track(rank, what.role, what.stream, _TRACK_NAMES[what.stream])
        pairs.add(row, built.add(track, row.start, row.duration, row.name, **columns))
        if what.phase in (Phase.FORWARD, Phase.BACKWARD_INPUT) and what.role == TrackRole.COMPUTE:
            action = f"{'F' if what.phase == Phase.FORWARD else 'B'}{max(row.microbatch, 0)}"
            columns["kind"] = OpKind.ANNOTATION
            pipeline = built.track(rank, TrackRole.PIPELINE, 0, "pipeline")
            built.add(pipeline, row.start, row.duration, action, **columns)
        low, high = bounds.get(row.step, (row.start, row.start + row.duration))
        bounds[row.step] = min(low, row.start), max(high, row.start + row.duration)
    for rank in {job.rank(r.data_rank, r.stage) for r in rows}:
        for step, (start, end) in bounds.items():
            built.step(rank, step, start, end)
    for send, receive in pairs.flows():
        built.flow(send, receive, FlowKind.P2P)
    built.notes.add("operations of an unknown type, kept as host slices", unknown)
    return built.timeline(
        world_size=len(job.data_ranks) * len(job.stages),
        properties={
            "format": "micro-operations",
            "schedule level": "pipeline actions, no kernels",
            "steps": "recorded apart",
        },
    )
