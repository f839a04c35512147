"""Levels of recomputation, see `automap.space.recomputation`: the recompute mode of each unit of a chunk."""

from __future__ import annotations

from numba import boolean, int64

from automap.jit import borrowing
from automap.space.kernels.records import SPACE


@borrowing(int64(SPACE, int64, int64, int64), inner=True)
def mode_of(space, level, place, units):
    """Recompute mode of the unit at `place` in a chunk of `units` units."""
    about, steps = space.levels[level], space.scalars.level_steps
    return about.heavy if place < (2 * about.steps * units + steps) // (2 * steps) else about.light


@borrowing(int64(SPACE, int64, int64, boolean[::1]), inner=True)
def nearest_legal(space, slot, wanted, mask):
    """The legal value that replaces a wanted one: the wanted value if it is legal, else the first legal one.

    For a level of recomputation, it is the nearest legal one; of two at equal distance the heavier one, which needs
    less memory.
    """
    num_values = mask.shape[0]
    if 0 <= wanted < num_values and mask[wanted]:
        return wanted
    if space.first.recompute <= slot < space.first.zero:
        for by in range(1, num_values):
            if 0 <= wanted + by < num_values and mask[wanted + by]:
                return wanted + by
            if 0 <= wanted - by < num_values and mask[wanted - by]:
                return wanted - by
    found = 0
    while not mask[found]:
        found += 1
    return found
