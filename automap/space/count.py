"""The number of plans of a space, counted without listing them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from automap.price.lowered_plan import spread
from automap.space.compile import ungrouped
from automap.space.decisions import DECISIONS
from automap.space.kernels import masks
from automap.space.kernels.records import SpaceArrays
from automap.space.shape import Shape
from automap.space.stepping import SteppedSpace

Mesh = tuple[int, int]
"""Ranks of the outer axis of a stage, and the greatest common divisor of the samples of a rank and its inner ranks."""


@dataclass(frozen=True, kw_only=True)
class Signing:
    """The linkage groups whose signatures are counted."""

    arrays: SpaceArrays
    """Records of the space, with the groups."""
    times: Sequence[int]
    """[groups] how often each group is decided."""


def grouped(
    space: SteppedSpace, groups: Collection[tuple[int, int]] | None = None, *, every_unit: bool = False
) -> Signing:
    """The linkage groups of the space.

    Args:
        groups: (unit type, group) of the groups that are counted; None = all.
        every_unit: whether a group counts once for each unit instead of once for each unit type.
    """
    times = _units(space) if every_unit else [1] * len(space.linkage.types)
    return Signing(
        arrays=space.arrays, times=[times[key[0]] if groups is None or key in groups else 0 for key in space.group_rows]
    )


def alone(space: SteppedSpace, *, views: bool) -> Signing:
    """Every operator of every unit as a group of its own, with views of parameters or without them."""
    times = _units(space)
    decided = [
        times[kind] if views or not space.operator(kind, offset).is_view else 0
        for kind, unit in enumerate(space.linkage.types)
        for offset in range(len(unit.signatures))
    ]
    return Signing(arrays=ungrouped(space, space.arrays), times=decided)


def _units(space: SteppedSpace) -> list[int]:
    """[unit types] number of units of each."""
    return [sum(unit.type == kind for unit in space.linkage.blocks.units) for kind in range(len(space.linkage.types))]


def count_decades(space: SteppedSpace, *, limit: int | None = None, signing: Signing | None = None) -> float:
    """log10 of the number of plans with some decisions pruned; constraints on recomputation are ignored.

    Args:
        limit: of each slot only the values below it are counted, except for ZeRO, recomputation and signatures; None =
            all.
        signing: groups whose signatures are decided, while those of all others are forced; None = all linkage groups.
    """
    signing = signing or grouped(space)
    cuts: dict[int, float] = {}
    signatures: dict[object, float] = {}
    total = -math.inf
    for shape in space.shapes:
        if limit is not None and max(space.meshes.values(shape)) >= limit:
            continue
        if shape.num_chunks not in cuts:
            cuts[shape.num_chunks] = cut_decades(space, shape.num_chunks, limit)
        here = cuts[shape.num_chunks]
        for decision in reversed(DECISIONS):
            ways = decision.ways(space, shape)
            # There are few ZeRO stages and levels of recomputation, so all of them are always offered.
            is_few = decision.kind in ("zero", "recompute")
            here += math.log10(ways if limit is None or is_few else min(ways, limit))
        for outer, number in stage_ways(space, shape, limit).items():
            key = (outer, shape.tp, shape.middle)
            if key not in signatures:
                signatures[key] = _signature_decades(space, shape, sorted(outer), signing)
            total = _add(total, here + math.log10(number) + signatures[key])
    return total


def _add(one: float, other: float) -> float:
    """log10 of the sum of two numbers, from their logarithms."""
    high, low = max(one, other), min(one, other)
    return high + (math.log10(1 + 10 ** (low - high)) if low > -math.inf else 0.0)


def stage_ways(space: SteppedSpace, shape: Shape, limit: int | None) -> Counter[frozenset[Mesh]]:
    """For each set of meshes that the stages of a plan may have, the number of ways to decide orders, devices and batch
    shares that give it.

    Args:
        limit: of every slot only the values below it are counted; None = all.
    """
    within = shape.tp * shape.middle
    orders = min(space.meshes.num_orders(shape.pp), limit or len(space.meshes.orders))
    is_mixed = bool((space.arrays.mixed >= 0).any())
    known: dict[tuple[tuple[int, int], ...], list[frozenset[Mesh]]] = {}
    found: Counter[frozenset[Mesh]] = Counter()
    for sizes in _sizes(space, shape, limit):
        outer = [devices // within for devices in sizes]
        for order in range(orders if is_mixed else 1):
            rows = _rows(space, shape, order, sizes) if is_mixed else ()
            stages = tuple(zip(outer, space.arrays.mixed[rows].tolist() if is_mixed else [-1] * shape.pp, strict=True))
            if stages not in known:
                known[stages] = _share_meshes(space, shape, stages, limit)
            for meshes in known[stages]:
                found[meshes] += 1 if is_mixed else orders
    return found


def _sizes(space: SteppedSpace, shape: Shape, limit: int | None) -> Iterator[tuple[int, ...]]:
    """Numbers of devices that the stages of a shape may have."""
    meshes = space.meshes
    if not meshes.may_differ(shape):
        yield meshes.sizes(shape)
        return
    at = meshes.degrees.index(shape.tp), meshes.middles.index(shape.middle)
    fills = meshes.fills[at][meshes.micro_batches.index(shape.num_micro_batches)]
    share = shape.size // meshes.part
    pending: list[tuple[tuple[int, ...], int]] = [((), fills.shape[1] - 1)]
    while pending:
        sizes, left = pending.pop()
        behind = shape.pp - 1 - len(sizes)
        if behind == 0:
            yield tuple(n * meshes.part for n in (*sizes, left))
            continue
        for mine in range(1, left):
            is_offered = mine == share or limit is None or mine < limit
            if is_offered and fills[1, mine] and fills[behind, left - mine]:
                pending.append(((*sizes, mine), left - mine))


def _rows(space: SteppedSpace, shape: Shape, order: int, sizes: Sequence[int]) -> list[int]:
    """[stages] row of each stage among the distinct stages."""
    meshes, arrays = space.meshes, space.arrays
    within = meshes.degrees.index(shape.tp), meshes.middles.index(shape.middle)
    if tuple(sizes) == meshes.sizes(shape):
        return space.usual_rows(shape, order)
    parts = [devices // meshes.part for devices in sizes]
    return [int(arrays.stage_rows[(order, *within, sum(parts[:i]), mine)]) for i, mine in enumerate(parts)]


def _share_meshes(
    space: SteppedSpace, shape: Shape, stages: Sequence[tuple[int, int]], limit: int | None
) -> list[frozenset[Mesh]]:
    """Set of meshes for every way to share out samples.

    Args:
        stages: ranks of the outer axis, and number among those of several kinds of devices, or -1.
    """
    arrays, within = space.arrays, shape.tp * shape.middle
    count = space.meshes.micro_batches.index(shape.num_micro_batches)
    ways: dict[tuple[int, ...], int] = {}
    for way in range(arrays.share_ways.shape[2]):
        ways.setdefault(tuple(int(arrays.share_ways[n, count, way]) for _, n in stages if n >= 0), way)
    legal = list(ways.values())
    if arrays.scalars.proportional and len(legal) > 1:
        legal = legal[1:]
    found = []
    for way in legal:
        if limit is not None and way >= limit:
            continue
        meshes: set[Mesh] = set()
        for ranks, number in stages:
            shares = {spread(shape.samples, ranks) // ranks}
            if number >= 0 and arrays.share_ways[number, count, way]:
                quantum = int(arrays.quanta[number])
                each = arrays.kind_ranks[number] * quantum
                totals = arrays.kind_samples[number, count, way]
                shares = {*(totals // each * quantum).tolist(), *(-(-totals // each) * quantum).tolist()}
            # Whether samples divide depends only on their common factors with the inner axes.
            meshes |= {(ranks, math.gcd(share, within)) for share in shares}
        found.append(frozenset(meshes))
    return found


def _signature_decades(space: SteppedSpace, shape: Shape, meshes: Sequence[Mesh], signing: Signing) -> float:
    """log10 of the number of ways to choose the signatures on these meshes of stages of a shape."""
    inner = space.meshes.mesh(shape)[1:]
    sizes = np.array([(ranks, *inner) for ranks, _ in meshes], dtype=np.float64)
    samples = np.array([ranks * share for ranks, share in meshes], dtype=np.int64)
    times = np.array(signing.times, dtype=np.float64)
    return float(masks.count_decades(space.evaluator.tables.arrays, signing.arrays, times, sizes, samples))


def cut_decades(space: SteppedSpace, num_chunks: int, limit: int | None) -> float:
    """log10 of the number of ways to cut for ranks of equal speed; of each slot only values below `limit` count."""
    if not space.constrained.narrowed and (limit is None or limit >= space.num_units):
        return math.log10(math.comb(space.num_units - 1, num_chunks - 1))
    scale = 0.0
    # ways[start]: number of ways to cut the later chunks if the next one begins at `start`, times 10^-scale.
    ways = np.ones(space.num_units + 1)
    for chunk in range(num_chunks - 2, -1, -1):
        fewer = np.zeros(space.num_units + 1)
        starts = range(chunk, space.num_units - (num_chunks - 1 - chunk)) if chunk else [0]
        for start in starts:
            fewer[start] = ways[space.candidates(start, chunk, num_chunks, num_chunks - chunk)[:limit]].sum()
        scale += math.log10(fewer.max())
        ways = fewer / fewer.max()
    return float(scale + math.log10(ways[0]))
