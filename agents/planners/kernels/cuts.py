"""The cost of each span of units on a pipeline rank, and the best cut of all units into one span a rank; compiled.

A span is consecutive units of a model. The first units of a span may have a heavier recompute mode than the others;
modes and the number of these units are its level of recomputation (`automap.space.recomputation`). Units: seconds,
bytes.
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
    """What consecutive units cost on the devices of one rank."""

    before: Floats3
    """[3, modes, units + 1] sums over all units before this one, under each recompute mode: seconds of a micro-batch;
    bytes of parameters, gradients and moments; bytes that a micro-batch saves for its backward pass."""
    levels: Ints2
    """[levels, 3] for each level of recomputation: the mode of the last units, that of the first units, and how many
    steps these are. A step is the share 1 / `steps` of the units of a span."""
    steps: int
    """Number of steps in a whole span."""
    fullest: Floats3
    """[modes, powers, units] entry [m, p, i]: under mode m, the largest over the 2^p units u from i on of the bytes
    that all units of the model up to u save, plus those that the passes of u need besides."""


class RankLimits(NamedTuple):
    """How ranks on devices of the same kind differ."""

    in_flight: float
    """Micro-batches in flight at the peak of its memory."""
    capacity: float
    """Bytes of its device that units may use: without the framework's buffers and what the allocator leaves unused."""
    receives: Floats
    """[units + 1] seconds a micro-batch of its exchange with the rank before it, if it begins with this unit."""
    sends: Floats
    """[units + 1] seconds a micro-batch of its exchange with the rank after it, if it ends before this unit."""
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
    """A cost of the units `begin` to `end` - 1, of which those before `turn` have the heavier mode.

    Args:
        before: [modes, units + 1] the cost of all units before this one, one row of `SpanCosts.before`.
    """
    return before[heavy, turn] - before[heavy, begin] + before[light, end] - before[light, turn]


@borrowing(float64(float64[:, ::1], int64, int64), inner=True)
def _fullest_between(fullest, begin, end):
    """The largest value among the units `begin` to `end` - 1 (sparse table: two overlapping powers of 2 cover them)."""
    if end <= begin:
        return -np.inf
    power = 0
    while 2 << power <= end - begin:
        power += 1
    return max(fullest[power, begin], fullest[power, end - (1 << power)])


@borrowing(void(tuple_type(SpanCosts), tuple_type(RankLimits), boolean, float64[:, ::1], int64[:, ::1]))
def least_costs(spans, rank, by_memory, costs, levels):
    """Finds the best level of recomputation of a rank for every span of units that it may have.

    Args:
        spans: what units cost on its devices.
        rank: its limits.
        by_memory: whether the best level is the one that needs least memory; otherwise it is the fastest that fits.
        costs: [units + 1, units + 1] entry [i, j]: cost of the units i to j - 1 at the best level, written. With
            `by_memory` it is the memory as a share of `rank.capacity`, else seconds a micro-batch. It is infinite where
            no level fits or the rank may not have these units.
        levels: [units + 1, units + 1] the best level, a row of `spans.levels`; written where the cost is finite.
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
    """Cuts units into one span for each rank, so that the slowest rank is fast and then the sum of all ranks is least.

    Let t(r, v, u) be the time of rank r with the units v to u - 1. The least possible time T(r, u) of the slowest of r
    ranks that share the first u units is T(r, u) = min over v of max(T(r - 1, v), t(r, v, u)) (PipeDream, arXiv
    1806.03377, section 3.1). Among the cuts whose slowest rank takes at most `slack` times the least possible time, a
    second dynamic program finds the one with the least sum over all ranks.

    Args:
        seconds: [ranks, units + 1, units + 1] t(r, v, u); infinite where these units do not fit or are not allowed.
        slack: allowed time of the slowest rank, as a multiple of the least possible one.
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
