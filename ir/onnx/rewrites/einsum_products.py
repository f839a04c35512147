"""Einsums that are products with a matrix, as JAX's exporters write every linear layer: read as MatMul.

A fused weight behind a MatMul is taken apart, and a bias behind it costs nothing of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ir.build import GraphBuilder
from ir.onnx.readers.nodes import Node

_PRODUCT = re.compile(r"(\.\.\.)?([A-Za-z]*)([A-Za-z]),\3([A-Za-z])->(\.\.\.)?\2\4")
"""As in `abk,kn->abn`."""


def as_product(builder: GraphBuilder, node: Node, inputs: Sequence[str]) -> Node:
    """The node, as a MatMul where it is a product with a matrix of all samples.

    `inputs` are the names of its operands in the builder.
    """
    found = _PRODUCT.fullmatch(str(node.attributes.get("equation", "")).replace(" ", ""))
    matrix = builder.tensors.get(inputs[1]) if len(inputs) == 2 else None
    if found is None or matrix is None or matrix.batch_dim is not None or found[1] != found[5]:
        return node
    letters = found[2] + found[3] + found[4]
    is_product = len(set(letters)) == len(letters) and bool(found[1] or found[2])
    return replace(node, kind="MatMul", attributes={}) if is_product else node
