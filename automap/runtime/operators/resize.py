"""Resize and Upsample. Each dim is multiplied by a matrix of weights: exact in every mode, and differentiable.

`tf_crop_and_resize` is refused, since its region is data.
"""

from __future__ import annotations

from math import ceil, floor

import torch
from torch import Tensor

from automap.runtime.operators.base import Use, function, refuse


@function("Resize", "Upsample")
def resize(use: Use) -> Tensor:
    """The operand resized by nearest, linear or cubic interpolation, one dim after the other."""
    x = use.x
    scales = use.floats("scales") or tuple(o / i for o, i in zip(use.shapes[0], x.shape, strict=True))
    for d, (size, scale) in enumerate(zip(use.shapes[0], scales, strict=True)):
        if size == x.shape[d] and scale == 1.0:
            continue
        matrix = _matrix(use, x.shape[d], size, scale).to(x)
        x = (x.movedim(d, -1) @ matrix.t()).movedim(-1, d)
    return x


def _matrix(use: Use, size: int, wanted: int, scale: float) -> Tensor:
    """[wanted, size] the weight of each input element in each output element of one dim."""
    is_old = use.kind == "Upsample" or 0 < use.opset < 11
    how = "asymmetric" if is_old else use.text("coordinate_transformation_mode", "half_pixel")
    rows = torch.zeros(wanted, size, dtype=torch.float64)
    for position in range(wanted):
        place = _place(how, position, size, wanted, scale)
        for index, weight in _taps(use, place, size, scale, is_old=is_old):
            rows[position, min(max(index, 0), size - 1)] += weight
    return rows


def _place(how: str, position: int, size: int, wanted: int, scale: float) -> float:
    """The position of an output element in the input, elements."""
    if how == "asymmetric":
        return position / scale
    if how == "align_corners":
        return 0.0 if wanted == 1 else position * (size - 1) / (scale * size - 1)
    if how == "pytorch_half_pixel" and wanted == 1:
        return -0.5
    if how == "half_pixel_symmetric":
        adjust = wanted / (scale * size)
        return size / 2 * (1 - adjust) + (position + 0.5) / scale - 0.5
    if how in ("half_pixel", "pytorch_half_pixel"):
        return (position + 0.5) / scale - 0.5
    if how == "tf_half_pixel_for_nn":
        return (position + 0.5) / scale
    raise refuse("this coordinate mode of Resize is not executed", how, "Export with half_pixel.")


def _taps(use: Use, place: float, size: int, scale: float, *, is_old: bool) -> list[tuple[int, float]]:
    """(input index, weight) of one output element; an index outside means the border."""
    mode = use.text("mode", "nearest")
    if mode == "nearest":
        rounding = "floor" if is_old else use.text("nearest_mode", "round_prefer_floor")
        index = {
            "round_prefer_floor": ceil(place - 0.5),
            "round_prefer_ceil": floor(place + 0.5),
            "floor": floor(place),
            "ceil": ceil(place),
        }[rounding]
        return [(index, 1.0)]
    widen = min(scale, 1.0) if use.integer("antialias") else 1.0
    reach = 1 if mode == "linear" else 2
    low, ratio = floor(place), place - floor(place)
    start = floor(-reach / widen) + 1
    taps = []
    for step in range(start, 2 - start):
        distance = abs(step - ratio) * widen
        taps.append((low + step, _weight(mode, distance, use.number("cubic_coeff_a", -0.75))))
    if use.integer("exclude_outside"):
        taps = [(i, w) for i, w in taps if 0 <= i < size]
    total = sum(w for _, w in taps)
    return [(i, w / total) for i, w in taps]


def _weight(mode: str, t: float, a: float) -> float:
    if mode == "linear":
        return max(1.0 - t, 0.0)
    if t <= 1:
        return ((a + 2) * t - (a + 3)) * t * t + 1
    return (((t - 5) * t + 8) * t - 4) * a if t < 2 else 0.0
