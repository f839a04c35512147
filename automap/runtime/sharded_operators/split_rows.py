"""Softmax, norms, reductions and attention whose rows are split: sums and maxima run over the ranks of a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from automap.runtime.mesh_groups import Axis
from automap.runtime.operators.base import Rows
from automap.runtime.redistribute import all_reduce
from automap.runtime.sharded_operators.call import Call
from ir.factors import Placement


@dataclass(frozen=True)
class _SplitRows(Rows):
    """Rows of which each rank holds a part."""

    call: Call
    axes: tuple[Axis, ...]
    """The mesh axes over which rows are split."""
    dims: tuple[int, ...]
    """The dims of the first operand that they split."""

    is_split = True

    def total(self, x: Tensor, gradient: Placement) -> Tensor:
        return self.call.total(x, self.axes, gradient)

    def largest(self, x: Tensor) -> Tensor:
        return self.call.largest(x, self.axes)

    def product(self, x: Tensor) -> Tensor:
        # The product of the other ranks is found without a division, which zeros would spoil.
        for axis in self.axes:
            slots = x.new_zeros(axis.size, *x.shape)
            slots[axis.index] = x.detach()
            slots = all_reduce(slots, axis, self.call.tag)
            slots[axis.index] = 1.0
            x = x * slots.prod(0)
        return x

    def mean(self, x: Tensor, dims: tuple[int, ...], gradient: Placement, *, keep: bool = True) -> Tensor:
        # A dim that is split without a collective inside the operator counts with its local size.
        local, whole = self.call.x.shape, self.call.operator.whole[0]
        count = prod(x.shape[d] for d in dims) // prod(local[d] for d in self.dims) * prod(whole[d] for d in self.dims)
        return self.total(x.sum(dims, keepdim=keep), gradient) / count

    def widened(self, x: Tensor) -> Tensor:
        return x if x.dtype == torch.float64 else x.float()

    def whole(self, x: Tensor) -> Sequence[int]:
        return self.call.operator.whole[0]

    def start(self, slot: int, dim: int) -> int:
        return self.call.start(slot, dim)


def over_split_rows(call: Call) -> tuple[Tensor, ...]:
    """The operator of one process, with the statistics of its rows all-reduced."""
    splits = [split for split in call.operator.splits if split.exchange]
    dims = tuple({split.signature.inputs[0] for split in splits})
    return call.plain(rows=_SplitRows(call, tuple(split.axis for split in splits), dims))
