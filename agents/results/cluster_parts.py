"""Parts of a cluster: some of its devices as clusters of their own.

Equal whole hosts, devices of one host, or all hosts of some kinds (`clusters_within`); and for degrees that do not
divide the number of devices, the largest parts that they fill (`filled_within`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import numpy as np

from automap.arrays import Floats
from automap.cluster import Cluster, Node
from automap.hints import Fix
from automap.space.device_order import MAX_CUT, best_connected
from automap.space.mesh_shapes import FEW_TIMES
from automap.space.shape import divisors

SHARED_BY = (2, 3, 4, 8)
"""Numbers that the size of a part is a multiple of, where few numbers divide the size of the cluster: sizes of inner
axes by which the heads and widths of most models can be split (assumed)."""
MOST_KINDS = 3
"""Kinds of devices of which all sets are parts; of more, the fastest ones are. Templates of all ten sets of four kinds
took 24 s for T5-large on 32 devices, where the fastest two are the best part."""

Within = tuple[Cluster, tuple[int, ...]]
"""A part as a cluster of its own, and [devices of the part] the number of each in the whole cluster."""


def clusters_within(cluster: Cluster, batch: int) -> Iterator[Within]:
    """Equal whole hosts, devices of one host, or all hosts of some kinds, as clusters with their devices' numbers.

    The numbers of hosts and of devices are divisors of those of the cluster, the largest number that divides the batch,
    the largest power of two, which the heads, widths and experts of most models can be split by, and, where divisors
    are far apart, the largest numbers that others divide (`SHARED_BY`): 22 of 23 devices may be split in two, 23 may
    not. Where links were measured one by one, the best connected ones stay, and those with far slower links are left
    out also where no such number does it. No device of a host is idle where other hosts are in use, since hosts share
    their links to the network.
    """
    for group in groups_of(cluster):
        node, hosts, inside = group
        rows = [(count, node.num_devices) for count in _counts(node.count, batch) | hosts.counts]
        own = _counts(node.num_devices, batch) | inside.counts
        rows += [(1, each) for each in own if each < node.num_devices]
        for count, each in sorted(rows, reverse=True):
            devices = group.devices(count, each)
            if len(devices) < cluster.num_devices:
                yield within(cluster, (replace(_with(node, each), count=count),), devices), devices
    for nodes in _of_kinds(cluster):
        of_nodes = (number for number, node in enumerate(cluster.nodes) for _ in range(node.count * node.num_devices))
        devices = tuple(device for device, number in enumerate(of_nodes) if number in nodes)
        yield within(cluster, tuple(cluster.nodes[number] for number in nodes), devices), devices


class Group(NamedTuple):
    """Equal hosts of a cluster."""

    node: Node
    """All of them as one row."""
    hosts: _Staying
    inside: _Staying
    """The devices of the host that stays first."""

    def devices(self, count: int, each: int) -> tuple[int, ...]:
        """Numbers of the devices of a number of whole hosts, or of a number of devices of one host."""
        some = self.hosts.members[:count] if each == self.node.num_devices else self.inside.members[:each]
        return tuple(sorted(itertools.chain.from_iterable(some)))


def groups_of(cluster: Cluster) -> Iterator[Group]:
    """The equal hosts of a cluster, which may stand in several rows."""
    first = 0
    matrix = None if cluster.bandwidth_GBps is None else np.array(cluster.bandwidth_GBps)
    for one, alike in itertools.groupby(cluster.nodes, key=lambda node: replace(node, count=1)):
        node = replace(one, count=sum(row.count for row in alike))
        each_first = range(first, first + node.count * node.num_devices, node.num_devices)
        hosts = _staying([tuple(range(at, at + node.num_devices)) for at in each_first], matrix)
        yield Group(node, hosts, _staying([(device,) for device in hosts.members[0]], matrix))
        first += node.count * node.num_devices


class _Staying(NamedTuple):
    """Hosts, or devices of a host, in the order in which they are kept: a part of n members has the first n."""

    members: Sequence[tuple[int, ...]]
    """The devices of each."""
    counts: set[int]
    """Numbers of members in parts without the members whose links are far slower than those of the others."""


def _staying(members: Sequence[tuple[int, ...]], matrix: Floats | None) -> _Staying:
    """The order in which hosts or devices are kept: that of their numbers, unless links were measured one by one.

    Args:
        members: devices of each host, or each device of one host.
        matrix: [devices, devices] measured bandwidth.
    """
    if matrix is None or not 1 < len(members) <= MAX_CUT:
        return _Staying(members, set())
    links = np.array([[matrix[np.ix_(one, other)].min() for other in members] for one in members])
    order = best_connected(links)
    # Number of the first ones of the order -> slowest link between any two of them, in either direction.
    slowest = {n: min(links[pair] for pair in itertools.permutations(order[:n], 2)) for n in range(2, len(order) + 1)}
    counts = {n for n in range(2, len(order)) if slowest[n] > FEW_TIMES * slowest[n + 1]}
    return _Staying([members[one] for one in order], counts)


def _of_kinds(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """For each set of kinds of devices, but not all kinds: the entries of `nodes` with these kinds, two or more."""
    kinds = [node.device for node in cluster.nodes]
    by_speed = sorted(set(kinds), key=lambda kind: (-max(cluster.devices[kind].peak_TFLOPs.values()), kind))
    # Of many kinds only the fastest ones: all sets of two or more are ten of four kinds, and 246 of eight.
    sizes = range(1, len(by_speed))
    if len(by_speed) <= MOST_KINDS:
        sets = [some for size in sizes for some in itertools.combinations(by_speed, size)]
    else:
        sets = [tuple(by_speed[:size]) for size in sizes]
    for some in sets:
        nodes = tuple(number for number, kind in enumerate(kinds) if kind in some)
        if len(nodes) > 1:
            yield nodes


def within(cluster: Cluster, nodes: tuple[Node, ...], devices: tuple[int, ...]) -> Cluster:
    """The cluster of some hosts or devices of another one."""
    matrix = cluster.bandwidth_GBps
    link = stated_link(cluster) if sum(node.count for node in nodes) > 1 else ""
    return replace(
        cluster,
        name="+".join(f"{node.count}x{node.num_devices}x{node.device}" for node in nodes) + link,
        nodes=nodes,
        devices={node.device: cluster.devices[node.device] for node in nodes},
        bandwidth_GBps=matrix and tuple(tuple(matrix[a][b] for b in devices) for a in devices),
    )


def stated_link(cluster: Cluster) -> str:
    """What the name of a cluster says of the link between its hosts, as in `@25Gbit`; empty where it says nothing."""
    _, at, link = cluster.name.partition("@")
    return at + link


def _with(node: Node, each: int) -> Node:
    """Hosts with some of their devices, beside which the others are idle."""
    return replace(node, num_devices=each, idle_devices=node.idle_devices + node.num_devices - each)


def _counts(number: int, batch: int) -> set[int]:
    """Divisors of a number, the largest divisor of the batch and the largest power of two up to it, and multiples of
    others where it has few divisors."""
    own = divisors(number)
    found = {*own, max(d for d in divisors(batch) if d <= number), 1 << (number.bit_length() - 1)}
    if any(more > FEW_TIMES * few for few, more in itertools.pairwise(own)):
        found |= {number // by * by for by in SHARED_BY if by < number}
    return found


def filled_within(cluster: Cluster, batch: int, fix: Fix) -> Iterator[Within]:
    """Parts that plans with the fixed degrees can fill, where these or the batch do not divide the number of devices.

    Those of `clusters_within` whose devices they divide; and of every kind of part the largest: equal whole hosts, some
    devices of one host, equally many of every host, in which ranks of tp stay inside a host, and the fastest hosts with
    a last one that is not full, also in the largest number whose replicas share the batch evenly.

    Args:
        cluster: all devices.
        batch: samples of a step.
        fix: the fixed degrees.
    """
    unit = prod(fix.degrees().values())
    seen: set[tuple[int, ...]] = set()
    # As many replicas as share the samples evenly, which trainers may insist on.
    even = _fastest_hosts(cluster, unit * max(d for d in divisors(batch) if d * unit <= cluster.num_devices))
    parts = itertools.chain(clusters_within(cluster, batch), _largest(cluster, unit, fix.tp or 1), [even])
    for part, devices in parts:
        if len(devices) % unit == 0 and 0 < len(devices) < cluster.num_devices and devices not in seen:
            seen.add(devices)
            yield part, devices


def _largest(cluster: Cluster, unit: int, tp: int) -> Iterator[Within]:
    """The largest parts of each kind whose devices `unit` divides, and the smallest, which all degrees together may
    fill; see `filled_within`."""
    for group in groups_of(cluster):
        node = group.node
        size = node.num_devices
        count = next((n for n in range(node.count, 0, -1) if n * size % unit == 0), 0)
        if count and count * size < cluster.num_devices:
            devices = group.devices(count, size)
            yield within(cluster, (replace(node, count=count),), devices), devices
        each = (size - 1) // unit * unit
        if each:
            devices = group.devices(1, each)
            yield within(cluster, (replace(_with(node, each), count=1),), devices), devices
        some = [n for n in range(size - 1, 0, -1) if n % tp == 0 and n * node.count % unit == 0]
        for each in {*some[:1], *some[-1:]} if node.count > 1 else ():
            devices = tuple(sorted(d for host in group.hosts.members for d in host[:each]))
            yield within(cluster, (_with(node, each),), devices), devices
    for number in {cluster.num_devices // unit * unit, unit}:
        yield _fastest_hosts(cluster, number)


def _fastest_hosts(cluster: Cluster, number: int) -> Within:
    """The part with `number` devices of the fastest hosts; the last of these hosts may be in it with some devices
    only."""
    speed = [max(cluster.devices[host.device].peak_TFLOPs.values()) for host in cluster.hosts]
    taken = [0] * len(speed)
    for host in sorted(range(len(speed)), key=lambda at: -speed[at]):
        taken[host] = min(cluster.hosts[host].num_devices, number - sum(taken))
    devices = tuple(
        device
        for _, own in itertools.groupby(range(cluster.num_devices), key=lambda device: cluster.node_of[device])
        for number_of, device in enumerate(own)
        if number_of < taken[cluster.node_of[device]]
    )
    rows = (replace(_with(host, n), count=1) for host, n in zip(cluster.hosts, taken, strict=True) if n)
    nodes = tuple(replace(row, count=len(list(alike))) for row, alike in itertools.groupby(rows))
    return within(cluster, nodes, devices), devices
