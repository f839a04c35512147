"""A cache of prices and bounds, whose keys are two hashes of everything on which they depend; all compiled.

A search that decides many plans reaches the same partial plans again and again. Their prices and bounds are then read
from the cache.
"""

from __future__ import annotations

from numba import boolean, float64, int64, void

from automap.jit import borrowing
from automap.space.kernels.records import UNIT_CACHE


@borrowing(boolean(UNIT_CACHE, int64, int64, float64[::1]), inner=True)
def recall(cache, one, two, out):
    """Writes the cached seconds and overflow, [2], of two hashes; returns whether there are any."""
    known = cache.plans[two & (cache.plans.shape[0] - 1)]
    if known.one != one | 1 or known.two != two:
        return False
    out[0], out[1] = known.seconds, known.overflow
    return True


@borrowing(void(UNIT_CACHE, int64, int64, float64[::1]), inner=True)
def remember(cache, one, two, price):
    """Stores seconds and overflow, [2], under two hashes; replaces an older entry in the same place."""
    known = cache.plans[two & (cache.plans.shape[0] - 1)]
    known.one, known.two = one | 1, two
    known.seconds, known.overflow = price[0], price[1]
