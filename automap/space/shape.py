"""The shape of a plan: how many stages, ranks of each mesh axis and micro-batches it has."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Degrees of parallelism, micro-batches and virtual stages of a plan."""

    pp: int
    """Pipeline ranks, each of which has one stage."""
    tp: int
    """Ranks of the innermost mesh axis."""
    dp: int
    """Ranks of the outermost mesh axis in every stage; if the first stage has fewer devices, in all others."""
    num_micro_batches: int
    """Micro-batches of a step."""
    samples: int
    """Samples of a micro-batch over all replicas."""
    virtual: int = 1
    """Virtual stages of each rank, which are its number of chunks."""
    middle: int = 1
    """Ranks of the mesh axis between dp and tp."""

    @property
    def size(self) -> int:
        """Devices of a stage; if the first stage has fewer, of all others."""
        return self.dp * self.tp * self.middle

    @property
    def num_chunks(self) -> int:
        """Chunks of the graph."""
        return self.pp * self.virtual

    @property
    def replicas(self) -> int:
        """Number of ranks over which ZeRO shards tensors that are B on all of them."""
        return self.dp * self.middle


class Division(NamedTuple):
    """Division of the devices into stages of equal size; the first stage may have fewer devices, the remaining ones."""

    stages: int
    """Number of stages."""
    size: int
    """Devices of a stage, but for the first one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MiddleAxis:
    """The mesh axis between dp and tp."""

    name: Literal["cp", "ep"]
    """Name of the axis. ep: experts are spread over it, all other operators split their batch; cp: the sequence is
    split over it."""
    degrees: tuple[int, ...]
    """Numbers of ranks that the axis may have, ascending."""


def divisors(number: int) -> list[int]:
    """All divisors of a number, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
