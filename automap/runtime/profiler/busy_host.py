"""Quiet: what else a host did while it was measured, from what its system counts. Never imports torch. Units: seconds.

A rank that measures keeps a `Meter`; `conditions` makes of the readings of all ranks what the cluster file says.
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
"""Columns of a core's line there."""


class Meter:
    """What the cores of this process did since it began, and what this process did."""

    def __init__(self) -> None:
        """Begins."""
        self._cores = os.sched_getaffinity(0)
        self._before = self._now()

    def _now(self) -> tuple[float, float, float, float]:
        return time.monotonic(), time.process_time(), *core_times(self._cores, _read())

    def read(self) -> dict[str, float]:
        """{cores, passed_s, own_s: of this process, busy_s: of all processes, stolen_s: by the hypervisor}."""
        passed, own, busy, stolen = (after - before for after, before in zip(self._now(), self._before, strict=True))
        return {"cores": len(self._cores), "passed_s": passed, "own_s": own, "busy_s": busy, "stolen_s": stolen}


def _read() -> str:
    return _STAT.read_text() if _STAT.exists() else ""


def core_times(cores: Collection[int], stat: str) -> tuple[float, float]:
    """Seconds since the start of the host in which some cores worked, and which the hypervisor kept from them.

    Args:
        cores: their numbers.
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
    """Under which a host was measured.

    Args:
        results: of each rank: `host` as `Meter.read` gives it, `worked_s` of `computed_s` seconds in which it had
            nothing to do but compute, and `spreads` of its kernels' repeats.
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
    """Of the time of the cores of some ranks, what other processes had, and what the hypervisor kept.

    Args:
        readings: of the `Meter` of each rank, over the same time.
    """
    first = readings[0]
    of_all = first["passed_s"] * first["cores"]
    # Ticks are counted more roughly than processes are.
    others = max(0.0, first["busy_s"] - sum(reading["own_s"] for reading in readings))
    return others / of_all, first["stolen_s"] / of_all


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
