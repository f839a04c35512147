"""Globs over operator names: `*` matches one dotted component or a part of it, `**` matches anything.

The name of an operator is `scope/Kind`; the scope is the dotted path of its module. `h.*.mlp.up/MatMul` matches that
operator in every layer, `h.*.mlp` (a module) all operators inside that module and its submodules, `h.**` every name
with that beginning. The full name of an operator matches only that operator.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

_INSIDE = r"(?:(?:\.[^/]*)?/[^/]*)?"
"""Expression for the rest of a name after a module: submodules and, after the slash, a kind."""


@functools.lru_cache(maxsize=65536)
def _pattern(glob: str, behind: str) -> re.Pattern[str]:
    """The regular expression of a glob.

    A wildcard and the text after it form an atomic group without backtracking: the first place where the text matches
    is as good as any later one. Only the last wildcard of each kind, which must reach the end, backtracks. So no glob
    takes exponential time.
    """
    parts = glob.split("**")
    first, *others = [_run(part, is_last=i == len(parts) - 1) for i, part in enumerate(parts)]
    if not others:
        return re.compile(first + behind, re.DOTALL)
    atomic = "".join(f"(?>.*?{run})" for run in others[:-1])
    return re.compile(f"{first}{atomic}.*?{others[-1]}{behind}", re.DOTALL)


def _run(glob: str, *, is_last: bool) -> str:
    """The regular expression of a glob without `**`."""
    first, *others = (re.escape(part).replace(r"\?", "[^./]") for part in glob.split("*"))
    if not others:
        return first
    atomic = "".join(f"(?>[^./]*?{part})" for part in others[:-1])
    return f"{first}{atomic}[^./]*?{others[-1]}" if is_last else f"{first}{atomic}(?>[^./]*?{others[-1]})"


def matches(glob: str, name: str) -> bool:
    """Whether `glob` matches the operator `name` or a module that contains it."""
    return glob == name or _pattern(glob, _INSIDE).fullmatch(name) is not None


def matches_operator(glob: str, name: str) -> bool:
    """Whether `glob` matches the operator `name` itself, not only its module."""
    return glob == name or _pattern(glob, "").fullmatch(name) is not None


def select(glob: str, names: Iterable[str]) -> list[str]:
    """The names that `glob` matches, in their order."""
    names = list(names)
    if glob in names:
        return [glob]
    fullmatch = _pattern(glob, _INSIDE).fullmatch
    return [name for name in names if fullmatch(name)]


def most_specific(globs: Iterable[str], name: str) -> str | None:
    """The matching glob with the most literal characters; the name itself comes first, and of equal globs the first."""
    globs = tuple(globs)
    return name if name in globs else first_match(by_precision(globs), name)


def by_precision(globs: Iterable[str]) -> tuple[str, ...]:
    """Globs sorted by their number of literal characters, the most first; equal globs keep their order."""
    return tuple(sorted(globs, key=lambda glob: glob.count("*") + glob.count("?") - len(glob)))


def first_match(globs: tuple[str, ...], name: str) -> str | None:
    """The first glob that matches `name`."""
    found = _any_of(globs).fullmatch(name) if globs else None
    return globs[found.lastindex - 1] if found is not None and found.lastindex else None


@functools.lru_cache(maxsize=1024)
def _any_of(globs: tuple[str, ...]) -> re.Pattern[str]:
    """A regular expression with one group for each glob, tried in order."""
    return re.compile("|".join(f"({_pattern(glob, _INSIDE).pattern})" for glob in globs), re.DOTALL)
