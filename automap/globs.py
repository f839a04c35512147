"""Globs over operator names: `*` stands for one dotted component or a part of it, `**` for anything.

An operator's name is `scope/Kind`, the scope being the dotted path of its module. `h.*.mlp.up/MatMul` names that
operator in every layer, `h.*.mlp` (a module) all operators inside that module and its submodules, `h.**` everything
that begins so. The full name of an operator names it alone.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

_INSIDE = r"(?:(?:\.[^/]*)?/[^/]*)?"
"""What may stand behind a module: submodules and, after the slash, a kind."""


@functools.lru_cache(maxsize=65536)
def _pattern(glob: str, behind: str) -> re.Pattern[str]:
    """The expression of a glob.

    What a wildcard takes, together with the text behind it, is never given back (an atomic group): the first place
    where that text fits is as good as any later one. Only the last wildcard of each sort, which must meet the end, may
    try further; so no glob takes exponential time.
    """
    parts = glob.split("**")
    first, *others = [_run(part, is_last=i == len(parts) - 1) for i, part in enumerate(parts)]
    if not others:
        return re.compile(first + behind, re.DOTALL)
    atomic = "".join(f"(?>.*?{run})" for run in others[:-1])
    return re.compile(f"{first}{atomic}.*?{others[-1]}{behind}", re.DOTALL)


def _run(glob: str, *, is_last: bool) -> str:
    """The expression of a glob without `**`."""
    first, *others = (re.escape(part).replace(r"\?", "[^./]") for part in glob.split("*"))
    if not others:
        return first
    atomic = "".join(f"(?>[^./]*?{part})" for part in others[:-1])
    return f"{first}{atomic}[^./]*?{others[-1]}" if is_last else f"{first}{atomic}(?>[^./]*?{others[-1]})"


def matches(glob: str, name: str) -> bool:
    """Whether `glob` names the operator `name` or a module that holds it."""
    return glob == name or _pattern(glob, _INSIDE).fullmatch(name) is not None


def matches_operator(glob: str, name: str) -> bool:
    """Whether `glob` names the operator `name` itself, not only its module."""
    return glob == name or _pattern(glob, "").fullmatch(name) is not None


def select(glob: str, names: Iterable[str]) -> list[str]:
    """The names that `glob` names, in their order."""
    names = list(names)
    if glob in names:
        return [glob]
    fullmatch = _pattern(glob, _INSIDE).fullmatch
    return [name for name in names if fullmatch(name)]


def most_specific(globs: Iterable[str], name: str) -> str | None:
    """The glob that names `name` with the most literal characters; the name itself first, ties to the first."""
    globs = tuple(globs)
    return name if name in globs else first_match(by_precision(globs), name)


def by_precision(globs: Iterable[str]) -> tuple[str, ...]:
    """Globs with the most literal characters first; equal ones in their order."""
    return tuple(sorted(globs, key=lambda glob: glob.count("*") + glob.count("?") - len(glob)))


def first_match(globs: tuple[str, ...], name: str) -> str | None:
    """The first glob that names `name`."""
    found = _any_of(globs).fullmatch(name) if globs else None
    return globs[found.lastindex - 1] if found is not None and found.lastindex else None


@functools.lru_cache(maxsize=1024)
def _any_of(globs: tuple[str, ...]) -> re.Pattern[str]:
    """One group a glob, tried in order."""
    return re.compile("|".join(f"({_pattern(glob, _INSIDE).pattern})" for glob in globs), re.DOTALL)
