"""Recognises stored parameters that are repeated for each sample of the export.

Tools that fold constants also fold operators on class tokens or learned queries that do not depend on the samples, and
store the result repeated for the exported batch: in its first dim or, if the sequence is first, in the second one. That
dim may also contain heads, `[(b h), s, d]`, and channels of images may contain the samples, `[1, (b c), h, w]`. Such a
tensor differs from a parameter of this shape only in its numbers; stripped files mark it in metadata.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from onnx import numpy_helper

from ir.batch import reshape_target
from ir.graph import Tensor, TensorRole
from ir.onnx.readers.nodes import REPEATS_KEY, Node, Stored, dtype_name, has_data, metadata
from ir.onnx.readers.roles import ALWAYS_WEIGHTS, WEIGHT_POSITIONS
from ir.onnx.rewrites.computed_tables import MAX_ELEMENTS
from ir.onnx.rewrites.equal_weights import PRODUCTS
from ir.operators import Value

_MADE = re.compile(r"(?i).*(expand|repeat|tile|broadcast)[^.]*$")
"""Names that exporters give to the results of operators that repeat a tensor: a fresh parameter is of one number all
over, so that its numbers do not tell."""
TOLERANCE = 1e-3
"""Largest difference of equal rows, in multiples of the largest number of the first one (assumed): a product of a
repeated tensor may be rounded in another way for each sample, in fp16 by so much."""


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
        for i, name in enumerate(node.inputs)
        if i in WEIGHT_POSITIONS[node.kind] and not (node.kind in PRODUCTS and (i == 0 or _rank(stored, name) > 2))
    }
    readers: dict[str, set[str]] = {}
    for node in nodes:
        for name in node.inputs:
            readers.setdefault(name, set()).add(node.kind)
    for name in tensors.keys() - weights:
        given = stored[name]
        if given.dtype.startswith(("float", "bfloat")):
            given.periods = periods(tensors[name])
            is_one_row = len(given.shape) == 3 and given.periods == (1, 1) and given.shape[-1] > 1
            if is_one_row and readers.get(name) == {"Add"} and not _MADE.match(name):
                # The row of a table that all tokens look up, as of BERT's token types where the module makes them.
                given.shape = (1, 1, given.shape[-1])


def _rank(stored: Mapping[str, Stored], name: str) -> int:
    return len(stored[name].shape) if name in stored else 0


def periods(tensor: Any) -> tuple[int, ...]:
    """Numbers of rows after which a stored tensor repeats itself, along its first dim, and along its second one.

    Args:
        tensor: protobuf.

    Returns:
        the size of the dim where it does not repeat itself, or where that is not known; without the second dim for
        tables, and for images with a first dim of samples.
    """
    shape = tuple(tensor.dims)
    dims = (0, 1) if len(shape) == 3 or (len(shape) > 3 and shape[0] == 1) else (0,)
    if len(shape) < 2 or not 0 < prod(shape) <= MAX_ELEMENTS:
        return shape[:1]
    is_made = _MADE.match(tensor.name) is not None
    said = metadata(tensor).get(REPEATS_KEY, "").split()
    if len(said) == len(dims) and all(text.isdecimal() for text in said):
        return tuple(map(int, said))
    if not has_data(tensor):
        return (1, *shape[1:2])[: len(dims)] if is_made else shape[: len(dims)]
    value = numpy_helper.to_array(tensor).astype(np.float32)
    if not is_made and (value == value.reshape(-1)[0]).all():
        return shape[: len(dims)]
    return tuple(_period(np.moveaxis(value, dim, 0)) for dim in dims)


def _period(rows: Value) -> int:
    size = len(rows)
    if not np.isfinite(rows).all():
        return size  # masks hide by infinite numbers
    near = TOLERANCE * float(np.abs(rows[0]).max())
    for count in (count for count in range(1, size) if size % count == 0):
        is_near = np.abs(rows[0] - rows[count]).max() <= near
        if is_near and (np.abs(rows[count:] - rows[:-count]) <= near).all():
            return count
    return size


def of_one_sample(shape: tuple[int, ...], found: Sequence[int], batch: int, role: TensorRole) -> tuple[int, ...]:
    """The shape of a parameter or constant without its repeats for each sample.

    Args:
        shape: shape of the stored tensor.
        found: see `periods`.
        batch: samples of the export.
        role: of a constant, only rows of the first dim that are all equal are repeats; tables of two dims are kept.
    """
    if role == "constant":
        found = found[:1] if len(shape) > 2 and found[:1] == (1,) else ()
    for dim, period in enumerate(found):
        if batch > 1 and shape[dim] == period * batch:
            return (*shape[:dim], period, *shape[dim + 1 :])
    return shape


def once(value: Value, batch: int) -> Value:
    """A constant of floats without its repeats for each sample, such as the zeros that queries begin with.

    Args:
        value: a constant of the file; one of integers may hold indices or sizes, and stays as it is.
        batch: samples of the export.
    """
    is_repeated = value.dtype.kind == "f" and value.ndim > 2 and len(value) == batch > 1 and (value == value[:1]).all()
    return value[:1] if is_repeated else value


def shape_once(tensor: Any, batch: int) -> tuple[int, ...]:
    """The shape of a constant whose values are not read, without its repeats for each sample.

    Args:
        tensor: protobuf.
        batch: samples of the export.
    """
    shape = tuple(tensor.dims)
    is_float = dtype_name(tensor.data_type).startswith("float")
    return of_one_sample(shape, periods(tensor), batch, "constant") if is_float and batch > 1 else shape


def view_of_one_sample(node: Node, values: Sequence[Value | None], batch: int) -> Value | None:
    """The result of a Reshape of a constant that `once` holds for one sample, where the file says its sizes for all.

    Args:
        node: a node whose operands are constants.
        values: its operands.
        batch: samples of the export.

    Returns:
        None for all other nodes.
    """
    if node.kind != "Reshape" or len(values) != 2 or batch == 1:
        return None
    data, target = values
    if data is None or target is None or data.dtype.kind != "f" or data.ndim < 3 or len(data) != 1:
        return None
    whole = Tensor(name="", shape=data.shape, dtype=str(data.dtype), role="constant")
    allow_zero = bool(node.attributes.get("allowzero", 0))
    found = reshape_target(whole, [int(v) for v in target.reshape(-1)], export_batch=batch, allow_zero=allow_zero)
    return None if found is None or prod(found.shape) != data.size else data.reshape(found.shape)


def expanded_once(tensor: Tensor, sizes: Sequence[int], batch: int) -> list[int] | None:
    """The shape of the result of an Expand for one sample, where the file repeats its operand for each sample.

    Args:
        tensor: the operand, at one sample.
        sizes: the target of the Expand, at `batch` samples.
        batch: samples of the export.

    Returns:
        the shape of the operand at `batch` samples where nothing else is repeated; None where nothing is repeated for
        each sample.
    """
    shape = tensor.shape_at(batch)
    if len(sizes) > len(shape):
        return [1, *sizes[1:]] if tensor.batch_dim is None and sizes[0] == batch > 1 else None
    found, offset = [*shape], len(shape) - len(sizes)
    is_repeated = is_expanded = False
    for dim, size in enumerate(sizes, offset):
        # In the layout `[s, b, h]`, tensors common to all samples are constants or parameters of three dims.
        leads = dim == 0 or (dim == 1 and len(shape) == 3 and tensor.role in ("constant", "parameter"))
        if leads and tensor.batch_dim is None and shape[dim] == 1 and size == batch:
            is_repeated = True
        elif size not in (1, shape[dim]):
            found[dim], is_expanded = size, True
    return found if is_repeated or not is_expanded else None
