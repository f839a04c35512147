"""Cluster: devices of one or several kinds in nodes, and the links between them.

Read from a preset (`4x8xA100-80GB`, `2x8xV100-16GB@25Gbit`, `8xV100-32GB+8xP100`) or a JSON file; the kinds of devices
and links are those of `automap.device_kinds`. Devices are numbered node by node. Independent of models and plans.
Units: seconds, bytes, bytes/s, FLOP/s (converted once from the units named in the data keys).
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import platformdirs

from automap.arrays import Floats, Ints
from automap.device_kinds import MAX_DEVICES, Count, Device, known, lookup
from automap.documents import read_file
from automap.errors import ClusterError, meant
from automap.fitted_curves import Constants
from automap.links import LEAST_RATE, Link, between_hosts
from automap.records import LEFT_OUT, Range, from_json, to_json

PRESETS = (
    "8xV100-16GB", "2x8xV100-16GB@25Gbit", "16x1xV100-16GB@10Gbit", "8xV100-32GB+8xP100", "8xA100-80GB",
    "4x8xA100-80GB", "8xH100", "64x8xH100", "8xH200", "8xB200",
)  # fmt: skip
"""Examples that `automap clusters` and `GET /v1/clusters` show; any `[NODESx]GPUSxDEVICE[@LINK]` is understood."""

LOCAL = "local"
"""The name of this host, once `automap profile` has measured it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """Equal hosts, each with devices of one kind."""

    device: str
    num_devices: Count
    intra_node_link: str
    inter_node_link: str
    nics: Annotated[float, Range(0, MAX_DEVICES, above=True)]
    """Number of network interfaces of each host; a fraction where its devices have a share of one."""
    count: Count = 1
    """Number of such hosts."""
    idle_devices: Annotated[int, Range(0, MAX_DEVICES)] = field(default=0, metadata=LEFT_OUT)
    """Further devices of each host, which no plan may use. Collectives leave them their shares of the interfaces."""

    @property
    def nics_per_device(self) -> float:
        """Share of each device in the network interfaces of its host."""
        return self.nics / (self.num_devices + self.idle_devices)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hosts with their devices, and the links between them."""

    name: str
    nodes: tuple[Node, ...]
    devices: Mapping[str, Device] = field(default_factory=dict)
    links: Mapping[str, Link] = field(default_factory=dict)
    bandwidth_GBps: tuple[tuple[Annotated[float, Range(0, 1e6)], ...], ...] | None = None  # noqa: N815
    """Achieved bandwidth from every device to every other; replaces the bandwidth of the links. Above 0, except on the
    diagonal, which is not read."""
    constants: Constants | None = None
    """Constants measured on these hosts, which replace the general ones and those of the trainer."""
    schema: Literal["automap.cluster/1"] = "automap.cluster/1"

    def __post_init__(self) -> None:
        if not 0 < self.num_devices <= MAX_DEVICES:
            raise _wrong_number(self.num_devices, "nodes", self.num_devices)
        matrix = self.bandwidth_GBps
        if matrix is not None:
            sizes = {"": f"{len(matrix)} rows"} if len(matrix) != self.num_devices else {}
            sizes |= {f"[{i}]": f"{len(row)} numbers" for i, row in enumerate(matrix) if len(row) != self.num_devices}
            if sizes:
                place, value = next(iter(sizes.items()))
                raise ClusterError(
                    "the bandwidth matrix has the wrong size",
                    field=f"bandwidth_GBps{place}",
                    value=value,
                    repair=f"Give {self.num_devices} rows of {self.num_devices} numbers.",
                )
            self._check_rates(matrix)
        devices, links = dict[str, Any](self.devices), dict[str, Any](self.links)
        for index, node in enumerate(self.nodes):
            for name, table in {"device": devices, "intra_node_link": links, "inter_node_link": links}.items():
                key, field = getattr(node, name), f"nodes[{index}].{name}"
                if key not in table:
                    table[key] = _known(name, key, field)
                scope = name.partition("_")[0]
                if name != "device" and table[key].scope != scope:
                    repair = f"Name a link whose scope is {scope}: one of {_names(scope)}, or one of your own."
                    raise ClusterError(f"no link of the scope {scope}", field=field, value=key, repair=repair)
        object.__setattr__(self, "devices", devices)
        object.__setattr__(self, "links", links)

    def __repr__(self) -> str:
        return f"Cluster({self.name!r}: {self.num_devices} devices)"

    def _check_rates(self, matrix: tuple[tuple[float, ...], ...]) -> None:
        """Refuses bandwidths between two different devices that are too low."""
        rates: Floats = np.array(matrix)
        np.fill_diagonal(rates, 1.0)
        low = np.argwhere(rates < LEAST_RATE)
        if len(low):
            first, second = map(int, low[0])
            raise ClusterError(
                "two devices that cannot reach each other",
                field=f"bandwidth_GBps[{first}][{second}]",
                value=matrix[first][second],
                repair=f"Give the GB/s between devices {first} and {second}, at least {LEAST_RATE:g}.",
            )

    @functools.cached_property
    def hosts(self) -> tuple[Node, ...]:
        """All hosts, in the order of the device numbers."""
        return tuple(node for node in self.nodes for _ in range(node.count))

    @functools.cached_property
    def node_of(self) -> tuple[int, ...]:
        """[devices] number of the host of each device."""
        return tuple(i for i, node in enumerate(self.hosts) for _ in range(node.num_devices))

    @functools.cached_property
    def num_devices(self) -> int:
        """Number of devices of all hosts."""
        return sum(max(0, node.num_devices) * max(0, node.count) for node in self.nodes)

    @functools.cached_property
    def places(self) -> Ints:
        """`node_of` as an array, [devices]."""
        return np.array(self.node_of, dtype=np.int64)

    @functools.cached_property
    def alike(self) -> Ints:
        """Number of the first equal host of each host, [hosts]."""
        first: dict[Node, int] = {}
        found = [first.setdefault(replace(host, count=1), i) for i, host in enumerate(self.hosts)]
        return np.array(found, dtype=np.int64)

    def device(self, index: int) -> Device:
        """The kind of the device with number `index`."""
        return self.devices[self.hosts[self.node_of[index]].device]

    @property
    def is_uniform(self) -> bool:
        """Whether all hosts are equal and no bandwidth matrix is given."""
        return len(self.nodes) == 1 and self.bandwidth_GBps is None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for users of prices on this cluster."""
        seen = self.constants.conditions.seen() if self.constants is not None and self.constants.conditions else ()
        busy = f"{self.name} was not quiet while it was measured, so its times are too long: {', '.join(seen)}"
        again = f"{busy}; measure it again with `automap profile` when it has nothing else to do"
        return ((again,) if seen else ()) + self._unused_link()

    def _unused_link(self) -> tuple[str, ...]:
        """That a single host has no other to reach by the link that its text names, as `8xA100@25Gbit` does."""
        devices, at, link = self.name.partition("@")
        if not at or len(self.hosts) > 1 or _PART.match(devices) is None:
            return ()
        repair = f"for several hosts, write their number first, as in 2x{devices.removeprefix('1x')}@{link}"
        return (f"{self.name} is one host, so the link between hosts, {link}, changes nothing; {repair}",)

    def to_json(self) -> dict[str, Any]:
        """The document that `parse_cluster` reads back."""
        document: dict[str, Any] = to_json(self)
        return document


def _wrong_number(num_devices: int, field: str, value: object) -> ClusterError:
    """The error for a cluster without devices or with too many, to be raised by the caller."""
    text = "a cluster needs at least one device" if num_devices <= 0 else "too many devices"
    return ClusterError(text, field=field, value=value, repair=f"Name between 1 and {MAX_DEVICES} devices.")


_PART = re.compile(r"^(?:(?P<nodes>\d+)x)?(?P<gpus>\d+)x(?P<device>[A-Za-z][\w.-]*)$", re.ASCII)
_FILE = re.compile(r"[/\\]|\.(?:ya?ml|toml|txt)$")
"""What only the names of files have."""


def _known(name: str, text: str, field: str) -> Device | Link:
    """The device or link that is known by a name.

    Args:
        name: the field of `Node` that names it.
        text: the name.
        field: where the name stands, for the error.

    Raises:
        ClusterError: nothing is known by this name.
    """
    folder = "devices" if name == "device" else "links"
    found: Device | Link | None = known(folder).get(text.lower())
    if found is not None:
        return found
    if name == "device":
        near = meant(sorted({one.name for one in known(folder).values()}), text)
        repair = f"{near}Describe {text!r} in the file, or name one that `automap clusters` lists."
    elif name == "inter_node_link":
        with contextlib.suppress(ClusterError):
            return between_hosts(known(folder), text, field)
        repair = f"Describe {text!r} in the file, use one of {_names('inter')}, or a rate as in 25Gbit."
    else:
        repair = f"Describe {text!r} in the file, or use one of {_names('intra')}."
    raise ClusterError("not described", field=field, value=text, repair=repair)


def _names(scope: str) -> str:
    """The names of the known links of a scope."""
    return ", ".join(sorted({link.name for link in known("links").values() if link.scope == scope}))


def _form(spec: str) -> str:
    """The repair of a text that is not understood: what it probably means, or how clusters are written."""
    if spec.lstrip().startswith(("{", "[")):
        return "Give a JSON document in a file whose name ends in .json; over REST, as an object and not as a text."
    if _FILE.search(spec):
        return "A cluster file is JSON, and its name ends in .json (docs/plan-format.md)."
    text = re.sub(r"(?<=\d)\s*[xX×*]\s*", "x", spec.strip())
    text = re.sub(r"\s+", "-", text)
    turned = re.sub(r"^([A-Za-z].*)[xX](\d+)$", r"\2x\1", text)
    for like in (text, f"1x{text}", turned):
        match = _PART.match(like)
        if match is not None and match["device"].lower() in known("devices"):
            return f"Did you mean {like}? The form is [NODESx]GPUSxDEVICE[@LINK]."
    return "Write [NODESx]GPUSxDEVICE[@LINK], as in 4x8xA100, or a JSON document (docs/plan-format.md)."


def parse_cluster(spec: str | Mapping[str, Any]) -> Cluster:
    """A cluster from a preset text, a parsed JSON document, or the path of a JSON file.

    `local` is this host as `automap profile` measured it. `[NODESx]GPUSxDEVICE`, parts joined by `+`, then `@LINK` for
    the link between nodes (one NIC a node when named this way; without it, the link and the NICs of that device's usual
    server).

    Raises:
        ClusterError: names what is not understood and what to write instead.
    """
    if isinstance(spec, Mapping):
        return from_json(Cluster, dict(spec), path="cluster", error=ClusterError)
    if not isinstance(spec, str):
        raise ClusterError("not a text or a document", field="cluster", value=spec, repair=_form(str(spec)))
    if spec == LOCAL:
        return _read_local()
    if spec.endswith(".json"):
        return parse_cluster(_read_file(spec))
    text, at, link_name = spec.strip().partition("@")
    if at and (not link_name or "+" in link_name):
        repair = "Write @LINK once, after all devices, as in 4xV100+4xP100@25Gbit."
        raise ClusterError("the link between nodes is not understood", field="cluster", value=spec, repair=repair)
    nodes: list[Node] = []
    devices: dict[str, Device] = {}
    links: dict[str, Link] = {}
    for part in text.split("+"):
        match = _PART.match(part.strip())
        if match is None:
            raise ClusterError("not understood", field="cluster", value=spec, repair=_form(spec))
        device: Device = lookup("devices", match["device"], "cluster")
        count, per_node = int(match["nodes"] or 1), int(match["gpus"])
        if count < 1 or per_node < 1 or count * per_node > MAX_DEVICES:
            raise _wrong_number(count * per_node, "cluster", spec)
        intra: Link = lookup("links", device.intra_node_link, "cluster")
        inter: Link = between_hosts(known("links"), link_name or device.inter_node_link, "cluster")
        devices[device.name], links[intra.name], links[inter.name] = device, intra, inter
        nics = 1 if link_name else device.nics_of(per_node)
        links_of: dict[str, Any] = {"intra_node_link": intra.name, "inter_node_link": inter.name}
        nodes.append(Node(device=device.name, num_devices=per_node, nics=nics, count=count, **links_of))
    return Cluster(name=spec.strip(), nodes=tuple(nodes), devices=devices, links=links)


def local_profile() -> Path:
    """Path of the measured cluster file of this host: in the user's data folder, or AUTOMAP_DATA_DIR."""
    folder = os.environ.get("AUTOMAP_DATA_DIR")
    return (Path(folder) if folder else platformdirs.user_data_path("automap")) / "local-cluster.json"


def _read_local() -> Cluster:
    path = local_profile()
    if not path.exists():
        repair = "Run `automap profile` first (two minutes at most), or name devices, as in 1x2xcpu."
        raise ClusterError("this host has not been measured", field="cluster", value=LOCAL, repair=repair)
    return parse_cluster(_read_file(str(path)))


def _read_file(path: str) -> Mapping[str, Any]:
    document = read_file(Path(path), field="cluster", error=ClusterError)
    if not isinstance(document, dict):
        raise ClusterError("not an object", field="cluster", value=path, repair="See docs/plan-format.md.")
    return document
