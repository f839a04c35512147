"""Garbage collection while libraries are loaded and short verbs work."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Pauses garbage collection: what is loaded, and graphs, are many objects and no garbage.

    Collection takes 0.05 of the 0.75 s of `automap estimate`, and 0.07 of the 1.0 s of `automap inspect` (measured).
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
