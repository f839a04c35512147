"""Which units a pipeline rank may be given and at what cost, and the best cut of all units into ranks; compiled.

Units: seconds, bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import boolean, float64, int64, void

from automap.jit import borrowing, kernel
from automap.price.kernels.array_types import Floats, Floats3, Ints2, tuple_type

SECONDS, STATE, SAVED = range(3)
"""Rows of `SpanCosts.before`."""


class SpanCosts(NamedTuple):
    """What units that follow each other cost on the devices of one rank."""

    before: Floats3
    """[3, modes, units + 1] of the units before each one under each recompute mode: seconds of a micro-batch; bytes of
    parameters, gradients and moments; bytes that a micro-batch leaves for its backward pass."""
    levels: Ints2
    """[levels, 3] of each level of recomputation the modes of the last and of the first units, and its steps."""
    steps: int
    """Number of steps that are all units of a span."""
    fullest: Floats3
    """[modes, powers of 2, units] of as many units from each one on, under each recompute mode: most bytes of what all
    units of the model before one of them and it save, and of what its passes need besides."""


class RankLimits(NamedTuple):
    """What tells a rank from others on devices of the same kind."""

    in_flight: float
    """Micro-batches whose activations are alive at its peak."""
    capacity: float
    """Bytes of memory of its device, without the buffers that are always there and what the allocator leaves unused."""
    receives: Floats
    """[units + 1] seconds in which it receives and sends back for a micro-batch, if it begins with this unit."""
    sends: Floats
    """[units + 1] the same after it, if it ends before this unit."""
    first_begin: int
    """First unit with which it may begin."""
    last_begin: int
    """Last unit with which it may begin."""
    first_end: int
    """First unit before which it may end."""
    last_end: int
    """Last unit before which it may end."""


@borrowing(float64(float64[:, ::1], int64, int64, int64, int64, int64), inner=True)
def _between(before, light, heavy, begin, turn, end):
    """A cost of the units from `begin`, those before `turn` in the heavier mode, to before `end`."""
    return before[heavy, turn] - before[heavy, begin] + before[light, end] - before[light, turn]


@borrowing(float64(float64[:, ::1], int64, int64), inner=True)
def _fullest_between(fullest, begin, end):
    """The most of a range of units, which two overlapping powers of 2 cover."""
    if end <= begin:
        return -np.inf
    power = 0
    while 2 << power <= end - begin:
        power += 1
    return max(fullest[power, begin], fullest[power, end - (1 << power)])


@borrowing(void(tuple_type(SpanCosts), tuple_type(RankLimits), boolean, float64[:, ::1], int64[:, ::1]))
def least_costs(spans, rank, by_memory, costs, levels):
    """The best level of recomputation of a rank for all units that it may be given.

    Args:
        spans: what units cost on its devices.
        rank: what tells it from other ranks.
        by_memory: whether the level that needs least memory is asked for; otherwise the fastest one that fits.
        costs: [units + 1, units + 1] of the units from the first index to before the second: memory of that level over
            that of the device, or its seconds; infinite where no level fits or the rank may not have these units.
            Written.
        levels: [units + 1, units + 1] the level, as a row of `spans.levels`. Written where the cost is finite.
    """
    before = spans.before
    costs[:] = np.inf
    for begin in range(rank.first_begin, rank.last_begin + 1):
        for end in range(max(begin + 1, rank.first_end), rank.last_end + 1):
            least, exchanged = np.inf, rank.receives[begin] + rank.sends[end]
            for level in range(spans.levels.shape[0]):
                light, heavy, steps = spans.levels[level]
                turn = begin + (2 * steps * (end - begin) + spans.steps) // (2 * spans.steps)
                seconds = _between(before[SECONDS], light, heavy, begin, turn, end) + exchanged
                if not by_memory and seconds >= least:
                    continue
                state = _between(before[STATE], light, heavy, begin, turn, end)
                saved = _between(before[SAVED], light, heavy, begin, turn, end)
                first = _fullest_between(spans.fullest[heavy], begin, turn) - before[SAVED, heavy, turn]
                last = _fullest_between(spans.fullest[light], turn, end) - before[SAVED, light, end]
                behind = before[SAVED, light, end] - before[SAVED, light, turn]
                beyond = max(first - behind, last)
                full = (state + rank.in_flight * saved + beyond) / rank.capacity
                cost = full if by_memory else seconds
                if cost < least and (by_memory or full <= 1.0):
                    least = cost
                    levels[begin, end] = level
            costs[begin, end] = least


@kernel(boolean(float64[:, :, ::1], float64, int64[::1]))
def least_partition(seconds, slack, ends):
    """Cuts units into one span for each rank.

    With T(r, u) the least time of the slowest of r ranks that have the first u units, and t(r, v, u) the time of rank r
    with the units from v to before u: T(r, u) = min over v of max(T(r - 1, v), t(r, v, u)) (PipeDream, arXiv
    1806.03377, section 3.1). Of the cuts whose slowest rank is within `slack` of the least time, the one is taken whose
    ranks take least together.

    Args:
        seconds: [ranks, units + 1, units + 1] time of the units from the first index to before the second; infinite
            where they do not fit or may not be.
        slack: allowed time of the slowest rank, over the least possible one.
        ends: [ranks] ends of the units of each rank; written.

    Returns:
        Whether there is a cut.
    """
    num_ranks, size = seconds.shape[0], seconds.shape[1]
    worst, total = np.full(size, np.inf), np.full(size, np.inf)
    worst[0] = total[0] = 0.0
    for rank in range(num_ranks):
        following = np.full(size, np.inf)
        for begin in range(size):
            if worst[begin] < np.inf:
                for end in range(size):
                    following[end] = min(following[end], max(worst[begin], seconds[rank, begin, end]))
        worst = following
    limit = worst[-1] * slack
    if not np.isfinite(limit):
        return False
    limit *= 1.0 + 1e-12
    begins = np.zeros((num_ranks, size), np.int64)
    for rank in range(num_ranks):
        following = np.full(size, np.inf)
        for begin in range(size):
            if total[begin] < np.inf:
                for end in range(size):
                    spent = seconds[rank, begin, end]
                    if spent <= limit and total[begin] + spent < following[end]:
                        following[end] = total[begin] + spent
                        begins[rank, end] = begin
        total = following
    end = size - 1
    for rank in range(num_ranks - 1, -1, -1):
        ends[rank] = end
        end = begins[rank, end]
    return True
