"""What if a step had another number of microbatches, or ran them in another order.

The run is cut into the actions of a pipeline schedule (:mod:`.program`) and put together anew (:mod:`.arrangement`).
The first and the last microbatch stay first and last, those between are taken in turn. Put together in the order it
had, the run takes a little more or less than replayed: that difference is said, and a run for which it is large is
refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from op_graphs.columns import Int64
from op_graphs.vocabulary import Phase
from schedules import Action, Schedule, ScheduleError, build_schedule, peak_activations, schedule_names
from tracesim.errors import ScenarioError
from tracesim.replay.graph import EdgeKind, Rebuilt
from tracesim.replay.run import replay, step_duration, step_times
from tracesim.replay.what_if.arrangement import Placed
from tracesim.replay.what_if.memory import NO_CURVE, MemoryEffect, allocated_memory, gibibytes, unknown
from tracesim.replay.what_if.program import BACKWARD, FORWARD, INPUT, WEIGHT, Piece, Program, find_program
from tracesim.replay.what_if.selection import whole_number, with_note
from tracesim.replay.what_if.transfers import arranged

MOST_DIFFERENCE = 0.1
"""Share of the step by which a run put together as it was may differ from its replay."""
_NOTED_DIFFERENCE = 0.005
_PREFERRED = ("1f1b", "interleaved-1f1b", "gpipe", "looped-bfs", "zb-h1")


def microbatches(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """``16`` microbatches a step, in the order of the same schedule."""
    what = f"microbatches={value}"
    count = whole_number(value, "microbatches", 1)
    program = find_program(rebuilt, what)
    if count == program.schedule.microbatches:
        return rebuilt
    return _arranged(rebuilt, program, _same_schedule(program, count, what), what)


def schedule(rebuilt: Rebuilt, value: str) -> Rebuilt:
    """A pipeline schedule by name (``zb-h1``) or of a CSV file, with the stages and microbatches there are."""
    what = f"schedule={value}"
    program = find_program(rebuilt, what)
    wanted = _schedule_by_name(program, value, what)
    if _whole(wanted.actions) == _whole(program.schedule.actions):
        return rebuilt
    return _arranged(rebuilt, program, wanted, what)


def microbatch_memory(rebuilt: Rebuilt, value: str) -> MemoryEffect:
    """Activations of the microbatches that are held at once."""
    program = find_program(rebuilt, f"microbatches={value}")
    count = whole_number(value, "microbatches", 1)
    wanted = _same_schedule(program, count, f"microbatches={value}")
    return _held(rebuilt, program, wanted)


def schedule_memory(rebuilt: Rebuilt, value: str) -> MemoryEffect:
    """Activations of the microbatches that are held at once."""
    program = find_program(rebuilt, f"schedule={value}")
    return _held(rebuilt, program, _schedule_by_name(program, value, f"schedule={value}"))


# -- which schedule ----------------------------------------------------------------------------------------------------


def _schedule_by_name(program: Program, name: str, what: str) -> Schedule:
    measured = program.schedule
    chunks = measured.stages // measured.pp
    try:
        wanted = build_schedule(name, measured.pp, chunks, measured.microbatches)
    except (ScheduleError, OSError) as error:
        raise ScenarioError(f"{what}: {error}") from None
    return _checked(program, wanted, what)


def _same_schedule(program: Program, count: int, what: str) -> Schedule:
    """The schedule the run is of, with another number of microbatches."""
    measured = program.schedule
    chunks = measured.stages // measured.pp
    names = (*_PREFERRED, *(name for name in schedule_names() if name not in _PREFERRED))
    for name in names:
        try:
            known = build_schedule(name, measured.pp, chunks, measured.microbatches)
        except ScheduleError:
            continue
        if known.stage_ranks == measured.stage_ranks and _whole(known.actions) == _whole(measured.actions):
            try:
                return _checked(program, build_schedule(name, measured.pp, chunks, count), what)
            except ScheduleError as error:
                raise ScenarioError(f"{what}: {error}") from None
    raise ScenarioError(
        f"{what}: the order of actions of the trace is that of no known schedule, so it is not known how it goes on; "
        "ask for a schedule first, as in --what-if schedule=1f1b"
    )


def _checked(program: Program, wanted: Schedule, what: str) -> Schedule:
    """A schedule whose actions the run has the rows for."""
    measured = program.schedule
    if wanted.stage_ranks != measured.stage_ranks or wanted.copies > 1:
        raise ScenarioError(
            f"{what}: {wanted.name} places its stages on ranks {wanted.stage_ranks} in {wanted.copies} copies "
            f"of the model, the trace has them on {measured.stage_ranks}; layers are not moved between ranks"
        )
    if any(action.sub_actions for row in wanted.actions for action in row):
        raise ScenarioError(
            f"{what}: {wanted.name} runs forwards and backwards side by side, and how they share a device is not in "
            "the trace"
        )
    return wanted


def _whole(actions: Sequence[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    """The actions with a backward for the weight right behind the one for the input as one backward."""
    rows = []
    for row in actions:
        whole: list[Action] = []
        for action in row:
            last = whole[-1] if whole else None
            if action.kind is WEIGHT and last == action._replace(kind=INPUT):
                whole[-1] = action._replace(kind=BACKWARD)
            else:
                whole.append(action)
        rows.append(tuple(whole))
    return tuple(rows)


# -- putting together --------------------------------------------------------------------------------------------------


def _arranged(rebuilt: Rebuilt, program: Program, wanted: Schedule, what: str) -> Rebuilt:
    as_it_was = arranged(rebuilt, program, measured_orders(program))
    measured = program.schedule
    if wanted.splits_backward and wanted.actions != measured.actions:
        program = _with_split_backwards(rebuilt, program, what)
    before, again = (step_duration(step_times(replay(run))) for run in (rebuilt, as_it_was))
    difference = again / before - 1 if before else 0.0
    if abs(difference) > MOST_DIFFERENCE:
        raise ScenarioError(
            f"{what}: put together from its actions as it was, the step takes {again / 1e6:.3f} ms, "
            f"{100 * difference:+.0f} % against its replay, more than {100 * MOST_DIFFERENCE:.0f} %: the run does not "
            "consist of these actions alone"
        )
    changed = arranged(rebuilt, program, _orders(program, wanted))
    changed = with_note(
        changed,
        f"{what}: {wanted.microbatches} microbatches on {wanted.stages} stages by {wanted.name}, before "
        f"{measured.microbatches}; sends are taken to run beside compute",
    )
    if measured.microbatches == 1 and wanted.microbatches > 1:
        changed = with_note(
            changed,
            f"{what}: the trace has one microbatch, so all that it does in its forward and backward is repeated, its "
            "communication too",
        )
    if abs(difference) > _NOTED_DIFFERENCE:
        changed = with_note(
            changed,
            f"{what}: put together from its actions as it was, the step takes {100 * difference:+.1f} % "
            "against its replay",
        )
    return changed


def measured_orders(program: Program) -> list[list[Placed]]:
    """The pieces of each rank in the order they ran."""
    return _orders(program, program.schedule)


def _orders(program: Program, wanted: Schedule) -> list[list[Placed]]:
    """For each rank its pieces in the order of a schedule, between the frames of each step."""
    pieces = program.pieces
    ranks = max(piece.rank for piece in pieces) + 1
    orders: list[list[Placed]] = [[] for _ in range(ranks)]
    number = {
        (piece.rank, piece.step, piece.action): at
        for at, piece in enumerate(pieces)
        if piece.action is not None
    }
    inserted: set[tuple[int, int]] = set()
    for at, piece in enumerate(pieces):
        if piece.action is None:
            orders[piece.rank].append(Placed(at, None))
        elif (piece.rank, piece.step) not in inserted:
            inserted.add((piece.rank, piece.step))
            for action in wanted.actions[program.place[piece.rank]]:
                orders[piece.rank] += _copies(number, piece, action, program.schedule, wanted)
    return orders


def _copies(
    number: dict[tuple[int, int, Action], int],
    piece: Piece,
    action: Action,
    measured: Schedule,
    wanted: Schedule,
) -> list[Placed]:
    """The piece of an action, or the two halves of a backward where the run separates them."""
    like = _like(action.microbatch, measured.microbatches, wanted.microbatches)
    kinds = [action.kind]
    if (
        action.kind is BACKWARD
        and (piece.rank, piece.step, Action(action.stage, BACKWARD, like)) not in number
    ):
        kinds = [INPUT, WEIGHT]
    elif action.kind in (INPUT, WEIGHT):
        whole = number.get((piece.rank, piece.step, Action(action.stage, BACKWARD, like)))
        if whole is not None:
            # A run that separates most backwards but not this one: all of it counts for the input.
            both = action._replace(kind=BACKWARD)
            return [Placed(whole, both, both)] if action.kind is INPUT else []
    return [
        Placed(
            number[piece.rank, piece.step, Action(action.stage, kind, like)],
            action._replace(kind=kind),
            action if kind is kinds[-1] else None,
        )
        for kind in kinds
    ]


def _like(microbatch: int, before: int, after: int) -> int:
    """The microbatch of the trace that stands for one of a changed run: first, last, or those between in turn."""
    if microbatch == 0:
        return 0
    if microbatch == after - 1:
        return before - 1
    between = before - 2
    return 1 + (microbatch - 1) % between if between > 0 else min(microbatch, before - 1) if before < 2 else 0


def _with_split_backwards(rebuilt: Rebuilt, program: Program, what: str) -> Program:
    """The program with its whole backwards cut into slices for the input and for the weight.

    One that separates some of them already, but whose slices do not tell the others apart, is left as it is.
    """
    phase = rebuilt.graph.operations.phase
    backwards = np.array([p.action is not None and p.action.kind is BACKWARD for p in program.pieces])
    owned = program.of_row >= 0
    inside = owned & backwards[np.maximum(program.of_row, 0)]
    weights = inside & (phase == Phase.BACKWARD_WEIGHT)
    lacking = set(np.flatnonzero(backwards).tolist()) - set(np.unique(program.of_row[weights]).tolist())
    # Gradients are reduced when they are complete.
    weights |= inside & (phase == Phase.GRADIENT_SYNC)
    if lacking and program.schedule.splits_backward:
        return program
    if lacking:
        raise ScenarioError(
            f"{what}: it separates the backward for the weights, and the trace does not tell it from that for the "
            "input; looked for slices launched under (W) or PP:0W0 annotations, and the phases of simulated runs"
        )
    edges = rebuilt.edges
    launches = edges.kind == EdgeKind.LAUNCH
    call = edges.source[launches][weights[edges.target[launches]]]
    weights[call] = True
    gaps = call[call > 0] - 1
    weights[gaps[program.of_row[gaps] == program.of_row[gaps + 1]]] = True
    pieces: list[Piece] = []
    first = np.zeros(len(program.pieces), dtype=np.int64)
    for at, piece in enumerate(program.pieces):
        first[at] = len(pieces)
        if piece.action is not None and piece.action.kind is BACKWARD:
            pieces += [replace(piece, action=piece.action._replace(kind=kind)) for kind in (INPUT, WEIGHT)]
        else:
            pieces.append(piece)
    of_row = np.where(owned, first[np.maximum(program.of_row, 0)] + weights, program.of_row)
    actions = tuple(
        tuple(
            action._replace(kind=kind)
            for action in row
            for kind in ((INPUT, WEIGHT) if action.kind is BACKWARD else (action.kind,))
        )
        for row in program.schedule.actions
    )
    return replace(
        program, pieces=tuple(pieces), of_row=of_row, schedule=program.schedule.with_actions(actions)
    )


# -- memory ------------------------------------------------------------------------------------------------------------


def _held(rebuilt: Rebuilt, program: Program, wanted: Schedule) -> MemoryEffect:
    """The change of activations held at once, from what a forward of each rank allocates."""
    before, after = peak_activations(program.schedule), peak_activations(wanted)
    words = ", ".join(
        f"{old} -> {new} on pipeline rank {place}"
        for place, (old, new) in enumerate(zip(before, after, strict=True))
        if old != new
    )
    if not words:
        return MemoryEffect("unchanged: as many microbatches are held at once as before", {})
    says = f"activations of microbatches held at once: {words}"
    change: dict[int, int] = {}
    for rank in sorted({piece.rank for piece in program.pieces}):
        size = _bytes_of_a_forward(rebuilt, program, rank)
        if size is None:
            return unknown(f"{says}; how large they are is not: {NO_CURVE}")
        place = program.place[rank]
        change[rank] = round((after[place] - before[place]) * size)
    most = max(change.values(), key=abs)
    return MemoryEffect(f"{says}; up to {gibibytes(most)} at the peak", change)


def _bytes_of_a_forward(rebuilt: Rebuilt, program: Program, rank: int) -> float | None:
    """Median growth of allocated memory over the forwards of a rank; None without a curve."""
    curve = allocated_memory(rebuilt.timeline, rank)
    if curve is None:
        return None
    grown = []
    moment = _launch_moments(rebuilt)
    for at, piece in enumerate(program.pieces):
        if piece.rank == rank and piece.action is not None and piece.action.kind is FORWARD:
            rows = np.flatnonzero((program.of_row == at) & rebuilt.on_device())
            if len(rows):
                begin, end = int(moment[rows].min()), int(rebuilt.rows.end[rows].max())
                end = int(moment[rows].max()) if (moment[rows] < rebuilt.rows.start[rows]).all() else end
                grown.append(curve.at(end) - curve.at(begin - 1))
    return float(np.median(grown)) if grown else None


def _launch_moments(rebuilt: Rebuilt) -> Int64:
    """When each device row was launched, else when it started."""
    launches = rebuilt.edges.kind == EdgeKind.LAUNCH
    moment: Int64 = rebuilt.rows.start.copy()
    moment[rebuilt.edges.target[launches]] = rebuilt.rows.start[rebuilt.edges.source[launches]]
    return moment
