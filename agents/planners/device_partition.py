"""SPP's partition: divides the layers of a model among stages, whose devices are consecutive in a given order.

A dynamic program over suffixes. W(k, l, i, r) is the least time that the slowest stage or channel needs for one
micro-batch when the last k stages have the layers from l and the devices from place i of the order, r of them the first
of these stages:

    W(1, l, i, V - i) = s(1, i, V - i)[l, L]
    W(k, l, i, r)     = min over l' > l and r' of max(s(k, i, r)[l, l'], x(i, r, r')[l'], W(k - 1, l', i + r, r'))

s is what a stage takes for its layers, its share of the reduction of gradients included, x what the channel between two
stages takes (SPP, Luo et al., INFOCOM 2022, arXiv 2204.10562; the recurrence is reconstructed). Going from the last
stage to the first, k says how many micro-batches a stage holds under 1F1B, so that s can be infinite where they do not
fit. The best partition is found for every number of stages. Units: seconds, layers, devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from agents.planners.kernels.partitions import least_of_most
from automap.arrays import Floats, Ints


class StageOf(NamedTuple):
    """A stage of a partition."""

    first: int
    """First layer."""
    last: int
    """One past the last layer."""
    place: int
    """Place of its first device in the order."""
    devices: int
    """Number of its devices, which follow each other in the order."""


class Partition(NamedTuple):
    """Stages in the order of the layers, and what the slowest stage or channel takes for one micro-batch."""

    load_s: float
    stages: tuple[StageOf, ...]


StageSeconds = Callable[[int, int, int], Floats]
"""(number of stages from this one to the last, place of the first device, number of devices) ->
[layers + 1, layers + 1] entry [i, j]: seconds of a micro-batch in a stage of the layers i to j - 1; infinite where they
do not fit and where j <= i."""
ChannelSeconds = Callable[[int, int, int], Floats]
"""(place of the first device, number of devices, number of devices of the next stage) -> [layers + 1] seconds of the
channel between the two stages if the second one begins with this layer."""


def partitions(
    layers: int,
    devices: int,
    sizes: Sequence[int],
    seconds: StageSeconds,
    channel: ChannelSeconds | None,
    most: int,
    *,
    step: int | None = None,
    tiled: bool = False,
) -> Iterator[Partition]:
    """Yields the best partition for each number of stages that has one, from 1 stage on.

    Args:
        layers: number of layers.
        devices: number of devices; every device is used.
        sizes: numbers of devices that a stage may have.
        seconds: time of a stage.
        channel: time of the channel between two stages; None = channels take no time.
        most: largest number of stages.
        step: stages begin only at places that are multiples of it; None = the greatest common divisor of the sizes.
        tiled: whether a stage begins at a multiple of its number of devices.
    """
    sizes = sorted(sizes)
    if not sizes:
        return
    step = step or math.gcd(*sizes)
    # (place, devices of the first stage) -> [layers + 1] W with one stage less than `count`.
    worth: dict[tuple[int, int], Floats] = {}
    ways: list[dict[tuple[int, int], tuple[Ints, Ints]]] = []
    for count in range(1, min(most, layers, devices) + 1):
        # Place -> the possible sizes of the next stage if it begins there.
        nexts: dict[int, list[int]] = {}
        for place, size in sorted(worth):
            nexts.setdefault(place, []).append(size)
        found: dict[tuple[int, int], Floats] = {}
        # Place -> the time of the stages from there on, where it does not depend on the stage before.
        afters: dict[int, tuple[Floats, Ints]] = {}
        way: dict[tuple[int, int], tuple[Ints, Ints]] = {}
        for place in range(0, devices, step):
            for size in sizes:
                rest = place + size
                if tiled and place % size:
                    continue
                if count == 1:
                    if rest == devices:
                        found[place, size] = seconds(1, place, size)[:, layers].copy()
                    continue
                behind = nexts.get(rest)
                if behind is None:
                    continue
                # Time of the stages after the cut before each layer, with the best size of the next stage.
                if channel is not None:
                    after, nearest = _least([np.maximum(worth[rest, it], channel(place, size, it)) for it in behind])
                else:
                    if rest not in afters:
                        afters[rest] = _least([worth[rest, it] for it in behind])
                    after, nearest = afters[rest]
                best, ends = np.empty(layers + 1), np.empty(layers + 1, dtype=np.int64)
                least_of_most(seconds(count, place, size), after, best, ends)
                if np.isfinite(best).any():
                    found[place, size] = best
                    way[place, size] = ends, np.array(behind)[nearest]
        ways.append(way)
        worth = found
        firsts = [size for size in sizes if (0, size) in worth and np.isfinite(worth[0, size][0])]
        if firsts:
            first = min(firsts, key=lambda size: float(worth[0, size][0]))
            yield Partition(float(worth[0, first][0]), tuple(_traced(ways, layers, first)))


def _least(times: Sequence[Floats]) -> tuple[Floats, Ints]:
    """For each layer the least of several times, and the number of it; of equal times the first."""
    of_all = np.array(times)
    return of_all.min(axis=0), of_all.argmin(axis=0)


def _traced(ways: Sequence[dict[tuple[int, int], tuple[Ints, Ints]]], layers: int, size: int) -> Iterator[StageOf]:
    """The stages of the best partition whose first stage has `size` devices, read from the choices of each step."""
    layer = place = 0
    for count in range(len(ways), 1, -1):
        ends, nexts = ways[count - 1][place, size]
        end = int(ends[layer])
        yield StageOf(layer, end, place, size)
        layer, place, size = end, place + size, int(nexts[end])
    yield StageOf(layer, layers, place, size)
