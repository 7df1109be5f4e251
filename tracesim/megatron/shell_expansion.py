"""What stands in the place of variables and arithmetic in a shell script.

A variable that nothing sets stays as it is written (``$NAME``), since whoever reads the result should be told of it; so
do commands in ``$(...)``, which are not run. Source: the GNU Bash manual, section 3.5.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
import warnings
from collections.abc import Callable, Mapping, MutableMapping

from .shell_words import Piece, ShellSyntaxError, Word, plain_pieces, quoted_pieces

Variables = MutableMapping[str, str | list[str]]
UNSET = re.compile(r"\$\{?(\w+)\}?")
"""A variable that nothing sets, standing for itself."""
_PARAMETER = re.compile(r"([#!]?)([A-Za-z_]\w*|\d+|[@*#?$!-])(\[[^\]]*\])?(.*)", re.DOTALL)
_LONGEST, _LARGEST_NUMBER = 1 << 20, 1 << 63
_SPECIAL = {"#": "0", "?": "0", "$": "1", "!": "1", "@": "", "*": "", "-": ""}
_OPERATIONS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: int(left / right),
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: Mapping[type, Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def fields_of(word: Word, variables: Variables) -> list[str]:
    """The words that a word becomes: variables outside of quotes are split at blanks, arrays are put in whole."""
    fields: list[str] = []
    open_field = False
    for piece in word.pieces:
        values, split = _values(piece, variables)
        parts = [part for value in values for part in value.split()] if split else values
        if split and values and values[0][:1].isspace():
            open_field = False
        for number, part in enumerate(parts):
            if open_field and number == 0:
                fields[-1] += part
            else:
                fields.append(part)
            open_field = True
        if split and values and values[-1][-1:].isspace():
            open_field = False
        if sum(map(len, fields)) > _LONGEST:
            raise ShellSyntaxError("its variables grow beyond 1 MiB")
    return fields


def text_of(pieces: tuple[Piece, ...], variables: Variables) -> str:
    """Pieces as one text, without splitting."""
    text = "".join(" ".join(_values(piece, variables)[0]) for piece in pieces)
    if len(text) > _LONGEST:
        raise ShellSyntaxError("its variables grow beyond 1 MiB")
    return text


def _values(piece: Piece, variables: Variables) -> tuple[list[str], bool]:
    """What a piece becomes, and whether that is split at blanks."""
    if piece.kind == "text":
        return [piece.text], False
    if piece.kind == "command":
        return [f"$({' '.join(piece.text.split())})"], False
    if piece.kind == "arithmetic":
        number = arithmetic(piece.text, variables)
        return [f"$(({piece.text.strip()}))" if number is None else str(number)], False
    found = _parameter(piece.text, variables, quoted=piece.quoted)
    if isinstance(found, list):
        return found, not piece.quoted
    return [found], not piece.quoted


def _parameter(text: str, variables: Variables, *, quoted: bool) -> str | list[str]:
    match = _PARAMETER.fullmatch(text)
    if match is None:
        return f"${{{text}}}"
    mark, name, index, rest = match.groups()
    held = _looked_up(name, index, variables)
    if mark == "#":
        return str(len(held) if held is not None else 0)
    if mark == "!":
        inner = held if isinstance(held, str) else ""
        return _parameter(inner, variables, quoted=quoted) if re.fullmatch(r"[A-Za-z_]\w*", inner) else ""
    default = re.match(r":?[-=+?]", rest)
    if default is not None:
        empty = held is None or (default.group()[0] == ":" and not held)
        sign = default.group()[-1]
        if sign == "+":
            return "" if empty else _default(rest[default.end() :], variables, quoted=quoted)
        if not empty:
            return held if held is not None else ""
        if sign == "?":
            return f"${{{name}}}"
        value = _default(rest[default.end() :], variables, quoted=quoted)
        if sign == "=":
            variables[name] = value
        return value
    if held is None:
        return f"${{{name}}}"
    if rest and isinstance(held, str):
        return _changed(held, rest, variables)
    return held


def _looked_up(name: str, index: str | None, variables: Variables) -> str | list[str] | None:
    held = variables.get(name, _SPECIAL.get(name))
    if isinstance(held, list):
        place = (index or "[0]")[1:-1]
        if place in ("@", "*"):
            return held
        number = arithmetic(place, variables)
        return held[number] if number is not None and -len(held) <= number < len(held) else None
    if held is not None and index is not None and index[1:-1] in ("@", "*"):
        return [held] if held else []
    return held


def _default(text: str, variables: Variables, *, quoted: bool) -> str:
    return text_of(quoted_pieces(text) if quoted and '"' not in text else plain_pieces(text), variables)


def _changed(value: str, rest: str, variables: Variables) -> str:
    """A value with a part cut off (``%``, ``#``), replaced (``/``), or in other letters (``^``, ``,``)."""
    match = re.match(r"%%|%|##|#|//|/|\^\^|\^|,,|,", rest)
    if match is None:
        return value
    mark, pattern = match.group(), text_of(plain_pieces(rest[match.end() :]), variables)
    if mark in ("^^", ",,"):
        return value.upper() if mark == "^^" else value.lower()
    if mark in ("/", "//"):
        old, _, new = pattern.partition("/")
        return value.replace(old, new, -1 if mark == "//" else 1) if old else value
    if mark in ("%", "%%"):
        cuts = range(len(value), -1, -1) if mark == "%" else range(len(value) + 1)
        return next((value[:cut] for cut in cuts if fnmatch.fnmatchcase(value[cut:], pattern)), value)
    if mark in ("#", "##"):
        cuts = range(len(value) + 1) if mark == "#" else range(len(value), -1, -1)
        return next((value[cut:] for cut in cuts if fnmatch.fnmatchcase(value[:cut], pattern)), value)
    return value


def arithmetic(text: str, variables: Variables) -> int | None:
    """The number that an expression of whole numbers gives; None where something in it is not known."""
    if len(text) > 1000:
        return None
    choice = re.fullmatch(r"([^?:]*)\?([^?:]*):([^?:]*)", text)
    if choice is not None:
        condition = arithmetic(choice.group(1), variables)
        return None if condition is None else arithmetic(choice.group(2 if condition else 3), variables)
    written = re.sub(r"\$\{(\w+)\}|\$(\w+)", lambda match: match.group(1) or match.group(2), text)
    if "$" in written or "`" in written:
        written = text_of(plain_pieces(text), variables)
    try:
        with warnings.catch_warnings():
            # Of text that is no expression Python may warn before it refuses it.
            warnings.simplefilter("ignore", SyntaxWarning)
            return _number(ast.parse(written.strip() or "0", mode="eval").body, variables, 0)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError):
        return None


def _number(node: ast.expr, variables: Variables, depth: int) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return int(node.value)
    if isinstance(node, ast.Name) and depth < 20:
        held = variables.get(node.id, "")
        value = held[0] if isinstance(held, list) and held else str(held)
        return _number(ast.parse(value, mode="eval").body, variables, depth + 1)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand, variables, depth)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = _number(node.left, variables, depth), _number(node.right, variables, depth)
        result = _OPERATIONS[type(node.op)](left, right)
        if abs(result) < _LARGEST_NUMBER:
            return result
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
        left, right = _number(node.left, variables, depth), _number(node.comparators[0], variables, depth)
        return int(_COMPARISONS[type(node.ops[0])](left, right))
    raise ValueError("not a whole number")
