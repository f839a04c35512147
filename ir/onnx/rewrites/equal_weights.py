"""Recognises weights that a tool duplicated or merged, by their numbers, in files without marks of parameters.

Tools that fold constants store the transpose of a tied embedding in addition to the embedding. Tools that remove
duplicates store newly initialised biases and scales of many layers only once, since their numbers are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import numpy_helper

from ir.onnx.readers.nodes import DTYPES, SMALL_INTEGERS, Node, Stored, has_data
from ir.onnx.readers.roles import MATRIX_POSITIONS, WEIGHT_POSITIONS
from ir.onnx.rewrites.exporter_quirks import content, is_filled
from ir.operators import Value

PRODUCTS = dict.fromkeys(
    ("MatMul", "Gemm", "FusedMatMul", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"), 1
) | {"QLinearMatMul": 3}
"""Kind of node that may be a head -> position of its weight."""
VECTORS = dict.fromkeys(("Add", "Mul"), (0, 1)) | dict.fromkeys(("Conv", "ConvTranspose", "Gemm"), (2,)) | {
    kind: WEIGHT_POSITIONS[kind]
    for kind in ("BatchNormalization", "InstanceNormalization", "LayerNormalization", "GroupNormalization",
                 "RMSNormalization", "SimplifiedLayerNormalization")
}  # fmt: skip
"""Kind -> operand positions of biases and scales. Operands of other kinds may be parts of one vector."""
ROUNDED = 0.8
"""Smallest correlation of two separately quantised copies of a matrix (assumed): that of two roundings of 100,000
normally distributed numbers to 4 bits is 0.95, that of two independent matrices of 1,000 numbers at most 0.1."""
LOOKED_UP = {"Gather": 0, "EmbedLayerNormalization": 2}
"""Kind of node that looks up rows -> position of the table."""


def tables_and_heads(
    reads: Iterable[tuple[str, int, str]], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[set[str], set[str]]:
    """Names of the matrices in which rows are looked up, and of weights of products that may be copies of them.

    Args:
        reads: kind of a node, position, name of the operand there.
        shapes: shapes of the stored float tensors.
    """
    tables, weights = set[str](), set[str]()
    for kind, at, name in reads:
        if len(shapes.get(name, ())) == 2:
            if LOOKED_UP.get(kind) == at:
                tables.add(name)
            elif PRODUCTS.get(kind) == at:
                weights.add(name)
    wanted = {size for name in tables for size in (shapes[name], shapes[name][::-1])}
    heads = {name for name in weights - tables if shapes[name] in wanted}
    alike = {size for name in heads for size in (shapes[name], shapes[name][::-1])}
    return {name for name in tables if shapes[name] in alike}, heads


def tied_heads(nodes: Iterable[Node], stored: dict[str, Stored], tensors: Mapping[str, Any]) -> list[Node]:
    """Replaces heads that are stored in addition to the embedding to which they are tied.

    Returns:
        nodes (Transpose or Identity of an embedding) that compute the heads, which are removed from `stored`.
    """
    reads = [(node.kind, i, name) for node in nodes for i, name in enumerate(node.inputs)]
    shapes = {n: s.shape for n, s in stored.items() if n in tensors and s.dtype.startswith(("float", "bfloat"))}
    tables, heads = tables_and_heads(reads, shapes)
    known: dict[tuple[tuple[int, ...], object], tuple[str, bool]] = {}
    for name in tables if heads else ():
        if not is_filled(tensors[name]):
            for turned in (False, True):
                shape = shapes[name][::-1] if turned else shapes[name]
                key = content(tensors[name], turned=turned)
                if key is not None:
                    known[(shape, key)] = (name, turned)
    made = []
    for name in heads if known else ():
        table = known.get((shapes[name], content(tensors[name]))) or rounded_table(name, tables, tensors)
        if table is not None:
            kind, attributes = ("Transpose", {"perm": (1, 0)}) if table[1] else ("Identity", {})
            made.append(Node(kind, [table[0]], [name], attributes))
            del stored[name]
    return sorted(made, key=lambda node: node.outputs[0])


def rounded_table(head: str, tables: Iterable[str], tensors: Mapping[str, Any]) -> tuple[str, bool] | None:
    """The table of which a quantised head is a copy; numbers differ slightly, since both are quantised separately.

    Args:
        head: name of the weight of a product.
        tables: names of the matrices in which rows are looked up.
        tensors: stored tensors (protobuf) by name, floats or quantised.

    Returns:
        name of the table, and whether the head is its transpose; None if there is no such table, or if the head is not
        quantised.
    """
    if DTYPES[tensors[head].data_type] not in SMALL_INTEGERS or not has_data(tensors[head]) or is_filled(tensors[head]):
        return None
    given = _centred(tensors[head])
    for name in sorted(tables):
        if not has_data(tensors[name]) or is_filled(tensors[name]):
            continue
        table = _centred(tensors[name])
        for turned in (False, True):
            other = table.T if turned else table
            if other.shape == given.shape and float((other * given).sum()) >= ROUNDED:
                return name, turned
    return None


def _centred(tensor: Any) -> Value:
    """The numbers of a tensor minus their mean, scaled to a Euclidean norm of 1."""
    value = np.asarray(numpy_helper.to_array(tensor)).astype(np.float32)
    value -= value.mean()
    return np.asarray(value / np.sqrt(np.square(value).sum()))


def separate_fresh(nodes: list[Node], stored: dict[str, Stored], tensors: Mapping[str, Any]) -> None:
    """Gives each reader of a newly initialised vector (all elements are equal) its own copy.

    Not applied if several products read the same matrix: then layers are applied several times and may share vectors.
    """
    matrices, places = list[str](), dict[str, list[tuple[Node, int]]]()
    for node in nodes:
        for i, name in enumerate(node.inputs):
            shape = stored[name].shape if name in stored else ()
            if i in MATRIX_POSITIONS.get(node.kind, ()) and len(shape) > 1:
                matrices.append(name)
            elif len(shape) == 1 and shape[0] > 1:
                places.setdefault(name, []).append((node, i))
    if len(set(matrices)) < len(matrices):
        return
    for name, found in places.items():
        is_float = stored[name].dtype.startswith(("float", "bfloat"))
        if len(found) < 2 or not is_float or not all(i in VECTORS.get(node.kind, ()) for node, i in found):
            continue
        if name not in tensors or not is_filled(tensors[name]):
            continue
        for number, (node, i) in enumerate(found[1:], 2):
            own = f"{name}#{number}"
            stored[own] = replace(stored[name])
            node.inputs[i] = own
