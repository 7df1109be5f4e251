"""What the stages of a pipeline send to each other in a run that was put together anew.

A transfer is a row of its own that waits for nothing but what it sends, lasts as long as one between the same two ranks
did, and that the receiving action waits for. What a rank does first in a step may be to post a receive: that moment is
kept as a row without duration, because the step of the rank begins with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from op_graphs.columns import Bool, Int64
from op_graphs.graph import Operations
from op_graphs.vocabulary import Communication, OpKind, Phase
from schedules import Action, Schedule
from tracesim.replay.graph import EdgeKind, Edges, Rebuilt, RowRole, Rows
from tracesim.replay.run import replay
from tracesim.replay.what_if.arrangement import Arrangement, Placed
from tracesim.replay.what_if.insertion import launch_moments, launching_calls
from tracesim.replay.what_if.program import BACKWARD, FORWARD, INPUT, TAKEN_OUT, WEIGHT, Program
from tracesim.replay.what_if.streams import compute_lanes


def arranged(rebuilt: Rebuilt, program: Program, orders: Sequence[Sequence[Placed]]) -> Rebuilt:
    """The run with the pieces of each rank (row of the timeline's ranks) in another order.

    Rows get the times of the changed run as their measured ones, so that further changes see them where they are.

    Raises:
        SimulationError: if rows wait for each other in that order.
    """
    arrangement = Arrangement(rebuilt, program, orders)
    part = _Transfers(arrangement.put_together(), arrangement).add()
    replayed = replay(part)
    return replace(part, rows=part.rows.with_columns(start=replayed.start, end=replayed.end))


class _Transfers:
    def __init__(self, part: Rebuilt, arrangement: Arrangement) -> None:
        self.part, self.arrangement = part, arrangement
        self.program = arrangement.program
        self.compute = compute_lanes(arrangement.rebuilt)
        self.between: dict[tuple[int, int], Int64] = {}
        self.own = self._own_transfers()

    def add(self) -> Rebuilt:
        """Add a row for each pair of actions on different ranks of which one needs the other."""
        source, target, template, lane = [], [], [], []
        for ranks in _replicas(self.program):
            for sender, receiver in self._pairs(ranks):
                first, last = self._last_row(sender), self._first_row(receiver)
                if first < 0 or last < 0:
                    continue
                source.append(first)
                target.append(last)
                from_rank, to_rank = (self._rank(copy) for copy in (sender, receiver))
                own = self.own.get(self.arrangement.placed[receiver].piece, -1)
                template.append(own if own >= 0 else self._template(from_rank, to_rank))
                lane.append((from_rank, to_rank))
        part = self.part
        if source:
            sent, awaited, like = (np.array(column, dtype=np.int64) for column in (source, target, template))
            part = self._with_sends(sent, awaited, like, lane)
        return self._with_posts(part)

    def _rank(self, copy: int) -> int:
        return self.program.pieces[self.arrangement.placed[copy].piece].rank

    def _pairs(self, ranks: dict[int, int]) -> list[tuple[int, int]]:
        """Copies of which the second needs what the first makes, on the ranks of one pipeline."""
        placed, pieces = self.arrangement.placed, self.program.pieces
        mine = [at for at, one in enumerate(placed) if pieces[one.piece].rank in ranks.values()]
        made = {(pieces[placed[at].piece].step, placed[at].yields): at for at in mine if placed[at].yields}
        found = []
        for at in mine:
            action, step = placed[at].action, pieces[placed[at].piece].step
            for need in _needs(action, self.program.schedule) if action else ():
                maker = next((made[step, one] for one in need if (step, one) in made), -1)
                if maker >= 0 and self._rank(maker) != self._rank(at):
                    found.append((maker, at))
        return sorted(found, key=lambda pair: (self.arrangement.position[pair[0]], pair))

    def _compute_rows(self, copy: int) -> Int64:
        one = self.arrangement.placed[copy]
        rows = self.arrangement.members[one.piece]
        lane = self.compute.get(self.program.pieces[one.piece].rank, -1)
        own: Int64 = rows[self.arrangement.lane[rows] == lane]
        return own if len(own) else rows[self.arrangement.rows.role[rows] == RowRole.DEVICE]

    def _first_row(self, copy: int) -> int:
        rows = self._compute_rows(copy)
        return int(self.arrangement.new_row(copy, rows[:1])[0]) if len(rows) else -1

    def _last_row(self, copy: int) -> int:
        """The last row that makes what is sent: products for the weights come behind it."""
        rows = self._compute_rows(copy)
        phase = self.arrangement.rebuilt.graph.operations.phase[rows]
        made = rows[phase != Phase.BACKWARD_WEIGHT]
        rows = made if len(made) else rows
        return int(self.arrangement.new_row(copy, rows[-1:])[0]) if len(rows) else -1

    def _between(self, sender: int, receiver: int) -> Int64:
        """Sends and receives between two ranks: by who met in them, else by their group; all if neither says."""
        rebuilt = self.arrangement.rebuilt
        rows, operations = self.program.transfers, rebuilt.graph.operations
        rows = rows[rebuilt.durations[rows] > 0]
        rank, meeting = rebuilt.rows.rank[rows], operations.rendezvous[rows].astype(np.int64)
        pair = {sender, receiver}
        met = [
            (set(rank[meeting == one].tolist()) if one >= 0 else set[int]())
            for one in np.unique(meeting).tolist()
        ]
        of_meeting = dict(zip(np.unique(meeting).tolist(), (ranks == pair for ranks in met), strict=True))
        numbers = rebuilt.timeline.ranks.rank
        wanted = {int(numbers[sender]), int(numbers[receiver])}
        of_group = [set(group.ranks) == wanted for group in rebuilt.timeline.groups] + [False]
        own = np.isin(rank, (sender, receiver))
        said = np.array(
            [
                of_meeting[one] if one >= 0 else of_group[g]
                for one, g in zip(meeting.tolist(), operations.group[rows].tolist(), strict=True)
            ]
        )
        chosen = rows[own & said] if len(rows) else rows
        return chosen if len(chosen) else rows[own]

    def _own_transfers(self) -> dict[int, int]:
        """The receive of each piece that needs one, else its send; in order, where there are as many as are needed."""
        rebuilt, program = self.arrangement.rebuilt, self.program
        rows, communication = rebuilt.rows, rebuilt.graph.operations.communication
        moment = launch_moments(rebuilt)
        found: dict[int, int] = {}
        for ranks in _replicas(program):
            needing: dict[tuple[int, int, int], list[int]] = {}
            for at, piece in enumerate(program.pieces):
                if piece.action is None or piece.rank not in ranks.values():
                    continue
                for need in _needs(piece.action, program.schedule):
                    maker = ranks[program.schedule.stage_rank(need[0].stage)]
                    if maker != piece.rank:
                        needing.setdefault((maker, piece.rank, piece.step), []).append(at)
            for (sender, receiver, step), pieces in needing.items():
                between = self._transfers_between(sender, receiver)
                for rank, what in ((receiver, Communication.RECEIVE), (sender, Communication.SEND)):
                    own = between[(rows.rank[between] == rank) & (rows.step[between] == step)]
                    own = own[communication[own] == what]
                    if len(own) == len(pieces):
                        own = own[np.lexsort((own, moment[own]))]
                        found.update(zip(pieces, own.tolist(), strict=True))
                        break
        return found

    def _transfers_between(self, sender: int, receiver: int) -> Int64:
        key = (min(sender, receiver), max(sender, receiver))
        if key not in self.between:
            self.between[key] = self._between(*key)
        return self.between[key]

    def _template(self, sender: int, receiver: int) -> int:
        """A send or receive between two ranks that stands for all of them; -1 if the trace shows none."""
        rebuilt = self.arrangement.rebuilt
        mine = self._transfers_between(sender, receiver)
        met = mine[rebuilt.graph.operations.rendezvous[mine] >= 0]
        if len(met):
            return int(met[np.argsort(rebuilt.durations[met], kind="stable")[len(met) // 2]])
        # Nothing says how much of each is waiting: the shortest waited least.
        return int(mine[np.argmin(rebuilt.durations[mine])]) if len(mine) else -1

    def _with_sends(
        self, source: Int64, target: Int64, template: Int64, lane: list[tuple[int, int]]
    ) -> Rebuilt:
        """A row like the template between each source and target; a plain wait where there is none."""
        shown = template >= 0
        edges, sends = self.arrangement.rebuilt.edges, self.program.transfers
        sending = np.full(
            len(source), self._usual(edges.lag[np.isin(edges.target, sends) & _is_event(edges)])
        )
        sent = np.full(len(source), self._usual(edges.lag[np.isin(edges.source, sends) & _is_event(edges)]))
        plain = _events(source[~shown], target[~shown], sent[~shown])
        durations = self.arrangement.rebuilt.durations[template[shown]]
        ways = [way for way, one in zip(lane, shown.tolist(), strict=True) if one]
        part, rows = self._with_rows(
            self.part, template[shown], durations, ways, self.part.rows.step[source[shown]]
        )
        into, out = _events(source[shown], rows, sending[shown]), _events(rows, target[shown], sent[shown])
        return part.with_edges(Edges.concatenate([part.edges, plain, into, out]))

    def _usual(self, lags: Int64) -> int:
        """The median of the delays there are, else that of events."""
        return int(np.median(lags)) if len(lags) else self.arrangement.rebuilt.delays.event

    def _with_posts(self, part: Rebuilt) -> Rebuilt:
        """The moment at which a rank began a step by posting a receive, as rows without duration."""
        found = list(self._posts())
        like = np.array([row for row, _ in found], dtype=np.int64)
        step = self.arrangement.rows.step[like]
        ranks = [(int(rank), -1) for rank in self.arrangement.rows.rank[like]]
        part, rows = self._with_rows(part, like, np.zeros(len(like), dtype=np.int64), ranks, step)
        edges = [part.edges]
        for row, (_, edge) in zip(rows.tolist(), found, strict=True):
            source, lag = edge
            if source >= 0:
                edges.append(_events(np.array([source]), np.array([row]), np.array([lag])))
        return part.with_edges(Edges.concatenate(edges))

    def _posts(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """Transfers that a rank begins a step with, each with the new row and lag that it waits for."""
        arrangement, rows = self.arrangement, self.arrangement.rows
        call = launching_calls(arrangement.rebuilt)
        device = np.flatnonzero(rows.role == RowRole.DEVICE)
        opening: dict[tuple[int, int], int] = {}
        for at, one in enumerate(arrangement.placed):
            piece = self.program.pieces[one.piece]
            if one.action is not None:
                opening.setdefault((piece.rank, piece.step), at)
        for (rank, step), copy in opening.items():
            own = device[(rows.rank[device] == rank) & (rows.step[device] == step)]
            first = int(own[np.lexsort((own, rows.start[own]))][0])
            if self.program.of_row[first] != TAKEN_OUT:
                continue
            lane = np.array([self.compute.get(rank, -1)], dtype=np.int64)
            if call[first] >= 0:
                before = arrangement.first_copy(int(call[first]))
                lag = int(rows.start[first] - rows.end[call[first]])
            else:
                before = int(arrangement.last_before(copy, lane)[0])
                lag = 0
            if before < 0:
                before = arrangement.anchor_of(int(lane[0]))
                lag = int(rows.start[first] - rows.end[arrangement.old[before]]) if before >= 0 else 0
            yield first, (before, lag)

    def _with_rows(
        self, part: Rebuilt, like: Int64, durations: Int64, ways: Sequence[tuple[int, int]], step: Int64
    ) -> tuple[Rebuilt, Int64]:
        """The run with rows like old ones, on a queue of its own for each way; and their numbers."""
        old = self.arrangement.rebuilt
        numbers = len(part.rows) + np.arange(len(like))
        if not len(like):
            return part, numbers
        places = sorted(set(ways))
        lane = len(part.graph.ranks) + np.array([places.index(way) for way in ways])
        operations = old.graph.operations.take(like).with_columns(
            rank=lane, rendezvous=np.full(len(like), -1), kind=np.full(len(like), OpKind.P2P)
        )
        graph = replace(
            part.graph,
            ranks=np.concatenate((part.graph.ranks, old.timeline.ranks.rank[[way[0] for way in places]])),
            operations=Operations.concatenate([part.graph.operations, operations]),
            dependency_offsets=np.zeros(len(part.rows) + len(like) + 1, dtype=np.int64),
            dependencies=np.zeros(0, dtype=np.int64),
        )
        more = old.rows.take(like).with_columns(step=step, rank=np.array([way[0] for way in ways]))
        whole = replace(
            part,
            graph=graph,
            durations=np.concatenate((part.durations, durations)),
            rows=Rows.concatenate([part.rows, more]),
            unexplained=np.concatenate((part.unexplained, np.zeros(len(like), dtype=np.int64))),
        )
        return whole.with_edges(part.edges), numbers


def _is_event(edges: Edges) -> Bool:
    found: Bool = edges.kind == EdgeKind.EVENT
    return found


def _events(source: Int64, target: Int64, lag: Int64) -> Edges:
    return Edges(source, target, lag, np.full(len(source), EdgeKind.EVENT))


def _replicas(program: Program) -> list[dict[int, int]]:
    """The ranks of each pipeline: pipeline rank -> row of the timeline's ranks, the n-th of each in the n-th."""
    ranks = sorted({piece.rank for piece in program.pieces})
    by_place: dict[int, list[int]] = {}
    for rank in ranks:
        by_place.setdefault(program.place[rank], []).append(rank)
    count = min(len(of) for of in by_place.values())
    return [{place: of[number] for place, of in by_place.items()} for number in range(count)]


def _needs(action: Action, schedule: Schedule) -> list[tuple[Action, ...]]:
    """What an action needs of other stages; of each the actions that may make it."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is FORWARD:
        return [] if schedule.is_first(stage) else [(Action(stage - 1, FORWARD, microbatch),)]
    if action.kind is WEIGHT or schedule.is_last(stage):
        return []
    return [tuple(Action(stage + 1, kind, microbatch) for kind in (BACKWARD, INPUT))]
