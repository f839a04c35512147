"""The clusters that can be named: the document of `GET /v1/clusters` and `automap clusters`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from automap.cluster import LOCAL, PRESETS, known_devices, local_profile, parse_cluster
from automap.records import to_json


def describe_clusters() -> dict[str, Any]:
    """Presets to copy from, every device that has a data file, and this host if it has been measured."""
    local = parse_cluster(LOCAL) if local_profile().exists() else None
    return {
        "form": "[NODESx]GPUSxDEVICE[@LINK], parts joined by +",
        "presets": list(PRESETS),
        "devices": [to_json(device) for device in known_devices()],
        "local": None if local is None else local.to_json(),
    }


def local_line(document: Mapping[str, Any] | None) -> str:
    """One line on this host, from `local` of `describe_clusters`."""
    if document is None:
        return f"{LOCAL}: this host has not been measured; run `automap profile`"
    (node,) = document["nodes"]
    return f"{LOCAL}: this host, {node['num_devices']} x {node['device']}, measured by `automap profile`"
