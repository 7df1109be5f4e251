"""Lists of a number for each layer, which Megatron-LM takes as Python expressions: ``([0]*3+[1]*58)``.

Source: Megatron-LM ``training/arguments.py``, ``moe_freq_type``.
"""

from __future__ import annotations

import ast
import warnings

_LONGEST_TEXT, _MOST_LAYERS = 10_000, 100_000


def layer_numbers(text: str) -> list[int] | None:
    """The numbers of a list expression (lists, ``+`` and ``*``); None where it is none, or is unreasonably long."""
    if len(text) > _LONGEST_TEXT:
        return None
    try:
        with warnings.catch_warnings():
            # Of text that is no expression Python may warn before it refuses it.
            warnings.simplefilter("ignore", SyntaxWarning)
            found = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return found if isinstance(found, list) else None


def _value(node: ast.expr) -> int | list[int]:
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        items = [_value(item) for item in node.elts]
        if all(isinstance(item, int) for item in items):
            return [item for item in items if isinstance(item, int)]
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult):
            if isinstance(left, list) and isinstance(right, int):
                return _repeated(left, right)
            if isinstance(right, list) and isinstance(left, int):
                return _repeated(right, left)
    raise ValueError("no list expression")


def _repeated(items: list[int], times: int) -> list[int]:
    if len(items) * times > _MOST_LAYERS:
        raise ValueError("too many layers")
    return items * times
