"""Converts repetitions to an Expand: a Tile of dims of size 1, and look-ups that repeat each row (0 0 1 1 2 2 ...).

Exported mixtures of experts contain such look-ups: tokens are looked up once for each of their experts, and results are
added to their tokens. As look-ups they could not be split by samples; they are replaced by an Expand and a sum. Layers
that repeat heads or copies of tokens (`repeat`, `repeat_interleave`) are exported with a Tile. Its repeated dims could
not be split, and those of an Expand can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ir.build import GraphBuilder
from ir.onnx.readers.nodes import Node
from ir.operators import Value


def add_rows(builder: GraphBuilder, node: Node, inputs: Sequence[str], attributes: Mapping[str, Any]) -> bool:
    """Adds plain operators for a Tile, look-up or scatter of repeated rows; returns whether `node` is one.

    `inputs` are the names of its operands in the builder.
    """
    if node.kind == "Tile" and len(inputs) == 2:
        return _expand(builder, node, inputs)
    if node.kind in ("Gather", "GatherND") and not attributes.get("axis", 0) and not attributes.get("batch_dims", 0):
        return _lookup(builder, node, inputs)
    if node.kind == "ScatterND" and attributes.get("reduction", "none") == "add":
        return _sum(builder, node, inputs)
    return False


def _repeats(value: Value | None, rows: int) -> int:
    """How often the indices repeat each of `rows` rows; 0 where they are others."""
    if value is None or not value.size or value.size % rows or value.dtype.kind not in "iu":
        return 0
    count = value.size // rows
    return count if np.array_equal(value.reshape(-1), np.repeat(np.arange(rows), count)) else 0


def _is_column(node: Node, value: Value) -> bool:
    """Whether indices are a list, or a list of tuples of one where the kind requires index tuples."""
    return value.ndim == 1 if node.kind == "Gather" else value.ndim == 2 and value.shape[1] == 1


def _lookup(builder: GraphBuilder, node: Node, inputs: Sequence[str]) -> bool:
    data, value = builder.tensors.get(inputs[0]), builder.values.get(inputs[1])
    if data is None or data.batch_dim != 0 or value is None or not _is_column(node, value):
        return False
    rows = data.shape[0] * builder.export_batch
    count = _repeats(value, rows)
    if not count:
        return False
    name, rest = node.outputs[0], data.shape[1:]
    x = _plain(builder, node, "Unsqueeze", inputs[0], f"{name}#row", axes=(1,))
    x = _plain(builder, node, "Expand", x, f"{name}#repeated", shape=(data.shape[0], count, *rest))
    _plain(builder, node, "Reshape", x, name, shape=(data.shape[0] * count, *rest))
    return True


def _expand(builder: GraphBuilder, node: Node, inputs: Sequence[str]) -> bool:
    data, value = builder.tensors.get(inputs[0]), builder.values.get(inputs[1])
    if data is None or value is None or value.size != len(data.shape):
        return False
    shape = [1 if times == 1 else size * int(times) for size, times in zip(data.shape, value.reshape(-1), strict=True)]
    is_single = all(
        new == 1 or (size == 1 and data.batch_dim != d)
        for d, (size, new) in enumerate(zip(data.shape, shape, strict=True))
    )
    if is_single:
        _plain(builder, node, "Expand", inputs[0], node.outputs[0], shape=tuple(shape))
    return is_single


def _plain(builder: GraphBuilder, node: Node, kind: str, x: str, result: str, **attributes: Any) -> str:
    builder.add(kind, [x], [result], scope=node.scope, opset=node.opset, attributes=attributes)
    return result


def _sum(builder: GraphBuilder, node: Node, inputs: Sequence[str]) -> bool:
    updates, value, shape = builder.tensors.get(inputs[2]), builder.values.get(inputs[1]), _zeros(builder, inputs[0])
    if updates is None or updates.batch_dim != 0 or value is None or not shape or not _is_column(node, value):
        return False
    count = _repeats(value, shape[0])
    if not count or updates.shape[0] * builder.export_batch != value.size or shape[1:] != updates.shape[1:]:
        return False
    name = node.outputs[0]
    rows = (updates.shape[0] // count, count, *updates.shape[1:])
    x = _plain(builder, node, "Reshape", inputs[2], f"{name}#rows", shape=rows)
    _plain(builder, node, "ReduceSum", x, name, axes=(1,), keepdims=0)
    return True


def _zeros(builder: GraphBuilder, name: str) -> tuple[int, ...]:
    """Shape of a constant of zeros; () for any other tensor, and for a scalar."""
    value = builder.values.get(name)
    if value is not None:
        return () if value.any() else value.shape
    maker = next((op for op in reversed(builder.operators) if name in op.outputs), None)
    is_zero = maker is not None and maker.kind == "ConstantOfShape" and dict(maker.attributes)["value"] == 0
    return builder.tensors[name].shape if is_zero else ()
