"""Candidates of a recommendation: the clusters that the user names, and parts of them.

Parts are candidates too, because fewer devices may be fast enough, and a step on them mostly costs less. Units:
seconds, device-seconds, the user's currency.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agents.results.cluster_parts import clusters_within
from automap.cluster import Cluster, parse_cluster
from automap.errors import ClusterError, ProblemError
from automap.plan import Plan, format_devices

HOUR = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A cluster, or a part of one, with what the best template on it takes."""

    cluster: str
    """Text of the cluster. For a part it is a preset such as `2x8xH100` where one describes it, and otherwise it says
    which devices of which cluster it has."""
    where: Cluster = field(repr=False)
    """The cluster itself."""
    part_of: str | None = None
    """Text of the cluster that the user names and of which this one is a part; null for a cluster that is named."""
    devices: tuple[int, ...] = field(repr=False)
    """[devices of the candidate] number of each in the cluster that the user names."""
    cost_per_hour: float | None
    """Price of all devices for an hour; null without prices."""
    lower_bound_s: float | None = None
    """Step time that no plan on it goes below; null if the problem cannot be posed on it."""
    step_time_s: float | None = None
    """Step time of the best template; null where there is none, or where none was looked for, because another candidate
    costs no more, has no more devices, and is faster than any plan on this one."""
    fault: str | None = None
    """Why there is no step time."""
    plan: Plan | None = None
    """The best template, of those that are named in a recommendation."""

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @property
    def cost_per_step(self) -> float | None:
        """Price of one step; None without prices or a template."""
        if self.step_time_s is None or self.cost_per_hour is None:
            return None
        return self.cost_per_hour * self.step_time_s / HOUR

    @property
    def device_seconds(self) -> float | None:
        """Device-seconds of one step; None without a template."""
        return None if self.step_time_s is None else self.num_devices * self.step_time_s


def named_candidates(clusters: Sequence[str], prices: Mapping[str, float] | None) -> list[Candidate]:
    """The clusters that the user names as candidates.

    Args:
        clusters: texts of the clusters.
        prices: kind of device -> price of a device for an hour; None = devices cost alike.

    Raises:
        ClusterError: a text is not understood.
        ProblemError: a device has no price.
    """
    found = []
    for text in clusters:
        where = parse_cluster(text)
        cost = None if prices is None else _cost(where, prices)
        found.append(Candidate(cluster=text, where=where, devices=tuple(range(where.num_devices)), cost_per_hour=cost))
    return found


def with_parts(named: Sequence[Candidate], batch: int, prices: Mapping[str, float] | None) -> list[Candidate]:
    """Each candidate, followed by the parts of its cluster that are not candidates yet.

    Args:
        named: the clusters that the user names.
        batch: samples of a step.
        prices: see `named_candidates`.
    """
    seen = {_sameness(one.where) for one in named}
    found = []
    for one in named:
        found.append(one)
        for part, devices in clusters_within(one.where, batch):
            same = _sameness(part)
            if same in seen:
                continue
            seen.add(same)
            text = part.name if _is_preset(part) else f"{part.name} of {one.cluster}, devices {format_devices(devices)}"
            cost = None if prices is None else _cost(part, prices)
            found.append(Candidate(cluster=text, where=part, part_of=one.cluster, devices=devices, cost_per_hour=cost))
    return found


def _is_preset(part: Cluster) -> bool:
    """Whether the name of a part, read as a text, is this part."""
    try:
        return _sameness(parse_cluster(part.name)) == _sameness(part)
    except ClusterError:
        return False


def _sameness(cluster: Cluster) -> tuple[Hashable, ...]:
    """What two clusters have in common whose plans take equally long: all but their names. The links of a single host
    to others do not matter."""
    hosts = [replace(host, count=1) for host in cluster.hosts]
    links = {host.intra_node_link for host in hosts} | {host.inter_node_link for host in hosts if len(hosts) > 1}
    if len(hosts) == 1:
        hosts = [replace(hosts[0], inter_node_link="", nics=1.0, idle_devices=0)]
    rows = tuple((host, len(list(alike))) for host, alike in itertools.groupby(hosts))
    described = tuple(sorted((name, repr(cluster.links[name])) for name in links))
    kinds = tuple(sorted((node.device, repr(cluster.devices[node.device])) for node in hosts))
    return rows, described, kinds, cluster.bandwidth_GBps, repr(cluster.constants)


def _cost(cluster: Cluster, prices: Mapping[str, float]) -> float:
    """Price of a cluster for an hour.

    Raises:
        ProblemError: one of its devices has no price.
    """
    total = 0.0
    for host in cluster.hosts:
        names = {host.device, *cluster.devices[host.device].aliases}
        own = [price for name, price in prices.items() if name.lower() in {known.lower() for known in names}]
        if not own:
            repair = f"Add its price, as in {host.device}=2.5: there are prices of {', '.join(prices)}."
            raise ProblemError("no price of this device", field="prices", value=host.device, repair=repair)
        total += own[0] * host.num_devices
    return total
