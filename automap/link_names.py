"""Names of links between hosts, as people write them: `25Gbps` and `25GbE` mean the link `25Gbit`.

Knows no links: `automap.cluster` says which there are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol, TypeVar

from automap.errors import ClusterError, one_of

_BITS = re.compile(r"(?P<number>\d+) ?(?:(?i:g(?:iga)?bits?(?:/s|ps)?|gbe)|[Gg]bps|Gb/s|Gb)")
"""A rate in Gbit/s. A capital B, as in 25GB/s, means bytes."""


class Named(Protocol):
    """A link: what it is called, what it joins, and its line rate in GB/s."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def aliases(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def scope(self) -> str: ...  # noqa: D102
    @property
    def bandwidth_GBps(self) -> float: ...  # noqa: D102, N802


L = TypeVar("L", bound=Named)


def between_hosts(known: Mapping[str, L], text: str) -> L:
    """The link between hosts that a text names.

    Args:
        known: name or alias in lower case -> link.
        text: a name, an alias, or a rate in Gbit/s in a usual spelling.

    Raises:
        ClusterError: there is none of this name, or it joins the devices of one host.
    """
    bits = _BITS.fullmatch(text.strip())
    link = known.get(text.strip().lower()) or known.get(f"{bits['number']}gbit" if bits is not None else "")
    if link is not None and link.scope == "inter":
        return link
    # Each link once, by the name that is written most often, the slowest first.
    ordered = sorted((one for one in known.values() if one.scope == "inter"), key=_order)
    listed = {one.name: (*one.aliases, one.name)[0] for one in ordered}
    # The rate with the nearest digits is seldom the one that is meant.
    names = ", ".join(listed.values())
    repair = f"Use one of {names}" if text[:1].isdigit() else one_of(listed.values(), text)[:-1]
    raise ClusterError(
        "no link between hosts has this name" if link is None else "this link does not connect hosts",
        field="cluster",
        value=text,
        repair=f"{repair}, or describe a link of yours in a file (docs/plan-format.md).",
    )


def _order(link: Named) -> tuple[float, str]:
    return link.bandwidth_GBps, link.name
