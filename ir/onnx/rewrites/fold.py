"""Folding of small constants at import: shape arithmetic, masks, positions. Only results of at most
`MAX_VALUE_ELEMENTS` elements are computed; anything else stays an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, prod
from typing import Any

import numpy as np

from ir.build import MAX_VALUE_ELEMENTS
from ir.onnx.readers.nodes import Node, dtype_name, small_value
from ir.operators import Value

Evaluate = Callable[[Node, Sequence[Value | None]], Sequence[Value] | None]

NUMPY_TYPES = {"bfloat16": "float32", "float8": "float32", "string": "O"}


def _numpy(dtype: str) -> np.dtype[Any]:
    return np.dtype(NUMPY_TYPES.get(dtype, dtype))


def _ints(value: Value | None) -> list[int]:
    return [] if value is None else [int(v) for v in value.reshape(-1)]


def _fits(shape: Sequence[int]) -> bool:
    return all(s >= 0 for s in shape) and prod(shape) <= MAX_VALUE_ELEMENTS


def _given(node: Node, name: str, values: Sequence[Value | None], index: int) -> list[int] | None:
    """Integers from an attribute (older versions) or an operand."""
    if name in node.attributes:
        own = node.attributes[name]
        return [int(v) for v in own] if isinstance(own, tuple) else [int(own)]
    if index < len(values) and values[index] is not None:
        return _ints(values[index])
    return None


def _two(function: Callable[[Any, Any], Any]) -> Evaluate:
    def run(_node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
        a, b = values[0], values[1]
        if a is None or b is None or not _fits(np.broadcast_shapes(a.shape, b.shape)):
            return None
        return [np.asarray(function(a, b))]

    return run


def _one(function: Callable[[Any], Any]) -> Evaluate:
    def run(_node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
        return None if values[0] is None else [np.asarray(function(values[0]))]

    return run


def _divide(a: Value, b: Value) -> Value:
    if a.dtype.kind in "iu":
        # ONNX divides integers towards zero.
        return np.asarray(np.where(b == 0, 0, np.trunc(a / np.where(b == 0, 1, b))), dtype=a.dtype)
    return np.asarray(a / b, dtype=a.dtype)


def _same_type(function: Callable[[Any, Any], Any]) -> Evaluate:
    return _two(lambda a, b: np.asarray(function(a, b)).astype(a.dtype))


def _constant(node: Node, _values: Sequence[Value | None]) -> Sequence[Value] | None:
    attributes = node.attributes
    if "value" in attributes:
        value = small_value(attributes["value"])
        return None if value is None else [value]
    for name, dtype in (
        ("value_int", "int64"),
        ("value_ints", "int64"),
        ("value_float", "float32"),
        ("value_floats", "float32"),
    ):
        if name in attributes:
            return [np.asarray(attributes[name], dtype=dtype)]
    return None


def _constant_of_shape(node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
    shape = _ints(values[0])
    if not _fits(shape):
        return None
    fill = node.attributes.get("value")
    return [np.full(shape, np.float32(0) if fill is None else np.asarray(small_value(fill)).reshape(-1)[0])]


def _gather(node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
    data, indices = values[0], values[1]
    if data is None or indices is None:
        return None
    axis = int(node.attributes.get("axis", 0))
    if not _fits([*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :]]):
        return None
    return [np.asarray(np.take(data, indices, axis=axis))]


def _slice(node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
    data = values[0]
    starts, ends = _given(node, "starts", values, 1), _given(node, "ends", values, 2)
    if data is None or starts is None or ends is None:
        return None
    axes = _given(node, "axes", values, 3) or list(range(len(starts)))
    steps = _given(node, "steps", values, 4) or [1] * len(starts)
    index: list[Any] = [slice(None)] * data.ndim
    for start, stop, axis, step in zip(starts, ends, axes, steps, strict=True):
        index[axis] = slice(start, None if step < 0 and stop < -data.shape[axis] else stop, step)
    return [np.asarray(data[tuple(index)])]


def _range(_node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
    start, limit, delta = (np.asarray(v).reshape(-1)[0] for v in values[:3])
    if delta == 0 or not _fits([max(ceil((limit - start) / delta), 0)]):
        return None
    return [np.arange(start, limit, delta, dtype=np.asarray(values[0]).dtype)]


def _reshape(node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
    data, target = values[0], _given(node, "shape", values, 1)
    if data is None or target is None:
        return None
    zero = bool(node.attributes.get("allowzero", 0))
    return [data.reshape([data.shape[i] if s == 0 and not zero else s for i, s in enumerate(target)])]


def _unsqueeze(node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
    data, axes = values[0], _given(node, "axes", values, 1)
    return None if data is None or axes is None else [np.expand_dims(data, tuple(axes))]


def _squeeze(node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
    data, axes = values[0], _given(node, "axes", values, 1)
    return None if data is None else [np.squeeze(data, tuple(axes) if axes else None)]


def _expand(_node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
    data, target = values[0], _ints(values[1])
    if data is None:
        return None
    shape = np.broadcast_shapes(data.shape, tuple(target))
    return [np.broadcast_to(data, shape)] if _fits(shape) else None


def _tile(_node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
    data, repeats = values[0], _ints(values[1])
    if data is None or not _fits([s * r for s, r in zip(data.shape, repeats, strict=True)]):
        return None
    return [np.tile(data, repeats)]


def _concat(node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
    parts = [v for v in values if v is not None]
    if sum(p.size for p in parts) > MAX_VALUE_ELEMENTS:
        return None
    return [np.concatenate(parts, axis=int(node.attributes.get("axis", 0)))]


def _split(node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
    data = values[0]
    if data is None:
        return None
    axis = int(node.attributes.get("axis", 0))
    sizes = _given(node, "split", values, 1)
    if sizes is None:
        chunk = -(-data.shape[axis] // len(node.outputs))
        sizes = [chunk] * len(node.outputs)
    return np.split(data, np.cumsum(sizes)[:-1], axis=axis)


def _reduce(function: Callable[..., Any]) -> Evaluate:
    def run(node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
        data, axes = values[0], _given(node, "axes", values, 1)
        if data is None:
            return None
        if not axes and node.attributes.get("noop_with_empty_axes", 0):
            return [data]
        keep = bool(node.attributes.get("keepdims", 1))
        return [np.asarray(function(data, axis=tuple(axes) if axes else None, keepdims=keep)).astype(data.dtype)]

    return run


def _cast(node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
    name = dtype_name(int(node.attributes["to"]))
    # A value of a type that numpy lacks could not be told from float32 later: leave the operator.
    if name in NUMPY_TYPES or values[0] is None:
        return None
    return [values[0].astype(_numpy(name))]


def _where(_node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
    c, a, b = values[:3]
    if c is None or a is None or b is None or not _fits(np.broadcast_shapes(c.shape, a.shape, b.shape)):
        return None
    return [np.where(c, a, b)]


def _trilu(node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
    data = values[0]
    if data is None:
        return None
    k = _ints(values[1])[0] if len(values) > 1 and values[1] is not None else 0
    return [np.triu(data, k) if node.attributes.get("upper", 1) else np.tril(data, k)]


def _transpose(node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
    return None if values[0] is None else [np.transpose(values[0], node.attributes.get("perm"))]


def _cumsum(_node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
    if values[0] is None or _node.attributes.get("exclusive") or _node.attributes.get("reverse"):
        return None
    return [np.cumsum(values[0], axis=_ints(values[1])[0]).astype(values[0].dtype)]


def _remainder(node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
    function = np.fmod if node.attributes.get("fmod", 0) else np.mod
    return _same_type(function)(node, values)


def _softmax(node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
    data = values[0]
    if data is None or 0 < node.opset < 13:
        return None
    axis = int(node.attributes.get("axis", -1))
    shifted = np.exp(data - data.max(axis=axis, keepdims=True))
    return [(shifted / shifted.sum(axis=axis, keepdims=True)).astype(data.dtype)]


def _matmul(_node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
    a, b = values[0], values[1]
    if a is None or b is None or not a.ndim or not b.ndim or a.size * b.shape[-1] > 1024 * MAX_VALUE_ELEMENTS:
        return None
    product = np.asarray(np.matmul(a, b))
    return [product] if _fits(product.shape) else None


def _clip(node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
    data = values[0]
    if data is None:
        return None
    bounds = [node.attributes.get("min"), node.attributes.get("max")]
    for i in (1, 2):
        if i < len(values) and values[i] is not None:
            bounds[i - 1] = values[i]
    bounds = [None if b is None else np.asarray(b).astype(data.dtype) for b in bounds]
    low, high = bounds
    data = data if low is None else np.maximum(data, low)
    return [np.asarray(data if high is None else np.minimum(data, high))]


def _non_zero(_node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
    if values[0] is None:
        return None
    found = np.asarray(np.nonzero(np.atleast_1d(values[0])), dtype=np.int64)
    return [found] if _fits(found.shape) else None


def _arg(function: Callable[..., Any]) -> Evaluate:
    def run(node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
        if values[0] is None or node.attributes.get("select_last_index"):
            return None
        axis, keep = int(node.attributes.get("axis", 0)), bool(node.attributes.get("keepdims", 1))
        return [np.asarray(function(values[0], axis=axis, keepdims=keep), dtype=np.int64)]

    return run


def _gather_elements(node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
    data, indices = values[0], values[1]
    if data is None or indices is None:
        return None
    return [np.take_along_axis(data, indices, axis=int(node.attributes.get("axis", 0)))]


def _gather_nd(node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
    data, indices = values[0], values[1]
    if data is None or indices is None or node.attributes.get("batch_dims", 0):
        return None
    depth = indices.shape[-1]
    if not _fits([*indices.shape[:-1], *data.shape[depth:]]):
        return None
    return [np.asarray(data[tuple(np.moveaxis(indices, -1, 0))])]


def _scatter_nd(node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
    data, indices, updates = values[:3]
    if data is None or indices is None or updates is None or node.attributes.get("reduction", "none") != "none":
        return None
    result = data.copy()
    result[tuple(np.moveaxis(indices, -1, 0))] = updates
    return [result]


def _scatter_elements(node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
    data, indices, updates = values[:3]
    if data is None or indices is None or updates is None or node.attributes.get("reduction", "none") != "none":
        return None
    result = data.copy()
    np.put_along_axis(result, indices, updates, axis=int(node.attributes.get("axis", 0)))
    return [result]


def _flatten(node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
    data = values[0]
    if data is None:
        return None
    axis = int(node.attributes.get("axis", 1))
    axis = axis + data.ndim if axis < 0 else axis
    return [data.reshape(prod(data.shape[:axis]), -1)]


def _pad(node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
    data, pads = values[0], _given(node, "pads", values, 1)
    fill = values[2] if len(values) > 2 else None
    if data is None or pads is None or len(values) > 3 or node.attributes.get("mode", "constant") != "constant":
        return None
    pairs = list(zip(pads[: data.ndim], pads[data.ndim :], strict=True))
    if min(pads, default=0) < 0 or not _fits([s + a + b for s, (a, b) in zip(data.shape, pairs, strict=True)]):
        return None
    return [np.pad(data, pairs, constant_values=0 if fill is None else fill.reshape(-1)[0])]


def _one_hot(node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
    indices, depth, pair = values[:3]
    if indices is None or depth is None or pair is None:
        return None
    size = int(depth.reshape(-1)[0])
    if not _fits([*indices.shape, size]):
        return None
    axis = int(node.attributes.get("axis", -1))
    hot = (indices[..., None] % size) == np.arange(size)
    return [np.moveaxis(np.where(hot, pair[1], pair[0]).astype(pair.dtype), -1, axis)]


def _typed(function: Callable[[Any], Any]) -> Evaluate:
    return _one(lambda a: np.asarray(function(a)).astype(a.dtype))


FOLD: dict[str, Evaluate] = {
    "Mod": _remainder, "Softmax": _softmax, "MatMul": _matmul, "Clip": _clip, "NonZero": _non_zero,
    "ArgMax": _arg(np.argmax), "ArgMin": _arg(np.argmin), "GatherElements": _gather_elements,
    "GatherND": _gather_nd, "ScatterND": _scatter_nd, "ScatterElements": _scatter_elements, "Flatten": _flatten,
    "Pad": _pad, "OneHot": _one_hot,
    "Log": _typed(np.log), "Tanh": _typed(np.tanh), "Sign": _typed(np.sign), "Round": _typed(np.round),
    "Sigmoid": _typed(lambda a: 1 / (1 + np.exp(-a))), "Relu": _typed(lambda a: np.maximum(a, 0)),
    "IsNaN": _one(np.isnan), "IsInf": _one(np.isinf), "BitwiseAnd": _two(np.bitwise_and),
    "BitwiseOr": _two(np.bitwise_or), "BitwiseXor": _two(np.bitwise_xor), "BitwiseNot": _one(np.bitwise_not),
    "ReduceMean": _reduce(np.mean),
    "Constant": _constant, "ConstantOfShape": _constant_of_shape, "Gather": _gather, "Slice": _slice, "Range": _range,
    "Reshape": _reshape, "Unsqueeze": _unsqueeze, "Squeeze": _squeeze, "Expand": _expand, "Tile": _tile,
    "Concat": _concat, "Split": _split, "Cast": _cast, "Where": _where, "Trilu": _trilu, "Transpose": _transpose,
    "CumSum": _cumsum,
    "Add": _same_type(np.add), "Sub": _same_type(np.subtract), "Mul": _same_type(np.multiply),
    "Div": _two(_divide), "Pow": _same_type(np.power),
    "Max": _same_type(np.maximum), "Min": _same_type(np.minimum),
    "Equal": _two(np.equal), "Less": _two(np.less), "LessOrEqual": _two(np.less_equal), "Greater": _two(np.greater),
    "GreaterOrEqual": _two(np.greater_equal), "And": _two(np.logical_and), "Or": _two(np.logical_or),
    "Xor": _two(np.logical_xor), "Not": _one(np.logical_not), "Neg": _one(np.negative), "Abs": _one(np.abs),
    "Floor": _one(np.floor), "Ceil": _one(np.ceil), "Identity": _one(lambda a: a),
    "Sqrt": _one(lambda a: np.sqrt(a).astype(a.dtype)), "Exp": _one(lambda a: np.exp(a).astype(a.dtype)),
    "Reciprocal": _one(lambda a: (1 / a).astype(a.dtype)),
    "Cos": _one(lambda a: np.cos(a).astype(a.dtype)), "Sin": _one(lambda a: np.sin(a).astype(a.dtype)),
    "ReduceProd": _reduce(np.prod), "ReduceSum": _reduce(np.sum), "ReduceMax": _reduce(np.max),
    "ReduceMin": _reduce(np.min),
}  # fmt: skip


def fold(node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
    """The results of a node whose operands are all known, or None where they are not computed."""
    run = FOLD.get(node.kind)
    if run is None or (node.kind in ("Max", "Min") and len(values) != 2):
        return None
    try:
        with np.errstate(all="ignore"):
            return run(node, values)
    except (ValueError, IndexError, TypeError, OverflowError, KeyError):
        return None
