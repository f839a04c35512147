"""Message passing: finds values of the nodes of a cost graph that are in no optimum, and removes them.

Sequential tree-reweighted message passing (TRW-S, Kolmogorov 2006; SRMP, Kolmogorov 2015, for factors of three nodes)
moves costs between nodes and factors without changing the sum of any assignment. It visits the nodes in order and back.
At each node, the least cost that each factor adds to each value is moved to the node. Then the node's costs are shared
among the factors that reach nodes still to come.

The sum of the least entries of all nodes and factors is a lower bound, which rises with each round. A value is in no
optimum if the lower bound of all assignments with this value exceeds the cost of a known assignment. In graphs of real
models, usually one value of each node remains. This proves that these values are the optimum of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from automap.arrays import Floats, Ints
from automap.cost_graph.graph import CostGraph
from automap.cost_graph.kernels import message_passing as kernels
from automap.cost_graph.kernels.message_passing import FIRST, LAST, MIDDLE, WIDEST, FactorGraph, Least
from automap.cost_graph.weighted_graph import Scalars, WeightedGraph

SWEEPS = 1
"""Number of sweeps there and back in one pass."""
PASSES = 20
"""Largest number of passes; they end after one that removes no value and finds no better assignment."""
PASSES_OF_PARTS = 3
"""Number of sweeps there and back for bounds of parts."""
TOLERANCE = 1e-9
"""Share of the known cost by which a bound must exceed it, so that rounding errors remove no optimum."""
MANY_VALUES = 80
"""Largest number of values of a node in a graph for solvers; with more, tables over three nodes would be too large."""


def candidates(
    graph: WeightedGraph, start: Sequence[int], known: float = np.inf, most: int | None = None
) -> tuple[list[Ints], tuple[int, ...], float]:
    """The values that may be in an optimum of a graph.

    Args:
        graph: the graph.
        start: an assignment.
        known: true cost of an assignment, if the graph is only a lower bound on true costs.
        most: largest number of values of a node that are kept, those with the least bounds. If it removes values, the
            result may contain no optimum.

    Returns:
        For each node, the values that may be in an optimum; the best assignment found; a lower bound on all
        assignments.
    """
    arrays = _factor_graph(graph)
    untouched = arrays._replace(costs=arrays.costs.copy())
    best = np.array(start, dtype=np.int64)
    cost_of_best = kernels.descend(untouched, TOLERANCE, best) + graph.constant
    is_given, bound, now = np.isfinite(known), -np.inf, -1
    margins, picked = np.zeros(len(arrays.costs)), best.copy()
    least = _least(arrays)
    for _ in range(PASSES):
        limit = known if is_given else cost_of_best
        slack = limit - graph.constant + TOLERANCE * abs(limit)
        found = float(kernels.pass_messages(arrays, slack, SWEEPS, picked, margins, least))
        bound = max(bound, found + graph.constant)
        if not np.add.reduceat(arrays.is_left, arrays.first).all():
            # Every assignment costs more than the known one.
            return [np.zeros(0, dtype=np.int64) for _ in graph.nodes], tuple(best.tolist()), limit
        other = picked.copy()
        cost = kernels.descend(untouched, TOLERANCE, other) + graph.constant
        is_better = cost < cost_of_best
        if is_better:
            best, cost_of_best = other, cost
        left_before, now = now, int(arrays.is_left.sum())
        if now == len(graph.nodes) or (now == left_before and not is_better):
            break
    left = [np.flatnonzero(some) for some in _by_node(arrays, arrays.is_left)]
    if most is not None and max(map(len, left)) > most:
        ranked = [np.argsort(of[keep], kind="stable") for of, keep in zip(_by_node(arrays, margins), left, strict=True)]
        left = [np.sort(keep[order[:most]]) for keep, order in zip(left, ranked, strict=True)]
    return left, tuple(best.tolist()), bound


def bounds_of_parts(graph: WeightedGraph, parts: Sequence[int]) -> tuple[Floats, tuple[int, ...]]:
    """Lower bounds on the parts of a graph that no term joins, without its constant, and an assignment.

    Args:
        graph: the graph.
        parts: [nodes] number of the part that each node belongs to.
    """
    arrays = _factor_graph(graph)
    picked, margins = np.zeros(len(parts), dtype=np.int64), np.zeros(len(arrays.costs))
    least = _least(arrays)
    kernels.pass_messages(arrays, np.inf, PASSES_OF_PARTS, picked, margins, least)
    found = np.zeros(max(parts, default=-1) + 1)
    np.add.at(found, list(parts), np.minimum.reduceat(arrays.costs, arrays.first))
    np.add.at(found, [parts[term.nodes[0]] for term in graph.terms], least.of_factor)
    return found, tuple(picked.tolist())


def _factor_graph(graph: WeightedGraph) -> FactorGraph:
    """The arrays of a graph, with all values."""
    sizes = np.array([len(costs) for costs in graph.nodes], dtype=np.int64)
    count = len(graph.terms)
    nodes = np.full((count, WIDEST), -1, dtype=np.int64)
    at = np.zeros((count, WIDEST), dtype=np.int64)
    classes = np.array([term.table.shape for term in graph.terms], dtype=np.int64).reshape(count, 2)
    codes, end = [np.empty(0, dtype=np.int64)], 0
    for number, term in enumerate(graph.terms):
        places = (FIRST, LAST) if len(term.nodes) == 2 else (FIRST, MIDDLE, LAST)
        for place, node, some in zip(places, term.nodes, term.codes, strict=True):
            nodes[number, place], at[number, place] = node, end
            codes.append(some)
            end += len(some)
    entries = classes.prod(axis=1)
    return FactorGraph(
        nodes=nodes,
        begins=np.cumsum(entries) - entries,
        classes=classes,
        tables=np.concatenate([np.empty(0), *(term.table.reshape(-1) for term in graph.terms)]),
        codes=np.concatenate(codes),
        taken=np.zeros(end),
        at=at,
        sizes=sizes,
        first=np.cumsum(sizes) - sizes,
        costs=np.concatenate(graph.nodes),
        is_left=np.ones(sizes.sum(), dtype=np.bool_),
    )


def _least(graph: FactorGraph) -> Least:
    """The least entry of each node and each factor before any message was passed."""
    least = Least(of_node=np.empty(len(graph.sizes)), of_factor=np.empty(len(graph.nodes)))
    kernels.bound(graph, least)
    return least


def _by_node(graph: FactorGraph, values: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """An array over all values, [values], split by node."""
    return [
        values[first : first + size] for first, size in zip(graph.first.tolist(), graph.sizes.tolist(), strict=True)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduced:
    """A cost graph with the values of each node that may be in an optimum."""

    weighted: WeightedGraph
    """The whole graph."""
    values: list[Ints]
    """For each node, the remaining values, as numbers in the whole graph."""
    best: tuple[int, ...]
    """The best assignment found, as numbers in the reduced graph."""
    is_exact: bool
    """Whether the reduced graph certainly contains an optimum of the whole graph."""

    @property
    def scalars(self) -> Scalars:
        """The reduced graph."""
        return self.weighted.scalars(self.values)

    @property
    def is_decided(self) -> bool:
        """Whether each node has one remaining value."""
        return all(len(keep) == 1 for keep in self.values)

    def picked(self, found: Sequence[int]) -> tuple[int, ...]:
        """An assignment of the reduced graph, as numbers in the whole graph."""
        return tuple(int(keep[v]) for keep, v in zip(self.values, found, strict=True))


def reduced(
    graph: CostGraph, weights: Floats, start: Sequence[int], *, known: float = np.inf, most: int = MANY_VALUES
) -> Reduced:
    """The weighted cost graph without values that are in no optimum.

    Args:
        graph: the cost graph.
        weights: [rows, columns] weight of each cost, none negative; see `CostGraph.weighted`.
        start: an assignment.
        known: cost of an assignment, if it is known.
        most: largest number of values of a node that are kept, those with the least bounds.
    """
    weighted = graph.weighted(weights)
    left, best, _ = candidates(weighted, start, known, most)
    is_exact = max(map(len, left)) < most
    at = [int(keep.searchsorted(v)) for keep, v in zip(left, best, strict=True)]
    for n, (keep, place) in enumerate(zip(left, at, strict=True)):
        if place == len(keep) or keep[place] != best[n]:
            left[n] = np.insert(keep, place, best[n])
    return Reduced(weighted=weighted, values=left, best=tuple(at), is_exact=is_exact)
