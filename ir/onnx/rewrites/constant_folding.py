"""Folding of small constants at import: shape arithmetic, masks, positions.

Only results of at most `MAX_VALUE_ELEMENTS` elements are computed; anything else stays an operator. An evaluator takes
the node and the values of its operands by ONNX position, and returns its result, a list of results, or None where it
computes none. Parameters with a default are optional operands.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from math import ceil, prod
from typing import Any

import numpy as np

from ir.build import MAX_VALUE_ELEMENTS
from ir.onnx.readers.nodes import Node, dtype_name, small_value
from ir.operators import Value

Evaluate = Callable[..., Value | Sequence[Value] | None]

NOT_IN_NUMPY = ("bfloat16", "float8", "float4", "string")
"""Dtypes that numpy lacks: casts to them are not folded, because the constants would be of another dtype."""


def fold(node: Node, values: Sequence[Value | None]) -> Sequence[Value] | None:
    """The results of a node whose operands are all known, or None where they are not computed."""
    run = FOLD.get(node.kind)
    if run is None or any(v is None for v in values[: _num_required(run)]):
        return None
    try:
        with np.errstate(all="ignore"):
            found = run(node, *values)
    except (ValueError, IndexError, TypeError, OverflowError, KeyError, RuntimeError):
        # Broadcasts of more than 32 dims are a RuntimeError.
        return None
    return [found] if isinstance(found, np.ndarray) else found


@cache
def _num_required(run: Evaluate) -> int:
    """Number of operands that must be there."""
    return sum(p.default is p.empty for p in inspect.signature(run).parameters.values()) - 1


def _ints(value: Value | None) -> list[int]:
    return [] if value is None else [int(v) for v in value.reshape(-1)]


def _fits(shape: Sequence[int]) -> bool:
    return all(s >= 0 for s in shape) and prod(shape) <= MAX_VALUE_ELEMENTS


def _given(node: Node, name: str, operand: Value | None) -> list[int] | None:
    """Integers from an attribute (older versions) or an operand."""
    if name in node.attributes:
        own = node.attributes[name]
        return [int(v) for v in own] if isinstance(own, tuple) else [int(own)]
    return None if operand is None else _ints(operand)


# Families of evaluators


def _one(function: Callable[[Any], Any]) -> Evaluate:
    return lambda _node, a: np.asarray(function(a))


def _typed(function: Callable[[Any], Any]) -> Evaluate:
    return lambda _node, a: np.asarray(function(a)).astype(a.dtype)


def _two(function: Callable[[Any, Any], Any]) -> Evaluate:
    def run(_node: Node, a: Value, b: Value) -> Value | None:
        return np.asarray(function(a, b)) if _fits(np.broadcast_shapes(a.shape, b.shape)) else None

    return run


def _same_type(function: Callable[[Any, Any], Any]) -> Evaluate:
    return _two(lambda a, b: np.asarray(function(a, b)).astype(a.dtype))


def _reduce(function: Callable[..., Any]) -> Evaluate:
    def run(node: Node, data: Value, axes: Value | None = None) -> Value:
        dims = _given(node, "axes", axes)
        if not dims and node.attributes.get("noop_with_empty_axes", 0):
            return data
        keep = bool(node.attributes.get("keepdims", 1))
        return np.asarray(function(data, axis=tuple(dims) if dims else None, keepdims=keep)).astype(data.dtype)

    return run


def _arg(function: Callable[..., Any]) -> Evaluate:
    def run(node: Node, data: Value) -> Value | None:
        if node.attributes.get("select_last_index"):
            return None
        axis, keep = int(node.attributes.get("axis", 0)), bool(node.attributes.get("keepdims", 1))
        return np.asarray(function(data, axis=axis, keepdims=keep), dtype=np.int64)

    return run


# Single kinds


def _divide(a: Value, b: Value) -> Value:
    if a.dtype.kind in "iu":
        # ONNX divides integers towards zero.
        return np.asarray(np.where(b == 0, 0, np.trunc(a / np.where(b == 0, 1, b))), dtype=a.dtype)
    return np.asarray(a / b, dtype=a.dtype)


def _constant(node: Node) -> Value | None:
    attributes = node.attributes
    if "value" in attributes:
        return small_value(attributes["value"])
    for name, dtype in (
        ("value_int", "int64"),
        ("value_ints", "int64"),
        ("value_float", "float32"),
        ("value_floats", "float32"),
    ):
        if name in attributes:
            return np.asarray(attributes[name], dtype=dtype)
    return None


def _constant_of_shape(node: Node, target: Value) -> Value | None:
    shape = _ints(target)
    if not _fits(shape):
        return None
    fill = node.attributes.get("value")
    return np.full(shape, np.float32(0) if fill is None else np.asarray(small_value(fill)).reshape(-1)[0])


def _gather(node: Node, data: Value, indices: Value) -> Value | None:
    axis = int(node.attributes.get("axis", 0))
    shape = [*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :]]
    return np.asarray(np.take(data, indices, axis=axis)) if _fits(shape) else None


def _slice(
    node: Node,
    data: Value,
    starts: Value | None = None,
    ends: Value | None = None,
    axes: Value | None = None,
    steps: Value | None = None,
) -> Value | None:
    first, last = _given(node, "starts", starts), _given(node, "ends", ends)
    if first is None or last is None:
        return None
    dims = _given(node, "axes", axes) or list(range(len(first)))
    strides = _given(node, "steps", steps) or [1] * len(first)
    index: list[Any] = [slice(None)] * data.ndim
    for start, stop, dim, step in zip(first, last, dims, strides, strict=True):
        index[dim] = slice(start, None if step < 0 and stop < -data.shape[dim] else stop, step)
    return np.asarray(data[tuple(index)])


def _range(_node: Node, start: Value, limit: Value, delta: Value) -> Value | None:
    low, high, step = (np.asarray(v).reshape(-1)[0] for v in (start, limit, delta))
    if step == 0 or not _fits([max(ceil((high - low) / step), 0)]):
        return None
    return np.arange(low, high, step, dtype=start.dtype)


def _reshape(node: Node, data: Value, shape: Value | None = None) -> Value | None:
    target, zero = _given(node, "shape", shape), bool(node.attributes.get("allowzero", 0))
    if target is None:
        return None
    return data.reshape([data.shape[i] if s == 0 and not zero else s for i, s in enumerate(target)])


def _unsqueeze(node: Node, data: Value, axes: Value | None = None) -> Value | None:
    dims = _given(node, "axes", axes)
    return None if dims is None else np.expand_dims(data, tuple(dims))


def _expand(_node: Node, data: Value, target: Value) -> Value | None:
    shape = np.broadcast_shapes(data.shape, tuple(_ints(target)))
    return np.broadcast_to(data, shape) if _fits(shape) else None


def _tile(_node: Node, data: Value, repeats: Value) -> Value | None:
    times = _ints(repeats)
    return np.tile(data, times) if _fits([s * r for s, r in zip(data.shape, times, strict=True)]) else None


def _concat(node: Node, *values: Value | None) -> Value | None:
    parts = [v for v in values if v is not None]
    if sum(p.size for p in parts) > MAX_VALUE_ELEMENTS:
        return None
    return np.concatenate(parts, axis=int(node.attributes.get("axis", 0)))


def _split(node: Node, data: Value, split: Value | None = None) -> Sequence[Value]:
    axis = int(node.attributes.get("axis", 0))
    sizes = _given(node, "split", split)
    if sizes is None:
        sizes = [-(-data.shape[axis] // len(node.outputs))] * len(node.outputs)
    return np.split(data, np.cumsum(sizes)[:-1], axis=axis)


def _cast(node: Node, data: Value) -> Value | None:
    name = dtype_name(int(node.attributes["to"]))
    return None if name in NOT_IN_NUMPY else data.astype(np.dtype(name))


def _trilu(node: Node, data: Value, k: Value | None = None) -> Value:
    offset = 0 if k is None else _ints(k)[0]
    return np.triu(data, offset) if node.attributes.get("upper", 1) else np.tril(data, offset)


def _cumsum(node: Node, data: Value, axis: Value) -> Value | None:
    if node.attributes.get("exclusive") or node.attributes.get("reverse"):
        return None
    return np.cumsum(data, axis=_ints(axis)[0]).astype(data.dtype)


def _softmax(node: Node, data: Value) -> Value | None:
    if 0 < node.opset < 13:
        return None
    axis = int(node.attributes.get("axis", -1))
    shifted = np.exp(data - data.max(axis=axis, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=axis, keepdims=True)).astype(data.dtype)


def _matmul(_node: Node, a: Value, b: Value) -> Value | None:
    if not a.ndim or not b.ndim or a.size * b.shape[-1] > 1024 * MAX_VALUE_ELEMENTS:
        return None
    product = np.asarray(np.matmul(a, b))
    return product if _fits(product.shape) else None


def _clip(node: Node, data: Value, low: Value | None = None, high: Value | None = None) -> Value:
    for function, name, bound in ((np.maximum, "min", low), (np.minimum, "max", high)):
        given = node.attributes.get(name) if bound is None else bound
        if given is not None:
            data = function(data, np.asarray(given).astype(data.dtype))
    return np.asarray(data)


def _non_zero(_node: Node, data: Value) -> Value | None:
    found = np.asarray(np.nonzero(np.atleast_1d(data)), dtype=np.int64)
    return found if _fits(found.shape) else None


def _gather_nd(node: Node, data: Value, indices: Value) -> Value | None:
    if node.attributes.get("batch_dims", 0) or not _fits([*indices.shape[:-1], *data.shape[indices.shape[-1] :]]):
        return None
    return np.asarray(data[tuple(np.moveaxis(indices, -1, 0))])


def _scatter(node: Node, data: Value, indices: Value, updates: Value) -> Value | None:
    if node.attributes.get("reduction", "none") != "none":
        return None
    result = data.copy()
    if node.kind == "ScatterND":
        result[tuple(np.moveaxis(indices, -1, 0))] = updates
    else:
        np.put_along_axis(result, indices, updates, axis=int(node.attributes.get("axis", 0)))
    return result


def _flatten(node: Node, data: Value) -> Value:
    axis = int(node.attributes.get("axis", 1))
    return data.reshape(prod(data.shape[: axis + data.ndim if axis < 0 else axis]), -1)


def _pad(node: Node, data: Value, pads: Value | None = None, fill: Value | None = None) -> Value | None:
    sizes = _given(node, "pads", pads)
    if sizes is None or node.attributes.get("mode", "constant") != "constant":
        return None
    pairs = list(zip(sizes[: data.ndim], sizes[data.ndim :], strict=True))
    if min(sizes, default=0) < 0 or not _fits([s + a + b for s, (a, b) in zip(data.shape, pairs, strict=True)]):
        return None
    return np.pad(data, pairs, constant_values=0 if fill is None else fill.reshape(-1)[0])


def _one_hot(node: Node, indices: Value, depth: Value, pair: Value) -> Value | None:
    size = int(depth.reshape(-1)[0])
    if not _fits([*indices.shape, size]):
        return None
    hot = (indices[..., None] % size) == np.arange(size)
    chosen: Value = np.where(hot, pair[1], pair[0]).astype(pair.dtype)
    return np.moveaxis(chosen, -1, int(node.attributes.get("axis", -1)))


FOLD: dict[str, Evaluate] = {
    "Constant": _constant, "ConstantOfShape": _constant_of_shape, "Range": _range, "Cast": _cast, "OneHot": _one_hot,
    "Gather": _gather, "GatherND": _gather_nd, "ScatterND": _scatter, "ScatterElements": _scatter, "NonZero": _non_zero,
    "GatherElements": lambda node, data, at: np.take_along_axis(data, at, axis=int(node.attributes.get("axis", 0))),
    "Where": lambda _, c, a, b: np.where(c, a, b) if _fits(np.broadcast_shapes(c.shape, a.shape, b.shape)) else None,
    "Slice": _slice, "Concat": _concat, "Split": _split, "Expand": _expand, "Tile": _tile, "Pad": _pad, "Trilu": _trilu,
    "Reshape": _reshape, "Flatten": _flatten, "Unsqueeze": _unsqueeze,
    "Squeeze": lambda node, data, axes=None: np.squeeze(data, tuple(_given(node, "axes", axes) or ()) or None),
    "Transpose": lambda node, data: np.transpose(data, node.attributes.get("perm")),
    "Softmax": _softmax, "MatMul": _matmul, "Clip": _clip, "CumSum": _cumsum,
    "Add": _same_type(np.add), "Sub": _same_type(np.subtract), "Mul": _same_type(np.multiply), "Div": _two(_divide),
    "Pow": _same_type(np.power), "Max": _same_type(np.maximum), "Min": _same_type(np.minimum),
    "Mod": lambda node, a, b: _same_type(np.fmod if node.attributes.get("fmod", 0) else np.mod)(node, a, b),
    "Equal": _two(np.equal), "Less": _two(np.less), "LessOrEqual": _two(np.less_equal), "Greater": _two(np.greater),
    "GreaterOrEqual": _two(np.greater_equal), "And": _two(np.logical_and), "Or": _two(np.logical_or),
    "Xor": _two(np.logical_xor), "Not": _one(np.logical_not), "BitwiseAnd": _two(np.bitwise_and),
    "BitwiseOr": _two(np.bitwise_or), "BitwiseXor": _two(np.bitwise_xor), "BitwiseNot": _one(np.bitwise_not),
    "IsNaN": _one(np.isnan), "IsInf": _one(np.isinf), "Neg": _one(np.negative), "Abs": _one(np.abs),
    "Floor": _one(np.floor), "Ceil": _one(np.ceil), "Identity": _one(lambda a: a), "Round": _typed(np.round),
    "Sign": _typed(np.sign), "Sqrt": _typed(np.sqrt), "Exp": _typed(np.exp), "Log": _typed(np.log),
    "Cos": _typed(np.cos), "Sin": _typed(np.sin), "Tanh": _typed(np.tanh), "Reciprocal": _typed(lambda a: 1 / a),
    "Relu": _typed(lambda a: np.maximum(a, 0)), "Sigmoid": _typed(lambda a: 1 / (1 + np.exp(-a))),
    "ReduceMean": _reduce(np.mean), "ReduceProd": _reduce(np.prod), "ReduceSum": _reduce(np.sum),
    "ReduceMax": _reduce(np.max), "ReduceMin": _reduce(np.min), "ArgMax": _arg(np.argmax), "ArgMin": _arg(np.argmin),
}  # fmt: skip
"""ONNX operator type -> its evaluator."""
