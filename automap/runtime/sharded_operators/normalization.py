"""Softmax, normalisations and reductions whose rows are split: their statistics are all-reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from automap.runtime.mesh_groups import Axis
from automap.runtime.redistribute import all_reduce
from automap.runtime.sharded_operators.call import Call
from ir.factors import BROADCAST, PARTIAL

_SCALE_AND_SHIFT: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (torch.mul, torch.add)


def softmax(call: Call) -> list[Tensor]:
    """Softmax, LogSoftmax or Hardmax: the maximum and the sum of each row are all-reduced."""
    operator, x, axes = call.operator, call.x, call.operator.axes("softmax")
    flattens = 0 < operator.op.opset < 13
    axis = operator.attributes.get("axis", 1 if flattens else -1) % x.ndim
    dims = tuple(range(axis, x.ndim)) if flattens else (axis,)
    top = call.largest(x.amax(dims, keepdim=True), axes)
    if operator.op.kind == "Hardmax":
        return [_first_largest(call, top, dims, axes)]
    powers = torch.exp(x - top)
    total = call.total(powers.sum(dims, keepdim=True), axes, PARTIAL)
    return [powers / total if operator.op.kind == "Softmax" else x - top - torch.log(total)]


def _first_largest(call: Call, top: Tensor, dims: tuple[int, ...], axes: Sequence[Axis]) -> Tensor:
    """One at the first position of each row's maximum, zero elsewhere."""
    x, whole = call.x, call.operator.whole[0]
    position = torch.zeros_like(x, dtype=torch.int64)
    for dim in dims:
        size = [1] * x.ndim
        size[dim] = -1
        own = torch.arange(x.shape[dim], device=x.device) + call.start(0, dim)
        position = position * whole[dim] + own.reshape(size)
    own_first = torch.where(x == top, position, prod(whole)).amin(dims, keepdim=True)
    first = -call.largest(-own_first, axes)
    return (position == first).to(x.dtype)


@dataclass(frozen=True)
class _Rows:
    """Rows over which statistics are taken, of which each rank has a part."""

    call: Call
    dims: tuple[int, ...]
    count: int
    """The number of elements of a row on all ranks together."""
    epsilon: float
    axes: Sequence[Axis]
    centre: bool = True
    """Whether the mean is subtracted."""

    def standardised(self, x: Tensor) -> Tensor:
        """(x - mean) / sqrt(variance + epsilon)."""
        wide = _wide(x)
        if self.centre:
            wide = wide - self._total(wide, PARTIAL) / self.count
        squares = self._total(wide * wide, PARTIAL)
        return (wide * torch.rsqrt(squares / self.count + self.epsilon)).to(x.dtype)

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and the inverse deviation as results, whose gradients are whole on every rank."""
        wide = _wide(x)
        squares = self._total(wide * wide, BROADCAST) / self.count
        if not self.centre:
            inverse = torch.rsqrt(squares + self.epsilon)
            return inverse, inverse
        mean = self._total(wide, BROADCAST) / self.count
        return mean, torch.rsqrt(squares - mean * mean + self.epsilon)

    def _total(self, x: Tensor, gradient: int) -> Tensor:
        return self.call.total(x.sum(self.dims, keepdim=True), self.axes, gradient)


def _wide(x: Tensor) -> Tensor:
    """The tensor in float32 or wider."""
    return x if x.dtype == torch.float64 else x.float()


def _affine(x: Tensor, scale_and_shift: Sequence[Tensor], shape: Sequence[int] | None = None) -> Tensor:
    """The tensor times a scale plus a shift, where they are given, viewed in `shape`."""
    for side, join in zip(scale_and_shift, _SCALE_AND_SHIFT, strict=False):
        x = join(x, side if shape is None else side.reshape(*shape))
    return x


def norm(call: Call) -> list[Tensor]:
    """Normalisations and reductions: the statistics of split rows are all-reduced."""
    operator, x, axes = call.operator, call.x, call.operator.axes("norm")
    kind, shape, attributes = operator.op.kind, operator.whole[0], operator.attributes
    rank, epsilon = len(shape), attributes.get("epsilon", 1e-5)
    if kind.startswith("Reduce"):
        return [_reduction(call, axes)]
    if kind in ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"):
        dims = tuple(range(attributes.get("axis", -1) % rank, rank))
        rows = _Rows(call, dims, prod(shape[d] for d in dims), epsilon, axes, kind == "LayerNormalization")
        found = _affine(rows.standardised(x), call.operands[1:3])
        return [found] if len(operator.shapes) == 1 else operator.results([found, *rows.statistics(x)])
    if "Skip" in kind:
        return _skip_norm(call, axes)
    if kind == "InstanceNormalization":
        rows = _Rows(call, tuple(range(2, rank)), prod(shape[2:]), epsilon, axes)
        return [_affine(rows.standardised(x), call.operands[1:3], (-1, *[1] * (rank - 2)))]
    if kind == "GroupNormalization":
        return [_group_norm(call, axes)]
    if kind == "LpNormalization":
        p = attributes.get("p", 2)
        total = call.total((x.abs() ** p).sum(attributes.get("axis", -1), keepdim=True), axes, PARTIAL)
        length = total ** (1 / p)
        return [x / torch.where(length == 0, torch.ones_like(length), length)]
    # MeanVarianceNormalization
    dims = tuple(d % rank for d in attributes.get("axes", (0, 2, 3)))
    count = prod(shape[d] for d in dims)
    centred = x - call.total(x.sum(dims, keepdim=True), axes, PARTIAL) / count
    squares = call.total((centred * centred).sum(dims, keepdim=True), axes, PARTIAL) / count
    return [centred / (torch.sqrt(squares) + 1e-9)]


def _skip_norm(call: Call, axes: Sequence[Axis]) -> list[Tensor]:
    """A normalisation of a residual sum; the sum itself is local."""
    operator, attributes = call.operator, call.operator.attributes
    held = dict(zip(attributes.get("operands", range(len(call.operands))), call.operands, strict=True))
    centre = "Simplified" not in operator.op.kind
    added = held.get(4 if centre else 3)
    joined = held[0] + held[1] if added is None else held[0] + held[1] + added
    rows = _Rows(call, (-1,), operator.whole[0][-1], attributes.get("epsilon", 1e-12), axes, centre)
    found = rows.standardised(joined) * held[2]
    if centre and 3 in held:
        found = found + held[3]
    results = attributes.get("results", range(len(operator.shapes)))
    statistics = rows.statistics(joined) if {1, 2} & set(results) else (found, found)
    return operator.results([found, *statistics, joined])


def _group_norm(call: Call, axes: Sequence[Axis]) -> Tensor:
    """Group normalisation with split space: the channels of a group stay together, groups are those of the shard."""
    x, attributes = call.x, call.operator.attributes
    groups, shape = attributes.get("num_groups", 1), call.operator.whole[0]
    split = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    count = x.shape[1] // groups * prod(shape[2:])
    rows = _Rows(call, tuple(range(2, split.ndim)), count, attributes.get("epsilon", 1e-5), axes)
    sides = [
        side if side.shape[0] == x.shape[1] else side.repeat_interleave(x.shape[1] // groups)
        for side in call.operands[1:3]
    ]
    return _affine(rows.standardised(split).reshape(x.shape), sides, (-1, *[1] * (x.ndim - 2)))


def _reduction(call: Call, axes: Sequence[Axis]) -> Tensor:
    """A reduction over dims that are split: the results of the ranks are reduced once more."""
    operator, x = call.operator, call.x
    how, dims = operator.op.kind.removeprefix("Reduce"), tuple(operator.attributes["axes"])
    keep = bool(operator.attributes["keepdims"])
    if how in ("Max", "Min"):
        sign = 1 if how == "Max" else -1
        local = sign * (sign * x).amax(dims, keepdim=keep)
        top = sign * call.largest(sign * local, axes)
        found: Tensor = torch.where(local == top, local, top)
        return found
    if how == "Prod":
        return _product(call, dims, axes, keep=keep)
    if how == "LogSumExp":
        top = call.largest(x.amax(dims, keepdim=True), axes)
        total = call.total(torch.exp(x - top).sum(dims, keepdim=keep), axes, BROADCAST)
        return torch.log(total) + top.reshape(total.shape)
    if how in ("L1", "L2", "SumSquare"):
        x = x.abs() if how == "L1" else x * x
    total = call.total(x.sum(dims, keepdim=keep), axes, BROADCAST)
    if how == "Mean":
        total = total / prod(operator.whole[0][d] for d in dims)
    if how == "L2":
        total = torch.sqrt(total)
    return torch.log(total) if how == "LogSum" else total


def _product(call: Call, dims: Sequence[int], axes: Sequence[Axis], *, keep: bool) -> Tensor:
    """The product over all ranks; that of the other ranks is found without a division, which zeros would spoil."""
    x = call.x
    for d in sorted(dims, reverse=True):
        x = x.prod(d, keepdim=keep)
    for axis in axes:
        slots = x.new_zeros(axis.size, *x.shape)
        slots[axis.index] = x.detach()
        slots = all_reduce(slots, axis, call.tag)
        slots[axis.index] = 1.0
        x = x * slots.prod(0)
    return x


def batch_norm(call: Call) -> list[Tensor]:
    """Batch normalisation with statistics over the samples of all ranks."""
    operator, x, axes = call.operator, call.x, call.operator.axes("batch_norm")
    dims, shape = tuple(d for d in range(x.ndim) if d != 1), (-1, *[1] * (x.ndim - 2))
    # A dim that is split without an exchange counts with its local size.
    summed = {s.signature.inputs[0] for s in operator.splits if s.exchange}
    count = prod(operator.whole[0][d] if d in summed else x.shape[d] for d in dims)
    rows = _Rows(call, dims, count, operator.attributes.get("epsilon", 1e-5), axes)
    found = _affine(rows.standardised(x), call.operands[1:3], shape)
    if len(operator.shapes) == 1:
        return [found]
    kept, detached = operator.attributes.get("momentum", 0.9), x.detach()
    mean = call.total(detached.sum(dims), axes, BROADCAST) / count
    variance = call.total(((detached - mean.reshape(shape)) ** 2).sum(dims), axes, BROADCAST) / count
    running = [
        old.detach() * kept + new * (1 - kept) for old, new in zip(call.operands[3:5], (mean, variance), strict=False)
    ] or [mean, variance]
    return operator.results([found, *running, mean, variance])
