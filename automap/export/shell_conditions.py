"""Marks of what a script of the shell leaves open, and its conditions decided as far as they can be."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

from automap.export.shell_arithmetic import number

DEFAULT, MAYBE, OPEN, CLOSE, _BLANK = "\x01", "\x04", "\x02", "\x03", "\x05"
"""Marks in words: a default that the environment may change; a word that may be missing; the ends of a text that is not
known, and a blank in it, where no word ends."""
MARKS = str.maketrans({DEFAULT: None, MAYBE: None, OPEN: None, CLOSE: None, _BLANK: " "})
UNSET = re.compile(f"{OPEN}\\$\\w+{CLOSE}")
MAX_WORDS = 200
"""Words of a condition that are read: more than scripts have (assumed)."""


def plain(word: str) -> str:
    """A word without its marks, as it is shown."""
    return word.translate(MARKS)


def unknown(text: str) -> str:
    """The mark of what is not known, which is shown as a text."""
    shown = " ".join(plain(text).split())
    return f"{OPEN}{shown.replace(' ', _BLANK)}{CLOSE}"


def is_known(word: str) -> bool:
    """Whether a word has no part that only a run could tell."""
    return OPEN not in word


def holds(words: Sequence[str]) -> bool | None:
    """Whether a condition in brackets holds, or `test`, `true`, `false` or `:`; None where that cannot be told."""
    if words[0] in (":", "true", "false"):
        return words[0] != "false"
    closers = {"[": "]", "[[": "]]"}
    body = words[1:-1] if words[-1] == closers.get(words[0]) else words[1:]
    body = [word for word in body if word != "\n"]
    return None if len(body) > MAX_WORDS or "(" in body else _either(body)


def _either(words: list[str]) -> bool | None:
    for join, decided in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
        if join in words[1:-1]:
            at = words.index(join, 1)
            found = {_either(words[:at]), _either(words[at + 1 :])}
            return decided if decided in found else None if None in found else not decided
    if words[:1] == ["!"]:
        held = _either(words[1:])
        return None if held is None else not held
    return _one([plain(word) if is_known(word := UNSET.sub("", raw)) else None for raw in words])


def _one(words: list[str | None]) -> bool | None:
    match words:
        case []:
            return False
        case [word]:
            return None if word is None else word != ""
        case ["-n" | "-z" as kind, word]:
            return None if word is None else (word == "") == (kind == "-z")
        case [left, "=" | "==" | "!=" as kind, right] if left is not None and right is not None:
            return fnmatch.fnmatchcase(left, right) == (kind != "!=")
        case [left, "-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge" as kind, right] if None not in (left, right):
            signs = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
            result = number(f"({left or 0}) {signs[kind]} ({right or 0})")
            return None if result is None else result != 0
    return None
