"""Biases that PyTorch's newer exporter drops because all of their numbers are zero, as fresh ones are.

The file still lists the parameters of the module: a product whose weight is `head.weight`, and which adds nothing where
the module has a parameter `head.bias`, has lost it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ir.onnx.readers.nodes import SIGNATURE_KEY, Node, Stored, metadata

CHANNELS = {"Conv": 0, "ConvTranspose": 1, "Gemm": 1}
"""Dim of the weight that has the channels of the result, by kind of the product (ONNX); of a ConvTranspose those of one
group, of a Gemm with `transB` the other one."""
_PARAMETER = re.compile(r": PARAMETER target='([^']+)'")
"""A parameter among the inputs of an exported program, as the newer exporter writes them down."""


def restore_biases(graph: Any, nodes: Iterable[Node], stored: dict[str, Stored]) -> None:
    """Gives products the biases that they had in the module.

    Args:
        graph: protobuf; its metadata may list the parameters of the module.
        nodes: nodes of the file; products among them take their biases.
        stored: the stored tensors by name; the biases enter it.
    """
    listed = set(_PARAMETER.findall(metadata(graph).get(SIGNATURE_KEY, "")))
    for node in nodes if listed else ():
        if node.kind not in CHANNELS or len(node.inputs) < 2 or any(node.inputs[2:]):
            continue
        module, _, own = node.inputs[1].rpartition(".")
        bias = f"{module}.bias"
        weight = stored.get(node.inputs[1])
        if own != "weight" or weight is None or bias not in listed or bias in stored or len(weight.shape) < 2:
            continue
        dim = CHANNELS[node.kind] - (1 if node.kind == "Gemm" and node.attributes.get("transB", 0) else 0)
        channels = weight.shape[dim] * (node.attributes.get("group", 1) if node.kind == "ConvTranspose" else 1)
        stored[bias] = Stored((channels,), weight.dtype, None, "PARAMETER")
        node.inputs = [*node.inputs[:2], bias]
