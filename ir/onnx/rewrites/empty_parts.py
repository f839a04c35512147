"""Slices that are known to hold nothing, and what is joined with them.

PyTorch's older exporter writes `torch.roll` by zero as a slice `[0:]` and a slice `[0:0]`, joined again: the shifted
windows of a video Swin whose window is as long as the video.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ir.onnx.readers.nodes import Node, Stored, small_value
from ir.operators import Value


def without_empty_parts(nodes: Iterable[Node], stored: Mapping[str, Stored]) -> list[Node]:
    """The nodes, with each Concat without its operands of no elements.

    Args:
        nodes: nodes of the file.
        stored: the stored tensors by name.
    """
    nodes = list(nodes)
    values = {name: given.value for name, given in stored.items() if given.value is not None}
    for node in nodes:
        if node.kind == "Constant" and "value" in node.attributes:
            value = small_value(node.attributes["value"])
            values |= {} if value is None else {node.outputs[0]: value}
    empty = {node.outputs[0] for node in nodes if node.kind == "Slice" and _is_empty(node, values)}
    return [_joined(node, empty) if node.kind == "Concat" and empty & set(node.inputs) else node for node in nodes]


def _is_empty(node: Node, values: Mapping[str, Value]) -> bool:
    """Whether a slice with steps of 1 begins where it ends."""
    starts, ends = (values.get(name) for name in (*node.inputs[1:3], "", "")[:2])
    if starts is None or ends is None or starts.shape != ends.shape or not (starts == ends).any():
        return False
    if len(node.inputs) < 5 or not node.inputs[4]:
        return True
    steps = values.get(node.inputs[4])
    return steps is not None and bool((steps == 1).all())


def _joined(node: Node, empty: set[str]) -> Node:
    left = [name for name in node.inputs if name not in empty]
    return replace(node, inputs=left) if left else node
