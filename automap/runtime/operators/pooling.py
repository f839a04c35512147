"""Pooling, padding and sampling at points.

The output sizes are those of the shape rule, so that all rounding is decided in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, prod

import torch
from torch import Tensor
from torch.nn import functional

from automap.runtime.operators.base import Use, function, refuse
from automap.runtime.operators.contraction import padded, window_pads


class _Window:
    """A sliding window: its sizes, and the padding that makes exactly the outputs of the shape rule."""

    def __init__(self, use: Use) -> None:
        sizes = use.x.shape[2:]
        self.rank = len(sizes)
        self.kernel = use.ints("kernel_shape")
        self.strides = use.ints("strides", (1,) * self.rank)
        self.dilations = use.ints("dilations", (1,) * self.rank)
        extents = [d * (k - 1) + 1 for d, k in zip(self.dilations, self.kernel, strict=True)]
        self.begin, self.end = window_pads(use.attributes, sizes, extents, self.strides)
        self.reach = [
            (count - 1) * stride + extent
            for count, stride, extent in zip(use.shapes[0][2:], self.strides, extents, strict=True)
        ]
        """[spatial dims] the number of elements of a padded dim that the windows cover."""

    def cover(self, x: Tensor, value: float) -> Tensor:
        """`x` padded with `value` as far as the windows reach."""
        end = [r - s - b for r, s, b in zip(self.reach, x.shape[2:], self.begin, strict=True)]
        return padded(x, self.begin, end, value)

    def sum(self, covered: Tensor) -> Tensor:
        """The sum of each window of a padded tensor."""
        if all(d == 1 for d in self.dilations):
            made: Callable[..., Tensor] = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[
                self.rank - 1
            ]
            return made(covered, self.kernel, self.strides) * prod(self.kernel)
        for i in range(self.rank):
            window = self.dilations[i] * (self.kernel[i] - 1) + 1
            covered = covered.unfold(2 + i, window, self.strides[i])[..., :: self.dilations[i]].sum(-1)
        return covered


@function("MaxPool")
def max_pool(use: Use) -> list[Tensor]:
    """The largest element of each window, and its position in the flattened operand, or within its channel."""
    x, window = use.x, _Window(use)
    made: Callable[..., tuple[Tensor, Tensor]] = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[
        window.rank - 1
    ]
    covered = window.cover(x, -inf if x.is_floating_point() else torch.iinfo(x.dtype).min)
    if len(use.shapes) == 1:
        return [made(covered, window.kernel, window.strides, 0, window.dilations)]  # type: ignore[list-item]
    found, places = made(covered, window.kernel, window.strides, 0, window.dilations, return_indices=True)
    coordinates: list[Tensor] = []
    for i in reversed(range(window.rank)):
        coordinates.insert(0, places % covered.shape[2 + i] - window.begin[i])
        places = places // covered.shape[2 + i]
    order = range(window.rank)
    flat = torch.zeros_like(places)
    for i in reversed(order) if use.integer("storage_order") else order:
        flat = flat * x.shape[2 + i] + coordinates[i]
    if use.integer("within_channels"):
        return [found, flat]
    planes = torch.arange(x.shape[0] * x.shape[1], device=use.device).reshape(*x.shape[:2], *[1] * window.rank)
    return [found, flat + planes * prod(x.shape[2:])]


@function("MaxUnpool")
def max_unpool(use: Use) -> Tensor:
    """The elements at the positions of the maxima, among zeros."""
    x, places, sizes = use.x, use.operand(1), use.ints("target")
    lead = 2 if use.integer("within_channels") else 0
    zeros = x.new_zeros(*x.shape[:lead], prod([*x.shape[lead:2], *sizes]))
    flat: Tensor = zeros.scatter(lead, places.flatten(lead), x.flatten(lead))
    return flat.reshape(*x.shape[:2], *sizes)


@function("AveragePool")
def average_pool(use: Use) -> Tensor:
    """The mean of each window's elements of the operand, with `count_include_pad` of its declared padding too."""
    window = _Window(use)
    ones = torch.ones_like(use.x[:1, :1])
    if not use.integer("count_include_pad"):
        return window.sum(window.cover(use.x, 0.0)) / window.sum(window.cover(ones, 0.0))
    framed = padded(ones, window.begin, window.end, 1.0)
    cut = [r - s for r, s in zip(window.reach, framed.shape[2:], strict=True)]
    return window.sum(window.cover(use.x, 0.0)) / window.sum(padded(framed, [0] * window.rank, cut))


@function("LpPool")
def lp_pool(use: Use) -> Tensor:
    """The norm of order `p` of each window."""
    window, p = _Window(use), use.integer("p", 2)
    return window.sum(window.cover(use.x.abs() ** p, 0.0)) ** (1.0 / p)


@function("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def global_pool(use: Use) -> Tensor:
    """The mean, maximum or norm of each channel."""
    dims = tuple(range(2, use.x.ndim))
    if use.kind == "GlobalAveragePool":
        return use.x.mean(dims, keepdim=True)
    if use.kind == "GlobalMaxPool":
        return use.x.amax(dims, keepdim=True)
    norm: Tensor = torch.linalg.vector_norm(use.x, use.integer("p", 2), dim=dims, keepdim=True)
    return norm


@function("Col2Im")
def columns_to_image(use: Use) -> Tensor:
    """The sum of windows that overlap, each a column of the operand `[n, (channels window), windows]`."""
    image, block = use.ints("image_shape"), use.ints("block_shape")
    rank = len(image)
    strides, dilations = use.ints("strides", (1,) * rank), use.ints("dilations", (1,) * rank)
    pads = use.ints("pads", (0,) * (2 * rank))
    sizes = [size + pads[i] + pads[i + rank] for i, size in enumerate(image)]
    inside = use.x.new_zeros((), dtype=torch.int64)
    first = inside
    for size, kernel, stride, dilation in zip(sizes, block, strides, dilations, strict=True):
        count = (size - dilation * (kernel - 1) - 1) // stride + 1
        inside = (inside[..., None] * size + torch.arange(kernel, device=use.device) * dilation).flatten()
        first = (first[..., None] * size + torch.arange(count, device=use.device) * stride).flatten()
    places = (inside[:, None] + first).flatten()
    channels = use.x.shape[1] // prod(block)
    columns = use.x.reshape(use.x.shape[0], channels, -1)
    whole = columns.new_zeros(*columns.shape[:2], prod(sizes)).index_add(2, places, columns)
    whole = whole.reshape(*columns.shape[:2], *sizes)
    return padded(whole, [-p for p in pads[:rank]], [-p for p in pads[rank:]])


@function("Pad")
def pad(use: Use) -> Tensor:
    """The operand padded with a constant, with its mirror image, with its edge, or with itself repeated."""
    x, mode = use.x, use.text("mode", "constant")
    pads = use.ints("pads")
    begin, end = pads[: x.ndim], pads[x.ndim :]
    if mode == "constant":
        return padded(x, begin, end, use.number("value", 0.0))
    for d in range(x.ndim):
        if begin[d] or end[d]:
            x = x.index_select(d, _mirrored(x.shape[d], begin[d], end[d], mode, use.device))
    return x


def _mirrored(size: int, begin: int, end: int, mode: str, device: torch.device) -> Tensor:
    """[begin + size + end] for each place of a padded dim, the place of its value in the dim of `size` elements.

    Args:
        size: elements of the dim.
        begin, end: elements that are added before and after it.
        mode: mode of ONNX's Pad: edge, wrap or reflect.
        device: device of the result.
    """
    places = torch.arange(-begin, size + end, device=device)
    if mode == "edge":
        return places.clamp(0, size - 1)
    if mode == "wrap":
        return places % size
    if mode != "reflect":
        raise refuse("unknown mode of Pad", mode)
    period = max(2 * (size - 1), 1)
    folded = places % period
    return torch.minimum(folded, period - folded) if size > 1 else torch.zeros_like(places)


def select_range(x: Tensor, dim: int, places: Sequence[int]) -> Tensor:
    """The elements of `dim` at some positions; a view where these are consecutive."""
    if len(places) and list(places) == list(range(places[0], places[0] + len(places))):
        return x.narrow(dim, places[0], len(places))
    return x.index_select(dim, torch.tensor(list(places), dtype=torch.int64, device=x.device))


@function("GridSample")
def grid_sample(use: Use) -> Tensor:
    """The operand sampled at the points of a grid, whose coordinates run from -1 to 1, the last dim first."""
    mode = use.text("mode", "linear")
    how = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    if use.x.ndim == 5 and how == "bicubic":
        raise refuse("cubic GridSample is not executed in three dims", use.name, "Export with linear.")
    return functional.grid_sample(
        use.x,
        use.operand(1).to(use.x.dtype),
        mode=how,
        padding_mode=use.text("padding_mode", "zeros"),
        align_corners=bool(use.integer("align_corners")),
    )


@function("AffineGrid")
def affine_grid(use: Use) -> Tensor:
    """The points of an image of `size`, moved by each sample's affine map."""
    size = (use.x.shape[0], *use.ints("size")[1:])
    return functional.affine_grid(use.x, list(size), align_corners=bool(use.integer("align_corners")))
