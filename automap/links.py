"""Kinds of links, and the names of those between hosts as people write them: `25Gbps` and `25GbE` mean `25Gbit`.

A rate that no link has, such as `40Gbit`, is Ethernet of this rate: below 100 Gbit/s with TCP, from there on with RDMA.
Which links there are is known to `automap.device_kinds`. Units: those named in the data keys; properties are in
bytes/s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from automap.errors import ClusterError, one_of
from automap.fitted_curves import COLLECTIVES, CollectiveCurve, Efficiency
from automap.records import Range

LEAST_RATE = 1e-6
"""Least rate that is read, in TFLOP/s or GB/s (assumed)."""
Rate = Annotated[float, Range(LEAST_RATE, 1e6)]
"""A rate in TFLOP/s or GB/s, up to a thousand times that of the fastest device or link of 2026."""
_BITS = re.compile(r"(?P<number>\d{1,6}(\.\d{1,3})?) ?(?:(?i:g(?:iga)?bits?(?:/s|ps)?|gbe)|[Gg]bps|Gb/s|Gb)", re.ASCII)
"""A rate in Gbit/s. A capital B, as in 25GB/s, means bytes."""
_BYTES = re.compile(r"(?P<number>\d{1,6}(\.\d{1,3})?) ?GB(?:/s|ps)?", re.ASCII)
"""A rate in GB/s, which is refused: links between hosts are named by their bits."""
_TCP, _RDMA = "10gbit", "100gbit"
"""The links that Ethernet of any other rate is like: below `_FIRST_RDMA`, and from there on."""
_FIRST_RDMA = 100.0
"""Gbit/s from which on Ethernet is taken to carry RDMA (assumed: that of the network cards of servers with GPUs)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One kind of link, one direction."""

    name: str
    scope: Literal["intra", "inter"]
    """`intra`: inside a node, rates of each device. `inter`: between nodes, rates of each network interface."""
    bandwidth_GBps: Rate  # noqa: N815
    efficiency: Efficiency
    """Share of the line rate that collectives reach."""
    share_by_ranks: Mapping[str, Annotated[float, Range(1e-3, 1)]] = field(default_factory=dict)
    """Number of ranks of a group -> share of the bandwidth that the group has, for links that form a mesh or meet in
    the processors of the host; groups of other sizes have the full bandwidth."""
    collectives: Mapping[str, CollectiveCurve] = field(default_factory=dict)
    """Kind of collective -> measured curve inside a host, as shares of the bandwidth. Collectives without a curve run
    at `efficiency` with the constants that all links share."""
    aliases: tuple[str, ...] = ()
    schema: Literal["automap.link/1"] = "automap.link/1"
    source: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        for kind in self.collectives:
            if kind not in COLLECTIVES:
                repair = "Use " + ", ".join(COLLECTIVES) + "."
                raise ClusterError("unknown kind of collective", field="collectives", value=kind, repair=repair)
        for size in self.share_by_ranks:
            if not size.isdecimal() or int(size) < 2:
                repair = 'Write a number of ranks of 2 or more, as in {"2": 0.5}.'
                raise ClusterError("not a number of ranks", field="share_by_ranks", value=size, repair=repair)

    @property
    def bytes_per_s(self) -> float:
        """Achieved bandwidth."""
        return self.bandwidth_GBps * 1e9 * self.efficiency

    def group_bytes_per_s(self, size: int) -> float:
        """Achieved bandwidth of a group of `size` devices."""
        return self.bytes_per_s * self.share_by_ranks.get(str(size), 1.0)


def between_hosts(known: Mapping[str, Link], text: str, field: str) -> Link:
    """The link between hosts that a text names.

    Args:
        known: name or alias in lower case -> link.
        text: a name, an alias, or a rate in Gbit/s in a usual spelling.
        field: where the name stands, for the error.

    Raises:
        ClusterError: there is none of this name, or it joins the devices of one host.
    """
    bits = _BITS.fullmatch(text.strip())
    gbit = None if bits is None else float(bits["number"])
    link = known.get(text.strip().lower()) or known.get("" if gbit is None else f"{gbit:.10g}gbit")
    if link is None and gbit:
        return _ethernet(known[_TCP if gbit < _FIRST_RDMA else _RDMA], gbit)
    if link is not None and link.scope == "inter":
        return link
    raise ClusterError(
        "no link between hosts has this name" if link is None else "this link does not connect hosts",
        field=field,
        value=text,
        repair=_repair(known, text),
    )


def _ethernet(like: Link, gbit: float) -> Link:
    """Ethernet of any rate, with the efficiency that all Ethernet has."""
    source = {**(like.source or {}), "bandwidth_GBps": f"stated: {gbit:.10g} Gbit/s line rate"}
    name = f"ethernet-{gbit:.10g}"
    return replace(like, name=name, aliases=(f"{gbit:.10g}Gbit",), bandwidth_GBps=gbit / 8.0, source=source)


def _repair(known: Mapping[str, Link], text: str) -> str:
    """What to write in place of a name that is not a link between hosts."""
    in_bytes = _BYTES.fullmatch(text.strip())
    if in_bytes is not None and float(in_bytes["number"]):
        return f"Write the rate in bits, @{float(in_bytes['number']) * 8.0:.10g}Gbit."
    # Each link once, by the name that is written most often, the slowest first.
    ordered = sorted((one for one in known.values() if one.scope == "inter"), key=_order)
    listed = {one.name: (*one.aliases, one.name)[0] for one in ordered}
    # The rate with the nearest digits is seldom the one that is meant.
    names = f"Use one of {', '.join(listed.values())}." if text[:1].isdigit() else one_of(listed.values(), text)
    return f"{names[:-1]}, any other rate as in 40Gbit, or describe a link of yours in a file (docs/plan-format.md)."


def _order(link: Link) -> tuple[float, str]:
    return link.bandwidth_GBps, link.name
