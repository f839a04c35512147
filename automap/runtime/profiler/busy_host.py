"""How busy a host was with other work while it was measured, from the counters of its system.

A rank that measures has a `Meter`; `conditions` sums up the readings of all ranks for the cluster file. Never imports
torch. Units: seconds.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from automap.fitted_curves import Conditions

_STAT = Path("/proc/stat")
_USER, _NICE, _SYSTEM, _STOLEN = 0, 1, 2, 7
"""The positions of these times in the line of a core."""


class Meter:
    """Measures the work of this process, and of the cores that it may use, since it was made."""

    def __init__(self) -> None:
        """Begins to measure."""
        self._cores = os.sched_getaffinity(0)
        self._before = self._now()

    def _now(self) -> tuple[float, float, float, float]:
        return time.monotonic(), time.process_time(), *core_times(self._cores, _read())

    def read(self) -> dict[str, float]:
        """{cores: their number, passed_s: wall time, own_s: processor time of this process, busy_s: of all processes,
        stolen_s: time that the hypervisor took}."""
        passed, own, busy, stolen = (after - before for after, before in zip(self._now(), self._before, strict=True))
        return {"cores": len(self._cores), "passed_s": passed, "own_s": own, "busy_s": busy, "stolen_s": stolen}


def _read() -> str:
    return _STAT.read_text("utf-8") if _STAT.exists() else ""


def core_times(cores: Collection[int], stat: str) -> tuple[float, float]:
    """The times since the start of the host in which cores worked, and which the hypervisor took from them.

    Args:
        cores: the numbers of the cores.
        stat: the text of `/proc/stat`; cores that it does not name count as idle.
    """
    names = {f"cpu{number}" for number in cores}
    rows = [line.split() for line in stat.splitlines()]
    ticks = [[float(word) for word in row[1:]] for row in rows if row and row[0] in names]
    busy = sum(row[_USER] + row[_NICE] + row[_SYSTEM] for row in ticks)
    stolen = sum(row[_STOLEN] for row in ticks if len(row) > _STOLEN)
    per_second = os.sysconf("SC_CLK_TCK")
    return busy / per_second, stolen / per_second


def conditions(results: Sequence[Mapping[str, Any]]) -> Conditions:
    """The conditions under which a host was measured.

    Args:
        results: [ranks] `host`: the reading of its `Meter`; `computed_s`: the time in which the rank did nothing but
            compute; `worked_s`: the processor time in it; `spreads`: the relative ranges of its kernels' repeats.
    """
    others, stolen = shares([result["host"] for result in results])
    computed, worked = (sum(result[name] for result in results) for name in ("computed_s", "worked_s"))
    return Conditions(
        others=_rounded(others),
        stolen=_rounded(stolen),
        waiting=_rounded(max(0.0, 1.0 - worked / computed)),
        spread=_rounded(statistics.median(spread for result in results for spread in result["spreads"])),
    )


def shares(readings: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """The shares of the cores' time that other processes had, and that the hypervisor took.

    Args:
        readings: [ranks] the readings of their `Meter`, over the same time.
    """
    first = readings[0]
    of_all = first["passed_s"] * first["cores"]
    # The ticks of cores are counted more coarsely than the times of processes.
    others = max(0.0, first["busy_s"] - sum(reading["own_s"] for reading in readings))
    return others / of_all, first["stolen_s"] / of_all


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
