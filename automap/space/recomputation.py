"""Recomputation levels: the recompute modes of the units of a pipeline rank.

A *level* is a value of the slot `recompute`. It names two successive recompute modes: the first units of each chunk of
the rank have the heavier one, which recomputes more, and the other units have the lighter one. In some levels all units
have the same mode. Levels are ordered by the amount of recomputation: between the levels of two modes are those with
more and more units in the heavier mode. The number of these units is counted in steps, fractions of a chunk, so that a
level has the same meaning in chunks of every size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from automap.arrays import Floats, Ints, Mask
from automap.price.lowered_plan import RECOMPUTE_MODES

Count = TypeVar("Count", int, Ints)
"""A number of units, or an array of them."""

MOST_STEPS = 16
"""Largest number of steps between two modes (assumed). One step is 1/16 of the recomputation of a rank, which is about
1.5 % of a step time. Chunks with at most this number of units may have any number of them in the heavier mode."""


@dataclass(frozen=True, slots=True)
class Level:
    """One level of recomputation; modes by their numbers in `RECOMPUTE_MODES`."""

    light: int
    """Mode of the last units of each chunk."""
    heavy: int
    """Mode of its first units."""
    steps: int
    """Units in the heavy mode, in steps; `Levels.steps` steps are all units. 0 = all units are in the light mode."""


class Levels:
    """The levels of a plan space.

    Attributes:
        steps: number of steps from one mode to the next.
        levels: all levels, legal or not.
    """

    def __init__(self, modes: Mask, num_units: int, *, mixes: bool) -> None:
        """Lists the levels.

        Args:
            modes: [modes] which of `RECOMPUTE_MODES` are legal.
            num_units: units of the model.
            mixes: whether a rank may have two modes.
        """
        self._num_units = num_units
        self.steps = min(MOST_STEPS, num_units)
        found = []
        for heavy, _ in enumerate(RECOMPUTE_MODES):
            # The next lighter legal mode: illegal modes are skipped.
            lighter = [mode for mode in range(heavy) if modes[mode]]
            light = lighter[-1] if lighter else max(0, heavy - 1)
            found += [Level(light, heavy, steps) for steps in range(1, self.steps if heavy else 0)]
            found.append(Level(heavy, heavy, 0))
        self.levels = tuple(found)
        self._steps: Ints = np.array([level.steps for level in found])
        self._whole: Mask = np.array([modes[level.heavy] for level in found])
        self._mixed: Mask = np.array([mixes and modes[level.light] and modes[level.heavy] for level in found])

    def __len__(self) -> int:
        return len(self.levels)

    def of_mode(self, mode: str) -> int:
        """The level at which all units are in one mode."""
        return RECOMPUTE_MODES.index(mode) * self.steps

    def amount(self, level: int) -> float:
        """Amount of recomputation: the number of the mode, with fractions between two modes."""
        return level / self.steps

    def shares(self) -> Floats:
        """[levels, modes] share of the units in each mode."""
        found = np.zeros((len(self), len(RECOMPUTE_MODES)))
        for number, level in enumerate(self.levels):
            found[number, level.heavy] += level.steps / self.steps
            found[number, level.light] += 1.0 - level.steps / self.steps
        return found

    def legal(self, num_chunks: int) -> Mask:
        """[levels] whether a level may be chosen in a pipeline with `num_chunks` chunks.

        Of levels with the same number of units in a chunk of average size, one is legal.
        """
        units = -(-self._num_units // num_chunks)
        first = self.first_units(self._steps, np.full_like(self._steps, units))
        is_first = (first > 0) & (first < units) & (self._steps == _rounded(first * self.steps, units))
        mixed = self._mixed if units >= self.steps else self._mixed & is_first
        found: Mask = np.where(self._steps == 0, self._whole, mixed)
        return found

    def first_units(self, steps: Count, units: Count) -> Count:
        """Number of units of a chunk in the heavy mode.

        Args:
            steps: steps of the level.
            units: units of the chunk.
        """
        return _rounded(steps * units, self.steps)

    def mode(self, level: int, place: int, units: int) -> str:
        """Mode of the unit at a place in a chunk; the same rule as in `automap.space.kernels.levels`."""
        about = self.levels[level]
        is_first = place < self.first_units(about.steps, units)
        return RECOMPUTE_MODES[about.heavy if is_first else about.light]


def _rounded(number: Count, by: int) -> Count:
    """The nearest whole number to `number` / `by`."""
    return (2 * number + by) // (2 * by)
