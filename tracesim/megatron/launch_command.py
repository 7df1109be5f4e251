"""The command of a launch script that trains: its arguments, the script it runs and the GPUs it starts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .arguments import UnsetVariable, argument_name
from .shell import ShellRun
from .shell_expansion import UNSET

_NUMBER = re.compile(r"-?\d+(\.\d*)?([eE][-+]?\d+)?")
_OF_A_MODEL = ("num-layers", "hidden-size", "hybrid-layer-pattern", "encoder-num-layers")
_PRINTS = ("echo", "printf", "cat", "mkdir", "cp")
_OF_A_LAUNCHER = re.compile(
    r"nproc-per-node|nnodes|node-rank|nodes|master-(addr|port)|rdzv-.*|max-restarts|tee|role|standalone|module|no-python"
    r"|num-gpus|num-nodes|hostfile|include|exclude|launcher.*|ntasks.*|gpus.*|gres|container-.*|kill-on-bad-exit|wait"
    r"|jobid|export|cpu-bind.*|mpi|no-container-.*|monitor-interval|log-dir|redirects|start-method|label|overlap"
)
"""Flags of torchrun, deepspeed and srun."""
_GPUS, _NODES = ("nproc-per-node", "num-gpus"), ("nnodes", "num-nodes")


@dataclass(frozen=True)
class TrainingCommand:
    """What a launch script runs."""

    arguments: dict[str, Any] = field(default_factory=dict)
    script: str = ""
    gpus: int | None = None


def chosen_command(run: ShellRun) -> TrainingCommand:
    """The command with the arguments of a model, of several the last; without one what variables hold.

    Commands that only print come last, as scripts print what they run.
    """
    candidates = [words for words in map(_flat, run.commands) if _flags(words)]
    if not any(_likeness(words)[0] for words in candidates):
        held = [value if isinstance(value, list) else [value] for value in run.variables.values()]
        # Behind the commands, so that these win where variables hold no model either.
        candidates.insert(0, [word for words in map(_flat, held) if _flags(words) for word in words])
    best = max(reversed(candidates), key=_likeness)
    start = _script_place(best)
    before, after = (best[:start], best[start + 1 :]) if start is not None else (best, best)
    launcher = _collected(before)
    arguments = _collected(after)
    if start is None:
        launcher = {
            key: value for key, value in arguments.items() if _OF_A_LAUNCHER.fullmatch(argument_name(key))
        }
        arguments = {key: value for key, value in arguments.items() if key not in launcher}
    script = best[start].rpartition("/")[2] if start is not None else ""
    return TrainingCommand(arguments, script, _started(launcher))


def argument_value(text: str) -> object:
    """A number where the text is one, a variable that nothing sets, else the text."""
    if UNSET.fullmatch(text):
        return UnsetVariable(text)
    if not _NUMBER.fullmatch(text):
        return text
    return int(text) if text.lstrip("-").isdecimal() else float(text)


def _flat(words: Iterable[str]) -> list[str]:
    """Words, those split that hold a command or flags themselves: ``"--fp8-format hybrid"``."""
    flat: list[str] = []
    for word in words:
        if " " not in word.strip() or "--" not in word or (word.startswith("$(") and word.endswith(")")):
            flat.append(word)
            continue
        try:
            flat += shlex.split(word)
        except ValueError:
            flat += word.split()
    return flat


def _flags(words: Iterable[str]) -> list[str]:
    return [argument_name(word.partition("=")[0]) for word in words if re.match(r"--[A-Za-z]", word)]


def _likeness(words: list[str]) -> tuple[bool, bool, int]:
    flags = _flags(words)
    return any(name in flags for name in _OF_A_MODEL), words[:1] != [] and words[0] not in _PRINTS, len(flags)


def _script_place(words: list[str]) -> int | None:
    """Where the training script stands: the last Python file in front of the arguments of a model."""
    end = next(
        (at for at, word in enumerate(words) if argument_name(word.partition("=")[0]) in _OF_A_MODEL),
        len(words),
    )
    files = [at for at, word in enumerate(words) if word.endswith(".py")]
    return max((at for at in files if at < end), default=files[0] if files else None)


def _collected(words: list[str]) -> dict[str, Any]:
    """Flags among words; what follows a flag up to the next is its value or values."""
    arguments: dict[str, Any] = {}
    flag: str | None = None
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            flag, equals, text = word[2:].partition("=")
            arguments[flag] = argument_value(text) if equals else True
            flag = None if equals else flag
        elif flag is not None and word:
            held, new = arguments[flag], argument_value(word)
            if held is True:
                arguments[flag] = new
            elif not isinstance(new, UnsetVariable):
                arguments[flag] = [*(held if isinstance(held, list) else [held]), new]
    return arguments


def _started(launcher: dict[str, Any]) -> int | None:
    """GPUs that the launcher starts, if it says how many on each node and, above one, how many nodes."""
    named = {argument_name(key): value for key, value in launcher.items()}
    each = next((named[name] for name in _GPUS if name in named), None)
    nodes = next((named[name] for name in _NODES if name in named), 1)
    if (
        isinstance(each, int)
        and isinstance(nodes, int)
        and not isinstance(each, bool)
        and each > 0
        and nodes > 0
    ):
        return each * nodes
    return None
