"""Kinds of devices and links, each described in a data file of `automap/data` or of the user's configuration folder.

Independent of clusters, models and plans. Units: those named in the data keys; properties are in bytes, bytes/s and
FLOP/s.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import platformdirs

from automap.documents import read_document, read_file
from automap.errors import ClusterError, nearest, one_of
from automap.fitted_curves import Efficiency, Kernels, published_curves
from automap.links import Link, Rate, between_hosts
from automap.records import Range, from_json

GIB = 1 << 30
MAX_DEVICES = 65536
"""Largest number of devices of a cluster (assumed)."""
Count = Annotated[int, Range(1, MAX_DEVICES)]
"""A number of devices, hosts or network interfaces."""
MOST_NICS = 32
"""More network interfaces than one host has (datasheets: 24 in a server of Gaudi 3); a rack of NVL72 has 72, a slice of
TPU v5e up to 256."""
Precision = Literal["bf16", "fp16", "tf32", "fp32", "fp8", "mxfp8", "nvfp4"]
"""Precisions of arithmetic."""
GENERAL = ("bf16", "fp16", "fp32")
"""Precisions that every operator can be computed in."""
NUM_NEAREST = 3
"""Largest number of names that the error of an unknown name suggests."""


def in_gib(num_bytes: float) -> str:
    """GiB with one decimal, or two figures where it is less than 1."""
    gib = num_bytes / GIB
    return f"{gib:.1f}" if gib >= 0.95 else f"{gib:.2g}"


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
    """Network interfaces of a host; of a kind that fills racks or slices, of the largest of these, see `nics_of`."""
    num_multiprocessors: Annotated[int, Range(1, 1_000_000)] = 108
    """Number of multiprocessors; each computes one tile of a matrix product at a time."""
    cache_MB: Annotated[float, Range(0, 1e6)] = 40.0  # noqa: N815
    """Size of the last-level cache."""
    curves_of: str = "A100"
    """Kind of device whose measured kernel curves are used, at this device's own rates; see `automap/data/fitted`."""
    sustained_clock: Annotated[float, Range(0.01, 1.1)] = 0.85
    """Speed of large matrix products during hours of training, relative to one short kernel (power limits)."""
    product_rate: Annotated[float, Range(0.01, 2)] = 1.0
    """Share of its peak that large matrix products reach, over the share that those of the kind in `curves_of` reach,
    both in single kernels. It is more than 1 where the clock is higher than the datasheet's, and less where the power
    or the library limits products more."""
    plain_rate: Efficiency = 0.95
    """Share of the fp32 peak that large matrix products reach without tensor cores."""
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
        for precision in self.peak_TFLOPs:
            if precision not in get_args(Precision):
                repair = one_of(get_args(Precision), precision)
                raise ClusterError("unknown precision", field="peak_TFLOPs", value=precision, repair=repair)
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

    def nics_of(self, num_devices: int) -> int:
        """Network interfaces of a host with some number of these devices.

        In a rack that is one NVLink domain, and in a slice of TPUs, each device has an interface of its own, also in a
        smaller part of it.
        """
        return num_devices if self.nics_per_node > MOST_NICS else self.nics_per_node

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
    between_hosts(known("links"), device.inter_node_link, f"{path}.inter_node_link")
    link: Link = lookup("links", device.intra_node_link, f"{path}.intra_node_link")
    if link.scope != "intra":
        found = sorted({other.name for other in known("links").values() if other.scope == "intra"})
        repair = "Use one of " + ", ".join(found) + "."
        field = f"{path}.intra_node_link"
        raise ClusterError("this link does not join devices of one host", field=field, value=link.name, repair=repair)


def known(folder: str) -> Mapping[str, Any]:
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


def lookup(folder: str, text: str, field: str) -> Any:
    """The device or link of a name or alias, in any case.

    Args:
        folder: `devices` or `links`.
        text: the name.
        field: where the name stands, for the error.

    Raises:
        ClusterError: no device or link has this name.
    """
    table = known(folder)
    if text.lower() in table:
        return table[text.lower()]
    kinds = {name: item.name for item in table.values() for name in (item.name, *item.aliases)}
    near: dict[str, str] = {}
    for name in nearest(kinds, text, most=2 * NUM_NEAREST):
        near.setdefault(kinds[name], name)  # each kind once, by the name that is most like the text
    meant = f"Did you mean {' or '.join([*near.values()][:NUM_NEAREST])}? " if near else ""
    repair = f"{meant}`automap clusters` and GET /v1/clusters list what is known; "
    repair += "one of your own can be described in a file (docs/plan-format.md)."
    raise ClusterError(f"no {folder.removesuffix('s')} has this name", field=field, value=text, repair=repair)
