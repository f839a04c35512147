"""The step of a plan as a graph of linkage groups, with its shape, cuts, recomputation and ZeRO (its skeleton) given.

A node is a linkage group of one unit type; its values are the legal joint signatures on all mesh axes. The cost of a
unit is a base, with every signature undecided, plus what each node adds alone, plus factors:

- For a tensor made in one group and read in another: the conversions of the tensor and of its gradient (OneFlow's
  edges, arXiv 2110.15032, section 3.3). The tensor that crosses out of a unit is read by the next unit; in a repeated
  block, by the next copy of the same unit.
- If several groups read one tensor and the group that reads it just before requires the same placement, the conversion
  costs nothing, since the tensor is converted once. (OneFlow gives such a tensor a proxy node whose values are sets of
  placements. Pairs of consecutive readers are exact unless a reader requires the placement of an earlier one again.)
- For copies of a tensor that are saved for the backward pass: consecutive readers that save the same copy count it
  once.

Costs are rows of numbers as `unit_cost` writes them. Costs that units add up (seconds of the device, kernels, bytes,
elements) are sums over the graph. The waits for the host, the step time and the memory of a rank are not linear in
them: `automap.cost_graph.sensitivities` holds their derivatives at a plan. Units: seconds, bytes, elements.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from automap.arrays import Floats, Ints
from automap.cost_graph.factors import Conversion, Factor, Payers, Worth
from automap.cost_graph.group_costs import GroupCosts, alone, joint_values
from automap.cost_graph.routes import Routes
from automap.cost_graph.tied_costs import TiedCosts
from automap.cost_graph.unit_rows import WIDTH, UnitRows
from automap.cost_graph.weighted_graph import GraphBuilder, WeightedGraph
from automap.price.evaluator import blank
from automap.price.kernels.cost_records import UNIT_COST_WIDTH
from automap.price.kernels.stage_records import Stage
from automap.price.lowered_plan import RECOMPUTE_MODES, LoweredPlan, UnitCall
from automap.space.space import PlanSpace, Values

MAX_CACHED = 24
"""Largest number of stages whose group costs are cached; the oldest ones are dropped."""
MOST_STAGES = 4
"""Largest number of unlike pipeline ranks for which a graph has separate costs. The exact price separates all."""


class CostGraphCache:
    """Results that all cost graphs of a space share."""

    def __init__(self, space: PlanSpace) -> None:
        self.space = space
        self.costs: dict[tuple[object, ...], GroupCosts] = {}
        self._legal: dict[tuple[bytes, bytes], tuple[Ints, ...]] = {}
        self._worth: tuple[CostGraph | None, list[Worth]] = (None, [])
        self._routes: dict[tuple[bytes, ...], Routes] = {}

    def legal(self, skeleton: Values) -> tuple[Ints, ...]:
        """`joint_values` of a skeleton."""
        sizes, samples = self.space.unlike_meshes(skeleton)
        key = (sizes.tobytes(), samples.tobytes())
        if key not in self._legal:
            self._legal[key] = joint_values(self.space, skeleton)
        return self._legal[key]

    def worth(self, graph: CostGraph, of_payers: Floats) -> list[Worth]:
        """The weights of costs for each entry of a graph's `payers`.

        They reuse the exchanges that the weights before have weighted, if these were for the same graph.

        Args:
            graph: the graph.
            of_payers: [payers, modes, columns] the weights.
        """
        of_graph, before = self._worth
        earlier = before if of_graph is graph else [None] * len(of_payers)
        worth = [Worth(of_modes, one) for of_modes, one in zip(of_payers, earlier, strict=True)]
        self._worth = graph, worth
        return worth

    def routes(self, legal: tuple[Ints, ...], stage: Stage) -> Routes:
        """The routes of tensors under these values on a stage."""
        key = (*(values.tobytes() for values in legal), alone(stage).tobytes())
        if key not in self._routes:
            self._routes[key] = Routes(self.space, legal, alone(stage))
        return self._routes[key]


class CostGraph:
    """The cost graph of one skeleton.

    Attributes:
        skeleton: values of all slots before the first signature.
        nodes: the nodes in the order of the signature slots; their costs are those on the rank of the first unit row.
        factors: the factors, each with the index of the rows that pay it in `payers`.
        payers: sets of unit rows; all rows of a set pay the same factors.
        units: the unit rows. The rows of costs and weights are these.
        base: [rows, columns] unit costs with every signature undecided. Here and below there are `WIDTH` columns, those
            of a unit cost and `EXCHANGED`.
    """

    def __init__(self, space: PlanSpace, skeleton: Values, cache: CostGraphCache | None = None) -> None:
        """Builds the graph.

        Args:
            skeleton: values of all slots before the first signature.
            cache: results shared by the graphs of several skeletons; None: a new cache.
        """
        self.space, self.skeleton = space, skeleton
        self._undecided = blank(space.evaluator, len(space.axes))
        lowered = space.choice_of(skeleton, self._undecided).views[0]
        self.units = UnitRows(space.evaluator, lowered)
        self._rows = self.units.rows
        self._modes = [self._mode(row) for row in self._rows]
        self._cache = cache or CostGraphCache(space)
        self._costs = self._group_costs(lowered)
        of_first = self._costs[0]
        self._first_node = of_first.first_node
        self.nodes = of_first.nodes
        paid = zip(self._costs, self._rows, self._modes, strict=True)
        self.base = np.zeros((len(self._rows), WIDTH))
        self.base[:, :UNIT_COST_WIDTH] = [costs.bases[row.unit_type][mode] for costs, row, mode in paid]
        self.payers: list[Payers] = []
        self._alike: list[int] = []
        self.factors = tuple(self._paid_factors())
        self._tied = TiedCosts(space, self.units, of_first.routes)
        self._pays_tie = {tie: self._pay([self.units.payer(tie)]) for tie in self.units.large_ties}
        # [payers, modes, rows] 1 where a row pays and has the recompute mode.
        self._pays = np.zeros((len(self.payers), len(RECOMPUTE_MODES), len(self._rows)))
        for number, payers in enumerate(self.payers):
            self._pays[number, payers.modes, payers.rows] = 1.0

    def _group_costs(self, lowered: LoweredPlan) -> list[GroupCosts]:
        """[rows] group costs on the rank of each row; beyond `MOST_STAGES` unlike ranks, those of another rank."""
        cache = self._cache
        numbers = lowered.layout.numbers
        meshes = frozenset(zip(numbers, lowered.rank_samples.tolist(), strict=True))
        found: dict[tuple[object, ...], GroupCosts] = {}
        of_rows = []
        for row in self._rows:
            samples = float(lowered.rank_samples[row.rank])
            key: tuple[object, ...] = (numbers[row.rank], samples, lowered.zero_axes.tobytes(), meshes)
            if key not in found:
                if len(found) == MOST_STAGES:
                    key = next(reversed(found))
                elif key not in cache.costs:
                    if len(cache.costs) >= MAX_CACHED:
                        cache.costs.pop(next(iter(cache.costs)))
                    legal, stage = cache.legal(self.skeleton), lowered.stages[row.rank]
                    routes = cache.routes(legal, stage)
                    cache.costs[key] = GroupCosts(self.space, legal, stage, routes=routes)
                found.setdefault(key, cache.costs[key])
            of_rows.append(found[key])
        return of_rows

    def _mode(self, row: UnitCall) -> int:
        """Number of the recompute mode of a row."""
        masks = self.space.evaluator.masks(row.unit_type)
        return next(i for i, m in enumerate(RECOMPUTE_MODES) if np.array_equal(masks[m], row.segment.recomputed))

    def _paid_factors(self) -> Iterator[tuple[Factor, int]]:
        """The factors, each with its index in `payers`; writes `payers` and `_alike`."""
        alike: dict[tuple[int, int], list[int]] = {}
        for i, row in enumerate(self._rows):
            alike.setdefault((row.unit_type, id(self._costs[i])), []).append(i)
        for (unit_type, _), rows in alike.items():
            costs, number = self._costs[rows[0]], self._pay(rows)
            self._alike.append(number)
            yield from ((factor, number) for factor in costs.inside(unit_type))
            behind: dict[tuple[int, bool], list[int]] = {}
            for i in rows:
                behind.setdefault((self._rows[i].before, self._rows[i].opens), []).append(i)
            for (before, opens), mine in behind.items():
                number = self._pay(mine)
                yield from ((factor, number) for factor in costs.crossing(unit_type, before, opens))

    def _nodes_of(self, row: UnitCall) -> range:
        return range(int(self._first_node[row.unit_type]), int(self._first_node[row.unit_type + 1]))

    def _pay(self, rows: Sequence[int]) -> int:
        """Adds a set of rows to `payers`; returns its index there."""
        modes = np.array([self._modes[row] for row in rows], dtype=np.int64)
        self.payers.append(Payers(np.array(rows, dtype=np.int64), modes))
        return len(self.payers) - 1

    @functools.cached_property
    def linked(self) -> frozenset[tuple[int, int]]:
        """Pairs of nodes, ascending, that share a factor or that read the same tied parameter.

        For all other pairs, the gain of changing both nodes is about the sum of the gains of changing each.
        """
        joined = [set(factor.nodes) for factor, _ in self.factors]
        evaluator, readers = self.space.evaluator, dict[str, set[int]]()
        groups = {int(row): n for n, key in enumerate(self.space.group_rows) for row in self.space.group_rows[key][0]}
        for name, *units in evaluator.tied.parameters:
            rows = (evaluator.tied.reader(name, unit) for unit in units)
            operators = evaluator.tables.arrays.operands["operator"]
            # An operator that is a view of a parameter may belong to no group.
            found = (groups.get(int(operators[row])) for row in rows)
            readers.setdefault(name, set()).update(node for node in found if node is not None)
        pairs = (itertools.combinations(sorted(nodes), 2) for nodes in (*joined, *readers.values()))
        return frozenset(itertools.chain.from_iterable(pairs))

    # -- assignments --------------------------------------------------------------------------------------------------

    def values(self, picked: Sequence[int]) -> Values:
        """The plan of an assignment, [nodes] number of the value of each node."""
        signatures = [int(v) for node, p in zip(self.nodes, picked, strict=True) for v in node.values[p]]
        return (*self.skeleton, *signatures)

    def moved(self, picked: Sequence[int], changes: Sequence[Sequence[tuple[int, int]]]) -> Ints:
        """[changes, slots] the plans of an assignment in which some nodes have other values, given as (node, value)."""
        found = np.repeat(np.array(self.values(picked), dtype=np.int64)[None], len(changes), axis=0)
        begin, num_axes = self.space.first.signature, len(self.space.axes)
        for row, moves in zip(found, changes, strict=True):
            for node, value in moves:
                at = begin + node * num_axes
                row[at : at + num_axes] = self.nodes[node].values[value]
        return found

    def picked(self, values: Values) -> tuple[int, ...] | None:
        """The assignment of a plan of this skeleton; None where a group's signatures are not legal in it."""
        found = []
        at, num_axes = self.space.first.signature, len(self.space.axes)
        for node in self.nodes:
            same = np.flatnonzero((node.values == values[at : at + num_axes]).all(axis=1))
            if not len(same):
                return None
            found.append(int(same[0]))
            at += num_axes
        return tuple(found)

    def chosen(self, picked: Sequence[int]) -> Ints:
        """[operator rows, axes] signature of each operator under an assignment."""
        chosen = self._undecided.copy()
        for node, p in zip(self.nodes, picked, strict=True):
            members, assignment = self.space.group_rows[node.unit_type, node.group]
            chosen[members] = assignment[node.values[p]].T
        return chosen

    def around(self, picked: Sequence[int]) -> CostGraph:
        """The same graph with the costs of tied parameters, approximated around an assignment, see `TiedCosts`."""
        if not self.units.large_ties:
            return self
        found, factors = copy.copy(self), self._tied.around(picked, self.values(picked))
        found.factors = (*self.factors, *((factor, self._pays_tie[tie]) for factor, tie in factors))
        return found

    def unit_costs(self, picked: Sequence[int]) -> Floats:
        """[rows, columns] unit costs under an assignment, by the graph."""
        costs = self.base.copy()
        for number, row in enumerate(self._rows):
            for n in self._nodes_of(row):
                costs[number, :UNIT_COST_WIDTH] += self._costs[number].nodes[n].costs[self._modes[number], picked[n]]
        for factor, number in self.factors:
            for i, mode in zip(*self.payers[number], strict=True):
                factor.add(costs[i], picked, mode)
        return costs

    def value(self, weights: Floats, picked: Sequence[int]) -> float:
        """Sum of the unit costs of an assignment, each times its weight, [rows, columns]."""
        return float((self.unit_costs(picked) * weights).sum())

    def weighted(self, weights: Floats) -> WeightedGraph:
        """The graph with every cost times its weight.

        Args:
            weights: [rows, columns] weight of each cost, none negative.
        """
        nodes = [np.zeros(len(node.values)) for node in self.nodes]
        worth = self._cache.worth(self, np.tensordot(self._pays, weights, axes=1))
        for number in self._alike:
            first, of_modes = int(self.payers[number].rows[0]), worth[number].of_modes
            paid = np.flatnonzero(of_modes.any(axis=1)).tolist()
            for n in self._nodes_of(self._rows[first]):
                for mode in paid:
                    nodes[n] += self._costs[first].nodes[n].costs[mode] @ of_modes[mode, :UNIT_COST_WIDTH]
        builder = GraphBuilder(nodes, self._costs[0].classes)
        for factor, number in self.factors:
            is_charged = isinstance(factor, Conversion) and factor.is_charged
            builder.add(factor.nodes, factor.codes, factor.weighed(worth[number]), is_charged=is_charged)
        return builder.graph(float((self.base * weights).sum()))
