"""Unit rows: the units of a plan whose signatures are still open, equal ones in equal surroundings as one row.

What differs between rows is told apart before any signature is known: a unit's type, the type before it, whether it
opens a chunk, what it recomputes, and its pipeline rank where ranks differ. Units: seconds, bytes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from automap.arrays import Floats, Ints
from automap.price.evaluator import Evaluator
from automap.price.kernels.array_types import Rows, numbers_of, records_of
from automap.price.kernels.collectives import SUMMED
from automap.price.kernels.cost_records import UNIT_COST_DTYPE
from automap.price.lowered_plan import LoweredPlan, UnitCall
from automap.price.outcome import Outcome
from ir.factors import BROADCAST, PARTIAL


class UnitRows:
    """The unit rows of a plan.

    In all methods, `chosen` is [operator rows, axes], the signature of each operator of each unit type.

    Attributes:
        rows: the units; the signatures of their segments, and the placements that cross into them, are not read.
        parts: rows of `PartRow`, which say where each unit occurs.
    """

    def __init__(self, evaluator: Evaluator, lowered: LoweredPlan) -> None:
        self.evaluator, self.lowered = evaluator, lowered
        self.rows, self.parts = evaluator.distinct_units(lowered, open_signatures=True)
        self._ties = evaluator.tied.ties(lowered)

    def costs(self, chosen: Ints) -> Floats:
        """[rows, UNIT_COST_WIDTH] unit costs, the numbers of `UnitCostRow`."""
        evaluator = self.evaluator
        workspace = evaluator.new_workspace(len(self.lowered.axes))
        costs = np.empty(len(self.rows), dtype=UNIT_COST_DTYPE)
        for number, row in enumerate(self.rows):
            segment = replace(row.segment, chosen=chosen[row.segment.first : row.segment.last])
            stage = self.lowered.stages[row.rank]
            costs[number] = evaluator.unit_cost(segment, self._incoming(row, chosen), stage, workspace)
        return numbers_of(costs)

    def _incoming(self, row: UnitCall, chosen: Ints) -> Ints:
        """[axes] placement of the tensor that crosses into a unit; a partial one is reduced before it is sent."""
        evaluator = self.evaluator
        if row.before < 0:
            return np.full(len(self.lowered.axes), BROADCAST, dtype=np.int64)
        first, last = (int(x) for x in evaluator.tables.spans[row.before : row.before + 2])
        maker = replace(row.segment, first=first, last=last, chosen=chosen[first:last])
        placement = evaluator.crossing_placement(maker)
        if row.opens:
            placement[placement == PARTIAL] = SUMMED
        return placement

    def tied(self, chosen: Ints) -> Rows:
        """What `step` must know of parameters that two units read, rows of `TieRow`."""
        return self.evaluator.tied.rows(self.lowered, chosen, self._ties)

    def outcome(self, costs: Floats, tied: Rows, *, exact: bool) -> Outcome:
        """Time and memory of a step with these unit costs, [rows, UNIT_COST_WIDTH]."""
        rows = records_of(costs, UNIT_COST_DTYPE)
        return self.evaluator.step(self.lowered, rows, self.parts, tied, exact=exact)
