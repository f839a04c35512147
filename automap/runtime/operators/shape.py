"""Kinds that rearrange elements; sizes come from the shapes of the results."""

from __future__ import annotations

import torch
from torch import Tensor

from automap.runtime.operators.base import FUNCTIONS, Use, function, repeated_rows
from automap.runtime.operators.pooling import select_range

FUNCTIONS.update(
    {
        **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), lambda use: use.x.reshape(use.shapes[0])),
        "Transpose": lambda use: use.x.permute(use.ints("perm")),
        "Split": lambda use: torch.split(use.x, list(use.ints("split")), use.integer("axis")),
        "Concat": lambda use: torch.cat(use.given(), use.integer("axis")),
        "Tile": lambda use: use.x.repeat(use.ints("repeats")),
    }
)


@function("Expand")
def expand(use: Use) -> Tensor:
    """Repeats dims of one; and the rows of one sample, where a batch has them for each of its samples."""
    return repeated_rows(use.x, use.shapes[0]).expand(use.shapes[0])


@function("Slice")
def slice_(use: Use) -> Tensor:
    """The slices of Python, with negative steps too."""
    x = use.x
    bounds = zip(use.ints("axes"), use.ints("starts"), use.ints("ends"), use.ints("steps"), strict=True)
    for axis, start, end, step in bounds:
        x = select_range(x, axis, range(*slice(start, end, step).indices(x.shape[axis])))
    return x


@function("DepthToSpace", "SpaceToDepth")
def depth_space(use: Use) -> Tensor:
    """Blocks of channels moved to blocks of space, or the reverse."""
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
