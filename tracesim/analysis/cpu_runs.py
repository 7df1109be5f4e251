"""Training runs on CPU: their threads are the devices.

A trace of such a run has no device slices, so nothing that asks where a device's time goes would find anything. Here
it gets device tracks beside its host tracks: one a thread that computes, and those of the operations of gloo.

On the track of a thread lie the operators that compute (the outermost of those whose name says so: a product with the
copies it makes inside), calls that start communication up to its start, and between them host work: operators that only
handle other operators, Python, and what the operating system gave to others. The track is empty where the thread waits:
in a pause that is longer than 50 us and in which an operation of gloo ended that the rank had started before it. That
pause is host work up to the usual length, then waiting until that end, then host work again.

An operation of gloo that runs on a thread of its own is as long as it was recorded. A send or receive is recorded
until its caller has waited for it. Where the caller came later than the data, the receive is cut to the time that
receives of its size usually need once both sides have come. A send begins with its call and ends with its receive.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from op_graphs.columns import Int64, StringTable
from op_graphs.timeline import Flows, Slices, Timeline, Tracks
from op_graphs.vocabulary import Communication, FlowKind, OpKind, Phase, TrackRole
from tracesim.analysis.intervals import Intervals, subtract, union
from tracesim.kernel_kinds import classify_kernels, classify_operators, kind_of_communication

_CALL, _OPERATION = "c10d::", "gloo:"
_NO_COMPUTE = re.compile(
    r"^(autograd|torch::autograd|profiler|c10d|_c10d_functional|c10d_functional)::|Backward\d*$"
    r"|^aten::(view|view_as|as_strided_?|t|transpose|expand|expand_as|detach_?|empty\w*|new_empty\w*|resize_?|resize_as_"
    r"|resolve_(conj|neg)|reshape|_reshape_alias|unflatten|flatten|slice|narrow|select|unsqueeze_?|squeeze_?|permute"
    r"|alias|chunk|split\w*|unbind|to|_to_copy|lift_fresh|result_type|is_\w+|item|_local_scalar_dense|contiguous"
    r"|_unsafe_view|set_|size|stride|numel|linear|matmul|can_cast|record_stream|requires_grad_|data|set_data"
    r"|broadcast_tensors|meshgrid|movedim|real|atleast_1d|ones|zeros|full|ones_like|zeros_like|layer_norm|batch_norm"
    r"|conv\dd|convolution|embedding_bag|mse_loss_reduce|nll_loss|nll_loss_nd|cross_entropy_loss|dropout)$"
)
"""Operators that describe tensors, get memory, or only call other operators."""
_SHORTEST_WAIT_NS = 50_000
_USUAL_PAUSE_NS = 20_000
_WAITING = re.compile(r"wait_tensor|^c10d::(\w*wait\w*|monitored_barrier_)$")
_GLOO_TRACKS = {
    "gloo": (Communication.SEND, Communication.RECEIVE),
    "gloo sends": (Communication.SEND,),
    "gloo receives": (Communication.RECEIVE,),
}
"""Tracks of gloo: everything but sends and receives, and those."""
_FIRST_GLOO_STREAM = 1000
_BACKWARD = (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)


def threads_as_devices(timeline: Timeline) -> Timeline:
    """The timeline with device tracks for its threads, if it is a run on CPU; else as it is.

    A trace of a run on GPUs that was recorded without them stays as it is: its operators launch and do not compute.
    """
    if not is_cpu_run(timeline):
        return timeline
    return _assembled(_Run(timeline))


def is_cpu_run(timeline: Timeline) -> bool:
    """Whether a timeline is a trace of torch.profiler without a device, of a run that had none."""
    described = timeline.properties.get("format") == "kineto" and not timeline.device
    backend = timeline.properties.get("backend", "gloo")
    if not described or backend not in ("gloo", "mpi", "fake") or timeline.on_device().any():
        return False
    return bool((timeline.slice_roles() == TrackRole.HOST).any())


@dataclass(frozen=True)
class _Operations:
    """Operations of gloo with the calls that started them; columns of one length."""

    row: Int64
    """The annotation."""
    call: Int64
    """-1 where none was recorded."""
    rank: Int64
    what: Int64
    """:class:`Communication`."""
    start: Int64
    end: Int64
    thread: Int64
    """Host track of the call, else of the annotation; -1 if that has none."""


@dataclass(frozen=True)
class _Pieces:
    """Slices for the device track of one thread; columns of one length."""

    start: Int64
    end: Int64
    source: Int64
    """Host slice that it is a part of, -1 for host work."""

    @classmethod
    def of(cls, intervals: Intervals) -> _Pieces:
        """Host work at some times."""
        return cls(intervals.start, intervals.end, np.full(len(intervals), -1, dtype=np.int64))


class _Run:
    """The columns of a timeline that are needed, and what its names mean."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.slices = timeline.slices
        self.start = timeline.slices.start
        self.end = timeline.slices.start + timeline.slices.duration
        self.rank = timeline.slice_ranks().astype(np.int64)
        self.host = timeline.slice_roles() == TrackRole.HOST
        names = timeline.strings
        self.kind_of_name = _kinds(names)
        self.passive = np.array([bool(_NO_COMPUTE.search(name)) for name in names], dtype=np.bool_)
        self.waiting = np.array([bool(_WAITING.search(name)) for name in names], dtype=np.bool_)
        self.calling = np.array([name.startswith(_CALL) for name in names], dtype=np.bool_)
        self.operating = np.array([name.startswith(_OPERATION) for name in names], dtype=np.bool_)

    def of_track(self, track: int) -> Int64:
        """Slices of a track, outer ones before what they contain."""
        mine = np.flatnonzero(self.slices.track == track)
        return mine[np.lexsort((mine, -self.end[mine], self.start[mine]))]


def _kinds(names: tuple[str, ...]) -> Int64:
    """Kind of each operator by its name; elementwise where only that it computes is known."""
    plain = [name.partition("::")[2] for name in names]
    by_kernel, communication = classify_kernels(plain)
    by_operator = classify_operators(names)
    kind = np.where(by_operator != OpKind.OTHER, by_operator, by_kernel)
    kind = np.where((kind == OpKind.OTHER) | (communication > 0), OpKind.ELEMENTWISE, kind)
    return kind.astype(np.int64)


def _operations(run: _Run) -> _Operations:
    """What gloo did, from the annotations of its operations."""
    slices = run.slices
    known = slices.communication > 0
    rows = np.flatnonzero(run.operating[slices.name] & known)
    calls = np.flatnonzero(run.calling[slices.name] & known & run.host)
    call = np.full(len(rows), -1, dtype=np.int64)
    for rank in np.unique(run.rank[rows]).tolist():
        for what in np.unique(slices.communication[rows]).tolist():
            mine = np.flatnonzero((run.rank[rows] == rank) & (slices.communication[rows] == what))
            mine = mine[np.argsort(run.start[rows[mine]], kind="stable")]
            theirs = calls[(run.rank[calls] == rank) & (slices.communication[calls] == what)]
            call[mine] = _in_order(run, rows[mine], theirs[np.argsort(run.start[theirs], kind="stable")])
    track_of_thread = {
        (int(run.timeline.tracks.rank[t]), int(run.timeline.tracks.stream[t])): int(t)
        for t in np.flatnonzero(run.timeline.tracks.role == TrackRole.HOST).tolist()
    }
    places = zip(
        run.rank[rows].tolist(), run.timeline.tracks.stream[slices.track[rows]].tolist(), strict=True
    )
    own = np.array([track_of_thread.get(place, -1) for place in places], dtype=np.int64)
    thread = np.where(call >= 0, slices.track[call], own).astype(np.int64)
    what = slices.communication[rows].astype(np.int64)
    # The data of a send may be on its way before the call returns and the annotation begins.
    start = np.where((what == Communication.SEND) & (call >= 0), run.start[call], run.start[rows])
    found = _Operations(rows, call, run.rank[rows], what, start, run.end[rows], thread)
    return _cut_to_the_data(run, found)


def _in_order(run: _Run, operations: Int64, calls: Int64) -> Int64:
    """The call of each operation: the next one that began before it; -1 where there is none."""
    found, at = [], 0
    for operation in operations.tolist():
        known = at < len(calls) and run.start[calls[at]] <= run.start[operation]
        found.append(int(calls[at]) if known else -1)
        at += known
    return np.array(found, dtype=np.int64)


def _cut_to_the_data(run: _Run, found: _Operations) -> _Operations:
    """Let sends and receives end when the data had come, not when their caller asked for it."""
    sends, receives = _pairs(run, found)
    if not len(sends):
        return found
    arrival = np.maximum(found.start[sends], found.start[receives])
    took = np.maximum(found.end[receives] - arrival, 0)
    pause = np.array([_idle_before(run, found, int(r)) for r in receives.tolist()], dtype=np.int64)
    tight = (pause >= _SHORTEST_WAIT_NS) & (took > 0)
    size = run.slices.communication_bytes[found.row[receives]]
    end = found.end.copy()
    for number in np.unique(size).tolist():
        same = size == number
        usual = np.median(took[same & tight]) if (same & tight).any() else took[same].min()
        late = same & ~tight
        end[receives[late]] = np.minimum(found.end[receives[late]], arrival[late] + int(usual))
    end[receives] = np.maximum(end[receives], found.start[receives])
    end[sends] = np.maximum(found.start[sends], end[receives])
    return replace(found, end=end)


def _pairs(run: _Run, found: _Operations) -> tuple[Int64, Int64]:
    """Sends and their receives by the ranks at both ends, the last belonging to the last; positions in ``found``."""
    slices, numbers = run.slices, run.timeline.ranks.rank.astype(np.int64)
    peer = np.where(found.call >= 0, slices.peer[found.call], -1).astype(np.int64)
    sending = (found.what == Communication.SEND) & (peer >= 0)
    receiving = (found.what == Communication.RECEIVE) & (peer >= 0)
    own = numbers[found.rank]
    pairs: list[tuple[int, int]] = []
    for sender, receiver in sorted(set(zip(own[sending].tolist(), peer[sending].tolist(), strict=True))):
        s = np.flatnonzero(sending & (own == sender) & (peer == receiver))
        r = np.flatnonzero(receiving & (own == receiver) & (peer == sender))
        s, r = s[np.argsort(found.start[s], kind="stable")], r[np.argsort(found.start[r], kind="stable")]
        count = min(len(s), len(r))
        pairs += zip(s[len(s) - count :].tolist(), r[len(r) - count :].tolist(), strict=True)
    table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _idle_before(run: _Run, found: _Operations, operation: int) -> int:
    """How long the thread of an operation had been idle when it ended; 0 if it worked."""
    track, end = int(found.thread[operation]), int(found.end[operation])
    rows = run.of_track(track) if track >= 0 else np.zeros(0, dtype=np.int64)
    rows = _leaves(run, rows)
    rows = rows[~run.waiting[run.slices.name[rows]]]
    busy = union(run.start[rows], run.end[rows])
    at = int(np.searchsorted(busy.start, end, side="right")) - 1
    return max(end - int(busy.end[at]), 0) if at >= 0 else 0


def _leaves(run: _Run, rows: Int64) -> Int64:
    """Slices of a thread that contain no others."""
    contains = (
        np.append(run.start[rows][1:] < run.end[rows][:-1], False)
        if len(rows)
        else np.zeros(0, dtype=np.bool_)
    )
    leaves: Int64 = rows[~contains]
    return leaves


def _computing(run: _Run, rows: Int64) -> Int64:
    """The outermost operators of a thread that compute."""
    leaf = np.zeros(len(run.start), dtype=np.bool_)
    leaf[_leaves(run, rows)] = True
    named = (run.slices.name[rows] >= 0) & ~run.passive[run.slices.name[rows]]
    named &= np.array(["::" in run.timeline.strings[n] for n in run.slices.name[rows]], dtype=np.bool_)
    found, until = [], np.iinfo(np.int64).min
    for row, computes in zip(rows.tolist(), named.tolist(), strict=True):
        if computes and run.start[row] >= until:
            found.append(row)
            until = int(run.end[row])
    return np.array(found, dtype=np.int64)


def _thread(run: _Run, track: int, operations: _Operations, steps: Intervals) -> _Pieces:
    """What a thread did: computing, calls that start communication, host work; gaps where it waited."""
    rows = run.of_track(track)
    computing = _computing(run, rows)
    mine = np.flatnonzero((operations.call >= 0) & (operations.thread == track))
    call = operations.call[mine]
    handed = np.clip(operations.start[mine], run.start[call], run.end[call])
    computing = computing[~np.isin(computing, call)]
    start = np.concatenate((run.start[computing], run.start[call]))
    end = np.concatenate((run.end[computing], handed))
    low = min(int(run.start[rows].min()), int(steps.start.min(initial=np.iinfo(np.int64).max)))
    high = max(int(run.end[rows].max()), int(steps.end.max(initial=np.iinfo(np.int64).min)))
    whole = union(np.array([low]), np.array([high]))
    rest = subtract(subtract(whole, union(start, end)), _waits(run, rows, operations, whole))
    work = _cut(rest, np.concatenate((steps.start, handed)))
    pieces = (_Pieces(start, end, np.concatenate((computing, call))), _Pieces.of(work))
    return _Pieces(
        *(np.concatenate([getattr(p, column) for p in pieces]) for column in ("start", "end", "source"))
    )


def _waits(run: _Run, rows: Int64, operations: _Operations, whole: Intervals) -> Intervals:
    """When a thread waited for an operation of gloo that its rank had started before."""
    active = np.union1d(_leaves(run, rows), _computing(run, rows))
    active = active[~run.waiting[run.slices.name[active]]]
    pauses = subtract(whole, union(run.start[active], run.end[active]))
    if not len(pauses):
        return Intervals.empty()
    rank = int(run.timeline.tracks.rank[run.slices.track[rows[0]]])
    mine = np.flatnonzero(operations.rank == rank)
    at = np.searchsorted(pauses.start, operations.end[mine], side="left") - 1
    begun = np.where(operations.call[mine] >= 0, run.start[operations.call[mine]], operations.start[mine])
    pause = np.maximum(at, 0)
    fits = (at >= 0) & (operations.end[mine] <= pauses.end[pause]) & (begun <= pauses.start[pause])
    until = np.full(len(pauses), np.iinfo(np.int64).min)
    np.maximum.at(until, pause[fits], operations.end[mine][fits])
    waited = until - pauses.start >= _SHORTEST_WAIT_NS
    return union(pauses.start[waited] + _USUAL_PAUSE_NS, until[waited])


def _cut(intervals: Intervals, moments: Int64) -> Intervals:
    """The same instants in more pieces: none goes on over one of the moments."""
    at = np.searchsorted(intervals.start, moments, side="right") - 1
    inside = (
        (at >= 0)
        & (moments > intervals.start[np.maximum(at, 0)])
        & (moments < intervals.end[np.maximum(at, 0)])
    )
    cuts = np.unique(moments[inside])
    start = np.sort(np.concatenate((intervals.start, cuts)))
    return Intervals(start, np.sort(np.concatenate((intervals.end, cuts))))


class _Assembly:
    """Puts the new tracks and slices behind those of the timeline."""

    def __init__(self, run: _Run) -> None:
        self.run = run
        self.strings = StringTable(run.timeline.strings)
        self.tracks: list[dict[str, int]] = []
        self.slices: list[Slices] = []
        self.count = len(run.slices)
        self.row_of_call: dict[int, int] = {}
        self.flows: list[tuple[int, int, int]] = []

    def _track(self, rank: int, stream: int, name: str) -> int:
        role = TrackRole.DEVICE
        self.tracks.append({"rank": rank, "role": role, "stream": stream, "name": self.strings.intern(name)})
        return len(self.run.timeline.tracks) + len(self.tracks) - 1

    def thread(self, track: int, stream: int, pieces: _Pieces) -> None:
        tracks, slices = self.run.timeline.tracks, self.run.slices
        # A call that hands over at once comes before the rest of its time, which is host work.
        order = np.lexsort((pieces.end, pieces.start))
        start, end, source = pieces.start[order], pieces.end[order], pieces.source[order]
        row = np.maximum(source, 0)
        name = slices.name[row].astype(np.int64)
        called = self.run.calling[name]
        work = source < 0
        label = f"compute of {self.run.timeline.string(int(tracks.name[track]))}"
        device = self._track(int(tracks.rank[track]), stream, label)
        taken = slices.take(row)
        self._add(
            taken,
            track=np.full(len(row), device),
            start=start,
            duration=end - start,
            name=np.where(work, self.strings.intern("host work"), name),
            kind=np.where(work | called, OpKind.HOST, self.run.kind_of_name[name]),
            phase=np.where(work, 0, taken.phase),
            microbatch=self._microbatches(int(tracks.rank[track]), start, end, source),
            chunk=np.where(work, -1, taken.chunk),
            flops=np.where(work, 0, taken.flops),
            communication=np.zeros(len(row)),
            communication_bytes=np.zeros(len(row)),
            group=np.full(len(row), -1),
            peer=np.full(len(row), -1),
        )
        calls = np.flatnonzero(called & ~work)
        self.row_of_call.update(
            zip(source[calls].tolist(), (self.count - len(row) + calls).tolist(), strict=True)
        )

    def _microbatches(self, rank: int, start: Int64, end: Int64, source: Int64) -> Int64:
        """Microbatch of each piece of a thread; where no annotation says it, counted between sends and receives."""
        slices, row = self.run.slices, np.maximum(source, 0)
        known = np.where(source >= 0, slices.microbatch[row], -1).astype(np.int64)
        transfers = self.run.calling[slices.name[row]] & (source >= 0)
        transfers &= np.isin(slices.communication[row], (Communication.SEND, Communication.RECEIVE))
        if (known >= 0).any() or not transfers.any():
            return known
        phase = np.where((source >= 0) & ~transfers, slices.phase[row], 0)
        direction = np.select([phase == Phase.FORWARD, np.isin(phase, _BACKWARD)], [1, 2], 0)
        computes = np.flatnonzero(direction)
        begins = self.run.timeline.steps.start[self.run.timeline.steps.rank == rank]
        step = np.searchsorted(np.sort(begins), start[computes], side="right")
        changes = np.stack([direction[computes], np.cumsum(transfers)[computes], step])
        turns = np.append(True, (np.diff(changes, axis=1) != 0).any(axis=0))[: len(computes)]
        block, step = np.cumsum(turns) - 1, step[turns]
        first = computes[turns]
        time = np.bincount(block, weights=(end - start)[computes]) if len(computes) else np.zeros(0)
        for number in np.unique(step).tolist():
            here = np.flatnonzero(step == number)
            both = [here[direction[first[here]] == d] for d in (1, 2)]
            # Little things beside the microbatches (scaling gradients, collecting losses) are none.
            count = min(len(b) for b in both)
            for blocks in both:
                largest = np.sort(blocks[np.argsort(-time[blocks], kind="stable")[:count]])
                for place, chosen in enumerate(largest.tolist()):
                    known[computes[block == chosen]] = place
        return known

    def operations(self, rank: int, found: _Operations) -> None:
        slices = self.run.slices
        mine = np.flatnonzero(found.rank == rank)
        for number, (name, whats) in enumerate(_GLOO_TRACKS.items()):
            chosen = mine[np.isin(found.what[mine], whats) == (name != "gloo")]
            chosen = chosen[np.lexsort((found.end[chosen], found.start[chosen]))]
            if not len(chosen):
                continue
            call = found.call[chosen]
            at = np.where(call >= 0, call, found.row[chosen])
            kinds = np.array([kind_of_communication(w) for w in found.what[chosen].tolist()])
            self._add(
                slices.take(found.row[chosen]),
                track=np.full(len(chosen), self._track(rank, _FIRST_GLOO_STREAM + number, name)),
                start=found.start[chosen],
                duration=found.end[chosen] - found.start[chosen],
                kind=kinds,
                phase=slices.phase[at],
                chunk=slices.chunk[at],
                peer=slices.peer[at],
            )
            rows = range(self.count - len(chosen), self.count)
            self.flows += [
                (self.row_of_call[c], row, FlowKind.LAUNCH)
                for c, row in zip(call.tolist(), rows, strict=True)
                if c in self.row_of_call
            ]

    def _add(self, taken: Slices, **columns: Any) -> None:  # noqa: ANN401
        unknown = np.full(len(taken), -1)
        self.slices.append(taken.with_columns(correlation=unknown, waited_for=unknown, **columns))
        self.count += len(taken)

    def timeline(self) -> Timeline:
        timeline = self.run.timeline
        flows = Flows.from_rows({"source": s, "target": t, "kind": k} for s, t, k in self.flows)
        return replace(
            timeline,
            strings=self.strings.strings(),
            tracks=Tracks.concatenate([timeline.tracks, Tracks.from_rows(self.tracks)]),
            slices=Slices.concatenate([timeline.slices, *self.slices]),
            flows=Flows.concatenate([timeline.flows, flows]),
            properties={**timeline.properties, "devices": "threads"},
            origins=None,
        )


def _assembled(run: _Run) -> Timeline:
    timeline, assembly, operations = run.timeline, _Assembly(run), _operations(run)
    tracks = timeline.tracks
    used = np.bincount(run.slices.track, minlength=len(tracks))
    for rank in range(len(timeline.ranks)):
        threads = np.flatnonzero((tracks.rank == rank) & (tracks.role == TrackRole.HOST) & (used > 0))
        threads = threads[np.argsort(-used[threads], kind="stable")]
        steps = timeline.steps.rank == rank
        bounds = union(timeline.steps.start[steps], timeline.steps.end[steps])
        bounds = _cut(bounds, timeline.steps.start[steps])
        for stream, track in enumerate(threads.tolist()):
            pieces = _thread(run, track, operations, Intervals.empty() if stream else bounds)
            assembly.thread(track, stream, pieces)
        assembly.operations(rank, operations)
    return assembly.timeline()
