"""Kinds that re-arrange elements; sizes come from the shapes of the results."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from automap.runtime.operators.base import Use, function
from automap.runtime.operators.pooling import select_range


@function("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def reshape(use: Use) -> Tensor:
    """Another view of the same elements in the same order."""
    return use.x.reshape(use.shapes[0])


@function("Transpose")
def transpose(use: Use) -> Tensor:
    """A permutation."""
    return use.x.permute(use.ints("perm"))


@function("Slice")
def slice_(use: Use) -> Tensor:
    """Python's slices, also with negative steps."""
    x = use.x
    bounds = zip(use.ints("axes"), use.ints("starts"), use.ints("ends"), use.ints("steps"), strict=True)
    for axis, start, end, step in bounds:
        x = select_range(x, axis, range(*slice(start, end, step).indices(x.shape[axis])))
    return x


@function("Split")
def split(use: Use) -> Sequence[Tensor]:
    """Into the pieces that are listed."""
    return torch.split(use.x, list(use.ints("split")), use.integer("axis"))


@function("Concat")
def concat(use: Use) -> Tensor:
    """Along `axis`."""
    return torch.cat(use.given(), use.integer("axis"))


@function("Expand")
def expand(use: Use) -> Tensor:
    """Broadcasts."""
    return use.x.expand(use.shapes[0])


@function("Tile")
def tile(use: Use) -> Tensor:
    """Repeats whole dims."""
    return use.x.repeat(use.ints("repeats"))


@function("DepthToSpace", "SpaceToDepth")
def depth_space(use: Use) -> Tensor:
    """Blocks of channels become blocks of space, or the reverse."""
    n, c, h, w = use.x.shape
    block = use.integer("blocksize", 1)
    if use.kind == "SpaceToDepth":
        parts = use.x.reshape(n, c, h // block, block, w // block, block)
        order = (0, 3, 5, 1, 2, 4) if use.text("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4)
        return parts.permute(order).reshape(n, c * block**2, h // block, w // block)
    if use.text("mode", "DCR") == "DCR":
        parts = use.x.reshape(n, block, block, c // block**2, h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        parts = use.x.reshape(n, c // block**2, block, block, h, w).permute(0, 1, 4, 2, 5, 3)
    return parts.reshape(n, c // block**2, h * block, w * block)
