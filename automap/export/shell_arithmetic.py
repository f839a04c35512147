"""Arithmetic of the shell: whole numbers of 64 bits."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable

from automap.export.shell_syntax import Node, literal

_LARGEST = 1 << 63
_MOST_SHIFT = 64
"""Largest exponent and shift: beyond it no number but 0 and 1 has 64 bits."""
_NAME = re.compile(r"[A-Za-z_]\w*")


def _divide(left: int, right: int) -> int:
    """The quotient, rounded towards 0 as the shell does."""
    found = abs(left) // abs(right)
    return found if (left < 0) == (right < 0) else -found


def _few(operation: Callable[[int, int], int]) -> Callable[[int, int], int]:
    """An operation whose right operand is small, and not negative."""

    def checked(left: int, right: int) -> int:
        if not 0 <= right <= _MOST_SHIFT:
            raise ValueError("not a number of 64 bits")
        return operation(left, right)

    return checked


_BINARY: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divide,
    "%": lambda left, right: left - right * _divide(left, right),
    "**": _few(operator.pow),
    "<<": _few(operator.lshift),
    ">>": _few(operator.rshift),
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    ",": lambda _, right: right,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_UNARY: dict[str, Callable[[int], int]] = {
    "-": operator.neg,
    "+": operator.pos,
    "~": operator.invert,
    "!": operator.not_,
}


def number(node: Node, value: Callable[[Node], str], assign: Callable[[str, int | None], None]) -> int:
    """The value of an expression.

    Args:
        node: the expression.
        value: what a word stands for; for the name of a variable, what the variable holds.
        assign: gives a variable a value, None where it is not known.

    Raises:
        ValueError, ArithmeticError: it has none, or a part is not known.
    """
    kind, sign = node.get("Type", "Word"), node.get("Op", "")
    if kind == "Word":
        return integer(value(node))
    if kind == "ParenArithm":
        return number(node["X"], value, assign)
    found = functools.partial(number, value=value, assign=assign)
    if sign in ("++", "--"):
        before = found(node["X"])
        after = _assigned(node["X"], lambda: before + (1 if sign == "++" else -1), assign)
        return before if node.get("Post") else after
    if kind == "UnaryArithm":
        return int(_UNARY[sign](found(node["X"])))
    left, right = node["X"], node["Y"]
    if sign == "?":
        return found(right["X"] if found(left) else right["Y"])
    if sign == "&&":
        return int(found(left) != 0 and found(right) != 0)
    if sign == "||":
        return int(found(left) != 0 or found(right) != 0)
    if sign in _BINARY:
        return _fits(_BINARY[sign](found(left), found(right)))
    if sign == "=":
        return _assigned(left, lambda: found(right), assign)
    return _assigned(left, lambda: _fits(_BINARY[sign.removesuffix("=")](found(left), found(right))), assign)


def _assigned(node: Node, result: Callable[[], int], assign: Callable[[str, int | None], None]) -> int:
    """The value that a variable is given."""
    name = literal(node) or ""
    if not _NAME.fullmatch(name):
        raise ValueError("not a variable")
    try:
        found = result()
    except (ValueError, ArithmeticError):
        assign(name, None)
        raise
    assign(name, found)
    return found


def integer(text: str) -> int:
    """A number as the shell writes it: 12, 0x1f, 017 or 2#101; nothing is 0.

    Raises:
        ValueError: it is none.
    """
    match = re.fullmatch(r"\s*([-+]?)(?:0[xX]([0-9a-fA-F]{1,16})|(\d{1,2})#(\w{1,64})|(\d{0,20}))\s*", text, re.ASCII)
    if match is None:
        raise ValueError("not a number")
    sign, hexadecimal, base, digits, plain = match.groups()
    if hexadecimal:
        found = int(hexadecimal, 16)
    elif base:
        found = int(digits, int(base))
    else:
        found = int(plain or "0", 8 if plain.startswith("0") else 10)
    return _fits(-found if sign == "-" else found)


def _fits(found: int) -> int:
    if abs(found) >= _LARGEST:
        raise ValueError("not a number of 64 bits")
    return int(found)
