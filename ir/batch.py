"""Tracing the batch through constants of a file that was exported at some batch size.

Shapes are stored for one sample. A constant of the file (the target of a Reshape or an Expand, a bound of a Slice) was
written for `export_batch` samples; this module resolves it and converts it to one sample. The batch is always the major
part of its dim: a dim `(a b)` with another loop before the batch cannot be represented, and is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from ir.graph import Tensor


@dataclass(frozen=True)
class Target:
    """The resolved target of a Reshape."""

    shape: tuple[int, ...]
    """Sizes of the dims at one sample."""
    batch_dim: int | None
    """Dim that carries the batch, or None."""
    is_traced: bool = True
    """Whether the dim of the batch is certain, and the batch is its major part."""


def resolve(shape: Sequence[int], target: Sequence[int], *, allow_zero: bool = False) -> tuple[int, ...] | None:
    """Replaces 0 (copy) and -1 (infer) in the target of a Reshape; None where the sizes do not fit."""
    sizes = [shape[i] if t == 0 and not allow_zero and i < len(shape) else t for i, t in enumerate(target)]
    total = prod(shape)
    if sizes.count(-1) > 1 or any(s < -1 for s in sizes):
        return None
    if -1 in sizes:
        rest = prod(s for s in sizes if s != -1)
        if rest == 0 or total % rest:
            return None
        sizes[sizes.index(-1)] = total // rest
    return tuple(sizes) if prod(sizes) == total else None


def reshape_target(
    tensor: Tensor, target: Sequence[int], *, export_batch: int, allow_zero: bool = False
) -> Target | None:
    """The shape of the result of a Reshape, and its batch dim.

    The dims before the batch have the same product of sizes in the input and in the output, which determines the dim of
    the batch in the output.

    Args:
        tensor: input at one sample.
        target: the constant, at `export_batch` samples or at one, with 0 and -1 unresolved.
        export_batch: number of samples of the export.
        allow_zero: whether 0 means an empty dim instead of a copy.

    Returns:
        the target; None where the sizes fit neither `export_batch` samples nor one.
    """
    repeated = None
    if tensor.batch_dim is None and export_batch > 1:
        repeated = _of_one_sample(tensor, target, export_batch, allow_zero=allow_zero)
    for batch in dict.fromkeys((export_batch, 1)):
        shape = resolve(tensor.shape_at(batch), target, allow_zero=allow_zero)
        if shape is not None:
            is_better = (
                repeated is not None and export_batch in target and _kept(tensor, repeated.shape) > _kept(tensor, shape)
            )
            return repeated if is_better else _place(tensor, shape, batch)
    return repeated


def _kept(tensor: Tensor, shape: Sequence[int]) -> int:
    """Number of dims of a tensor that a view does not change; -1 if the two shapes have no common factors."""
    groups = align(tensor.shape, shape)
    if not all(sizes for *_, sizes in groups):
        return -1
    return sum(len(left) == len(right) == 1 for left, right, _ in groups)


def _of_one_sample(tensor: Tensor, target: Sequence[int], batch: int, *, allow_zero: bool) -> Target | None:
    """The target of a Reshape of a tensor that the exporter repeated for each sample, and that is stored once here.

    The samples are removed from the dim of the target for which most dims of the tensor do not change.
    """
    at_one = [i for i, size in enumerate(tensor.shape) if size == 1]
    repeated = [tuple(batch if d == i else size for d, size in enumerate(tensor.shape)) for i in at_one]
    resolved = (resolve(shape, target, allow_zero=allow_zero) for shape in (*repeated, (batch, *tensor.shape)))
    found = next((shape for shape in resolved if shape is not None), None)
    if found is None:
        return None
    shapes = [
        tuple(s // batch if d == dim else s for d, s in enumerate(found))
        for dim, size in enumerate(found)
        if size % batch == 0
    ]
    best = max(shapes, key=lambda shape: _kept(tensor, shape), default=None)
    return None if best is None or _kept(tensor, best) < 0 else Target(best, None)


def _place(tensor: Tensor, shape: tuple[int, ...], batch: int) -> Target:
    """Finds the batch in `shape`, which is at `batch` samples, and brings the shape to one sample."""
    if tensor.batch_dim is None:
        return Target(shape, None)
    before = prod(tensor.shape[: tensor.batch_dim])
    found: list[tuple[bool, int, int]] = []
    reached = 1
    for dim, size in enumerate(shape):
        if reached == before and size % batch == 0:
            same = size == (tensor.shape[tensor.batch_dim] * batch if before > 1 else batch)
            found.append((not same, abs(dim - tensor.batch_dim), dim))
        reached *= size
        if reached > before and not found:
            break
    if found:
        # Of several leading dims of size 1, the one that is the batch dim of the input.
        *_, dim = min(found)
        return Target(tuple(s // batch if i == dim else s for i, s in enumerate(shape)), dim)
    guess = next((i for i, s in enumerate(shape) if s % batch == 0), None)
    if guess is None:
        return Target(shape, None, is_traced=False)
    return Target(tuple(s // batch if i == guess else s for i, s in enumerate(shape)), guess, is_traced=False)


def align(source: Sequence[int], target: Sequence[int]) -> list[tuple[list[int], list[int], list[int]]]:
    """Groups dims of two shapes whose products are equal, and factorises each group.

    Returns:
        triples (input dims, output dims, sizes): the dims of a group have the same product on both sides, and `sizes`,
        major first, are factors of which the dims of either side are products. `sizes` is empty where there are no such
        factors. Dims of size 1 are in no group.
    """
    groups: list[tuple[list[int], list[int], list[int]]] = []
    left = [i for i, s in enumerate(source) if s != 1]
    right = [i for i, s in enumerate(target) if s != 1]
    i = j = 0
    while i < len(left) and j < len(right):
        own, others = [left[i]], [right[j]]
        own_size, other_size = source[left[i]], target[right[j]]
        i, j = i + 1, j + 1
        while own_size != other_size:
            if own_size < other_size and i < len(left):
                own.append(left[i])
                own_size *= source[left[i]]
                i += 1
            elif other_size < own_size and j < len(right):
                others.append(right[j])
                other_size *= target[right[j]]
                j += 1
            else:
                own += left[i:]
                others += right[j:]
                return [*groups, (own, others, [])]
        groups.append((own, others, _refine([source[dim] for dim in own], [target[dim] for dim in others])))
    if i < len(left) or j < len(right):
        groups.append((left[i:], right[j:], []))
    return groups


def _refine(left: Sequence[int], right: Sequence[int]) -> list[int]:
    """Common factors of two factorisations of one number, major first; empty if there are none."""
    marks: set[int] = {1}
    for sizes in (left, right):
        reached = 1
        for size in reversed(sizes):
            reached *= size
            marks.add(reached)
    ordered = sorted(marks)
    sizes = []
    for low, high in pairwise(ordered):
        if high % low:
            return []
        sizes.append(high // low)
    return sizes[::-1]
