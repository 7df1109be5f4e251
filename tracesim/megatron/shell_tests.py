"""Conditions of a shell script: ``[ ... ]``, ``[[ ... ]]`` and ``test``.

Files do not exist, and a variable that nothing sets is empty. A condition on what only a machine knows, or on a pattern
(``=~``) other than that of a number, holds not. Source: the GNU Bash manual, section 6.4.
"""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Callable, Mapping

from .shell_expansion import UNSET, Variables, arithmetic

_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


def holds(words: list[str], variables: Variables) -> bool:
    """Whether a condition holds; ``words`` are what stands between the brackets."""
    for joint in ("||", "-o"):
        if joint in words:
            at = words.index(joint)
            return holds(words[:at], variables) or holds(words[at + 1 :], variables)
    for joint in ("&&", "-a"):
        if joint in words:
            at = words.index(joint)
            return holds(words[:at], variables) and holds(words[at + 1 :], variables)
    words = [word for word in words if word not in ("(", ")")]
    if words[:1] == ["!"]:
        return not holds(words[1:], variables)
    known = ["" if UNSET.fullmatch(word) else word for word in words]
    if len(words) == 1:
        return bool(known[0])
    if len(words) == 2:
        return {"-z": not known[1], "-n": bool(known[1])}.get(words[0], False)
    if len(words) >= 3:
        return _compares(known[0], words[1], " ".join(known[2:]), variables)
    return False


def _compares(left: str, sign: str, right: str, variables: Variables) -> bool:
    if sign in _NUMBERS:
        numbers = [arithmetic(side, variables) for side in (left, right)]
        if None in numbers:
            return False
        first, second = (number or 0 for number in numbers)
        return _NUMBERS[sign](first, second)
    if sign in ("=", "=="):
        return fnmatch.fnmatchcase(left, right)
    if sign == "!=":
        return not fnmatch.fnmatchcase(left, right)
    if sign == "=~":
        return right in ("^[0-9]+$", "^[1-9][0-9]*$") and left.isdecimal()
    if sign in ("<", ">"):
        return left < right if sign == "<" else left > right
    return False
