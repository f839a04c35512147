"""ResNet and VGG from a few numbers."""

from __future__ import annotations

from dataclasses import dataclass

from ir.graph import Graph
from ir.zoo.net import Net
from ir.zoo.stretch import stretch

BUILT = 3
"""Number of blocks of a stage that are built operator by operator: the first, its successor, and one like all later."""
EXPANSION = 4
"""Channels of a bottleneck's result, in multiples of its width (ResNet, arXiv 1512.03385)."""


@dataclass(frozen=True, kw_only=True)
class ResNet:
    """Stages of bottleneck blocks with batch norm."""

    blocks: tuple[int, ...]
    """Number of blocks of each stage; each stage but the first halves the image."""
    width: int = 64
    """Channels of the stem, doubled from stage to stage."""
    groups: int = 1
    """Groups of the convolutions with windows (ResNeXt, arXiv 1611.05431)."""
    group_width: int = 0
    """Channels of a group in the first stage, doubled like `width` (wide ResNets, arXiv 1605.07146, have twice those of
    a ResNet); 0 = `width`."""
    image_size: int = 224
    num_classes: int = 1000

    def build(self, loss: str | None) -> Graph:
        """The graph."""
        net = Net()
        x = net.builder.input("image", (1, 3, self.image_size, self.image_size))
        x = net.batch_norm(net.conv(x, "conv1", self.width, 7, stride=2, pad=3, bias=False), "bn1")
        x = net.max_pool(net.op("Relu", [x], "relu"), "maxpool", 3, 2, 1)
        for stage, count in enumerate(self.blocks):
            for i in range(min(count, BUILT)):
                stride = 2 if stage and not i else 1
                x = self._block(net, x, f"layer{stage + 1}.{i}", self.width << stage, stride)
        x = net.flatten(net.op("ReduceMean", [x], "avgpool", axes=(2, 3), keepdims=1))
        graph = net.finish(net.linear(x, "fc", self.num_classes), loss=loss)
        for stage, count in enumerate(self.blocks):
            graph = stretch(graph, f"layer{stage + 1}", BUILT - 1, count)
        return graph

    def _block(self, net: Net, x: str, scope: str, width: int, stride: int) -> str:
        inner = width // self.width * (self.group_width or self.width) * self.groups
        y = net.batch_norm(net.conv(x, f"{scope}.conv1", inner, 1, bias=False), f"{scope}.bn1")
        y = net.op("Relu", [y], scope)
        y = net.conv(y, f"{scope}.conv2", inner, 3, stride=stride, pad=1, groups=self.groups, bias=False)
        y = net.op("Relu", [net.batch_norm(y, f"{scope}.bn2")], scope)
        y = net.batch_norm(net.conv(y, f"{scope}.conv3", EXPANSION * width, 1, bias=False), f"{scope}.bn3")
        if stride != 1 or net.shape(x)[1] != EXPANSION * width:
            down = f"{scope}.downsample"
            x = net.conv(x, f"{down}.0", EXPANSION * width, 1, stride=stride, bias=False)
            x = net.batch_norm(x, f"{down}.1")
        return net.op("Relu", [net.add(y, x, scope)], scope)


@dataclass(frozen=True, kw_only=True)
class Vgg:
    """Stages of 3x3 convolutions, each halving the image at its end, and three linear layers."""

    convolutions: tuple[int, ...]
    """Number of convolutions of each stage."""
    width: int = 64
    """Channels of the first stage; doubled from stage to stage up to 8 times."""
    ffn: int = 4096
    """Width of the linear layers."""
    image_size: int = 224
    num_classes: int = 1000

    def build(self, loss: str | None) -> Graph:
        """The graph."""
        net = Net()
        x = net.builder.input("image", (1, 3, self.image_size, self.image_size))
        number = 0
        for stage, count in enumerate(self.convolutions):
            for _ in range(count):
                x = net.conv(x, f"features.{number}", self.width << min(stage, 3), 3, pad=1, bias=True)
                x = net.op("Relu", [x], f"features.{number + 1}")
                number += 2
            x = net.max_pool(x, f"features.{number}", 2, 2)
            number += 1
        x = net.flatten(x)
        for number in (0, 3):
            x = net.op("Relu", [net.linear(x, f"classifier.{number}", self.ffn)], f"classifier.{number + 1}")
        return net.finish(net.linear(x, "classifier.6", self.num_classes), loss=loss)
