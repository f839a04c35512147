"""The clusters that can be named: the document of `GET /v1/clusters` and `automap clusters`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from automap.cluster import LOCAL, PRESETS, local_profile, parse_cluster
from automap.device_kinds import known_devices, known_links, own_devices, own_folder, own_links
from automap.families import families
from automap.price.curves import is_measured
from automap.records import to_json

OWN = "Your own"
"""Family of the devices that the user describes."""


def describe_clusters() -> dict[str, Any]:
    """Presets to copy from, every device and link that has a data file, and this host if it has been measured.

    Raises:
        ClusterError: a file of the user's own is wrong.
    """
    local = parse_cluster(LOCAL) if local_profile().exists() else None
    of_families = {name: list(devices) for name, devices in families().items()}
    mine = own_devices()
    return {
        "form": "[NODESx]GPUSxDEVICE[@LINK], parts joined by +",
        "presets": list(PRESETS),
        "families": of_families | ({OWN: [device.name for device in mine]} if mine else {}),
        "devices": [to_json(device) for device in (*known_devices(), *mine)],
        "links": [to_json(link) for link in (*known_links(), *own_links())],
        "local": None if local is None else local.to_json(),
    }


def device_lines() -> Iterator[str]:
    """Lines on devices, by family: memory, its bandwidth and peaks; a star where others' kernels price it."""
    kinds = {device.name: device for device in (*known_devices(), *own_devices())}
    groups = {name: [kinds[device] for device in devices] for name, devices in families().items()}
    width = max(map(len, kinds))
    for name, devices in (groups | {OWN: list(own_devices())}).items():
        if devices:
            yield f"  {name}"
        for device in devices:
            peaks = ", ".join(f"{kind} {peak:g}" for kind, peak in device.peak_TFLOPs.items())
            star = " " if is_measured(device) else "*"
            memory = f"{device.memory_GiB:4g} GiB {device.hbm_bandwidth_GBps:5g} GB/s"
            yield f"  {star} {device.name:{width}} {memory}  {peaks}"


def link_lines(scope: str) -> Iterator[str]:
    """Lines on links, the slowest first.

    Args:
        scope: `inter`, links between nodes, with the rate of a network interface in Gbit/s; or `intra`, links inside a
            node, with the rate of a device in GB/s.
    """
    links = sorted((*known_links(), *own_links()), key=lambda link: (link.bandwidth_GBps, link.name))
    for link in links:
        if link.scope == scope:
            names = ", ".join((link.name, *link.aliases))
            rate = f"{link.bandwidth_GBps * 8:5g} Gbit/s" if scope == "inter" else f"{link.bandwidth_GBps:7g} GB/s"
            yield f"  {rate}  {names}"


def own_line() -> str:
    """Where the user's own devices and links are described."""
    return f"Your own: a JSON file each in {own_folder('devices')} and {own_folder('links')} (docs/plan-format.md)"


def local_line(document: Mapping[str, Any] | None) -> str:
    """One line on this host, from `local` of `describe_clusters`."""
    if document is None:
        return f"{LOCAL}: this host has not been measured; run `automap profile`"
    (node,) = document["nodes"]
    return f"{LOCAL}: this host, {node['num_devices']} x {node['device']}, measured by `automap profile`"
