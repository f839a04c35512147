"""Softmax and normalisation. Batch normalisation computes as in training: with the statistics of its operand.

The gradient of a mean that other results are computed from is a partial sum on each rank (`PARTIAL`). The gradient of a
mean that is itself a result is the same on every rank (`BROADCAST`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from automap.runtime.operators.base import Use, function
from ir.factors import BROADCAST, PARTIAL


@function("Softmax", "LogSoftmax", "Hardmax")
def softmax(use: Use) -> Tensor:
    """Softmax, its logarithm, or a one at the maximum, over `axis`; before version 13 over all dims from `axis` on."""
    x, rows = use.x, use.rows
    flattens = 0 < use.opset < 13
    axis = use.integer("axis", 1 if flattens else -1) % max(x.ndim, 1)
    dims = tuple(range(axis, x.ndim)) if flattens else (axis,)
    if use.kind != "Hardmax" and not rows.is_split:
        made = torch.softmax if use.kind == "Softmax" else torch.log_softmax
        return made(x.reshape(*x.shape[:axis], -1) if flattens else x, axis).reshape(x.shape)
    top = rows.largest(x.amax(dims, keepdim=True))
    if use.kind == "Hardmax":
        position, whole = torch.zeros_like(x, dtype=torch.int64), rows.whole(x)
        for dim in dims:
            own = torch.arange(x.shape[dim], device=x.device) + rows.start(0, dim)
            position = position * whole[dim] + own.reshape([-1 if d == dim else 1 for d in range(x.ndim)])
        own_first = torch.where(x == top, position, torch.iinfo(torch.int64).max).amin(dims, keepdim=True)
        return (position == -rows.largest(-own_first)).to(x.dtype)
    powers = torch.exp(x - top)
    total = rows.total(powers.sum(dims, keepdim=True), PARTIAL)
    return powers / total if use.kind == "Softmax" else x - top - torch.log(total)


def _scaled(x: Tensor, sides: Sequence[Tensor | None], shape: Sequence[int] | None = None) -> Tensor:
    """The tensor times a scale plus a shift, where they are given, viewed in `shape`."""
    scale, shift = (side if side is None or shape is None else side.reshape(*shape) for side in sides)
    x = x if scale is None else x * scale
    return x if shift is None else x + shift


def _wide(x: Tensor) -> Tensor:
    """The tensor in float32 or wider."""
    return x if x.dtype == torch.float64 else x.float()


def _standard(
    use: Use, x: Tensor, dims: tuple[int, ...], epsilon: float, *, centre: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean) / sqrt(variance + epsilon) over `dims`; the mean and the variance as results (without `centre`: of 0).

    Args:
        use: the call of the operator.
        x: a tensor with the elements of the first operand, in the type in which statistics are taken.
        dims: the dims of a row.
        epsilon: a small positive number.
        centre: whether the mean is subtracted.
    """
    rows = use.rows
    mean = rows.mean(x, dims, PARTIAL) if centre else x.new_zeros(())
    centred = x - mean if centre else x
    variance = rows.mean(centred**2, dims, PARTIAL)
    found = centred * torch.rsqrt(variance + epsilon)
    if rows.is_split and {1, 2, 3, 4} & set(use.results):
        mean = rows.mean(x, dims, BROADCAST) if centre else mean
        variance = rows.mean(centred**2, dims, BROADCAST)
    return found, mean, variance


def _in_one_kernel(
    use: Use, x: Tensor, dims: tuple[int, ...], sides: Sequence[Tensor | None], epsilon: float, *, centre: bool
) -> Tensor | None:
    """The rows by PyTorch's own kernel, which saves the operand alone; None where it does not compute what is asked."""
    scale, shift = sides
    rows = x.shape[dims[0] :]
    fits = all(side is None or (side.shape == rows and side.dtype == x.dtype) for side in sides)
    if use.rows.is_split or [*use.results] != [0] or not fits or (scale is None and shift is not None):
        return None
    if centre:
        return torch.nn.functional.layer_norm(x, rows, scale, shift, epsilon)
    return torch.nn.functional.rms_norm(x, rows, scale, epsilon) if shift is None else None


def _layer_norm(
    use: Use, x: Tensor, dims: tuple[int, ...], sides: Sequence[Tensor | None], epsilon: float
) -> list[Tensor]:
    """The scaled and shifted rows, their mean and their inverse deviation; RMS: the inverse root mean square twice."""
    centre, epsilon = "RMS" not in use.kind and "Simplified" not in use.kind, use.number("epsilon", epsilon)
    one = _in_one_kernel(use, x, dims, sides, epsilon, centre=centre)
    if one is not None:
        return [one]
    found, mean, variance = _standard(use, _wide(x), dims, epsilon, centre=centre)
    inverse = torch.rsqrt(variance + epsilon)
    return [_scaled(found.to(x.dtype), sides), mean if centre else inverse, inverse]


@function("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
def layer_norm(use: Use) -> list[Tensor]:
    """Normalisation over the dims from `axis` on; statistics are in float32, the default of `stash_type`."""
    dims = tuple(range(use.integer("axis", -1) % use.x.ndim, use.x.ndim))
    return _layer_norm(use, use.x, dims, (use.optional(1), use.optional(2)), 1e-5)


@function("BatchNormalization")
def batch_norm(use: Use) -> list[Tensor]:
    """Batch normalisation; results 1 and 2 are running statistics, 3 and 4 those of this batch."""
    x = use.x
    sides = use.optional(1), use.optional(2)
    if not use.rows.is_split and [*use.results] == [0] and all(s is not None and s.dtype == x.dtype for s in sides):
        # By PyTorch's own kernel, which saves the operand alone.
        return [torch.batch_norm(x, *sides, None, None, True, 0.0, use.number("epsilon", 1e-5), True)]
    dims, shape = tuple(d for d in range(x.ndim) if d != 1), (-1, *[1] * (x.ndim - 2))
    found, *statistics = _standard(use, use.rows.widened(x), dims, use.number("epsilon", 1e-5))
    scaled = _scaled(found.to(x.dtype), sides, shape)
    mean, variance = (statistic.flatten().to(x.dtype) for statistic in statistics)
    kept = use.number("momentum", 0.9)
    running = [
        new.detach() if old is None else old.detach() * kept + new.detach() * (1 - kept)
        for old, new in ((use.optional(3), mean), (use.optional(4), variance))
    ]
    return [scaled, *running, mean, variance]


def _by_sample(use: Use, split: Tensor, sides: Sequence[Tensor | None]) -> Tensor:
    """Normalisation over all dims of `split` but the first two, times a scale plus a shift of each channel."""
    x = use.x
    found, *_ = _standard(use, use.rows.widened(split), tuple(range(2, split.ndim)), use.number("epsilon", 1e-5))
    return _scaled(found.to(x.dtype).reshape(x.shape), sides, (-1, *[1] * (x.ndim - 2)))


@function("InstanceNormalization")
def instance_norm(use: Use) -> Tensor:
    """Normalisation over space, for each sample and channel."""
    return _by_sample(use, use.x, (use.optional(1), use.optional(2)))


@function("GroupNormalization")
def group_norm(use: Use) -> Tensor:
    """Normalisation over space and the channels of a group; scale and bias are by channel, or by group before 21."""
    x, groups = use.x, use.integer("num_groups", 1)
    each = x.shape[1] // groups
    sides = [
        side if side is None or side.shape[0] == x.shape[1] else side.repeat_interleave(each)
        for side in (use.optional(1), use.optional(2))
    ]
    return _by_sample(use, x.reshape(x.shape[0], groups, each, *x.shape[2:]), sides)


@function("LRN")
def local_response_norm(use: Use) -> Tensor:
    """Local response normalisation over a window of `size` channels, whose longer half follows the channel."""
    x, size = use.x, use.integer("size")
    before = (size - 1) // 2
    squares = torch.nn.functional.pad((x**2).movedim(1, -1), (before, size - 1 - before))
    window = squares.unfold(-1, size, 1).sum(-1).movedim(-1, 1)
    scale = use.number("bias", 1.0) + use.number("alpha", 1e-4) / size * window
    return x / scale ** use.number("beta", 0.75)


@function("LpNormalization")
def lp_norm(use: Use) -> Tensor:
    """The operand divided by its norm of order 1 or 2 along `axis`; a row of zeros stays zero."""
    p, axis = use.integer("p", 2), use.integer("axis", -1)
    if use.rows.is_split:
        norm = use.rows.total((use.x.abs() ** p).sum(axis, keepdim=True), PARTIAL) ** (1 / p)
    else:
        norm = torch.linalg.vector_norm(use.x, p, dim=axis, keepdim=True)
    return use.x / torch.where(norm == 0, torch.ones_like(norm), norm)


@function("MeanVarianceNormalization")
def mean_variance_norm(use: Use) -> Tensor:
    """The centred operand divided by its standard deviation plus 1e-9 (ONNX)."""
    dims = tuple(d % use.x.ndim for d in use.ints("axes", (0, 2, 3)))
    centred = use.x - use.rows.mean(use.x, dims, PARTIAL)
    return centred / (torch.sqrt(use.rows.mean(centred**2, dims, PARTIAL)) + 1e-9)
