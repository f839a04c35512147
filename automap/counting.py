"""How many plans a space has, counted without listing them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from automap.price import legality
from automap.price.arrays import SpaceArrays, ungrouped
from automap.stage_sizes import spread

if TYPE_CHECKING:
    from automap.meshes import Shape
    from automap.space import PlanSpace


@dataclass(frozen=True, kw_only=True)
class Signing:
    """Whose signatures are counted."""

    arrays: SpaceArrays
    """Of the groups."""
    times: Sequence[int]
    """[groups] how often each is decided."""


def grouped(
    space: PlanSpace, groups: Collection[tuple[int, int]] | None = None, *, every_unit: bool = False
) -> Signing:
    """Linkage groups decide, or only some of them, as (unit type, group); once a unit type, or once a unit."""
    times = _units(space) if every_unit else [1] * len(space.linkage.types)
    return Signing(
        arrays=space.arrays,
        times=[times[key[0]] if groups is None or key in groups else 0 for key in space.group_rows],
    )


def alone(space: PlanSpace, *, views: bool) -> Signing:
    """Every operator of every unit decides, views of parameters too or not."""
    times = _units(space)
    decided = [
        times[kind] if views or not space.operator(kind, offset).is_view else 0
        for kind, unit in enumerate(space.linkage.types)
        for offset in range(len(unit.signatures))
    ]
    return Signing(arrays=ungrouped(space), times=decided)


def _units(space: PlanSpace) -> list[int]:
    """[unit types] units of each."""
    return [sum(unit.type == kind for unit in space.linkage.blocks.units) for kind in range(len(space.linkage.types))]


def count_decades(space: PlanSpace, *, limit: int | None = None, signing: Signing | None = None) -> float:
    """log10 of the number of plans with some decisions pruned; constraints on recomputation are not counted off.

    Args:
        space: of the problem.
        limit: of every slot only the values below it are counted; None = all.
        signing: whose signatures are decided, all others being forced; None = those of all linkage groups.
    """
    signing = signing or grouped(space)
    modes, zeros = int(space.modes.sum()), int(space.zeros.sum())
    cuts: dict[int, float] = {}
    signatures: dict[object, float] = {}
    total = -math.inf
    for shape in space.shapes:
        if limit is not None and max(space.meshes.values(shape)) >= limit:
            continue
        if shape.num_chunks not in cuts:
            cuts[shape.num_chunks] = cut_decades(space, shape.num_chunks, limit)
        here = cuts[shape.num_chunks] + shape.pp * math.log10(modes)
        here += math.log10(zeros if shape.replicas > 1 else 1)
        kinds = len(space.schedules) if shape.pp > 1 and shape.virtual == 1 else 1
        orders = space.meshes.num_orders(shape.pp)
        here += math.log10(min(kinds, limit or kinds) * min(orders, limit or orders))
        for outer, ways in stage_ways(space, shape, limit).items():
            key = (outer, shape.tp, shape.middle, shape.samples)
            if key not in signatures:
                signatures[key] = _signature_decades(space, shape, sorted(outer), signing)
            total = _add(total, here + math.log10(ways) + signatures[key])
    return total


def _add(one: float, other: float) -> float:
    """log10 of the sum of two numbers of which the logarithms are given."""
    high, low = max(one, other), min(one, other)
    return high + (math.log10(1 + 10 ** (low - high)) if low > -math.inf else 0.0)


def stage_ways(space: PlanSpace, shape: Shape, limit: int | None) -> dict[frozenset[int], int]:
    """Ranks of the outer axis that stages of a shape have between them -> in how many ways.

    Args:
        space: of the problem.
        shape: of the plans.
        limit: of every slot only the values below it are counted; None = all.
    """
    meshes = space.meshes
    if not meshes.may_differ(shape):
        return {frozenset({shape.dp}): 1}
    at = meshes.degrees.index(shape.tp), meshes.middles.index(shape.middle)
    fills = meshes.fills[at][meshes.micro_batches.index(shape.num_micro_batches)]
    share, parts = meshes.devices // shape.pp // meshes.part, fills.shape[1] - 1
    found: Counter[frozenset[int]] = Counter()
    pending: list[tuple[tuple[int, ...], int]] = [((), parts)]
    while pending:
        sizes, left = pending.pop()
        behind = shape.pp - 1 - len(sizes)
        if behind == 0:
            found[frozenset(n * meshes.part // shape.tp // shape.middle for n in (*sizes, left))] += 1
            continue
        for mine in range(1, left):
            is_offered = mine == share or limit is None or mine < limit
            if is_offered and fills[1, mine] and fills[behind, left - mine]:
                pending.append(((*sizes, mine), left - mine))
    return found


def _signature_decades(space: PlanSpace, shape: Shape, outer: Sequence[int], signing: Signing) -> float:
    """log10 of the number of ways to choose the signatures.

    Args:
        space: of the problem.
        shape: of the plans.
        outer: ranks of the outer axis, of unlike stages.
        signing: see `count_decades`.
    """
    inner = space.meshes.mesh(shape)[1:]
    sizes = np.array([(ranks, *inner) for ranks in outer], dtype=np.float64)
    samples = np.array([spread(shape.samples, ranks) for ranks in outer], dtype=np.int64)
    times = np.array(signing.times, dtype=np.float64)
    return float(legality.count_decades(space.evaluator.tables.arrays, signing.arrays, times, sizes, samples))


def cut_decades(space: PlanSpace, num_chunks: int, limit: int | None) -> float:
    """log10 of the number of ways to cut, of each slot only the values below `limit`; of ranks of the same speed."""
    if not space.constrained.narrowed and (limit is None or limit >= space.num_units):
        return math.log10(math.comb(space.num_units - 1, num_chunks - 1))
    scale = 0.0
    # ways[start]: how the chunks behind may be cut when the next one begins at `start`, times 10^-scale.
    ways = np.ones(space.num_units + 1)
    for chunk in range(num_chunks - 2, -1, -1):
        fewer = np.zeros(space.num_units + 1)
        starts = range(chunk, space.num_units - (num_chunks - 1 - chunk)) if chunk else [0]
        for start in starts:
            fewer[start] = ways[space.candidates(start, chunk, num_chunks, num_chunks - chunk)[:limit]].sum()
        scale += math.log10(fewer.max())
        ways = fewer / fewer.max()
    return float(scale + math.log10(ways[0]))
