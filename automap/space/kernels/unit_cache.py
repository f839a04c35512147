"""Memo: what was worked out about one problem before, in tables whose entries make room for each other.

Plans that are priced one after another have most of it in common. Entries are found by two hashes of all that they
depend on.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import boolean, int64, types

from automap.jit import borrowing
from automap.price.kernels.array_types import Rows
from automap.price.kernels.cost_records import UNIT_COST, UNIT_COST_DTYPE

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

REMEMBERED = 1 << 14
"""Costs of units that a memo holds, 6 MB of them; a power of two."""
BITS = 62
"""Signatures of a group whose legality is remembered."""


class UnitCache(NamedTuple):
    """What was worked out before; a later entry takes the place of an earlier one."""

    keys: Ints
    """[remembered, 2] two hashes of unit and surroundings; zeros where there is nothing."""
    costs: Rows
    """[remembered] unit costs."""
    covered: Mask
    """[remembered] whether the unit is recomputed as a whole."""
    legal: Ints
    """[remembered, 3] two hashes of a linkage group on meshes of stages; which signatures are legal there, as bits."""


UNIT_CACHE = types.NamedTuple((int64[:, ::1], UNIT_COST[::1], boolean[::1], int64[:, ::1]), UnitCache)
"""Numba's type of `UnitCache`."""


def new_memo() -> UnitCache:
    """An empty memo; of one problem."""
    return UnitCache(
        np.zeros((REMEMBERED, 2), np.int64),
        np.empty(REMEMBERED, dtype=UNIT_COST_DTYPE),
        np.empty(REMEMBERED, dtype=np.bool_),
        np.zeros((REMEMBERED, 3), np.int64),
    )


@borrowing(types.UniTuple(int64, 2)(int64, int64, int64), forceinline=True, inner=True)
def mix(one, two, word):
    """Two hashes with one more word."""
    one = (one ^ word) * int64(1099511628211)
    one ^= one >> 29
    two = (two + word) * int64(6364136223846793005) + int64(1442695040888963407)
    return one, two ^ (two >> 31)


@borrowing(int64(int64), forceinline=True, inner=True)
def scramble(word):
    """A hash whose sums tell sets of words apart: the finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    x = word * int64(-7046029254386353131)
    x = (x ^ ((x >> 30) & int64(0x3FFFFFFFF))) * int64(-4658895280553007687)
    x = (x ^ ((x >> 27) & int64(0x1FFFFFFFFF))) * int64(-7723592293110705685)
    return x ^ ((x >> 31) & int64(0x1FFFFFFFF))
