"""Collectives and transfers: seconds from message size, group and a link's fitted curve.

    t = latency * (1 + growth * (n - 1)) + x + ramp * sqrt(x * 1 us)
    x = factor * bytes / bandwidth * (1 + small_group / n)
    factor = 2 (n - 1) / n for all-reduce, (n - 1) / n for all-gather, reduce-scatter and all-to-all, 1 for a transfer

`bytes` is what nccl-tests prints: the larger of what a rank holds before and after. The square root stands for NCCL's
change of protocols between small and large messages. The constants are in `automap/data/links` and
`automap/data/fitted/collectives.json`, fitted by `benchmarks/fit_collectives.py`. Units: seconds, bytes, bytes/s.
"""

from __future__ import annotations

import math

import numpy as np
from numba import float64, int64, njit

from automap.price.tables import ALL_REDUCE, SEND_RECV

# Columns of a curve.
K_LATENCY_S, K_GROWTH, K_BYTES_PER_S, K_SMALL_GROUP, K_RAMP = range(5)
K_COUNT = 5
RAMP_UNIT_S = 1e-6


@njit(float64(int64, float64, float64, float64[::1]), cache=True)
def link_s(kind: int, size: float, data: float, curve: np.ndarray) -> float:
    """Time of one collective over one kind of link.

    Args:
        kind: ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL or SEND_RECV.
        size: ranks of the group.
        data: bytes of the larger of what a rank holds before and after.
        curve: [K_COUNT] latency of two ranks in seconds and its growth a further rank; bytes/s of a large group; what
            small groups lack of it; ramp.

    Returns:
        Seconds; 0 where there is nothing to send.
    """
    if size <= 1.0 or data <= 0.0:
        return 0.0
    factor = (size - 1.0) / size
    if kind == ALL_REDUCE:
        factor *= 2.0
    if kind == SEND_RECV:
        factor = 1.0
    x = factor * data / curve[K_BYTES_PER_S] * (1.0 + curve[K_SMALL_GROUP] / size)
    latency = curve[K_LATENCY_S] * (1.0 + curve[K_GROWTH] * (size - 1.0))
    return float(latency + x + curve[K_RAMP] * math.sqrt(x * RAMP_UNIT_S))
