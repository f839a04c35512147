"""Functions of PyTorch that its exporter translates badly or not at all, as operators of ONNX."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

ATTENTION_VERSION = 23
"""The first operator set with Attention, of which the exporter makes use then."""
BOOL, INT32 = 9, 6
"""Numbers of types in ONNX (`TensorProto.DataType`)."""


def translations(opset: int) -> dict[Any, Callable[..., Any]]:
    """Translations by function of PyTorch, for `torch.onnx.export`.

    Args:
        opset: the version of ONNX's operator set.
    """
    import torch

    found: dict[Any, Callable[..., Any]] = {
        torch.ops.aten._is_all_true.default: _is_all_true,
        torch.ops.aten.cumprod.default: _cumprod,
        torch.ops.aten.lgamma.default: _log_gamma,
    }
    if opset < ATTENTION_VERSION:
        found[torch.ops.aten.scaled_dot_product_attention.default] = _attention
    return found


def _is_all_true(values: Any) -> Any:
    """A check that torch itself leaves in a graph, which nothing reads once the exporter has dropped its assertions."""
    from onnxscript import opset20 as op

    return op.Cast(op.ReduceMin(op.Cast(values, to=INT32), keepdims=0), to=BOOL)


def _attention(query: Any, key: Any, value: Any, mask: Any = None, dropout: float = 0.0, is_causal: bool = False,
               *, scale: float | None = None, enable_gqa: bool = False) -> Any:  # fmt: skip
    """Attention by the exporter's own translation, and of more than four dims (Hiera's windows) by its products."""
    from onnxscript import opset20 as op
    from onnxscript.function_libs.torch_lib.ops.nn import aten_scaled_dot_product_attention as of_four_dims

    rank = len(query.shape)
    if rank <= 4 or is_causal or enable_gqa or mask is not None:
        return of_four_dims(query, key, value, mask, dropout, is_causal, scale, enable_gqa)
    turned = op.Transpose(key, perm=[*range(rank - 2), rank - 1, rank - 2])
    factor = op.CastLike(op.Constant(value_float=scale or query.shape[-1] ** -0.5), query)
    return op.MatMul(op.Softmax(op.Mul(op.MatMul(query, turned), factor), axis=-1), value)


def _cumprod(operand: Any, dim: int, dtype: int | None = None) -> Any:
    """The product of all elements up to each one, in steps of doubled distance: ONNX has no operator for it."""
    from onnxscript import opset20 as op

    found = operand if dtype in (None, -1) else op.Cast(operand, to=dtype)
    axis = dim % max(len(operand.shape), 1)
    size = operand.shape[axis] if operand.shape else 1
    axes, distance = op.Constant(value_ints=[axis]), 1

    def part(begin: int, end: int) -> Any:
        return op.Slice(found, op.Constant(value_ints=[begin]), op.Constant(value_ints=[end]), axes)

    while distance < size:
        joined = op.Mul(part(distance, size), part(0, size - distance))
        found = op.Concat(part(0, distance), joined, axis=axis)
        distance *= 2
    return found


def _log_gamma(x: Any) -> Any:
    """The logarithm of the absolute value of the gamma function, as densities of Student's t need it.

    Stirling's series with three terms, at a distance of 8 from the number, where its error is below 1e-9. From there,
    the recurrence log gamma(x) = log gamma(x + 1) - log x leads back. Numbers below 0 are mirrored at 1/2: gamma(x)
    gamma(1 - x) = pi / sin(pi x) (Abramowitz and Stegun 6.1.41, 6.1.15 and 6.1.17).
    """
    from onnxscript import opset20 as op

    def number(value: float) -> Any:
        return op.CastLike(op.Constant(value_float=value), x)

    below = op.Less(x, number(0.0))
    positive = op.Where(below, op.Sub(number(1.0), x), x)
    far = op.Add(positive, number(8.0))
    inverse = op.Reciprocal(far)
    square = op.Mul(inverse, inverse)
    series = op.Add(number(-1 / 360), op.Mul(square, number(1 / 1260)))
    series = op.Mul(inverse, op.Add(number(1 / 12), op.Mul(square, series)))
    whole = op.Sub(op.Mul(op.Sub(far, number(0.5)), op.Log(far)), far)
    found = op.Add(op.Add(whole, number(math.log(2 * math.pi) / 2)), series)
    for step in range(8):
        found = op.Sub(found, op.Log(op.Add(positive, number(float(step)))))
    # The sine of the distance to the next whole number is exact near the poles. Numbers that are not mirrored are
    # replaced by -1/2, of which the sine is -1, so that their gradient is finite.
    mirrored = op.Where(below, x, number(-0.5))
    sine = op.Sin(op.Mul(op.Sub(mirrored, op.Round(mirrored)), number(math.pi)))
    other = op.Sub(op.Sub(number(math.log(math.pi)), op.Log(op.Abs(sine))), found)
    return op.Where(below, other, found)
