"""The devices of DAPPLE's planner: numbered sets of devices on which a stage may be, and the links between them.

See `agents.planners.dapple`. Units: seconds, bytes.
"""

from __future__ import annotations

import itertools
import math

from agents.planners.dapple_formulas import Counts, Network, placements
from agents.planners.kernels.dapple import WAY_DTYPE, WayRow
from automap.cluster import Cluster
from automap.group_links import group_link
from automap.price.kernels.array_types import Rows, rows_of
from automap.space.stage_sizes import MAX_PARTS


class Places:
    """The sets of devices of a cluster on which a stage may be. Several searches use the same object.

    A set gets its number when it is first needed.

    Attributes:
        counts: [sets] devices of each host in the set.
        totals: [sets] number of devices of the set.
        exposed: [sets] number of the kind of the set's gradient reduction, a value of `kinds`.
        kinds: kind of a reduction -> its number. A kind is the seconds a byte, the number of devices, and whether these
            are all devices.
    """

    def __init__(self, network: Network, sizes: Counts) -> None:
        """Begins with the set of all devices.

        Args:
            network: links between devices.
            sizes: devices of each host.
        """
        self.network, self.sizes = network, sizes
        self.counts: list[Counts] = []
        self.totals: list[int] = []
        self.exposed: list[int] = []
        self.kinds: dict[tuple[float, int, bool], int] = {}
        # On large clusters the devices of a stage are a multiple of this number.
        self.part = math.ceil(sum(sizes) / MAX_PARTS)
        self._numbers: dict[Counts, int] = {}
        self._ways: dict[int, Rows] = {}
        self._sends: dict[tuple[int, int], float] = {}
        self.all = self.number(sizes)

    def number(self, counts: Counts) -> int:
        """The number of the set with these devices of each host."""
        if counts not in self._numbers:
            self._numbers[counts] = len(self.counts)
            kind = (self.network.reduce_s(counts), sum(counts), counts == self.sizes)
            self.exposed.append(self.kinds.setdefault(kind, len(self.kinds)))
            self.counts.append(counts)
            self.totals.append(sum(counts))
        return self._numbers[counts]

    def ways(self, free: int) -> Rows:
        """All stages that take some of the devices of a set, as rows of `WayRow`: those with the fewest devices first.

        Args:
            free: number of the set of free devices.
        """
        if free not in self._ways:
            there, found = self.counts[free], []
            for wanted in range(self.part, self.totals[free], self.part):
                for counts in placements(there, self.sizes, wanted):
                    mine = self.number(counts)
                    left = self.number(tuple(a - b for a, b in zip(there, counts, strict=True)))
                    found.append(
                        WayRow(
                            number=mine,
                            devices=wanted,
                            left=self.totals[left],
                            state=left,
                            exposed=self.exposed[mine],
                            rest_exposed=self.exposed[left],
                            rest_send_s=self.send_s(mine, left),
                        )
                    )
            self._ways[free] = rows_of(found, WAY_DTYPE)
        return self._ways[free]

    def send_s(self, senders: int, receivers: int) -> float:
        """Seconds to send a byte from one set to another, see `Network`."""
        key = (senders, receivers)
        if key not in self._sends:
            self._sends[key] = self.network.send_s(self.counts[senders], self.counts[receivers])
        return self._sends[key]


class ClusterNetwork:
    """The links of a cluster, as they are priced; a `Network`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._first = [0, *itertools.accumulate(host.num_devices for host in cluster.hosts)]
        self._rates: dict[tuple[int, int], float] = {}

    def _rate(self, one: int, other: int) -> float:
        """Bytes/s between the first devices of two hosts."""
        if (one, other) not in self._rates:
            pair = self._first[one], self._first[other]
            self._rates[one, other] = group_link(self._cluster, pair).bytes_per_s
        return self._rates[one, other]

    def _devices(self, counts: Counts) -> list[int]:
        return [first + i for first, count in zip(self._first, counts, strict=False) for i in range(count)]

    def reduce_s(self, counts: Counts) -> float:
        """See `Network`: a ring sends 2 (n - 1) / n of the bytes over its slowest link."""
        total = sum(counts)
        return 2.0 * (total - 1) / total / group_link(self._cluster, self._devices(counts)).bytes_per_s

    def send_s(self, senders: Counts, receivers: Counts) -> float:
        """See `Network`: every device of the smaller stage sends or receives its share over the slowest link needed.

        The share of a stage's data that a host has is that of its devices. Data leaves the hosts with a larger share of
        the sending stage than of the receiving one.
        """
        one, other = sum(senders), sum(receivers)
        leaving = [h for h, (a, b) in enumerate(zip(senders, receivers, strict=True)) if a / one > b / other]
        arriving = [h for h, (a, b) in enumerate(zip(senders, receivers, strict=True)) if a / one < b / other]
        if leaving:
            rate = min(self._rate(leaving[0], arriving[0]), self._rate(leaving[-1], arriving[-1]))
        else:
            links = {self._cluster.hosts[h].intra_node_link for h, count in enumerate(senders) if count}
            rate = min(self._cluster.links[name].bytes_per_s for name in links)
        return 1.0 / (min(one, other) * rate)
