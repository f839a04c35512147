"""How few units of a span run again where it must just fit; compiled. Units: seconds, bytes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import float64, int64, void

from automap.jit import borrowing
from automap.price.kernels.array_types import Floats, Floats2, tuple_type


class ModePair(NamedTuple):
    """What units cost under a lighter recompute mode, and what a heavier one changes.

    Spans are given by two indices: from the first index to before the second.
    """

    light_s: Floats2
    """Span -> seconds of both passes under the lighter mode."""
    state: Floats2
    """Span -> bytes of parameters, gradients and optimizer state."""
    kept: Floats2
    """Span -> bytes that a micro-batch keeps under the lighter mode."""
    heads: Floats2
    """Span -> most bytes under the heavier mode of what all units of the model before one of the span and it save,
    and of what its passes need besides."""
    tails: Floats2
    """Span -> bytes in the fullest moment of a backward pass under the lighter mode, over all that the span saves."""
    saved: Floats
    """[units + 1] bytes that all units before each save under the lighter mode."""
    freed: Floats
    """[units + 1] bytes that these save less under the heavier mode."""
    more_s: Floats
    """[units + 1] seconds that these take longer."""
    capacity: float
    """Bytes that units may use on a device."""


@borrowing(float64(tuple_type(ModePair), int64, int64, int64, int64), inner=True)
def _used(pair, alive, first, until, last):
    """Bytes of a device with some micro-batches in flight, whose units before `until` have the heavier mode."""
    kept = pair.kept[first, last] - (pair.freed[until] - pair.freed[first])
    beyond = max(pair.heads[first, until] + pair.freed[until] - pair.saved[last], pair.tails[until, last])
    return pair.state[first, last] + alive * kept + beyond


@borrowing(void(tuple_type(ModePair), int64[::1], float64[:, :, ::1], int64[:, :, ::1]))
def fewest_again(pair, alive, seconds, counts):
    """Of each span the seconds with as few units of the heavier mode as fit, the first ones, and their number.

    Args:
        pair: the modes.
        alive: [n] micro-batches in flight.
        seconds: [n, units + 1, units + 1] infinite where the span does not fit; written.
        counts: [n, units + 1, units + 1] written.
    """
    seconds[:] = np.inf
    counts[:] = 0
    size = pair.saved.shape[0]
    for first in range(size):
        for last in range(first + 1, size):
            # No more is needed at once than where all units have one of the modes, so that these units are enough.
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
