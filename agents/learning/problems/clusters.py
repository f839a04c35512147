"""Clusters of random sizes, devices and links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from agents.learning.problems.draw import Draw, divisors_up_to
from automap.cluster import Cluster, Node
from automap.device_kinds import Device, known_devices, known_links
from automap.links import Link

MAX_DEVICES = 1024
"""Largest number of devices of a cluster that is drawn (assumed)."""
LARGE = 256
"""Largest number of devices of a cluster that is trained on; larger ones are held out."""
SMALL_PRIME = 7
"""Largest prime number of devices that is trained on; larger ones are held out."""
MAX_MATRIX = 32
"""Largest number of devices for which all bandwidths are stated one by one."""
USUAL_DEVICES = {"A100-80GB": 4, "H100-80GB": 4, "V100-16GB": 2, "V100-32GB": 2, "A100-40GB": 2, "H200-141GB": 2}
"""Kinds that most published runs use, with the weight of each."""
DEVICES = (
    "A100-40GB", "A100-80GB", "A800-80GB", "B200-180GB", "B300-288GB", "GB200-186GB", "GB300-288GB", "H100-80GB",
    "H100-96GB", "H100-PCIe-80GB", "H200-141GB", "L40S-48GB", "P100-16GB", "P40-24GB", "V100-16GB", "V100-32GB", "cpu",
)  # fmt: skip
"""Kinds of devices that are drawn, in a fixed order: the problem of a seed, and with it the labels and networks made of
it, must not change when AutoMAP gets further data files."""
LINKS = (
    "ethernet-10", "ethernet-100", "ethernet-200", "ethernet-25", "ethernet-400", "ethernet-50", "infiniband-edr",
    "infiniband-hdr", "infiniband-ndr", "omni-path-100",
)  # fmt: skip
"""Kinds of links between nodes that are drawn, in a fixed order for the same reason."""
_DGX_B200 = "datasheet: DGX B200, eight 400 Gbit/s InfiniBand ports"
_RACK = "datasheet: NVIDIA GB200/GB300 NVL72, one 400 or 800 Gbit/s port a GPU"
AS_DRAWN: Mapping[str, Mapping[str, Any]] = {
    "B300-288GB": {
        "inter_node_link": "infiniband-ndr",
        "source": {
            "memory_GiB": "datasheet: NVIDIA HGX B300 (dense, one GPU of 8; 288 GB)",
            "inter_node_link": _DGX_B200,
            "nics_per_node": _DGX_B200,
        },
    },
    "GB200-186GB": {
        "memory_GiB": 173.0,
        "peak_TFLOPs": {
            "nvfp4": 10000.0,
            "mxfp8": 4900.0,
            "fp8": 4900.0,
            "bf16": 2450.0,
            "fp16": 2450.0,
            "tf32": 1225.0,
            "fp32": 80.0,
        },
        "source": {
            "peak_TFLOPs": "datasheet: NVIDIA GB200 NVL72 (dense, one GPU of 72; 186 GB)",
            "memory_GiB": "datasheet: NVIDIA GB200 NVL72 (dense, one GPU of 72; 186 GB)",
            "inter_node_link": _DGX_B200,
            "nics_per_node": _RACK,
        },
    },
    "GB300-288GB": {
        "memory_GiB": 268.0,
        "inter_node_link": "infiniband-ndr",
        "source": {
            "memory_GiB": "datasheet: NVIDIA GB300 NVL72 (dense, one GPU of 72; 288 GB)",
            "inter_node_link": _DGX_B200,
            "nics_per_node": _RACK,
        },
    },
}
"""What data files said of a kind when labels and networks were made, where they have been corrected since. The digests
of problems count all of it."""
LATER_RATES = ("product_rate", "plain_rate")
"""Settings of devices that there were not yet when labels and networks were made. Digests do not count them."""
_FITTED = "fitted: benchmarks/fit_trainers.py, published_runs.json, 2026-11-22, one for all "
_ETHERNET: Mapping[str, Any] = {"efficiency": 0.838, "source": {"efficiency": f"{_FITTED}ethernet"}}
_INFINIBAND: Mapping[str, Any] = {"efficiency": 0.58, "source": {"efficiency": f"{_FITTED}infiniband"}}
_PCIE: Mapping[str, Any] = {"share_by_ranks": {}, "source": {"efficiency": "assumed"}}
LINKS_AS_COUNTED: Mapping[str, Mapping[str, Any]] = {
    **{link: _ETHERNET if link.startswith("ethernet-") else _INFINIBAND for link in LINKS},
    **dict.fromkeys(("pcie3", "pcie4", "pcie5"), _PCIE),
}
"""What data files said of a link when labels and networks were made. Problems are priced with the links of today, but
the digests of problems count what was said then."""
INTRA_GBPS, INTER_GBPS = (1.0, 900.0), (1.0 / 8.0, 400.0 / 8.0)
"""Least and largest bandwidth of random links inside nodes and between them: 1 to 900 GB/s, 1 to 400 Gbit/s."""


def is_prime(number: int) -> bool:
    """Whether the number has no divisors but 1 and itself."""
    return number > 1 and all(number % d for d in range(2, int(number**0.5) + 1))


def is_unseen_size(num_devices: int) -> bool:
    """Whether clusters with this number of devices are held out of the training."""
    return num_devices > LARGE or (num_devices > SMALL_PRIME and is_prime(num_devices))


def counted(cluster: Cluster) -> dict[str, Any]:
    """The JSON of a cluster with what data files said of its devices and links when labels and networks were made.

    Digests are made of it, so that a rate that is measured better leaves the digest of a problem as it is.
    """
    found = cluster.to_json()
    for device in found["devices"].values():
        for rate in LATER_RATES:
            device.pop(rate, None)
            (device["source"] or {}).pop(rate, None)
    for name, link in found["links"].items():
        then = dict(LINKS_AS_COUNTED.get(name, {}))
        if then:
            source = {**(link["source"] or {}), **then.pop("source")}
            if "share_by_ranks" in then:
                source.pop("share_by_ranks", None)
            link.update(then, source=source)
    return found


@dataclass(frozen=True, kw_only=True)
class RandomCluster:
    """A cluster with a line that describes it."""

    cluster: Cluster
    text: str


def draw_cluster(draw: Draw, *, is_usual: bool) -> RandomCluster:
    """A cluster.

    Args:
        draw: random choices.
        is_usual: whether it is one as large models are trained on: 4 to 512 devices, mostly in equal nodes of 8.
    """
    num_devices = _usual_count(draw) if is_usual else _any_count(draw)
    per_node = _per_node(draw, num_devices, is_usual=is_usual)
    hosts = num_devices // per_node
    device = _device(draw, num_devices, is_usual=is_usual)
    parts = [(device, per_node, hosts)]
    if hosts > 1 and draw.chance(0.08 if is_usual else 0.2):
        first = draw.integer(1, hosts - 1)
        other = _device(draw, num_devices, is_usual=is_usual)
        # Nodes of the second kind hold half as many devices, in twice as many nodes, where that can be.
        half = per_node % 2 == 0 and draw.chance(0.3)
        rest = hosts - first
        parts = [(device, per_node, first), (other, per_node // 2, 2 * rest) if half else (other, per_node, rest)]
    links = _links(draw, parts)
    nodes = tuple(
        Node(
            device=kind.name,
            num_devices=size,
            intra_node_link=intra.name,
            inter_node_link=inter.name,
            nics=nics,
            count=count,
        )
        for (kind, size, count), (intra, inter, nics) in zip(parts, links, strict=True)
    )
    text = "+".join(f"{node.count}x{node.num_devices}x{node.device}" for node in nodes)
    told = dict.fromkeys(
        f"{intra.bandwidth_GBps:g} and {nics}x{inter.bandwidth_GBps:g} GB/s" for intra, inter, nics in links
    )
    text += " links " + "; ".join(told)
    cluster = Cluster(
        name=f"random-{num_devices}",
        nodes=nodes,
        devices={kind.name: kind for kind, _, _ in parts},
        links={link.name: link for intra, inter, _ in links for link in (intra, inter)},
    )
    if not is_usual and 1 < num_devices <= MAX_MATRIX and draw.chance(0.15):
        cluster = replace(cluster, bandwidth_GBps=_matrix(draw, cluster))
        text += " with a matrix"
    return RandomCluster(cluster=cluster, text=text)


def _usual_count(draw: Draw) -> int:
    """4 to 512 devices, mostly whole nodes of 8."""
    if draw.chance(0.7):
        return int(2 ** draw.integer(2, 9))
    count = draw.log_integer(4, 512)
    return count if count < 8 or draw.chance(0.1) else min(512, max(8, round(count / 8) * 8))


def _any_count(draw: Draw) -> int:
    """1 to 1,024 devices, of any divisors."""
    count = min(MAX_DEVICES, draw.log_integer(1, MAX_DEVICES))
    if draw.chance(0.15):
        while count > 1 and not is_prime(count):
            count -= 1
    return count


def _per_node(draw: Draw, num_devices: int, *, is_usual: bool) -> int:
    """Devices of a node, which divide those of the cluster."""
    sizes = divisors_up_to(num_devices, 16)
    if is_usual and draw.chance(0.75):
        return max(d for d in sizes if d <= 8)
    return draw.one(sizes)


def _as_drawn(kind: Device) -> Device:
    """A kind of device as `AS_DRAWN` has it."""
    then = AS_DRAWN.get(kind.name, {})
    return replace(kind, **{**then, "source": {**(kind.source or {}), **then.get("source", {})}})


def _device(draw: Draw, num_devices: int, *, is_usual: bool) -> Device:
    """One of the known kinds; a host's processor only in small clusters that are not usual."""
    known = {kind.name: _as_drawn(kind) for kind in known_devices()}
    if is_usual and draw.chance(0.6):
        return known[draw.weighted(USUAL_DEVICES)]
    return known[draw.one([name for name in DEVICES if name != "cpu" or (num_devices <= 16 and not is_usual)])]


def _links(draw: Draw, parts: list[tuple[Device, int, int]]) -> list[tuple[Link, Link, int]]:
    """Links inside the nodes and between them, and the number of network interfaces, of each part."""
    known = {link.name: link for link in known_links()}
    source = draw.weighted({"usual": 5, "named": 2, "random": 3})
    named = known[draw.one(LINKS)]
    intra = _random_link(draw, "intra")
    inter, nics = _random_link(draw, "inter"), draw.one((1, 1, 1, 2, 4, 8))
    if source == "usual":
        return [(known[kind.intra_node_link], known[kind.inter_node_link], kind.nics_per_node) for kind, _, _ in parts]
    if source == "named":
        return [(known[kind.intra_node_link], named, 1) for kind, _, _ in parts]
    return [(intra, inter, nics) for _ in parts]


def _random_link(draw: Draw, scope: str) -> Link:
    bandwidth = float(f"{draw.log_between(*(INTRA_GBPS if scope == 'intra' else INTER_GBPS)):.3g}")
    efficiency = round(draw.between(0.6, 0.95), 2)
    name = f"random-{scope}-{bandwidth:g}"
    if scope == "intra":
        return Link(name=name, scope="intra", bandwidth_GBps=bandwidth, efficiency=efficiency)
    return Link(name=name, scope="inter", bandwidth_GBps=bandwidth, efficiency=efficiency)


def _matrix(draw: Draw, cluster: Cluster) -> tuple[tuple[float, ...], ...]:
    """Bandwidths between all devices: fast inside a node, slow between nodes, all unlike."""
    inside, across = draw.log_between(5.0, 900.0), draw.log_between(0.2, 50.0)
    spread = draw.between(0.0, 0.8)
    places = cluster.places
    base = np.where(places[:, None] == places[None, :], inside, min(inside, across))
    size = len(base)
    noise = np.array([[draw.between(-spread, spread) for _ in range(size)] for _ in range(size)])
    rates = base * np.exp((noise + noise.T) / 2)
    return tuple(tuple(float(f"{rate:.4g}") for rate in row) for row in rates.tolist())
