"""Look-ups that a tool computed and stored: the table of the rows is the parameter, and not what was looked up.

The biases of relative positions (Swin, BEiT, T5) and the sinks of attention (gpt-oss) are a few numbers of each head,
which attention reads at all pairs of positions. Where constants are folded, all pairs are stored, `[1, heads, queries,
keys]`: many times more numbers than the model has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import isqrt, prod
from typing import Any

import numpy as np
from onnx import numpy_helper

from ir.onnx.readers.nodes import COMPUTED, ROWS_KEY, Node, Stored, has_data, metadata
from ir.onnx.rewrites.computed_tables import MAX_ELEMENTS

READERS = ("Add", "Concat")
"""Kinds that read such tensors."""
TO_SOFTMAX = frozenset({"Add", "Sub", "Concat", "Reshape", "Squeeze", "Unsqueeze", "Cast", "Where", "Identity"})
"""Kinds between them and the softmax of attention."""
MAX_STEPS = 6
"""Operators in front of the softmax that are followed (assumed; Swin has four: bias, two views, mask)."""
LEAST_SHARE = 2
"""Pairs of positions for each row, at least (assumed; a window of 2 x 2 has 16 pairs and 9 rows, and is left as it is:
its table is as large as what was looked up)."""
OPSET = 13
"""Operator set of the operators that are written (ONNX)."""


def rows_of(tensor: Any) -> int:
    """The rows of the table that a large stored tensor was looked up in, if it was; else 0. Metadata may say it.

    Args:
        tensor: protobuf.
    """
    shape = tuple(tensor.dims)
    if len(shape) not in (3, 4) or min(shape) < 1 or prod(shape) > MAX_ELEMENTS:
        return 0
    pairs = prod(shape) // shape[-3]
    if not has_data(tensor):
        text = metadata(tensor).get(ROWS_KEY, "")
        return int(text) if text.isdecimal() and 0 < int(text) * LEAST_SHARE <= pairs else 0
    value = np.asarray(numpy_helper.to_array(tensor)).reshape(-1, shape[-3], prod(shape[-2:]))
    columns = np.ascontiguousarray(np.moveaxis(value, 1, 2)).reshape(pairs, -1)
    # np.unique imports modules at its first call, which the sandbox forbids.
    whole = columns.view(np.dtype((np.void, columns.dtype.itemsize * columns.shape[1])))
    rows = len(set(whole.reshape(-1).tolist()))
    side = isqrt(shape[-1])
    window = (2 * side - 1) ** 2 if side > 1 and side * side == shape[-1] == shape[-2] else 0
    # A window has all of its relative positions; numbers that are all equal say nothing of how many others there are,
    # and of a single head any few numbers may be there more than once.
    if rows <= window:
        rows = window
    elif shape[-3] < 2 or (columns == columns[0, 0]).all():
        return 0
    return rows if rows * LEAST_SHARE <= pairs else 0


def _reaches_softmax(node: Node, readers: Mapping[str, list[Node]]) -> bool:
    """Whether a softmax follows soon on the results of a node."""
    current = [node]
    for _ in range(MAX_STEPS):
        current = [reader for each in current for name in each.outputs for reader in readers.get(name, ())]
        if any(reader.kind == "Softmax" for reader in current):
            return True
        current = [reader for reader in current if reader.kind in TO_SOFTMAX]
    return False


def stored_rows(nodes: Iterable[Node], stored: dict[str, Stored], tensors: Mapping[str, Any]) -> list[Node]:
    """Look-ups that make the stored tensors which are looked up; these leave `stored`, and their tables enter it.

    Args:
        nodes: nodes of the file.
        stored: tensors of the file.
        tensors: those that may be parameters, as protobuf, by name.
    """
    readers: dict[str, list[Node]] = {}
    for node in nodes:
        for name in node.inputs:
            readers.setdefault(name, []).append(node)
    names = [
        name
        for name in tensors.keys() & stored.keys()
        if any(node.kind in READERS and _reaches_softmax(node, readers) for node in readers.get(name, ()))
    ]
    made: list[Node] = []
    for name in sorted(names):
        given = stored[name]
        is_float = given.dtype.startswith(("float", "bfloat"))
        rows = rows_of(tensors[name]) if is_float and given.kind not in (COMPUTED, "BUFFER") else 0
        if rows:
            made += _look_up(name, stored.pop(name), rows, stored)
    return made


def _look_up(name: str, given: Stored, rows: int, stored: dict[str, Stored]) -> list[Node]:
    """Rows of `[rows, heads]` at `[windows, queries, keys]` places, with the heads in front of the queries."""
    # What all exported samples share is there once.
    shape = (1, *given.shape[1:]) if len(given.shape) == 4 and given.periods[:1] == (1,) else given.shape
    table, places = f"{name}#rows", f"{name}#places"
    stored[table] = replace(given, shape=(rows, shape[-3]), value=None, periods=())
    at = (*shape[:-3], *shape[-2:])
    # Which rows they are decides nothing; a constant of numbers that differ is not taken for one of fewer samples.
    stored[places] = Stored(at, "int64")
    rank = len(shape)
    found = [
        Node("Gather", [table, places], [f"{name}#read"], {"axis": 0}),
        Node("Transpose", [f"{name}#read"], [name], {"perm": (*range(rank - 3), rank - 1, rank - 3, rank - 2)}),
    ]
    for node in found:
        node.opset = OPSET
    return found
