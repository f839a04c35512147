"""Matrix products, einsum and convolutions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from automap.runtime.operators.base import FUNCTIONS, Use, function, refuse
from automap.runtime.operators.weight_gradients import convolution, product

FUNCTIONS["MatMul"] = lambda use: product(use.x, use.operand(1))
FUNCTIONS["Einsum"] = lambda use: torch.einsum(use.text("equation"), *use.given())


@function("Gemm")
def gemm(use: Use) -> Tensor:
    """The sum alpha A B + beta C, with A and B transposed if the attributes say so."""
    a = use.x.t() if use.integer("transA") else use.x
    b = use.operand(1).t() if use.integer("transB") else use.operand(1)
    alpha, beta, bias = use.number("alpha", 1.0), use.number("beta", 1.0), use.optional(2)
    if bias is not None and beta != 1.0:
        bias = beta * bias
    if alpha == 1.0:
        return product(a, b, bias)
    ab = alpha * product(a, b)
    return ab if bias is None else ab + bias


def window_pads(
    attributes: Mapping[str, Any], sizes: Sequence[int], windows: Sequence[int], strides: Sequence[int]
) -> tuple[list[int], list[int]]:
    """(begin, end) padding of each spatial dim, with `auto_pad` resolved.

    Args:
        sizes: [spatial dims] the sizes of the operand.
        windows: [spatial dims] the extents of a window, dilation included.
        strides: [spatial dims] the distances between windows.
    """
    mode, rank = attributes.get("auto_pad", "NOTSET"), len(sizes)
    if mode == "VALID":
        return [0] * rank, [0] * rank
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        spare = [max((-(-n // s) - 1) * s + w - n, 0) for n, s, w in zip(sizes, strides, windows, strict=True)]
        small, large = [n // 2 for n in spare], [n - n // 2 for n in spare]
        return (small, large) if mode == "SAME_UPPER" else (large, small)
    pads = attributes.get("pads", (0,) * (2 * rank))
    return list(pads[:rank]), list(pads[rank:])


def padded(x: Tensor, begin: Sequence[int], end: Sequence[int], value: float = 0.0) -> Tensor:
    """`x` with its trailing dims padded with `value`, or cut where a number is negative."""
    flat: list[int] = []
    for low, high in zip(reversed(begin), reversed(end), strict=True):
        flat += [low, high]
    return functional.pad(x, flat, value=value) if any(flat) else x


@function("Conv")
def conv(use: Use) -> Tensor:
    """A convolution over 1 to 3 spatial dims; groups follow from the operands, so that shards need no attribute."""
    x, w = use.x, use.operand(1)
    rank = x.ndim - 2
    strides, dilations = use.ints("strides", (1,) * rank), use.ints("dilations", (1,) * rank)
    windows = [d * (k - 1) + 1 for d, k in zip(dilations, w.shape[2:], strict=True)]
    begin, end = window_pads(use.attributes, x.shape[2:], windows, strides)
    groups = x.shape[1] // w.shape[1]
    return convolution(padded(x, begin, end), w, use.optional(2), strides, dilations, groups)


@function("ConvTranspose")
def conv_transpose(use: Use) -> Tensor:
    """A transposed convolution without padding, cut to the size that the shape rule states."""
    x, w, bias = use.x, use.operand(1), use.optional(2)
    rank = x.ndim - 2
    strides, dilations = use.ints("strides", (1,) * rank), use.ints("dilations", (1,) * rank)
    made: Callable[..., Tensor] = (
        functional.conv_transpose1d,
        functional.conv_transpose2d,
        functional.conv_transpose3d,
    )[rank - 1]
    groups = use.shapes[0][1] // w.shape[1]
    full = made(x, w, None, strides, 0, 0, groups, dilations)
    wanted = use.shapes[0][2:]
    pads = use.ints("pads", (0,) * (2 * rank))
    mode = use.text("auto_pad", "NOTSET")
    begin: list[int] = []
    for i in range(rank):
        extra = use.ints("output_padding", (0,) * rank)[i]
        total = full.shape[2 + i] + extra - wanted[i]
        if mode == "NOTSET" and "output_shape" not in use.attributes:
            begin.append(pads[i])
        elif mode == "SAME_UPPER":
            begin.append(total // 2)
        else:
            begin.append(total - total // 2)
    end = [wanted[i] - full.shape[2 + i] + begin[i] for i in range(rank)]
    found = padded(full, [-b for b in begin], end)
    return found if bias is None else found + bias.reshape(-1, *[1] * rank)


@function("DeformConv")
def deform_conv(use: Use) -> Tensor:
    """A convolution of two spatial dims whose windows read at moved places, each of which a mask may weigh.

    `offsets` are `[n, (parts points 2), h, w]`, rows first; each part of the channels has places of its own.
    """
    x, w, offsets, mask = use.x, use.operand(1), use.operand(2), use.optional(4)
    if x.ndim != 4:
        raise refuse("DeformConv is executed in two dims only", use.name, "Export with images.")
    (samples, channels, *sizes), (rows, columns) = x.shape, w.shape[2:]
    strides, dilations = use.ints("strides", (1, 1)), use.ints("dilations", (1, 1))
    extents = [d * (k - 1) + 1 for d, k in zip(dilations, w.shape[2:], strict=True)]
    begin, _ = window_pads(use.attributes, sizes, extents, strides)
    new, points = offsets.shape[2:], rows * columns
    parts = offsets.shape[1] // (2 * points)
    places = []
    for d, windows in enumerate((rows, columns)):
        own = torch.arange(windows, device=x.device, dtype=x.dtype) * dilations[d]
        own = own.repeat_interleave(columns) if d == 0 else own.repeat(rows)
        first = torch.arange(new[d], device=x.device, dtype=x.dtype) * strides[d] - begin[d]
        place = own.reshape(-1, 1, 1) + (first.reshape(-1, 1) if d == 0 else first)
        place = place + offsets.reshape(samples * parts, points, 2, *new)[:, :, d]
        # Coordinates of grid_sample run from -1 to 1 between the centres of the corners.
        places.append(2.0 * place / max(sizes[d] - 1, 1) - 1.0)
    grid = torch.stack(places[::-1], -1).reshape(samples * parts, points * new[0], new[1], 2)
    read = functional.grid_sample(x.reshape(samples * parts, channels // parts, *sizes), grid, align_corners=True)
    read = read.reshape(samples, parts, channels // parts, points, *new)
    if mask is not None:
        read = read * mask.reshape(samples, parts, 1, points, *new)
    read = read.reshape(samples, channels // w.shape[1], w.shape[1] * points, *new)
    found = torch.einsum("ngkhw,gmk->ngmhw", read, w.reshape(read.shape[1], -1, read.shape[2]))
    found = found.reshape(samples, -1, *new)
    bias = use.optional(3)
    return found if bias is None else found + bias.reshape(-1, 1, 1)
