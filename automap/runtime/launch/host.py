"""Host: whether a cluster is this machine, and what this machine has. Never imports torch. Units: bytes."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from automap.cluster import LOCAL, Cluster, Device

_DRIVER = Path("/proc/driver/nvidia")
_PROCESSORS = Path("/proc/cpuinfo")
ANY_PROCESSOR = "cpu"
"""The kind of `automap/data/devices` that means whatever processor a host has."""
_SIZE = re.compile(r"\d+GB")


def lacking(cluster: Cluster) -> str | None:
    """What this host lacks to run the plans of a cluster, for a reader; None if the cluster is this host, or a part.

    How many processes a host without GPUs runs is for `automap.runtime.trial.trial` to say.
    """
    if cluster.name == LOCAL:
        return None
    found, kind = gpus(), cluster.device(0)
    if len(cluster.hosts) == 1:
        if any(_is(kind, model) and cluster.num_devices <= count for model, count in found.items()):
            return None
        if not found and kind.name in (ANY_PROCESSOR, as_name(processor())):
            return None
    needed = Counter[str]()
    for node in cluster.nodes:
        needed[node.device] += node.num_devices * node.count
    hosts = f" on {len(cluster.hosts)} hosts" if len(cluster.hosts) > 1 else ""
    return f"needs {_counted(needed)}{hosts}; this host has {_counted(found) or 'no GPU'}"


def _is(kind: Device, model: str) -> bool:
    """Whether a model of GPU, in the words of its maker, is of a kind: as measured, or all words of the kind's name.

    A size of memory counts only where the model states one; a kind in the form SXM is not that in the form PCIe.
    """
    if kind.name == as_name(model):
        return True
    words, wanted = _words(model.replace(" GB", "GB")), _words(kind.name)
    if not any(map(_SIZE.fullmatch, words)):
        wanted = {word for word in wanted if not _SIZE.fullmatch(word)}
    is_sxm = any("SXM" in name for name in kind.aliases)
    return wanted <= words and not ("PCIE" in words - wanted and is_sxm)


def _words(name: str) -> set[str]:
    return set(re.split(r"[^A-Z0-9]+", name.upper()))


def as_name(model: str) -> str:
    """The name of a device kind that was measured, of a model in the words of its maker."""
    return re.sub(r"[^\w.-]+", "-", model).strip("-")


def gpus() -> Mapping[str, int]:
    """Model of GPU -> how many this host has."""
    found = Counter[str]()
    for path in sorted(_DRIVER.glob("gpus/*/information")):
        models = [line.partition(":")[2].strip() for line in path.read_text().splitlines() if line.startswith("Model:")]
        found.update(models)
    return found


def processor() -> str:
    """Model of this host's processor."""
    lines = _PROCESSORS.read_text().splitlines() if _PROCESSORS.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def memory_bytes(num_ranks: int) -> int | None:
    """An equal part of what this host has free; None with a GPU, whose drivers map far more than they use."""
    if _DRIVER.exists():
        return None
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // num_ranks


def _counted(kinds: Mapping[str, int]) -> str:
    return " + ".join(f"{count} x {kind}" for kind, count in kinds.items())
