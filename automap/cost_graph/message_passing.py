"""Tightening: values of a cost graph's nodes that no optimum takes, found by moving costs between nodes and factors.

Sequential message passing (TRW-S, Kolmogorov 2006; SRMP, Kolmogorov 2015, for factors of three nodes): going through
the nodes in order and back, each draws in the least that its factors add to each of its values, and hands a share on to
the factors that come later. No assignment changes its sum; the sum of all least entries is a lower bound that rises. A
value whose own bound exceeds the cost of a known assignment is in no optimum. Of models one value a node is mostly
left, which proves it the optimum of the graph. Compiled.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import boolean, float64, int64, void

from automap.cost_graph.graph import CostGraph, Scalars
from automap.jit import borrowing, kernel

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

NEVER = 1e250
"""Cost of a value that was left out, where factors are searched."""
SWEEPS, PASSES = 2, 4
"""There and back; and how often, if a better assignment was found."""
TOLERANCE = 1e-9
"""Of the known cost: rounding leaves no optimum out."""
MANY_VALUES = 80
"""Of a node: tables over three of them would be large."""
# Columns of a factor: its nodes (-1 where there are fewer), where its table begins.
F_NODES, F_TABLE = 0, 3
F_COUNT = 4
WIDEST = 3
"""Nodes of a factor at most."""


@borrowing(
    void(int64, int64, int64[:, ::1], int64[::1], int64[::1], boolean[::1], float64[::1], float64[::1], float64[::1]),
    inner=True,
)
def _draw(factor, place, factors, sizes, first, alive, costs, tables, least):
    """Moves the least that a factor adds to each value of one of its nodes into the node.

    Args:
        factor: its row.
        place: which of its nodes.
        factors: see the F_ columns.
        sizes: [nodes]
        first: [nodes] first value of each among all values.
        alive: [values]
        costs: [values], added to.
        tables: taken from.
        least: scratch, [largest size].
    """
    node = factors[factor, place]
    shape_0 = sizes[factors[factor, 0]]
    shape_1 = sizes[factors[factor, 1]] if factors[factor, 1] >= 0 else 1
    shape_2 = sizes[factors[factor, 2]] if factors[factor, 2] >= 0 else 1
    for v in range(sizes[node]):
        least[v] = NEVER
    at = factors[factor, F_TABLE]
    for i in range(shape_0):
        for j in range(shape_1):
            for k in range(shape_2):
                v = i if place == 0 else (j if place == 1 else k)
                least[v] = min(least[v], tables[at])
                at += 1
    for v in range(sizes[node]):
        if alive[first[node] + v]:
            costs[first[node] + v] += least[v]
        else:
            least[v] = 0.0
    at = factors[factor, F_TABLE]
    for i in range(shape_0):
        for j in range(shape_1):
            for k in range(shape_2):
                v = i if place == 0 else (j if place == 1 else k)
                tables[at] -= least[v]
                at += 1


@borrowing(
    void(int64, int64, float64, int64[:, ::1], int64[::1], int64[::1], boolean[::1], float64[::1], float64[::1]),
    inner=True,
)
def _hand_on(factor, place, share, factors, sizes, first, alive, costs, tables):
    """Adds a share of a node's costs to a factor; see `_draw`. Values that are left out cost `NEVER` there."""
    node = factors[factor, place]
    shape_0 = sizes[factors[factor, 0]]
    shape_1 = sizes[factors[factor, 1]] if factors[factor, 1] >= 0 else 1
    shape_2 = sizes[factors[factor, 2]] if factors[factor, 2] >= 0 else 1
    at = factors[factor, F_TABLE]
    for i in range(shape_0):
        for j in range(shape_1):
            for k in range(shape_2):
                v = first[node] + (i if place == 0 else (j if place == 1 else k))
                if alive[v]:
                    tables[at] += share * costs[v]
                else:
                    tables[at] = NEVER
                at += 1


@borrowing(float64(int64, int64, int64[::1], boolean[::1], float64[::1]), inner=True)
def _least(node, size, first, alive, costs):
    found = NEVER
    for v in range(first[node], first[node] + size):
        if alive[v]:
            found = min(found, costs[v])
    return found


@kernel(
    float64(
        int64[:, ::1],
        int64[::1],
        int64[::1],
        float64[::1],
        float64[::1],
        float64,
        int64,
        boolean[::1],
        int64[::1],
        float64[::1],
    )
)
def tighten(factors, sizes, first, costs, tables, known, sweeps, alive, picked, margins):
    """Leaves out values; see the module.

    Args:
        factors: [factors, F_COUNT]
        sizes: [nodes]
        first: [nodes] first value of each among all values.
        costs: [values], changed.
        tables: of all factors, one behind the other; changed.
        known: values that cost more in every assignment are left out.
        sweeps: at most.
        alive: [values], those that are left out are set to False.
        picked: [nodes], written: a value of each that looks best.
        margins: [values], written: a lower bound on all assignments with the value.

    Returns:
        A lower bound on the cost of all assignments.
    """
    num_nodes = sizes.shape[0]
    widest = 1
    for n in range(num_nodes):
        widest = max(widest, sizes[n])
    least = np.empty(widest)
    floor = np.zeros(factors.shape[0])
    low = np.empty(num_nodes)
    bound = 0.0
    for n in range(num_nodes):
        low[n] = _least(n, sizes[n], first, alive, costs)
        bound += low[n]
    for f in range(factors.shape[0]):
        end = tables.shape[0] if f == factors.shape[0] - 1 else factors[f + 1, F_TABLE]
        floor[f] = NEVER
        for at in range(factors[f, F_TABLE], end):
            floor[f] = min(floor[f], tables[at])
        bound += floor[f]
    for sweep in range(2 * sweeps):
        for step in range(num_nodes):
            node = step if sweep % 2 == 0 else num_nodes - 1 - step
            ahead, behind = 0, 0
            for f in range(factors.shape[0]):
                for place in range(WIDEST):
                    if factors[f, place] == node:
                        _draw(f, place, factors, sizes, first, alive, costs, tables, least)
                        bound -= floor[f]
                        floor[f] = 0.0
                        before, after = False, False
                        for other in range(WIDEST):
                            before = before or 0 <= factors[f, other] < node
                            after = after or factors[f, other] > node
                        if sweep % 2 == 1:
                            before, after = after, before
                        ahead += 1 if after else 0
                        behind += 1 if before else 0
            bound -= low[node]
            low[node] = _least(node, sizes[node], first, alive, costs)
            bound += low[node]
            for v in range(first[node], first[node] + sizes[node]):
                margins[v] = bound + (costs[v] - low[node]) if alive[v] else NEVER
                if alive[v] and margins[v] > known:
                    alive[v] = False
                elif alive[v] and costs[v] == low[node]:
                    picked[node] = v - first[node]
            share = 1.0 / max(1, ahead, behind)
            left = 1.0
            for f in range(factors.shape[0]):
                for place in range(WIDEST):
                    if factors[f, place] == node:
                        after = False
                        for other in range(WIDEST):
                            if sweep % 2 == 0:
                                after = after or factors[f, other] > node
                            else:
                                after = after or 0 <= factors[f, other] < node
                        given = share if after else 0.0
                        _hand_on(f, place, given, factors, sizes, first, alive, costs, tables)
                        floor[f] = given * low[node]
                        bound += floor[f]
                        left -= given
            bound -= low[node]
            low[node] *= left
            bound += low[node]
            for v in range(first[node], first[node] + sizes[node]):
                costs[v] *= left
    return bound


def descend(scalars: Scalars, picked: Sequence[int]) -> tuple[int, ...]:
    """An assignment in which no single node would gain, from `picked`."""
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
    """What is left of a graph whose factors have at most three nodes.

    Args:
        scalars: the graph.
        start: an assignment.
        known: cost of an assignment; given if `scalars` is but a lower bound on the costs that are meant.
        most: of more values of a node, those of the least bounds are kept and what is left may lack every optimum.

    Returns:
        values of each node that may be in an optimum; the best assignment met; and a lower bound.
    """
    sizes = np.array([len(costs) for costs in scalars.nodes], dtype=np.int64)
    first = np.concatenate([[0], np.cumsum(sizes)])
    rows, at = np.full((len(scalars.factors), F_COUNT), -1, dtype=np.int64), 0
    for row, (nodes, table) in zip(rows, scalars.factors, strict=True):
        row[: len(nodes)], row[F_TABLE] = nodes, at
        at += table.size
    flat = [table.reshape(-1) for _, table in scalars.factors]
    tables = np.concatenate(flat) if flat else np.empty(0)
    alive = np.ones(first[-1], dtype=np.bool_)
    costs = np.concatenate(scalars.nodes)
    picked, margins = np.zeros(len(sizes), dtype=np.int64), np.zeros(first[-1])
    best = descend(scalars, start)
    least = scalars.value(best)
    is_given, bound = np.isfinite(known), -np.inf
    for _ in range(PASSES):
        limit = known if is_given else least
        slack = limit - scalars.constant + TOLERANCE * abs(limit)
        found = float(tighten(rows, sizes, first[:-1].copy(), costs, tables, slack, SWEEPS, alive, picked, margins))
        bound = max(bound, found + scalars.constant)
        other = descend(scalars, picked.tolist())
        is_better = scalars.value(other) < least
        if is_better:
            best, least = other, scalars.value(other)
        if is_given or not is_better or alive.sum() == len(sizes):
            break
    left = [np.flatnonzero(alive[begin:end]) for begin, end in itertools.pairwise(first)]
    if most is not None:
        ranked = [
            np.argsort(margins[begin:end][keep], kind="stable")
            for begin, end, keep in zip(first[:-1], first[1:], left, strict=True)
        ]
        left = [np.sort(keep[order[:most]]) for keep, order in zip(left, ranked, strict=True)]
    return left, best, bound


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduced:
    """What is left of a frame's graph at some weights."""

    scalars: Scalars
    values: list[Ints]
    """Of each node, those that are left."""
    best: tuple[int, ...]
    """The best assignment met, in numbers of what is left."""
    is_exact: bool
    """Whether an optimum is among what is left."""

    def picked(self, found: Sequence[int]) -> tuple[int, ...]:
        """An assignment of the frame's graph from one of what is left."""
        return tuple(int(keep[v]) for keep, v in zip(self.values, found, strict=True))


def reduced(graph: CostGraph, weights: Floats, start: Sequence[int], *, known: float = np.inf) -> Reduced:
    """The graph at some weights without values that no optimum takes.

    Where groups have many values, first those go that are too dear even if no tensor with several readers costs
    anything on its way to the later ones.

    Args:
        graph: of a frame.
        weights: [rows, C_COUNT] of `CostGraph.scalars`, none negative.
        start: an assignment.
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
    """The graph with some values of each node only."""
    return Scalars(
        constant=scalars.constant,
        nodes=tuple(costs[keep] for costs, keep in zip(scalars.nodes, left, strict=True)),
        factors=tuple((nodes, table[np.ix_(*(left[n] for n in nodes))]) for nodes, table in scalars.factors),
    )
