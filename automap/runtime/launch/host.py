"""Whether a cluster is this machine, and the devices of this machine. Never imports torch. Units: bytes."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from automap.cluster import LOCAL, Cluster
from automap.device_kinds import Device

_DRIVER = Path("/proc/driver/nvidia")
_PROCESSORS = Path("/proc/cpuinfo")
ANY_PROCESSOR = "cpu"
"""The device kind of `automap/data/devices` that stands for any processor."""
_SIZE = re.compile(r"\d+GB")


def lacking(cluster: Cluster) -> str | None:
    """What this machine lacks to run the plans of a cluster, for a reader; None if the cluster is a part of it.

    The number of processes on a machine without GPUs is limited by `automap.runtime.trial.trial.num_processes`.
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
    """Whether a GPU whose driver reports a model is of a device kind: of the same name, or with all words of it.

    A memory size counts only where the model states one. An SXM module is not of the same kind as a PCIe card.
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
    """The name of the device kind of a measured machine, from the model that its driver reports."""
    return re.sub(r"[^\w.-]+", "-", model).strip("-")


def gpus() -> Mapping[str, int]:
    """Model of a GPU, as its driver reports it -> the number of such GPUs of this machine."""
    found = Counter[str]()
    for path in sorted(_DRIVER.glob("gpus/*/information")):
        models = [
            line.partition(":")[2].strip() for line in path.read_text("utf-8").splitlines() if line.startswith("Model:")
        ]
        found.update(models)
    return found


def processor() -> str:
    """The model of this machine's processor."""
    lines = _PROCESSORS.read_text("utf-8").splitlines() if _PROCESSORS.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def memory_bytes(num_ranks: int) -> int | None:
    """An equal part of the free memory of this machine; None with a GPU, whose driver maps far more than it uses."""
    if _DRIVER.exists():
        return None
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // num_ranks


def _counted(kinds: Mapping[str, int]) -> str:
    return " + ".join(f"{count} x {kind}" for kind, count in kinds.items())
