"""Reversed sequences: a ReverseSequence of full lengths, as in bidirectional layers of TensorFlow, as a Slice.

The Slice has a step of -1. If the lengths are data and differ among samples, the node stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ir.build import GraphBuilder
from ir.onnx.readers.nodes import Node


def reverse_sequence(builder: GraphBuilder, node: Node, inputs: Sequence[str], attributes: Mapping[str, Any]) -> bool:
    """Adds a Slice for a ReverseSequence of full lengths; returns whether `node` is one.

    `inputs` are the names of its operands in the builder.
    """
    if node.kind != "ReverseSequence" or len(inputs) < 2:
        return False
    data, lengths = builder.tensors.get(inputs[0]), builder.values.get(inputs[1])
    axis = int(attributes.get("time_axis", 0))
    if data is None or lengths is None or axis >= len(data.shape) or axis == data.batch_dim:
        return False
    size = data.shape[axis]
    if not lengths.size or not (lengths == size).all():
        return False
    attributes = {"axes": (axis,), "starts": (size - 1,), "ends": (-size - 1,), "steps": (-1,)}
    builder.add("Slice", [inputs[0]], node.outputs[:1], name=node.name, scope=node.scope, attributes=attributes)
    return True
