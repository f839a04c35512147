"""Braces in words of a shell script: `--{tp,pp} {1..4}` is five words.

Braces are written out before anything else of a word is looked at, and only where they are not in quotes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TypeAlias

from automap.export.shell_syntax import Node

_RANGE = re.compile(r"(-?\d{1,9})\.\.(-?\d{1,9})(?:\.\.(-?\d{1,9}))?", re.ASCII)
_LETTERS = re.compile(r"([a-z])\.\.([a-z])(?:\.\.(-?\d{1,9}))?|([A-Z])\.\.([A-Z])(?:\.\.(-?\d{1,9}))?")
Token: TypeAlias = str | Node
"""A letter, a letter after a backslash, or a part in quotes or with a substitution."""


def written_out(word: Node, spend: Callable[[int], None]) -> list[Node]:
    """The words that a written word stands for once its braces are written out.

    Args:
        word: the word.
        spend: counts work; it raises an error where there is too much.
    """
    parts = word.get("Parts", ())
    if not any("{" in part.get("Value", "") for part in parts if part["Type"] == "Lit"):
        return [word]
    tokens: list[Token] = []
    for part in parts:
        tokens += re.findall(r"\\.|.", part.get("Value", ""), re.DOTALL) if part["Type"] == "Lit" else [part]
    return [{"Parts": list(_parts(found))} for found in _expanded(tokens, spend)]


def _parts(tokens: Sequence[Token]) -> Iterator[Node]:
    """The parts of a word."""
    for is_text, run in groupby(tokens, lambda token: isinstance(token, str)):
        if is_text:
            yield {"Type": "Lit", "Value": "".join(map(str, run))}
        else:
            yield from (token for token in run if not isinstance(token, str))


def _expanded(tokens: Sequence[Token], spend: Callable[[int], None]) -> list[list[Token]]:
    """Tokens with their first pair of braces written out, and so on until there is none."""
    for start, begin in enumerate(tokens):
        choices = _choices(tokens, start, spend) if begin == "{" else None
        if choices is None:
            continue
        end, choice = choices
        rest = _expanded(tokens[end + 1 :], spend)
        found = []
        for one in (inner for tokens_of in choice for inner in _expanded(tokens_of, spend)):
            for other in rest:
                spend(start + len(one) + len(other) + 1)
                found.append([*tokens[:start], *one, *other])
        return found
    return [list(tokens)]


def _choices(
    tokens: Sequence[Token], start: int, spend: Callable[[int], None]
) -> tuple[int, list[Sequence[Token]]] | None:
    """Where a pair of braces ends, and what stands in its place; None where the braces mean themselves."""
    depth, begins = 0, [start + 1]
    for at in range(start, len(tokens)):
        spend(1)
        depth += {"{": 1, "}": -1}.get(str(tokens[at]), 0)
        if tokens[at] == "," and depth == 1:
            begins.append(at + 1)
        elif depth == 0:
            if len(begins) > 1:
                return at, [tokens[a : b - 1] for a, b in zip(begins, [*begins[1:], at + 1], strict=True)]
            inner = tokens[start + 1 : at]
            texts = _range("".join(map(str, inner)), spend) if all(isinstance(one, str) for one in inner) else None
            return None if texts is None else (at, list(texts))
    return None


def _range(text: str, spend: Callable[[int], None]) -> list[str] | None:
    """The numbers or letters of `1..4` or `a..c`, also with a step; None for another text."""
    numbers, letters = _RANGE.fullmatch(text), _LETTERS.fullmatch(text)
    if numbers is not None:
        first, last, step = int(numbers[1]), int(numbers[2]), int(numbers[3] or 1)
        is_padded = any(re.match("-?0[0-9]", end) for end in numbers.groups()[:2])
        width = max(len(numbers[1]), len(numbers[2])) if is_padded else 0
    elif letters is not None:
        ends = [found for found in letters.groups() if found is not None]
        first, last, step = ord(ends[0]), ord(ends[1]), int(ends[2]) if len(ends) > 2 else 1
    else:
        return None
    step = abs(step) or 1
    spend(abs(last - first) // step)
    values = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
    return [f"{value:0{width}d}" for value in values] if numbers is not None else [chr(value) for value in values]
