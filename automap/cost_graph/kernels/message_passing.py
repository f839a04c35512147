"""Sequential message passing (TRW-S) on a cost graph, see `automap.cost_graph.message_passing`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import boolean, float64, int64, void
from numba.types import UniTuple

from automap.jit import borrowing, kernel
from automap.price.kernels.array_types import Floats, Ints, Ints2, Mask, tuple_type

NEVER = 1e250
"""Cost of a value that was left out, where factors are searched."""
WIDEST = 3
"""Largest number of nodes of a factor."""


class FactorGraph(NamedTuple):
    """A cost graph as arrays. Messages change `costs`, `tables` and `is_left`, but not the sum over any assignment."""

    nodes: Ints2
    """[factors, WIDEST] nodes of each factor, ascending; -1 behind the last one."""
    begins: Ints
    """[factors + 1] first entry of each factor's table among all entries."""
    sizes: Ints
    """[nodes] number of values."""
    first: Ints
    """[nodes] first value of each node among all values."""
    costs: Floats
    """[values] cost of each value."""
    tables: Floats
    """[entries] cost of each combination of values of a factor's nodes, the last node's values fastest."""
    is_left: Mask
    """[values] whether the value may be in an optimum."""


FACTOR_GRAPH = tuple_type(FactorGraph)


@borrowing(int64(FACTOR_GRAPH, int64, int64), inner=True)
def _size(graph, factor, place):
    """Number of values of one of a factor's nodes; 1 behind the last one."""
    node = graph.nodes[factor, place]
    return graph.sizes[node] if node >= 0 else 1


@borrowing(int64(FACTOR_GRAPH, int64, int64), inner=True)
def _place(graph, factor, node):
    """Which of a factor's nodes a node is, or -1."""
    for place in range(WIDEST):
        if graph.nodes[factor, place] == node:
            return place
    return -1


@borrowing(UniTuple(int64, 3)(FACTOR_GRAPH, int64, int64), inner=True)
def _around(graph, factor, place):
    """Combinations of values of a factor's nodes before one of them, its own values, and combinations behind it."""
    sizes = _size(graph, factor, 0), _size(graph, factor, 1), _size(graph, factor, 2)
    if place == 0:
        return 1, sizes[0], sizes[1] * sizes[2]
    if place == 1:
        return sizes[0], sizes[1], sizes[2]
    return sizes[0] * sizes[1], sizes[2], 1


@borrowing(boolean(FACTOR_GRAPH, int64, int64, boolean), inner=True)
def _reaches(graph, factor, node, upward):
    """Whether a factor has a node with a higher number, or with a lower one."""
    for place in range(WIDEST):
        other = graph.nodes[factor, place]
        if (upward and other > node) or (not upward and 0 <= other < node):
            return True
    return False


@borrowing(void(FACTOR_GRAPH, int64, int64, float64[::1]), inner=True)
def _collect(graph, factor, place, least):
    """Moves the least that a factor adds to each value of one of its nodes from the factor into the node.

    Args:
        graph: changed.
        place: which of its nodes.
        least: [largest number of values] scratch.
    """
    first, (before, size, after) = graph.first[graph.nodes[factor, place]], _around(graph, factor, place)
    for v in range(size):
        least[v] = NEVER
    at = graph.begins[factor]
    for _ in range(before):
        for v in range(size):
            found = least[v]
            for entry in range(at, at + after):
                found = graph.tables[entry] if graph.tables[entry] < found else found
            least[v] = found
            at += after
    for v in range(size):
        if graph.is_left[first + v]:
            graph.costs[first + v] += least[v]
        else:
            least[v] = 0.0
    at = graph.begins[factor]
    for _ in range(before):
        for v in range(size):
            for entry in range(at, at + after):
                graph.tables[entry] -= least[v]
            at += after


@borrowing(void(FACTOR_GRAPH, int64, int64, float64), inner=True)
def _distribute(graph, factor, place, share):
    """Adds a share of a node's costs to one of its factors; values that are left out cost `NEVER` there."""
    first, (before, size, after) = graph.first[graph.nodes[factor, place]], _around(graph, factor, place)
    at = graph.begins[factor]
    for _ in range(before):
        for v in range(first, first + size):
            if graph.is_left[v]:
                for entry in range(at, at + after):
                    graph.tables[entry] += share * graph.costs[v]
            else:
                for entry in range(at, at + after):
                    graph.tables[entry] = NEVER
            at += after


@borrowing(float64(FACTOR_GRAPH, int64), inner=True)
def _least_cost(graph, node):
    """The least cost of a node's values that are left."""
    found = NEVER
    for v in range(graph.first[node], graph.first[node] + graph.sizes[node]):
        if graph.is_left[v]:
            found = min(found, graph.costs[v])
    return found


@kernel(float64(FACTOR_GRAPH, float64, int64, int64[::1], float64[::1]))
def pass_messages(graph, known, sweeps, picked, margins):
    """Moves costs between nodes and factors and leaves out values that no optimum takes.

    Args:
        graph: changed.
        known: cost of an assignment; values that cost more in every assignment are left out.
        sweeps: number of times that the nodes are visited in ascending and then in descending order.
        picked: [nodes], written: the value of each node that looks best.
        margins: [values], written: a lower bound on the cost of all assignments with the value.

    Returns:
        A lower bound on the cost of all assignments.
    """
    num_factors, num_nodes = graph.nodes.shape[0], graph.sizes.shape[0]
    widest = 1
    for n in range(num_nodes):
        widest = max(widest, graph.sizes[n])
    least = np.empty(widest)
    of_node, of_factor = np.empty(num_nodes), np.full(num_factors, NEVER)  # the least entry of each
    bound = 0.0
    for n in range(num_nodes):
        of_node[n] = _least_cost(graph, n)
        bound += of_node[n]
    for f in range(num_factors):
        for at in range(graph.begins[f], graph.begins[f + 1]):
            of_factor[f] = min(of_factor[f], graph.tables[at])
        bound += of_factor[f]
    for sweep in range(2 * sweeps):
        upward = sweep % 2 == 0
        for step in range(num_nodes):
            node = step if upward else num_nodes - 1 - step
            ahead, behind = 0, 0
            for f in range(num_factors):
                place = _place(graph, f, node)
                if place >= 0:
                    _collect(graph, f, place, least)
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
