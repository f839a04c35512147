"""Elimination: the best signatures of a skeleton by exact elimination of nodes from its cost graph, after OneFlow.

OneFlow (arXiv 2110.15032) eliminates nodes with one or two neighbours and adds parallel edges, both exactly. It merges
nodes if none can be eliminated, and ends with a greedy search. Here:

1. Values that are in no optimum are left out (`automap.cost_graph.message_passing`; exact).
2. `eliminate` removes the node whose removal makes the smallest table. The new table, over the neighbours of the node,
   has the least sums over its values. After all nodes are removed, the values are read back in reverse order. To remove
   a node with one neighbour is OneFlow's child elimination, with two its node elimination, with more its merging. The
   edge from a repeated block to its next copy is a table over the values of the block's own nodes.
3. If all remaining tables would be too large, nodes with many neighbours are held: they keep their values of the plan
   at hand. Then each of them is freed in turn, until nothing gains. This is rare, and not exact.
4. Memory: a Lagrange multiplier, the price of memory on the fullest ranks, is bisected on a logarithmic scale until the
   plan just fits. The last plan that fits and the last one that does not may differ in many nodes, so plans between the
   two are tried.

The costs are linear at a plan. `agents.planners.skeletons` repeats: sensitivities at a plan, this solution, its exact
price, new sensitivities. Units: seconds, bytes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

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
Picked = tuple[int, ...]

LARGEST_TABLE = 1 << 21
"""Largest number of entries of a table from which a node is eliminated."""
MOST_ENTRIES = 1 << 24
"""Largest number of entries of all tables of one elimination (assumed: they take some tenths of a second). Where there
are more, the largest table is made smaller by a factor of `SMALLER` until there are not."""
MOST_ENTRIES_IN_ALL = 1 << 26
"""Largest number of entries of all eliminations of one solve (assumed)."""
SMALLER = 4
"""Factor by which the largest table becomes smaller where all tables together are too many (assumed)."""
MOST_VALUES = 24
"""Largest number of values of a node that elimination considers: those with the least lower bounds. With 80, none of
105 solves of seven models ended better; with experts, 24 take a third of the time."""
HELD_PASSES = 3
"""Largest number of passes in which all held nodes are freed in turn (assumed)."""
PRICES = (0.01, 100.0)
"""Least and greatest price of a device's whole memory, in step times (assumed)."""
BISECTIONS = 4
"""Number of bisections of that price."""
BETWEEN = 0.1
"""Largest share of the rest of a budget in evaluations for the plans between two solutions (assumed)."""
LEAST_SAVED = 1e-6
"""Least change of memory, as a share of a device's, by which a change of time is divided (assumed)."""
FULLEST = 16.0
"""Exponent of the fullness of a rank in its weight in the price of memory (assumed)."""


class Order(NamedTuple):
    """An order in which nodes are eliminated."""

    steps: list[tuple[int, tuple[int, ...]]]
    """Nodes in their order, each with its neighbours at that time, ascending."""
    stuck: list[int]
    """Nodes that must keep a given value, since tables would be too large otherwise."""
    entries: int
    """Number of entries of all tables."""


def order_of(scalars: Scalars, held: Mapping[int, int], largest: int) -> Order:
    """The order in which nodes are eliminated: the one with the smallest table first.

    Args:
        scalars: the cost graph.
        held: nodes that are not eliminated -> the value that they keep.
        largest: largest number of entries of a table. If every table would be larger, the node with the most neighbours
            is added to `Order.stuck`.
    """
    sizes = [len(costs) for costs in scalars.nodes]
    neighbours: dict[int, set[int]] = {n: {n} for n in range(len(sizes)) if n not in held}
    for around, _ in scalars.factors:
        free = [n for n in around if n not in held]
        for n in free:
            neighbours[n].update(free)

    weight = {n: math.prod(sizes[m] for m in around) for n, around in neighbours.items()}
    queue = [(entries, n) for n, entries in weight.items()]
    heapq.heapify(queue)

    def remove(node: int) -> None:
        """Removes a node; its neighbours have been connected with each other before."""
        del weight[node]
        for n in neighbours.pop(node) - {node}:
            neighbours[n].discard(node)
            weight[n] = math.prod(sizes[m] for m in neighbours[n])
            heapq.heappush(queue, (weight[n], n))

    found = Order([], [], 0)
    while weight:
        entries, node = queue[0]
        if weight.get(node) != entries:
            heapq.heappop(queue)
        elif entries > largest:
            widest = max(weight, key=lambda n: (len(neighbours[n]), sizes[n], -n))
            found.stuck.append(widest)
            remove(widest)
        else:
            found.steps.append((node, tuple(sorted(neighbours[node] - {node}))))
            found = found._replace(entries=found.entries + entries)
            for n in neighbours[node]:
                neighbours[n].update(neighbours[node])
            remove(node)
    return found


def eliminate(scalars: Scalars, held: Mapping[int, int], order: Order) -> Picked:
    """The least assignment that keeps the held nodes at their values.

    Args:
        scalars: the cost graph.
        held: node -> its value.
        order: order of all other nodes.
    """
    sizes = [len(costs) for costs in scalars.nodes]
    tables: dict[tuple[int, ...], Floats] = {}
    # For each node the keys of the tables that depend on it; a dictionary keeps their order.
    over: dict[int, dict[tuple[int, ...], None]] = {node: {} for node, _ in order.steps}

    def add(nodes: tuple[int, ...], table: Floats) -> None:
        """Adds a table over some nodes; tables over the same nodes are summed."""
        tables[nodes] = tables[nodes] + table if nodes in tables else table
        for n in nodes:
            over[n][nodes] = None

    for around, table in scalars.factors:
        if free := tuple(n for n in around if n not in held):
            add(free, table[tuple(held.get(n, slice(None)) for n in around)])
    totals: list[Floats] = []
    for node, around in order.steps:
        # The values of the node are the first axis, so that the minimum over them is fast.
        axes = (node, *around)
        total = scalars.nodes[node].reshape((-1,) + (1,) * len(around))
        for nodes in over.pop(node):
            table = tables.pop(nodes)
            ranked = sorted(range(len(nodes)), key=lambda i: axes.index(nodes[i]))
            total = total + table.transpose(ranked).reshape([sizes[m] if m in nodes else 1 for m in axes])
            for n in nodes:
                if n != node:
                    del over[n][nodes]
        totals.append(total)
        if around:
            add(around, total.min(axis=0))
    picked = dict(held)
    for (node, around), total in zip(reversed(order.steps), reversed(totals), strict=True):
        entries: tuple[slice | int, ...] = (slice(None), *(picked[m] for m in around))
        picked[node] = int(total[entries].argmin())
    return tuple(picked[n] for n in range(len(sizes)))


def minimum(scalars: Scalars, start: Sequence[int]) -> tuple[Picked, bool]:
    """The cheapest assignment that is found, and whether it is proven to be the cheapest.

    Args:
        scalars: the cost graph.
        start: an assignment from which held nodes take their values.
    """
    fixed = {n: 0 for n, costs in enumerate(scalars.nodes) if len(costs) == 1}
    largest = LARGEST_TABLE
    # No node that has a choice is held until the tables require it.
    order, held = order_of(scalars, fixed, largest), list[int]()
    while order.stuck or order.entries > MOST_ENTRIES:
        if order.entries > MOST_ENTRIES and largest > 1:
            largest //= SMALLER
            order, held = order_of(scalars, fixed, largest), []
        else:
            held += order.stuck
            order = order_of(scalars, {**fixed, **{n: start[n] for n in held}}, largest)
    found = eliminate(scalars, {**fixed, **{n: start[n] for n in held}}, order)
    entries = order.entries
    for _ in range(HELD_PASSES if held else 0):
        before = scalars.value(found)
        for n in (*held, -1):
            # All held nodes but n keep their values; in the last turn, n = -1, all of them.
            kept = {**fixed, **{m: found[m] for m in held if m != n}}
            order = order_of(scalars, kept, largest)
            if order.stuck:
                # A table would be too large again: all other nodes keep their values.
                kept = {m: v for m, v in enumerate(found) if m != n}
                order = order_of(scalars, kept, largest)
            entries += order.entries
            if entries > MOST_ENTRIES_IN_ALL:
                return found, False
            again = eliminate(scalars, kept, order)
            if scalars.value(again) < scalars.value(found):
                found = again
        if scalars.value(found) >= before:
            break
    return found, not held


def solve(graph: CostGraph, weights: Floats, start: Sequence[int]) -> tuple[Picked, bool]:
    """The cheapest assignment of a skeleton's graph that is found, and whether it is proven to be the cheapest.

    Args:
        graph: cost graph of the skeleton.
        weights: [rows, columns] worth of one unit of each cost, see `CostGraph.weighted`.
        start: an assignment.
    """
    small = reduced(graph, weights, start, most=MOST_VALUES)
    found, is_proven = (small.best, True) if small.is_decided else minimum(small.scalars, small.best)
    return small.picked(found), is_proven and small.is_exact


def propose(point: Linearization) -> list[Candidate]:
    """Prices the plans that elimination finds: first without a price of memory; if that does not fit, with one."""
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
    return [*found, *_between(point, found)]


def _between(point: Linearization, found: Sequence[Candidate]) -> list[Candidate]:
    """Plans between the best one that fits and the one with the least overflow.

    These two may differ in many nodes, so that the plan that fits leaves memory unused. First, nodes of the plan that
    does not fit take the values of the other one, those first that save most memory for each second. Then nodes of the
    best plan so far change back, those first that gain most time.
    """
    fits, over = [one for one in found if one.overflow <= 0.0], [one for one in found if one.overflow > 0.0]
    if not fits or point.incumbent.finished:
        return []
    nearest, best = min(over, key=lambda one: one.overflow), min(fits, key=lambda one: one.seconds)
    plans = _on_the_way(point, nearest, best)
    best = min([best, *plans], key=lambda one: one.worth)
    return [*plans, *_on_the_way(point, best, nearest)]


def _on_the_way(point: Linearization, begin: Candidate, end: Candidate) -> list[Candidate]:
    """Plans in which more and more nodes of one plan take the values of another one; none if the budget is too short.

    Nodes come in the order of the seconds that their change costs for the memory that it saves.
    """
    graph, incumbent = point.graph, point.incumbent
    unlike = [n for n, (one, other) in enumerate(zip(begin.picked, end.picked, strict=True)) if one != other]
    if len(unlike) < 2 or (incumbent.left is not None and 2 * len(unlike) > BETWEEN * incumbent.left):
        return []
    changes = [(n, end.picked[n]) for n in unlike]
    seconds, overflow = incumbent.price(graph.moved(begin.picked, [[change] for change in changes])).T
    saved = begin.overflow - overflow
    rates = (seconds - begin.seconds) / np.maximum(np.abs(saved), LEAST_SAVED)
    # Nodes whose change costs both time and memory come last.
    order = np.lexsort((rates, (begin.overflow > 0.0) & (saved <= 0.0) & (rates > 0.0)))
    some = [[changes[i] for i in order[:count]] for count in range(1, len(order))]
    prices = incumbent.price(graph.moved(begin.picked, some)).tolist()
    found = []
    for moves, (step_s, over) in zip(some, prices, strict=True):
        changed = dict(moves)
        picked = tuple(changed.get(n, value) for n, value in enumerate(begin.picked))
        found.append(Candidate(picked=picked, seconds=step_s, overflow=over))
    return found


def worth_of_memory(at: Sensitivities) -> Floats:
    """[ranks] weight of a byte of memory on each rank; the fullest ranks weigh most.

    The weights of all ranks, each multiplied by the memory of its device, add up to 1.
    """
    fullness = (at.used / at.capacity) / (at.used / at.capacity).max()
    worth: Floats = fullness**FULLEST / (fullness**FULLEST).sum() / at.capacity
    return worth


def search_elimination(task: SearchTask) -> SearchResult:
    """The best plan of elimination over skeletons, those of the best templates first; see `Searcher`."""
    return search_skeletons(task, "elimination", propose)
