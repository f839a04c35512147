"""Which rank sends which part of a tensor to which rank, between two tensor layouts.

A tensor layout is, for each rank, the box of the whole tensor that it holds; ranks with equal boxes are replicas, and
unequal boxes share no element. A partial tensor has no such layout. Every rank finds the same answer from the plan
alone. Nothing here communicates. Units: elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from automap.runtime.tensor_layout import Box

TensorLayout = Mapping[int, Box]
"""Rank -> the box of a tensor that it holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of a tensor that one rank needs and one rank sends."""

    source: int
    """The rank that sends."""
    target: int
    """The rank that receives; equal to `source` where nothing has to be sent."""
    box: Box


def transfer(sources: TensorLayout, targets: TensorLayout) -> list[Piece]:
    """The pieces of which every target puts its box together, each from a rank that holds it.

    A target that holds a part itself uses its own; otherwise the replicas of a part take turns, by the position of the
    target.

    Args:
        sources: the layout that the tensor has.
        targets: the layout that is required, of the same tensor.
    """
    holders: dict[Box, list[int]] = {}
    for rank, box in sources.items():
        holders.setdefault(box, []).append(rank)
    found = []
    for number, (target, wanted) in enumerate(targets.items()):
        for box, ranks in holders.items():
            part = overlap(box, wanted)
            if part is not None:
                source = target if target in ranks else ranks[number % len(ranks)]
                found.append(Piece(source=source, target=target, box=part))
    return found


def overlap(one: Box, other: Box) -> Box | None:
    """The intersection of two boxes, None if it is empty."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return found if all(start < stop for start, stop in found) else None


def inside(box: Box, frame: Box) -> tuple[slice, ...]:
    """The slices that cut `box` out of a tensor that holds `frame`."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, frame, strict=True))


def extent(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)
