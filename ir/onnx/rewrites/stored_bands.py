"""Replaces large stored attention masks by operators that compute them.

A mask of 1,024 positions is too large to be imported as numbers, but it is described by two numbers and the width of a
band around the diagonal: for instance the lower triangle of GPT-2's `bias`, or a sliding window. Stripped files state
this description in metadata.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np
from onnx import numpy_helper

from ir.build import MAX_VALUE_ELEMENTS
from ir.onnx.readers.nodes import BAND_KEY, Node, Stored, dtype_name, has_data, metadata
from ir.onnx.rewrites.computed_tables import MAX_ELEMENTS
from ir.operators import Value

CORNER = 16
"""Number of rows and columns that are examined first (assumed): weights have more than two different numbers there."""
TYPES = frozenset({"bool", "uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64"})
"""Types of masks."""
FIRST_OPSET = 16
"""The first operator set in which Where takes all types that a mask has."""


class Band(NamedTuple):
    """A matrix with one number in a band around the diagonal, and another number elsewhere."""

    before: int | None
    """Number of elements of the band before the diagonal in each row; None: all."""
    behind: int | None
    """Number of elements of the band after the diagonal in each row; None: all."""
    inside: float
    """The number in the band."""
    outside: float
    """The number outside of the band."""


def band_of(tensor: Any) -> Band | None:
    """The band that describes a large stored tensor with leading dims of 1; None if it is not one.

    A stripped tensor is described by its metadata.

    Args:
        tensor: protobuf.
    """
    shape = tuple(tensor.dims)
    is_matrix = len(shape) > 1 and min(shape[-2:]) > 1 and prod(shape[:-2]) == 1
    if not is_matrix or not MAX_VALUE_ELEMENTS < prod(shape) <= MAX_ELEMENTS:
        return None
    if dtype_name(tensor.data_type) not in TYPES:
        return None
    if not has_data(tensor):
        return _stated(metadata(tensor).get(BAND_KEY, ""))
    matrix = np.asarray(numpy_helper.to_array(tensor)).reshape(shape[-2:])
    if len(set(matrix[:CORNER, :CORNER].reshape(-1).tolist())) > 2:
        return None
    return _found(matrix)


def _found(matrix: Value) -> Band | None:
    inside = matrix[0, 0]
    is_inside = matrix == inside
    others = matrix[~is_inside]
    if not others.size or (others != others[0]).any():
        return None
    rows, columns = matrix.shape
    behind, before = int(is_inside[0].argmin() or columns) - 1, int(is_inside[:, 0].argmin() or rows) - 1
    apart = np.arange(columns) - np.arange(rows)[:, None]
    if not np.array_equal(is_inside, (apart <= behind) & (apart >= -before)):
        return None
    return Band(
        before=None if before == rows - 1 else before,
        behind=None if behind == columns - 1 else behind,
        inside=float(inside),
        outside=float(others[0]),
    )


def _stated(text: str) -> Band | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, list) or len(found) != len(Band._fields):
        return None
    sides, numbers = found[:2], found[2:]
    are_sides = all(side is None or (type(side) is int and 0 <= side <= MAX_ELEMENTS) for side in sides)
    return Band(*sides, *map(float, numbers)) if are_sides and all(type(n) in (int, float) for n in numbers) else None


def stated(band: Band) -> str:
    """The text that describes a band in metadata."""
    return json.dumps(list(band))


def stored_bands(stored: dict[str, Stored], tensors: Mapping[str, Any]) -> list[Node]:
    """Operators that compute the stored tensors that are bands; these tensors are removed from `stored`.

    Args:
        stored: tensors of the file; constants of the operators are added.
        tensors: the same as protobuf, by name.
    """
    made: list[Node] = []
    for name in sorted(tensors.keys() & stored.keys()):
        band = None if stored[name].kind == "PARAMETER" else band_of(tensors[name])
        if band is not None:
            made += _made(name, stored.pop(name), band, stored)
    return made


def _made(name: str, tensor: Stored, band: Band, stored: dict[str, Stored]) -> list[Node]:
    def constant(kind: str, value: Value) -> str:
        stored[f"{name}#{kind}"] = Stored(value.shape, str(value.dtype), value)
        return f"{name}#{kind}"

    true = numpy_helper.from_array(np.array([True]))
    nodes = [Node("ConstantOfShape", [constant("shape", np.array(tensor.shape))], [f"{name}#all"], {"value": true})]
    for kind, side, upper, sign in (("before", band.before, 1, -1), ("behind", band.behind, 0, 1)):
        if side is not None:
            at = constant(kind, np.array(sign * side))
            nodes.append(Node("Trilu", [nodes[-1].outputs[0], at], [f"{name}#{kind}#band"], {"upper": upper}))
    dtype = np.dtype("float32" if tensor.dtype == "bfloat16" else tensor.dtype)
    numbers = [
        constant(kind, np.array(value).astype(dtype))
        for kind, value in (("inside", band.inside), ("outside", band.outside))
    ]
    nodes.append(Node("Where", [nodes[-1].outputs[0], *numbers], [name], {}))
    for node in nodes:
        node.opset = FIRST_OPSET
    return nodes
