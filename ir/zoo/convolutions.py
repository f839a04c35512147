"""The families ResNet, EfficientNet and VGG."""

from __future__ import annotations

from dataclasses import dataclass

from ir.graph import Graph
from ir.zoo.net import Net
from ir.zoo.stretch import stretch

BUILT = 3
"""Number of blocks of a stage that are built operator by operator; the remaining blocks are copies of the last one."""
EXPANSION = 4
"""Output channels of a bottleneck block, in multiples of its width (ResNet, arXiv 1512.03385)."""


@dataclass(frozen=True, kw_only=True)
class ResNet:
    """ResNet and its variants: stages of bottleneck blocks with batch norm."""

    blocks: tuple[int, ...]
    """Number of blocks of each stage; each stage except the first halves the image."""
    width: int = 64
    """Channels of the stem; blocks have this width in the first stage, and it doubles with each stage."""
    groups: int = 1
    """Groups of the 3x3 convolutions (ResNeXt, arXiv 1611.05431)."""
    group_width: int = 0
    """Channels of a group in the first stage, doubled like `width` (wide ResNets, arXiv 1605.07146, have twice those of
    a ResNet); 0 = `width`."""
    squeeze: int = 0
    """Reduction ratio of squeeze and excitation (arXiv 1709.01507); 0 = no squeeze and excitation."""
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
        if self.squeeze:
            y = net.excited(y, f"{scope}.se", EXPANSION * width // self.squeeze)
        if stride != 1 or net.shape(x)[1] != EXPANSION * width:
            down = f"{scope}.downsample"
            x = net.conv(x, f"{down}.0", EXPANSION * width, 1, stride=stride, bias=False)
            x = net.batch_norm(x, f"{down}.1")
        return net.op("Relu", [net.add(y, x, scope)], scope)


@dataclass(frozen=True, kw_only=True)
class EfficientNet:
    """EfficientNet: inverted bottlenecks with depthwise convolutions, squeeze and excitation (arXiv 1905.11946)."""

    STAGES = (
        (1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3),
        (6, 5, 1, 112, 3), (6, 5, 2, 192, 4), (6, 3, 1, 320, 1),
    )  # fmt: skip
    """Expansion, window size, stride, channels and number of blocks of each stage of B0 (table 1 of the paper)."""

    width_percent: int = 100
    """Channels in per cent of those of B0."""
    depth_percent: int = 100
    """Number of blocks in per cent of that of B0."""
    image_size: int = 224
    num_classes: int = 1000

    def build(self, loss: str | None) -> Graph:
        """The graph."""
        net = Net()
        image = net.builder.input("image", (1, 3, self.image_size, self.image_size))
        x = self._convolved(net, image, "features.0", self._channels(32), 3, stride=2)
        for number, (expansion, window, stride, channels, blocks) in enumerate(self.STAGES):
            for i in range(-(-blocks * self.depth_percent // 100)):
                scope, step = f"features.{number + 1}.{i}", 1 if i else stride
                x = self._block(net, x, scope, self._channels(channels), (expansion, window, step))
        x = self._convolved(net, x, f"features.{len(self.STAGES) + 1}", 4 * self._channels(320), 1)
        x = net.flatten(net.op("ReduceMean", [x], "avgpool", axes=(2, 3), keepdims=1))
        return net.finish(net.linear(x, "classifier", self.num_classes), loss=loss)

    def _channels(self, of_b0: int) -> int:
        """The channels of B0 scaled by `width_percent`, rounded to a multiple of 8 that is not more than 10% smaller.

        Source: the paper's code.
        """
        wanted = of_b0 * self.width_percent / 100
        found = max(8, int(wanted + 4) // 8 * 8)
        return found if found >= 0.9 * wanted else found + 8

    def _block(self, net: Net, x: str, scope: str, out: int, how: tuple[int, int, int]) -> str:
        expansion, window, stride = how
        narrow = net.shape(x)[1]
        y = self._convolved(net, x, f"{scope}.expand", expansion * narrow, 1) if expansion > 1 else x
        y = self._convolved(net, y, f"{scope}.depthwise", expansion * narrow, window, stride=stride, is_deep=True)
        y = net.excited(y, f"{scope}.se", max(1, narrow // 4), activation="swish")
        y = net.batch_norm(net.conv(y, f"{scope}.project.0", out, 1, bias=False), f"{scope}.project.1")
        return net.add(y, x, scope) if stride == 1 and narrow == out else y

    def _convolved(
        self, net: Net, x: str, scope: str, out: int, window: int, *, stride: int = 1, is_deep: bool = False
    ) -> str:
        groups = out if is_deep else 1
        y = net.conv(x, f"{scope}.0", out, window, stride=stride, pad=window // 2, groups=groups, bias=False)
        return net.swish(net.batch_norm(y, f"{scope}.1"), scope)


@dataclass(frozen=True, kw_only=True)
class Vgg:
    """VGG: stages of 3x3 convolutions, each followed by a pooling that halves the image, and three linear layers."""

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
