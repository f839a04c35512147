"""The properties of a device that a profile states: its name, memory, multiprocessors and cache. Units: bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from automap.runtime.launch.host import processor


def describe(device: torch.device, num_ranks: int) -> dict[str, Any]:
    """The properties of a device: name, memory in bytes, multiprocessors, last-level cache in bytes."""
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        return {
            "name": about.name,
            "memory_bytes": total,
            "reserved_bytes": total - free - torch.cuda.memory_reserved(device),
            "num_multiprocessors": about.multi_processor_count,
            "cache_bytes": about.L2_cache_size,
        }
    return {
        "name": processor(),
        "memory_bytes": _free_bytes() // num_ranks,
        "reserved_bytes": 0,
        "num_multiprocessors": 1,
        "cache_bytes": _cache_bytes(),
    }


def _cache_bytes() -> int:
    """The largest cache of the first core; 8 MiB (assumed) where the system does not state it."""
    units = {"K": 1 << 10, "M": 1 << 20}
    sizes = [path.read_text("utf-8").strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=8 << 20)


def _free_bytes() -> int:
    """The memory that processes can still allocate, within the limit of the container."""
    lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    limit, used = (Path("/sys/fs/cgroup") / f"memory.{name}" for name in ("max", "current"))
    if limit.exists() and used.exists() and limit.read_text("utf-8").strip().isdigit():
        free = min(free, int(limit.read_text("utf-8")) - int(used.read_text("utf-8")))
    return max(free, 1)
