"""Best ends of stages: the kernels of the dynamic programs against arrays of all ends."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.planners.kernels.partitions import least_of_most, least_sum


def drawn(seed: int, units: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of a stage and of what is behind it: few distinct ones, so that ends tie, and some that do not fit."""
    rng = np.random.default_rng(seed)
    seconds = rng.integers(1, 5, (units + 1, units + 1)) * 0.1
    seconds[rng.random(seconds.shape) < 0.2] = np.inf
    seconds[np.tril_indices(units + 1)] = np.inf
    after = rng.integers(0, 5, units + 1) * 0.1
    after[rng.random(units + 1) < 0.2] = np.inf
    return seconds, after


@pytest.mark.parametrize("limit", [None, 0.25, 10.0])
@given(seed=st.integers(0, 2**32 - 1), units=st.integers(1, 12))
def test_ends_are_those_of_arrays(limit, seed, units):
    seconds, after = drawn(seed, units)
    best, ends = np.full(units + 1, np.nan), np.full(units + 1, -1)
    if limit is None:
        least_of_most(seconds, after, best, ends)
        total = np.maximum(seconds, after)
    else:
        least_sum(seconds, limit, after, best, ends)
        total = np.where(seconds <= limit, seconds, np.inf) + after
    assert best.tobytes() == total.min(axis=1).tobytes()
    assert np.array_equal(ends, total.argmin(axis=1))
