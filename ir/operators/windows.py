"""Sliding windows over spatial dims: attributes and output sizes of convolutions and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ir.operators.base import Context, Unsupported

AUTO_PADS = ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")
"""Values of `auto_pad` (operator set 28)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The attributes of one use, with a value for each spatial dim."""

    sizes: tuple[int, ...]
    """Sizes of the window."""
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]
    """Padding before each dim, then after each dim; negative padding crops."""
    mode: str
    """One of `AUTO_PADS`."""

    @property
    def extents(self) -> tuple[int, ...]:
        """The distance from the first to the last element of a dilated window, both included, for each dim."""
        return tuple(d * (k - 1) + 1 for d, k in zip(self.dilations, self.sizes, strict=True))

    @property
    def same(self) -> bool:
        """Whether `auto_pad` determines the padding from the sizes (the two SAME modes)."""
        return self.mode in ("SAME_UPPER", "SAME_LOWER")


def window_of(ctx: Context, sizes: Sequence[int]) -> Window:
    """The window of one use.

    Args:
        ctx: the use.
        sizes: sizes of the window in each spatial dim.

    Raises:
        Unsupported: the number of values of an attribute is not that of the spatial dims, or a value is invalid.
    """
    rank = len(sizes)
    found: dict[str, tuple[int, ...]] = {}
    for name in ("kernel_shape", "strides", "dilations", "pads"):
        is_pads = name == "pads"
        count = 2 * rank if is_pads else rank
        given = ctx.ints(name) or ((0 if is_pads else 1,) * count if name != "kernel_shape" else tuple(sizes))
        if len(given) != count or (not is_pads and min(given, default=1) < 1):
            raise Unsupported(f"{name}={given} for {rank} spatial dims")
        found[name] = given
    if found["kernel_shape"] != tuple(sizes):
        raise Unsupported(f"kernel_shape={found['kernel_shape']} for a weight with windows of {tuple(sizes)}")
    mode = str(ctx.attributes.get("auto_pad", "NOTSET"))
    if mode not in AUTO_PADS:
        raise Unsupported(f"auto_pad={mode} is none of {', '.join(AUTO_PADS)}")
    return Window(
        sizes=tuple(sizes), strides=found["strides"], dilations=found["dilations"], pads=found["pads"], mode=mode
    )


def spatial_sizes(ctx: Context, sizes: tuple[int, ...], window: Window) -> list[int]:
    """Output sizes of a sliding window (ONNX convolution arithmetic, `auto_pad` and `ceil_mode` included)."""
    rank = len(sizes)
    ceil_mode = bool(ctx.int_attribute("ceil_mode", 0))
    found = []
    for i, (size, stride, extent) in enumerate(zip(sizes, window.strides, window.extents, strict=True)):
        if window.same:
            found.append(-(-size // stride))
            continue
        begin, end = (0, 0) if window.mode == "VALID" else (window.pads[i], window.pads[i + rank])
        span = size + begin + end - extent
        steps = -(-span // stride) if ceil_mode else span // stride
        # A window that would start in the padding on the right is dropped, in ONNX as in PyTorch.
        if ceil_mode and steps * stride >= size + begin:
            steps -= 1
        found.append(steps + 1)
    if min(found, default=1) <= 0:
        raise Unsupported(f"window {window.sizes} is larger than the input {sizes}")
    return found


def first_pads(window: Window, sizes: Sequence[int], outputs: Sequence[int]) -> list[int]:
    """Padding before each spatial dim."""
    if not window.same:
        return [0 if window.mode == "VALID" else p for p in window.pads[: len(sizes)]]
    places = zip(outputs, window.strides, window.extents, sizes, strict=True)
    total = [max((o - 1) * s + w - size, 0) for o, s, w, size in places]
    return [t // 2 if window.mode == "SAME_UPPER" else t - t // 2 for t in total]
