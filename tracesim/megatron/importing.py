"""From an argument list to a scenario; nothing that changes a step is left out silently."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ScenarioError
from .argument_table import has_no_effect, nearest, needed_argument, stand_in, why_refused
from .arguments import Arguments, argument_name
from .deepspeed_arguments import add_deepspeed_defaults
from .hybrid_arguments import place_stages, read_hybrid
from .model_arguments import model_mapping
from .plan_arguments import (
    libraries_mapping,
    overlap_mapping,
    parallel_mapping,
    schedule_name,
    training_mapping,
)


@dataclass(frozen=True)
class ImportedScenario:
    """A scenario as ``load_scenario`` reads it, and what importing it took for granted."""

    mapping: dict[str, Any]
    assumed: tuple[str, ...]
    """What the arguments leave open, and what was taken."""
    without_effect: tuple[str, ...]
    """Arguments that do not change what a step costs."""
    left_out: tuple[str, ...]
    """Arguments that the caller asked to leave out."""


def import_megatron(
    values: Mapping[Any, Any],
    hardware: str | Mapping[str, Any],
    *,
    world_size: int | None = None,
    launched: int | None = None,
    vocab_size: int | None = None,
    environment: Mapping[str, Any] | None = None,
    is_bert: bool = False,
    default_backend: str = "flash",
    leave_out: Collection[str] = (),
    name: str = "megatron",
) -> ImportedScenario:
    """The scenario of an argument list.

    Args:
        values: arguments by name, as flags or as YAML spells them; a switch is ``True``.
        hardware: what the scenario says about the machine.
        world_size: GPUs; without it as many as one data-parallel rank needs.
        launched: GPUs that a launcher starts, taken without ``world_size`` if the plan fits them.
        vocab_size: words of the tokenizer, before padding, where the arguments do not give them.
        environment: environment variables of the run.
        is_bert: ``pretrain_bert.py`` was run, not ``pretrain_gpt.py``.
        default_backend: attention where no backend is named: ``flash`` or ``unfused``.
        leave_out: arguments to ignore although they change the step or are unknown.
        name: of the scenario.

    Raises:
        ScenarioError: with every argument that cannot be simulated or is unknown, one a line.
    """
    ignored = {argument_name(key) for key in leave_out}
    arguments = Arguments.of(
        {key: value for key, value in values.items() if argument_name(key) not in ignored}
    )
    add_deepspeed_defaults(arguments)
    plan, hybrid = parallel_mapping(arguments, world_size, launched), read_hybrid(arguments)
    if hybrid is not None:
        place_stages(arguments, plan, hybrid)
    model = model_mapping(arguments, vocab_size, hybrid, is_bert=is_bert)
    training = training_mapping(arguments, plan, default_backend)
    mapping = {
        "name": name,
        "model": model,
        "hardware": hardware,
        "parallel": plan,
        "training": training,
        "schedule": schedule_name(arguments, plan),
        "overlap": overlap_mapping(arguments, plan),
        "libraries": libraries_mapping(arguments, environment or {}),
    }
    without_effect = _judge_the_rest(arguments)
    if arguments.problems:
        count = "a problem" if len(arguments.problems) == 1 else f"{len(arguments.problems)} problems"
        raise ScenarioError("\n  ".join([f"the argument list has {count}:", *arguments.problems]))
    return ImportedScenario(mapping, tuple(arguments.assumed), without_effect, tuple(sorted(ignored)))


def _judge_the_rest(arguments: Arguments) -> tuple[str, ...]:
    """Sort arguments nothing asked for: known to have no effect, priced as something else, refused, or unknown."""
    without_effect: list[str] = []
    refused: dict[str, list[str]] = {}
    for name, value in arguments.values.items():
        if name in arguments.asked or value is None or value is False:
            continue
        reason, taken = why_refused(name), stand_in(name)
        if _means_nothing(arguments, name):
            without_effect.append(name)
        elif reason is not None and not _is_off(name, value):
            refused.setdefault(reason, []).append(name)
        elif taken is not None and not _is_off(name, value):
            arguments.assumed.append(f"--{name}: {taken}")
        elif reason is not None or taken is not None or has_no_effect(name):
            without_effect.append(name)
        else:
            advice = nearest(name, arguments.asked)
            arguments.refuse([name], f"is not known{advice}; --leave-out {name} imports the rest")
    for reason, names in refused.items():
        which = names[0] if len(names) == 1 else "with each name"
        arguments.refuse(names, f"{reason}; --leave-out {which} imports the rest")
    return tuple(without_effect)


def _means_nothing(arguments: Arguments, name: str) -> bool:
    """Whether an argument means something only beside one that is not given, or that is refused as a whole."""
    needed = needed_argument(name)
    given = [other for other in needed or () if arguments.given(other)]
    unknown = why_refused(name) is None and stand_in(name) is None and not has_no_effect(name)
    return needed is not None and (not given or (unknown and any(map(why_refused, given))))


def _is_off(name: str, value: object) -> bool:
    """Whether a value asks for nothing: 0, an empty list, or one piece of what could be several."""
    one_piece = name.endswith(("-size", "-shards", "-for-training")) and str(value) == "1"
    return one_piece or str(value) in ("0", "0.0", "[]", "()", "")
