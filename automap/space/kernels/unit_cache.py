"""Hashes of the cache that kernels keep of one problem, and an empty one; see `UnitCache`."""

from __future__ import annotations

import numpy as np
from numba import int64, types

from automap.jit import borrowing
from automap.price.kernels.cost_records import UNIT_IN_STEP_DTYPE
from automap.space.kernels.records import UnitCache

REMEMBERED = 1 << 14
"""Units in a cache, 3 MB of costs; a power of two, as the others."""
REMEMBERED_LEGAL = 1 << 17
"""Groups on meshes in a cache, 3 MB (assumed): mixtral-8x7b on 32 devices has far more than 2^14 of them."""
REMEMBERED_PLANS = 1 << 15
"""Plans in a cache, 1 MB (assumed)."""
SEEDS = (1469598103934665603, 7809847782465536322)
"""Where two hashes begin: arbitrary numbers."""
BITS = 62
"""Most signatures of a group whose legality is remembered."""


def new_cache() -> UnitCache:
    """An empty cache of one problem."""
    return UnitCache(
        keys=np.zeros((REMEMBERED, 2), np.int64),
        costs=np.empty(REMEMBERED, dtype=UNIT_IN_STEP_DTYPE),
        covered=np.empty(REMEMBERED, dtype=np.bool_),
        legal=np.zeros((REMEMBERED_LEGAL, 3), np.int64),
        plans=np.zeros((REMEMBERED_PLANS, 2), np.int64),
        prices=np.empty((REMEMBERED_PLANS, 2)),
    )


@borrowing(types.UniTuple(int64, 2)(int64, int64, int64), inner=True)
def mix(one, two, word):
    """Two hashes with one more word."""
    one = (one ^ word) * int64(1099511628211)
    one ^= one >> 29
    two = (two + word) * int64(6364136223846793005) + int64(1442695040888963407)
    return one, two ^ (two >> 31)


@borrowing(int64(int64), inner=True)
def scramble(word):
    """A hash whose sums tell sets of words apart: the finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    x = word * int64(-7046029254386353131)
    x = (x ^ ((x >> 30) & int64(0x3FFFFFFFF))) * int64(-4658895280553007687)
    x = (x ^ ((x >> 27) & int64(0x1FFFFFFFFF))) * int64(-7723592293110705685)
    return x ^ ((x >> 31) & int64(0x1FFFFFFFF))
