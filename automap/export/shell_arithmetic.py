"""Arithmetic of the shell: whole numbers, of which nothing else is read."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

MAX_LENGTH = 400
"""Characters of an expression that is read: more than scripts have (assumed)."""
_LARGEST = 1 << 63
"""The shell's numbers are of 64 bits."""


def _divide(left: int, right: int) -> int:
    """The quotient, rounded towards 0 as the shell does."""
    found = abs(left) // abs(right)
    return found if (left < 0) == (right < 0) else -found


_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.Mod: lambda left, right: left - right * _divide(left, right),
}
_COMPARES: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def number(text: str) -> int | None:
    """The value of an expression of numbers, None where it is none that is read."""
    if len(text) > MAX_LENGTH:
        return None
    try:
        tree = ast.parse(text.replace("&&", " and ").replace("||", " or ").strip(), mode="eval")
        found = _value(tree.body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return found if abs(found) < _LARGEST else None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(int() as value):
            return int(value)
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand)
        case ast.BinOp(left, kind, right) if type(kind) in _BINARY:
            return int(_BINARY[type(kind)](_value(left), _value(right)))
        case ast.Compare(left, [kind], [right]) if type(kind) in _COMPARES:
            return int(_COMPARES[type(kind)](_value(left), _value(right)))
        case ast.BoolOp(kind, values):
            held = [_value(value) != 0 for value in values]
            return int(all(held) if isinstance(kind, ast.And) else any(held))
    raise ValueError("no arithmetic of whole numbers")
