"""Bandwidth of the collectives of a group of devices: its slowest link and its share of the links between hosts.

Units: bytes/s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from automap.cluster import Cluster
from automap.fitted_curves import CollectiveCurve


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLink:
    """Bandwidths of the collectives over one group of devices."""

    size: int
    hosts: int
    bytes_per_s: float
    """Bandwidth of each device in a ring, limited by the slowest link of the ring."""
    exchange_bytes_per_s: float
    """Bandwidth of each device in an all-to-all: data for other hosts goes through the device's share of its host's
    network interfaces."""
    line_bytes_per_s: float
    """Line rate of the network interfaces that the group has on a host, or of the devices' link if it is in one
    host."""
    collectives: Mapping[str, CollectiveCurve] = field(default_factory=dict)
    """Measured curves of collectives inside a host, see `Link`, as shares of `line_bytes_per_s`."""


def group_link(cluster: Cluster, ranks: Sequence[int]) -> GroupLink:
    """Bandwidths of collectives over `ranks` while the other devices of their hosts communicate as much.

    Inside a host every device has its own link. Between hosts, a ring that contains r of the d devices of a host has
    r / d of its network interfaces: groups that communicate at the same time divide them evenly.
    """
    size = len(ranks)
    if size <= 1:
        endless = float("inf")
        return GroupLink(size=1, hosts=1, bytes_per_s=endless, exchange_bytes_per_s=endless, line_bytes_per_s=endless)
    nodes, counts = np.unique(cluster.places[np.asarray(ranks)], return_counts=True)
    hosts = len(nodes)
    # Equal hosts with equally many ranks are alike.
    distinct = set(zip(cluster.alike[nodes].tolist(), counts.tolist(), strict=True))
    bandwidth = exchange = line = float("inf")
    efficiency = 0.0
    collectives: Mapping[str, CollectiveCurve] = {}
    for node, here in distinct:
        host = cluster.hosts[node]
        intra, inter = cluster.links[host.intra_node_link], cluster.links[host.inter_node_link]
        if here > 1:
            bandwidth = min(bandwidth, intra.group_bytes_per_s(here))
        if hosts == 1:
            line = intra.bandwidth_GBps * 1e9 * intra.share_by_ranks.get(str(here), 1.0)
            collectives = intra.collectives
        if hosts > 1:
            share = host.nics_per_device * here
            bandwidth = min(bandwidth, inter.bytes_per_s * share)
            exchange = min(exchange, inter.bytes_per_s * share / here * (size - 1) / (size - here))
            line = min(line, inter.bandwidth_GBps * 1e9 * share)
            efficiency = max(efficiency, inter.efficiency)
    exchange = min(exchange, bandwidth)
    matrix = cluster.bandwidth_GBps
    if matrix is not None:
        bandwidth = exchange = min(matrix[a][b] for a in ranks for b in ranks if a != b) * 1e9
        # The matrix says what rings achieve, and not the line rate that they achieve it of.
        line = bandwidth / (efficiency or 1.0)
        collectives = {}
    return GroupLink(
        size=size,
        hosts=hosts,
        bytes_per_s=bandwidth,
        exchange_bytes_per_s=exchange,
        line_bytes_per_s=line,
        collectives=collectives,
    )
