"""The step of a plan as a graph of linkage groups, its shape, cuts, recomputation and ZeRO being given.

A node is a group of one unit type; its values are the legal joint signatures on all mesh axes. What a unit costs is a
base, with everything undecided, plus what each node adds alone, plus factors:

- a tensor made in one group and read in another: the conversions that it needs on its way and its gradient on its way
  back (OneFlow's edges, arXiv 2110.15032, section 3.3). A unit's crossing tensor goes to the unit behind it, a
  repeated block's to its own next copy;
- of several groups that read one tensor, each pays nothing if the one before it asks for the same: the tensor is
  converted once. (OneFlow gives such a tensor a proxy node whose values are sets of placements. Pairs of neighbours in
  the order of reading are exact unless a request comes back behind another one.)
- copies that are kept for the backward pass, likewise once for neighbours that keep the same.

Costs are vectors of the columns of `unit_cost`; those in which units add up (seconds of the device, kernels, bytes,
elements) are sums over the graph. The host's waits, the step and the memory of a rank are not linear in them:
`Linear` holds their slopes at a plan. Units: seconds, bytes, elements.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from automap.cost_graph.factors import Factor, GroupCosts, joint_values
from automap.cost_graph.kernels import COLUMNS, NUM_ALWAYS
from automap.cost_graph.unit_rows import UnitRows
from automap.price.evaluator import blank
from automap.price.lowered_plan import RECOMPUTE_MODES, LoweredPlan, UnitCall
from automap.space.space import PlanSpace, Values

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

MAX_KNOWN = 24
MOST_STAGES = 4
"""Unlike pipeline ranks whose costs are looked at; all are in the exact price."""


class Known:
    """What the graphs of one space share; of more than `MAX_KNOWN` stages the oldest goes."""

    def __init__(self, space: PlanSpace) -> None:
        self.space = space
        self.costs: dict[tuple[object, ...], GroupCosts] = {}
        self._legal: dict[tuple[bytes, bytes], tuple[Ints, ...]] = {}

    def legal(self, frame: Values) -> tuple[Ints, ...]:
        """`joint_values` of a frame."""
        sizes, samples = self.space.unlike_meshes(frame)
        key = (sizes.tobytes(), samples.tobytes())
        if key not in self._legal:
            self._legal[key] = joint_values(self.space, frame)
        return self._legal[key]

    def with_signatures(self, frame: Values, signatures: Sequence[int]) -> Values:
        """The plan of a frame with these signatures; of groups where they are not legal with the first that are."""
        found = list(frame)
        num_axes = len(self.space.axes)
        for number, values in enumerate(self.legal(frame)):
            wanted = signatures[number * num_axes : (number + 1) * num_axes]
            found += wanted if (values == wanted).all(axis=1).any() else values[0].tolist()
        return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scalars:
    """The graph under one weighting of all columns: what a solver is given."""

    constant: float
    nodes: tuple[Floats, ...]
    """[values] of each node."""
    factors: tuple[tuple[tuple[int, ...], Floats], ...]
    """Distinct nodes, ascending, and the table over their values."""

    def value(self, picked: Sequence[int]) -> float:
        """Of one assignment."""
        total = self.constant + sum(float(costs[v]) for costs, v in zip(self.nodes, picked, strict=True))
        return total + sum(float(table[tuple(picked[n] for n in nodes)]) for nodes, table in self.factors)


class CostGraph:
    """The graph of one frame.

    Attributes:
        nodes: in the order of the signature slots; their costs are those on the first row's rank.
        factors: with the unit rows that pay each, and their recompute modes.
        units: prices units under any signatures; rows of weights are its rows.
        base: [rows, C_COUNT] unit costs with nothing decided.
    """

    def __init__(self, space: PlanSpace, frame: Values, known: Known | None = None) -> None:
        """Builds the graph.

        Args:
            space: of the problem.
            frame: values of all slots before the first signature.
            known: keeps what frames on one mesh share.
        """
        self.space, self.frame = space, frame
        self._undecided = blank(space.evaluator, len(space.axes))
        lowered = space.choice_of(frame, self._undecided).views[0]
        self.units = UnitRows(space.evaluator, lowered)
        self._rows = self.units.rows
        self._modes = [self._mode(row) for row in self._rows]
        self._costs = self._group_costs(lowered, known or Known(space))
        of_first = self._costs[0]
        self._first_node = of_first.first_node
        self.nodes = of_first.nodes
        paid = zip(self._costs, self._rows, self._modes, strict=True)
        self.base = np.array([costs.bases[row.unit_type][mode] for costs, row, mode in paid])
        self.factors = tuple(self._bound())

    def _group_costs(self, lowered: LoweredPlan, known: Known) -> list[GroupCosts]:
        """Of each row, on the devices of its rank; of more than `MOST_STAGES` distinct ranks some stand for others."""
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
                elif key not in known.costs:
                    if len(known.costs) >= MAX_KNOWN:
                        known.costs.pop(next(iter(known.costs)))
                    known.costs[key] = GroupCosts(self.space, known.legal(self.frame), lowered, row.rank)
                found.setdefault(key, known.costs[key])
            of_rows.append(found[key])
        return of_rows

    def _mode(self, row: UnitCall) -> int:
        """The recompute mode of a row."""
        masks = self.space.evaluator.masks(row.unit_type)
        return next(i for i, m in enumerate(RECOMPUTE_MODES) if np.array_equal(masks[m], row.segment.recomputed))

    def _bound(self) -> Iterator[tuple[Factor, list[tuple[int, int]]]]:
        rows_of: dict[tuple[int, int], list[int]] = {}
        for i, row in enumerate(self._rows):
            rows_of.setdefault((row.unit_type, id(self._costs[i])), []).append(i)
        for (unit_type, _), rows in rows_of.items():
            costs = self._costs[rows[0]]
            for factor in costs.inside(unit_type):
                yield factor, [(i, self._modes[i]) for i in rows]
            behind: dict[tuple[int, bool], list[int]] = {}
            for i in rows:
                behind.setdefault((self._rows[i].before, self._rows[i].opens), []).append(i)
            for (before, opens), mine in behind.items():
                for factor in costs.crossing(unit_type, before, opens):
                    yield factor, [(i, self._modes[i]) for i in mine]

    def _nodes_of(self, row: UnitCall) -> range:
        return range(int(self._first_node[row.unit_type]), int(self._first_node[row.unit_type + 1]))

    # -- assignments --------------------------------------------------------------------------------------------------

    @functools.cached_property
    def num_plans(self) -> float:
        """Assignments of the graph."""
        return float(np.prod([len(node.values) for node in self.nodes]))

    def values(self, picked: Sequence[int]) -> Values:
        """The plan of an assignment, [nodes] numbers of values."""
        signatures = [int(v) for node, p in zip(self.nodes, picked, strict=True) for v in node.values[p]]
        return (*self.frame, *signatures)

    def picked(self, values: Values) -> tuple[int, ...] | None:
        """The assignment of a plan of this frame, or None where a group's signatures are not legal in it."""
        found = []
        at, num_axes = self.space.first_signature, len(self.space.axes)
        for node in self.nodes:
            same = np.flatnonzero((node.values == values[at : at + num_axes]).all(axis=1))
            if not len(same):
                return None
            found.append(int(same[0]))
            at += num_axes
        return tuple(found)

    def chosen(self, picked: Sequence[int]) -> Ints:
        """[operator rows, axes] signatures of an assignment."""
        chosen = self._undecided.copy()
        for node, p in zip(self.nodes, picked, strict=True):
            members, assignment = self.space.group_rows[node.unit_type, node.group]
            chosen[members] = assignment[node.values[p]].T
        return chosen

    def unit_costs(self, picked: Sequence[int]) -> Floats:
        """[rows, C_COUNT] what the graph says of the unit costs under an assignment."""
        costs = self.base.copy()
        for number, row in enumerate(self._rows):
            for n in self._nodes_of(row):
                costs[number] += self._costs[number].nodes[n].costs[self._modes[number], picked[n]]
        for factor, paying in self.factors:
            code = [codes[picked[n]] for codes, n in zip(factor.codes, factor.nodes, strict=True)]
            sign = 1.0
            if len(code) == 3:
                sign = float(code[1] != code[2]) - factor.is_charged
            entry = sign * factor.table[tuple(code[:1] + code[-1:] if len(code) > 1 else code)]
            for number, mode in paying:
                if factor.repeated:
                    np.add.at(costs[number], factor.columns, entry * _repeats(factor.repeated[mode]))
                else:
                    costs[number, factor.columns] += entry[mode]
        return costs

    def value(self, weights: Floats, picked: Sequence[int]) -> float:
        """Of an assignment, every column of every row at its weight."""
        return float((self.unit_costs(picked) * weights).sum())

    def scalars(self, weights: Floats, left: Sequence[Ints] | None = None, *, largest: float = float("inf")) -> Scalars:
        """The graph with every column of every row at its weight.

        Args:
            weights: [rows, C_COUNT] worth of one unit of each column.
            left: values of each node that are considered; all if None.
            largest: tables of three nodes with more entries are left out; none of them has a negative entry where no
                weight is negative.
        """
        left = left or [np.arange(len(node.values)) for node in self.nodes]
        nodes = [np.zeros(len(keep)) for keep in left]
        for number, row in enumerate(self._rows):
            for n in self._nodes_of(row):
                nodes[n] += self._costs[number].nodes[n].costs[self._modes[number], left[n]] @ weights[number]
        factors: dict[tuple[int, ...], Floats] = {}
        for factor, rows in self.factors:
            distinct = tuple(sorted(set(factor.nodes)))
            sizes = [len(left[n]) for n in distinct]
            if len(distinct) > 2 and np.prod(sizes, dtype=np.float64) > largest:
                continue
            table = _weighed(factor, rows, weights)
            if not table.any():
                continue
            # Where a node comes twice, both places take its value.
            where = np.ix_(*(left[n] for n in distinct))
            at = [code[where[distinct.index(n)]] for code, n in zip(factor.codes, factor.nodes, strict=True)]
            over = table[tuple(at[:1] + at[-1:] if len(at) > 1 else at)]
            if len(at) == 3:
                over = over * ((at[1] != at[2]) - float(factor.is_charged))
            if len(distinct) == 1:
                nodes[distinct[0]] += over
            else:
                factors[distinct] = factors[distinct] + over if distinct in factors else over
        constant = float((self.base * weights).sum())
        return Scalars(constant=constant, nodes=tuple(nodes), factors=tuple(factors.items()))


def _repeats(is_repeated: bool) -> Floats:
    keep = np.ones(len(COLUMNS))
    keep[NUM_ALWAYS:] = float(is_repeated)
    return keep


def _weighed(factor: Factor, rows: Sequence[tuple[int, int]], weights: Floats) -> Floats:
    """The factor's table as scalars, over classes."""
    if factor.repeated:
        worth = sum(weights[row, factor.columns] * _repeats(factor.repeated[mode]) for row, mode in rows)
        return np.asarray(factor.table @ worth)
    found = np.zeros(factor.table.shape[:-2])
    for row, mode in rows:
        found += factor.table[..., mode, :] @ weights[row, factor.columns]
    return found
