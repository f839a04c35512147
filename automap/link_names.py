"""Names of links between hosts, as people write them: `25Gbps` and `25GbE` mean the link `25Gbit`.

A rate that no link has, such as `40Gbit`, is Ethernet of this rate: all Ethernet has one fitted efficiency. The links
that there are come from `automap.device_kinds`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from automap.device_kinds import Link
from automap.errors import ClusterError, one_of

_BITS = re.compile(r"(?P<number>\d{1,6}(\.\d{1,3})?) ?(?:(?i:g(?:iga)?bits?(?:/s|ps)?|gbe)|[Gg]bps|Gb/s|Gb)", re.ASCII)
"""A rate in Gbit/s. A capital B, as in 25GB/s, means bytes."""
_BYTES = re.compile(r"(?P<number>\d{1,6}(\.\d{1,3})?) ?GB(?:/s|ps)?", re.ASCII)
"""A rate in GB/s, which is refused: links between hosts are named by their bits."""
_ETHERNET = "10gbit"
"""The link that Ethernet of any other rate is like."""


def between_hosts(known: Mapping[str, Link], text: str) -> Link:
    """The link between hosts that a text names.

    Args:
        known: name or alias in lower case -> link.
        text: a name, an alias, or a rate in Gbit/s in a usual spelling.

    Raises:
        ClusterError: there is none of this name, or it joins the devices of one host.
    """
    bits = _BITS.fullmatch(text.strip())
    gbit = None if bits is None else float(bits["number"])
    link = known.get(text.strip().lower()) or known.get("" if gbit is None else f"{gbit:.10g}gbit")
    if link is None and gbit:
        return _ethernet(known[_ETHERNET], gbit)
    if link is not None and link.scope == "inter":
        return link
    raise ClusterError(
        "no link between hosts has this name" if link is None else "this link does not connect hosts",
        field="cluster",
        value=text,
        repair=_repair(known, text),
    )


def _ethernet(like: Link, gbit: float) -> Link:
    """Ethernet of any rate, with the efficiency that all Ethernet has."""
    source = {**(like.source or {}), "bandwidth_GBps": f"stated: {gbit:.10g} Gbit/s line rate"}
    name = f"ethernet-{gbit:.10g}"
    return replace(like, name=name, aliases=(f"{gbit:.10g}Gbit",), bandwidth_GBps=gbit / 8.0, source=source)


def _repair(known: Mapping[str, Link], text: str) -> str:
    """What to write in place of a name that is no link between hosts."""
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
