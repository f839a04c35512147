"""Elimination: the best signatures of a skeleton by exact elimination on its cost graph, after OneFlow.

OneFlow (arXiv 2110.15032) removes nodes of one or two neighbours and sums parallel edges, exactly, and remembers the
argmins; it merges nodes where it is stuck and ends with a greedy search. Here:

1. Values that no optimum takes are left out (`automap.cost_graph.message_passing`; exact).
2. `eliminate`: the node whose removal makes the smallest table goes first. The new table, over its neighbours, holds
   the least sums; in the end the sums themselves tell the node's value. One neighbour is OneFlow's child elimination,
   two are its node elimination, more are its merging; a repeated block's edge to itself is a table over values of its
   own nodes.
3. Where every table that is left would be too large, nodes with many neighbours are held at their values in the plan at
   hand; each of them is then free in turn, until nothing gains. This is rare, and no longer exact.
4. Memory: a Lagrange multiplier on the fullest ranks, bisected on a logarithmic scale until the plan just fits.

Sensitivities, solution, exact price, new sensitivities: see `agents.planners.skeletons`. Units: seconds, bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from agents.planners.linearization import Candidate, Linearization
from agents.planners.skeleton_turns import search_skeletons
from agents.searcher import SearchResult, SearchTask
from automap.cost_graph.graph import CostGraph
from automap.cost_graph.message_passing import reduced
from automap.cost_graph.sensitivities import Sensitivities
from automap.cost_graph.weighted_graph import Scalars

Floats = npt.NDArray[np.float64]
Factors = list[tuple[tuple[int, ...], Floats]]
Picked = tuple[int, ...]

LARGEST_TABLE = 1 << 21
"""Largest number of entries of a table from which a node is eliminated."""
MOST_VALUES = 24
"""Largest number of values of a node that elimination is given, those with the least bounds: of 105 solves of seven
models none ended at more than with 80, in a third of the time where experts are mixed."""
HELD_PASSES = 3
"""Number of times at most that all held nodes are freed in turn."""
PRICES = (0.01, 100.0)
"""Least and greatest price of a device's whole memory, in step times."""
BISECTIONS = 4
"""Number of bisections of that price."""
FULLEST = 16.0
"""Exponent by which fuller ranks weigh more in the price of memory."""


def eliminate(scalars: Scalars, held: dict[int, int]) -> tuple[Picked | None, int]:
    """The least assignment that keeps the held nodes at their values.

    Args:
        scalars: the cost graph.
        held: node -> its value.

    Returns:
        The assignment and -1; or None, where a table would be too large, and the node with most neighbours then.
    """
    sizes = [len(costs) for costs in scalars.nodes]
    factors: Factors = []
    for around, table in scalars.factors:
        at = tuple(held.get(n, slice(None)) for n in around)
        factors.append((tuple(n for n in around if n not in held), table[at]))
    factors = [(nodes, table) for nodes, table in factors if nodes]
    neighbours: dict[int, set[int]] = {n: set() for n in range(len(sizes)) if n not in held}
    for nodes, _ in factors:
        for n in nodes:
            neighbours[n].update(nodes)

    def weigh(n: int) -> float:
        """Number of entries of the table from which a node is eliminated."""
        return math.prod(sizes[m] for m in neighbours[n] | {n})

    weight = {n: weigh(n) for n in neighbours}
    steps: list[tuple[int, tuple[int, ...], Floats]] = []
    while weight:
        node = min(weight, key=lambda n: (weight[n], n))
        if weight[node] > LARGEST_TABLE:
            return None, max(weight, key=lambda n: (len(neighbours[n] - {n}), sizes[n], -n))
        around = tuple(sorted(neighbours[node] - {node}))
        # The node's values are the first axis: along it the least sums of all others are taken side by side.
        order = (node, *around)
        total = scalars.nodes[node].reshape((-1,) + (1,) * len(around))
        for nodes, table in factors:
            if node in nodes:
                ranked = sorted(range(len(nodes)), key=lambda i: order.index(nodes[i]))
                total = total + table.transpose(ranked).reshape([sizes[m] if m in nodes else 1 for m in order])
        factors = [f for f in factors if node not in f[0]]
        steps.append((node, around, total))
        if around:
            factors = _add(factors, around, total.min(axis=0))
        del weight[node]
        for n in around:
            neighbours[n].update(around)
            neighbours[n].discard(node)
            weight[n] = weigh(n)
    picked = dict(held)
    for node, around, total in reversed(steps):
        entries: tuple[slice | int, ...] = (slice(None), *(picked[m] for m in around))
        picked[node] = int(total[entries].argmin())
    return tuple(picked[n] for n in range(len(sizes))), -1


def _add(factors: Factors, around: tuple[int, ...], table: Floats) -> Factors:
    """The factors with one more table, which is added to the table over the same nodes if there is one."""
    for i, (nodes, other) in enumerate(factors):
        if nodes == around:
            return [*factors[:i], (around, other + table), *factors[i + 1 :]]
    return [*factors, (around, table)]


def least(scalars: Scalars, start: Sequence[int]) -> tuple[Picked, bool]:
    """The least assignment that is found, and whether it is proven to be the least.

    Args:
        scalars: the cost graph.
        start: an assignment that gives the values of nodes which have to be held.
    """
    fixed = {n: 0 for n, costs in enumerate(scalars.nodes) if len(costs) == 1}
    held: list[int] = []
    while True:
        # No node that has a choice is held until the tables require it.
        found, widest = eliminate(scalars, {**fixed, **{n: start[n] for n in held}})
        if found is not None:
            break
        held.append(widest)
    for _ in range(HELD_PASSES if held else 0):
        before = scalars.value(found)
        for n in (*held, -1):
            # All held nodes but one keep their values; in the end all of them.
            again, _ = eliminate(scalars, {**fixed, **{m: found[m] for m in held if m != n}})
            if again is None:
                # That makes a table too large: all nodes but this one keep their values.
                again, _ = eliminate(scalars, {m: v for m, v in enumerate(found) if m != n})
            if again is not None and scalars.value(again) < scalars.value(found):
                found = again
        if scalars.value(found) >= before:
            break
    return found, not held


def solve(graph: CostGraph, weights: Floats, start: Sequence[int]) -> tuple[Picked, bool]:
    """The least assignment of a skeleton's graph that is found, and whether it is proven to be the least.

    Args:
        graph: cost graph of the skeleton.
        weights: [rows, columns] worth of one unit of each cost, see `CostGraph.weighted`.
        start: an assignment.
    """
    small = reduced(graph, weights, start, most=MOST_VALUES)
    found, is_proven = (small.best, True) if small.is_decided else least(small.scalars, small.best)
    return small.picked(found), is_proven and small.is_exact


def propose(point: Linearization) -> list[Candidate]:
    """Prices the plans that elimination finds, first without and then with a price on memory."""
    graph = point.graph
    found = [point.price(solve(graph, point.time, point.picked)[0])]
    if found[0].overflow <= 0.0 or point.incumbent.finished:
        return found
    memory = np.tensordot(worth_of_memory(point.at), point.at.memory, axes=1)

    def solve_at(seconds: float) -> None:
        """Solves at a price of `seconds` for a device's whole memory."""
        found.append(point.price(solve(graph, point.time + seconds * memory, found[-1].picked)[0]))

    low, high = (share * found[0].seconds for share in PRICES)
    solve_at(high)
    for _ in range(BISECTIONS if found[-1].overflow <= 0.0 else 0):
        if point.incumbent.finished:
            break
        middle = math.sqrt(low * high)
        solve_at(middle)
        low, high = (low, middle) if found[-1].overflow <= 0.0 else (middle, high)
    return found


def worth_of_memory(at: Sensitivities) -> Floats:
    """[ranks] worth of a byte on each rank, as a share of a device's memory; the fullest ranks weigh most."""
    fullness = (at.used / at.capacity) / (at.used / at.capacity).max()
    worth: Floats = fullness**FULLEST / (fullness**FULLEST).sum() / at.capacity
    return worth


def search_elimination(task: SearchTask) -> SearchResult:
    """The best plan of elimination over skeletons, those of the best templates first; see `Searcher`."""
    return search_skeletons(task, "elimination", propose)
