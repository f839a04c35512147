"""What clusters can be named: the document of `GET /v1/clusters` and `automap clusters`."""

from __future__ import annotations

from typing import Any

from automap.cluster import PRESETS, known_devices
from automap.records import to_json


def describe_clusters() -> dict[str, Any]:
    """Presets to copy from, and every device that has a data file."""
    return {
        "form": "[NODESx]GPUSxDEVICE[@LINK], parts joined by +",
        "presets": list(PRESETS),
        "devices": [to_json(device) for device in known_devices()],
    }
