"""A linear program that spreads units over places: which share of each type of units is at each place.

A place is a rank, or a chunk of a rank, in one recompute mode. The program minimizes the step time. Rows of the first
kind require that a weighted sum of the seconds of the units, plus a constant, is at most the step time. Rows of the
second kind require that the memory of the units is at most some room. Units: seconds, bytes.
"""

from __future__ import annotations

import numpy as np

from automap.arrays import Floats

INFEASIBLE = 2
"""Status of a linear program without a solution, see `scipy.optimize.linprog`."""
MOST_ITERATIONS = 10_000
"""Largest number of iterations, after which a program gives no bound, since rounding errors may keep a solver from
ending (assumed; the programs of the tests took at most 236)."""


class SpreadProgram:
    """The program, whose rows are added one by one.

    Attributes:
        weights: dual variable of each tagged row in the last optimum. Those of rows of seconds add up to 1; those of
            rows of shares are seconds.
        shares: the shares in that optimum, [places * ... * types]; empty if there is no optimum.
    """

    def __init__(self, num_types: int, scale_s: float) -> None:
        """Begins without rows.

        Args:
            num_types: types of units.
            scale_s: about the step time, in seconds, by which the program is scaled.
        """
        self._types, self._scale = num_types, max(scale_s, 1e-30)
        self._rows: list[Floats] = []
        self._right: list[float] = []
        self._tags: list[tuple[str, int, int]] = []
        self.weights: dict[tuple[str, int, int], float] = {}
        self.shares: Floats = np.empty(0)

    def add_seconds(self, each_s: Floats, besides_s: float, tag: tuple[str, int, int] = ("", 0, 0)) -> None:
        """Adds a row: the step time is at least a sum of seconds.

        Args:
            each_s: [places, ..., types] seconds of all units of a type at a place.
            besides_s: seconds that are added to this sum.
            tag: name of the row, see `weights`.
        """
        self._tags.append(tag)
        self._rows.append(np.append(each_s.reshape(-1) / self._scale, -1.0))
        self._right.append(-besides_s / self._scale)

    def add_room(self, each: Floats, room: float, tag: tuple[str, int, int] = ("", 0, 0)) -> None:
        """Adds a row: the memory of the units is at most the room.

        Args:
            each: [places, ..., types] bytes of all units of a type at a place.
            room: bytes.
            tag: name of the row, see `weights`.
        """
        scale = max(abs(room), float(np.abs(each).max()), 1e-30)
        self._tags.append(tag)
        self._rows.append(np.append(each.reshape(-1) / scale, 0.0))
        self._right.append(room / scale)

    def add_shares(self, bound: Floats) -> None:
        """Adds rows: each place has at least some share of each type, summed over the ways.

        Args:
            bound: [places, ways, types] the least share of each type at each place; the same for all ways.
        """
        places = bound.reshape(-1, *bound.shape[-2:])
        for place, kind in np.argwhere(places[:, 0] > 0.0).tolist():
            row = np.zeros(places.shape)
            row[place, :, kind] = -1.0
            self.add_room(row, -float(places[place, 0, kind]), ("share", place, kind))

    def seconds(self) -> float:
        """The least step time in seconds; infinite if no spread has enough room, 0 if the solver found no solution."""
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
                # The dual variable of a share is converted to seconds; the largest entry of its row is 1.
                scale = self._scale / float(np.abs(row).max()) if tag[0] == "share" else 1.0
                self.weights[tag] = self.weights.get(tag, 0.0) - dual * scale
        # The solver is exact to about 1e-7.
        return float(found.fun) * self._scale * (1.0 - 1e-6) if found.status == 0 else 0.0
