"""Stored parameters that hold the same numbers once for each sample of the export.

A tool that folds constants computes what a module does with a class token or with learned queries before they meet the
samples: it stores them repeated for the batch of the export, in their first dim, or in the second one where the
sequence is first. There may be heads in the same dim, `[(b h), s, d]`. Only the numbers tell such a tensor from a
parameter of this shape; a stripped file says it in metadata.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from onnx import numpy_helper

from ir.onnx.readers.nodes import REPEATS_KEY, Node, Stored, has_data, metadata
from ir.onnx.readers.roles import ALWAYS_WEIGHTS
from ir.onnx.rewrites.computed_tables import MAX_ELEMENTS
from ir.operators import Value

_MADE = re.compile(r"(?i).*(expand|repeat|tile|broadcast)[^.]*$")
"""Names that exporters give to the results of operators that repeat a tensor: a fresh parameter is of one number all
over, so that its numbers do not tell."""


def note_periods(nodes: Iterable[Node], stored: Mapping[str, Stored], tensors: Mapping[str, Any]) -> None:
    """Notes how float tensors repeat themselves, but for those of which each row is a weight of its own.

    Args:
        nodes: all nodes of the file.
        stored: the stored tensors by name.
        tensors: those that the exporter did not mark (protobuf) by name.
    """
    weights = {
        name
        for node in nodes
        if node.kind in ALWAYS_WEIGHTS
        for name in node.inputs
        if node.kind not in ("MatMul", "FusedMatMul") or (name in stored and len(stored[name].shape) < 3)
    }
    for name in tensors.keys() - weights:
        if stored[name].dtype.startswith(("float", "bfloat")):
            stored[name].periods = periods(tensors[name])


def periods(tensor: Any) -> tuple[int, ...]:
    """Numbers of rows after which a stored tensor repeats itself, along its first dim, and along its second of three.

    Args:
        tensor: protobuf.

    Returns:
        the size of the dim where it does not repeat itself, or where that is not known.
    """
    shape = tuple(tensor.dims)
    dims = (0, 1) if len(shape) == 3 else (0,)
    if len(shape) < 2 or not 0 < prod(shape) <= MAX_ELEMENTS:
        return shape[:1]
    is_made = _MADE.match(tensor.name) is not None
    said = metadata(tensor).get(REPEATS_KEY, "").split()
    if len(said) == len(dims) and all(text.isdecimal() for text in said):
        return tuple(map(int, said))
    if not has_data(tensor):
        return (1, *shape[1:2])[: len(dims)] if is_made else shape[: len(dims)]
    value = numpy_helper.to_array(tensor)
    if not is_made and (value == value.reshape(-1)[0]).all():
        return shape[: len(dims)]
    return tuple(_period(np.moveaxis(value, dim, 0)) for dim in dims)


def _period(rows: Value) -> int:
    size = len(rows)
    for count in range(1, size):
        if size % count == 0 and np.array_equal(rows[0], rows[count]) and (rows[count:] == rows[:-count]).all():
            return count
    return size


def of_one_sample(shape: tuple[int, ...], found: Sequence[int], batch: int) -> tuple[int, ...]:
    """The shape of a parameter without its repeats for each sample.

    Args:
        shape: shape of the stored tensor.
        found: see `periods`.
        batch: samples of the export.
    """
    for dim, period in enumerate(found):
        if batch > 1 and shape[dim] == period * batch:
            return (*shape[:dim], period, *shape[dim + 1 :])
    return shape
