"""Options that the commands of ``tracesim schedule`` share: sizes of a schedule, and costs of its actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from schedules import ActionCosts, ScheduleError

_Command = TypeVar("_Command", bound=Callable[..., Any])


def size_options(command: _Command) -> _Command:
    """``--pp``, ``--vpp`` and ``--microbatches``."""
    for option in (
        click.option("--microbatches", type=int, metavar="M", help="Microbatches of a step."),
        click.option("--vpp", type=int, metavar="V", help="Model chunks a rank [default: what NAME needs]."),
        click.option("--pp", type=int, metavar="P", help="Pipeline ranks."),
    ):
        command = option(command)
    return command


def cost_options(command: _Command) -> _Command:
    """What a forward, a backward, a part of it, a pair and a transfer cost."""
    for option in (
        click.option(
            "--stage-factors", metavar="LIST", help="A factor of each stage's costs, as 1,1,1.2,0.8."
        ),
        click.option(
            "--transfer-cost",
            type=float,
            default=0.0,
            metavar="C",
            help="A result to another rank [default: 0].",
        ),
        click.option("--overlapped-cost", type=float, metavar="X", help="F beside B [default: their sum]."),
        click.option(
            "--weight-cost", type=float, metavar="W", help="Part of B for the weight [default: half]."
        ),
        click.option("--backward-cost", type=float, default=2.0, show_default=True, metavar="B"),
        click.option("--forward-cost", type=float, default=1.0, show_default=True, metavar="F"),
    ):
        command = option(command)
    return command


def costs_of(
    forward: float,
    backward: float,
    weight: float | None,
    overlapped: float | None,
    factors: str | None,
    transfer: float,
) -> ActionCosts:
    """The costs that the options say.

    Raises:
        ScheduleError: if they contradict each other, or a list cannot be read.
    """
    for_weight = backward / 2 if weight is None else weight
    if for_weight > backward:
        raise ScheduleError(
            f"--weight-cost {for_weight} is more than the whole backward, --backward-cost {backward}, it is a part of"
        )
    stage_factors = tuple(numbers("--stage-factors", factors, float)) if factors is not None else ()
    return ActionCosts(forward, backward - for_weight, for_weight, overlapped, stage_factors, transfer)


_Number = TypeVar("_Number", int, float)


def numbers(option: str, text: str, kind: type[_Number]) -> list[_Number]:
    """Numbers with commas between, of an option.

    Raises:
        ScheduleError: if there is anything else in it.
    """
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        wanted = "whole numbers" if kind is int else "numbers"
        raise ScheduleError(f"{option} {text!r} must be {wanted} with commas between") from None
