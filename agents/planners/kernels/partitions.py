"""One step of the dynamic programs over units and devices: the best end of a stage for each first unit; compiled.

Units: seconds.
"""

from __future__ import annotations

import numpy as np
from numba import float64, int64, void

from automap.jit import borrowing


@borrowing(void(float64[:, ::1], float64[::1], float64[::1], int64[::1]))
def least_of_most(seconds, after, best, ends):
    """Of each first unit of a stage the end with which the slower of the stage and of what is after it is fastest.

    Args:
        seconds: [units + 1, units + 1] of a stage with the units from the first index to before the second; infinite
            where there is none.
        after: [units + 1] of what is after a stage that ends before each unit.
        best: [units + 1] seconds with the best end; written.
        ends: [units + 1] the first of the best ends, 0 where all are infinite; written.
    """
    for first in range(after.shape[0]):
        least, end = np.inf, 0
        for last in range(first + 1, after.shape[0]):
            found = max(seconds[first, last], after[last])
            if found < least:
                least, end = found, last
        best[first], ends[first] = least, end


@borrowing(void(float64[:, ::1], float64, float64[::1], float64[::1], int64[::1]))
def least_sum(seconds, limit, after, best, ends):
    """`least_of_most` of the sum of a stage that takes no longer than a limit and of what is after it."""
    for first in range(after.shape[0]):
        least, end = np.inf, 0
        for last in range(first + 1, after.shape[0]):
            found = seconds[first, last] + after[last]
            if seconds[first, last] <= limit and found < least:
                least, end = found, last
        best[first], ends[first] = least, end
