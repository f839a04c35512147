"""A pause of garbage collection, for the time in which libraries are loaded and short verbs run."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Pauses garbage collection: modules and graphs are many objects, none of which is garbage.

    Collection takes 0.05 of the 0.75 s of `automap estimate`, and 0.07 of the 1.0 s of `automap inspect` (measured).
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
