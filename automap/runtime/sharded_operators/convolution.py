"""Convolutions and pooling over split space: each rank gets the rows of its neighbours that its windows cover."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from automap.runtime.mesh_groups import Axis
from automap.runtime.operators.contraction import window_pads
from automap.runtime.redistribute import Tag, direction, exchange_rows
from automap.runtime.sharded_operators.call import Call, with_attributes

Ranges = tuple[tuple[int, int], ...]
"""[ranks] a range (start, stop) of one dim of the whole tensor."""


def halo(call: Call) -> tuple[Tensor, ...]:
    """The operator on this rank's rows and those beside them, with zeros at the border of the whole."""
    operator, x = call.operator, call.x
    attributes, rank = operator.attributes, x.ndim - 2
    strides, dilations = attributes.get("strides", (1,) * rank), attributes.get("dilations", (1,) * rank)
    windows = [d * (k - 1) + 1 for d, k in zip(dilations, operator.whole[1][2:], strict=True)]
    begin, end = window_pads(attributes, operator.whole[0][2:], windows, strides)
    for split in operator.splits:
        if split.exchange != "halo":
            continue
        dim = split.signature.inputs[0]
        i, rows = dim - 2, operator.shapes[0][dim]
        starts = [index * rows * strides[i] - begin[i] for index in range(split.axis.size)]
        wanted = tuple((start, start + (rows - 1) * strides[i] + windows[i]) for start in starts)
        x = _Rows.apply(x, split.axis, dim, wanted, call.tag)  # type: ignore[no-untyped-call]
        begin[i] = end[i] = 0
    op = with_attributes(operator.op, pads=(*begin, *end), auto_pad="NOTSET")
    return call.plain(op, [x, *call.operands[1:]])


class _Rows(torch.autograd.Function):
    """The rows that each rank requires; in the backward pass, gradients of rows return to their holders and are summed.

    Rows outside the whole tensor are zero.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, wanted: Ranges, tag: Tag) -> Tensor:
        size = x.shape[dim]
        held = tuple((i * size, (i + 1) * size) for i in range(axis.size))
        ctx.where = axis, dim, wanted, held, tag
        return exchange_rows(x, axis, dim, held, wanted, tag)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        axis, dim, wanted, held, tag = ctx.where
        with direction("backward"):
            return exchange_rows(gradients[0], axis, dim, wanted, held, tag), None, None, None, None
