"""Assembly: programs + pipeline schedule -> OpGraph.

Each action of the schedule becomes a copy of its program, a segment; sends and receives become single operations
joined by a rendezvous. What is decided here is only order and waiting:

- Compute of a rank runs in the order of its actions.
- When a transfer is posted and what waits for it is the policy of ``overlap.p2p`` (``op_graphs.overlap``).
- Copies from the host that a backward pass needs first start when the action before it does; the first copy of a
  microbatch from the host waits for its last copy to the host.
- The step ends with the programs that synchronise gradients and update weights, which wait for all streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from op_graphs.chunk import ChunkPrograms
from op_graphs.columns import Int64
from op_graphs.graph import OPERATION_DEFAULTS, Buffers, Operations, OpGraph, RankStartup, Segments
from op_graphs.lower_step import RankPrograms
from op_graphs.overlap.policy import RankTransfers
from op_graphs.overlap.registry import TRANSFERS
from op_graphs.plan import OverlapPlan
from op_graphs.program import GraphNames, Program, ProgramBuffers
from op_graphs.startup import place
from op_graphs.vocabulary import Communication, OpKind, Phase, Stream

from .actions import Action, ActionKind, Schedule, ScheduleError
from .copies import Part, ProgramCopies
from .held_buffers import held_buffers
from .interleave import Interleaved, interleave
from .order import requirements

_TRANSFERS: dict[ActionKind, tuple[str, Communication, Stream, Phase]] = {
    ActionKind.SEND_F: ("send_activation", Communication.SEND, Stream.PP_SEND_NEXT, Phase.FORWARD),
    ActionKind.RECV_F: (
        "receive_activation",
        Communication.RECEIVE,
        Stream.PP_RECEIVE_PREVIOUS,
        Phase.FORWARD,
    ),
    ActionKind.SEND_B: ("send_gradient", Communication.SEND, Stream.PP_SEND_PREVIOUS, Phase.BACKWARD_INPUT),
    ActionKind.RECV_B: (
        "receive_gradient",
        Communication.RECEIVE,
        Stream.PP_RECEIVE_NEXT,
        Phase.BACKWARD_INPUT,
    ),
}


# Which later actions of a stage and microbatch release what an action allocates, and the column that says where.
_CONTINUATIONS: dict[ActionKind, tuple[tuple[str, ActionKind], ...]] = {
    ActionKind.FORWARD: (
        ("forward_release", ActionKind.FULL_BACKWARD),
        ("forward_release", ActionKind.BACKWARD_INPUT),
        ("forward_release", ActionKind.BACKWARD_WEIGHT),
    ),
    ActionKind.BACKWARD_INPUT: (("input_release", ActionKind.BACKWARD_WEIGHT),),
}


def assemble(
    programs: Sequence[RankPrograms],
    schedule: Schedule,
    overlap: OverlapPlan,
    names: GraphNames,
) -> OpGraph:
    """Lay the programs of every pipeline rank out in the order of a schedule with communication.

    ``programs`` has one entry a pipeline rank; ``schedule`` must hold its sends and receives
    (:func:`schedules.communication.add_communication`).
    """
    assembly = _Assembly(programs, schedule, overlap, names)
    for rank in range(schedule.pp):
        assembly.add_rank(rank)
    return assembly.finish()


@dataclass(frozen=True)
class _Streams:
    """The streams of a program."""

    rows: int
    opens_beside_compute: bool
    """Whether its first operation that does not start ahead is on another stream than compute."""
    last_rows: tuple[tuple[int, int], ...]
    """Its streams, with the last row on each."""

    @classmethod
    def of(cls, program: Program) -> _Streams:
        streams = program.operations.stream.tolist()
        opens = bool(streams) and streams[program.lead] != Stream.COMPUTE
        return cls(len(streams), opens, tuple({stream: row for row, stream in enumerate(streams)}.items()))


@dataclass
class _RankState:
    """Where a rank's row stands."""

    transfers: RankTransfers = field(default_factory=RankTransfers)
    stream_ends: dict[int, int] = field(default_factory=dict)
    """Last row on each stream."""


class _Assembly:
    def __init__(
        self, programs: Sequence[RankPrograms], schedule: Schedule, overlap: OverlapPlan, names: GraphNames
    ) -> None:
        self.programs = programs
        self.schedule = schedule
        self.overlap = overlap
        self.transfers = TRANSFERS.chosen(overlap.p2p)
        self.names = names
        self.parts: list[Part] = []
        self.rows = 0
        self.edges: list[tuple[int, int]] = []
        self.by_action: dict[Action, Part] = {}
        self.transfer_rows: dict[Action, int] = {}
        self.produced: dict[Action, int] = {}
        self._transfer_programs: dict[tuple[ActionKind, int, int, int], Program] = {}
        self._sent_bytes = {
            chunk.chunk.stage: chunk.sent_bytes
            for rank in programs
            for chunk in rank.chunks
            if chunk.sent_bytes is not None
        }
        self._stream_rows: dict[int, _Streams] = {}
        self._pairs: dict[tuple[int, int], Interleaved] = {}
        self.microbatches: list[tuple[Int64, int]] = []
        """Rows of interleaved programs and the microbatch they belong to."""
        self.holders: list[Part] = []
        """What holds the buffers of each compute action."""

    # -- one rank after another ------------------------------------------------------------------------------

    def add_rank(self, rank: int) -> None:
        state = _RankState()
        programs = self.programs[rank]
        self._add(state, programs.before, rank, "zero_gradients", None)
        first, last = _edges_of_chunks(self.schedule, rank)
        chunks = {chunk.chunk.stage: chunk for chunk in programs.chunks}
        row = self.schedule.actions[rank]
        joined = self.transfers.joins(self.schedule.name)
        for action, needed in zip(row, _needs_of_next(row, self.schedule, joined), strict=True):
            if action.is_send or action.is_receive:
                self._add_transfer(state, action, rank, needed)
                continue
            found = [_program_of(chunks[part.stage], part, first, last) for part in action.parts]
            if None in found or len(found) > 2:
                raise ScheduleError(
                    f"action {action} of schedule {self.schedule.name} cannot be simulated: what can are F, B, I, W, "
                    "pairs (F;B)OVERLAP_F_B, and their sends and receives"
                )
            self._add_compute(state, [program for program in found if program], action, rank)
        ends = list(state.stream_ends.values())
        after = self._add(state, programs.after, rank, "optimizer", None)
        self.edges += [(after.base, row) for row in ends]

    def _add_compute(self, state: _RankState, programs: Sequence[Program], action: Action, rank: int) -> None:
        """Append an action: one program, or two that are interleaved."""
        name = "+".join(f"{part.kind.value}{part.microbatch}" for part in action.parts)
        if len(programs) == 1:
            placed = self._add(state, programs[0], rank, name, action)
            held: tuple[Part, ...] = (placed,)
            entry = placed.base + programs[0].input_row
        else:
            merged = self._interleaved(programs[0], programs[1])
            placed = self._add(state, merged.program, rank, name, action)
            held = tuple(
                replace(placed, program=view, microbatch=part.microbatch, action=part)
                for part, view in zip(action.parts, merged.parts, strict=True)
            )
            self.microbatches.append((placed.base + merged.first_rows, action.parts[0].microbatch))
            self.microbatches.append((placed.base + merged.second_rows, action.parts[1].microbatch))
            # Both inputs are awaited before the pair begins.
            entry = placed.begin
        # What comes from another stage: through a receive, or directly where one rank holds both stages.
        for need in requirements(action, self.schedule):
            if need.is_receive:
                self.edges.append((entry, self.transfer_rows[need]))
            elif need.stage not in {part.stage for part in action.parts} and need in self.produced:
                self.edges.append((entry, self.produced[need]))
        transfers = state.transfers
        self.edges += [(placed.begin, row) for row in self.transfers.compute_waits(transfers)]
        transfers.batch = [*transfers.sends, *transfers.receives] or transfers.batch
        transfers.sends, transfers.receives = [], []
        if placed.program.lead and len(transfers.compute_ends) > 1:
            self.edges.append((placed.base, transfers.compute_ends[-2]))
        for part, piece in zip(action.parts, held, strict=True):
            self._await_offload(part, piece)
            self.by_action[part] = piece
            self.holders.append(piece)
            if piece.program.output_row >= 0:
                self.produced[part] = placed.base + piece.program.output_row
        transfers.compute_ends.append(state.stream_ends[Stream.COMPUTE])

    def _await_offload(self, action: Action, part: Part) -> None:
        """Nothing comes back from the host before all of its microbatch has gone there."""
        forward = self.by_action.get(Action(action.stage, ActionKind.FORWARD, action.microbatch))
        if part.program.first_reload >= 0 and forward is not None:
            self.edges.append(
                (part.base + part.program.first_reload, forward.base + forward.program.last_offload)
            )

    def _interleaved(self, first: Program, second: Program) -> Interleaved:
        key = (id(first), id(second))
        if key not in self._pairs:
            self._pairs[key] = interleave(first, second, self.overlap)
        return self._pairs[key]

    def _add_transfer(self, state: _RankState, action: Action, rank: int, needed: frozenset[Action]) -> None:
        peer_rank = self.schedule.stage_rank(action.peer.stage)
        part = self._add(state, self._transfer_program(action, rank, peer_rank), rank, "", action)
        self.transfer_rows[action] = part.base
        if action.is_send:
            (source,) = requirements(action, self.schedule)
            self.edges.append((part.base, self.produced[source]))
        awaited = action in needed
        behind = self.transfers.behind(state.transfers, is_send=action.is_send, awaited=awaited)
        self.edges += [(part.base, row) for row in behind]
        if action.is_send:
            state.transfers.sends.append(part.base)
        elif awaited:
            state.transfers.receives.append(part.base)

    def _add(self, state: _RankState, program: Program, rank: int, name: str, action: Action | None) -> Part:
        part = Part(
            program,
            self.rows,
            rank,
            action.parts[0].microbatch if action else -1,
            name,
            action.parts[0].stage if action else -1,
            action,
        )
        streams = self._streams(program)
        # A program that opens with a collective launches it behind the compute before it.
        if streams.opens_beside_compute and (action is None or action.is_compute):
            previous = state.stream_ends.get(Stream.COMPUTE)
            if previous is not None:
                self.edges.append((part.begin, previous))
        for stream, row in streams.last_rows:
            state.stream_ends[stream] = part.base + row
        self.parts.append(part)
        self.rows += streams.rows
        return part

    def _streams(self, program: Program) -> _Streams:
        """What a copy of the program does to the streams; asked for at every copy."""
        key = id(program)
        if key not in self._stream_rows:
            self._stream_rows[key] = _Streams.of(program)
        return self._stream_rows[key]

    def _transfer_program(self, action: Action, rank: int, peer: int) -> Program:
        kind = action.kind
        # Between two stages the same number of bytes goes forward and comes back.
        size = self._sent_bytes.get(min(action.stage, action.peer.stage), self.programs[rank].receive_bytes)
        key = (kind, rank, peer, size)
        if key not in self._transfer_programs:
            name, communication, stream, phase = _TRANSFERS[kind]
            ends = (self.programs[rank].rank, self.programs[peer].rank)
            ends = ends if communication is Communication.SEND else (ends[1], ends[0])
            row = {
                "name": self.names.strings.intern(name),
                "kind": OpKind.P2P,
                "stream": stream,
                "phase": phase,
                "communication": communication,
                "communication_bytes": size,
                "group": self.names.group("pp", ends),
            }
            self._transfer_programs[key] = _single_operation(row)
        return self._transfer_programs[key]

    # -- putting the parts together --------------------------------------------------------------------------

    def finish(self) -> OpGraph:
        copies = ProgramCopies.of([part.program for part in self.parts], [part.base for part in self.parts])
        microbatch = copies.spread([part.microbatch for part in self.parts])
        for found, number in self.microbatches:
            microbatch[found] = number
        operations = copies.operations().with_columns(
            rank=copies.spread([part.rank for part in self.parts]),
            microbatch=microbatch,
            rendezvous=self._rendezvous(),
        )
        rows, sources = copies.dependencies()
        extra = np.array(self.edges, dtype=np.int64).reshape(-1, 2)
        offsets, dependencies = _to_csr(
            np.concatenate([rows, extra[:, 0]]), np.concatenate([sources, extra[:, 1]]), self.rows
        )
        buffers = self._buffers()
        segments = self._segments()
        return OpGraph(
            strings=self.names.strings.strings(),
            ranks=np.array([programs.rank for programs in self.programs], dtype=np.int64),
            operations=operations,
            dependency_offsets=offsets,
            dependencies=dependencies,
            segments=segments,
            buffers=buffers,
            shapes=self.names.shapes(),
            groups=self.names.groups(),
            host_bytes=tuple(programs.host_bytes for programs in self.programs),
            startups=self._startups(operations),
        )

    def _segments(self) -> Segments:
        templates: dict[int, int] = {}
        drawn = [part for part in self.parts if part.name and len(part.program)]
        return Segments.from_rows(
            {
                "begin": part.begin,
                "end": part.base + len(part.program),
                "template": templates.setdefault(id(part.program), len(templates)),
                "name": self.names.strings.intern(part.name),
                "rank": part.rank,
                "stage": part.stage,
                "microbatch": part.microbatch,
            }
            for part in drawn
        )

    def _rendezvous(self) -> Int64:
        """Ids of operations that several represented ranks enter together."""
        ids = np.full(self.rows, -1, dtype=np.int64)
        following = 0
        for action, row in self.transfer_rows.items():
            if action.is_send and action.peer in self.transfer_rows:
                ids[row] = ids[self.transfer_rows[action.peer]] = following
                following += 1
        represented = {programs.rank for programs in self.programs}
        spanning = {
            number
            for number, group in enumerate(self.names.groups())
            if len(represented.intersection(group.ranks)) > 1
        }
        shared: dict[tuple[int, int], int] = {}
        for part in self.parts:
            if part.action is not None:
                continue
            seen: dict[int, int] = {}
            for row, group in enumerate(part.program.operations.group.tolist()):
                if group in spanning:
                    occurrence = seen[group] = seen.get(group, -1) + 1
                    if (group, occurrence) not in shared:
                        shared[group, occurrence] = following
                        following += 1
                    ids[part.base + row] = shared[group, occurrence]
        return ids

    def _buffers(self) -> Buffers:
        tables = [self._persistent_buffers(), held_buffers(self.programs, self.holders, self.names)]
        framing = [part for part in self.parts if part.action is None]
        for part in sorted((*framing, *self.holders), key=lambda part: part.base):
            held = part.program.buffers
            if not len(held):
                continue
            release = np.where(held.release >= 0, held.release + part.base, -1)
            if part.action is not None:
                release = self._released_later(part, part.action, release)
            tables.append(
                Buffers(
                    rank=np.full(len(held), part.rank, dtype=np.int32),
                    allocate=held.allocate + part.base,
                    release=release,
                    size=held.size,
                    category=held.category,
                    name=held.name,
                    pool=held.pool,
                )
            )
        return Buffers.concatenate(tables)

    def _released_later(self, part: Part, action: Action, release: Int64) -> Int64:
        """Rows that release a part's buffers, those of the actions that continue it included."""
        for column, kind in _CONTINUATIONS.get(action.kind, ()):
            matching = self.by_action.get(Action(action.stage, kind, action.microbatch))
            if matching is not None:
                later = getattr(matching.program, column)
                release = np.where(later >= 0, later + matching.base, release)
        return release

    def _startups(self, operations: Operations) -> tuple[tuple[RankStartup, ...], ...]:
        """How the job begins on the ranks of each stage; nothing where the programs do not say."""
        if not all(programs.startups for programs in self.programs):
            return ()
        shapes = self.names.shapes()
        return tuple(
            tuple(
                RankStartup(rank, place(entries, operations, shapes, row))
                for rank, entries in programs.startups
            )
            for row, programs in enumerate(self.programs)
        )

    def _persistent_buffers(self) -> Buffers:
        return Buffers.from_rows(
            {
                "rank": rank,
                "allocate": -1,
                "release": -1,
                "size": buffer.size,
                "category": buffer.category,
                "name": self.names.strings.intern(buffer.name),
                "pool": Stream.COMPUTE,
            }
            for rank, programs in enumerate(self.programs)
            for buffer in programs.persistent
        )


def _needs_of_next(row: Sequence[Action], schedule: Schedule, joined: bool) -> list[frozenset[Action]]:
    """For each action of a rank, what the next compute action needs; if ``joined`` also those directly behind that."""
    found: list[frozenset[Action]] = []
    following: frozenset[Action] = frozenset()
    behind_transfer = True
    for action in reversed(row):
        if action.is_send or action.is_receive:
            behind_transfer = True
        else:
            needs = frozenset(requirements(action, schedule))
            following = needs | following if joined and not behind_transfer else needs
            behind_transfer = False
        found.append(following)
    return found[::-1]


def _edges_of_chunks(schedule: Schedule, rank: int) -> tuple[set[Action], set[Action]]:
    """First forward and last weight gradient of each stage on a rank, in the order of its row."""
    first: dict[int, Action] = {}
    last: dict[int, Action] = {}
    for action in (part for entry in schedule.actions[rank] for part in entry.parts):
        if action.kind is ActionKind.FORWARD:
            first.setdefault(action.stage, action)
        elif action.kind in (ActionKind.FULL_BACKWARD, ActionKind.BACKWARD_WEIGHT):
            last[action.stage] = action
    return set(first.values()), set(last.values())


def _program_of(
    chunk: ChunkPrograms, action: Action, first: set[Action], last: set[Action]
) -> Program | None:
    """The program an action runs; None if there is none for its kind."""
    if action.kind is ActionKind.FORWARD:
        return chunk.forward_first if action in first else chunk.forward
    if action.kind is ActionKind.FULL_BACKWARD:
        return chunk.backward_last if action in last else chunk.backward
    if action.kind is ActionKind.BACKWARD_INPUT:
        return chunk.backward_input
    if action.kind is ActionKind.BACKWARD_WEIGHT:
        return chunk.backward_weight_last if action in last else chunk.backward_weight
    return None


def _single_operation(row: dict[str, int]) -> Program:
    nothing = np.empty(0, dtype=np.int64)
    return Program(
        operations=Operations.from_rows([row], **OPERATION_DEFAULTS),
        dependency_rows=nothing,
        dependencies=nothing,
        buffers=ProgramBuffers.empty(),
        forward_release=nothing,
        input_release=nothing,
    )


def _to_csr(rows: Int64, sources: Int64, count: int) -> tuple[Int64, Int64]:
    order = np.argsort(rows, kind="stable")
    offsets = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.bincount(rows, minlength=count), out=offsets[1:])
    return offsets, sources[order]
