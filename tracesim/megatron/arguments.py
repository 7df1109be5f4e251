"""An argument list of Megatron-LM with typed access: what was asked for is known, and what is wrong is gathered."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_NONE_IS_A_WORD = ("position-embedding-type", "moe-router-load-balancing-type")
"""Arguments of which ``none`` is a choice."""
_VARIABLE = re.compile(r"\$\{?(\w+)")
_MOST_SHOWN = 6
_YES, _NO = ("true", "yes", "on"), ("false", "no", "off", "none", "null")


class UnsetVariable(str):
    """A variable that nothing sets, in the place of a value: a switch may stand before it."""


def argument_name(key: object) -> str:
    """An argument as its command-line flag spells it, without the dashes in front: ``num_layers`` is ``num-layers``."""
    return str(key).lstrip("-").replace("_", "-")


@dataclass
class Arguments:
    """Arguments by name; absent, ``null`` and ``false`` are the same, as for a flag that is not given."""

    values: Mapping[str, Any]
    problems: list[str] = field(default_factory=list)
    """What is wrong, an argument a line."""
    assumed: list[str] = field(default_factory=list)
    """What the arguments leave open, and what was taken."""
    asked: set[str] = field(default_factory=set)
    """Names that were looked up, whether they are given or not."""

    @classmethod
    def of(cls, values: Mapping[Any, Any]) -> Arguments:
        """Arguments whose names may be written in any of Megatron's ways."""
        named = {argument_name(key): value for key, value in values.items()}
        return cls(
            {name: value if name in _NONE_IS_A_WORD else _plain(value) for name, value in named.items()}
        )

    def get(self, name: str) -> Any:  # noqa: ANN401 - a value of an argument list
        """The value of an argument, None if it is not given."""
        self.asked.add(name)
        value = self.values.get(name)
        return None if value is False else value

    def imply(self, implied: Mapping[str, Any]) -> None:
        """Set arguments that others imply; what is given itself stays, unless it is implied to be none."""
        given = {name: value for name, value in self.values.items() if implied.get(name, "") is not None}
        self.values = {**implied, **{name: value for name, value in given.items() if value is not None}}
        self.asked.update(implied)

    def given(self, name: str) -> bool:
        """Whether an argument is given at all."""
        return self.get(name) is not None

    def flag(self, name: str) -> bool:
        """Whether a switch is set."""
        value = self.get(name)
        if value not in (None, True) and not isinstance(value, UnsetVariable):
            self._refuse_value(name, "is a switch, it takes no value")
        return value is not None

    def count(self, name: str, default: int | None = None) -> int | None:
        """A whole number from 1; 0 stands for none where there is no default."""
        value = self.get(name)
        if value is None:
            return default
        number = _whole(value)
        if number == 0 and default is None:
            return None
        if number is None or number < 1:
            self._refuse_value(name, "must be a whole number from 1")
            return default
        return number

    def first_given(self, *names: str) -> str:
        """The first of the names that is given, else the first of all: an argument, then what it was called before."""
        given = [name for name in names if self.given(name)]
        return given[0] if given else names[0]

    def required(self, name: str) -> int:
        """A whole number from 1 without which there is no scenario; 1 where it is missing, which is noted."""
        found = self.count(name)
        if self.get(name) is None:
            self.problems.append(f"--{name} is missing")
        elif found is None and _whole(self.get(name)) == 0:
            self.refuse(name, "must be a whole number from 1")
        return found or 1

    def number(self, name: str, default: float) -> float:
        """A number."""
        value = self.get(name)
        if value is None:
            return default
        try:
            return float(value)
        except (TypeError, ValueError):
            self._refuse_value(name, "must be a number")
            return default

    def text(self, name: str, default: str = "") -> str:
        """A word or text."""
        value = self.get(name)
        return default if value is None else str(value)

    def choice(self, name: str, default: str, choices: Mapping[str, str]) -> str:
        """What a word stands for in ``choices``."""
        value = self.text(name, default)
        if value not in choices:
            self._refuse_value(name, f"must be one of {', '.join(choices)} to be simulated")
            return choices[default]
        return choices[value]

    def words(self, name: str) -> list[str]:
        """A list: several words behind a flag, or in brackets."""
        value = self.get(name)
        if value is None:
            return []
        text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        return text.strip("[]()'\" ").replace(",", " ").split()

    def _refuse_value(self, name: str, reason: str) -> None:
        """Refuse what is no value of its kind; a variable that nothing sets is told as such."""
        variable = _VARIABLE.search(str(self.values.get(name)))
        if variable is not None:
            called = variable.group(1)
            reason = f"{called} is set nowhere in the file; say it with --variable {called}=..."
        self.refuse(name, reason)

    def refuse(self, names: str | list[str], reason: str) -> None:
        """Note that an argument, or several for one reason, cannot be simulated as they are."""
        shown = []
        for name in [names] if isinstance(names, str) else names:
            value = self.values.get(name)
            shown.append(f"--{name}" + ("" if value is True else f" {str(value)[:60]}"))
        more = f" and {len(shown) - _MOST_SHOWN} more" if len(shown) > _MOST_SHOWN else ""
        self.problems.append(f"{', '.join(shown[:_MOST_SHOWN])}{more}: {reason}")


def _plain(value: object) -> object:
    if isinstance(value, str) and not isinstance(value, UnsetVariable):
        # A shell may leave quotes around what was quoted twice.
        word = value.strip().strip("'\"")
        if word.lower() in _YES:
            return True
        return None if word.lower() in _NO else word
    return value


def _whole(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    try:
        return int(str(value))
    except ValueError:
        return None
