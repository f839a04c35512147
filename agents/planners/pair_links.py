"""Pair links: the bandwidth between two devices of a cluster, and the least one between many.

Without measured bandwidths, it depends only on the kinds of the two hosts and on whether these are one host or two. So
nothing here grows with the square of the number of devices, except where a cluster states such a matrix itself. Units:
bytes/s.
"""

from __future__ import annotations

import numpy as np

from automap.arrays import Floats, Ints
from automap.cluster import Cluster
from automap.group_links import group_link


class PairLinks:
    """The bandwidth between any two devices of a cluster: measured, or that of the link between them."""

    def __init__(self, cluster: Cluster) -> None:
        """Looks up one link for each pair of kinds of hosts."""
        self._measured: Floats | None = None
        if cluster.bandwidth_GBps is not None:
            self._measured = np.array(cluster.bandwidth_GBps) * 1e9
            np.fill_diagonal(self._measured, np.inf)
        self._places = cluster.places
        # Hosts of the same kind have the same links.
        kinds, self._kinds = np.unique(cluster.alike, return_inverse=True)
        firsts = np.searchsorted(cluster.places, np.arange(len(cluster.hosts)))
        self._within, self._between = np.full(len(kinds), np.inf), np.full((len(kinds), len(kinds)), np.inf)
        for kind in range(len(kinds)):
            hosts = np.flatnonzero(self._kinds == kind)
            first = int(firsts[hosts[0]])
            if cluster.hosts[hosts[0]].num_devices > 1:
                self._within[kind] = group_link(cluster, (first, first + 1)).bytes_per_s
            for other in range(len(kinds)):
                others = np.flatnonzero((self._kinds == other) & (np.arange(len(self._kinds)) != hosts[0]))
                if len(others):
                    self._between[kind, other] = group_link(cluster, (first, int(firsts[others[0]]))).bytes_per_s

    def matrix(self) -> Floats:
        """[devices, devices] bandwidth from each device to each; 0 from a device to itself."""
        if self._measured is not None:
            found = self._measured.copy()
        else:
            kinds, near = self._kinds[self._places], self._places[:, None] == self._places
            found = np.where(near, self._within[kinds, None], self._between[kinds[:, None], kinds])
        np.fill_diagonal(found, 0.0)
        return found

    def least_to(self, senders: Ints, receivers: Ints) -> float:
        """Least bandwidth from any of some devices to any of others, none of which is in both; infinite without any."""
        if self._measured is not None:
            return float(self._measured[np.ix_(senders, receivers)].min(initial=np.inf))
        first, second = np.unique(self._places[senders]), np.unique(self._places[receivers])
        return self._least(np.intersect1d(first, second), first, second)

    def least_within(self, devices: Ints) -> float:
        """Least bandwidth between any two of some devices, in either direction; infinite for a single device."""
        if self._measured is not None:
            return float(self._measured[np.ix_(devices, devices)].min(initial=np.inf))
        hosts, counts = np.unique(self._places[devices], return_counts=True)
        return self._least(hosts[counts > 1], hosts, hosts)

    def _least(self, shared: Ints, first: Ints, second: Ints) -> float:
        """Least bandwidth inside the hosts `shared`, and between two different hosts of `first` and `second`."""
        inside = self._within[self._kinds[shared]].min(initial=np.inf)
        one, other = self._few(first), self._few(second)
        between = self._between[np.ix_(self._kinds[one], self._kinds[other])]
        return float(min(inside, between[one[:, None] != other].min(initial=np.inf)))

    def _few(self, hosts: Ints) -> Ints:
        """At most two of some hosts of each kind: enough for a pair of different hosts of any two kinds, if there is
        one."""
        if len(hosts) <= 2:
            return hosts
        if len(self._within) == 1:
            return hosts[[0, -1]]
        kinds = self._kinds[hosts]
        _, firsts = np.unique(kinds, return_index=True)
        _, lasts = np.unique(kinds[::-1], return_index=True)
        found: Ints = np.unique(np.concatenate([hosts[firsts], hosts[::-1][lasts]]))
        return found
