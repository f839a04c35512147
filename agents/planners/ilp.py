"""ILP: the best signatures of a frame as a 0-1 program with a memory limit a rank, after Alpa (arXiv 2201.12023).

Alpa's intra-operator pass picks one strategy an operator: minimise sum of costs of picks and of conversions between
them, with one 0-1 variable a value and, since products of two are linear only so, one a pair of values of neighbours.
Here on the cost graph of a frame (`automap.cost_graph.graph`), tables of three nodes included, in the formulation whose
relaxation is tight on trees: the variables of a table add up to those of each of its nodes. Memory is linear in the
same variables, at the slopes of the plan at hand. HiGHS solves it, with a limit on nodes and none on time.

Values that no optimum takes are left out first: under any prices on memory, the price of a plan that fits is at most
its time, so that a value all of whose assignments cost more than a known plan that fits is in no optimum. Where the
exact memory is more than the linear one, the limit is lowered by the difference and the program solved again.
Units: seconds, bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from agents.incumbent import Incumbent
from agents.planners.elimination import BISECTIONS, FULLEST, PRICES, solve
from agents.planners.skeletons import Candidate, Frame, run_frames, search_frames
from agents.searcher import Budget, OnProgress, SearchResult, ShouldStop
from automap.cost_graph.graph import Scalars
from automap.cost_graph.message_passing import reduced
from automap.plan import Plan
from automap.problem import Problem
from automap.space.space import PlanSpace, Values

Floats = npt.NDArray[np.float64]

NODE_LIMIT = 200
"""Of HiGHS's branch and bound."""
LARGEST_PROGRAM = 4_000
"""Variables; larger ones are left to the prices on memory."""
GAP = 1e-6
"""Relative, at which HiGHS ends."""
CORRECTIONS = 3
"""How often the limits are lowered."""


def program(
    time: Scalars, memory: Sequence[Scalars], limits: Sequence[float], node_limit: int = NODE_LIMIT
) -> tuple[int, ...] | None:
    """The fastest assignment within all limits, or None where there is none or the node limit came first.

    Args:
        time: the graph, in seconds.
        memory: of each rank the same nodes, in bytes.
        limits: [ranks] bytes.
        node_limit: of branch and bound.
    """
    first = np.concatenate([[0], np.cumsum([len(costs) for costs in time.nodes])])
    around = list(dict.fromkeys([nodes for graph in (time, *memory) for nodes, _ in graph.factors]))
    shapes = [tuple(len(time.nodes[n]) for n in nodes) for nodes in around]
    starts = first[-1] + np.concatenate([[0], np.cumsum([np.prod(shape, dtype=np.int64) for shape in shapes])])
    count = int(starts[-1])

    def row(graph: Scalars) -> Floats:
        found = np.zeros(count)
        found[: first[-1]] = np.concatenate(graph.nodes)
        for nodes, table in graph.factors:
            at = around.index(nodes)
            found[starts[at] : starts[at + 1]] = table.reshape(-1)
        return found

    rows, columns, entries, right = [], [], [], []
    number = 0
    for n, costs in enumerate(time.nodes):
        rows.append(np.full(len(costs), number))
        columns.append(np.arange(first[n], first[n + 1]))
        entries.append(np.ones(len(costs)))
        right.append(1.0)
        number += 1
    for nodes, shape, start in zip(around, shapes, starts, strict=False):
        at = np.indices(shape).reshape(len(shape), -1)
        for place, n in enumerate(nodes):
            # The variables of a table with one value of a node add up to that value's own.
            rows += [number + at[place], number + np.arange(shape[place])]
            columns += [start + np.arange(at.shape[1]), first[n] + np.arange(shape[place])]
            entries += [np.ones(at.shape[1]), -np.ones(shape[place])]
            right += [0.0] * shape[place]
            number += shape[place]
    matrix = coo_array(
        (np.concatenate(entries), (np.concatenate(rows), np.concatenate(columns))), shape=(number, count)
    ).tocsr()
    constraints = [LinearConstraint(matrix, right, right)]
    for graph, limit in zip(memory, limits, strict=True):
        scale = max(abs(limit), 1.0)
        constraints.append(LinearConstraint(row(graph) / scale, -np.inf, (limit - graph.constant) / scale))
    costs = row(time)
    scale = max(float(np.abs(costs).max()), 1e-30)
    found = milp(
        costs / scale,
        integrality=np.concatenate([np.ones(first[-1]), np.zeros(count - first[-1])]),
        bounds=Bounds(0.0, 1.0),
        constraints=constraints,
        options={"node_limit": node_limit, "mip_rel_gap": GAP},
    )
    if found.x is None:
        return None
    return tuple(int(found.x[first[n] : first[n + 1]].argmax()) for n in range(len(time.nodes)))


class _Limited:
    """A frame with memory linear at the plan at hand."""

    def __init__(self, frame: Frame) -> None:
        self.frame, self.graph, at = frame, frame.graph, frame.slopes
        costs = self.graph.unit_costs(frame.picked)
        self.memory = at.memory
        self.offset = at.used - np.tensordot(at.memory, costs, axes=2)
        self.capacity = at.capacity.copy()
        fullness = (at.used / at.capacity) / (at.used / at.capacity).max()
        self.worth = fullness**FULLEST / (fullness**FULLEST).sum() / at.capacity

    def used(self, picked: Sequence[int]) -> Floats:
        """[ranks] bytes."""
        found: Floats = self.offset + np.tensordot(self.memory, self.graph.unit_costs(picked), axes=2)
        return found

    def fits(self, picked: Sequence[int]) -> bool:
        """By the linear memory."""
        return bool((self.used(picked) <= self.capacity).all())

    def priced(self, seconds: float, start: Sequence[int]) -> tuple[int, ...]:
        """The least of time plus memory at `seconds` for a device's whole memory."""
        return solve(self.graph, self._weights(seconds), start)[0]

    def _weights(self, seconds: float) -> Floats:
        found: Floats = self.frame.time + seconds * np.tensordot(self.worth, self.memory, axes=1)
        return found

    def best(self) -> tuple[int, ...]:
        """The fastest assignment that fits, or the one nearest to it where the highest price finds none."""
        fastest = self.priced(0.0, self.frame.picked)
        if self.fits(fastest):
            return fastest
        low, high = (share * self.graph.value(self.frame.time, fastest) for share in PRICES)
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

    def _proven(self, seconds: float, known: tuple[int, ...]) -> tuple[int, ...]:
        """The program's solution among what prices on memory leave beside a plan that fits."""
        within = self.graph.value(self.frame.time, known)
        within += seconds * float(self.worth @ (self.capacity - self.offset))
        small = reduced(self.graph, self._weights(seconds), known, known=within * (1.0 + GAP))
        time = self.graph.scalars(self.frame.time, small.values)
        size = sum(costs.size for costs in time.nodes) + sum(table.size for _, table in time.factors)
        if size > LARGEST_PROGRAM:
            return known
        memory = [self.graph.scalars(of, small.values) for of in self.memory]
        found = program(time, memory, (self.capacity - self.offset).tolist())
        return known if found is None else small.picked(found)


def propose(frame: Frame) -> list[Candidate]:
    """Prices the program's solution at the frame's slopes; of lowered limits while its exact memory does not fit."""
    limited = _Limited(frame)
    found: list[Candidate] = []
    for _ in range(CORRECTIONS):
        found.append(frame.price(limited.best()))
        fullest = 1.0 + found[-1].overflow
        if found[-1].overflow <= 0.0 or frame.incumbent.finished:
            break
        told = float((limited.used(found[-1].picked) / limited.capacity).max())
        limited.capacity *= min(0.99, told / fullest)
    return found


def run_ilp(space: PlanSpace, incumbent: Incumbent, *, start: Sequence[Values]) -> None:
    """Plans frame after frame until the incumbent's budget ends or nothing is left to try; see `run_frames`."""
    run_frames(space, incumbent, propose, start=start)


def search_ilp(
    problem: Problem,
    budget: Budget,
    *,
    seed: int,
    on_progress: OnProgress,
    should_stop: ShouldStop,
    start: Sequence[Plan] = (),
) -> SearchResult:
    """The best plan of 0-1 programs over frames, those of the best templates first; see `Searcher`."""
    return search_frames(
        problem, budget, propose, "ilp", seed=seed, on_progress=on_progress, should_stop=should_stop, start=start
    )
