"""The band of a predicted peak memory: how probably a plan fits into a device, and what is kept free to be sure of it.

The logarithm of measured over predicted memory is taken as normal around 0 with the trainer's spread, and as one and
the same error for all devices of a plan: what a trainer holds beside the count it holds everywhere. Units: bytes.
"""

from __future__ import annotations

import math
from statistics import NormalDist

LEAST_CONFIDENCE = 0.5
"""Of a plan that is predicted to fill the device, one can be no surer than this."""
MOST_CONFIDENCE = 0.999
"""The runs that the spreads come from say nothing of rarer errors."""
_NORMAL = NormalDist()


def margin(confidence: float, spread: float) -> float:
    """The memory of a device over the most that a plan may be predicted to need; 1 at a confidence of one half.

    Args:
        confidence: probability with which the plan must fit, `LEAST_CONFIDENCE` to `MOST_CONFIDENCE`.
        spread: standard deviation of the logarithm of measured over predicted memory.
    """
    return math.exp(_NORMAL.inv_cdf(confidence) * spread)


def fit_probability(predicted: float, capacity: float, spread: float) -> float:
    """The probability that a plan fits into a device, 0..1; the inverse of `margin` where that much is kept free.

    Args:
        predicted: bytes that the plan is predicted to need.
        capacity: bytes of the device.
        spread: as in `margin`; at 0 the prediction is certain.
    """
    if predicted <= 0.0 or capacity <= 0.0 or spread <= 0.0:
        return float(predicted <= capacity)
    return _NORMAL.cdf(math.log(capacity / predicted) / spread)
