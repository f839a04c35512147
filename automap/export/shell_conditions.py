"""Marks for unknown values in the words of a shell script, and decisions of its conditions as far as possible."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Sequence
from enum import Enum

from automap.export.shell_arithmetic import integer

DEFAULT = "\x01"
"""Mark in a word: a default that the environment may change."""
MAYBE = "\x04"
"""Mark of a word that may be missing."""
OPEN, CLOSE = "\x02", "\x03"
"""Marks at the two ends of a text that is not known."""
_HIDDEN = {
    code: 0xE000 + code
    for code in (*range(9, 14), *range(32, 48), *range(58, 65), *range(91, 95), 96, *range(123, 127))
}
"""Blanks and signs -> characters of Unicode's private use area, which have no meaning in the shell: so an unknown text
stays one word wherever it is read again."""
_SHOWN = {hidden: code for code, hidden in _HIDDEN.items()}
_PLAIN: dict[int, int | None] = {**dict.fromkeys(map(ord, (DEFAULT, MAYBE, OPEN, CLOSE))), **_SHOWN}
MARKS = dict.fromkeys(_PLAIN)
"""Characters that a script may not contain, because they are marks here."""
UNSET = re.compile(f"{OPEN}{chr(_HIDDEN[ord('$')])}\\w+{CLOSE}")
MAX_WORDS = 200
"""Words of a condition that are read: more than scripts have (assumed)."""
_COMPARES: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


class Outcome(Enum):
    """How a command ends."""

    HOLDS = "it succeeds"
    FAILS = "it fails"
    OPEN = "only a run could tell"
    RAN = "a program that was started: it is taken to succeed where commands are joined by && and ||"

    @staticmethod
    def of(held: bool | None) -> Outcome:
        """The outcome of a condition that holds, does not hold, or is not known to."""
        return Outcome.OPEN if held is None else Outcome.HOLDS if held else Outcome.FAILS

    @property
    def held(self) -> bool | None:
        """Whether a condition holds; None where that is not known."""
        return None if self in (Outcome.OPEN, Outcome.RAN) else self is Outcome.HOLDS


def plain(word: str) -> str:
    """A word without its marks, as it is shown."""
    return word.translate(_PLAIN)


def unknown(text: str) -> str:
    """The mark for an unknown value; it is shown as this text."""
    return f"{OPEN}{' '.join(plain(text).split()).translate(_HIDDEN)}{CLOSE}"


def is_known(word: str) -> bool:
    """Whether a word has no part that only a run could tell."""
    return OPEN not in word


def both(one: bool | None, other: bool | None) -> bool | None:
    """Whether two conditions hold together; None if that is not known."""
    return False if False in (one, other) else None if None in (one, other) else True


def negated(held: bool | None) -> bool | None:
    """Whether a condition does not hold; None if that is not known."""
    return None if held is None else not held


def holds(words: Sequence[str]) -> bool | None:
    """Whether the condition of `[` or `test` holds; None where that cannot be told."""
    body = list(words[1:-1] if words[0] == "[" else words[1:])
    return None if len(body) > MAX_WORDS or "(" in body else _either(body)


def _either(words: list[str]) -> bool | None:
    for join in ("-o", "-a"):
        if join in words[1:-1]:
            at = words.index(join, 1)
            one, other = _either(words[:at]), _either(words[at + 1 :])
            return both(one, other) if join == "-a" else negated(both(negated(one), negated(other)))
    if words[:1] == ["!"] and len(words) > 1:
        return negated(_either(words[1:]))
    return compared(words)


def compared(raw: Sequence[str]) -> bool | None:
    """Whether a condition of up to three words holds, such as `4 -gt 2`; None where that cannot be told."""
    known = [UNSET.sub("", word) for word in raw]
    if not all(map(is_known, known)):
        return None
    match [plain(word) for word in known]:
        case []:
            return False
        case [word]:
            return word != ""
        case ["-n" | "-z" as kind, word]:
            return (word == "") == (kind == "-z")
        case [left, "=" | "==" | "!=" as kind, right]:
            return fnmatch.fnmatchcase(left, right) == (kind != "!=")
        case [left, "-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge" as kind, right]:
            try:
                return bool(_COMPARES[kind](integer(left), integer(right)))
            except ValueError:
                return None
    return None
