"""Diverse top-k: the best plans of a search that differ in more than details, for trials of several plans.

For each shape (mesh, virtual stages, number of micro-batches) only the best plan is kept, and for each mesh only the
best `MOST_PER_MESH` of these. Without this rule, all plans would be neighbours of the best one with nearly the same
price. Units: seconds.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from automap.plan import Plan
from automap.space.space import SHAPE_KINDS, PlanSpace, Values

MOST_PER_MESH = 2
"""Largest number of plans with the same mesh (assumed)."""
MOST = 16
"""Largest number of plans that are kept (assumed)."""
_WAITING = 1024
"""Number of priced plans that are collected before the best of them are picked (assumed)."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Candidate(Generic[T]):
    """A plan that fits into memory."""

    step_time_s: float
    """Step time of the plan."""
    mesh: Hashable
    """Key that plans with the same mesh share."""
    shape: Hashable
    """Key that plans with the same shape share."""
    item: T
    """The plan itself, or what stands for it."""


def unlike(candidates: Iterable[Candidate[T]], count: int) -> list[Candidate[T]]:
    """The fastest `count` plans, one of each shape and `MOST_PER_MESH` of each mesh; of equally fast plans the
    first."""
    found: list[Candidate[T]] = []
    for candidate in sorted(candidates, key=lambda c: c.step_time_s):
        if len(found) == count:
            break
        of_mesh = sum(other.mesh == candidate.mesh for other in found)
        if of_mesh < MOST_PER_MESH and all(other.shape != candidate.shape for other in found):
            found.append(candidate)
    return found


def unlike_plans(plans: Iterable[Plan], count: int) -> tuple[Plan, ...]:
    """The fastest `count` plans that are unlike each other, of the plans that have estimates."""
    with_times = ((plan, plan.estimate.step_time_s) for plan in plans if plan.estimate is not None)
    return tuple(found.item for found in unlike((candidate(plan, step_s, plan) for plan, step_s in with_times), count))


def candidate(plan: Plan, step_time_s: float, item: T) -> Candidate[T]:
    """The candidate of a plan with this step time, for which `item` stands."""
    mesh = tuple(dict.fromkeys((stage.devices, stage.mesh) for stage in plan.stages))
    shape = mesh, len(plan.stages), plan.num_micro_batches
    return Candidate(step_time_s, mesh, shape, item)


Found = tuple[Values, str]
"""Values of a plan, and the name of the searcher that found it."""


class DiverseTopK:
    """The best plans of one space that are unlike each other, of all that have been added.

    Nothing is lost when a shape is dropped because other plans are better: it returns only with a plan that is better
    than its old one.
    """

    def __init__(self, space: PlanSpace) -> None:
        slots = [slot for slot in space.slots if slot.kind in SHAPE_KINDS]
        kinds = [slot.kind for slot in slots]
        self._num_shape_slots = len(slots)
        self._places = np.cumprod([1, *(slot.num_values for slot in slots[:-1])])
        self._mesh_slots = [kinds.index(kind) for kind in ("pp", "tp", "middle") if kind in kinds]
        self._kept: dict[Values, Candidate[Found]] = {}
        self._waiting: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], str]] = []
        self._num_waiting = 0
        self._limit_s = np.inf

    def add(self, values: npt.NDArray[np.int64], step_times_s: npt.NDArray[np.float64], found_by: str) -> None:
        """Adds plans.

        Args:
            values: [plans, slots]
            step_times_s: [plans] step times, infinite where a plan does not fit.
            found_by: name of the searcher.
        """
        able = step_times_s < self._limit_s
        if not able.any():
            return
        self._waiting.append((values[able], step_times_s[able], found_by))
        self._num_waiting += len(self._waiting[-1][0])
        if self._num_waiting >= _WAITING:
            self._pick_best()

    def best(self, count: int, first: Values) -> list[Found]:
        """The best `count` plans that are unlike each other, at most `MOST`, the fastest first.

        `first` comes before plans that are equally fast.
        """
        self._pick_best()
        shape = first[: self._num_shape_slots]
        in_order = [self._kept.get(shape), *(self._kept[other] for other in sorted(self._kept) if other != shape)]
        candidates = [candidate for candidate in in_order if candidate is not None]
        return [candidate.item for candidate in unlike(candidates, min(count, MOST))]

    def _pick_best(self) -> None:
        """Picks the best plans of those that have been collected."""
        if not self._waiting:
            return
        shapes = np.concatenate([values[:, : self._num_shape_slots] @ self._places for values, _, _ in self._waiting])
        times = np.concatenate([times for _, times, _ in self._waiting])
        order = np.argsort(times, kind="stable")
        _, first = np.unique(shapes[order], return_index=True)
        ends = np.cumsum([len(values) for values, _, _ in self._waiting])
        for row in order[first].tolist():
            batch = int(np.searchsorted(ends, row, side="right"))
            values, _, found_by = self._waiting[batch]
            plan: Values = tuple(values[row - ends[batch]].tolist())
            shape, step_time_s = plan[: self._num_shape_slots], float(times[row])
            if shape not in self._kept or step_time_s < self._kept[shape].step_time_s:
                mesh = tuple(plan[slot] for slot in self._mesh_slots)
                self._kept[shape] = Candidate(step_time_s, mesh, shape, (plan, found_by))
        self._waiting.clear()
        self._num_waiting = 0
        best = unlike(self._kept.values(), MOST)
        self._kept = {found.item[0][: self._num_shape_slots]: found for found in best}
        self._limit_s = best[-1].step_time_s if len(best) == MOST else np.inf
