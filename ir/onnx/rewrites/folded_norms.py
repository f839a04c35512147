"""Restores the batch normalisations that TensorFlow and tf2onnx fold when they export for inference.

They multiply the weights of the convolution by the scale, and name them `.../merged_input` or `..._weights_fused_bn`,
and add the shift to its bias. After a depthwise convolution, scale and shift remain as `.../batchnorm/mul_1` and the
sum that follows. In training, these operators compute statistics, and read and write all activations once more. Other
tools fold them without a trace: a file with many convolutions and residual sums but no normalisation gets a warning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from ir.onnx.readers.nodes import Node, Stored

_FOLDED_WEIGHT = re.compile(r"/merged_input(:\d+)?$|_weights_fused_bn")
_FOLDED_BIAS = re.compile(r"/batchnorm/sub(_\d+)?(:\d+)?$|_bias_fused_bn")
_SCALED = re.compile(r"/batchnorm/mul_\d+$")
_SHIFTED = re.compile(r"/batchnorm/add_\d+$")
"""Patterns of names of tensors and nodes, which come from Keras and are kept by TensorFlow's optimiser."""

MANY_CONVOLUTIONS = 17
"""Residual networks of at least this number of convolutions are assumed to need normalisation (ResNet-18 has 20)."""


def seem_folded(nodes: Sequence[Node], stored: Mapping[str, Stored]) -> tuple[str, ...]:
    """A warning if a network has many convolutions with biases and residual sums, but no normalisation."""
    convolutions = [node for node in nodes if node.kind == "Conv"]
    with_bias = sum(len(node.inputs) > 2 and bool(node.inputs[2]) for node in convolutions)
    is_normalised = any("Norm" in node.kind or node.kind in ("ReduceMean", "LRN") for node in nodes)
    is_residual = any(node.kind == "Add" and not any(name in stored for name in node.inputs) for node in nodes)
    if len(convolutions) < MANY_CONVOLUTIONS or 2 * with_bias < len(convolutions) or is_normalised or not is_residual:
        return ()
    return (
        f"the file has {len(convolutions)} convolutions and no normalisation: if its exporter folded batch "
        "normalisations into them, as for inference, their time and memory are missing here; export for training then",
    )


def restored_norms(nodes: list[Node], stored: dict[str, Stored]) -> list[Node]:
    """The nodes with restored batch normalisations, whose parameters and running statistics are added to `stored`."""
    readers: dict[str, list[int]] = {}
    for index, node in enumerate(nodes):
        for name in node.inputs:
            readers.setdefault(name, []).append(index)
    found: list[Node] = []
    joined = set[int]()
    for index, node in enumerate(nodes):
        if index in joined:
            continue
        if node.kind in ("Conv", "ConvTranspose") and len(node.inputs) > 1 and _FOLDED_WEIGHT.search(node.inputs[1]):
            found += _behind_convolution(node, stored)
        elif node.kind == "Mul" and _SCALED.search(node.name):
            behind = readers.get(node.outputs[0], ())
            shift = behind[0] if len(behind) == 1 and _SHIFTED.search(nodes[behind[0]].name) else None
            made = _of_scale(node, None if shift is None else nodes[shift], stored)
            joined |= {shift} if made is not node and shift is not None else set[int]()
            found.append(made)
        else:
            found.append(node)
    return found


def _norm(
    node: Node, name: str, source: str, output: str, channels: int, dtype: str, stored: dict[str, Stored]
) -> Node:
    """A batch normalisation; its parameters and statistics are stored with names that begin with `name`."""
    names = [f"{name}.{leaf}" for leaf in ("weight", "bias", "running_mean", "running_var")]
    for each in names:
        stored[each] = Stored((channels,), dtype, None, "BUFFER" if "running" in each else "PARAMETER")
    return Node("BatchNormalization", [source, *names], [output], {}, f"{name}#norm", node.scope, node.opset)


def _behind_convolution(node: Node, stored: dict[str, Stored]) -> Sequence[Node]:
    """A convolution without bias, followed by its normalisation; whether it had a bias originally is unknown."""
    weight, bias = (*node.inputs[1:3], "")[:2]
    if weight not in stored or len(stored[weight].shape) < 3:
        return [node]
    shape, groups = stored[weight].shape, int(node.attributes.get("group", 1))
    channels = shape[0] if node.kind == "Conv" else shape[1] * groups
    keeps_bias = bool(bias) and not _FOLDED_BIAS.search(bias)
    before = f"{node.outputs[0]}#folded"
    alone = replace(node, inputs=node.inputs[: 3 if keeps_bias else 2], outputs=[before])
    return [alone, _norm(node, weight, before, node.outputs[0], channels, stored[weight].dtype, stored)]


def _of_scale(scale: Node, shift: Node | None, stored: dict[str, Stored]) -> Node:
    """The normalisation that a product by a scale and a sum with a shift, one number per channel each, replace."""
    factors = [name for name in scale.inputs if name in stored]
    data = [name for name in scale.inputs if name not in stored]
    if len(factors) != 1 or len(data) != 1 or (shift is not None and not any(n in stored for n in shift.inputs)):
        return scale
    held = stored[factors[0]]
    # Channels come first only where the dims of space are after them: [1, c, 1, 1], or [c, 1, 1].
    channels = prod(held.shape)
    if len(held.shape) < 3 or held.shape[-2:] != (1, 1) or channels != held.shape[-3] or channels < 2:
        return scale
    output = (shift or scale).outputs[0]
    return _norm(scale, factors[0], data[0], output, channels, held.dtype, stored)
