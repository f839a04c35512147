"""ILP: the best signatures of a skeleton as a 0-1 program with a memory limit for each rank, after Alpa.

Alpa's intra-operator pass (arXiv 2201.12023) picks one strategy for each operator: it minimises the sum of the costs of
what is picked and of the conversions between them, with one 0-1 variable for each value and, since products of two
variables are linear only in this way, one for each pair of values of neighbours. Here the program is that of the cost
graph of a skeleton (`automap.cost_graph.graph`), tables of three nodes included, in the formulation whose relaxation is
tight on trees: the variables of a table add up to those of each of its nodes. Memory is linear in the same variables,
with the sensitivities of the plan at hand. HiGHS solves the program, with a limit on nodes and none on time.

Values that cannot be in an optimum are left out first. Add to the time of a plan a price for its memory, less the price
of the memory that there is: for a plan that fits, this sum is at most its time. So a value is in no optimum if the sum
is larger than the time of a known plan that fits in all assignments with this value. Where the exact memory is more
than the linear one, the limit is lowered by the difference and the program is solved again. Units: seconds, bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from agents.planners.elimination import BISECTIONS, PRICES, Picked, solve, worth_of_memory
from agents.planners.linearization import Candidate, Linearization
from agents.planners.skeleton_turns import search_skeletons
from agents.searcher import SearchResult, SearchTask
from automap.cost_graph.message_passing import reduced
from automap.cost_graph.spread_program import MOST_ITERATIONS
from automap.cost_graph.weighted_graph import Scalars

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

NODE_LIMIT = 200
"""Largest number of nodes of HiGHS's branch and bound (assumed)."""
LARGEST_PROGRAM = 4_000
"""Largest number of variables of a program that is solved (assumed); for larger ones the plans found with prices of
memory stay."""
GAP = 1e-6
"""Relative gap between bound and solution at which HiGHS ends (assumed)."""
CORRECTIONS = 3
"""Number of times that a program is solved, each time but the first with lowered limits (assumed)."""


def program(
    time: Scalars,
    memory: Sequence[Scalars],
    limits: Sequence[float],
    known: float = math.inf,
) -> Picked | None:
    """The fastest assignment within all limits; None where there is none or where the limit of nodes ended the search.

    The linear relaxation is solved first. A variable is 0 in every better assignment if its reduced cost is more than
    the gap between the optimum of the relaxation and a known assignment (reduced-cost fixing). Without these variables
    HiGHS is several times as fast, and without its presolve twice as fast again.

    Args:
        time: the cost graph in seconds.
        memory: for each rank, the same nodes in bytes.
        limits: [ranks] bytes.
        known: seconds of an assignment that fits, if there is one.
    """
    # Imported here because it is slow to import, and most searches that import this module solve no program.
    from scipy.optimize import Bounds, LinearConstraint, linprog, milp

    variables = _Variables(time, memory)
    matrix, right = variables.equations()
    scales = [max(abs(limit), 1.0) for limit in limits]
    used = np.array([variables.row(graph) / scale for graph, scale in zip(memory, scales, strict=True)])
    used = used.reshape(-1, variables.count)
    most = [(limit - graph.constant) / scale for graph, limit, scale in zip(memory, limits, scales, strict=True)]
    costs = variables.row(time)
    scale = max(float(np.abs(costs).max()), 1e-30)
    costs /= scale
    relaxed = linprog(
        costs, A_ub=used, b_ub=most, A_eq=matrix, b_eq=right, bounds=(0.0, 1.0), options={"maxiter": MOST_ITERATIONS}
    )
    is_left = np.ones(variables.count)
    if relaxed.status == 0 and math.isfinite(known):
        within = (known - time.constant) / scale
        is_left[relaxed.lower.marginals > within - relaxed.fun + GAP * abs(within)] = 0.0
    found = milp(
        costs,
        integrality=(np.arange(variables.count) < variables.first[-1]).astype(np.float64),
        bounds=Bounds(0.0, is_left),
        constraints=[LinearConstraint(matrix, right, right), LinearConstraint(used, -np.inf, most)],
        options={"node_limit": NODE_LIMIT, "mip_rel_gap": GAP, "presolve": False},
    )
    if found.x is None:
        return None
    return tuple(int(found.x[begin:end].argmax()) for begin, end in itertools.pairwise(variables.first.tolist()))


class _Variables:
    """The variables of a program: one for each value of each node, then one for each entry of each table.

    Attributes:
        first: [nodes + 1] number of the first variable of each node; the last one is the number of all of nodes.
        count: number of variables.
    """

    def __init__(self, time: Scalars, memory: Sequence[Scalars]) -> None:
        self._sizes = [len(costs) for costs in time.nodes]
        self.first = np.concatenate([[0], np.cumsum(self._sizes)])
        # Nodes of each table, its shape, and number of its first variable.
        self._tables = list(dict.fromkeys([nodes for graph in (time, *memory) for nodes, _ in graph.factors]))
        self._shapes = [tuple(self._sizes[n] for n in nodes) for nodes in self._tables]
        entries = [np.prod(shape, dtype=np.int64) for shape in self._shapes]
        self._starts = self.first[-1] + np.concatenate([[0], np.cumsum(entries)])
        self.count = int(self._starts[-1])

    def row(self, graph: Scalars) -> Floats:
        """[variables] cost of each variable in a graph with these nodes."""
        found = np.zeros(self.count)
        found[: self.first[-1]] = np.concatenate(graph.nodes)
        for nodes, table in graph.factors:
            at = self._tables.index(nodes)
            found[self._starts[at] : self._starts[at + 1]] = table.reshape(-1)
        return found

    def equations(self) -> tuple[Any, list[float]]:
        """A sparse matrix [equations, variables] and the right sides: one value is picked of each node, and tables
        agree with their nodes."""
        from scipy.sparse import coo_array

        rows, columns, entries, right = [], [], [], []
        number = 0
        for n, size in enumerate(self._sizes):
            rows.append(np.full(size, number))
            columns.append(np.arange(self.first[n], self.first[n + 1]))
            entries.append(np.ones(size))
            right.append(1.0)
            number += 1
        for nodes, shape, start in zip(self._tables, self._shapes, self._starts, strict=False):
            at = np.indices(shape).reshape(len(shape), -1)
            for place, n in enumerate(nodes):
                # The variables of a table's entries with one value of a node add up to the variable of this value.
                rows += [number + at[place], number + np.arange(shape[place])]
                columns += [start + np.arange(at.shape[1]), self.first[n] + np.arange(shape[place])]
                entries += [np.ones(at.shape[1]), -np.ones(shape[place])]
                right += [0.0] * shape[place]
                number += shape[place]
        places = (np.concatenate(rows), np.concatenate(columns))
        return coo_array((np.concatenate(entries), places), shape=(number, self.count)).tocsr(), right


class _LinearMemory:
    """A skeleton's cost graph with memory that is linear at the plan at hand."""

    def __init__(self, point: Linearization) -> None:
        self.point, self.graph, at = point, point.graph, point.at
        self.memory = at.memory
        self.offset = at.used - np.tensordot(at.memory, self.graph.unit_costs(point.picked), axes=2)
        self.capacity = at.capacity.copy()
        self.worth = worth_of_memory(at)
        self._met: list[Picked] = []

    def used(self, picked: Sequence[int]) -> Floats:
        """[ranks] bytes of an assignment."""
        found: Floats = self.offset + np.tensordot(self.memory, self.graph.unit_costs(picked), axes=2)
        return found

    def fits(self, picked: Sequence[int]) -> bool:
        """Whether an assignment fits by the linear memory."""
        return bool((self.used(picked) <= self.capacity).all())

    def _weights(self, seconds: float) -> Floats:
        found: Floats = self.point.time + seconds * np.tensordot(self.worth, self.memory, axes=1)
        return found

    def priced(self, seconds: float, start: Sequence[int]) -> Picked:
        """The assignment with the least time plus price of memory, at `seconds` for a device's whole memory."""
        self._met.append(solve(self.graph, self._weights(seconds), start)[0])
        return self._met[-1]

    def best(self) -> Picked:
        """The fastest assignment that fits, or, where none fits, the one found at the highest price of memory."""
        fastest = self.priced(0.0, self.point.picked)
        if self.fits(fastest):
            return fastest
        low, high = (share * self.graph.value(self.point.time, fastest) for share in PRICES)
        found = self.priced(high, fastest)
        if not self.fits(found):
            return found
        for _ in range(BISECTIONS):
            middle = math.sqrt(low * high)
            other = self.priced(middle, found)
            if self.fits(other):
                high, found = middle, other
            else:
                low = middle
        return self._proven(high, found)

    def _proven(self, seconds: float, known: Picked) -> Picked:
        """The solution of the program over the values that may be in an optimum.

        A small program is solved first, over the values that were picked at some price of memory. The better the known
        assignment, the more values can be left out of the second program.

        Args:
            seconds: price of a device's whole memory at which values are left out.
            known: an assignment that fits.
        """
        within = self.graph.value(self.point.time, known)
        within += seconds * float(self.worth @ (self.capacity - self.offset))
        small = reduced(self.graph, self._weights(seconds), known, known=within * (1.0 + GAP))
        time = self.graph.weighted(self.point.time).scalars(small.values)
        size = sum(costs.size for costs in time.nodes) + sum(table.size for _, table in time.factors)
        if size > LARGEST_PROGRAM:
            return known
        met = [np.unique(values) for values in zip(*self._met, strict=True)]
        known = self._solution(self.graph.weighted(self.point.time).scalars(met), met, known)
        return self._solution(time, small.values, known)

    def _solution(self, time: Scalars, values: Sequence[Ints], known: Picked) -> Picked:
        """The solution of the program over some values of each node; `known` where it is not solved."""
        memory = [self.graph.weighted(of).scalars(values) for of in self.memory]
        within = self.graph.value(self.point.time, known)
        found = program(time, memory, (self.capacity - self.offset).tolist(), within)
        return known if found is None else tuple(int(left[v]) for left, v in zip(values, found, strict=True))


def propose(point: Linearization) -> list[Candidate]:
    """Prices the program's solution; where its exact memory does not fit, again with lowered limits."""
    linear = _LinearMemory(point)
    found: list[Candidate] = []
    for _ in range(CORRECTIONS):
        found.append(point.price(linear.best()))
        fullest = 1.0 + found[-1].overflow
        if found[-1].overflow <= 0.0 or point.incumbent.finished:
            break
        told = float((linear.used(found[-1].picked) / linear.capacity).max())
        linear.capacity *= min(0.99, told / fullest)
    return found


def search_ilp(task: SearchTask) -> SearchResult:
    """The best plan of 0-1 programs over skeletons, those of the best templates first; see `Searcher`."""
    return search_skeletons(task, "ilp", propose)
