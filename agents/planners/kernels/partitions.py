"""One step of the dynamic programs over units and devices: the best end of a stage for each first unit; compiled.

Units: seconds.
"""

from __future__ import annotations

import numpy as np
from numba import float64, int64, void

from automap.jit import borrowing


@borrowing(void(float64[:, ::1], float64[::1], float64[::1], int64[::1]))
def least_of_most(seconds, after, best, ends):
    """Finds the best end of a stage for each first unit: best[i] = min over j of max(seconds[i, j], after[j]).

    Args:
        seconds: [units + 1, units + 1] entry [i, j]: seconds of a stage with the units i to j - 1; infinite where there
            is no such stage.
        after: [units + 1] entry [j]: seconds of the slowest of the stages after one that ends before unit j.
        best: [units + 1] seconds with the best end; written.
        ends: [units + 1] the best end, the first one of several; 0 where all are infinite; written.
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
    """Like `least_of_most` with sums: best[i] = min over j of seconds[i, j] + after[j], where seconds[i, j] <=
    limit."""
    for first in range(after.shape[0]):
        least, end = np.inf, 0
        for last in range(first + 1, after.shape[0]):
            found = seconds[first, last] + after[last]
            if seconds[first, last] <= limit and found < least:
                least, end = found, last
        best[first], ends[first] = least, end
