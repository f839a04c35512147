"""Networks of images and of rows of features, of random sizes: convolutions, pyramids with skips, towers.

The zoo's families of convolutional networks (ResNet, VGG) are among them, unlike every model that the zoo names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agents.learning.problems.draw import Draw
from agents.learning.problems.transformers import RandomModel, is_named, spec_model
from ir.graph import Graph
from ir.zoo.net import Net

# Sizes and numbers of classes of common data sets (CIFAR, ImageNet, ImageNet-21k), and sizes between them.
IMAGES = (32, 64, 96, 128, 160, 192, 224, 224, 224, 256, 288, 320, 384, 448, 512)
CLASSES = (10, 100, 200, 365, 1000, 1000, 21841)
WIDEST = 4096
"""Largest number of channels (assumed)."""


def draw_resnet(draw: Draw) -> RandomModel:
    """A ResNet of the zoo's family."""
    while True:
        blocks = tuple(draw.log_integer(1, 12 if draw.chance(0.85) else 40) for _ in range(draw.integer(2, 5)))
        sizes: dict[str, int | tuple[int, ...]] = {
            "blocks": blocks,
            "width": draw.one((32, 48, 64, 64, 96, 128, 256)),
            "image_size": draw.one(IMAGES),
            "num_classes": draw.one(CLASSES),
        }
        if not is_named("resnet", sizes):
            return spec_model("resnet", "resnet", sizes, sum(blocks))


def draw_vgg(draw: Draw) -> RandomModel:
    """A VGG of the zoo's family."""
    while True:
        convolutions = tuple(draw.integer(1, 5) for _ in range(draw.integer(2, 5)))
        sizes: dict[str, int | tuple[int, ...]] = {
            "convolutions": convolutions,
            "width": draw.one((16, 32, 64, 64, 96)),
            "ffn": draw.log_integer(256, 16384, 256),
            "image_size": draw.one(IMAGES[:11]),
            "num_classes": draw.one(CLASSES),
        }
        if not is_named("vgg", sizes):
            return spec_model("vgg", "vgg", sizes, sum(convolutions))


# -- convolutions in unusual arrangements ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Blocks of convolutions on images of one size."""

    kind: str
    """Key of `_BLOCKS`."""
    blocks: int
    """Number of blocks."""
    channels: int
    """Channels of its result."""


def _activated(net: Net, x: str, scope: str, out: int, kernel: int = 3, *, stride: int = 1, groups: int = 1) -> str:
    """Convolution, batch norm and ReLU."""
    weight = net.parameter(f"{scope}.weight", out, net.shape(x)[1] // groups, kernel, kernel)
    square = {"kernel_shape": (kernel,) * 2, "strides": (stride,) * 2, "dilations": (1, 1), "pads": (kernel // 2,) * 4}
    x = net.op("Conv", [x, weight], scope, group=groups, **square)
    return net.op("Relu", [net.batch_norm(x, f"{scope}.norm")], scope)


def _plain(net: Net, x: str, scope: str, channels: int) -> str:
    return _activated(net, x, scope, channels)


def _residual(net: Net, x: str, scope: str, channels: int) -> str:
    y = _activated(net, _activated(net, x, f"{scope}.conv1", channels), f"{scope}.conv2", channels)
    if net.shape(x)[1] != channels:
        x = _activated(net, x, f"{scope}.project", channels, 1)
    return net.add(y, x, scope)


def _separable(net: Net, x: str, scope: str, channels: int) -> str:
    """A wide convolution of each channel by itself between two narrow ones of all channels (MobileNet-V2)."""
    wide = 4 * net.shape(x)[1]
    y = _activated(net, x, f"{scope}.expand", wide, 1)
    y = _activated(net, y, f"{scope}.depth", wide, groups=wide)
    y = _activated(net, y, f"{scope}.project", channels, 1)
    return net.add(y, x, scope) if net.shape(x)[1] == channels else y


def _parallel(net: Net, x: str, scope: str, channels: int) -> str:
    """Convolutions of several sizes side by side, joined (Inception, arXiv 1409.4842)."""
    part = max(1, channels // 4)
    one = _activated(net, x, f"{scope}.one", channels - 3 * part, 1)
    three = _activated(net, _activated(net, x, f"{scope}.three1", part, 1), f"{scope}.three2", part)
    five = _activated(net, _activated(net, x, f"{scope}.five1", part, 1), f"{scope}.five2", part, 5)
    pool = _activated(net, net.max_pool(x, f"{scope}.pool", 3, 1, 1), f"{scope}.pooled", part, 1)
    return net.op("Concat", [one, three, five, pool], scope, axis=1)


def _excited(net: Net, x: str, scope: str, channels: int) -> str:
    """A residual block whose channels are weighted by their means (squeeze and excitation, arXiv 1709.01507)."""
    y = _activated(net, x, f"{scope}.conv", channels)
    seen = net.op("GlobalAveragePool", [y], f"{scope}.squeeze")
    seen = _activated(net, seen, f"{scope}.squeeze1", max(4, channels // 8), 1)
    weights = net.op("Sigmoid", [net.conv(seen, f"{scope}.squeeze2", channels, 1, bias=True)], scope)
    y = net.op("Mul", [y, weights], scope)
    return net.add(y, x, scope) if net.shape(x)[1] == channels else y


_BLOCKS: dict[str, Callable[[Net, str, str, int], str]] = {
    "plain": _plain, "residual": _residual, "separable": _separable, "parallel": _parallel, "excited": _excited,
}  # fmt: skip


def _stages(draw: Draw, count: int) -> list[Stage]:
    kind = draw.one(tuple(_BLOCKS))
    is_mixed, width = draw.chance(0.3), draw.log_integer(16, 192, 8)
    kinds = [draw.one(tuple(_BLOCKS)) if is_mixed else kind for _ in range(count)]
    return [
        Stage(kind=kinds[level], blocks=draw.log_integer(1, 9), channels=min(WIDEST, width << level))
        for level in range(count)
    ]


def _described(stages: list[Stage]) -> str:
    return " ".join(f"{stage.blocks}x{stage.kind}-{stage.channels}" for stage in stages)


def _add_stage(net: Net, x: str, scope: str, stage: Stage) -> str:
    for number in range(stage.blocks):
        x = _BLOCKS[stage.kind](net, x, f"{scope}.{number}", stage.channels)
    return x


def draw_convolutions(draw: Draw) -> RandomModel:
    """A classifier of images from random blocks of convolutions."""
    stages, size, classes = _stages(draw, draw.integer(2, 5)), draw.one(IMAGES), draw.one(CLASSES)
    has_hidden = draw.chance(0.3)

    def build() -> Graph:
        net = Net()
        x = net.builder.input("image", (1, 3, size, size))
        x = _activated(net, x, "stem", stages[0].channels, 7 if size >= 160 else 3, stride=2 if size >= 96 else 1)
        for level, stage in enumerate(stages):
            if level:
                x = net.max_pool(x, f"down.{level}", 2, 2)
            x = _add_stage(net, x, f"stage.{level}", stage)
        x = net.flatten(net.op("GlobalAveragePool", [x], "pool"))
        if has_hidden:
            x = net.op("Relu", [net.linear(x, "hidden", 4096)], "hidden")
        return net.finish(net.linear(x, "head", classes))

    text = f"convolutions: {_described(stages)}, image {size}, {classes} classes" + (
        ", hidden layer" if has_hidden else ""
    )
    return RandomModel(
        family="convolutions", text=text, num_blocks=sum(s.blocks for s in stages), build=build, tokens=0
    )


def draw_pyramid(draw: Draw) -> RandomModel:
    """A pyramid with skips from each level down to the same level up, for segmentation (U-Net, arXiv 1505.04597)."""
    stages = _stages(draw, draw.integer(2, 5))
    step = 1 << len(stages)
    size = draw.integer(max(1, 64 // step), max(2, 512 // step)) * step
    classes, is_learned = draw.one((2, 4, 19, 21, 150)), draw.chance(0.5)

    def upper(net: Net, x: str, scope: str, channels: int) -> str:
        """Twice as high and wide, with the given channels."""
        if not is_learned:
            x = net.op("Resize", [x], scope, scales=(1.0, 1.0, 2.0, 2.0), mode="nearest")
            return net.conv(x, scope, channels, 1, bias=False)
        weight = net.parameter(f"{scope}.weight", net.shape(x)[1], channels, 2, 2)
        return net.op("ConvTranspose", [x, weight], scope, kernel_shape=(2, 2), strides=(2, 2), pads=(0,) * 4)

    def build() -> Graph:
        net = Net()
        x = net.builder.input("image", (1, 3, size, size))
        skips = []
        for level, stage in enumerate(stages):
            x = _add_stage(net, x, f"down.{level}", stage)
            if level < len(stages) - 1:
                skips.append(x)
                x = net.max_pool(x, f"pool.{level}", 2, 2)
        for level in reversed(range(len(skips))):
            x = upper(net, x, f"rise.{level}", stages[level].channels)
            x = net.op("Concat", [skips[level], x], f"join.{level}", axis=1)
            x = _add_stage(net, x, f"up.{level}", stages[level])
        return net.finish(net.conv(x, "head", classes, 1, bias=True))

    way = "learned" if is_learned else "nearest"
    text = f"pyramid: {_described(stages)}, image {size}, {classes} classes, {way} upsampling"
    num_blocks = sum(s.blocks for s in stages) + sum(s.blocks for s in stages[:-1])
    return RandomModel(family="pyramid", text=text, num_blocks=num_blocks, build=build, tokens=0)


# -- rows of features --------------------------------------------------------------------------------------------------


def draw_towers(draw: Draw, parameters: float) -> RandomModel:
    """Tables of embeddings and towers of linear layers side by side, as for recommendations (arXiv 1606.07792).

    Args:
        draw: random choices.
        parameters: wanted number of parameters; tables and layers share it.
    """
    num_tables, width = draw.integer(0, 8), draw.one((16, 32, 64, 128, 256))
    share = draw.between(0.3, 0.98) if num_tables else 0.0
    tables = [
        max(100, int(share * parameters / num_tables / width * draw.log_between(0.1, 3.0))) for _ in range(num_tables)
    ]
    num_towers, depth = draw.weighted({1: 5, 2: 2, 4: 2, 8: 1}), draw.integer(1, 8)
    hidden = round(((1.0 - share) * parameters / num_towers / depth) ** 0.5 / 32) * 32
    hidden = min(max(hidden, 64), 32768)
    dense, bag, is_wide = draw.one((13, 64, 512, 4096)), draw.one((1, 1, 10, 50)), draw.chance(0.5)
    classes = draw.one((2, 2, 10, 1000, 20000))
    is_gated = num_towers > 1 and draw.chance(0.6)

    def build() -> Graph:
        net = Net()
        features = net.builder.input("features", (1, dense))
        parts = [net.op("Relu", [net.linear(features, "bottom", width)], "bottom")]
        for number, rows in enumerate(tables):
            ids = net.builder.input(f"ids{number}", (1, bag), "int64")
            looked_up = net.embedding(ids, f"table.{number}", rows, width)
            parts.append(net.op("ReduceSum", [looked_up], f"table.{number}", axes=(1,), keepdims=0))
        joined = net.op("Concat", parts, "join", axis=1) if len(parts) > 1 else parts[0]
        results = [_tower(net, joined, f"tower.{tower}", depth, hidden) for tower in range(num_towers)]
        if is_gated:
            gates = net.op("Softmax", [net.linear(joined, "gates", num_towers)], "gates", axis=-1)
            some = net.ops("Split", [gates], "gates", num_towers, axis=-1, split=(1,) * num_towers)
            results = [
                net.op("Mul", [y, gate], f"tower.{n}") for n, (y, gate) in enumerate(zip(results, some, strict=True))
            ]
        x = results[0]
        for other in results[1:]:
            x = net.add(x, other, "sum")
        x = net.linear(x, "head", classes)
        return net.finish(net.add(x, net.linear(joined, "wide", classes, bias=False), "wide") if is_wide else x)

    text = (
        f"towers: {num_tables} tables of {'/'.join(map(str, tables)) or 'no'} rows x {width}, bag {bag}, {dense} "
        f"features, {num_towers} towers{' (gated)' if is_gated else ''} of {depth} x {hidden}, {classes} classes"
        + (", wide part" if is_wide else "")
    )
    return RandomModel(family="towers", text=text, num_blocks=depth, build=build, tokens=0)


def _tower(net: Net, x: str, scope: str, depth: int, hidden: int) -> str:
    for number in range(depth):
        x = net.op("Relu", [net.linear(x, f"{scope}.{number}", hidden)], f"{scope}.{number}")
    return x
