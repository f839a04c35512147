"""What the service has done so far, as numbers in the store that only grow; `/metrics` shows them.

They are written in the transactions that they count, so that nothing is counted twice or left out, and every part of
the service adds to the same ones. Independent of HTTP. Units: seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import redis

COUNTS = "automap:counts"
BUCKETS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Upper ends of the classes into which durations fall (assumed: from a tiny job to the longest budget)."""


@dataclass(frozen=True, slots=True)
class Durations:
    """How long something took, over all times that it was done."""

    classes: tuple[int, ...]
    """Number of times in each class of `BUCKETS_S`, and of longer ones."""
    sum_s: float

    @property
    def number(self) -> int:
        """Number of times."""
        return sum(self.classes)


def took(pipe: Any, name: str, seconds: float, *, times: int = 1) -> None:
    """Counts a duration in a transaction, once or several times."""
    place = next((i for i, end in enumerate(BUCKETS_S) if seconds <= end), len(BUCKETS_S))
    pipe.hincrby(COUNTS, f"{name}:{place}", times)
    pipe.hincrbyfloat(COUNTS, f"{name}:sum", times * max(0.0, seconds))


def priced(pipe: Any, before: bytes | None, progress: str) -> None:
    """Counts the plans that a run has priced since its last report.

    Args:
        pipe: the transaction that writes the report.
        before: the last report of the run, or None.
        progress: the new report.
    """
    old = json.loads(before or b"{}").get("evaluations", 0)
    more = json.loads(progress).get("evaluations", 0) - old
    if more > 0:
        pipe.hincrby(COUNTS, "evaluations", more)


def read(client: redis.Redis) -> Mapping[str, float]:
    """All counts by name."""
    rows = cast("Mapping[bytes, bytes]", client.hgetall(COUNTS))
    return {name.decode(): float(value) for name, value in rows.items()}


def durations(counts: Mapping[str, float], name: str) -> Durations:
    """The durations of a name, see `took`."""
    classes = tuple(int(counts.get(f"{name}:{place}", 0)) for place in range(len(BUCKETS_S) + 1))
    return Durations(classes, counts.get(f"{name}:sum", 0.0))
