"""Softmax and normalisation. Batch normalisation computes as in training: with the statistics of its operand."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from automap.runtime.operators.base import Use, function


@function("Softmax", "LogSoftmax", "Hardmax")
def softmax(use: Use) -> Tensor:
    """Softmax, its logarithm, or a one at the maximum, over `axis`; before version 13 over all dims from `axis` on."""
    x = use.x
    flattens = 0 < use.opset < 13
    axis = use.integer("axis", 1 if flattens else -1) % max(x.ndim, 1)
    flat = x.reshape(prod(x.shape[:axis]), -1) if flattens else x
    dim = 1 if flattens else axis
    if use.kind == "Hardmax":
        top = flat.argmax(dim, keepdim=True)
        found = torch.zeros_like(flat).scatter(dim, top, 1.0)
    else:
        found = torch.softmax(flat, dim) if use.kind == "Softmax" else torch.log_softmax(flat, dim)
    return found.reshape(x.shape)


def _scaled(use: Use, x: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """The tensor times operand 1 plus operand 2, where they are given, viewed in `shape`."""
    for index, joined in ((1, torch.mul), (2, torch.add)):
        side = use.optional(index)
        if side is not None:
            x = joined(x, side if shape is None else side.reshape(*shape))
    return x


@function("LayerNormalization")
def layer_norm(use: Use) -> list[Tensor]:
    """Layer normalisation over the dims from `axis` on; statistics are in float32, the default of `stash_type`."""
    dims = tuple(range(use.integer("axis", -1) % use.x.ndim, use.x.ndim))
    found, mean, inverse = _centred(use.x, dims, use.number("epsilon", 1e-5))
    return [_scaled(use, found), mean, inverse]


def _centred(x: Tensor, dims: tuple[int, ...], epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """The tensor with mean 0 and variance 1 over `dims`; its mean and inverse deviation, in float32 or wider."""
    wide = x if x.dtype == torch.float64 else x.float()
    mean = wide.mean(dims, keepdim=True)
    centred = wide - mean
    inverse = torch.rsqrt((centred**2).mean(dims, keepdim=True) + epsilon)
    return (centred * inverse).to(x.dtype), mean, inverse


@function("RMSNormalization", "SimplifiedLayerNormalization")
def rms_norm(use: Use) -> list[Tensor]:
    """RMS normalisation over the dims from `axis` on; results 1 and 2 of the simplified kind are the same statistic."""
    dims = tuple(range(use.integer("axis", -1) % use.x.ndim, use.x.ndim))
    found, inverse = _by_mean_square(use.x, dims, use.number("epsilon", 1e-5))
    return [_scaled(use, found), inverse, inverse]


def _by_mean_square(x: Tensor, dims: tuple[int, ...], epsilon: float) -> tuple[Tensor, Tensor]:
    """The tensor with mean square 1 over `dims`; the inverse root mean square, in float32 or wider."""
    wide = x if x.dtype == torch.float64 else x.float()
    inverse = torch.rsqrt((wide**2).mean(dims, keepdim=True) + epsilon)
    return (wide * inverse).to(x.dtype), inverse


@function("com.microsoft.SkipLayerNormalization")
def skip_layer_norm(use: Use) -> list[Tensor]:
    """Layer normalisation of operand + skip + bias (0, 1, 4), by scale and shift (2, 3); the sum is the last result."""
    joined = _joined(use, 4)
    found, mean, inverse = _centred(joined, (-1,), use.number("epsilon", 1e-12))
    shift = use.optional(3)
    found = found * use.operand(2)
    return [found if shift is None else found + shift, mean, inverse, joined]


@function("com.microsoft.SkipSimplifiedLayerNormalization")
def skip_rms_norm(use: Use) -> list[Tensor]:
    """RMS normalisation of operand + skip + bias (0, 1, 3), by scale (2); the sum is the last result."""
    joined = _joined(use, 3)
    found, inverse = _by_mean_square(joined, (-1,), use.number("epsilon", 1e-12))
    return [found * use.operand(2), inverse, inverse, joined]


def _joined(use: Use, bias: int) -> Tensor:
    """The residual sum of operands 0 and 1, and of operand `bias` where it is given."""
    found, side = use.x + use.operand(1), use.optional(bias)
    return found if side is None else found + side


@function("BatchNormalization")
def batch_norm(use: Use) -> list[Tensor]:
    """Batch normalisation; results 1 and 2 are running statistics, 3 and 4 those of this batch."""
    x = use.x
    dims = tuple(d for d in range(x.ndim) if d != 1)
    shape = (-1, *[1] * (x.ndim - 2))
    mean = x.mean(dims, keepdim=True)
    variance = ((x - mean) ** 2).mean(dims, keepdim=True)
    found = _scaled(use, (x - mean) * torch.rsqrt(variance + use.number("epsilon", 1e-5)), shape)
    mean, variance = mean.flatten(), variance.flatten()
    kept = use.number("momentum", 0.9)
    running = [
        new.detach() if old is None else old.detach() * kept + new.detach() * (1 - kept)
        for old, new in ((use.optional(3), mean), (use.optional(4), variance))
    ]
    return [found, *running, mean, variance]


@function("InstanceNormalization")
def instance_norm(use: Use) -> Tensor:
    """Normalisation over space, for each sample and channel."""
    x = use.x
    shape = (-1, *[1] * (x.ndim - 2))
    return _scaled(use, _standard(x, tuple(range(2, x.ndim)), use.number("epsilon", 1e-5)), shape)


def _standard(x: Tensor, dims: tuple[int, ...], epsilon: float) -> Tensor:
    mean = x.mean(dims, keepdim=True)
    return (x - mean) * torch.rsqrt(((x - mean) ** 2).mean(dims, keepdim=True) + epsilon)


@function("GroupNormalization")
def group_norm(use: Use) -> Tensor:
    """Normalisation over space and the channels of a group; scale and bias are by channel, or by group before 21."""
    x, groups = use.x, use.integer("num_groups", 1)
    split = x.reshape(x.shape[0], groups, -1)
    found = _standard(split, (2,), use.number("epsilon", 1e-5))
    for index, joined in ((1, torch.mul), (2, torch.add)):
        side = use.optional(index)
        if side is None:
            continue
        wide = side if side.shape[0] == x.shape[1] else side.repeat_interleave(x.shape[1] // groups)
        found = joined(found.reshape(x.shape), wide.reshape(-1, *[1] * (x.ndim - 2)))
    return found.reshape(x.shape)


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
    norm = torch.linalg.vector_norm(use.x, use.integer("p", 2), dim=use.integer("axis", -1), keepdim=True)
    return use.x / torch.where(norm == 0, torch.ones_like(norm), norm)


@function("MeanVarianceNormalization")
def mean_variance_norm(use: Use) -> Tensor:
    """The centred operand divided by its standard deviation plus 1e-9 (ONNX)."""
    dims = use.ints("axes", (0, 2, 3))
    centred = use.x - use.x.mean(dims, keepdim=True)
    return centred / (torch.sqrt((centred**2).mean(dims, keepdim=True)) + 1e-9)
