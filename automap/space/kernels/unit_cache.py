"""Sizes of the caches of one problem, see `UnitCache`."""

from __future__ import annotations

import numpy as np

from automap.price.kernels.cost_records import UNIT_IN_STEP_DTYPE
from automap.price.kernels.unit_workspace import new_operator_memory
from automap.space.kernels.records import PRICED_DTYPE, UnitCache

REMEMBERED = 1 << 14
"""Units in a cache, 3 MB of costs (assumed); a power of two, as the other sizes are."""
REMEMBERED_LEGAL = 1 << 17
"""Groups on meshes in a cache, 3 MB (assumed): mixtral-8x7b on 32 devices has far more than 2^14 of them."""
REMEMBERED_PLANS = 1 << 20
"""Plans and partial plans in a cache, 32 MB. Of mixtral-8x7b on 32 devices, 256 episodes that follow the network store
some 2,000 with each decision (counted). 4 MB are full after 65 decisions, which is less than an episode; decisions then
take a fourth more time (measured)."""
REMEMBERED_OPERATORS = 1 << 13
"""Products in a cache, 4 MB (assumed)."""
BITS = 62
"""Largest number of signatures of a group whose legality is cached, as bits of one number."""


def new_cache() -> UnitCache:
    """An empty cache of one problem."""
    return UnitCache(
        keys=np.zeros((REMEMBERED, 2), np.int64),
        costs=np.empty(REMEMBERED, dtype=UNIT_IN_STEP_DTYPE),
        covered=np.empty(REMEMBERED, dtype=np.bool_),
        operators=new_operator_memory(REMEMBERED_OPERATORS),
        legal=np.zeros((REMEMBERED_LEGAL, 3), np.int64),
        plans=np.zeros(REMEMBERED_PLANS, PRICED_DTYPE),
    )
