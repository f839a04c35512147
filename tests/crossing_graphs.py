"""Small graphs in which several tensors cross nearly everywhere; each ends in cross-entropy."""

from ir.graph import Graph
from ir.zoo.net import Net

CLASSES = 12


class _Net(Net):
    def convolution(self, x: str, channels: int, scope: str, size: int = 3, stride: int = 1) -> str:
        weight = self.parameter(f"{scope}.weight", channels, self.shape(x)[1], size, size)
        window = {"kernel_shape": (size, size), "pads": ((size - 1) // 2,) * 4, "strides": (stride, stride)}
        return self.op("Relu", [self.op("Conv", [x, weight, self.bias(scope, channels)], scope, **window)], scope)

    def wider(self, x: str, channels: int, scope: str) -> str:
        weight = self.parameter(f"{scope}.weight", self.shape(x)[1], channels, 2, 2)
        window = {"kernel_shape": (2, 2), "strides": (2, 2)}
        return self.op("ConvTranspose", [x, weight, self.bias(scope, channels)], scope, **window)

    def bias(self, scope: str, channels: int) -> str:
        return self.parameter(f"{scope}.bias", channels)

    def classified(self, x: str) -> Graph:
        flat = self.op("Flatten", [x], "head", axis=1)
        y = self.op("MatMul", [flat, self.parameter("head.weight", self.shape(flat)[1], CLASSES)], "head")
        return self.finish(y, loss="cross_entropy")


def unet(levels: int = 3, width: int = 4, blocks: int = 2) -> Graph:
    """Convolutions down a pyramid and up again, each level read again on the way up."""
    net, skips = _Net(), []
    x = net.convolution(net.builder.input("image", (1, 3, 4 << levels, 4 << levels)), width, "enter")
    for level in range(levels):
        for block in range(blocks):
            x = net.convolution(x, width << level, f"down.{level}.{block}")
        skips.append(x)
        x = net.convolution(x, width << (level + 1), f"narrower.{level}", stride=2)
    for block in range(blocks):
        x = net.convolution(x, width << levels, f"middle.{block}")
    for level in reversed(range(levels)):
        x = net.op("Concat", [net.wider(x, width << level, f"wider.{level}"), skips.pop()], f"up.{level}", axis=1)
        for block in range(blocks):
            x = net.convolution(x, width << level, f"up.{level}.{block}")
    return net.classified(x)


def cells(count: int = 8, width: int = 8) -> Graph:
    """Each cell reads the results of the two before it, as those of NASNet do."""
    net = _Net()
    image = net.builder.input("image", (1, 3, 8, 8))
    before, x = net.convolution(image, width, "first"), net.convolution(image, width, "second")
    for number in range(count):
        own = net.convolution(x, width, f"cells.{number}.own")
        other = net.convolution(before, width, f"cells.{number}.other", size=1)
        before, x = x, net.op("Add", [own, other], f"cells.{number}")
    return net.classified(x)


def towers(layers: int = 10, width: int = 16) -> Graph:
    """Two stacks of linear layers, one behind the other in the file, which are compared."""
    net, ends = _Net(), []
    for tower in ("left", "right"):
        x = net.builder.input(tower, (1, width))
        for layer in range(layers):
            scope = f"{tower}.{layer}"
            x = net.op("MatMul", [x, net.parameter(f"{scope}.weight", width, width)], scope)
            x = net.op("Tanh", [x], scope)
        ends.append(x)
    return net.classified(net.op("Mul", ends))


GRAPHS = {"unet": unet, "cells": cells, "towers": towers}
