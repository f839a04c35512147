"""Cuts of pipelines: the possible ends of a chunk are numbered by their distance to the even end.

At the even end, the chunk has a share of the remaining weight that is in proportion to the speed of its rank among the
ranks of all remaining chunks.
"""

from __future__ import annotations

from numba import boolean, float64, int64, types, void

from automap.jit import borrowing
from automap.space.kernels.records import SPACE


@borrowing(void(SPACE, int64[::1], int64, float64[::1]), inner=True)
def cut_shares(space, stages, num_ranks, shares):
    """Writes, for each chunk, the summed speed of its rank and those of all later chunks, over the speed of its rank.

    Args:
        stages: [ranks] rows among the distinct stages.
        num_ranks: pipeline ranks.
        shares: [chunks], written. If all ranks are equal, it is the number of chunks from this one on.
    """
    left = 0.0
    for chunk in range(shares.shape[0]):
        left += space.speed[stages[chunk % num_ranks]]
    for chunk in range(shares.shape[0]):
        mine = space.speed[stages[chunk % num_ranks]]
        shares[chunk] = left / mine
        left -= mine


@borrowing(types.Tuple((float64, int64))(float64[::1], int64, int64, int64, float64), inner=True)
def _target(weight, start, low, high, share):
    """The weight at the even end, after 1 / `share` of the weight that remains at unit `start`, and the first end in
    [low, high] beyond it."""
    target = weight[start] + (weight[weight.shape[0] - 1] - weight[start]) / share
    right = low
    after = high + 1
    while right < after:
        middle = (right + after) // 2
        if weight[middle] < target:
            right = middle + 1
        else:
            after = middle
    return target, right


@borrowing(boolean(float64[::1], int64, int64, int64, int64, float64), inner=True)
def _is_left(weight, left, right, low, high, target):
    """Whether the next nearest end is `left` and not `right`; at equal distance the left one comes first."""
    return left >= low and (right > high or abs(weight[left] - target) <= abs(weight[right] - target))


@borrowing(types.UniTuple(int64, 2)(float64[::1], int64, int64, int64, float64, int64, int64), inner=True)
def _near(weight, start, low, high, share, number, end):
    """Visits the ends in [low, high] in the order of their distance to the even end, see `_target`.

    It stops at the end with number `number`, or at `end`.

    Returns:
        The end where it stopped, and how many came before it.
    """
    target, right = _target(weight, start, low, high, share)
    left = right - 1
    found, before = low, -1
    while before < number and (before < 0 or found != end):
        if _is_left(weight, left, right, low, high, target):
            found = left
            left -= 1
        else:
            found = right
            right += 1
        before += 1
    return found, before


@borrowing(int64(float64[::1], int64, int64, int64, float64, int64), inner=True)
def nth_cut(weight, start, low, high, share, number):
    """The end with this number, see `_near`."""
    return _near(weight, start, low, high, share, number, -1)[0]


@borrowing(int64(float64[::1], int64, int64, int64, float64, int64), inner=True)
def cut_number(weight, start, low, high, share, end):
    """The inverse of `nth_cut`: how many ends come before `end`."""
    return _near(weight, start, low, high, share, high - low, end)[1]


@borrowing(void(float64[::1], int64, int64, int64, float64, int64[::1]))
def list_cuts(weight, start, low, high, share, ends):
    """Writes the ends in [low, high], [high - low + 1], in the order of their numbers; see `_near`."""
    target, right = _target(weight, start, low, high, share)
    left = right - 1
    for number in range(ends.shape[0]):
        if _is_left(weight, left, right, low, high, target):
            ends[number] = left
            left -= 1
        else:
            ends[number] = right
            right += 1
