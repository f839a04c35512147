"""Known plans: complete plans with their prices, by which the partial plans of an agent are completed.

The first known plans are templates; the plans that an agent finds are added. Units: seconds; memory as share of
capacity.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from automap.arrays import Floats, Ints, numbered, row_digests
from automap.bounds.corrections import Corrections
from automap.bounds.kernels.completions import step_and_complete
from automap.bounds.kernels.known_plans import KnownArrays, hash_plans, worth_many
from automap.bounds.partial_plans import PartialPlans
from automap.space.group_flow import group_flow
from automap.space.space import PlanSpace, Values

FIRST = 4096
"""Number of first plans that are kept, or the number of meshes if that is larger (assumed). Large clusters have ten
times as many templates, and each partial plan is compared with all kept ones."""
ROOM = 256
"""Number of plans that may be added to the first ones (assumed); after that a new one replaces a bad one of them."""


def worth_s(prices: Floats, reference_s: float) -> Floats:
    """[n] step times for ranks and rewards: those of the plans, with a penalty for plans that do not fit, which grows
    with the missing share of memory; see `automap.bounds.kernels.known_plans.MISFIT`.

    Args:
        prices: [n, 2] seconds of a step and overflow of memory.
        reference_s: step time of a good plan, in seconds.
    """
    found = np.empty(len(prices))
    worth_many(np.ascontiguousarray(prices), reference_s, found)
    return found


def best_known(space: PlanSpace, values: Ints, prices: Floats, reference_s: float) -> Ints:
    """Numbers of the plans that are kept out of many: distinct ones, first the best of each mesh, then the best of all.

    Args:
        space: space of the plans.
        values: [n, slots] plans.
        prices: [n, 2] their prices, see `PlanSpace.price`.
        reference_s: step time of a good plan where none of these fits, in seconds.
    """
    order = np.argsort(worth_s(prices, _reference_s(prices, reference_s)), kind="stable")
    distinct = order[numbered(row_digests(values)[order])[1]]
    if len(distinct) > FIRST:
        best = distinct[numbered(row_digests(values[:, : space.first.schedule])[distinct])[1]]
        distinct = np.array(list(dict.fromkeys([*best.tolist(), *distinct.tolist()])))[: max(FIRST, len(best))]
    found: Ints = np.sort(distinct)
    return found


def _reference_s(prices: Floats, otherwise_s: float) -> float:
    """Step time of the fastest plan that fits, in seconds; `otherwise_s` where none fits."""
    fitting = prices[prices[:, 1] <= 0.0, 0]
    return float(fitting.min()) if len(fitting) else otherwise_s


class KnownPlans:
    """Known plans, for a number of plans that are being decided.

    Attributes:
        arrays: the known plans in the form that kernels read and write.
        corrections: corrections of the prices by real runs.
        reference_s: step time of the fastest of the first plans that fits, in seconds; if none fits, the given one of a
            good plan.
    """

    def __init__(
        self, space: PlanSpace, values: Ints, prices: Floats, episodes: int, most: int, reference_s: float
    ) -> None:
        """Stores the first plans.

        Args:
            space: plan space of the problem.
            values: [n, slots] plans, at least one.
            prices: [n, 2] their prices, see `PlanSpace.price`.
            episodes: number of plans being decided.
            most: largest number of legal values that are offered.
            reference_s: step time of a good plan where none of these fits, in seconds.
        """
        self.space, self.reference_s = space, _reference_s(prices, reference_s)
        self.corrections = Corrections(space)
        chosen = best_known(space, values, prices, reference_s)
        self._distinct = {row.tobytes() for row in values[chosen]}
        self._first, room, slots = len(chosen), len(chosen) + ROOM, values.shape[1]
        self.arrays = KnownArrays(
            flow=group_flow(space),
            corrections=self.corrections.arrays,
            values=np.zeros((room, slots), dtype=np.int64),
            columns=np.zeros((slots, room), dtype=np.int64),
            meshes=np.zeros((room, 2), dtype=np.int64),
            hashes=np.zeros((room, 2), dtype=np.int64),
            prices=np.full((room, 2), np.inf),
            order=np.zeros(room, dtype=np.int64),
            num_known=np.array([len(chosen)]),
            leads=np.full(episodes, -1),
            agreeing=np.zeros((episodes, room), dtype=np.int64),
            num_agreeing=np.zeros(episodes, dtype=np.int64),
            compared=np.zeros(episodes, dtype=np.int64),
            is_known=np.zeros(episodes, dtype=np.bool_),
            completed=np.zeros((episodes, most, 2)),
            worth=np.zeros((episodes, most)),
            least=np.zeros(episodes),
            is_followed=np.zeros((episodes, most), dtype=np.bool_),
            best_values=np.zeros((episodes, slots), dtype=np.int64),
            best_s=np.full(episodes, np.inf),
            priced=np.zeros(1, dtype=np.int64),
            reference_s=self.reference_s,
        )
        self.arrays.values[: len(chosen)] = values[chosen]
        self.arrays.columns[:, : len(chosen)] = values[chosen].T
        self.arrays.prices[: len(chosen)] = prices[chosen]
        self._hash(0, len(chosen))
        self._rank()

    @property
    def best(self) -> Ints:
        """[slots] the best known plan."""
        found: Ints = self.arrays.values[self.arrays.order[0]]
        return found

    def corrected(self, values: Ints, prices: Floats) -> Floats:
        """[n, 2] prices of plans, [n, slots], with corrected step times."""
        if not self.arrays.corrections.num_tried[0]:
            return prices
        return np.stack([prices[:, 0] * self.corrections.factors(values), prices[:, 1]], axis=1)

    def learn(self, values: Values | None, ratio: float | None) -> None:
        """Corrects all step times by the result of a real run; plans that are being decided must begin again.

        Args:
            values: [slots] the plan that has run; None where it is not in the space.
            ratio: measured over predicted step time, or None where the run failed.
        """
        count = int(self.arrays.num_known[0])
        plans, seconds = self.arrays.values[:count], self.arrays.prices[:count, 0]
        seconds /= self.corrections.factors(plans)
        self.corrections.learn(values, ratio)
        seconds *= self.corrections.factors(plans)
        self._rank()

    def add(self, values: Values, price: tuple[float, float]) -> None:
        """Adds a plan with its corrected price. It has an effect on plans that are begun after that."""
        arrays = self.arrays
        count, given = int(arrays.num_known[0]), np.array(values, dtype=np.int64)
        if given.tobytes() in self._distinct:
            return
        if count < len(arrays.order):
            row = count
            arrays.num_known[0] += 1
        else:
            # The worst plan of the most frequent shape is replaced, so that the best plan of each shape stays longest.
            heads = list(map(tuple, arrays.values[self._first : count, : self.space.first.schedule].tolist()))
            times = Counter(heads)
            most = max(times.values())
            crowd = np.array([self._first + i for i, head in enumerate(heads) if times[head] == most])
            row = int(crowd[worth_s(arrays.prices[crowd], self.reference_s).argmax()])
            self._distinct.remove(arrays.values[row].tobytes())
        self._distinct.add(given.tobytes())
        arrays.values[row], arrays.columns[:, row], arrays.prices[row] = given, given, price
        self._hash(row, row + 1)
        self._rank()

    def lead(self, number: int, values: Values | None) -> None:
        """Sets the known plan that a plan follows when it is begun again; None = the best one."""
        self.arrays.leads[number] = -1
        if values is not None:
            known = self.arrays.values[: int(self.arrays.num_known[0])]
            found = np.flatnonzero((known == np.array(values)).all(axis=1))
            self.arrays.leads[number] = found[0] if len(found) else -1

    def _hash(self, first: int, last: int) -> None:
        """Writes the hashes of the known plans from number `first` to before `last`."""
        arrays, some = self.arrays, slice(first, last)
        hash_plans(self.space.arrays, arrays.values[some], arrays.meshes[some], arrays.hashes[some])

    def _rank(self) -> None:
        count = int(self.arrays.num_known[0])
        worth = worth_s(self.arrays.prices[:count], self.reference_s)
        self.arrays.order[:count] = np.argsort(worth, kind="stable")

    def step(self, plans: PartialPlans, actions: Ints) -> None:
        """Takes one decision of every plan and prices the completions after it, see `step_and_complete`."""
        step_and_complete(self.space.compiled, plans.table.lower_bounds, plans.episodes, self.arrays, actions)
