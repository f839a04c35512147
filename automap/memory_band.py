"""The band of a predicted peak memory: how probably a plan fits into a device, and what is kept free to be sure of it.

The logarithm of measured over predicted memory is assumed to have a normal distribution around 0, whose standard
deviation is the spread of the trainer. All devices of a plan are assumed to have the same error, because memory that
the prediction leaves out, such as buffers of the trainer, is on every device. Units: bytes.
"""

from __future__ import annotations

import math
from statistics import NormalDist

LEAST_CONFIDENCE = 0.5
"""Least confidence: at it, a plan may be predicted to fill the device, and no memory is kept free."""
MOST_CONFIDENCE = 0.999
"""Largest confidence: errors that are rarer than this cannot be seen in the few runs that the spreads come from."""
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
