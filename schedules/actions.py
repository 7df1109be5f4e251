"""Actions and schedules: what every pipeline rank does, in order, as data.

The text of an action is the one ``torch.distributed.pipelining`` writes and reads: ``0F3`` is the forward of
microbatch 3 on stage 0, ``1SEND_F3`` the send of its output by stage 1, ``0UNSHARD`` the gathering of stage 0's
weights, ``(0F1;1B0)OVERLAP_F_B`` a forward and a backward run side by side. In a send or receive the stage is the
one of the rank that executes it: ``0SEND_F3`` on the sender is met by ``1RECV_F3`` on the receiver.

A schedule knows no clock, cost or stream.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import NamedTuple


class ScheduleError(ValueError):
    """A schedule that cannot be built, read or executed; the message shows where and what to do."""


class ActionKind(str, Enum):
    """What an action does; the value is its text."""

    FORWARD = "F"
    FULL_BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    OVERLAP_F_B = "OVERLAP_F_B"

    # Enum's own hash is a Python function, and actions are hashed by the hundred thousand.
    __hash__ = str.__hash__


COMPUTE_KINDS = frozenset(
    (
        ActionKind.FORWARD,
        ActionKind.FULL_BACKWARD,
        ActionKind.BACKWARD_INPUT,
        ActionKind.BACKWARD_WEIGHT,
        ActionKind.OVERLAP_F_B,
    )
)
SEND_KINDS = frozenset((ActionKind.SEND_F, ActionKind.SEND_B))
RECEIVE_KINDS = frozenset((ActionKind.RECV_F, ActionKind.RECV_B))
WEIGHT_KINDS = frozenset((ActionKind.UNSHARD, ActionKind.RESHARD, ActionKind.REDUCE_GRAD))
"""Kinds that concern the weights of a stage and belong to no microbatch."""


class Action(NamedTuple):
    """One step of a rank. ``str(action)`` is PyTorch's text; :func:`parse_action` reads it back."""

    stage: int
    """Global stage; -1 for an ``OVERLAP_F_B``, whose stages are those of its sub-actions."""
    kind: ActionKind
    microbatch: int = -1
    """-1 for actions that belong to no microbatch."""
    sub_actions: tuple[Action, ...] = ()

    def __str__(self) -> str:
        if self.sub_actions:
            return f"({';'.join(map(str, self.sub_actions))}){self.kind.value}"
        return f"{self.stage}{self.kind.value}{self.microbatch if self.microbatch >= 0 else ''}"

    @property
    def is_compute(self) -> bool:
        """Whether the action runs a part of the model."""
        return self.kind in COMPUTE_KINDS

    @property
    def is_send(self) -> bool:
        """Whether the action sends to a neighbouring stage."""
        return self.kind in SEND_KINDS

    @property
    def is_receive(self) -> bool:
        """Whether the action receives from a neighbouring stage."""
        return self.kind in RECEIVE_KINDS

    @property
    def parts(self) -> tuple[Action, ...]:
        """The sub-actions of an overlapped action, else the action itself."""
        return self.sub_actions or (self,)

    @property
    def peer(self) -> Action:
        """The receive that meets this send, or the send that meets this receive.

        Raises:
            ValueError: if the action is neither.
        """
        if self.kind not in _PEERS:
            raise ValueError(f"{self} neither sends nor receives, so it has no peer")
        kind, step = _PEERS[self.kind]
        return Action(self.stage + step, kind, self.microbatch)


_PEERS: dict[ActionKind, tuple[ActionKind, int]] = {
    ActionKind.SEND_F: (ActionKind.RECV_F, 1),
    ActionKind.RECV_F: (ActionKind.SEND_F, -1),
    ActionKind.SEND_B: (ActionKind.RECV_B, -1),
    ActionKind.RECV_B: (ActionKind.SEND_B, 1),
}

_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_SINGLE = re.compile(
    r"([0-9]{1,18})(F|I|B|W|UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)([0-9]{0,18})"
)


def parse_action(text: str) -> Action:
    """The action written as ``text``, which PyTorch or ``str(action)`` wrote; blanks around it are ignored.

    Raises:
        ScheduleError: if the text is no action, or lacks or has a microbatch against its kind.
    """
    stripped = text.strip()
    overlap = _OVERLAP.fullmatch(stripped)
    if overlap:
        sub_actions = tuple(parse_action(part) for part in overlap.group(1).split(";"))
        return Action(-1, ActionKind.OVERLAP_F_B, -1, sub_actions)
    match = _SINGLE.fullmatch(stripped)
    if not match:
        raise ScheduleError(
            f"{text!r} is no action: write STAGE KIND MICROBATCH without spaces, as in 0F0, 1B3, 0SEND_F2, "
            f"0UNSHARD or (0F1;1B0)OVERLAP_F_B; kinds are {', '.join(kind.value for kind in ActionKind)}"
        )
    kind = ActionKind(match.group(2))
    microbatch = int(match.group(3)) if match.group(3) else -1
    if microbatch < 0 and kind not in WEIGHT_KINDS:
        raise ScheduleError(f"{text!r} names no microbatch: a {kind.value} needs one, as in {stripped}0")
    return Action(int(match.group(1)), kind, microbatch)


def forward(stage: int, microbatch: int) -> Action:
    """The forward of a microbatch on a stage."""
    return Action(stage, ActionKind.FORWARD, microbatch)


def backward(stage: int, microbatch: int) -> Action:
    """The full backward (for input and weight) of a microbatch on a stage."""
    return Action(stage, ActionKind.FULL_BACKWARD, microbatch)


def backward_input(stage: int, microbatch: int) -> Action:
    """The backward for the input of a microbatch on a stage."""
    return Action(stage, ActionKind.BACKWARD_INPUT, microbatch)


def backward_weight(stage: int, microbatch: int) -> Action:
    """The backward for the weight of a microbatch on a stage."""
    return Action(stage, ActionKind.BACKWARD_WEIGHT, microbatch)


def overlapped(*parts: Action) -> Action:
    """A forward and a backward (full, or for the input) side by side."""
    return Action(-1, ActionKind.OVERLAP_F_B, -1, parts)


def v_placement(pp: int) -> tuple[int, ...]:
    """Rank of each stage where two stages a rank are laid out as a V: down the ranks, and back up."""
    return (*range(pp), *reversed(range(pp)))


@dataclass(frozen=True)
class Schedule:
    """The actions of every pipeline rank, in the order each executes them."""

    name: str
    pp: int
    """Pipeline ranks."""
    stages: int
    """Stages over all ranks and copies of the model (pp times the stages of a rank)."""
    microbatches: int
    """Microbatches of a step, over all copies."""
    actions: tuple[tuple[Action, ...], ...]
    """One row a rank."""
    stage_ranks: tuple[int, ...] = ()
    """Rank that holds each stage; left empty, stage ``s`` lies on rank ``s % pp`` (the loop placement)."""
    copies: int = 1
    """Copies of the model, each a pipeline of its own: 2 in bidirectional schedules, else 1.

    Copy c holds stages ``c * stages // copies`` and up, and takes the c-th share of the microbatches.
    """
    forward_only: bool = False
    """Whether there are no backwards, as in evaluation."""

    def __post_init__(self) -> None:
        if self.pp < 1 or self.stages < self.pp or self.microbatches < 1:
            raise ScheduleError(
                f"schedule {self.name}: needs pp >= 1, at least one stage a rank and one microbatch, "
                f"not pp={self.pp}, stages={self.stages}, microbatches={self.microbatches}"
            )
        if len(self.actions) != self.pp:
            raise ScheduleError(
                f"schedule {self.name}: {len(self.actions)} rows of actions for pp={self.pp} ranks"
            )
        if self.copies < 1 or self.stages % self.copies or self.microbatches % self.copies:
            raise ScheduleError(
                f"schedule {self.name}: copies={self.copies} of the model must divide stages={self.stages} and "
                f"microbatches={self.microbatches}"
            )
        placement = self.stage_ranks or tuple(stage % self.pp for stage in range(self.stages))
        if len(placement) != self.stages or not all(0 <= rank < self.pp for rank in placement):
            raise ScheduleError(
                f"schedule {self.name}: stage_ranks {placement} must name a rank below pp={self.pp} "
                f"for each of {self.stages} stages"
            )
        object.__setattr__(self, "stage_ranks", placement)

    def stage_rank(self, stage: int) -> int:
        """The rank that holds a stage."""
        return self.stage_ranks[stage]

    @cached_property
    def rank_stages(self) -> tuple[tuple[int, ...], ...]:
        """Stages of each rank, ascending: the place of a stage in its rank's row is its model chunk there."""
        held: list[list[int]] = [[] for _ in range(self.pp)]
        for stage, rank in enumerate(self.stage_ranks):
            held[rank].append(stage)
        return tuple(map(tuple, held))

    def chunk(self, stage: int) -> int:
        """Model chunk of a stage on its rank: 0 for the first of the rank's stages."""
        return self.rank_stages[self.stage_ranks[stage]].index(stage)

    @property
    def model_stages(self) -> int:
        """Stages of one copy of the model."""
        return self.stages // self.copies

    def model_stage(self, stage: int) -> int:
        """Which part of the model a stage holds: its number within its copy."""
        return stage % self.model_stages

    def is_first(self, stage: int) -> bool:
        """Whether the stage takes the microbatches in."""
        return stage % self.model_stages == 0

    def is_last(self, stage: int) -> bool:
        """Whether the stage computes the loss."""
        return stage % self.model_stages == self.model_stages - 1

    def stage_microbatches(self, stage: int) -> range:
        """Microbatches that pass through a stage."""
        share = self.microbatches // self.copies
        copy = stage // self.model_stages
        return range(copy * share, (copy + 1) * share)

    def steps(self) -> Iterator[tuple[int, int, Action]]:
        """Every (rank, step, action), rank after rank."""
        for rank, row in enumerate(self.actions):
            for step, action in enumerate(row):
                yield rank, step, action

    @cached_property
    def positions(self) -> Mapping[Action, tuple[int, int]]:
        """First (rank, step) at which each action, or sub-action of an overlapped action, stands."""
        found: dict[Action, tuple[int, int]] = {}
        for rank, step, action in self.steps():
            found.setdefault(action, (rank, step))
            for part in action.sub_actions:
                found.setdefault(part, (rank, step))
        return found

    @cached_property
    def has_communication(self) -> bool:
        """Whether sends and receives are written out."""
        return any(action.is_send or action.is_receive for row in self.actions for action in row)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether some backward is split into one for the input and one for the weight."""
        split = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
        return any(part.kind in split for row in self.actions for action in row for part in action.parts)

    def with_actions(self, actions: tuple[tuple[Action, ...], ...]) -> Schedule:
        """The same schedule with other rows: what a pass returns."""
        return replace(self, actions=actions)
