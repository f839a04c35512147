"""Open costs: lower bounds on the costs of linkage groups on a stage, before the pipeline is cut.

The costs are those of `automap.cost_graph.graph`, but neither cuts nor recomputation are known. So each cost is
replaced by a lower bound for all cuts:

- No unit is recomputed.
- A tensor that crosses into a unit as a partial sum may come from another chunk. The cheaper conversion counts: that
  inside a chunk, or that between chunks.
- Conversions for the third and later readers of a tensor cost nothing.
- A parameter that several units read counts in the first of these units alone.

Units: seconds, bytes, elements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from automap.arrays import Floats, Ints
from automap.cost_graph.factors import Conversion
from automap.cost_graph.group_costs import GroupCosts
from automap.cost_graph.kernels.group_costs import BACK, THERE
from automap.cost_graph.weighted_graph import GraphBuilder, JointClasses, WeightedGraph
from automap.price.kernels.array_types import columns_of
from automap.price.kernels.cost_records import UNIT_COST_DTYPE
from automap.price.kernels.stage_records import Stage
from automap.price.lowered_plan import RECOMPUTE_MODES
from automap.space.space import PlanSpace

OF_PARAMETERS = columns_of(UNIT_COST_DTYPE, "parameters", "zero_parameters", "reduced", "scattered", "gathered")
NOT_REPEATED = RECOMPUTE_MODES.index("none")
"""The mode in which no conversion is repeated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """The costs of a conversion where the unit that pays it is the first of a chunk."""

    factor: Conversion
    """The conversion of the tensor as it is sent."""
    ways: Ints
    """[ways] way of the tensor as it is sent, for each way in which it is made."""
    sums: Floats
    """[ways, columns] costs of the all-reduce before it is sent."""

    def weighed(self, there: Floats, back: Floats) -> Floats:
        """[ways, requests] weighted costs, see `Exchange.weighed`."""
        before = self.sums[:, THERE] @ there + self.sums[:, BACK] @ back
        found: Floats = self.factor.exchange.weighed(there, back)[self.ways] + before[:, None]
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Payment:
    """A conversion whose costs units of one type pay."""

    factor: Conversion
    """The conversion."""
    kind: int
    """Type of the units."""
    before: int
    """Type of the unit before, if that makes the tensor; -1 if they make it themselves."""
    times: int
    """Number of these units."""
    opened: Opened | None = None
    """The conversion where such a unit is the first of a chunk; None: the same."""

    def weighed(self, worth: Floats, num_opened: int) -> Floats:
        """[ways, requests] weighted costs of all these units, at least.

        Args:
            worth: [columns] weight of each cost.
            num_opened: number of units that are the first of a chunk, without the first unit of the model.
        """
        there, back = worth[THERE], worth[BACK]
        table = self.times * self.factor.exchange.weighed(there, back)
        if self.opened is None or not num_opened:
            return table
        closed = max(0, self.times - num_opened) / self.times
        less = np.minimum(table, self.times * self.opened.weighed(there, back))
        found: Floats = np.where(self.factor.sums[:, None], less + closed * (table - less), table)
        return found


class OpenCosts:
    """Costs of the groups of all units on one stage.

    Attributes:
        stage: the stage.
        values: for each node, [values, axes] values of the group's slots.
        times: [types] number of units of each type.
        bases: [types, columns] costs of a unit with every signature undecided.
        modes: [types, modes, columns] the same under each legal recompute mode.
        kinds: for each node, the type of its unit.
    """

    def __init__(
        self, space: PlanSpace, stage: Stage, values: Sequence[Ints], *, with_conversions: bool = True
    ) -> None:
        """Computes the costs.

        Args:
            space: the plan space.
            stage: mesh, links, hardware and samples.
            values: for each group, its legal values; empty: every signature stays undecided, which costs the least.
            with_conversions: whether conversions between groups count; they take by far the longest to price.
        """
        self.stage, self.values = stage, tuple(values)
        costs = GroupCosts(space, values, stage, RECOMPUTE_MODES[:1])
        units = space.arrays.units.tolist()
        self.times = np.bincount(units, minlength=len(space.linkage.types)).astype(np.float64)
        legal = np.flatnonzero(space.modes)
        undecided = costs.undecided(RECOMPUTE_MODES)
        self.bases, self.modes = undecided[:, 0].copy(), undecided[:, legal]
        self.kinds = [node.unit_type for node in costs.nodes]
        self._nodes = [node.costs[0] for node in costs.nodes]
        kinds = [kind for kind, _ in space.group_rows]
        tied = _tied_elements(space)
        left = tied[:, None] - np.minimum(tied[:, None], self.bases[:, OF_PARAMETERS])
        self.bases[:, OF_PARAMETERS] -= tied[:, None] - left
        for number in _tied_nodes(space) if values else ():
            self._nodes[number] = self._nodes[number].copy()
            self._nodes[number][:, OF_PARAMETERS] -= left[kinds[number]]
            self._nodes[number][:, OF_PARAMETERS] = np.maximum(self._nodes[number][:, OF_PARAMETERS], 0.0)
        self._classes: JointClasses = costs.classes
        self._payments: list[Payment] = []
        if values and with_conversions:
            self._payments += _payments(costs, self.times, Counter(zip(units[1:], units[:-1], strict=True)))

    def weighted(self, worth: Floats, *, num_opened: int, mixes: bool = True) -> WeightedGraph:
        """The graph with all costs weighted.

        A third reader of a tensor may pay nothing for the conversion, so it counts 0 here; where the reader's node
        makes the tensor too, the conversion is subtracted from the node's own cost.

        Args:
            worth: [types, columns] weight of each cost in a unit of each type.
            num_opened: number of units that are the first of a chunk, without the first unit of the model.
            mixes: whether conversions between units of unlike types count.
        """
        constant = float(self.times @ (self.bases * worth).sum(axis=1))
        nodes = [self.times[kind] * (costs @ worth[kind]) for costs, kind in zip(self._nodes, self.kinds, strict=True)]
        builder = GraphBuilder(nodes, self._classes)
        for payment in self._payments:
            if not mixes and payment.before not in (-1, payment.kind):
                continue
            factor, table = payment.factor, payment.weighed(worth[payment.kind], num_opened)
            if factor.is_certain:
                builder.add(factor.nodes, factor.codes, table, is_charged=factor.is_charged)
            elif factor.is_charged:
                ends = (factor.nodes[0], factor.nodes[-1]), (factor.codes[0], factor.codes[-1])
                builder.add(*ends, -table)
        return builder.graph(constant)

    def unit_costs(self, picked: Sequence[int]) -> Floats:
        """[types, columns] costs of a unit of each type under an assignment, averaged over the units of the type."""
        found = self.bases.copy()
        for costs, kind, p in zip(self._nodes, self.kinds, picked, strict=True):
            found[kind] += costs[p]
        for payment in self._payments:
            factor = payment.factor
            if not factor.is_certain:
                continue
            share = payment.times / self.times[payment.kind]
            factor.add(found[payment.kind], picked, NOT_REPEATED, share)
        return found


def _tied_elements(space: PlanSpace) -> Floats:
    """[types] elements of parameters that a unit of each type reads but that count in another unit.

    If several units of a rank read a parameter, the rank holds and reduces at least as much of it as for any one of
    them. So the parameter counts in the first unit that reads it, if that is the only unit of its type. The elements
    here are those of whole parameters, which no unit exceeds.
    """
    kinds, tensors = space.arrays.units.tolist(), space.problem.graph.tensors
    of_units = np.zeros(len(kinds))
    for name, unit in _tied_readings(space):
        of_units[unit] += tensors[name].num_elements
    found = np.zeros(len(space.linkage.types))
    np.maximum.at(found, kinds, of_units)
    return found


def _tied_nodes(space: PlanSpace) -> list[int]:
    """Nodes with an operator that reads a parameter which counts in another unit, see `_tied_elements`."""
    tied, operands = space.evaluator.tied, space.evaluator.tables.arrays.operands
    readers = {int(operands["operator"][tied.reader(name, unit)]) for name, unit in _tied_readings(space)}
    members = [rows.tolist() for rows, _ in space.group_rows.values()]
    return [number for number, rows in enumerate(members) if readers.intersection(rows)]


def _tied_readings(space: PlanSpace) -> list[tuple[str, int]]:
    """The tied parameters, each with every unit that reads it, except for the unit in which it counts."""
    kinds = space.arrays.units.tolist()
    units: dict[str, set[int]] = {}
    for name, *some in space.evaluator.tied.parameters:
        units.setdefault(name, set()).update(some)
    return [
        (name, unit)
        for name, some in units.items()
        for unit in sorted(some)
        if unit > min(some) or kinds.count(kinds[unit]) > 1
    ]


def _payments(costs: GroupCosts, times: Floats, pairs: Counter[tuple[int, int]]) -> Iterator[Payment]:
    """The conversions that count.

    Args:
        times: [types] number of units of each type.
        pairs: number of units of each type after one of each type.
    """
    for kind, count in enumerate(times.astype(np.int64).tolist()):
        for factor in costs.inside(kind):
            if isinstance(factor, Conversion) and count:
                yield Payment(factor=factor, kind=kind, before=-1, times=count)
    for (kind, before), count in pairs.items():
        factors = zip(costs.crossing(kind, before, False), costs.crossing(kind, before, True), strict=True)
        for number, (factor, other) in enumerate(factors):
            if not isinstance(factor, Conversion):
                continue
            opened = None
            if factor.sums.any():
                assert isinstance(other, Conversion)
                # All values with one way of the tensor have equal costs, so one of them suffices.
                _, values = np.unique(factor.codes[0], return_index=True)
                sums = costs.sums(kind, before)[values]
                opened = Opened(factor=other, ways=other.codes[0][values], sums=np.zeros_like(sums) if number else sums)
            yield Payment(factor=factor, kind=kind, before=before, times=count, opened=opened)
