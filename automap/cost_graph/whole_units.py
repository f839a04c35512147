"""Whole units: a lower bound on the time of the slowest rank, where units are not divided among ranks.

The linear programs of `unlike_stages` and `virtual_stages` divide units: 33 units on 8 ranks are 4.125 for each rank.
In a real plan some rank has 5 of them. `WholeUnits` counts how many units of the repeated types can run on each rank
within a given time. If these are fewer than all units, a step takes longer than this time. The order of the units does
not matter. Where memory is short, its limit is relaxed by a price of each byte (Lagrange): each unit has the recompute
mode that is best at this price, and the price of the room is subtracted. This gives a lower bound at any price. Units:
seconds, bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from automap.arrays import Floats
from automap.cost_graph.unlike_stages import RankBounds

MOST_PRICES = 6
"""Largest number of prices of memory that are tried (assumed)."""
STEPS = 8
"""Steps of bisection between a time that is too short and one that may suffice (assumed)."""
MOST = 2.0
"""Largest share by which the bound is raised (assumed)."""
MORE = 1e-3
"""Share by which the bound must rise (assumed)."""


@dataclass(frozen=True, kw_only=True)
class WholeUnits:
    """A pipeline whose ranks hold whole units."""

    rank_bounds: Sequence[RankBounds]
    """[ranks] bounds of each rank."""
    times: Floats
    """[types] number of units of each type."""
    ends: tuple[int, int]
    """Types of the first unit, which is on the first rank, and of the last one, which is on the last rank."""
    least: int
    """Least number of units of a rank: one in each of its chunks."""
    in_flight: Sequence[int]
    """[ranks] lower bound of the micro-batches in flight on each rank."""
    besides_s: Sequence[float]
    """[ranks] seconds that each rank takes besides its units."""

    def bound(self, known_s: float, target_s: float) -> float:
        """A lower bound on the seconds of a step.

        Args:
            known_s: the bound so far.
            target_s: a bound that suffices.
        """
        kinds = np.flatnonzero(self.times > 1.0)
        if len(self.rank_bounds) == 1 or not 1 <= len(kinds) <= 2:
            return known_s
        for price_s in self._prices(kinds.tolist()):
            if known_s >= target_s:
                break
            costs_s, rooms_s = self._costs_s(price_s)
            if self._fits(known_s * (1.0 + MORE), kinds.tolist(), costs_s, rooms_s):
                continue
            low, high = known_s * (1.0 + MORE), min(target_s, MOST * known_s)
            if low >= high or not self._fits(high, kinds.tolist(), costs_s, rooms_s):
                known_s = max(known_s, high)
                continue
            for _ in range(STEPS):
                middle = 0.5 * (low + high)
                low, high = (low, middle) if self._fits(middle, kinds.tolist(), costs_s, rooms_s) else (middle, high)
            known_s = low
        return known_s

    def _prices(self, kinds: Sequence[int]) -> Iterator[float]:
        """Prices of a byte: 0, and those at which the best way of a type changes."""
        return prices_of_memory(self.rank_bounds, self.in_flight, kinds, len(self.rank_bounds))

    def _costs_s(self, price_s: float) -> tuple[Floats, Floats]:
        """[ranks, types] lower bound on the seconds of a unit plus the price of its memory, and [ranks] the price of
        the room."""
        found = [
            (of_rank.busy_s + price_s * of_rank.used_bytes(in_flight)).min(axis=0)
            for of_rank, in_flight in zip(self.rank_bounds, self.in_flight, strict=True)
        ]
        rooms_s = np.array([price_s * of_rank.room for of_rank in self.rank_bounds])
        return np.array(found) / self.times, rooms_s

    def _fits(self, seconds: float, kinds: Sequence[int], costs_s: Floats, rooms_s: Floats) -> bool:
        """Whether all units of the repeated types may run on the ranks within this time."""
        left_s = seconds - np.array(self.besides_s) + rooms_s
        for rank, kind in zip((0, -1), self.ends, strict=True):
            if kind not in kinds:
                left_s[rank] -= costs_s[rank, kind]
        if (left_s < 0.0).any():
            return False
        singles = int((self.times == 1.0).sum())
        most = np.floor(left_s[:, None] / np.maximum(costs_s[:, kinds], 1e-30) * (1.0 + 1e-9) + 1e-9)
        if len(kinds) == 1:
            missing = np.maximum(self.least - most[:, 0], 0.0).sum()
            return bool(missing <= singles and most[:, 0].sum() >= self.times[kinds[0]])
        # [units of the first type, units of other types that chunks still need] most units of the second type on the
        # ranks so far.
        number = int(self.times[kinds[0]])
        placed = np.full((number + 1, singles + 1), -np.inf)
        placed[0, 0] = 0.0
        for rank, left in enumerate(left_s.tolist()):
            after = np.full_like(placed, -np.inf)
            for first in range(int(min(most[rank, 0], number)) + 1):
                rest_s = left - first * costs_s[rank, kinds[0]]
                second = int(min(rest_s / max(costs_s[rank, kinds[1]], 1e-30) * (1.0 + 1e-9) + 1e-9, 1e6))
                missing = max(0, self.least - first - second)
                if missing <= singles:
                    moved = placed[: number + 1 - first, : singles + 1 - missing] + second
                    into = after[first:, missing:]
                    np.maximum(into, moved, out=into)
            placed = after
        return bool(placed[number].max() >= self.times[kinds[1]])


def prices_of_memory(
    rank_bounds: Sequence[RankBounds], in_flight: Sequence[int], kinds: Sequence[int], ranks: int
) -> Iterator[float]:
    """Prices of a byte: 0, and, if memory may be short, those at which the best way of a type changes."""
    yield 0.0
    found = set[float]()
    # Ranks often share one object, which is processed once.
    distinct = {id(bounds): (bounds, count) for bounds, count in zip(rank_bounds, in_flight, strict=True)}
    for bounds, count in distinct.values():
        if bounds.may_be_short(count, 1.0 / ranks):
            used = bounds.used_bytes(count)
            for kind in kinds:
                slower = bounds.busy_s[:, None, kind] - bounds.busy_s[None, :, kind]
                less = used[None, :, kind] - used[:, None, kind]
                trades = (slower > 0.0) & (less > 0.0)
                found.update((slower[trades] / less[trades]).tolist())
    prices = sorted(found)
    # At most MOST_PRICES of them, evenly from the lowest to the highest.
    some = np.unique(np.linspace(0, len(prices) - 1, MOST_PRICES).astype(np.int64)).tolist() if prices else []
    yield from (prices[number] for number in some)
