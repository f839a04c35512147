"""Restores look-ups that a tool folded into stored tensors: the parameter is the table, not the result of the look-up.

Biases of relative positions (Swin, BEiT, T5) and attention sinks (gpt-oss) are a few numbers per head, which attention
looks up for all pairs of positions. If a tool folds these look-ups, the results for all pairs are stored,
`[1, heads, queries, keys]`, which are many times more numbers than the parameters of the model. If the table has more
than 8,192 numbers, PyTorch's newer exporter folds only up to the look-up, `[queries * keys, heads]`, and leaves the
views of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import isqrt, prod
from typing import Any

import numpy as np
from onnx import numpy_helper

from ir.onnx.readers.nodes import COMPUTED, ROWS_KEY, Node, Stored, has_data, metadata
from ir.onnx.rewrites.computed_tables import MAX_ELEMENTS

READERS = {"Add": (3, 4), "Concat": (3, 4), "Unsqueeze": (3,), "Reshape": (2,)}
"""Kinds that read such tensors, and the numbers of dims that these have there."""
VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Expand", "Cast", "Identity"})
"""Kinds of views of scores and biases."""
TO_SOFTMAX = VIEWS | {"Add", "Sub", "Concat", "Where"}
"""Kinds between the bias and the softmax of attention."""
MAX_STEPS = 6
"""Largest number of operators between such a tensor and the softmax (assumed; Swin has four: bias, two views, mask),
and of views before the bias is added (Swin has three)."""
LEAST_SHARE = 2
"""Pairs of positions for each row, at least (assumed; a window of 2 x 2 has 16 pairs and 9 rows, and is left as it is:
its table is as large as what was looked up)."""
OPSET = 13
"""Operator set of the operators that are written (ONNX)."""


def rows_of(tensor: Any) -> int:
    """Number of rows of the table in which a large stored tensor was looked up; 0 if it is not a result of a look-up.

    For a stripped tensor, the number is read from its metadata.

    Args:
        tensor: protobuf.
    """
    shape = tuple(tensor.dims)
    if len(shape) not in (2, 3, 4) or min(shape) < 1 or prod(shape) > MAX_ELEMENTS:
        return 0
    heads = shape[_heads_dim(shape)]
    pairs = prod(shape) // heads
    if not has_data(tensor):
        text = metadata(tensor).get(ROWS_KEY, "")
        return int(text) if text.isdecimal() and 0 < int(text) * LEAST_SHARE <= pairs else 0
    value = np.asarray(numpy_helper.to_array(tensor))
    columns = np.ascontiguousarray(np.moveaxis(value, _heads_dim(shape), -1)).reshape(pairs, heads)
    # np.unique imports modules at its first call, which the sandbox forbids.
    whole = columns.view(np.dtype((np.void, columns.dtype.itemsize * columns.shape[1])))
    rows = len(set(whole.reshape(-1).tolist()))
    queries, keys = shape[-2:] if len(shape) > 2 else (isqrt(pairs), isqrt(pairs))
    side = isqrt(keys)
    window = (2 * side - 1) ** 2 if side > 1 and side * side == keys == queries else 0
    # A window has all of its relative positions; numbers that are all equal say nothing of how many others there are,
    # and of a single head any few numbers may be there more than once.
    if rows <= window:
        rows = window
    elif heads < 2 or (columns == columns[0, 0]).all():
        return 0
    return rows if rows * LEAST_SHARE <= pairs else 0


def _heads_dim(shape: Sequence[int]) -> int:
    """The dim of the heads in `[pairs, heads]` or `[..., heads, queries, keys]`."""
    return -1 if len(shape) == 2 else -3


def _added(node: Node, readers: Mapping[str, list[Node]]) -> list[Node]:
    """The nodes that add the result of a view of a bias, or a view of that, to something else."""
    current, found = [node], []
    for _ in range(MAX_STEPS):
        current = [reader for each in current for name in each.outputs for reader in readers.get(name, ())]
        found += [reader for reader in current if reader.kind == "Add"]
        current = [reader for reader in current if reader.kind in VIEWS or reader.kind == "Transpose"]
    return found


def _reaches_softmax(node: Node, readers: Mapping[str, list[Node]]) -> bool:
    """Whether a softmax follows at most `MAX_STEPS` operators after a node that reads a bias."""
    current = [node] if node.kind in ("Add", "Concat") else _added(node, readers)
    for _ in range(MAX_STEPS):
        current = [reader for each in current for name in each.outputs for reader in readers.get(name, ())]
        if any(reader.kind == "Softmax" for reader in current):
            return True
        current = [reader for reader in current if reader.kind in TO_SOFTMAX]
    return False


def stored_rows(nodes: Iterable[Node], stored: dict[str, Stored], tensors: Mapping[str, Any]) -> list[Node]:
    """Nodes that look up the stored tensors which a tool had folded; in `stored`, their tables replace them.

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
        if any(
            len(stored[name].shape) in READERS.get(node.kind, ()) and _reaches_softmax(node, readers)
            for node in readers.get(name, ())
        )
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
    """Rows of `[rows, heads]` at `[windows, queries, keys]` places, with the heads in front of the queries; or at
    `[pairs]` places, with the heads last."""
    # What all exported samples share is there once.
    shape = (1, *given.shape[1:]) if len(given.shape) == 4 and given.periods[:1] == (1,) else given.shape
    table, places = f"{name}#rows", f"{name}#places"
    stored[table] = replace(given, shape=(rows, shape[_heads_dim(shape)]), value=None, periods=())
    at = (*shape[:-3], *shape[-2:]) if len(shape) > 2 else shape[:1]
    # Which rows they are decides nothing; a constant of numbers that differ is not taken for one of fewer samples.
    stored[places] = Stored(at, "int64")
    rank = len(shape)
    read = name if rank == 2 else f"{name}#read"
    found = [Node("Gather", [table, places], [read], {"axis": 0})]
    if rank > 2:
        found.append(Node("Transpose", [read], [name], {"perm": (*range(rank - 3), rank - 1, rank - 3, rank - 2)}))
    for node in found:
        node.opset = OPSET
    return found
