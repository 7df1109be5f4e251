"""Names of real kernels as a person says them: C++ functions without namespaces, template arguments and parameters."""

from __future__ import annotations

import re

_PARAMETERS = re.compile(r"\s*\((?!anonymous namespace\)).*$")
_MANGLED = re.compile(r"^_ZN?K?")
_ARGUMENTS = re.compile(r"IN?K?(S\w?_)?")
_LENGTH = re.compile(r"\d+")
_WRAPPERS = frozenset({"device_kernel", "Kernel", "Kernel2", "kernel", "kernel_kernel"})
"""Functions that say nothing by themselves: what they run is their first template argument."""


def short_name(name: str) -> str:
    """``void at::native::reduce_kernel<512, ...>(...)`` as ``reduce_kernel``; names that are no C++ as they are.

    Of a wrapper (``cutlass::device_kernel<flash::FlashAttnFwd<...>>``) what it runs is named: ``FlashAttnFwd``.
    """
    if _MANGLED.match(name):
        return _last_of_mangled(name)
    if " (" in name.replace(" (anonymous namespace)", "") or not any(
        mark in name for mark in ("::", "<", "(")
    ):
        return name
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    head, inner = _template(plain)
    short = _PARAMETERS.sub("", head).rpartition("::")[2].strip()
    if short in _WRAPPERS and inner:
        return short_name(inner) or short
    return short if short and short != "operator" else name


def _template(text: str) -> tuple[str, str]:
    """What stands before the template arguments of the last function of a qualified name, and the first of these."""
    depth, opened, head, inner = 0, 0, [], ""
    for place, letter in enumerate(text):
        if letter == "<":
            opened = opened if depth else place + 1
            depth += 1
        elif letter == ">" and depth:
            depth -= 1
            inner = "" if depth else text[opened:place]
        elif letter == "(" and not depth:
            break
        elif not depth:
            head.append(letter)
    if depth:
        # Cut off in the middle, as some tools write long names.
        inner = text[opened:]
    return "".join(head), _first_argument(inner)


def _first_argument(text: str) -> str:
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter in "<(") - (letter in ">)")
        if letter == "," and not depth:
            return text[:place].strip()
    return text.strip()


def _last_of_mangled(name: str) -> str:
    """The innermost name of a mangled one (Itanium ABI: each name behind its length) that is no wrapper."""
    prefix = _MANGLED.match(name)
    place, found = prefix.end() if prefix else 0, ""
    while length := _LENGTH.match(name, place):
        place = length.end() + int(length[0])
        found = name[length.end() : place]
        arguments = _ARGUMENTS.match(name, place)
        if arguments and found not in _WRAPPERS:
            break
        place = arguments.end() if arguments else place
    return found or name
