"""Families: plans of a space that are bounded together.

All plans of a *family* have the same degrees and the same number of micro-batches, and share out samples in one way.
Either all of them have virtual stages or none has; their stages are all of the usual sizes, or all of unlike size; and
they have ZeRO 0, or one of ZeRO 1 to 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from automap.space.shape import Shape
from automap.space.space import PlanSpace


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Plans that are bounded together."""

    shapes: tuple[Shape, ...]
    """Their shapes, which differ in the virtual stages alone: one without any, or several with some."""
    zeros: tuple[int, ...]
    """Their ZeRO stages: 0 alone, or some of 1 to 3."""
    way: int = 0
    """Their way to share out the samples of unlike devices; 0: evenly."""
    is_unlike: bool = False
    """Whether their stages are of unlike size."""


def families(space: PlanSpace, shapes: Sequence[Shape]) -> list[Family]:
    """All plans of some shapes of a space, each in one family."""
    together: dict[tuple[int, ...], list[Shape]] = {}
    for shape in shapes:
        key = (shape.pp, shape.tp, shape.middle, shape.num_micro_batches, min(shape.virtual, 2))
        together.setdefault(key, []).append(shape)
    found = []
    for some in together.values():
        first = some[0]
        legal = np.flatnonzero(space.zeros_of(first)).tolist() if first.replicas > 1 else [0]
        zeros: list[tuple[int, ...]] = [(0,)] if 0 in legal else []
        zeros += [tuple(zero for zero in legal if zero > 0)] if max(legal) > 0 else []
        for each in zeros:
            found += [Family(shapes=tuple(some), zeros=each, way=way) for way in ways_to_share(space, first)]
            if space.meshes.may_differ(first):
                found.append(Family(shapes=tuple(some), zeros=each, is_unlike=True))
    return found


def ways_to_share(space: PlanSpace, shape: Shape) -> list[int]:
    """Distinct ways to share out samples over stages of the usual sizes: each differs from those before it in some
    order of the devices."""
    arrays, count = space.arrays, space.meshes.micro_batches.index(shape.num_micro_batches)
    found = set[int]()
    for order in range(space.meshes.num_orders(shape.pp)):
        numbers = [number for number in arrays.mixed[space.usual_rows(shape, order)].tolist() if number >= 0]
        _, first = np.unique(arrays.share_ways[numbers, count], axis=1, return_index=True)
        found.update(first.tolist() if numbers else [0])
    return sorted(found)


def parts(family: Family) -> list[Family]:
    """The family divided by ZeRO stages, so that each part may be bounded more sharply; empty if it has only one."""
    if len(family.zeros) == 1:
        return []
    return [replace(family, zeros=(zero,)) for zero in family.zeros]
