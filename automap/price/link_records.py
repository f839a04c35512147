"""Latency and bandwidth of groups of devices, and of neighbours in a pipeline, on the links of a cluster.

Units: seconds, bytes/s.
"""

from __future__ import annotations

import math

import numpy as np

from automap.arrays import Ints
from automap.fitted_curves import COLLECTIVES, CollectiveCurve
from automap.group_links import GroupLink, group_link
from automap.price.curves import shared
from automap.price.kernels.array_types import Record, record_of
from automap.price.kernels.collectives import RINGS, host_link
from automap.price.kernels.records import ALL_GATHER, ALL_TO_ALL, NUM_COLLECTIVES, SEND_RECV
from automap.price.kernels.stage_records import LinkRow
from automap.problem import Problem

WAITED_FOR = 7.0
"""Largest number of other ranks of a group that counts in the host time of a collective: the seven others of a host.
Published runs show no longer waits in larger groups."""

SLOWEST_LINE = 6.25e9
"""Bytes/s of the network interfaces, for each device of a host, on the slowest clusters to which
`gather_bandwidth_share` was fitted: four of 100 Gbit/s for eight devices (BLOOM, InternEvo). On a slower network,
gathers are assumed to reach the same rate as there, but at most that of rings."""


class Sends:
    """Latency and bandwidth between consecutive stages of a pipeline; equal pairs of stages are computed once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._sends: dict[tuple[int, int, int], tuple[float, float]] = {}
        self._pairs: dict[tuple[float, ...], tuple[float, float]] = {}

    def of(self, patterns: tuple[int, int], senders: Ints, receivers: Ints) -> tuple[float, float]:
        """Seconds of latency, and bytes/s of each sender when all send at once, the i-th sender to the i-th receiver.

        Where the stages differ in size, several devices of the larger stage have the same partner in the smaller one,
        and divide its link. Devices of a stage that send to another host divide the network interfaces of their host
        evenly. Each device uses at most one interface, or its even share of all interfaces of the host if that is more.

        Args:
            patterns: numbers of the placements of senders and of receivers on hosts, see `PipelineLayouts.pattern`.
            senders: [devices] of one stage.
            receivers: [devices] of the next stage.
        """
        cluster = self.problem.cluster
        key = (*patterns, int(cluster.places[receivers[0]] - cluster.places[senders[0]]))
        if key not in self._sends:
            most = max(len(senders), len(receivers))
            pairs = np.stack([side[np.arange(most) * len(side) // most] for side in (senders, receivers)])
            hosts = cluster.places[pairs]
            # For each pair, the numbers of devices of both stages that share the network interfaces of its hosts.
            crossing = hosts[0] != hosts[1]
            sharing = np.stack(
                [
                    np.bincount(cluster.places[np.unique(mine[crossing])], minlength=len(cluster.hosts))[at]
                    for mine, at in zip(pairs, hosts, strict=True)
                ]
            )
            if cluster.bandwidth_GBps is None:
                # Pairs on equal hosts are equal if equally many devices share their interfaces.
                one, other = cluster.alike[hosts].tolist()
                kinds = zip(one, other, crossing.tolist(), *sharing.tolist(), strict=True)
                chosen = list(dict(zip(kinds, range(most), strict=True)).values())
            else:
                chosen = list(range(most))
            # A sender with several receivers sends to one at a time, so fewer receivers of a host receive at a time.
            turns = max(1.0, len(receivers) / len(senders))
            found = [
                self._send_one(int(pairs[0, i]), int(pairs[1, i]), (int(sharing[0, i]), int(sharing[1, i]) / turns))
                for i in chosen
            ]
            share = max(1.0, len(senders) / len(receivers))
            self._sends[key] = max(latency for latency, _ in found), min(rate for _, rate in found) / share
        return self._sends[key]

    def _send_one(self, sender: int, receiver: int, sharing: tuple[float, float]) -> tuple[float, float]:
        """Seconds of latency and bytes/s from one device to another.

        Args:
            sender: its number.
            receiver: its number.
            sharing: number of devices that divide the network interfaces of the sender's host at a time, and of the
                receiver's; used if these are two hosts.
        """
        cluster = self.problem.cluster
        one, other = cluster.node_of[sender], cluster.node_of[receiver]
        # Devices on equal hosts are equal.
        key = (int(cluster.alike[one]), int(cluster.alike[other]), one == other, *sharing)
        if cluster.bandwidth_GBps is not None:
            key = (sender, receiver, False, 0, 0)
        if key not in self._pairs:
            link = group_link(cluster, (sender, receiver))
            record = link_record(link, 1.0)
            if COLLECTIVES[SEND_RECV] in link.collectives:
                rate = float(record.bytes_per_s[SEND_RECV])
            elif cluster.bandwidth_GBps is not None:
                rate = link.bytes_per_s
            elif link.hosts > 1:
                rate = min(self._between_hosts(host, each) for host, each in zip((one, other), sharing, strict=True))
            else:
                rate = shared("send_share") * cluster.links[cluster.hosts[one].intra_node_link].bytes_per_s
            self._pairs[key] = max(0.0, float(record.latency_s[SEND_RECV])), rate
        return self._pairs[key]

    def _between_hosts(self, number: int, sharing: float) -> float:
        """Bytes/s of each device of a host that sends to other hosts.

        Args:
            number: number of the host.
            sharing: number of its devices that send at the same time.
        """
        host = self.problem.cluster.hosts[number]
        most = max(1.0, host.nics_per_device)
        return self.problem.cluster.links[host.inter_node_link].bytes_per_s * min(most, host.nics / sharing)


def own_link(curve: CollectiveCurve, size: int, bytes_per_s: float) -> Record:
    """The link of a group of `size` ranks by a measured curve, a share of `bytes_per_s`; a `LinkRow`."""
    return host_link(
        size,
        latency_s=curve.latency_us * 1e-6,
        growth=curve.latency_growth,
        bytes_per_s=bytes_per_s * curve.efficiency,
        small_group=curve.small_group,
        ramp=curve.ramp,
    )


def link_record(link: GroupLink, gather_share: float) -> Record:
    """The `LinkRow` of a group, for `collective_s`.

    Inside a host, small groups reach a lower bandwidth, and so do small messages; a kind of collective with a measured
    curve of its own uses that. Between hosts, the latency of a ring grows with the ranks, and that of a tree with its
    levels. There, ZeRO's gathers reach the share `gather_share` of the line rate or of `SLOWEST_LINE`, whichever is
    more, but at most the bandwidth of rings.

    Args:
        link: the group and its link.
        gather_share: share of the line rate between hosts that ZeRO's gathers reach.
    """
    latency = shared("node_latency_us") * 1e-6
    is_between = link.hosts > 1
    if is_between:
        least = SLOWEST_LINE * link.size / link.hosts
        tree = latency + shared("tree_level_us") * 1e-6 * math.log2(link.hosts)
        record = record_of(
            LinkRow(
                latency_s=np.full(NUM_COLLECTIVES, tree),
                bytes_per_s=np.full(NUM_COLLECTIVES, link.bytes_per_s),
                ramp=np.zeros(NUM_COLLECTIVES),
                gather_bytes_per_s=min(link.bytes_per_s, gather_share * max(link.line_bytes_per_s, least)),
                host_time=0.0,
            )
        )
        record.bytes_per_s[ALL_TO_ALL] = link.exchange_bytes_per_s
        record.latency_s[list(RINGS)] = latency + shared("ring_us") * 1e-6 * (link.size - 1.0)
    else:
        record = host_link(
            link.size,
            latency_s=latency / shared("node_over_device"),
            growth=shared("latency_growth"),
            bytes_per_s=link.bytes_per_s,
            small_group=shared("small_group"),
            ramp=shared("ramp"),
        )
        for name, curve in link.collectives.items():
            kind, own = COLLECTIVES.index(name), own_link(curve, link.size, link.line_bytes_per_s)
            for field_name in ("latency_s", "bytes_per_s", "ramp"):
                record[field_name][kind] = own[field_name][kind]
        record.gather_bytes_per_s = record.bytes_per_s[ALL_GATHER]
    record.host_time = min(link.size - 1.0, WAITED_FOR) ** shared("group_wait_exponent")
    return record
