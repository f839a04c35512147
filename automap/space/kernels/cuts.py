"""Where pipelines are cut: the ends of a chunk are numbered by how near they are to the share of its rank.

The share of a rank in the units that are left is its part of the speed of all ranks that are left.
"""

from __future__ import annotations

from numba import boolean, float64, int64, types, void

from automap.jit import borrowing
from automap.space.kernels.records import SPACE


@borrowing(void(SPACE, int64[::1], int64, float64[::1]), inner=True)
def cut_shares(space, stages, num_ranks, shares):
    """Writes, of each chunk, how many times its rank's speed the ranks of it and of all later chunks have together.

    Args:
        stages: [ranks] rows among the distinct stages.
        shares: [chunks], written; where ranks are alike, how many chunks are left.
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
    """The weight of one `share`-th of what is left after unit `start`, and the first end in [low, high] after it."""
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
    """Whether the next nearest end is `left`, not `right`; of two that are equally near the left one comes first."""
    return left >= low and (right > high or abs(weight[left] - target) <= abs(weight[right] - target))


@borrowing(types.UniTuple(int64, 2)(float64[::1], int64, int64, int64, float64, int64, int64), inner=True)
def _near(weight, start, low, high, share, number, end):
    """Goes through the ends in [low, high], the nearest to one `share`-th of what is left after unit `start` first.

    It stops at the `number`-th, or at `end`.

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
    """The end that comes as number `number`; see `_near`."""
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
