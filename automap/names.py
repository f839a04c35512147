"""Globs over operator names: `*` stands for one dotted component or a part of it, `**` for anything.

`h.*.mlp.up/MatMul` names that operator in every layer; `h.**` names all operators of all layers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable


@functools.lru_cache(maxsize=65536)
def _pattern(glob: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*|\*|\?)", glob)
    return re.compile("".join({"**": ".*", "*": "[^./]*", "?": "[^./]"}.get(p, re.escape(p)) for p in parts), re.DOTALL)


def matches(glob: str, name: str) -> bool:
    """Whether `glob` names the operator `name`."""
    return glob == name or _pattern(glob).fullmatch(name) is not None


def select(glob: str, names: Iterable[str]) -> list[str]:
    """The names that `glob` names, in their order."""
    return [name for name in names if matches(glob, name)]


def most_specific(globs: Iterable[str], name: str) -> str | None:
    """The glob that names `name` with the most literal characters; the name itself first, ties to the first."""
    best, best_length = None, -1
    for glob in globs:
        if glob == name:
            return glob
        length = len(glob) - glob.count("*") - glob.count("?")
        if length > best_length and matches(glob, name):
            best, best_length = glob, length
    return best
