"""Transfer: who sends which part of a tensor to whom, between two layouts.

A layout is, for each rank, the box of the whole tensor that it holds; ranks with equal boxes are replicas, and boxes
that differ share no element. Every rank computes the same answers from the plan alone. Partial tensors are no layout.
Nothing here communicates. Units: elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from automap.runtime.stage_program import Box

TensorLayout = Mapping[int, Box]
"""Rank -> what it holds of a tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of a tensor that one rank needs and one rank gives."""

    source: int
    target: int
    """Ranks; equal where nothing has to be sent."""
    box: Box


def transfer(sources: TensorLayout, targets: TensorLayout) -> list[Piece]:
    """How every target gets its box: in parts, each from a rank that holds it.

    A target that holds a part itself takes its own; else replicas of a part take turns by the place of the target.

    Args:
        sources: the layout that is there.
        targets: the layout that is wanted, of the same tensor.
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
    """What two boxes have in common, None if nothing."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return found if all(start < stop for start, stop in found) else None


def inside(box: Box, frame: Box) -> tuple[slice, ...]:
    """Slices that take `box` out of a tensor that holds `frame`."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, frame, strict=True))


def extent(box: Box) -> tuple[int, ...]:
    """Sizes of a box."""
    return tuple(stop - start for start, stop in box)
