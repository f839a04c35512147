"""Parts of a cluster: some of its devices as clusters of their own.

A part is a number of equal whole hosts, some devices of one host, equally many devices of every host, or all hosts with
some kinds of devices (`clusters_within`). For fixed degrees that do not divide the number of devices, `filled_within`
gives the largest parts that such plans can fill.
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
"""If few numbers divide the size of a cluster, parts whose sizes are multiples of these numbers are considered too:
most models have heads and widths that can be split by such sizes of inner axes (assumed)."""
MOST_KINDS = 3
"""Largest number of kinds of devices for which every set of kinds is a part. With more kinds, only the fastest ones
together are: templates of all ten sets of four kinds took 24 s for T5-large on 32 devices, where the fastest two kinds
are the best part."""

Within = tuple[Cluster, tuple[int, ...]]
"""A part as a cluster of its own, and [devices of the part] the number of each in the whole cluster."""


def clusters_within(cluster: Cluster, batch: int) -> Iterator[Within]:
    """Parts of a cluster: equal whole hosts, devices of one host, or all hosts of some kinds.

    Not every number of hosts, or of devices of one host, is tried. The numbers are

    - the divisors of the number that the cluster has;
    - the largest one that divides the batch;
    - the largest power of two, by which the heads, widths and experts of most models can be split;
    - if the divisors are far apart, the largest multiple of each number in `SHARED_BY`: 22 devices can be split in two,
      23 cannot.

    If links were measured one by one, a part has the best connected hosts or devices; and there is also a part without
    those whose links are far slower. A part of several hosts has all devices of each, since the devices of a host share
    its links to the network. Only if the links inside a host are slower than those to the network, equally many devices
    of every host are parts too: fewer devices have larger shares of the faster links.

    Args:
        cluster: the whole cluster.
        batch: samples of a step.
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
        if node.count > 1 and _is_slow_inside(cluster, node):
            for each in sorted(own - {node.num_devices}, reverse=True):
                devices = group.of_every_host(each)
                yield within(cluster, (_with(node, each),), devices), devices
    for nodes in _of_kinds(cluster):
        of_nodes = (number for number, node in enumerate(cluster.nodes) for _ in range(node.count * node.num_devices))
        devices = tuple(device for device, number in enumerate(of_nodes) if number in nodes)
        yield within(cluster, tuple(cluster.nodes[number] for number in nodes), devices), devices


def _is_slow_inside(cluster: Cluster, node: Node) -> bool:
    """Whether the links inside a host have less bandwidth than its interfaces to the network have together."""
    if cluster.bandwidth_GBps is not None:
        return False
    inside, network = cluster.links[node.intra_node_link], cluster.links[node.inter_node_link]
    return inside.bandwidth_GBps < node.nics * network.bandwidth_GBps


class Group(NamedTuple):
    """Equal hosts of a cluster."""

    node: Node
    """All of them as one row."""
    hosts: _Staying
    inside: _Staying
    """The devices of the first host in this order, in the order in which parts keep them."""

    def devices(self, count: int, each: int) -> tuple[int, ...]:
        """Numbers of the devices of a number of whole hosts, or of a number of devices of one host."""
        some = self.hosts.members[:count] if each == self.node.num_devices else self.inside.members[:each]
        return tuple(sorted(itertools.chain.from_iterable(some)))

    def of_every_host(self, each: int) -> tuple[int, ...]:
        """Numbers of the first devices of every host."""
        return tuple(sorted(device for host in self.hosts.members for device in host[:each]))


def groups_of(cluster: Cluster) -> Iterator[Group]:
    """The groups of equal hosts of a cluster; successive entries of `nodes` that are equal make one group."""
    first = 0
    matrix = None if cluster.bandwidth_GBps is None else np.array(cluster.bandwidth_GBps)
    for one, alike in itertools.groupby(cluster.nodes, key=lambda node: replace(node, count=1)):
        node = replace(one, count=sum(row.count for row in alike))
        each_first = range(first, first + node.count * node.num_devices, node.num_devices)
        hosts = _staying([tuple(range(at, at + node.num_devices)) for at in each_first], matrix)
        yield Group(node, hosts, _staying([(device,) for device in hosts.members[0]], matrix))
        first += node.count * node.num_devices


class _Staying(NamedTuple):
    """Hosts, or devices of a host, in the order in which parts keep them: a part with n members has the first n."""

    members: Sequence[tuple[int, ...]]
    """The devices of each."""
    counts: set[int]
    """Numbers of members with which a part leaves out the members with far slower links."""


def _staying(members: Sequence[tuple[int, ...]], matrix: Floats | None) -> _Staying:
    """The order in which parts keep hosts or devices: the best connected first where links were measured one by one,
    otherwise that of their numbers.

    Args:
        members: devices of each host, or each device of one host.
        matrix: [devices, devices] measured bandwidth.
    """
    if matrix is None or not 1 < len(members) <= MAX_CUT:
        return _Staying(members, set())
    links = np.array([[matrix[np.ix_(one, other)].min() for other in members] for one in members])
    order = best_connected(links)
    # n -> slowest link, in either direction, between any two of the first n members.
    slowest = {n: min(links[pair] for pair in itertools.permutations(order[:n], 2)) for n in range(2, len(order) + 1)}
    counts = {n for n in range(2, len(order)) if slowest[n] > FEW_TIMES * slowest[n + 1]}
    return _Staying([members[one] for one in order], counts)


def _of_kinds(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """The parts with some kinds of devices: numbers of the entries of `nodes` with these kinds, at least two."""
    kinds = [node.device for node in cluster.nodes]
    by_speed = sorted(set(kinds), key=lambda kind: (-max(cluster.devices[kind].peak_TFLOPs.values()), kind))
    # With four kinds there would be ten sets of two or more, with eight kinds 246.
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
    """The link between hosts in the name of a cluster, as in `@25Gbit`; empty if the name has none."""
    _, at, link = cluster.name.partition("@")
    return at + link


def _with(node: Node, each: int) -> Node:
    """The same hosts with `each` devices in use; the others are idle."""
    return replace(node, num_devices=each, idle_devices=node.idle_devices + node.num_devices - each)


def _counts(number: int, batch: int) -> set[int]:
    """The sizes of parts among `number` hosts or devices, see `clusters_within`."""
    own = divisors(number)
    found = {*own, max(d for d in divisors(batch) if d <= number), 1 << (number.bit_length() - 1)}
    if any(more > FEW_TIMES * few for few, more in itertools.pairwise(own)):
        found |= {number // by * by for by in SHARED_BY if by < number}
    return found


def filled_within(cluster: Cluster, batch: int, fix: Fix) -> Iterator[Within]:
    """Parts whose numbers of devices are multiples of the product of the fixed degrees.

    These are the parts of `clusters_within` with such a number of devices, and the largest part of each of these kinds:
    equal whole hosts; some devices of one host; equally many devices of every host, so that ranks of tp stay inside a
    host; and the fastest hosts, of which the last one may be in the part with some of its devices only. The last kind
    is also considered with the largest number of devices whose replicas share the batch evenly.

    Args:
        cluster: all devices.
        batch: samples of a step.
        fix: the fixed degrees.
    """
    unit = prod(fix.degrees().values())
    seen: set[tuple[int, ...]] = set()
    # Some trainers require that replicas share the samples evenly.
    even = _fastest_hosts(cluster, unit * max(d for d in divisors(batch) if d * unit <= cluster.num_devices))
    parts = itertools.chain(clusters_within(cluster, batch), _largest(cluster, unit, fix.tp or 1), [even])
    for part, devices in parts:
        if len(devices) % unit == 0 and 0 < len(devices) < cluster.num_devices and devices not in seen:
            seen.add(devices)
            yield part, devices


def _largest(cluster: Cluster, unit: int, tp: int) -> Iterator[Within]:
    """The largest parts of each kind whose number of devices is a multiple of `unit`, and the fastest `unit` devices;
    see `filled_within`."""
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
            devices = group.of_every_host(each)
            yield within(cluster, (_with(node, each),), devices), devices
    for number in {cluster.num_devices // unit * unit, unit}:
        yield _fastest_hosts(cluster, number)


def _fastest_hosts(cluster: Cluster, number: int) -> Within:
    """The part with `number` devices of the fastest hosts; of the last of these hosts it may have some devices only."""
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
