"""A linear program that spreads units over places: which share of each type of units is at each place.

A place is a rank, or a chunk of a rank, in one recompute mode. The program minimizes the seconds of a step. A row of
the first kind says that a weighted sum of what the units take, plus a constant, is at most the step. A row of the
second kind says that the memory of the units, plus a constant, is at most some room. Units: seconds, bytes.
"""

from __future__ import annotations

import numpy as np

from automap.arrays import Floats

INFEASIBLE = 2
"""Status of a linear program that nothing solves, see `scipy.optimize.linprog`."""
MOST_ITERATIONS = 10_000
"""Largest number of iterations of a program, after which it bounds nothing: rounding may make a solver go on for ever
(assumed; the most that the programs of the tests took is 236)."""


class SpreadProgram:
    """Rows of the program, which are added one by one.

    Attributes:
        weights: what each tagged row weighs in the optimum that was found last: those of seconds add up to 1, a share
            weighs seconds.
        shares: the shares of that optimum, [places * ... * types]; none where there is no optimum.
    """

    def __init__(self, num_types: int, scale_s: float) -> None:
        """Begins without rows.

        Args:
            num_types: types of units.
            scale_s: seconds that are about those of a step.
        """
        self._types, self._scale = num_types, max(scale_s, 1e-30)
        self._rows: list[Floats] = []
        self._right: list[float] = []
        self._tags: list[tuple[str, int, int]] = []
        self.weights: dict[tuple[str, int, int], float] = {}
        self.shares: Floats = np.empty(0)

    def add_seconds(self, each_s: Floats, besides_s: float, tag: tuple[str, int, int] = ("", 0, 0)) -> None:
        """A step is no shorter than a sum of seconds.

        Args:
            each_s: [places, ..., types] seconds of all units of a type at a place.
            besides_s: seconds besides.
            tag: name of the row, see `weights`.
        """
        self._tags.append(tag)
        self._rows.append(np.append(each_s.reshape(-1) / self._scale, -1.0))
        self._right.append(-besides_s / self._scale)

    def add_room(self, each: Floats, room: float, tag: tuple[str, int, int] = ("", 0, 0)) -> None:
        """A sum over the units, [places, ..., types], is at most so much."""
        scale = max(abs(room), float(np.abs(each).max()), 1e-30)
        self._tags.append(tag)
        self._rows.append(np.append(each.reshape(-1) / scale, 0.0))
        self._right.append(room / scale)

    def add_shares(self, bound: Floats) -> None:
        """Each place has at least some share of each type, all ways together.

        Args:
            bound: [places, ways, types] the least share of each type at each place; the same for all ways.
        """
        places = bound.reshape(-1, *bound.shape[-2:])
        for place, kind in np.argwhere(places[:, 0] > 0.0).tolist():
            row = np.zeros(places.shape)
            row[place, :, kind] = -1.0
            self.add_room(row, -float(places[place, 0, kind]), ("share", place, kind))

    def seconds(self) -> float:
        """The least seconds of a step; infinite where no spread has enough room, 0 where the solver found nothing."""
        from scipy.optimize import linprog  # it takes longer to import than most programs to run

        upper = np.array(self._rows)
        count = upper.shape[1] - 1
        costs = np.zeros(count + 1)
        costs[-1] = 1.0
        shares = np.tile(np.eye(self._types), (1, count // self._types))
        found = linprog(
            costs,
            A_ub=upper,
            b_ub=np.array(self._right),
            A_eq=np.concatenate([shares, np.zeros((self._types, 1))], axis=1),
            b_eq=np.ones(self._types),
            bounds=(0.0, None),
            options={"maxiter": MOST_ITERATIONS},
        )
        self.weights, self.shares = {}, np.empty(0)
        if found.status == INFEASIBLE:
            return np.inf
        if found.status == 0:
            self.shares = found.x[:-1]
            for tag, dual, row in zip(self._tags, found.ineqlin.marginals.tolist(), self._rows, strict=True):
                # A share counts in seconds, as the rows of seconds do; its row has no other scale than 1.
                scale = self._scale / float(np.abs(row).max()) if tag[0] == "share" else 1.0
                self.weights[tag] = self.weights.get(tag, 0.0) - dual * scale
        # The solver is exact to about 1e-7.
        return float(found.fun) * self._scale * (1.0 - 1e-6) if found.status == 0 else 0.0
