"""Corrections of the price of plans by the plans that have run, see `automap.bounds.corrections`."""

from __future__ import annotations

import math
from typing import NamedTuple

from numba import float64, int64, void

from automap.jit import borrowing, kernel
from automap.price.kernels.array_types import Floats, Ints, Ints2, tuple_type


class CorrectionArrays(NamedTuple):
    """Plans that have run. All ratios of times are relative to the mean ratio that all plans share."""

    tried: Ints2
    """[room, slots] plans that have run."""
    num_tried: Ints
    """[1] number of plans that have run."""
    log_ratio: Floats
    """[room] logarithm of measured over predicted step time of each of them."""
    weight: Floats
    """[room] contribution of each of them to the expected logarithm of a plan at distance 0."""
    slot_weight: Floats
    """[slots] distance of two plans that differ in one slot."""


CORRECTIONS = tuple_type(CorrectionArrays)
"""Numba's type of `CorrectionArrays`."""


@borrowing(float64(CORRECTIONS, int64[::1]), inner=True)
def correction(known, value):
    """Expected step time of a plan, [slots], over its price; 1 while no plan has run.

    It is the mean of a Gaussian process with the kernel exp(-distance), see `automap.bounds.corrections`.
    """
    expected = 0.0
    for i in range(known.num_tried[0]):
        distance = 0.0
        for slot in range(value.shape[0]):
            if known.tried[i, slot] != value[slot]:
                distance += known.slot_weight[slot]
        if distance == 0.0:
            return math.exp(known.log_ratio[i])
        expected += known.weight[i] * math.exp(-distance)
    return math.exp(expected)


@kernel(void(CORRECTIONS, int64[:, ::1], float64[::1]))
def correction_many(known, values, out):
    """Writes the factors of plans, [n, slots], into `out`, [n]."""
    for plan in range(out.shape[0]):
        out[plan] = correction(known, values[plan])
