"""The collectives that placements call for: conversions between placements and their cost.

`convert` is the one place that says which collectives turn a tensor from one placement into another on an n-D mesh,
and in which order: first what shrinks the local part (slices, reduce-scatters), then what keeps its size
(all-to-alls, all-reduces), then what grows it (all-gathers). The price adds its times up; `list_collectives` returns
them as a list, forward and backward, for the runtime and for readers. Costs are latency + bytes over bandwidth;
ring volumes. Units: seconds, bytes.
"""

from __future__ import annotations

import numpy as np
from numba import float64, int64, njit, void

from automap.price.tables import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, SEND_RECV
from ir.factors import BROADCAST, PARTIAL

UNKNOWN = -3
"""A placement that has not been decided yet: converting from or to it is free, and it is split wherever it may be."""

KIND_COUNT = 5


@njit(float64(int64, float64, float64, float64, float64), cache=True)
def collective_s(kind: int, size: float, latency_s: float, bytes_per_s: float, data: float) -> float:
    """Time of one collective.

    Args:
        kind: ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL or SEND_RECV.
        size: ranks of the group.
        latency_s: of the group.
        bytes_per_s: of the group.
        data: bytes of the larger of what a rank holds before and after (the nccl-tests convention).
    """
    if size <= 1.0 or data <= 0.0:
        return 0.0
    share = (size - 1.0) / size
    if kind == ALL_REDUCE:
        share *= 2.0
    if kind == SEND_RECV:
        share = 1.0
    return latency_s + share * data / bytes_per_s


@njit(
    void(float64, int64[:], int64[:], float64[:], float64[:], float64[:], float64[:]),
    cache=True,
)
def convert(
    data: float,
    source: np.ndarray,
    target: np.ndarray,
    sizes: np.ndarray,
    latency_s: np.ndarray,
    bytes_per_s: np.ndarray,
    times: np.ndarray,
) -> None:
    """Adds the time of each kind of collective that turns `source` into `target` to `times`.

    Args:
        data: bytes of the whole tensor.
        source: placement on each mesh axis.
        target: wanted placement on each mesh axis.
        sizes: ranks of each axis.
        latency_s: of each axis.
        bytes_per_s: of each axis.
        times: [KIND_COUNT], seconds, added to.
    """
    local = data
    for a in range(sizes.shape[0]):
        if source[a] == UNKNOWN or target[a] == UNKNOWN or source[a] >= 0:
            local /= sizes[a]
    for a in range(sizes.shape[0]):
        if target[a] >= 0 and source[a] < 0 and source[a] != UNKNOWN:
            if source[a] == PARTIAL:
                times[REDUCE_SCATTER] += collective_s(REDUCE_SCATTER, sizes[a], latency_s[a], bytes_per_s[a], local)
            local /= sizes[a]
    for a in range(sizes.shape[0]):
        if source[a] >= 0 and target[a] >= 0 and source[a] != target[a]:
            times[ALL_TO_ALL] += collective_s(ALL_TO_ALL, sizes[a], latency_s[a], bytes_per_s[a], local)
        elif source[a] == PARTIAL and target[a] == BROADCAST:
            times[ALL_REDUCE] += collective_s(ALL_REDUCE, sizes[a], latency_s[a], bytes_per_s[a], local)
    for a in range(sizes.shape[0] - 1, -1, -1):
        if source[a] >= 0 and (target[a] == BROADCAST or target[a] == PARTIAL):
            local *= sizes[a]
            times[ALL_GATHER] += collective_s(ALL_GATHER, sizes[a], latency_s[a], bytes_per_s[a], local)
