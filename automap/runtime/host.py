"""Host: whether a cluster is this machine, and what this machine has. Never imports torch. Units: bytes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from automap.cluster import LOCAL, Cluster

_DRIVER = Path("/proc/driver/nvidia")


def lacking(cluster: Cluster) -> str | None:
    """What this host lacks to run the plans of a cluster, for a reader; None if the cluster is this host."""
    if cluster.name == LOCAL:
        return None
    needed = Counter[str]()
    for node in cluster.nodes:
        needed[node.device] += node.num_devices * node.count
    return f"needs {_counted(needed)}; this host has {_counted(gpus()) or 'none'}"


def gpus() -> Mapping[str, int]:
    """Model of GPU -> how many this host has."""
    found = Counter[str]()
    for path in sorted(_DRIVER.glob("gpus/*/information")):
        models = [line.partition(":")[2].strip() for line in path.read_text().splitlines() if line.startswith("Model:")]
        found.update(models)
    return found


def memory_bytes(num_ranks: int) -> int | None:
    """An equal part of what this host has free; None with a GPU, whose drivers map far more than they use."""
    if _DRIVER.exists():
        return None
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // num_ranks


def _counted(kinds: Mapping[str, int]) -> str:
    return " + ".join(f"{count} x {kind}" for kind, count in kinds.items())
