"""Message passing: leaves out values of a cost graph's nodes that no optimum takes.

Sequential tree-reweighted message passing (TRW-S, Kolmogorov 2006; SRMP, Kolmogorov 2015, for factors of three nodes)
moves costs between nodes and factors. It visits the nodes in order and back. Each node takes over the least that its
factors add to each of its values, and distributes shares of its costs to the factors that reach nodes still to come.
No assignment changes its sum, and the sum of all least entries is a lower bound that rises. A value is in no optimum if
its own lower bound exceeds the cost of a known assignment. In graphs of real models mostly one value of each node is
left, which proves that it is the optimum of the graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from automap.arrays import Floats, Ints
from automap.cost_graph.graph import CostGraph, Scalars
from automap.cost_graph.kernels.message_passing import WIDEST, FactorGraph, pass_messages

SWEEPS, PASSES = 2, 4
"""Number of sweeps there and back; and of times that they are repeated while better assignments are found."""
TOLERANCE = 1e-9
"""Share of the known cost within which bounds are not trusted, so that rounding leaves no optimum out."""
MANY_VALUES = 80
"""Number of values of a node above which tables over three nodes are too large."""


def descend(scalars: Scalars, picked: Sequence[int]) -> tuple[int, ...]:
    """An assignment that no change of a single node improves, found from `picked` by coordinate descent."""
    best = list(picked)
    around: list[list[tuple[tuple[int, ...], Floats]]] = [[] for _ in scalars.nodes]
    for nodes, table in scalars.factors:
        for n in nodes:
            around[n].append((nodes, table))
    fresh = set(range(len(best)))
    while fresh:
        n = min(fresh)
        fresh.remove(n)
        costs = scalars.nodes[n].copy()
        for nodes, table in around[n]:
            costs += table[tuple(slice(None) if m == n else best[m] for m in nodes)]
        if costs.min() < costs[best[n]] - TOLERANCE * abs(costs[best[n]]):
            best[n] = int(costs.argmin())
            fresh.update(m for nodes, _ in around[n] for m in nodes if m != n)
    return tuple(best)


def candidates(
    scalars: Scalars, start: Sequence[int], known: float = np.inf, most: int | None = None
) -> tuple[list[Ints], tuple[int, ...], float]:
    """The values that may be in an optimum of a graph whose factors have at most three nodes.

    Args:
        start: an assignment.
        known: cost of an assignment; given where `scalars` is only a lower bound on the true costs.
        most: largest number of values of a node that are kept, those with the least bounds; then no optimum may be
            left.

    Returns:
        For each node, the values that may be in an optimum; the best assignment met; a lower bound on all assignments.
    """
    sizes = np.array([len(costs) for costs in scalars.nodes], dtype=np.int64)
    first = np.concatenate([[0], np.cumsum(sizes)])
    nodes = np.full((len(scalars.factors), WIDEST), -1, dtype=np.int64)
    for row, (some, _) in zip(nodes, scalars.factors, strict=True):
        row[: len(some)] = some
    graph = FactorGraph(
        nodes=nodes,
        begins=np.cumsum([0, *(table.size for _, table in scalars.factors)]),
        sizes=sizes,
        first=first[:-1].copy(),
        costs=np.concatenate(scalars.nodes),
        tables=np.concatenate([np.empty(0), *(table.reshape(-1) for _, table in scalars.factors)]),
        is_left=np.ones(first[-1], dtype=np.bool_),
    )
    picked, margins = np.zeros(len(sizes), dtype=np.int64), np.zeros(first[-1])
    best = descend(scalars, start)
    least = scalars.value(best)
    is_given, bound = np.isfinite(known), -np.inf
    for _ in range(PASSES):
        limit = known if is_given else least
        slack = limit - scalars.constant + TOLERANCE * abs(limit)
        found = float(pass_messages(graph, slack, SWEEPS, picked, margins))
        bound = max(bound, found + scalars.constant)
        other = descend(scalars, picked.tolist())
        is_better = scalars.value(other) < least
        if is_better:
            best, least = other, scalars.value(other)
        if is_given or not is_better or graph.is_left.sum() == len(sizes):
            break
    left = [np.flatnonzero(graph.is_left[begin:end]) for begin, end in itertools.pairwise(first)]
    if most is not None:
        ranked = [
            np.argsort(margins[begin:end][keep], kind="stable")
            for begin, end, keep in zip(first[:-1], first[1:], left, strict=True)
        ]
        left = [np.sort(keep[order[:most]]) for keep, order in zip(left, ranked, strict=True)]
    return left, best, bound


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduced:
    """A cost graph with the values of each node that may be in an optimum."""

    scalars: Scalars
    """The reduced graph."""
    values: list[Ints]
    """For each node, the values that are left, as numbers in the whole graph."""
    best: tuple[int, ...]
    """The best assignment met, as numbers in the reduced graph."""
    is_exact: bool
    """Whether an optimum of the whole graph is certainly left."""

    def picked(self, found: Sequence[int]) -> tuple[int, ...]:
        """The assignment of the whole graph that an assignment of the reduced graph stands for."""
        return tuple(int(keep[v]) for keep, v in zip(self.values, found, strict=True))


def reduced(graph: CostGraph, weights: Floats, start: Sequence[int], *, known: float = np.inf) -> Reduced:
    """The cost graph at some weights, without values that no optimum takes.

    Where nodes have many values, message passing runs first without the tables of three nodes, whose entries are never
    negative, and leaves out values that cost too much even so.

    Args:
        weights: [rows, columns] worth of one unit of each cost, none negative; see `CostGraph.scalars`.
        start: an assignment.
        known: cost of an assignment, if it is known.
    """
    left, best = [np.arange(len(node.values)) for node in graph.nodes], tuple(start)
    is_exact = True
    if max(map(len, left)) > MANY_VALUES:
        coarse = graph.scalars(weights, largest=0)
        best = min(best, descend(coarse, start), key=lambda picked: graph.value(weights, picked))
        _, other, _ = candidates(coarse, best, graph.value(weights, best))
        best = min(best, other, key=lambda picked: graph.value(weights, picked))
        limit = known if np.isfinite(known) else graph.value(weights, best)
        left, _, _ = candidates(coarse, best, limit, MANY_VALUES)
        is_exact = max(map(len, left)) < MANY_VALUES
        left = [np.union1d(keep, [v]) for keep, v in zip(left, best, strict=True)]
    fine = graph.scalars(weights, left)
    at = [int(np.searchsorted(keep, v)) for keep, v in zip(left, best, strict=True)]
    again, best, _ = candidates(fine, at, known)
    again = [np.union1d(keep, [v]) for keep, v in zip(again, best, strict=True)]
    return Reduced(
        scalars=_restricted(fine, again),
        values=[keep[some] for keep, some in zip(left, again, strict=True)],
        best=tuple(int(np.searchsorted(some, v)) for some, v in zip(again, best, strict=True)),
        is_exact=is_exact,
    )


def _restricted(scalars: Scalars, left: Sequence[Ints]) -> Scalars:
    """The graph with some values of each node."""
    return Scalars(
        constant=scalars.constant,
        nodes=tuple(costs[keep] for costs, keep in zip(scalars.nodes, left, strict=True)),
        factors=tuple((nodes, table[np.ix_(*(left[n] for n in nodes))]) for nodes, table in scalars.factors),
    )
