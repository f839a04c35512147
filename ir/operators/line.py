"""Factor rules of operator kinds, written as one line in the style of einsum.

    MatMul    ... m k+, ... k n -> ... m n
    Softmax   {rows axis@softmax} -> {rows axis}

Operands stand before `->` by ONNX position, results after it; a comma separates tensors, a blank separates dims. An
operand in brackets is optional, and `*` after an operand repeats it. A dim is written as

| | |
|---|---|
| `m` | one loop; the same name is the same loop everywhere |
| `(h d)` | loops merged into one dim, the major one first; only the major one can be split |
| `{rows axis!}` | any number of dims, each with one of these names; the entry assigns names to dims |
| `...` | dims that broadcast as in numpy |
| `1`, `()` | a dim of size 1 that broadcasts; a tensor without dims |

Marks after a name: `!` means that the loop is never split, `!!` that not even the samples are split if that dim holds
the batch; `+` means that the loop is summed, so that a split gives partial results; `@name` means that a split takes a
collective inside the operator (if the use states one). Several marks are alternatives, `?` standing for no mark: which
of them applies depends on the use, and is explained in the docstring of the entry. The batch is not written: in
whichever dim holds it, it is the major loop.

The factor of a loop has the loop's name if that is a single letter; other loops are numbered (`d0`, `d1` ...), so that
rules of equal structure are equal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Loop:
    """One loop of a dim."""

    name: str
    marks: tuple[str, ...] = ()
    """`!`, `!!`, `+` or `@name`; several marks are alternatives, `?` standing for no mark."""


Dim = tuple[Loop, ...]
"""The loops of one dim, major first; empty for `1`."""


@dataclass(frozen=True, slots=True)
class Run:
    """Any number of dims, each of them one of `choices` (braces in the line)."""

    choices: tuple[Dim, ...]


BROADCAST = Run(())
"""The dims of `...`."""


@dataclass(frozen=True, slots=True)
class Operand:
    """The dims of one operand or result of a line."""

    dims: tuple[Dim | Run, ...]
    is_optional: bool = False
    is_repeated: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """A parsed line."""

    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]

    @property
    def collectives(self) -> frozenset[str]:
        """The names of all `@` marks."""
        dims = [d for operand in self.inputs for d in operand.dims]
        plain = [c for d in dims for c in (d.choices if isinstance(d, Run) else (d,))]
        return frozenset(mark[1:] for dim in plain for loop in dim for mark in loop.marks if mark[0] == "@")


_DIM = re.compile(r"\{[^{}]*\}|\([^()]*\)|\.\.\.|[^\s(){}]+")
_LOOP = re.compile(r"([a-z_]+)((?:!!|!|\+|\?|@[a-z_]+)*)")
_MARK = re.compile(r"!!|!|\+|\?|@[a-z_]+")


@cache
def parse(text: str) -> Line:
    """Parses a line in the notation of this module.

    Raises:
        ValueError: the text does not follow the notation.
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise ValueError(f"rule {text!r} has no `->`")
    return Line(_operands(left), _operands(right))


def _operands(text: str) -> tuple[Operand, ...]:
    return tuple(_operand(part.strip()) for part in text.split(",")) if text.strip() else ()


def _operand(text: str) -> Operand:
    is_optional, is_repeated = text.startswith("["), text.endswith("*")
    text = text.removesuffix("*").removeprefix("[").removesuffix("]").strip()
    if text == "()":
        return Operand((), is_optional, is_repeated)
    return Operand(tuple(_dim(token) for token in _tokens(text)), is_optional, is_repeated)


def _tokens(text: str) -> list[str]:
    tokens: list[str] = _DIM.findall(text)
    if "".join(tokens).replace(" ", "") != text.replace(" ", ""):
        raise ValueError(f"{text!r} is not a list of dims")
    return tokens


def _dim(text: str) -> Dim | Run:
    if text == "...":
        return BROADCAST
    if text.startswith("{"):
        return Run(tuple(_loops(part) for part in _tokens(text[1:-1])))
    return _loops(text)


def _loops(text: str) -> Dim:
    return () if text == "1" else tuple(_loop(part) for part in text.strip("()").split())


def _loop(text: str) -> Loop:
    found = _LOOP.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a loop with marks")
    return Loop(found[1], tuple(_MARK.findall(found[2])))
