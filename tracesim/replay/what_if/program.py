"""The program that a run executed: its rows as actions of a pipeline schedule, and what frames them.

Forward and backward are told by the phases of compute slices, microbatches by what the trace says of them (our own
files, ``PP:`` annotations, micro-operations). Without microbatches, and without sends, each forward with the backward
behind it in a step is one: gradient accumulation. All that is launched between the first slices of two actions
belongs to the first of them; what comes before the first action of a step or behind the last is its frame. Sends and
receives between stages belong to none: they follow from the order of actions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from op_graphs.columns import Bool, Int64
from op_graphs.vocabulary import Dimension, OpKind, Phase, TrackRole
from schedules import Action, ActionKind, Schedule
from tracesim.analysis.breakdown import slice_dimensions
from tracesim.errors import ScenarioError
from tracesim.replay.graph import EdgeKind, Rebuilt, RowRole
from tracesim.replay.measured import on_threads

FORWARD, INPUT, WEIGHT = ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT
BACKWARD = ActionKind.FULL_BACKWARD
NOTHING, TAKEN_OUT = -1, -2
"""Pieces of rows that belong to no piece: beginnings of queues, and transfers between stages."""
_KIND_OF_PHASE = {
    Phase.FORWARD: FORWARD,
    Phase.BACKWARD_INPUT: INPUT,
    Phase.RECOMPUTE: INPUT,
    Phase.BACKWARD_WEIGHT: WEIGHT,
}
_STAGE = re.compile(r"^PP:(\d+)[FBIW]\d+")
_SHORT = 0.05
"""Part of the longest forward or backward below which a run of slices is none of its own."""
LOOKED_FOR = (
    "looked for microbatches of slices (traces of simulated runs and of micro-operations), PP:0F1 annotations "
    "(torch.distributed.pipelining) and forwards and backwards that follow each other in a step"
)


@dataclass(frozen=True)
class Piece:
    """Rows of one rank that stay together."""

    rank: int
    """Row of the timeline's ranks."""
    step: int
    """Position of the step."""
    action: Action | None
    """None for what frames the actions of a step."""


@dataclass(frozen=True)
class Program:
    """Rows of a run by piece."""

    pieces: tuple[Piece, ...]
    """By rank, in the order of execution."""
    of_row: Int64
    """Piece of each row of the graph, or NOTHING or TAKEN_OUT."""
    place: tuple[int, ...]
    """Pipeline rank of each row of the timeline's ranks."""
    schedule: Schedule
    """The order of actions of the first step."""
    steps: tuple[int, ...]
    """Steps that run this order; others are frames as a whole."""
    transfers: Int64
    """Rows of sends and receives between stages."""


def find_program(rebuilt: Rebuilt, what: str) -> Program:
    """The actions of a run.

    Raises:
        ScenarioError: if the trace does not show them; the message says what was looked for.
    """
    return _Finder(rebuilt, what).find()


@dataclass
class _Run:
    """Slices of one action that were launched after one another."""

    chunk: int
    microbatch: int
    kind: ActionKind
    first: int
    """Position of its first slice among the device slices of its rank and step."""
    last: int
    time: int
    """Nanoseconds of its slices."""


class _Finder:
    def __init__(self, rebuilt: Rebuilt, what: str) -> None:
        self.rebuilt, self.what = rebuilt, what
        self.rows, self.operations = rebuilt.rows, rebuilt.graph.operations
        self.device = rebuilt.on_device()
        self.communication = rebuilt.graph.is_communication()
        self.moment, self.call = self._launched()
        self.transfers = self._transfers()
        kind = np.array([_KIND_OF_PHASE[phase].value if phase in _KIND_OF_PHASE else "" for phase in Phase])
        self.kind = kind[self.operations.phase]
        self.computes = self.device & ~self.communication & (self.kind != "")
        self.computes &= ~np.isin(self.operations.kind, (OpKind.MEMCPY, OpKind.MEMSET))
        self.known = bool((self.computes & (self.operations.microbatch >= 0)).any())

    def find(self) -> Program:
        ranks = np.unique(self.rows.rank[self.device]).tolist()
        if not self.known and self.transfers.any():
            raise ScenarioError(
                f"{self.what}: the sends and receives show a pipeline, but nothing says which microbatch a slice is "
                f"of; {LOOKED_FOR}"
            )
        steps = np.unique(self.rows.step[self.device]).tolist()
        steps = [step for step in steps if step >= 0] or [-1]
        runs = {(rank, step): self._runs(rank, step) for rank in ranks for step in steps}
        place, stages = self._stages(runs, ranks)
        found = {key: self._schedule_row(own, stages[place[key[0]]]) for key, own in runs.items()}
        schedule, whole = self._schedule(found, ranks, steps, place, stages)
        pieces, of_row = self._pieces(runs, found, ranks, steps, whole)
        of_row[self.transfers] = TAKEN_OUT
        if on_threads(self.rebuilt.timeline):
            # A thread waits inside the calls that send and receive.
            calls = self.call[self.transfers & (self.call >= 0)]
            of_row[calls] = TAKEN_OUT
        return Program(
            tuple(pieces), of_row, tuple(place), schedule, tuple(whole), np.flatnonzero(self.transfers)
        )

    # -- what is there ---------------------------------------------------------------------------------------

    def _launched(self) -> tuple[Int64, Int64]:
        """When each device row was launched (else started), and its call (-1 for none)."""
        edges = self.rebuilt.edges
        launches = edges.kind == EdgeKind.LAUNCH
        call = np.full(len(self.rows), -1, dtype=np.int64)
        call[edges.target[launches]] = edges.source[launches]
        moment = np.where(call >= 0, self.rows.start[call], self.rows.start)
        return moment.astype(np.int64), call

    def _transfers(self) -> Bool:
        """Sends and receives between pipeline stages."""
        timeline, slices = self.rebuilt.timeline, self.rows.slice_row
        dimension = slice_dimensions(timeline)[np.maximum(slices, 0)]
        dimension = np.where(slices >= 0, dimension, Dimension.NONE)
        found: Bool = self.device & self.communication
        found &= (dimension == Dimension.PP) | (
            (self.operations.kind == OpKind.P2P) & (dimension == Dimension.NONE)
        )
        return found

    def _own(self, rank: int, step: int) -> Int64:
        """Device rows of a rank and step in the order of their launches."""
        mine = np.flatnonzero(self.device & (self.rows.rank == rank) & (self.rows.step == step))
        ordered: Int64 = mine[np.lexsort((mine, self.rows.start[mine], self.moment[mine]))]
        return ordered

    def _runs(self, rank: int, step: int) -> list[_Run]:
        """The actions of a rank in a step, in order."""
        own = self._own(rank, step)
        runs: list[_Run] = []
        microbatch = np.where(self.known, self.operations.microbatch, 0)
        length = self.rebuilt.durations
        for position, row in enumerate(own.tolist()):
            if not self.computes[row] or microbatch[row] < 0:
                continue
            key = (int(max(self.operations.chunk[row], 0)), int(microbatch[row]), ActionKind(self.kind[row]))
            if runs and (runs[-1].chunk, runs[-1].microbatch, runs[-1].kind) == key:
                runs[-1].time += int(length[row])
                runs[-1].last = position
            else:
                runs.append(_Run(*key, position, position, int(length[row])))
        runs = self._with_whole_backwards(runs)
        return runs if self.known else self._accumulated(runs)

    def _with_whole_backwards(self, runs: list[_Run]) -> list[_Run]:
        """Backwards for input and weight that alternate, or that the program never separates, as one."""
        whole: list[_Run] = []
        for run in runs:
            last = whole[-1] if whole else None
            backward = run.kind is not FORWARD and last is not None and last.kind is not FORWARD
            if backward and last and (last.chunk, last.microbatch) == (run.chunk, run.microbatch):
                last.kind, last.time, last.last = BACKWARD, last.time + run.time, run.last
            else:
                whole.append(replace(run))
        weights = {(run.chunk, run.microbatch) for run in whole if run.kind is WEIGHT}
        for run in whole:
            if run.kind is INPUT and (run.chunk, run.microbatch) not in weights:
                run.kind = BACKWARD
        return whole

    def _accumulated(self, runs: list[_Run]) -> list[_Run]:
        """Forwards with the backward behind each, numbered."""
        longest = max((run.time for run in runs), default=0)
        kept: list[_Run] = []
        for run in runs:
            if run.time < _SHORT * longest:
                continue
            if kept and kept[-1].kind is run.kind:
                kept[-1].time += run.time
            else:
                kept.append(run)
        while kept and kept[0].kind is not FORWARD:
            kept.pop(0)
        while kept and kept[-1].kind is FORWARD:
            kept.pop()
        for number, run in enumerate(kept):
            run.chunk, run.microbatch = 0, number // 2
        return kept

    # -- stages and schedule ---------------------------------------------------------------------------------

    def _stages(
        self, runs: dict[tuple[int, int], list[_Run]], ranks: list[int]
    ) -> tuple[list[int], list[tuple[int, ...]]]:
        """Pipeline rank of each rank, and the stages of each pipeline rank by chunk."""
        timeline = self.rebuilt.timeline
        count = len(timeline.ranks)
        chunks = max((run.chunk for own in runs.values() for run in own), default=0) + 1
        named = self._named_stages()
        if named:
            held = sorted(set(named.values()))
            place = [held.index(named[rank]) if rank in named else 0 for rank in range(count)]
            stages = sorted(stage for of in held for stage in of)
            if stages != list(range(len(stages))):
                raise ScenarioError(
                    f"{self.what}: the trace shows stages {', '.join(map(str, stages))} only; give the files of one "
                    "rank of every stage"
                )
            return place, held
        if not self.transfers.any():
            return [0] * count, [tuple(range(chunks))]
        place = timeline.ranks.pp.tolist()
        if max(place) < 0 and chunks == 1:
            place = self._places_by_time(runs, ranks)
        if min(place) < 0 or set(place) != set(range(max(place) + 1)):
            missing = sorted(set(range(max(place) + 1)) - set(place))
            raise ScenarioError(
                f"{self.what}: not all stages of the pipeline are there; "
                + (
                    f"pipeline rank {missing[0]} is missing"
                    if missing
                    else "looked for the stage of each rank"
                )
                + ": give the files of one rank of every stage"
            )
        pp = max(place) + 1
        loop = [tuple(chunk * pp + at for chunk in range(chunks)) for at in range(pp)]
        turned: list[tuple[int, ...]] = [(at, 2 * pp - 1 - at) for at in range(pp)]
        if chunks == 2 and self._contradictions(runs, place, turned) < self._contradictions(
            runs, place, loop
        ):
            return place, turned
        return place, loop

    def _named_stages(self) -> dict[int, tuple[int, ...]]:
        """Stages of each rank that its annotations name; empty without annotations."""
        timeline = self.rebuilt.timeline
        matches = [_STAGE.match(name) for name in timeline.strings]
        stage = np.array([int(match[1][:8]) if match else -1 for match in matches], dtype=np.int64)
        stage = stage[timeline.slices.name]
        rank, role = timeline.slice_ranks().astype(np.int64), timeline.slice_roles()
        shown = (stage >= 0) & ((role == TrackRole.ANNOTATION) | (role == TrackRole.HOST))
        found: dict[int, set[int]] = {}
        for own, number in np.unique(np.stack([rank[shown], stage[shown]]), axis=1).T.tolist():
            found.setdefault(own, set()).add(number)
        return {own: tuple(sorted(stages)) for own, stages in found.items()}

    def _places_by_time(self, runs: dict[tuple[int, int], list[_Run]], ranks: list[int]) -> list[int]:
        """Ranks as stages in the order of their first forwards, where each begins when the one before has ended."""
        first: dict[int, int] = {}
        for (rank, step), own in sorted(runs.items()):
            forwards = [run for run in own if run.kind is FORWARD]
            if forwards and rank not in first:
                first[rank] = int(self.rows.start[self._own(rank, step)[forwards[0].first]])
        ordered = sorted(first, key=lambda rank: (first[rank], rank))
        place = [-1] * len(self.rebuilt.timeline.ranks)
        for at, rank in enumerate(ordered):
            place[rank] = at
        stages: list[tuple[int, ...]] = [(at,) for at in range(len(ordered))]
        return place if not self._contradictions(runs, place, stages) else [-1] * len(place)

    def _contradictions(
        self, runs: dict[tuple[int, int], list[_Run]], place: list[int], stages: list[tuple[int, ...]]
    ) -> int:
        """Forwards that begin before that of the stage before has ended."""
        begin: dict[tuple[int, int, int], int] = {}
        end: dict[tuple[int, int, int], int] = {}
        for (rank, step), own in runs.items():
            rows = self._own(rank, step)
            for run in own:
                if run.kind is FORWARD:
                    stage = stages[place[rank]][run.chunk]
                    begin[step, stage, run.microbatch] = int(self.rows.start[rows[run.first]])
                    end[step, stage, run.microbatch] = int(self.rows.end[rows[run.last]])
        return sum(end.get((step, stage - 1, m), at) > at for (step, stage, m), at in begin.items())

    def _schedule_row(self, runs: list[_Run], stages: tuple[int, ...]) -> tuple[Action, ...] | None:
        """The actions of a rank; None where an action is in several parts."""
        seen = sorted({run.microbatch for run in runs})
        if not runs or any(run.chunk >= len(stages) for run in runs):
            return None
        row = tuple(Action(stages[run.chunk], run.kind, seen.index(run.microbatch)) for run in runs)
        return row if len(set(row)) == len(row) else None

    def _schedule(
        self,
        found: dict[tuple[int, int], tuple[Action, ...] | None],
        ranks: list[int],
        steps: list[int],
        place: list[int],
        stages: list[tuple[int, ...]],
    ) -> tuple[Schedule, list[int]]:
        """The order that most steps run, and those steps."""
        orders: dict[tuple[tuple[Action, ...], ...], list[int]] = {}
        several = False
        for step in steps:
            rows: list[tuple[Action, ...] | None] = [None] * len(stages)
            for rank in ranks:
                row = found[rank, step]
                several |= row is None
                if rows[place[rank]] in (None, row):
                    rows[place[rank]] = row
                else:
                    several = True
                    row = None
                if row is None:
                    break
            else:
                orders.setdefault(tuple(row for row in rows if row is not None), []).append(step)
        complete = {order: of for order, of in orders.items() if _is_complete(order, len(stages))}
        if not complete:
            raise ScenarioError(
                f"{self.what}: the trace shows no step of whole forwards and backwards"
                + (", one after the other and alike on the ranks of a stage" if several else "")
                + "; "
                + LOOKED_FOR
            )
        order = max(complete, key=lambda of: len(complete[of]))
        count = max(action.microbatch for row in order for action in row) + 1
        placement = {stage: at for at, held in enumerate(stages) for stage in held}
        schedule = Schedule(
            "as measured",
            len(stages),
            len(placement),
            count,
            order,
            tuple(placement[stage] for stage in range(len(placement))),
        )
        return schedule, complete[order]

    # -- rows ------------------------------------------------------------------------------------------------

    def _pieces(
        self,
        runs: dict[tuple[int, int], list[_Run]],
        found: dict[tuple[int, int], tuple[Action, ...] | None],
        ranks: list[int],
        steps: list[int],
        whole: list[int],
    ) -> tuple[list[Piece], Int64]:
        pieces: list[Piece] = []
        of_row = np.full(len(self.rows), NOTHING, dtype=np.int64)
        for rank in ranks:
            begins: list[tuple[int, int]] = []
            mine = self.rows.rank == rank
            pieces.append(Piece(rank, -1, None))
            of_row[self.device & mine] = len(pieces) - 1
            for step in steps:
                own, row = self._own(rank, step), found[rank, step]
                first = len(pieces)
                pieces.append(Piece(rank, step, None))
                of_row[own] = first
                if step in whole and row is not None:
                    pieces += [Piece(rank, step, action) for action in row]
                    pieces.append(Piece(rank, step, None))
                    self._assign(own, runs[rank, step], first, of_row)
                begins += [
                    (int(self.moment[own[of_row[own] == piece]].min(initial=np.iinfo(np.int64).max)), piece)
                    for piece in range(first, len(pieces))
                ]
            self._assign_host(rank, begins, pieces, of_row)
        return pieces, of_row

    def _assign(self, own: Int64, runs: list[_Run], frame: int, of_row: Int64) -> None:
        """Give the device rows of a rank and step to its actions; ``frame`` is the piece before them."""
        operations = self.operations
        for number, run in enumerate(runs):
            of_row[own[run.first :]] = frame + 1 + number
        last = runs[-1]
        tail = own[last.first :]
        inside = self.computes[tail] & (self.kind[tail] != FORWARD.value)
        labelled = (operations.microbatch[tail] >= 0) & (operations.phase[tail] != Phase.OPTIMIZER)
        held = np.flatnonzero(labelled & ~self.communication[tail] if self.known else inside)
        after = tail[int(held[-1]) + 1 :] if len(held) else tail[1:]
        of_row[after] = frame + 1 + len(runs)
        if not self.known:
            return
        # Communication that says its microbatch is part of it, whenever it ran.
        for number, run in enumerate(runs):
            same = self.communication[own] & (operations.microbatch[own] == run.microbatch)
            same &= np.maximum(operations.chunk[own], 0) == run.chunk
            forward = operations.phase[own] == Phase.FORWARD
            backward = np.isin(
                operations.phase[own], (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT, Phase.GRADIENT_SYNC)
            )
            if run.kind is FORWARD:
                of_row[own[same & forward]] = frame + 1 + number
            elif run.kind in (BACKWARD, INPUT):
                of_row[own[same & backward]] = frame + 1 + number

    def _assign_host(
        self, rank: int, begins: list[tuple[int, int]], pieces: list[Piece], of_row: Int64
    ) -> None:
        """Give the host rows of a rank to the pieces of what they launch, or that was being launched."""
        rows = self.rows
        mine = np.flatnonzero(rows.rank == rank)
        ordered = sorted(begin for begin in begins if begin[0] < np.iinfo(np.int64).max)
        moments = np.array([moment for moment, _ in ordered], dtype=np.int64)
        numbers = np.array([number for _, number in ordered], dtype=np.int64)
        first = min((piece for _, piece in begins), default=0) - 1
        points = mine[np.isin(rows.role[mine], (RowRole.CALL, RowRole.MARK))]
        at = np.searchsorted(moments, rows.start[points], side="right") - 1
        of_row[points] = np.where(at >= 0, numbers[np.maximum(at, 0)], first) if len(numbers) else first
        launched = mine[self.call[mine] >= 0][::-1]
        of_row[self.call[launched]] = of_row[launched]
        self._assign_marks(points[rows.role[points] == RowRole.MARK], begins, pieces, of_row)
        # On a thread a pause stands before what it leads to, and the end of a blocking call behind it.
        returns = mine[rows.role[mine] == RowRole.RETURN]
        of_row[returns] = of_row[returns - 1]
        gaps = mine[rows.role[mine] == RowRole.GAP]
        ahead, behind = self._beside(forwards=True)[gaps], self._beside(forwards=False)[gaps]
        of_row[gaps] = np.where(ahead >= 0, of_row[ahead], of_row[behind])

    def _beside(self, *, forwards: bool) -> Int64:
        """The nearest row that is no pause on the queue of each row, behind it or before it; -1 for none."""
        rows, lane = self.rows, self.operations.rank
        index = np.arange(len(rows))
        solid = rows.role != RowRole.GAP
        if forwards:
            marked = np.where(solid, index, len(rows))
            found = np.minimum.accumulate(marked[::-1])[::-1]
        else:
            found = np.maximum.accumulate(np.where(solid, index, -1))
        inside = (found >= 0) & (found < len(rows))
        inside &= lane[np.clip(found, 0, len(rows) - 1)] == lane
        inside &= rows.role[np.clip(found, 0, len(rows) - 1)] != RowRole.ANCHOR
        return np.where(inside, found, -1)

    def _assign_marks(
        self, marks: Int64, begins: list[tuple[int, int]], pieces: list[Piece], of_row: Int64
    ) -> None:
        """Marks of steps frame them: those before the first action its beginning, others its end."""
        for mark in marks.tolist():
            own = [(moment, piece) for moment, piece in begins if pieces[piece].step == self.rows.step[mark]]
            actions = [moment for moment, piece in own if pieces[piece].action is not None]
            if own:
                begins_it = not actions or self.rows.start[mark] <= min(actions)
                of_row[mark] = own[0][1] if begins_it else own[-1][1]


def _is_complete(order: tuple[tuple[Action, ...], ...], pp: int) -> bool:
    """Whether every stage runs a forward and a backward of every microbatch."""
    if len(order) != pp or not all(order):
        return False
    actions = [action for row in order for action in row]
    stages = {action.stage for action in actions}
    count = max(action.microbatch for action in actions) + 1
    forwards = {(a.stage, a.microbatch) for a in actions if a.kind is FORWARD}
    backwards = {(a.stage, a.microbatch) for a in actions if a.kind in (BACKWARD, INPUT)}
    weights = {(a.stage, a.microbatch) for a in actions if a.kind in (BACKWARD, WEIGHT)}
    wanted = len(stages) * count
    return len(forwards) == len(backwards) == len(weights) == wanted
