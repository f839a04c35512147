"""Recomputation levels: what a pipeline rank computes again in the backward pass.

A *level* is a value of the slot `recompute`. It names two neighbouring recompute modes: the heavier one is for the
first units of each chunk of the rank, and the lighter one for the other units. Levels with one mode for all units are
among them. Levels are ordered by how much is computed again: between the levels of two modes are those with more and
more units in the heavier mode. The number of these units is counted in steps, fractions of a chunk, so that a level
means the same in chunks of every size.
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
"""Most steps between two modes (assumed): a step of a rank whose units all run again is 1/16 of its recomputation,
about 1.5 % of a step. Chunks of up to so many units may have any number of them in the heavier mode."""


@dataclass(frozen=True, slots=True)
class Level:
    """One level of recomputation; modes by their numbers in `RECOMPUTE_MODES`."""

    light: int
    """Mode of the last units of each chunk."""
    heavy: int
    """Mode of its first units."""
    steps: int
    """How many units are in the heavy mode, as steps of so many that are all units; 0 = all are in one mode."""


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
            # The next lighter mode that is legal, so that a missing one does not leave a gap.
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
        """How much runs again: the number of the mode, fractions between two modes."""
        return level / self.steps

    def shares(self) -> Floats:
        """[levels, modes] share of the units that each level has in each mode."""
        found = np.zeros((len(self), len(RECOMPUTE_MODES)))
        for number, level in enumerate(self.levels):
            found[number, level.heavy] += level.steps / self.steps
            found[number, level.light] += 1.0 - level.steps / self.steps
        return found

    def legal(self, num_chunks: int) -> Mask:
        """[levels] which may be chosen in a pipeline of so many chunks.

        Of the levels that mean the same in a chunk of even size one is legal.
        """
        units = -(-self._num_units // num_chunks)
        first = self.first_units(self._steps, np.full_like(self._steps, units))
        is_first = (first > 0) & (first < units) & (self._steps == _rounded(first * self.steps, units))
        mixed = self._mixed if units >= self.steps else self._mixed & is_first
        found: Mask = np.where(self._steps == 0, self._whole, mixed)
        return found

    def first_units(self, steps: Count, units: Count) -> Count:
        """How many of the units of a chunk are in the heavy mode of a level of so many steps."""
        return _rounded(steps * units, self.steps)

    def mode(self, level: int, place: int, units: int) -> str:
        """Mode of the unit at a place in a chunk of so many units; said again in `automap.space.kernels.levels`."""
        about = self.levels[level]
        is_first = place < self.first_units(about.steps, units)
        return RECOMPUTE_MODES[about.heavy if is_first else about.light]


def _rounded(number: Count, by: int) -> Count:
    """The nearest whole number to `number` / `by`."""
    return (2 * number + by) // (2 * by)
