"""Sequential message passing (TRW-S) on a weighted graph, see `automap.cost_graph.message_passing`.

The table of a factor is over classes of values. Messages change the costs of a factor too; these changes are kept in a
separate array, with one number for each value of each node. So the least cost of a factor over all values of its other
nodes follows from the least change in each class. This takes as many steps as the table has entries, also for factors
of three nodes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import boolean, float64, int64, void

from automap.jit import borrowing, kernel
from automap.price.kernels.array_types import Floats, Ints, Ints2, Mask, tuple_type

NEVER = 1e250
"""Cost of values that were removed, and of combinations that do not occur."""
WIDEST = 3
"""Largest number of nodes of a factor."""
FIRST, LAST, MIDDLE = range(WIDEST)
"""Places of a factor's nodes; only a factor of three nodes has a middle one."""


class FactorGraph(NamedTuple):
    """A weighted graph as arrays, see `automap.cost_graph.weighted_graph.Term`.

    Messages change `costs`, `taken` and `is_left`, but not the sum over any assignment.
    """

    nodes: Ints2
    """[factors, WIDEST] nodes of each factor; -1: it has no middle one."""
    begins: Ints
    """[factors] first entry of each factor's table among all entries."""
    classes: Ints2
    """[factors, 2] number of classes of the first and of the last node: rows and columns of the table."""
    tables: Floats
    """[entries] cost of each pair of classes, the last node's fastest."""
    codes: Ints
    """[entries] class of each value of the nodes of all factors."""
    taken: Floats
    """[entries] cost that messages have added to a factor for each value of its nodes."""
    at: Ints2
    """[factors, WIDEST] first entry in `codes` and `taken` of each node of a factor."""
    sizes: Ints
    """[nodes] number of values."""
    first: Ints
    """[nodes] first value of each node among all values."""
    costs: Floats
    """[values] cost of each value."""
    is_left: Mask
    """[values] whether the value may be in an optimum."""


FACTOR_GRAPH = tuple_type(FactorGraph)


class Scratch(NamedTuple):
    """Scratch memory for one factor."""

    of_place: Floats
    """[classes] least of `FactorGraph.taken` over the values of one node in each class."""
    of_middle: Floats
    """[classes] the same for the middle node."""
    others: Floats
    """[classes] the least over all classes but one."""
    least: Floats
    """[classes] the result."""
    live: Ints
    """[classes] classes with values that have not been removed."""


SCRATCH = tuple_type(Scratch)


class Least(NamedTuple):
    """The least cost of each node and each factor. The sum of all is a lower bound on every assignment."""

    of_node: Floats
    """[nodes] the least cost of a node."""
    of_factor: Floats
    """[factors] the least cost of a factor."""


LEAST = tuple_type(Least)


@borrowing(int64(FACTOR_GRAPH, int64, int64), inner=True)
def _place(graph, factor, node):
    """Place of a node among those of a factor, or -1."""
    for place in range(WIDEST):
        if graph.nodes[factor, place] == node:
            return place
    return -1


@borrowing(boolean(FACTOR_GRAPH, int64, int64, boolean), inner=True)
def _reaches(graph, factor, node, upward):
    """Whether a factor has a node with a higher number, or with a lower one."""
    for place in range(WIDEST):
        other = graph.nodes[factor, place]
        if (upward and other > node) or (not upward and 0 <= other < node):
            return True
    return False


@borrowing(float64(FACTOR_GRAPH, int64, int64, int64, float64[::1]), inner=True)
def _least_of_classes(graph, factor, place, count, found):
    """Writes the least of `taken` over the remaining values of each class; returns the least of all."""
    node, at = graph.nodes[factor, place], graph.at[factor, place]
    for c in range(count):
        found[c] = NEVER
    best, first = NEVER, graph.first[node]
    for v in range(graph.sizes[node]):
        if graph.is_left[first + v]:
            c, amount = graph.codes[at + v], graph.taken[at + v]
            if amount < found[c]:
                found[c] = amount
                best = min(best, amount)
    return best


@borrowing(void(float64[::1], int64, float64[::1]), inner=True)
def _least_of_others(amounts, count, found):
    """Writes, for each class, the least over all other classes."""
    least, second, best = NEVER, NEVER, -1
    for c in range(count):
        if amounts[c] < least:
            second, least, best = least, amounts[c], c
        elif amounts[c] < second:
            second = amounts[c]
    for c in range(count):
        found[c] = second if c == best else least


@borrowing(float64(float64[::1], float64[::1]), inner=True)
def _least_sum(left, right):
    """The least sum of two entries at the same place."""
    a, b, c, d = NEVER, NEVER, NEVER, NEVER
    count = len(left)
    # Four independent minima: with a single one, each step would wait for the step before.
    whole = count - count % 4
    for i in range(0, whole, 4):
        a = min(a, left[i] + right[i])
        b = min(b, left[i + 1] + right[i + 1])
        c = min(c, left[i + 2] + right[i + 2])
        d = min(d, left[i + 3] + right[i + 3])
    for i in range(whole, count):
        a = min(a, left[i] + right[i])
    return min(a, b, c, d)


@borrowing(void(FACTOR_GRAPH, int64, SCRATCH), inner=True)
def _find_first(graph, factor, scratch):
    """Writes the least cost of a factor for each class of its first node."""
    begin, rows, columns = graph.begins[factor], graph.classes[factor, 0], graph.classes[factor, 1]
    _least_of_classes(graph, factor, LAST, columns, scratch.of_place)
    same = NEVER
    if graph.nodes[factor, MIDDLE] >= 0:
        _least_of_classes(graph, factor, MIDDLE, columns, scratch.of_middle)
        _least_of_others(scratch.of_middle, columns, scratch.others)
        for c in range(columns):
            same = min(same, scratch.of_place[c] + scratch.of_middle[c])
            scratch.of_place[c] += scratch.others[c]
    of_place = scratch.of_place[:columns]
    _least_of_classes(graph, factor, FIRST, rows, scratch.least)
    for row in range(rows):
        # Classes with NEVER have no remaining values.
        if scratch.least[row] < NEVER:
            at = begin + row * columns
            scratch.least[row] = min(same, _least_sum(graph.tables[at : at + columns], of_place))


@borrowing(float64(FACTOR_GRAPH, int64, SCRATCH), inner=True)
def _find_columns(graph, factor, scratch):
    """Writes the least of each column of a factor's table, with `taken` of the first node added.

    Returns:
        The least of `taken` for the first node.
    """
    begin, rows, columns = graph.begins[factor], graph.classes[factor, 0], graph.classes[factor, 1]
    best = _least_of_classes(graph, factor, FIRST, rows, scratch.of_place)
    for c in range(columns):
        scratch.least[c] = NEVER
    for row in range(rows):
        taken, at = scratch.of_place[row], begin + row * columns
        if taken < NEVER:
            costs = graph.tables[at : at + columns]
            for c in range(columns):
                scratch.least[c] = min(scratch.least[c], costs[c] + taken)
    return best


@borrowing(void(FACTOR_GRAPH, int64, int64, SCRATCH), inner=True)
def _find_least(graph, factor, place, scratch):
    """Writes the least cost of a factor for each class of one of its nodes, without `taken` of this node."""
    columns = graph.classes[factor, 1]
    if place == FIRST:
        _find_first(graph, factor, scratch)
        return
    of_first = _find_columns(graph, factor, scratch)
    if place == LAST and graph.nodes[factor, MIDDLE] >= 0:
        _least_of_classes(graph, factor, MIDDLE, columns, scratch.of_middle)
        _least_of_others(scratch.of_middle, columns, scratch.others)
        for c in range(columns):
            scratch.least[c] = min(scratch.least[c] + scratch.others[c], of_first + scratch.of_middle[c])
    elif place == MIDDLE:
        _least_of_classes(graph, factor, LAST, columns, scratch.of_middle)
        for c in range(columns):
            scratch.of_place[c] = scratch.least[c] + scratch.of_middle[c]
        _least_of_others(scratch.of_place, columns, scratch.others)
        for c in range(columns):
            scratch.least[c] = min(scratch.others[c], of_first + scratch.of_middle[c])


@borrowing(void(FACTOR_GRAPH, int64, int64, SCRATCH), inner=True)
def _collect(graph, factor, place, scratch):
    """Moves the least cost of a factor for each value of one of its nodes from the factor into the node."""
    _find_least(graph, factor, place, scratch)
    node, at = graph.nodes[factor, place], graph.at[factor, place]
    first = graph.first[node]
    for v in range(graph.sizes[node]):
        if graph.is_left[first + v]:
            least = scratch.least[graph.codes[at + v]]
            graph.costs[first + v] += least + graph.taken[at + v]
            graph.taken[at + v] = -least


@borrowing(void(FACTOR_GRAPH, int64, int64, float64), inner=True)
def _distribute(graph, factor, place, share):
    """Adds a share of the costs of a node to one of its factors."""
    node, at = graph.nodes[factor, place], graph.at[factor, place]
    first = graph.first[node]
    for v in range(graph.sizes[node]):
        if graph.is_left[first + v]:
            graph.taken[at + v] += share * graph.costs[first + v]


@borrowing(float64(FACTOR_GRAPH, int64), inner=True)
def _least_cost(graph, node):
    """The least cost of a node's remaining values."""
    found = NEVER
    for v in range(graph.first[node], graph.first[node] + graph.sizes[node]):
        if graph.is_left[v]:
            found = min(found, graph.costs[v])
    return found


@borrowing(float64(FACTOR_GRAPH, int64, SCRATCH), inner=True)
def _least_entry(graph, factor, scratch):
    """The least cost of a factor in any assignment."""
    _find_least(graph, factor, FIRST, scratch)
    node, at, found = graph.nodes[factor, FIRST], graph.at[factor, FIRST], NEVER
    for v in range(graph.sizes[node]):
        if graph.is_left[graph.first[node] + v]:
            found = min(found, scratch.least[graph.codes[at + v]] + graph.taken[at + v])
    return found


@kernel(SCRATCH(FACTOR_GRAPH))
def _scratch(graph):
    """Scratch memory for any factor of a graph."""
    most = 1
    for f in range(graph.classes.shape[0]):
        most = max(most, graph.classes[f, 0], graph.classes[f, 1])
    return Scratch(np.empty(most), np.empty(most), np.empty(most), np.empty(most), np.empty(most, np.int64))


@borrowing(void(FACTOR_GRAPH, SCRATCH, LEAST), inner=True)
def _bound(graph, scratch, least):
    """`bound` with scratch memory."""
    for n in range(graph.sizes.shape[0]):
        least.of_node[n] = _least_cost(graph, n)
    for f in range(graph.nodes.shape[0]):
        least.of_factor[f] = _least_entry(graph, f, scratch)


@kernel(void(FACTOR_GRAPH, LEAST))
def bound(graph, least):
    """Writes the least cost of each node and each factor of a graph."""
    _bound(graph, _scratch(graph), least)


@borrowing(float64(FACTOR_GRAPH, float64, int64, int64[::1], float64[::1], LEAST, SCRATCH), inner=True)
def _pass_messages(graph, known, sweeps, picked, margins, least, scratch):
    """`pass_messages` with scratch memory."""
    num_factors, num_nodes = graph.nodes.shape[0], graph.sizes.shape[0]
    of_node, of_factor = least.of_node, least.of_factor
    bound = of_node.sum() + of_factor.sum()
    for sweep in range(2 * sweeps):
        upward = sweep % 2 == 0
        for step in range(num_nodes):
            node = step if upward else num_nodes - 1 - step
            ahead, behind = 0, 0
            for f in range(num_factors):
                place = _place(graph, f, node)
                if place >= 0:
                    _collect(graph, f, place, scratch)
                    bound -= of_factor[f]
                    of_factor[f] = 0.0
                    ahead += 1 if _reaches(graph, f, node, upward) else 0
                    behind += 1 if _reaches(graph, f, node, not upward) else 0
            bound -= of_node[node]
            of_node[node] = _least_cost(graph, node)
            bound += of_node[node]
            first = graph.first[node]
            for v in range(first, first + graph.sizes[node]):
                margins[v] = bound + (graph.costs[v] - of_node[node]) if graph.is_left[v] else NEVER
                if graph.is_left[v] and margins[v] > known:
                    graph.is_left[v] = False
                elif graph.is_left[v] and graph.costs[v] == of_node[node]:
                    picked[node] = v - first
            share = 1.0 / max(1, ahead, behind)
            kept = 1.0
            for f in range(num_factors):
                place = _place(graph, f, node)
                if place >= 0:
                    given = share if _reaches(graph, f, node, upward) else 0.0
                    _distribute(graph, f, place, given)
                    of_factor[f] = given * of_node[node]
                    bound += of_factor[f]
                    kept -= given
            bound -= of_node[node]
            of_node[node] *= kept
            bound += of_node[node]
            for v in range(first, first + graph.sizes[node]):
                graph.costs[v] *= kept
    return bound


@kernel(float64(FACTOR_GRAPH, float64, int64, int64[::1], float64[::1], LEAST))
def pass_messages(graph, known, sweeps, picked, margins, least):
    """Moves costs between nodes and factors, and removes values that are in no optimum.

    Args:
        graph: changed.
        known: cost of an assignment; values that cost more in every assignment are removed.
        sweeps: number of times that the nodes are visited in ascending and then in descending order.
        picked: [nodes], written: the value of each node with the least cost.
        margins: [values], written: a lower bound on the cost of all assignments with the value.
        least: the least cost of each node and each factor, as written by `bound` or by earlier messages; changed.

    Returns:
        A lower bound on the cost of all assignments.
    """
    return _pass_messages(graph, known, sweeps, picked, margins, least, _scratch(graph))


@borrowing(void(FACTOR_GRAPH, int64, int64, int64[::1], float64[::1]), inner=True)
def _add_around(graph, factor, place, picked, costs):
    """Adds the cost of a factor for each value of one of its nodes, with the other nodes at their picked values."""
    codes, at = graph.codes, graph.at
    columns, begin = graph.classes[factor, 1], graph.begins[factor]
    source = codes[at[factor, FIRST] + picked[graph.nodes[factor, FIRST]]]
    last = codes[at[factor, LAST] + picked[graph.nodes[factor, LAST]]]
    middle = -1
    if graph.nodes[factor, MIDDLE] >= 0:
        middle = codes[at[factor, MIDDLE] + picked[graph.nodes[factor, MIDDLE]]]
    for v in range(graph.sizes[graph.nodes[factor, place]]):
        code = codes[at[factor, place] + v]
        if place == FIRST:
            source = code
        elif place == LAST:
            last = code
        else:
            middle = code
        if last != middle:
            costs[v] += graph.tables[begin + source * columns + last]


@borrowing(float64(FACTOR_GRAPH, float64, int64[::1], float64[::1], boolean[::1]), inner=True)
def _descend(graph, tolerance, picked, costs, is_fresh):
    """`descend` with scratch memory: costs of a node's values, and flags of the nodes that must be tried again."""
    num_factors, num_nodes = graph.nodes.shape[0], graph.sizes.shape[0]
    node = 0
    while node < num_nodes:
        if not is_fresh[node]:
            node += 1
            continue
        is_fresh[node] = False
        size = graph.sizes[node]
        for v in range(size):
            costs[v] = graph.costs[graph.first[node] + v]
        for f in range(num_factors):
            place = _place(graph, f, node)
            if place >= 0:
                _add_around(graph, f, place, picked, costs)
        best = costs[:size].argmin()
        if costs[best] < costs[picked[node]] - tolerance * abs(costs[picked[node]]):
            picked[node] = best
            lowest = node
            for f in range(num_factors):
                if _place(graph, f, node) >= 0:
                    for place in range(WIDEST):
                        other = graph.nodes[f, place]
                        if other >= 0 and other != node:
                            is_fresh[other] = True
                            lowest = min(lowest, other)
            node = lowest
    total = 0.0
    for n in range(num_nodes):
        total += graph.costs[graph.first[n] + picked[n]]
    for f in range(num_factors):
        for v in range(costs.shape[0]):
            costs[v] = 0.0
        _add_around(graph, f, FIRST, picked, costs)
        total += costs[picked[graph.nodes[f, FIRST]]]
    return total


@kernel(float64(FACTOR_GRAPH, float64, int64[::1]))
def descend(graph, tolerance, picked):
    """Changes an assignment until no change of a single node improves it, the first such node first.

    Args:
        graph: a graph before any message was passed.
        tolerance: share of the cost of a value by which another value must cost less to be better.
        picked: [nodes], changed.

    Returns:
        The cost of the assignment in the end.
    """
    costs, is_fresh = np.empty(max(1, graph.sizes.max())), np.ones(graph.sizes.shape[0], np.bool_)
    return _descend(graph, tolerance, picked, costs, is_fresh)
