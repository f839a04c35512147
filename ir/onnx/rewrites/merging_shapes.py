"""Whether the target shape of a Reshape merges the batch with a neighbouring dim; used by `merged_views`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal

Side = Literal["left", "right", "any"]
"""Neighbour of the batch in a merged dim; `any` where the sizes do not tell."""


def merges(
    shape: Sequence[int], batch_dim: int, target: Sequence[int], batch: int
) -> tuple[int, Side, tuple[int, ...]] | None:
    """How a Reshape merges a batch that is not leading with a neighbour.

    Args:
        shape: shape of the operand at one sample.
        batch_dim: its dim that carries the batch.
        target: target shape, resolved, at the exported batch.
        batch: number of samples of the export.

    Returns:
        the dim of the batch once it is separate, the side of its neighbour, and the shape with the batch separate, at
        one sample; None where the batch leads, keeps a dim of its own, or is not between two dims of the target.
    """
    before = prod(shape[:batch_dim])
    if shape[batch_dim] != 1:
        return None
    if before == 1:
        # Behind one position: in a dim `(s b)` with it or in front of it, which is all the same, or in `(b h)`.
        ones = batch_dim - 1
        size = target[batch_dim] if 0 < batch_dim < len(target) else batch
        if batch > 1 and size % batch == 0 and size != batch and target[:batch_dim] == (1,) * batch_dim:
            return batch_dim, "right", (*target[:batch_dim], 1, size // batch, *target[batch_dim + 1 :])
        if ones < 0 or target[: ones + 1] != (*[1] * ones, batch) or target[ones + 1 : ones + 2] in ((), (1,)):
            return None
        return batch_dim, "any" if batch == 1 else "left", (*target[:ones], 1, 1, *target[ones + 1 :])
    reached = 1
    found: tuple[int, Side, tuple[int, ...]] | None = None
    for d, size in enumerate(target):
        if reached == before:
            if size == batch:
                return None  # a dim of its own
            if size % batch == 0 and found is None:
                apart = (*target[:d], 1, size // batch, *target[d + 1 :])
                found = (d, "any" if batch == 1 else "right", apart)
        reached *= size
        if batch > 1 and reached == before * batch and size % batch == 0 and found is None:
            following = target[d + 1] if d + 1 < len(target) else 0
            if following != 1:
                found = (d + 1, "left", (*target[:d], size // batch, 1, *target[d + 1 :]))
    if found is None and batch == 1 and reached == before:
        return (len(target), "left", (*target, 1))
    return found


def merges_heads(shape: Sequence[int], batch_dim: int, target: Sequence[int], batch: int) -> bool:
    """Whether a Reshape views `[b, h, s, d]`, perhaps with dims of 1, as `[(b h), s, d]`; arguments as of `merges`."""
    if len(shape) < 4 or batch_dim != 0 or not shape[0] == 1 < shape[1] or len(target) != 3:
        return False
    rest = tuple(shape[2:]) if len(shape) == 4 else tuple(size for size in shape[2:] if size != 1)
    return tuple(target) == (batch * shape[1], *rest)


def of_copies(
    shape: Sequence[int], batch_dim: int, target: Sequence[int], batch: int
) -> tuple[int, Side, tuple[int, ...]] | None:
    """How a Reshape views `[copies, (b s), ...]` as `[(copies b s), ...]`; arguments and result as of `merges`."""
    copies, *rest = shape
    if batch_dim != 1 or copies == 1 or rest[0] == 1 or target[:1] != (copies * rest[0] * batch,):
        return None
    return (1, "left", (copies, rest[0], *target[1:])) if prod(target[1:]) == prod(rest[1:]) else None
