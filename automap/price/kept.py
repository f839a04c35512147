"""Memory that a unit keeps for its backward pass: every tensor once, views being the memory of their root."""

from __future__ import annotations

from numba import boolean, float64, int64, njit


@njit(int64(int64[::1], float64[::1], boolean[::1], int64, int64, float64, boolean), cache=True)
def keep(roots, amounts, loose, count, root, amount, undecided):
    """Notes a kept tensor unless the same memory is noted already; returns the new count."""
    for i in range(count):
        if roots[i] == root and loose[i] == undecided and (undecided or amounts[i] == amount):
            amounts[i] = max(amounts[i], amount)
            return count
    if count < roots.shape[0]:
        roots[count] = root
        amounts[count] = amount
        loose[count] = undecided
        count += 1
    return count


@njit(float64(int64[::1], float64[::1], boolean[::1], int64), cache=True)
def kept_bytes(roots, amounts, loose, count):
    """Bytes of the kept tensors; an undecided one may turn out to be the same memory as a decided one."""
    total = 0.0
    for i in range(count):
        if not loose[i]:
            total += amounts[i]
    for i in range(count):
        if loose[i]:
            same = 0.0
            for j in range(count):
                if roots[j] == roots[i] and not loose[j]:
                    same += amounts[j]
            total += max(0.0, amounts[i] - same)
    return total
