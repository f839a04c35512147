"""Device orders: the orders in which the stages of a pipeline may use the devices of a cluster.

Order 0 is that of the device numbers. A cluster with several kinds of hosts has an order for each sequence of the
kinds. A cluster with measured bandwidths between devices has the order of SPP's recursive min-cut (Luo et al., arXiv
2204.10562), which puts slow links between stages, and its reverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations, product

import numpy as np

from automap.arrays import Floats, Mask
from automap.cluster import Cluster

Order = tuple[int, ...]

MAX_PERMUTED = 3
"""Largest number of kinds of hosts for which every sequence is an order (assumed). With more kinds there are two
orders: by rising and by falling memory bandwidth."""
MAX_CUT = 128
"""Largest number of devices that are ordered by min-cuts, whose time grows with the cube (assumed). Larger clusters
keep the order of their numbers."""


def device_orders(cluster: Cluster) -> tuple[Order, ...]:
    """The distinct orders of the devices of a cluster, that of their numbers first."""
    found: dict[Order, None] = {tuple(range(cluster.num_devices)): None}
    found.update(dict.fromkeys(_by_kind(cluster)))
    matrix = cluster.bandwidth_GBps
    if matrix is not None and cluster.num_devices <= MAX_CUT:
        order = min_cut_order(np.array(matrix))
        found.update({order: None, order[::-1]: None})
    return tuple(found)


def _by_kind(cluster: Cluster) -> list[Order]:
    """The orders in which the devices of each kind of host are consecutive, by their numbers within a kind."""
    groups: dict[int, list[int]] = {}
    for device, host in enumerate(cluster.node_of):
        groups.setdefault(int(cluster.alike[host]), []).append(device)
    if len(groups) <= MAX_PERMUTED:
        return [tuple(d for kind in kinds for d in groups[kind]) for kinds in permutations(groups)]
    rising = sorted(groups, key=lambda kind: cluster.device(groups[kind][0]).hbm_bandwidth_GBps)
    return [tuple(d for kind in kinds for d in groups[kind]) for kinds in (rising, rising[::-1])]


def min_cut_order(weight: Floats) -> Order:
    """Order of the vertices of a graph by recursive minimum cuts.

    The minimum cut divides the vertices into two sides, which are consecutive in the order; each side is ordered in the
    same way, and that of the first vertex comes first. Vertices between which all edges have the same weight keep their
    order, or get the reverse order if that ends with a faster edge to the other side. So the ranks of an inner axis
    stay neighbours.

    Args:
        weight: [n, n] weights of the edges; the smaller one of both directions counts.
    """
    both = np.minimum(weight, weight.T)

    def even(members: Sequence[int]) -> bool:
        return len(members) == 1 or _is_even(both[np.ix_(members, members)])

    def order(members: Sequence[int]) -> list[int]:
        if len(members) < 3 or even(members):
            return list(members)
        cut = min_cut(both[np.ix_(members, members)])
        sides = [[v for v, is_in in zip(members, cut, strict=True) if is_in == cut[0]]]
        sides.append([v for v, is_in in zip(members, cut, strict=True) if is_in != cut[0]])
        one, other = ([order(side), order(side)[::-1]] if even(side) else [order(side)] for side in sides)
        first, second = max(product(one, other), key=lambda ends: float(both[ends[0][-1], ends[1][0]]))
        return [*first, *second]

    return tuple(order(range(len(weight))))


def best_connected(weight: Floats) -> Order:
    """The vertices of a graph in the order of their connection, the best connected one first.

    The order is built from its end: the vertex with the smallest sum of edges to the remaining vertices is removed; of
    equal ones the last.

    Args:
        weight: [n, n] weights of the edges; the smaller one of both directions counts.
    """
    both = np.minimum(weight, weight.T)
    np.fill_diagonal(both, 0.0)
    stay, gone = list(range(len(both))), list[int]()
    while stay:
        kept = both[np.ix_(stay, stay)].sum(axis=1)
        gone.append(stay.pop(len(stay) - 1 - int(np.argmin(kept[::-1]))))
    return tuple(gone[::-1])


def _is_even(weight: Floats) -> bool:
    edges = weight[~np.eye(len(weight), dtype=np.bool_)]
    return bool(np.ptp(edges) == 0.0)


def min_cut(weight: Floats) -> Mask:
    """One side of a global minimum cut (Stoer and Wagner, Journal of the ACM 44, 1997).

    Args:
        weight: [n, n] symmetric, n > 1; the diagonal does not count.

    Returns:
        [n] whether a vertex is on that side.
    """
    side: Mask
    weight = weight.copy()
    np.fill_diagonal(weight, 0.0)
    merged = np.eye(len(weight), dtype=np.bool_)
    alive = np.ones(len(weight), dtype=np.bool_)
    best, side = np.inf, merged[0].copy()
    while alive.sum() > 1:
        # A maximum adjacency ordering: its last vertex alone is one side of a minimum cut of its last two vertices.
        tied, waiting = np.zeros(len(weight)), alive.copy()
        before = last = -1
        while waiting.any():
            before, last = last, int(np.argmax(np.where(waiting, tied, -1.0)))
            waiting[last] = False
            tied += weight[last]
        cost = float(weight[last, alive].sum())
        if cost < best:
            best, side = cost, merged[last].copy()
        weight[before] += weight[last]
        weight[:, before] += weight[:, last]
        weight[before, before] = 0.0
        merged[before] |= merged[last]
        alive[last] = False
    return side
