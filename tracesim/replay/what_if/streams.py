"""What if slices of one kind ran on another stream.

A queue is put together in the order in which the host launched its slices, or, without launches, in which they ended.
What a moved slice reads it read behind the slice before it on its old stream, so it still waits for that. What reads
its result is not in a trace: behind it on its old stream only the optimizer waits for it, or else the last slice of
the step. That is the most that the move can give; in the other reading (:func:`kind_waited`, :func:`name_waited`) the
next slice of the old stream waits, and the range spans both.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from op_graphs.columns import Bool, Int64
from op_graphs.vocabulary import Communication, OpKind, Phase, TrackRole
from tracesim.errors import ScenarioError
from tracesim.replay.graph import EdgeKind, Edges, Rebuilt
from tracesim.replay.what_if.selection import device_names_matching, some, with_note

_NEW = "new"


def move_kind(rebuilt: Rebuilt, value: str, *, waited: bool = False) -> Rebuilt:
    """``collective=7``, ``all_gather=new``: a kind of kernel or of communication, and the stream."""
    name, _, stream = value.partition("=")
    what = f"stream.{name}={stream}"
    return _moved(rebuilt, slices_of_kind(rebuilt, name, "stream."), stream, what, waited=waited)


def move_name(rebuilt: Rebuilt, value: str, *, waited: bool = False) -> Rebuilt:
    """``all_to_all:new``: slices whose name matches, and the stream."""
    pattern, _, stream = value.rpartition(":")
    chosen = device_names_matching(rebuilt, pattern, "stream.name")
    return _moved(rebuilt, chosen, stream, f"stream.name={value}", waited=waited)


def kind_waited(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """:func:`move_kind` with the next slice of the old stream waiting."""
    return move_kind(rebuilt, value, waited=True)


def name_waited(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """:func:`move_name` with the next slice of the old stream waiting."""
    return move_name(rebuilt, value, waited=True)


def slices_of_kind(rebuilt: Rebuilt, name: str, what: str) -> Bool:
    """Device slices of a kind (``gemm``, ``collective``) or of a communication (``all_gather``).

    Raises:
        ScenarioError: if there is no such kind, or no such slice.
    """
    operations, upper = rebuilt.graph.operations, name.upper()
    if upper in Communication.__members__ and upper != "NONE":
        chosen = operations.communication == Communication[upper]
    elif upper in OpKind.__members__:
        chosen = operations.kind == OpKind[upper]
    else:
        kinds = [kind.name.lower() for kind in OpKind if kind not in (OpKind.HOST, OpKind.ANNOTATION)]
        transfers = [c.name.lower() for c in Communication if c != Communication.NONE]
        raise ScenarioError(f"{what}{name}: not one of {', '.join(kinds)}; or of {', '.join(transfers)}")
    return some(rebuilt.on_device() & chosen, f"{what}{name}")


def compute_lanes(rebuilt: Rebuilt) -> dict[int, int]:
    """For each rank (row of the timeline's ranks) the queue on which compute takes most time."""
    rows, lane = rebuilt.rows, rebuilt.graph.operations.rank.astype(np.int64)
    compute = rebuilt.on_device() & ~rebuilt.graph.is_communication()
    busy = np.zeros(int(lane.max()) + 1, dtype=np.int64)
    np.add.at(busy, lane[compute], (rows.end - rows.start)[compute])
    found = {}
    for rank in np.unique(rows.rank[compute]).tolist():
        lanes = np.unique(lane[compute & (rows.rank == rank)])
        found[rank] = int(lanes[np.argmax(busy[lanes])])
    return found


def requeued(rebuilt: Rebuilt, moved: Bool, to: dict[int, int]) -> Rebuilt:
    """The run with some device slices on other queues: ``to`` gives that of each rank, which may be a new one."""
    rows, operations = rebuilt.rows, rebuilt.graph.operations
    old = operations.rank.astype(np.int64)
    target = np.array([to.get(rank, -1) for rank in range(len(rebuilt.timeline.ranks))])[rows.rank]
    moved = moved & (target >= 0) & (target != old)
    if not moved.any():
        return rebuilt
    lane = np.where(moved, target, old)
    touched = np.isin(lane, np.concatenate((old[moved], target[moved]))) & rebuilt.on_device()
    key = np.where(touched, _order_key(rebuilt), -1)
    order = np.lexsort((np.arange(len(rows)), key, lane))
    place = np.empty(len(rows), dtype=np.int64)
    place[order] = np.arange(len(rows))
    edges = rebuilt.edges
    inside = touched[edges.source] & touched[edges.target] & (lane[edges.source] == lane[edges.target])
    # Behind one another on a queue they need no event, and against its order they cannot wait.
    kept = ~((edges.kind == EdgeKind.QUEUE) & touched[edges.target]) & ~inside
    # Who left no room for whom is another matter in another order.
    kept &= (edges.kind != EdgeKind.ADMISSION) | ~(touched[edges.source] | touched[edges.target])
    lags = np.full(len(rows), rebuilt.delays.queue)
    queued = edges.kind == EdgeKind.QUEUE
    lags[edges.target[queued]] = np.minimum(edges.lag[queued], rebuilt.delays.queue)
    chain = order[touched[order]]
    same = lane[chain][1:] == lane[chain][:-1]
    queue = Edges(
        chain[:-1][same], chain[1:][same], lags[chain[1:][same]], np.full(int(same.sum()), EdgeKind.QUEUE)
    )
    result = Edges.concatenate([edges.take(np.flatnonzero(kept)), queue])
    track = rows.track.copy()
    shown = rebuilt.on_device() & ~moved
    track[moved] = _track_of_lane(lane[shown], rows.track[shown], lane[moved], track[moved])
    names, lane_of = np.unique(lane[order], return_inverse=True)
    ranks = np.zeros(len(names), dtype=np.int64)
    ranks[lane_of] = rebuilt.timeline.ranks.rank[rows.rank[order]]
    graph = replace(
        rebuilt.graph,
        ranks=ranks,
        operations=operations.take(order).with_columns(rank=lane_of.ravel()),
        dependency_offsets=np.zeros(len(rows) + 1, dtype=np.int64),
        dependencies=np.zeros(0, dtype=np.int64),
    )
    part = replace(
        rebuilt,
        graph=graph,
        durations=rebuilt.durations[order],
        rows=rows.with_columns(track=track).take(order),
        unexplained=rebuilt.unexplained[order],
    )
    return part.with_edges(result.with_columns(source=place[result.source], target=place[result.target]))


def _track_of_lane(lanes: Int64, tracks: Int64, wanted: Int64, otherwise: Int64) -> Int64:
    """The track that the slices of each wanted queue are on; the other one for a queue that has none yet."""
    known, first = np.unique(lanes, return_index=True)
    at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    found: Int64 = np.where(known[at] == wanted, tracks[first[at]], otherwise)
    return found


def _order_key(rebuilt: Rebuilt) -> Int64:
    """What slices of one queue are ordered by: their launch, or their measured end on ranks that show no launches.

    Nor are launches the order of a rank where a slice waits for one that was launched later.
    """
    rows, edges = rebuilt.rows, rebuilt.edges
    device = rebuilt.on_device()
    launches = edges.kind == EdgeKind.LAUNCH
    launched = np.full(len(rows), -1, dtype=np.int64)
    launched[edges.target[launches]] = rows.start[edges.source[launches]]
    key = _meeting_ends(rebuilt)
    for rank in np.unique(rows.rank[device]).tolist():
        mine = device & (rows.rank == rank)
        own = (edges.kind == EdgeKind.EVENT) & mine[edges.source] & mine[edges.target]
        forwards = launched[edges.source[own]] <= launched[edges.target[own]]
        if (launched[mine] >= 0).all() and forwards.all():
            key[mine] = launched[mine]
    lane = rebuilt.graph.operations.rank.astype(np.int64)
    # A queue keeps the order it has.
    for number in np.unique(lane[device]).tolist():
        mine = np.flatnonzero(device & (lane == number))
        key[mine] = np.maximum.accumulate(key[mine])
    return key


def _meeting_ends(rebuilt: Rebuilt) -> Int64:
    """The measured end of each row, of communication that of its last member: the same on all its ranks."""
    rendezvous = rebuilt.graph.operations.rendezvous.astype(np.int64)
    end: Int64 = rebuilt.rows.end.copy()
    met = rendezvous >= 0
    last = np.zeros(int(rendezvous.max(initial=-1)) + 1, dtype=np.int64)
    np.maximum.at(last, rendezvous[met], end[met])
    end[met] = last[rendezvous[met]]
    return end


def _moved(rebuilt: Rebuilt, chosen: Bool, stream: str, what: str, *, waited: bool) -> Rebuilt:
    to = _target_lanes(rebuilt, chosen, stream, what)
    lane = rebuilt.graph.operations.rank.astype(np.int64)
    target = np.array([to.get(rank, -1) for rank in range(len(rebuilt.timeline.ranks))])[rebuilt.rows.rank]
    moving = chosen & (target != lane)
    if not moving.any():
        return rebuilt
    edges = [rebuilt.edges, _inputs(rebuilt, moving), _outputs(rebuilt, moving, next_slice=waited)]
    changed = requeued(rebuilt.with_edges(Edges.concatenate(edges)), moving, to)
    return with_note(
        changed,
        f"{what}: what reads the result of the {int(moving.sum())} moved slices is not in a trace; the figure lets "
        "them run until the optimizer or the end of the step, the range ends where the next slice waits",
    )


def _target_lanes(rebuilt: Rebuilt, chosen: Bool, stream: str, what: str) -> dict[int, int]:
    """The queue of a stream on each rank that has slices to move."""
    timeline, rows = rebuilt.timeline, rebuilt.rows
    lane = rebuilt.graph.operations.rank.astype(np.int64)
    ranks = np.unique(rows.rank[chosen]).tolist()
    if stream == _NEW:
        return {rank: int(lane.max()) + 1 + place for place, rank in enumerate(ranks)}
    tracks = timeline.tracks
    named = np.array([timeline.string(int(name)) for name in tracks.name])
    fits = (named == stream) | ((tracks.stream == int(stream)) if stream.isdecimal() else False)
    fits &= (tracks.role >= TrackRole.COMPUTE) & (tracks.role <= TrackRole.DEVICE)
    found = {}
    for rank in ranks:
        mine = np.flatnonzero(rebuilt.on_device() & (rows.rank == rank) & fits[rows.track])
        if not len(mine):
            device = np.unique(rows.track[rebuilt.on_device() & (rows.rank == rank)])
            known = ", ".join(f"{named[track]} ({tracks.stream[track]})" for track in device.tolist())
            raise ScenarioError(
                f"{what}: rank {timeline.ranks.rank[rank]} has no stream {stream}; it has {known}. Write one of "
                f"them, its number, or {_NEW}"
            )
        found[rank] = int(lane[mine].min())
    return found


def _inputs(rebuilt: Rebuilt, moving: Bool) -> Edges:
    """Waits of moved slices for the slice that stays before them on their old queue."""
    device, lane = np.flatnonzero(rebuilt.on_device()), rebuilt.graph.operations.rank
    stays = np.where(~moving[device], np.arange(len(device)), -1)
    before = np.maximum.accumulate(stays)
    own = np.flatnonzero(moving[device] & (before >= 0))
    own = own[lane[device[own]] == lane[device[before[own]]]]
    source, target = device[before[own]], device[own]
    return _events(rebuilt, source, target)


def _outputs(rebuilt: Rebuilt, moving: Bool, *, next_slice: bool) -> Edges:
    """Waits for moved slices: of the next slice that stays on their queue, or of the optimizer or last slice there."""
    rows, operations = rebuilt.rows, rebuilt.graph.operations
    lane = operations.rank.astype(np.int64)
    device = np.flatnonzero(rebuilt.on_device())
    sources, targets = [], []
    for number in np.unique(lane[moving]).tolist():
        queue = device[lane[device] == number]
        own, stay = np.flatnonzero(moving[queue]), np.flatnonzero(~moving[queue])
        if not len(stay):
            continue
        at = np.searchsorted(stay, own)
        if next_slice:
            follows = stay[np.minimum(at, len(stay) - 1)]
        else:
            follows = np.array(
                [_reader(rows.step[queue], operations.phase[queue], stay, one) for one in own.tolist()]
            )
        later = follows > own
        sources.append(queue[own[later]])
        targets.append(queue[follows[later]])
    if not sources:
        return Edges.empty()
    return _events(rebuilt, np.concatenate(sources), np.concatenate(targets))


def _reader(step: Int64, phase: Int64, stay: Int64, own: int) -> int:
    """The first optimizer slice behind one in its step, or the last slice of the step; itself if there is none."""
    behind = stay[(stay > own) & (step[stay] == step[own])]
    optimizer = behind[phase[behind] == Phase.OPTIMIZER]
    return int(optimizer[0]) if len(optimizer) else int(behind[-1]) if len(behind) else own


def _events(rebuilt: Rebuilt, source: Int64, target: Int64) -> Edges:
    lag = np.full(len(source), rebuilt.delays.event)
    return Edges(source, target, lag, np.full(len(source), EdgeKind.EVENT))
