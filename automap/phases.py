"""Phases: names of the work that is going on and may take seconds, for a terminal or a log to show."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

_listeners: list[Callable[[str | None], None]] = []


@contextlib.contextmanager
def phase(text: str) -> Iterator[None]:
    """A context of work that may take seconds.

    Args:
        text: what is done, such as `exporting gpt2`; phases of one text count together.
    """
    for listener in _listeners:
        listener(text)
    try:
        yield
    finally:
        for listener in _listeners:
            listener(None)


def is_listened() -> bool:
    """Whether somebody is told of phases."""
    return bool(_listeners)


@contextlib.contextmanager
def listening(listener: Callable[[str | None], None]) -> Iterator[None]:
    """A context in which `listener` is called with the text of every phase that begins, and with None at its end."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
