"""Checks of single values in model files, shared by every reader of models. Each returns what is wrong, or ''."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence

from .model import ModelError

LARGEST_SIZE = 2**31 - 1
MOST_LAYERS = 10_000


def whole_number_problem(value: object, low: int = 1, high: int = LARGEST_SIZE) -> str:
    """For a value that must be a whole number of a range."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        return f"must be a whole number from {low} to {high}, not {shown(value)}"
    return ""


def switch_problem(value: object) -> str:
    """For a value that must be true or false."""
    return "" if isinstance(value, bool) else f"must be true or false, not {shown(value)}"


def probability_problem(value: object) -> str:
    """For a dropout probability."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        return f"must be a number from 0 to below 1, not {shown(value)}"
    return ""


def factor_problem(value: object) -> str:
    """For a factor that may be left open."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        return f"must be a number above 0, or null, not {shown(value)}"
    return ""


def pattern_problem(value: object) -> str:
    """For the letters of a pattern of attention windows."""
    if isinstance(value, str) and value and not set(value) - {"w", "f"} and len(value) <= MOST_LAYERS:
        return ""
    return f"must be letters w (window) and f (full attention), one a layer, not {shown(value)}"


def layers_problem(letters: Mapping[str, str], *, empty: bool = True) -> Callable[[object], str]:
    """A check of a pattern of layers written in ``letters``, by what they mean; more may come to them later."""

    def problem(value: object) -> str:
        what = ", ".join(f"{letter} {meaning.replace('_', ' ')}" for letter, meaning in letters.items())
        if isinstance(value, str) and (value or empty) and len(value) <= MOST_LAYERS:
            wrong = next((at for at, letter in enumerate(value) if letter not in letters), None)
            if wrong is None:
                return ""
            return f"character {wrong + 1}: {value[wrong]!r} means nothing; {what}, one a layer"
        return f"must be letters, one a layer ({what}), not {shown(value)}"

    return problem


def choice_problem(value: object, choices: Sequence[str]) -> str:
    """For a value that must be one of a few words; names the nearest."""
    if isinstance(value, str) and value in choices:
        return ""
    near = difflib.get_close_matches(str(value).lower()[:100], choices, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"must be one of {', '.join(choices)}, not {shown(value)}{hint}"


def text_problem(value: object) -> str:
    """For a value that must be a text with something in it."""
    return "" if isinstance(value, str) and value.strip() else f"must be a text, not {shown(value)}"


def error_of(where: str, problems: Sequence[str]) -> ModelError:
    """One error for all problems found at one origin."""
    if len(problems) == 1:
        return ModelError(f"{where}: {problems[0]}")
    return ModelError("\n  ".join([f"{where}: {len(problems)} problems", *problems]))


def shown(value: object) -> str:
    """A value as messages print it: at most 60 characters."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return "a number of more than 60 digits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
