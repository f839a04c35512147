"""The families U-Net and AmoebaNet: convolutional networks with skip connections over many layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ir.graph import Graph
from ir.zoo.net import Net

CELLS = 3
"""Stacks of normal cells of AmoebaNet, with a reduction cell between two stacks (arXiv 1802.01548, figure 2)."""


@dataclass(frozen=True, kw_only=True)
class UNet:
    """U-Net (arXiv 1505.04597): a contracting and an expanding path, with skip connections at each level.

    In the variant used in papers on pipeline parallelism: convolutions without bias, each followed by an instance norm
    and a leaky ReLU, and nearest-neighbour upsampling.
    """

    convolutions: int
    """Number of convolutions of each level, on the contracting path, at the bottom and on the expanding path."""
    width: int = 64
    """Channels of the first level; doubled with each level."""
    levels: int = 5
    """Number of times that the image is halved."""
    dropout_percent: int = 0
    """Percentage of the channels that are dropped after each convolution."""
    image_size: int = 192
    num_classes: int = 1
    """Output channels."""

    def build(self, loss: str | None) -> Graph:
        """The graph; with a single output channel, the loss is the mean squared error."""
        net, skips = Net(), []
        x = net.builder.input("image", (1, 3, self.image_size, self.image_size))
        for level in range(self.levels):
            width = self.width << level
            x = self._convolutions(net, x, f"encoder.{level}", width, width)
            skips.append(x)
            x = net.max_pool(x, f"encoder.{level}.down", 2, 2)
        x = self._convolutions(net, x, "bottleneck", self.width << self.levels, self.width << (self.levels - 1))
        for level in reversed(range(self.levels)):
            width = max(1, (self.width << level) // 2)
            scope = f"decoder.{level}"
            scales = net.builder.constant(f"{scope}.scales", np.array([1, 1, 2, 2], dtype=np.float32))
            x = net.op("Resize", [x, "", scales], f"{scope}.up", mode="nearest")
            x = net.op("Concat", [x, skips.pop()], scope, axis=1)
            x = self._convolutions(net, x, scope, width, width)
        scores = net.conv(x, "segment", self.num_classes, 1, bias=False)
        return net.finish(scores, loss=loss or ("mse" if self.num_classes == 1 else None))

    def _convolutions(self, net: Net, x: str, scope: str, inner: int, out: int) -> str:
        for number in range(self.convolutions):
            width, own = out if number == self.convolutions - 1 else inner, f"{scope}.{number}"
            x = net.dropout(net.conv(x, f"{own}.conv", width, 3, pad=1, bias=False), own, self.dropout_percent)
            scale, bias = (
                net.builder.constant(f"{own}.norm.{name}", np.full(width, value, dtype=np.float32))
                for name, value in (("scale", 1.0), ("bias", 0.0))
            )
            x = net.op("InstanceNormalization", [x, scale, bias], f"{own}.norm", epsilon=1e-5)
            x = net.op("LeakyRelu", [x], own, alpha=0.01)
        return x


@dataclass(frozen=True, kw_only=True)
class AmoebaNet:
    """AmoebaNet-D (arXiv 1802.01548), as in TensorFlow's and GPipe's code: each cell reads the two previous cells."""

    layers: int
    """Number of normal cells, a multiple of 3."""
    width: int
    """Four times the channels of the stem; the first normal cells have as many channels."""
    image_size: int = 224
    num_classes: int = 1000

    def build(self, loss: str | None) -> Graph:
        """The graph."""
        net, channels = Net(), self.width // 4
        image = net.builder.input("image", (1, 3, self.image_size, self.image_size))
        # The first cell reads the result of the stem in place of two previous cells.
        before = x = _Cell(net, "stem1", channels).convolved(image, channels, (3, 3), strides=(2, 2))
        was_reduced = False
        names = [("stem2", True), ("stem3", True)]
        for stack in range(CELLS):
            names += [(f"cell{2 * stack + 1}_normal{i + 1}", False) for i in range(self.layers // CELLS)]
            names += [(f"cell{2 * stack + 2}_reduction", True)] if stack < CELLS - 1 else []
        for scope, is_reduction in names:
            channels *= 2 if is_reduction else 1
            cell = _Cell(net, scope, channels)
            before, x = x, cell.of(x, before, is_reduction=is_reduction, was_reduced=was_reduced)
            was_reduced = is_reduction
        x = net.op("GlobalAveragePool", [x], "classify.pool")
        return net.finish(net.linear(net.flatten(x), "classify.fc", self.num_classes), loss=loss)


class _Cell:
    """One cell of AmoebaNet.

    Its states 0 and 1 are its two inputs, brought to the cell's number of channels. Each of five pairs of operations
    reads two states and adds their sum as the next state. The tables list, for each pair, both operations and the
    indices of the states that they read; the result concatenates the states listed in `..._RESULT`.
    """

    NORMAL = (
        ("conv_1x1", 1, "pool", 1), ("none", 1, "conv_7x7", 0), ("conv_1x1", 0, "conv_7x7", 0),
        ("pool", 2, "none", 2), ("pool", 1, "conv_1x1", 5),
    )  # fmt: skip
    REDUCTION = (
        ("max_2x2", 0, "pool", 0), ("none", 2, "conv_3x3", 1), ("conv_7x7", 2, "pool", 2),
        ("none", 3, "max_2x2", 1), ("pool", 2, "conv_1x1", 3),
    )  # fmt: skip
    NORMAL_RESULT, REDUCTION_RESULT = (0, 3, 4, 6), (4, 5, 6)

    def __init__(self, net: Net, scope: str, channels: int) -> None:
        self.net, self.scope, self.channels, self.number = net, scope, channels, 0

    def of(self, x: str, before: str, *, is_reduction: bool, was_reduced: bool) -> str:
        """The result of the cell, which reads the previous cell's result `x` and that of the cell before, `before`."""
        states = [self.convolved(x, self.channels)]
        if was_reduced:
            states.append(self.halved(before))
        elif self.net.shape(before)[1] != self.channels:
            states.append(self.convolved(before, self.channels))
        else:
            states.append(before)
        for one, of_one, other, of_other in self.REDUCTION if is_reduction else self.NORMAL:
            made = [
                self.operation(kind, states[number], 2 if is_reduction and number < 2 else 1)
                for kind, number in ((one, of_one), (other, of_other))
            ]
            states.append(self.net.op("Add", made, self.scope))
        taken = self.REDUCTION_RESULT if is_reduction else self.NORMAL_RESULT
        return self.net.op("Concat", [states[number] for number in taken], self.scope, axis=1)

    def operation(self, kind: str, x: str, stride: int) -> str:
        """One operation of a pair, by its name in the tables."""
        narrow = self.channels // 4
        if kind == "none":
            return x if stride == 1 else self.halved(x)
        if kind == "max_2x2":
            return self.net.max_pool(x, self._scope("pool"), 2, stride)
        if kind == "pool":
            window = {"kernel_shape": (3, 3), "strides": (stride,) * 2, "pads": (1,) * 4, "count_include_pad": 0}
            return self.net.op("AveragePool", [x], self._scope("pool"), **window)
        if kind == "conv_1x1":
            return self.convolved(x, self.channels, strides=(stride, stride))
        x = self.convolved(x, narrow)
        if kind == "conv_3x3":
            x = self.convolved(x, narrow, (3, 3), strides=(stride, stride))
        else:
            x = self.convolved(x, narrow, (1, 7), strides=(1, stride))
            x = self.convolved(x, narrow, (7, 1), strides=(stride, 1))
        return self.convolved(x, self.channels)

    def convolved(
        self, x: str, out: int, window: tuple[int, int] = (1, 1), *, strides: tuple[int, int] = (1, 1)
    ) -> str:
        """A ReLU, a convolution that keeps or (with stride 2) halves the size of the image, and a batch norm."""
        scope = self._scope("conv")
        return self.net.batch_norm(self._conv(self.net.op("Relu", [x], scope), out, window, strides, scope), scope)

    def halved(self, x: str) -> str:
        """Halves the image by two 1x1 convolutions of stride 2, the second of which reads the pixels shifted by one."""
        scope, half = self._scope("halve"), self.channels // 2
        x = self.net.op("Relu", [x], scope)
        shifted = self.net.op("Slice", [x], scope, starts=(1, 1), ends=self.net.shape(x)[2:], axes=(2, 3))
        shifted = self.net.op("Pad", [shifted], scope, pads=(0, 0, 0, 0, 0, 0, 1, 1))
        both = [self._conv(one, half, (1, 1), (2, 2), f"{scope}.{number}") for number, one in enumerate((x, shifted))]
        return self.net.batch_norm(self.net.op("Concat", both, scope, axis=1), scope)

    def _conv(self, x: str, out: int, window: tuple[int, int], strides: tuple[int, int], scope: str) -> str:
        weight = self.net.parameter(f"{scope}.conv.weight", out, self.net.shape(x)[1], *window)
        pads = tuple(size // 2 for size in window) * 2
        return self.net.op("Conv", [x, weight], f"{scope}.conv", kernel_shape=window, strides=strides, pads=pads)

    def _scope(self, kind: str) -> str:
        """A new scope inside that of the cell."""
        self.number += 1
        return f"{self.scope}.{kind}{self.number}"
