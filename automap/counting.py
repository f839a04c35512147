"""How many plans a space has, counted without listing them."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from automap.price.evaluator import blank
from automap.price.legality import count_signatures

if TYPE_CHECKING:
    from automap.meshes import Shape
    from automap.space import PlanSpace


def count_decades(
    space: PlanSpace, *, limit: int | None = None, groups: Collection[tuple[int, int]] | None = None
) -> float:
    """log10 of the number of plans with some decisions pruned; constraints on recomputation are not counted off.

    Args:
        space: of the problem.
        limit: of every slot only the values below it are counted; None = all.
        groups: (unit type, group) whose signatures are decided, the others being forced; None = all.
    """
    modes, zeros = int(space.modes.sum()), int(space.zeros.sum())
    cuts: dict[int, float] = {}
    signatures: dict[tuple[int, ...], float] = {}
    total = -math.inf
    for shape in space.shapes:
        if limit is not None and max(space.meshes.values(shape)) >= limit:
            continue
        if shape.num_chunks not in cuts:
            cuts[shape.num_chunks] = cut_decades(space, shape.num_chunks, limit)
        key = (*space.meshes.mesh(shape), shape.samples)
        if key not in signatures:
            signatures[key] = _signature_decades(space, shape, groups)
        here = cuts[shape.num_chunks] + shape.pp * math.log10(modes) + signatures[key]
        here += math.log10(zeros if shape.replicas > 1 else 1)
        high, low = max(total, here), min(total, here)
        total = high + (math.log10(1 + 10 ** (low - high)) if low > -math.inf else 0.0)
    return total


def _signature_decades(space: PlanSpace, shape: Shape, groups: Collection[tuple[int, int]] | None) -> float:
    """log10 of the number of ways to choose the signatures of all groups, or of some."""
    chosen = blank(space.evaluator, len(space.axes))
    sizes = np.array(space.meshes.mesh(shape), dtype=np.float64)
    total = 0.0
    for number, key in enumerate(space.group_rows):
        if groups is None or key in groups:
            total += math.log10(
                count_signatures(space.evaluator.tables.arrays, space.arrays, number, 0, chosen, sizes, shape.samples)
            )
    return total


def cut_decades(space: PlanSpace, num_chunks: int, limit: int | None) -> float:
    """log10 of the number of ways to cut, of each slot only the values below `limit`."""
    if not space.constrained.stages and (limit is None or limit >= space.num_units):
        return math.log10(math.comb(space.num_units - 1, num_chunks - 1))
    scale = 0.0
    # ways[start]: how the chunks behind may be cut when the next one begins at `start`, times 10^-scale.
    ways = np.ones(space.num_units + 1)
    for chunk in range(num_chunks - 2, -1, -1):
        fewer = np.zeros(space.num_units + 1)
        starts = range(chunk, space.num_units - (num_chunks - 1 - chunk)) if chunk else [0]
        for start in starts:
            fewer[start] = ways[space.candidates(start, chunk, num_chunks)[:limit]].sum()
        scale += math.log10(fewer.max())
        ways = fewer / fewer.max()
    return float(scale + math.log10(ways[0]))
