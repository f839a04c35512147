"""The fastest recomputation and the fastest strategy of each span with which it fits; compiled.

A span is consecutive units of a model. Units: seconds, bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import boolean, float64, int64, void

from automap.jit import borrowing
from automap.price.kernels.array_types import Floats, Floats2, Floats3, Ints, Mask3, tuple_type


class ModesOfSpans(NamedTuple):
    """What spans cost if all their units have the same recompute mode.

    "Span" stands for [units + 1, units + 1]: entry [i, j] is about the units i to j - 1.
    """

    seconds: Floats3
    """Mode and span -> seconds of both passes."""
    state: Floats2
    """Span -> bytes of parameters, gradients and optimizer state."""
    saved: Floats3
    """Mode and span -> bytes that a micro-batch saves."""
    beyond: Floats3
    """Mode and span -> peak bytes of a backward pass, less all that the span saves."""
    results: Floats2
    """[modes, units + 1] bytes of the result of the unit before this one that each micro-batch but one keeps."""
    legal: Mask3
    """Mode and span -> whether all units of a span may have the mode."""
    numbers: Ints
    """[modes] number of the recomputation in which all units have the mode."""
    capacity: float
    """Bytes that units may use on a device."""


@borrowing(void(float64[:, ::1], float64[:, :, ::1]))
def span_sums(before, found):
    """Sums over the units of each span.

    Args:
        before: [n, units + 1] sums over all units before this one.
        found: [n, units + 1, units + 1] the sums; infinite for empty spans; written.
    """
    for row in range(before.shape[0]):
        for first in range(before.shape[1]):
            for last in range(before.shape[1]):
                found[row, first, last] = before[row, last] - before[row, first] if last > first else np.inf


@borrowing(void(float64[:, ::1], float64[:, :, ::1]))
def span_maxima(of_units, found):
    """The largest of the numbers of the units of each span.

    Args:
        of_units: [n, units] numbers.
        found: [n, units + 1, units + 1] the largest; minus infinity for empty spans; written.
    """
    found[:] = -np.inf
    for row in range(of_units.shape[0]):
        for first in range(of_units.shape[1]):
            most = -np.inf
            for last in range(first, of_units.shape[1]):
                most = max(most, of_units[row, last])
                found[row, first, last + 1] = most


@borrowing(void(tuple_type(ModesOfSpans), int64[::1], float64[:, :, ::1], int64[:, :, ::1]))
def fastest_modes(spans, alive, seconds, numbers):
    """Finds the fastest recompute mode of all units of each span with which it fits into memory.

    Args:
        spans: what spans cost.
        alive: [n] micro-batches in flight.
        seconds: [n, units + 1, units + 1] seconds of both passes, infinite where the span does not fit; written.
        numbers: [n, units + 1, units + 1] number of the recomputation, that of the first mode of several; 0 where none
            fits; written.
    """
    seconds[:] = np.inf
    numbers[:] = 0
    size = spans.state.shape[0]
    for i in range(alive.shape[0]):
        for mode in range(spans.seconds.shape[0]):
            for first in range(size):
                for last in range(first + 1, size):
                    if (
                        not spans.legal[mode, first, last]
                        or spans.seconds[mode, first, last] >= seconds[i, first, last]
                    ):
                        continue
                    used = spans.state[first, last] + alive[i] * spans.saved[mode, first, last]
                    used = used + spans.beyond[mode, first, last] + (alive[i] - 1) * spans.results[mode, last]
                    if used <= spans.capacity:
                        seconds[i, first, last] = spans.seconds[mode, first, last]
                        numbers[i, first, last] = spans.numbers[mode]


@borrowing(void(float64[:, ::1], int64[:, ::1], float64[:, ::1], int64, float64[:, ::1], int64[:, ::1], int64[:, ::1]))
def keep_faster(passes, again, beside, strategy, seconds, strategies, recomputed):
    """Replaces what is known of each span where a further strategy is faster.

    Args:
        passes: [units + 1, units + 1] seconds of both passes with the strategy; infinite where it does not fit.
        again: [units + 1, units + 1] number of its recomputation.
        beside: [units + 1, units + 1] seconds that it takes besides its passes.
        strategy: its number.
        seconds: [units + 1, units + 1] seconds of the fastest strategy; changed.
        strategies: [units + 1, units + 1] number of this strategy; changed.
        recomputed: [units + 1, units + 1] number of its recomputation; changed.
    """
    for first in range(passes.shape[0]):
        for last in range(first + 1, passes.shape[0]):
            found = passes[first, last] + beside[first, last]
            if found < seconds[first, last]:
                seconds[first, last] = found
                strategies[first, last], recomputed[first, last] = strategy, again[first, last]


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


@borrowing(void(tuple_type(ModePair), boolean[:, ::1], int64[::1], int64, float64[:, :, ::1], int64[:, :, ::1]))
def recompute_fewest(pair, legal, alive, number, seconds, numbers):
    """Gives the heavier mode to as few of the first units of each span as it takes to fit into memory, and keeps that
    where it is faster than what is known.

    Args:
        pair: the two modes.
        legal: [units + 1, units + 1] whether the units of a span may have both modes.
        alive: [n] micro-batches in flight.
        number: number of the recomputation in which no unit has the heavier mode. With each unit it grows by 1.
        seconds: [n, units + 1, units + 1] seconds of both passes, infinite where the span does not fit; changed.
        numbers: [n, units + 1, units + 1] number of the recomputation; changed.
    """
    size = pair.saved.shape[0]
    for first in range(size):
        for last in range(first + 1, size):
            if not legal[first, last]:
                continue
            # The peak of a mixed span is at most the larger of the peaks under either mode alone. With this upper bound
            # the first loop finds enough units; the second one removes those that the exact peak does not require.
            most = max(pair.heads[first, last] + pair.freed[last] - pair.saved[last], pair.tails[first, last])
            for i in range(alive.shape[0]):
                if pair.light_s[first, last] >= seconds[i, first, last]:
                    continue
                over = pair.state[first, last] + most - pair.capacity
                least = pair.freed[first] + (pair.kept[first, last] + over / alive[i])
                until = first
                while until < last and pair.freed[until] < least:
                    until += 1
                if _used(pair, alive[i], first, until, last) > pair.capacity:
                    continue
                while until > first and _used(pair, alive[i], first, until - 1, last) <= pair.capacity:
                    until -= 1
                found = pair.light_s[first, last] + pair.more_s[until] - pair.more_s[first]
                if found < seconds[i, first, last]:
                    seconds[i, first, last], numbers[i, first, last] = found, number + until - first


class Passes(NamedTuple):
    """What spans take on a stage with one strategy."""

    both_s: Floats2
    """Span -> seconds of both passes of a micro-batch with the fastest recomputation."""
    forward_s: Floats
    """[units + 1] seconds of the forward passes of all units before this one."""
    onward_s: float
    """Seconds of the host before a forward pass."""
    after_s: Floats2
    """Span -> seconds after the last micro-batch."""
    crossing_bytes: Floats
    """[units + 1] bytes that a rank sends to the next stage if a span ends before this unit."""
    exchanged: Floats3
    """Tied parameter and span -> elements of its gradient on a rank with the span."""


@borrowing(void(tuple_type(Passes), int64, int64[:, ::1], float64[:, ::1], float64[:, :, ::1]))
def take_passes(passes, strategy, strategies, seconds, found):
    """Fills in what the spans take for which a strategy is the fastest.

    Args:
        passes: what they take with the strategy.
        strategy: its number.
        strategies: [units + 1, units + 1] number of the fastest strategy of each span.
        seconds: [units + 1, units + 1] seconds of each span; infinite where it does not fit.
        found: [4 + tied parameters, units + 1, units + 1] result of `StageTable.passes`; written.
    """
    for first in range(strategies.shape[0]):
        for last in range(first + 1, strategies.shape[0]):
            if strategies[first, last] == strategy and seconds[first, last] < np.inf:
                forward_s = passes.forward_s[last] - passes.forward_s[first]
                found[0, first, last] = forward_s + passes.onward_s
                found[1, first, last] = passes.both_s[first, last] - forward_s
                found[2, first, last] = passes.after_s[first, last]
                found[3, first, last] = passes.crossing_bytes[last]
                for p in range(passes.exchanged.shape[0]):
                    found[4 + p, first, last] = passes.exchanged[p, first, last]
