"""The shape of a plan: how many stages, ranks of each mesh axis and micro-batches it has."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The decisions about the whole: how many of what."""

    pp: int
    tp: int
    dp: int
    """Of every stage where all have as many devices."""
    num_micro_batches: int
    samples: int
    """Of a micro-batch over all replicas."""
    virtual: int = 1
    middle: int = 1
    """Ranks of the axis between dp and tp."""

    @property
    def num_chunks(self) -> int:
        """Chunks of the graph."""
        return self.pp * self.virtual

    @property
    def replicas(self) -> int:
        """Ranks over which ZeRO shards what is whole there."""
        return self.dp * self.middle


@dataclass(frozen=True, kw_only=True, slots=True)
class MiddleAxis:
    """The axis between dp and tp."""

    name: Literal["cp", "ep"]
    """ep: experts are spread over it, all else splits its batch; cp: the sequence is split over it."""
    degrees: tuple[int, ...]


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
