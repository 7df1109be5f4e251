"""Applies what-ifs to a rebuilt run and says what comes out: the new step time, its range, and what limits it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tracesim.errors import ScenarioError, SimulationError
from tracesim.replay.graph import EdgeKind, Rebuilt
from tracesim.replay.limits import NOTED_UNEXPLAINED, Unexplained, refusal
from tracesim.replay.run import Replayed, limited_by, replay, step_duration, step_times
from tracesim.replay.what_if.memory import UNCHANGED, MemoryEffect, together
from tracesim.replay.what_if.registry import Applied, parse_what_ifs


@dataclass(frozen=True)
class Outcome:
    """What a run would have been. Times in nanoseconds: mean over the steps of the slowest rank."""

    what_ifs: tuple[str, ...]
    replayed: Replayed
    """The changed run."""
    step: int
    base_step: int
    """Of the unchanged replay."""
    low: int
    high: int
    """Range over what the trace does not decide: whether lateness without a cause, and waits for room, remain, and the
    readings of the what-ifs."""
    limits: dict[str, int]
    """Nanoseconds of the longest chain by what they are."""
    as_range: bool
    """Whether so much is unexplained that only the range says something."""
    memory: MemoryEffect = UNCHANGED
    notes: tuple[str, ...] = ()
    """What was taken for granted."""

    @property
    def change(self) -> float:
        """New step time over that of the unchanged replay, minus one."""
        return self.step / self.base_step - 1 if self.base_step else 0.0


def change(rebuilt: Rebuilt, what_ifs: Sequence[Applied], reading: int = -1) -> Rebuilt:
    """A run with all changes made, in the order given; in another reading of those that have one of that number."""
    for applied in what_ifs:
        rebuilt = applied.apply(rebuilt, reading)
    return rebuilt


def memory_of(rebuilt: Rebuilt, what_ifs: Sequence[Applied]) -> MemoryEffect:
    """What all changes together do to memory."""
    effects = []
    for number, applied in enumerate(what_ifs):
        effects.append(applied.memory(rebuilt))
        if number + 1 < len(what_ifs):
            rebuilt = applied.apply(rebuilt)
    return together(effects)


def ask(rebuilt: Rebuilt, texts: Sequence[str], lateness: Unexplained) -> Outcome:
    """Replay a run with what-ifs.

    Args:
        rebuilt: the run.
        texts: ``key=value`` each, as on the command line.
        lateness: how much of the run nothing explains.

    Raises:
        ScenarioError: if a what-if is not understood, changes nothing there is, or the run is too unexplained.
        SimulationError: if the changed run can never end.
    """
    what_ifs = parse_what_ifs(texts)
    reason = refusal(lateness)
    if reason:
        raise ScenarioError(f"--what-if {', '.join(texts)}: refused, because {reason}")
    try:
        return _asked(rebuilt, texts, what_ifs, lateness)
    except SimulationError as error:
        raise SimulationError(
            f"--what-if {', '.join(texts)}: cannot be answered, slices of the changed run wait for each other. {error}"
        ) from error


def _asked(
    rebuilt: Rebuilt, texts: Sequence[str], what_ifs: Sequence[Applied], lateness: Unexplained
) -> Outcome:
    variants = [rebuilt, _all_explained(rebuilt), _without_room(_all_explained(rebuilt))]
    base = [step_duration(step_times(replay(v))) for v in variants]
    changed = [replay(change(v, what_ifs)) for v in variants]
    steps = [step_duration(step_times(c)) for c in changed]
    ratios = [step / before for step, before in zip(steps, base, strict=True) if before]
    for reading in range(max((len(applied.what_if.readings) for applied in what_ifs), default=0)):
        other = step_duration(step_times(replay(change(rebuilt, what_ifs, reading))))
        ratios.append(other / base[0] if base[0] else 1.0)
    return Outcome(
        what_ifs=tuple(texts),
        replayed=changed[0],
        step=steps[0],
        base_step=base[0],
        low=round(min(ratios, default=1.0) * base[0]),
        high=round(max(ratios, default=1.0) * base[0]),
        limits=limited_by(changed[0]),
        as_range=lateness.step_share > NOTED_UNEXPLAINED,
        memory=memory_of(rebuilt, what_ifs),
        notes=tuple(note for note in changed[0].rebuilt.notes if note not in rebuilt.notes),
    )


def _all_explained(rebuilt: Rebuilt) -> Rebuilt:
    return replace(rebuilt, unexplained=np.zeros(len(rebuilt.rows), dtype=np.int64))


def _without_room(rebuilt: Rebuilt) -> Rebuilt:
    return rebuilt.with_edges(rebuilt.edges.take(np.flatnonzero(rebuilt.edges.kind != EdgeKind.ADMISSION)))
