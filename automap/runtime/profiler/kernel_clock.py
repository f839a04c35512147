"""Times kernels on one device, alone or together with other ranks. Units: seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from automap.runtime.clock import slowest, synchronize, time_together

REPEATS = 5
"""The number of repeats of each kernel, of which the median is taken (assumed, as are the others)."""
LEAST_REPEATS = 3
"""The least number of repeats of work that ranks do together."""
TOGETHER_REPEATS = 25
"""The largest number of these repeats."""
TOGETHER_S = 0.4
"""Seconds after which they end."""


class KernelClock:
    """Times the work of one device.

    Attributes:
        passed_s: the time in which this process did nothing but compute.
        worked_s: the part of that time in which its core worked for it.
        spreads: [kernels] the range of the repeats of each kernel, over their median.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.passed_s = self.worked_s = 0.0
        self.spreads: list[float] = []

    def kernel(self, launch: Callable[[], object], *, with_launches: bool = False) -> float:
        """The time of one kernel among many of its kind, the median of some repeats.

        Args:
            launch: launches the kernel on tensors that exist.
            with_launches: whether, on a GPU, the CPU launches each kernel; otherwise the kernels are recorded once and
                replayed without the CPU.
        """
        launch()
        once = self.repeated(launch, 1)
        count = max(1, min(200, int(5e-4 / max(once, 1e-7))))
        if self.device.type == "cuda" and not with_launches:
            graph = torch.cuda.CUDAGraph()
            # Threads of NCCL query events meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for _ in range(count):
                    launch()
            graph.replay()
            return self.median(graph.replay, 1) / count
        return self.median(launch, count)

    def median(self, launch: Callable[[], object], count: int) -> float:
        """The time of one of `count` runs, the median of some repeats."""
        times = [self.repeated(launch, count) for _ in range(REPEATS)]
        typical = statistics.median(times)
        self.spreads.append((max(times) - min(times)) / typical)
        return typical

    def repeated(self, launch: Callable[[], object], count: int) -> float:
        """The time of one of `count` successive runs; on a CPU the processor time of this process."""
        synchronize(self.device)
        start, worked = time.perf_counter(), time.thread_time()
        for _ in range(count):
            launch()
        synchronize(self.device)
        passed, worked = time.perf_counter() - start, time.thread_time() - worked
        self.passed_s += passed
        if self.device.type == "cuda":
            worked = passed
        self.worked_s += worked
        return worked / count

    def median_together(self, work: Callable[[], object], group: dist.ProcessGroup | None = None) -> float:
        """The time of work that all ranks of a group do together, the median of some repeats."""
        times = [time_together(work, self.device, group) for _ in range(LEAST_REPEATS)]
        while len(times) < TOGETHER_REPEATS and sum(times) < TOGETHER_S:
            times.append(time_together(work, self.device, group))
        return statistics.median(times)

    def is_late(self, until: float) -> bool:
        """Whether the time `until` of `time.monotonic` is over on any rank. A collective."""
        return slowest(time.monotonic() - until, self.device) > 0.0
