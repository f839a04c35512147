"""Classes of numbers: equal numbers have the same class. Compiled, since numpy is slow for such short arrays."""

from __future__ import annotations

from numba import int64

from automap.jit import borrowing


@borrowing(int64(int64[::1], int64[::1], int64[::1], int64[::1]))
def number_classes(codes, known, first, classes):
    """Gives equal numbers the same class; classes are numbered in ascending order of the numbers.

    Args:
        codes: [n] the numbers.
        known: [n] the distinct numbers are written.
        first: [n] index of the first occurrence of each distinct number, written.
        classes: [n] class of each of the numbers, written.

    Returns:
        How many numbers are distinct.
    """
    count = 0
    for i in range(codes.shape[0]):
        at = _place(known, count, codes[i])
        if at == count or known[at] != codes[i]:
            for later in range(count, at, -1):
                known[later], first[later] = known[later - 1], first[later - 1]
            known[at], first[at] = codes[i], i
            count += 1
    for i in range(codes.shape[0]):
        classes[i] = _place(known, count, codes[i])
    return count


@borrowing(int64(int64[::1], int64, int64), inner=True)
def _place(known, count, code):
    """How many of the first `count` numbers of `known`, which are ascending, are below `code`."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if known[middle] < code:
            low = middle + 1
        else:
            high = middle
    return low
