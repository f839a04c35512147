"""Times of work that several ranks do together, which takes as long as its slowest rank. Units: seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def synchronize(device: torch.device) -> None:
    """Waits for a device; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def slowest(seconds: float, device: torch.device, group: dist.ProcessGroup | None = None) -> float:
    """The largest of the ranks' times. A collective."""
    found = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group)
    return float(found)


def time_together(work: Callable[[], object], device: torch.device, group: dist.ProcessGroup | None = None) -> float:
    """The time of work that all ranks of a group begin together: that of the slowest rank. A collective."""
    dist.barrier(group)
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return slowest(time.perf_counter() - start, device, group)
