"""Draw: the random choices of which a generated problem is made, in the words of the generator.

Every choice follows one numpy Generator, so that equal seeds give equal problems.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

Item = TypeVar("Item")


class Draw:
    """Random choices of one seed."""

    def __init__(self, *seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return bool(self._rng.random() < probability)

    def one(self, items: Sequence[Item]) -> Item:
        """One of the items, each equally likely."""
        return items[int(self._rng.integers(len(items)))]

    def weighted(self, weights: Mapping[Item, float]) -> Item:
        """One of the keys, each with a probability proportional to its weight."""
        items = list(weights)
        shares = np.cumsum(list(weights.values()))
        return items[int(np.searchsorted(shares, self._rng.random() * shares[-1], side="right"))]

    def integer(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included."""
        return int(self._rng.integers(low, high + 1))

    def between(self, low: float, high: float) -> float:
        """A number from `low` to `high`, uniform."""
        return float(self._rng.uniform(low, high))

    def log_between(self, low: float, high: float) -> float:
        """A number from `low` to `high` whose logarithm is uniform."""
        return math.exp(self._rng.uniform(math.log(low), math.log(max(low, high))))

    def log_integer(self, low: int, high: int, multiple: int = 1) -> int:
        """A multiple of `multiple` near a number whose logarithm is uniform; at least `multiple`."""
        return max(1, round(self.log_between(low, high) / multiple)) * multiple


def divisors_up_to(number: int, most: int) -> list[int]:
    """The divisors of `number` that are at most `most`, ascending."""
    return [d for d in range(1, min(number, most) + 1) if number % d == 0]
