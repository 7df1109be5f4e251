"""What actions cost where no machine is modelled: a number a kind, in any unit, and a factor a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from .actions import Action, ActionKind, ScheduleError


@dataclass(frozen=True)
class ActionCosts:
    """Cost of each kind of action, in units of the caller's choice. What is not named here is free."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    overlapped: float | None = None
    """Cost of a forward beside a full backward (``F&B``); the sum of both if None."""
    stage_factors: tuple[float, ...] = ()
    """Factor of each stage, for uneven ones; empty where all are equal."""
    transfer: float = 0.0
    """From the end of an action on one rank to when its result is on another; ranks do not wait for it otherwise."""

    def __post_init__(self) -> None:
        named = {
            "forward": self.forward,
            "backward_input": self.backward_input,
            "backward_weight": self.backward_weight,
            "overlapped": 0.0 if self.overlapped is None else self.overlapped,
            "transfer": self.transfer,
            **{f"factor of stage {stage}": factor for stage, factor in enumerate(self.stage_factors)},
        }
        for name, value in named.items():
            if not isfinite(value) or value < 0:
                raise ScheduleError(f"cost {name}={value} must be a number of at least 0")

    @property
    def backward(self) -> float:
        """Cost of a full backward."""
        return self.backward_input + self.backward_weight

    def check_stages(self, stages: int) -> None:
        """Raise an error unless there is a factor for each of ``stages`` stages, or none at all.

        Raises:
            ScheduleError: if the numbers differ.
        """
        if self.stage_factors and len(self.stage_factors) != stages:
            raise ScheduleError(
                f"{len(self.stage_factors)} stage factors are given for {stages} stages; give one a stage"
            )

    def of(self, action: Action) -> float:
        """Cost of an action."""
        if action.sub_actions:
            return self._overlapped(action.sub_actions)
        factor = self.stage_factors[action.stage] if self.stage_factors else 1.0
        return factor * self._of_kind(action.kind)

    def _of_kind(self, kind: ActionKind) -> float:
        if kind is ActionKind.FORWARD:
            return self.forward
        if kind is ActionKind.BACKWARD_INPUT:
            return self.backward_input
        if kind is ActionKind.BACKWARD_WEIGHT:
            return self.backward_weight
        return self.backward if kind is ActionKind.FULL_BACKWARD else 0.0

    def _overlapped(self, parts: Sequence[Action]) -> float:
        """Both parts one after the other, less what running them side by side saves."""
        alone = sum(map(self.of, parts))
        if self.overlapped is None or self.forward + self.backward == 0:
            return alone
        return alone * self.overlapped / (self.forward + self.backward)
