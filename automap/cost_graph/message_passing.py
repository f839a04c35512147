"""Message passing: leaves out values of a cost graph's nodes that no optimum takes.

Sequential tree-reweighted message passing (TRW-S, Kolmogorov 2006; SRMP, Kolmogorov 2015, for factors of three nodes)
moves costs between nodes and factors. It visits the nodes in order and back. Each node takes over the least that its
factors add to each of its values, and distributes shares of its costs to the factors that reach nodes still to come.
No assignment changes its sum, and the sum of all least entries is a lower bound that rises. A value is in no optimum if
its own lower bound exceeds the cost of a known assignment. In graphs of real models mostly one value of each node is
left, which proves that it is the optimum of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from automap.arrays import Floats, Ints
from automap.cost_graph.graph import CostGraph, Scalars
from automap.cost_graph.kernels.message_passing import WIDEST, FactorGraph, pass_messages

SWEEPS, PASSES = 1, 8
"""Number of sweeps there and back in one pass; and of passes: two, and more while better assignments are found."""
PASSES_OF_PARTS = 3
"""Number of sweeps there and back for bounds of parts."""
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
    graph = _factor_graph(scalars)
    left = [np.arange(len(costs)) for costs in scalars.nodes]
    best = descend(scalars, start)
    least = scalars.value(best)
    is_given, bound = np.isfinite(known), -np.inf
    for number in range(PASSES):
        limit = known if is_given else least
        slack = limit - scalars.constant + TOLERANCE * abs(limit)
        if number:
            graph, left = _without_left_out(graph, left)
        picked, margins = np.zeros(len(left), dtype=np.int64), np.zeros(len(graph.costs))
        found = float(pass_messages(graph, slack, SWEEPS, picked, margins))
        bound = max(bound, found + scalars.constant)
        if not all(some.any() for some in _by_node(graph, graph.is_left)):
            # Every assignment costs more than what is known.
            return [keep[:0] for keep in left], best, limit
        other = descend(scalars, [int(keep[v]) for keep, v in zip(left, picked.tolist(), strict=True)])
        is_better = scalars.value(other) < least
        if is_better:
            best, least = other, scalars.value(other)
        if graph.is_left.sum() == len(left) or (number and (is_given or not is_better)):
            break
    is_left, of_values = _by_node(graph, graph.is_left), _by_node(graph, margins)
    left = [keep[some] for keep, some in zip(left, is_left, strict=True)]
    if most is not None:
        ranked = [np.argsort(of[some], kind="stable") for of, some in zip(of_values, is_left, strict=True)]
        left = [np.sort(keep[order[:most]]) for keep, order in zip(left, ranked, strict=True)]
    return left, best, bound


def bounds_of_parts(scalars: Scalars, parts: Sequence[int]) -> tuple[Floats, tuple[int, ...]]:
    """Lower bounds on the parts of a graph that no factor joins, without its constant, and an assignment.

    Args:
        scalars: the graph.
        parts: [nodes] number of the part that each node belongs to.
    """
    graph = _factor_graph(scalars)
    picked, margins = np.zeros(len(parts), dtype=np.int64), np.zeros(len(graph.costs))
    pass_messages(graph, np.inf, PASSES_OF_PARTS, picked, margins)
    found = np.zeros(max(parts, default=-1) + 1)
    np.add.at(found, list(parts), np.minimum.reduceat(graph.costs, graph.first))
    if len(scalars.factors):
        of_factors = np.minimum.reduceat(graph.tables, graph.begins[:-1])
        np.add.at(found, [parts[some[0]] for some, _ in scalars.factors], of_factors)
    return found, tuple(picked.tolist())


def _factor_graph(scalars: Scalars) -> FactorGraph:
    """The arrays of a graph, all values left."""
    sizes = np.array([len(costs) for costs in scalars.nodes], dtype=np.int64)
    nodes = np.full((len(scalars.factors), WIDEST), -1, dtype=np.int64)
    for row, (some, _) in zip(nodes, scalars.factors, strict=True):
        row[: len(some)] = some
    return FactorGraph(
        nodes=nodes,
        begins=np.cumsum([0, *(table.size for _, table in scalars.factors)]),
        sizes=sizes,
        first=np.cumsum(sizes) - sizes,
        costs=np.concatenate(scalars.nodes),
        tables=np.concatenate([np.empty(0), *(table.reshape(-1) for _, table in scalars.factors)]),
        is_left=np.ones(sizes.sum(), dtype=np.bool_),
    )


def _without_left_out(graph: FactorGraph, left: Sequence[Ints]) -> tuple[FactorGraph, list[Ints]]:
    """The arrays without the values that were left out, and which values of each node of the whole graph are left.

    Args:
        graph: arrays, whose costs and tables messages have changed.
        left: for each node, the values that it has in the arrays, as numbers in the whole graph.
    """
    kept = [np.flatnonzero(some) for some in _by_node(graph, graph.is_left)]
    tables = []
    for row, begin, end in zip(graph.nodes.tolist(), graph.begins[:-1], graph.begins[1:], strict=True):
        nodes = [n for n in row if n >= 0]
        table = graph.tables[begin:end].reshape([int(graph.sizes[n]) for n in nodes])
        tables.append(table[np.ix_(*(kept[n] for n in nodes))].reshape(-1))
    sizes = np.array([len(some) for some in kept], dtype=np.int64)
    smaller = FactorGraph(
        nodes=graph.nodes,
        begins=np.cumsum([0, *map(len, tables)]),
        sizes=sizes,
        first=np.cumsum(sizes) - sizes,
        costs=graph.costs[graph.is_left],
        tables=np.concatenate([np.empty(0), *tables]),
        is_left=np.ones(sizes.sum(), dtype=np.bool_),
    )
    return smaller, [keep[some] for keep, some in zip(left, kept, strict=True)]


def _by_node(graph: FactorGraph, values: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Something of each value, [values], for each node."""
    return np.split(values, graph.first[1:])


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
