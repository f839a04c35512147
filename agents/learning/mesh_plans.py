"""The best known plan of each mesh: with what visits of a mesh begin, and how meshes are compared.

A mesh here is the decisions before the order of the devices: stages, sizes of the axes, micro-batches, virtual stages,
and the schedule. Units: seconds.
"""

from __future__ import annotations

import math

import numpy as np

from automap.arrays import Floats, Mask
from automap.bounds.known_plans import worth_s
from automap.bounds.partial_plans import BoundTable
from automap.space.space import Ints, Values
from envs.decision import Episodes


class MeshPlans:
    """The best known plan of each mesh with each schedule.

    Attributes:
        num_slots: number of slots that decide the mesh and the schedule.
        values: [meshes, slots] the best plan of each.
        worth_s: [meshes] their step times, with a penalty for those that do not fit, see
            `automap.bounds.known_plans.worth_s`.
        bound_s: [meshes] lower bounds on the step times; infinite where nothing fits.
        is_open: [meshes] whether the agent may decide a plan with this mesh.
    """

    def __init__(self, episodes: Episodes, table: BoundTable) -> None:
        """Takes the known plans of episodes. A mesh that none of them has is given the rest of the best one that agrees
        in most of the first decisions.

        Args:
            episodes: episodes of the problem.
            table: bounds of its space.
        """
        space, known = episodes.space, episodes.known
        self._space, self._known = space, known
        ranked = known.arrays.order[: int(known.arrays.num_known[0])]
        plans, worth = known.arrays.values[ranked], worth_s(known.arrays.prices[ranked], known.reference_s)
        shapes = [space.meshes.values(shape) for shape in space.shapes]
        # Plans of unlike schedules have unlike cuts, so that each schedule has a best plan of its own.
        self.num_slots = space.first.order
        meshes = [(*shape, int(way)) for shape in shapes for way in np.flatnonzero(space.legal(shape))]
        bounds = dict(zip(shapes, table.shape_bounds.tolist(), strict=True))
        self.bound_s: Floats = np.array(
            [math.inf if over > 0.0 else time_s for time_s, over in (bounds[m[:-1]] for m in meshes)]
        )
        # What the agent does not decide about the mesh is as in some known plan.
        given = np.flatnonzero(~episodes.asked[: self.num_slots])
        seen = {tuple(head) for head in plans[:, given].tolist()}
        self.is_open: Mask = np.array([tuple(mesh[slot] for slot in given) in seen for mesh in meshes])
        self._number = {mesh: number for number, mesh in enumerate(meshes)}
        rows = []
        for mesh in meshes:
            agreeing = np.logical_and.accumulate(plans[:, : self.num_slots] == np.array(mesh), axis=1).sum(axis=1)
            rows.append(space.repair([*mesh, *plans[agreeing.argmax(), self.num_slots :].tolist()]))
        self.values: Ints = np.array(rows, dtype=np.int64)
        self.worth_s: Floats = self._worth_s(self.values)
        for plan, worth_of in zip(plans.tolist(), worth.tolist(), strict=True):
            self.add(tuple(plan), worth_of)

    def add(self, values: Values, worth_s: float) -> int | None:
        """Takes a plan; the number of its mesh if it becomes the best one there, else None."""
        number = self._number[values[: self.num_slots]]
        if worth_s >= self.worth_s[number]:
            return None
        self.values[number], self.worth_s[number] = values, worth_s
        return number

    def ranked(self) -> Ints:
        """[meshes] numbers of the meshes, that of the best plan first."""
        ranked: Ints = np.argsort(self.worth_s, kind="stable")
        return ranked

    def spread(self, values: Values) -> int:
        """Tries the decisions of a plan after those about the mesh on all meshes.

        Returns:
            Number of plans that were priced.
        """
        rows = np.tile(np.array(values, dtype=np.int64), (len(self.values), 1))
        rows[:, : self.num_slots] = self.values[:, : self.num_slots]
        rows = self._space.repair_many(rows, self.num_slots)
        for plan, worth_of in zip(rows.tolist(), self._worth_s(rows).tolist(), strict=True):
            self.add(tuple(plan), worth_of)
        return len(rows)

    def _worth_s(self, plans: Ints) -> Floats:
        """[n] worth of plans, [n, slots], with corrected step times."""
        return worth_s(self._known.corrected(plans, self._space.price(plans)), self._known.reference_s)
