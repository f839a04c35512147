"""Cluster: devices of one or several kinds in nodes, and the links between them.

Read from a preset (`4x8xA100-80GB`, `2x8xV100-16GB@25Gbit`, `8xV100-32GB+8xP100`), a JSON file, or the data files
of `automap/data` and of the user's configuration folder. Devices are numbered node by node. Independent of models and
plans.
Units: seconds, bytes, bytes/s, FLOP/s (converted once from the units named in the data keys).
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import platformdirs

from automap.arrays import Floats, Ints
from automap.documents import read_document, read_file
from automap.errors import ClusterError, one_of
from automap.fitted_curves import COLLECTIVES, CollectiveCurve, Constants, Efficiency, Kernels, published_curves
from automap.link_names import between_hosts
from automap.records import Range, from_json, to_json

GIB = 1 << 30

PRESETS = (
    "8xV100-16GB", "2x8xV100-16GB@25Gbit", "16x1xV100-16GB@10Gbit", "8xV100-32GB+8xP100", "8xA100-80GB",
    "4x8xA100-80GB", "8xH100", "64x8xH100", "8xH200", "8xB200",
)  # fmt: skip
"""Examples that `automap clusters` and `GET /v1/clusters` show; any `[NODESx]GPUSxDEVICE[@LINK]` is understood."""

MAX_DEVICES = 65536
"""Largest number of devices of a cluster (assumed)."""
Count = Annotated[int, Range(1, MAX_DEVICES)]
"""A number of devices, hosts or network interfaces."""
LEAST_RATE = 1e-6
"""Least rate that is read, in TFLOP/s or GB/s (assumed)."""
Rate = Annotated[float, Range(LEAST_RATE, 1e6)]
"""A rate in TFLOP/s or GB/s, up to a thousand times that of the fastest device or link of 2026."""
GENERAL = ("bf16", "fp16", "fp32")
"""Precisions that every operator can be computed in."""
LOCAL = "local"
"""The name of this host, once `automap profile` has measured it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One kind of accelerator, as its data file states it."""

    name: str
    peak_TFLOPs: Mapping[str, Rate]  # noqa: N815
    """Peak rate of dense arithmetic by precision; at least one of bf16, fp16 and fp32."""
    hbm_bandwidth_GBps: Rate  # noqa: N815
    memory_GiB: Annotated[float, Range(1e-3, 1e6)]  # noqa: N815
    """Memory of the device, from 1 MiB to 1 PiB."""
    memory_efficiency: Efficiency
    """Share of the memory bandwidth that streaming kernels reach."""
    intra_node_link: str
    inter_node_link: str
    nics_per_node: Count
    num_multiprocessors: Annotated[int, Range(1, 1_000_000)] = 108
    """Number of multiprocessors; each computes one tile of a matrix product at a time."""
    cache_MB: Annotated[float, Range(0, 1e6)] = 40.0  # noqa: N815
    """Size of the last-level cache."""
    curves_of: str = "A100"
    """Kind of device whose measured kernel curves are used, at this device's own rates; see `automap/data/fitted`."""
    sustained_clock: Annotated[float, Range(0.01, 1.1)] = 0.85
    """Speed of large matrix products during hours of training, relative to one short kernel (power limits)."""
    portable_attention: Annotated[float, Range(0.01, 1)] = 1.0
    """Speed of portable attention kernels relative to kernels that are written for this kind of device."""
    kernels: Kernels | None = None
    """Measured kernel curves of this device, as shares of its peak rates; None = the curves of `curves_of`."""
    aliases: tuple[str, ...] = ()
    schema: Literal["automap.device/1"] = "automap.device/1"
    source: Mapping[str, str] | None = None
    """Origin of each number: datasheet, fitted or assumed."""

    def __post_init__(self) -> None:
        missing = [] if self.kernels is None else [p for p in self.peak_TFLOPs if p not in self.kernels.gemm]
        if missing:
            raise ClusterError(
                f"{self.name} has no measured products in a precision whose peak it states",
                field="kernels.gemm",
                value=", ".join(missing),
                repair="Add a curve for it, or take it out of peak_TFLOPs.",
            )
        if not any(precision in self.peak_TFLOPs for precision in GENERAL):
            raise ClusterError(
                f"{self.name} has no arithmetic for operators other than products",
                field="peak_TFLOPs",
                value=", ".join(self.peak_TFLOPs),
                repair="State the peak in one of " + ", ".join(GENERAL) + ".",
            )
        if self.curves_of not in published_curves("gemm"):
            repair = one_of(published_curves("gemm"), self.curves_of)
            raise ClusterError(
                "no kind of device whose kernels were measured", field="curves_of", value=self.curves_of, repair=repair
            )

    @property
    def memory_bytes(self) -> float:
        """Device memory."""
        return self.memory_GiB * GIB

    def flops(self, precision: str) -> float:
        """Dense peak FLOP/s at `precision`.

        Raises:
            ClusterError: the device has no such precision.
        """
        if precision not in self.peak_TFLOPs:
            repair = one_of(self.peak_TFLOPs, precision)
            raise ClusterError(
                f"{self.name} has no {precision} arithmetic", field="training.precision", value=precision, repair=repair
            )
        return self.peak_TFLOPs[precision] * 1e12


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
    """Number of ranks of a group -> share of the bandwidth that the group has, for links that form a mesh; groups of
    other sizes have the full bandwidth."""
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
        described = {"device": devices, "intra_node_link": links, "inter_node_link": links}
        for index, node in enumerate(self.nodes):
            for name, table in described.items():
                key, field = getattr(node, name), f"nodes[{index}].{name}"
                if key not in table and (known := _known("links" if table is links else "devices").get(key.lower())):
                    table[key] = known
                if key not in table:
                    repair = f"Describe {key!r} in the file, or name one that `automap clusters` lists."
                    raise ClusterError("not described", field=field, value=key, repair=repair)
                scope = name.partition("_")[0]
                if name != "device" and links[key].scope != scope:
                    repair = f"Name a link whose scope is {scope}."
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
        return (f"{busy}; measure it again with `automap profile` when it has nothing else to do",) if seen else ()

    def to_json(self) -> dict[str, Any]:
        """The document that `parse_cluster` reads back."""
        document: dict[str, Any] = to_json(self)
        return document


def _wrong_number(num_devices: int, field: str, value: object) -> ClusterError:
    """The error for a cluster without devices or with too many, to be raised by the caller."""
    text = "a cluster needs at least one device" if num_devices <= 0 else "too many devices"
    return ClusterError(text, field=field, value=value, repair=f"Name between 1 and {MAX_DEVICES} devices.")


KINDS: Mapping[str, type[Device] | type[Link]] = {"devices": Device, "links": Link}
"""Folder of data files -> what each of its files describes."""


@functools.cache
def _library(folder: str) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for entry in sorted(resources.files("automap").joinpath("data", folder).iterdir(), key=lambda e: e.name):
        item: Any = from_json(KINDS[folder], read_document(entry.read_bytes()), path=entry.name, error=ClusterError)
        for name in (item.name, *item.aliases):
            found[name.lower()] = item
    return found


def own_folder(folder: str) -> Path:
    """The folder of the user's own `devices` or `links`, beside other configuration of this user."""
    return platformdirs.user_config_path("automap") / folder


@functools.cache
def _read_own(folder: str, place: Path) -> Mapping[str, Any]:
    """Name in lower case -> the user's own device or link of that name or alias."""
    found: dict[str, Any] = {}
    for path in sorted(place.glob("*.json")):
        document = read_file(path, field=str(path), error=ClusterError)
        try:
            item: Any = from_json(KINDS[folder], document, path=str(path), error=ClusterError)
        except ClusterError as fault:
            if fault.field.startswith(str(path)):
                raise
            raise ClusterError(**fault.texts | {"field": f"{path}.{fault.field}"}) from None
        if isinstance(item, Device):
            _check_links(item, path)
        names = {name.lower() for name in (item.name, *item.aliases)}
        for name in sorted(names):
            if name in _library(folder) or name in found:
                repair = "Give it a name of its own; a device or link that is there already cannot be replaced."
                raise ClusterError("this name is taken", field=f"{path}.name", value=name, repair=repair)
        found |= dict.fromkeys(names, item)
    return found


def _check_links(device: Device, path: Path) -> None:
    """Refuses links of the user's own device that are not described, or are of the wrong scope."""
    for key in ("intra_node_link", "inter_node_link"):
        link: Link = _lookup("links", getattr(device, key), f"{path}.{key}")
        if not key.startswith(link.scope):
            found = sorted({other.name for other in _known("links").values() if key.startswith(other.scope)})
            repair = "Use one of " + ", ".join(found) + "."
            raise ClusterError(f"its scope is {link.scope}", field=f"{path}.{key}", value=link.name, repair=repair)


def _known(folder: str) -> Mapping[str, Any]:
    """Name in lower case -> device or link, of the package and of the user."""
    return {**_library(folder), **_read_own(folder, own_folder(folder))}


def known_devices() -> tuple[Device, ...]:
    """Every device kind that has a data file in the package, by name."""
    return tuple({d.name: d for d in _library("devices").values()}.values())


def known_links() -> tuple[Link, ...]:
    """Every link kind that has a data file in the package, by name."""
    return tuple({link.name: link for link in _library("links").values()}.values())


def own_devices() -> tuple[Device, ...]:
    """Every device kind of the user's own, by name of its file.

    Raises:
        ClusterError: names the file and the field that are wrong.
    """
    return tuple({d.name: d for d in _read_own("devices", own_folder("devices")).values()}.values())


def own_links() -> tuple[Link, ...]:
    """Every link kind of the user's own; see `own_devices`."""
    return tuple({link.name: link for link in _read_own("links", own_folder("links")).values()}.values())


def _lookup(folder: str, text: str, field: str) -> Any:
    table = _known(folder)
    if text.lower() not in table:
        repair = one_of(sorted({item.name for item in table.values()}), text)
        raise ClusterError(f"no {folder.removesuffix('s')} has this name", field=field, value=text, repair=repair)
    return table[text.lower()]


_PART = re.compile(r"^(?:(?P<nodes>\d+)x)?(?P<gpus>\d+)x(?P<device>[A-Za-z][\w.-]*)$")


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
    if spec == LOCAL:
        return _read_local()
    if spec.endswith(".json"):
        return parse_cluster(_read_file(spec))
    text, at, link_name = spec.strip().partition("@")
    if at and (not link_name or "+" in link_name):
        repair = "Write @LINK once, behind all devices, as in 4xV100+4xP100@25Gbit."
        raise ClusterError("the link between nodes is not understood", field="cluster", value=spec, repair=repair)
    nodes: list[Node] = []
    devices: dict[str, Device] = {}
    links: dict[str, Link] = {}
    for part in text.split("+"):
        match = _PART.match(part.strip())
        if match is None:
            repair = "Write [NODESx]GPUSxDEVICE[@LINK], as in 4x8xA100, or a JSON document (docs/plan-format.md)."
            raise ClusterError("not understood", field="cluster", value=spec, repair=repair)
        device: Device = _lookup("devices", match["device"], "cluster")
        count, per_node = int(match["nodes"] or 1), int(match["gpus"])
        if count < 1 or per_node < 1 or count * per_node > MAX_DEVICES:
            raise _wrong_number(count * per_node, "cluster", spec)
        intra: Link = _lookup("links", device.intra_node_link, "cluster")
        inter: Link = between_hosts(_known("links"), link_name or device.inter_node_link)
        devices[device.name], links[intra.name], links[inter.name] = device, intra, inter
        nics = 1 if link_name else device.nics_per_node
        links_of = {"intra_node_link": intra.name, "inter_node_link": inter.name}
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
