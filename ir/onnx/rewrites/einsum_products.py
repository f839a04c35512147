"""Converts Einsums to simpler products.

An Einsum that is a product with a matrix, which JAX's exporters write for every linear layer, becomes a MatMul, so that
fused weights can be separated and a following bias is not priced separately. An Einsum of more than two operands
becomes a sequence of products of two, from left to right, as PyTorch and ONNX Runtime compute it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ir.build import GraphBuilder
from ir.onnx.readers.nodes import Node
from ir.operators.contraction import explicit

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


def in_pairs(node: Node) -> list[Node]:
    """The Einsums of two operands each that an Einsum of more operands is."""
    terms, result = explicit(str(node.attributes.get("equation", "")))
    if len(terms) != len(node.inputs):
        return [node]
    found: list[Node] = []
    product, made = terms[0], node.inputs[0]
    for number, (name, term) in enumerate(zip(node.inputs[1:], terms[1:], strict=True), 1):
        both, is_last = f"{product},{term}", number == len(terms) - 1
        later = f"{result}{''.join(terms[number + 1 :])}"
        dots = "..." if "..." in both else ""
        product = result if is_last else dots + "".join(c for c in dict.fromkeys(both) if c.isalpha() and c in later)
        output = node.outputs[0] if is_last else f"{node.outputs[0]}#product{number}"
        label = f"{node.name}#product{number}" if node.name and not is_last else node.name
        equation = {"equation": f"{both}->{product}"}
        found.append(replace(node, inputs=[made, name], outputs=[output], attributes=equation, name=label))
        made = output
    return found
