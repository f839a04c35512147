"""Unit rows: the distinct units of a plan whose signatures are not decided yet. Units with equal costs share a row.

Two units have different rows if they differ in something that is decided before the signatures: the type of the unit,
the type of the unit before it, whether it is the first of a chunk, its recomputation, and, where ranks differ, its
pipeline rank. Units: seconds, bytes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from automap.arrays import Floats, Ints
from automap.price.evaluator import Evaluator
from automap.price.kernels.array_types import Rows, numbers_of, records_of
from automap.price.kernels.collectives import SUMMED
from automap.price.kernels.cost_records import UNIT_COST_DTYPE, UNIT_COST_WIDTH
from automap.price.lowered_plan import LoweredPlan
from automap.price.outcome import Outcome
from ir.factors import BROADCAST, PARTIAL

EXCHANGED = UNIT_COST_WIDTH
"""A column after those of a unit cost: elements of a tied parameter's gradient that the unit's rank exchanges with
another rank once a step."""
WIDTH = UNIT_COST_WIDTH + 1
"""Number of all columns."""
LEAST_SHARE = 1e-3
"""Smallest share of a model's parameters with which a tied one counts in a cost graph (assumed). In T5, the embedding
counts, and the position biases that all layers add to their scores do not."""


class UnitRows:
    """The unit rows of a plan.

    In all methods, `chosen` is [operator rows, axes], the signature of each operator of each unit type.

    Attributes:
        rows: the units; the signatures of their segments, and the placements that cross into them, are not used.
        parts: rows of `PartRow`, which list where each unit occurs.
        ties: the tied parameters, see `TiedParameters.ties`.
        large_ties: numbers of the ties whose parameters have at least the share `LEAST_SHARE`.
    """

    def __init__(self, evaluator: Evaluator, lowered: LoweredPlan) -> None:
        self.evaluator, self.lowered = evaluator, lowered
        self.rows, self.parts = evaluator.distinct_units(lowered, open_signatures=True)
        self.ties = evaluator.tied.ties(lowered)
        graph = evaluator.problem.graph
        elements = [graph.tensors[tie.name].num_elements for tie in self.ties]
        self.large_ties = [t for t, some in enumerate(elements) if some > LEAST_SHARE * graph.num_parameters]
        self._calls = evaluator.packed(self.rows)
        # Rows of operators, one unit after the other; and the type before each unit, and whether it opens a chunk.
        self._operators = np.concatenate([np.arange(row.segment.first, row.segment.last) for row in self.rows])
        self._before = [(row.before, row.opens) for row in self.rows]

    def costs(self, chosen: Ints) -> Floats:
        """[rows, UNIT_COST_WIDTH] unit costs, the numbers of `UnitCostRow`."""
        lowered, incoming = self.lowered, {key: self._incoming(*key, chosen) for key in set(self._before)}
        calls = self._calls._replace(
            chosen=chosen[self._operators], incoming=np.array([incoming[key] for key in self._before])
        )
        costs = self.evaluator.costs_of(calls, lowered.layout.arrays, lowered.zero_axes, lowered.rank_samples)
        return numbers_of(costs)

    def _incoming(self, before: int, opens: bool, chosen: Ints) -> Ints:
        """[axes] placement of the tensor that crosses into a unit; a partial one is reduced before it is sent.

        Args:
            before: type of the unit before it; -1: there is none.
            opens: whether the unit is the first of a chunk.
        """
        if before < 0:
            return np.full(len(self.lowered.axes), BROADCAST, dtype=np.int64)
        first, last = (int(x) for x in self.evaluator.tables.spans[before : before + 2])
        maker = replace(self.rows[0].segment, first=first, last=last, chosen=chosen[first:last])
        placement = self.evaluator.crossing_placement(maker)
        if opens:
            placement[placement == PARTIAL] = SUMMED
        return placement

    def tied(self, chosen: Ints) -> Rows:
        """Rows of `TieRow` for the tied parameters."""
        return self.evaluator.tied.rows(self.lowered, chosen, self.ties)

    def payer(self, tie: int) -> int:
        """The unit row to which the costs of a tie are added: that of a reader on the rank of the other unit. It is
        assumed to occur once."""
        last = self.ties[tie].others[-1]
        rank = 0 if self.lowered.is_uniform else self.ties[tie].ranks[1]
        kind = int(self.evaluator.tables.type_of[last.first])
        return next(i for i, row in enumerate(self.rows) if row.rank == rank and row.unit_type == kind)

    def outcome(self, costs: Floats, tied: Rows, *, exact: bool) -> Outcome:
        """Time and memory of a step with these unit costs, [rows, UNIT_COST_WIDTH]."""
        rows = records_of(costs, UNIT_COST_DTYPE)
        return self.evaluator.step(self.lowered, rows, self.parts, tied, exact=exact)
