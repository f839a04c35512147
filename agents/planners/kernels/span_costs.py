"""The smallest number of units of a span that must recompute more so that the span fits; compiled.

A span is consecutive units of a model. Units: seconds, bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import float64, int64, void

from automap.jit import borrowing
from automap.price.kernels.array_types import Floats, Floats2, tuple_type


class ModePair(NamedTuple):
    """What units cost under a lighter recompute mode, and what a heavier one changes.

    "Span" stands for [units + 1, units + 1]: entry [i, j] is about the units i to j - 1.
    """

    light_s: Floats2
    """Span -> seconds of both passes under the lighter mode."""
    state: Floats2
    """Span -> bytes of parameters, gradients and optimizer state."""
    kept: Floats2
    """Span -> bytes that a micro-batch saves under the lighter mode."""
    heads: Floats2
    """Span -> under the heavier mode, the largest over its units u of the bytes that all units of the model up to u
    save, plus those that the passes of u need besides."""
    tails: Floats2
    """Span -> peak bytes of a backward pass under the lighter mode, less all that the span saves."""
    saved: Floats
    """[units + 1] bytes that all units before this one save under the lighter mode."""
    freed: Floats
    """[units + 1] by how many bytes these units save less under the heavier mode."""
    more_s: Floats
    """[units + 1] by how many seconds these units take longer under the heavier mode."""
    capacity: float
    """Bytes that units may use on a device."""


@borrowing(float64(tuple_type(ModePair), int64, int64, int64, int64), inner=True)
def _used(pair, alive, first, until, last):
    """Bytes of a device that has the units from `first` to before `last`, those before `until` in the heavier mode,
    with `alive` micro-batches in flight."""
    kept = pair.kept[first, last] - (pair.freed[until] - pair.freed[first])
    beyond = max(pair.heads[first, until] + pair.freed[until] - pair.saved[last], pair.tails[until, last])
    return pair.state[first, last] + alive * kept + beyond


@borrowing(void(tuple_type(ModePair), int64[::1], float64[:, :, ::1], int64[:, :, ::1]))
def fewest_again(pair, alive, seconds, counts):
    """Gives the heavier mode to as few of the first units of each span as it takes to fit into memory.

    Args:
        pair: the two modes.
        alive: [n] micro-batches in flight.
        seconds: [n, units + 1, units + 1] seconds of both passes, infinite where the span does not fit; written.
        counts: [n, units + 1, units + 1] number of units in the heavier mode; written.
    """
    seconds[:] = np.inf
    counts[:] = 0
    size = pair.saved.shape[0]
    for first in range(size):
        for last in range(first + 1, size):
            # The peak of a mixed span is at most the larger of the peaks under either mode alone. With this upper bound
            # the first loop finds enough units; the second one removes those that the exact peak does not require.
            most = max(pair.heads[first, last] + pair.freed[last] - pair.saved[last], pair.tails[first, last])
            for i in range(alive.shape[0]):
                over = pair.state[first, last] + most - pair.capacity
                least = pair.freed[first] + (pair.kept[first, last] + over / alive[i])
                until = first
                while until < last and pair.freed[until] < least:
                    until += 1
                if _used(pair, alive[i], first, until, last) <= pair.capacity:
                    while until > first and _used(pair, alive[i], first, until - 1, last) <= pair.capacity:
                        until -= 1
                    seconds[i, first, last] = pair.light_s[first, last] + pair.more_s[until] - pair.more_s[first]
                counts[i, first, last] = until - first
