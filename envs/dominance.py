"""Dominance between signatures of a linkage group: which of them can be left out without losing the optimum.

One signature dominates another one on a mesh axis if all of the following hold for any signatures on the other axes, on
every mesh and in every recompute mode:

- it gives the same placements to all tensors that operators outside the group read or write;
- it is legal wherever the other one is;
- no component of the unit's cost is larger with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from automap.bounds.partial_plans import BoundTable
from automap.price.kernels.array_types import Record
from automap.price.kernels.collectives import UNKNOWN
from automap.price.kernels.cost_records import UNIT_COST_DTYPE
from automap.price.kernels.stage_records import Stage
from automap.price.lowered_plan import Segment
from automap.space.kernels.masks import signature_mask
from automap.space.space import PlanSpace

ATTENDED = ("forward_attended_s", "backward_attended_s")
"""Components of a unit's cost of which more is better: seconds of attention under which a ring's transfers are
hidden."""
TAKEN_OFF = {
    "frozen": "parameters", "zero_frozen": "zero_parameters", "gathered_frozen": "gathered", "unanswered": "launched",
}  # fmt: skip
"""Frozen parameters, which are a part of another component and cost less than its other part -> that component."""


class GroupSignatures:
    """The signatures of one linkage group.

    Attributes:
        space: the plan space.
        number: number of the group among those of `PlanSpace.group_rows`.
        unit_type: unit type of the group.
        group: number of the group in its unit type.
        rows: [members] operator rows of the members.
        assignment: [values, members] signature of each member under each value of the group.
    """

    def __init__(self, space: PlanSpace, number: int) -> None:
        self.space, self.number = space, number
        (self.unit_type, self.group), (self.rows, self.assignment) = list(space.group_rows.items())[number]

    def dominates(self, axis: int, better: int, worse: int) -> bool:
        """Whether the value `better` dominates `worse` on an axis, both giving the same `placements_outside`."""
        for stage in self._stages():
            if stage.axes[axis] == 1.0:
                continue
            whole = int(self.space.arrays.groups[self.number]["whole"])
            free: list[Iterable[int]] = [range(len(self.assignment)) if size > 1 else [whole] for size in stage.axes]
            for picked in itertools.product(*free[:axis], [worse], *free[axis + 1 :]):
                if not self._is_legal(stage, picked):
                    continue
                instead = (*picked[:axis], better, *picked[axis + 1 :])
                if not self._is_legal(stage, instead):
                    return False
                costs = zip(self._unit_costs(stage, picked), self._unit_costs(stage, instead), strict=True)
                if not all(costs_no_more(*both) for both in costs):
                    return False
        return True

    def placements_outside(self) -> list[tuple[object, ...]]:
        """[values] placements of all operands of the members that other operators read, write or share."""
        space, graph = self.space, self.space.problem.graph
        unit = space.linkage.types[self.unit_type]
        members = unit.groups[self.group].members
        operators = [space.operator(self.unit_type, offset) for offset in range(len(unit.signatures))]
        operands = [(*op.inputs, *op.outputs) for op in operators]
        others = {name for offset, own in enumerate(operands) if offset not in members for name in own}
        others |= {name for name, _, _ in space.evaluator.tied.parameters}
        others |= {name for name in (unit.boundary_in, unit.boundary_out) if name is not None}
        inside = {name for op in operators for name in op.outputs}

        def is_outside(name: str) -> bool:
            return name in others or not (graph.tensors[name].role == "parameter" or name in inside)

        arrays = space.evaluator.tables.arrays
        found: list[tuple[object, ...]] = []
        for signatures in self.assignment:
            placements: list[object] = []
            for row, member, signature in zip(self.rows, members, signatures, strict=True):
                first = arrays.signatures[arrays.operators[row].first_signature + signature].first_placement
                names = enumerate(operands[member])
                placements += [arrays.placements[first + at].item() for at, name in names if is_outside(name)]
            found.append(tuple(placements))
        return found

    def _stages(self) -> Iterator[Stage]:
        """The distinct stages of the space, with the samples that each is priced with."""
        arrays = self.space.arrays
        for row, samples in BoundTable(self.space).settings:
            zero_axes = arrays.axes[row] > 1.0
            zero_axes[-1] = False
            yield Stage(arrays.axes[row], arrays.links[row], arrays.hardware[row], zero_axes, float(samples))

    def _is_legal(self, stage: Stage, picked: Sequence[int]) -> bool:
        """Whether values of the group, one for each axis, are legal on a stage."""
        arrays, space = self.space.evaluator.tables.arrays, self.space
        chosen = space.signatures(())
        mask = np.empty(len(self.assignment), dtype=np.bool_)
        meshes, samples = stage.axes[None].copy(), np.array([stage.samples], dtype=np.int64)
        for axis, value in enumerate(picked):
            signature_mask(arrays, space.arrays, self.number, axis, chosen, meshes, samples, mask)
            if not mask[value]:
                return False
            chosen[self.rows, axis] = self.assignment[value]
        return True

    def _unit_costs(self, stage: Stage, picked: Sequence[int]) -> list[Record]:
        """Costs of a unit, a `UnitCostRow` for each recompute mode, where only this group is decided."""
        evaluator = self.space.evaluator
        rows = evaluator.tables.rows(self.unit_type)
        chosen = np.full((len(rows), len(stage.axes)), -1, dtype=np.int64)
        chosen[self.rows - rows.start] = self.assignment[list(picked)].T
        incoming: npt.NDArray[np.int64] = np.full(len(stage.axes), UNKNOWN, dtype=np.int64)
        return [
            evaluator.unit_cost(
                Segment(unit=0, first=rows.start, last=rows.stop, chosen=chosen, recomputed=mode), incoming, stage
            )
            for mode in evaluator.masks(self.unit_type).values()
        ]


def costs_no_more(worse: Record, better: Record) -> bool:
    """Whether no component of the unit cost `better` is larger than that of `worse`.

    A pass with attention is compared without the seconds that can hide a ring's transfers, since these can be an
    advantage. Parameters are compared all together, and the trained ones alone.
    """
    names = [name for name in UNIT_COST_DTYPE.names or () if name not in {*ATTENDED, *TAKEN_OFF}]
    return bool(
        all(np.all(better[name] <= worse[name]) for name in names)
        and all(np.all(better[of] - better[name] <= worse[of] - worse[name]) for name, of in TAKEN_OFF.items())
        and better.forward_s - better.forward_attended_s <= worse.forward_s - worse.forward_attended_s
        and better.backward_s - better.backward_attended_s <= worse.backward_s - worse.backward_attended_s
    )
