"""Elementwise kinds, with numpy broadcasting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from math import inf

import torch
from torch import Tensor
from torch.nn import functional

from automap.runtime.operators.base import FUNCTIONS, Use, function, refuse, torch_dtype

UNARY: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Relu": torch.relu, "Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "Exp": torch.exp, "Sqrt": torch.sqrt,
    "Reciprocal": torch.reciprocal, "Softplus": functional.softplus, "Softsign": functional.softsign,
    "Erf": torch.erf, "Cos": torch.cos, "Sin": torch.sin, "Tan": torch.tan, "Acos": torch.acos, "Asin": torch.asin,
    "Atan": torch.atan, "Sinh": torch.sinh, "Cosh": torch.cosh, "Asinh": torch.asinh, "Acosh": torch.acosh,
    "Atanh": torch.atanh, "Log": torch.log, "Abs": torch.abs, "HardSwish": functional.hardswish,
    "Mish": functional.mish, "Neg": torch.neg, "Floor": torch.floor, "Ceil": torch.ceil, "Round": torch.round,
    "Sign": torch.sign, "BitwiseNot": torch.bitwise_not, "Not": torch.logical_not, "IsNaN": torch.isnan,
    "Identity": lambda x: x,
}  # fmt: skip

BINARY: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Equal": torch.eq, "Less": torch.lt, "LessOrEqual": torch.le, "Greater": torch.gt, "GreaterOrEqual": torch.ge,
    "And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor, "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or, "BitwiseXor": torch.bitwise_xor, "Sub": torch.sub, "Mul": torch.mul,
}  # fmt: skip

FOLDED: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": torch.add,
    "Sum": torch.add,
    "Max": torch.maximum,
    "Min": torch.minimum,
}
"""Kinds of one operand or more."""

for _kind, _unary in UNARY.items():
    FUNCTIONS[_kind] = lambda use, made=_unary: made(use.x)  # type: ignore[misc]
for _kind, _binary in BINARY.items():
    FUNCTIONS[_kind] = lambda use, made=_binary: made(use.x, use.operand(1))  # type: ignore[misc]
for _kind, _folded in FOLDED.items():
    FUNCTIONS[_kind] = lambda use, made=_folded: reduce(made, use.given())  # type: ignore[misc]


@function("Mean")
def mean(use: Use) -> Tensor:
    """Of the operands."""
    operands = use.given()
    return reduce(torch.add, operands) / len(operands)


@function("Elu", "Celu")
def elu(use: Use) -> Tensor:
    """Exponential below zero."""
    alpha = use.number("alpha", 1.0)
    return functional.elu(use.x, alpha) if use.kind == "Elu" else functional.celu(use.x, alpha)


@function("Selu")
def selu(use: Use) -> Tensor:
    """Scaled, with the constants of the file."""
    alpha, gamma = use.number("alpha", 1.6732632423543772), use.number("gamma", 1.0507009873554805)
    return gamma * functional.elu(use.x, alpha)


@function("LeakyRelu")
def leaky_relu(use: Use) -> Tensor:
    """A slope below zero."""
    return functional.leaky_relu(use.x, use.number("alpha", 0.01))


@function("PRelu")
def prelu(use: Use) -> Tensor:
    """A slope below zero that is an operand."""
    return torch.where(use.x < 0, use.x * use.operand(1), use.x)


@function("HardSigmoid")
def hard_sigmoid(use: Use) -> Tensor:
    """A line, clipped."""
    return (use.number("alpha", 0.2) * use.x + use.number("beta", 0.5)).clamp(0, 1)


@function("ThresholdedRelu")
def thresholded_relu(use: Use) -> Tensor:
    """Zero up to a threshold."""
    return torch.where(use.x > use.number("alpha", 1.0), use.x, torch.zeros_like(use.x))


@function("Shrink")
def shrink(use: Use) -> Tensor:
    """Towards zero by `bias`, zero within `lambd`."""
    bias, bound, x = use.number("bias", 0.0), use.number("lambd", 0.5), use.x
    return torch.where(x < -bound, x + bias, torch.where(x > bound, x - bias, torch.zeros_like(x)))


@function("Swish")
def swish(use: Use) -> Tensor:
    """x * sigmoid(alpha x)."""
    return use.x * torch.sigmoid(use.number("alpha", 1.0) * use.x)


@function("Gelu")
def gelu(use: Use) -> Tensor:
    """Exact or by tanh."""
    return functional.gelu(use.x, approximate=use.text("approximate", "none"))


@function("com.microsoft.Gelu", "com.microsoft.BiasGelu", "com.microsoft.FastGelu")
def biased_gelu(use: Use) -> Tensor:
    """Of the sum with a bias, where one is given; the fast one by tanh."""
    how = "tanh" if use.kind == "com.microsoft.FastGelu" else "none"
    return functional.gelu(reduce(torch.add, use.given()), approximate=how)


@function("com.microsoft.QuickGelu")
def quick_gelu(use: Use) -> Tensor:
    """x * sigmoid(alpha x)."""
    return use.x * torch.sigmoid(use.number("alpha", 1.702) * use.x)


@function("IsInf")
def is_inf(use: Use) -> Tensor:
    """Either sign, or one."""
    found = torch.isinf(use.x)
    if not use.integer("detect_positive", 1):
        found &= use.x < 0
    if not use.integer("detect_negative", 1):
        found &= use.x > 0
    return found


@function("BitCast")
def bit_cast(use: Use) -> Tensor:
    """The same bits as another type of the same width."""
    return use.x.view(torch_dtype(use.text("to")))


@function("Div")
def div(use: Use) -> Tensor:
    """Integers are cut towards zero."""
    floats = use.x.is_floating_point()
    return torch.div(use.x, use.operand(1)) if floats else torch.div(use.x, use.operand(1), rounding_mode="trunc")


@function("Mod")
def mod(use: Use) -> Tensor:
    """Sign of the divisor, or of the dividend with `fmod`."""
    made = torch.fmod if use.integer("fmod") else torch.remainder
    return made(use.x, use.operand(1))


@function("Pow")
def power(use: Use) -> Tensor:
    """In the type of the base."""
    return torch.pow(use.x, use.operand(1)).to(use.x.dtype)


@function("BitShift")
def bit_shift(use: Use) -> Tensor:
    """Of unsigned integers, which torch shifts only as uint8 or signed: hence by way of int64."""
    x, by = use.x.to(torch.int64), use.operand(1).to(torch.int64)
    shifted = x << by if use.text("direction") == "LEFT" else x >> by
    return shifted.to(use.x.dtype)


@function("Where")
def where(use: Use) -> Tensor:
    """Operand 1 where the condition holds, else operand 2."""
    return torch.where(use.x.to(torch.bool), use.operand(1), use.operand(2))


@function("Clip")
def clip(use: Use) -> Tensor:
    """Bounds are attributes."""
    low, high = use.number("min", -inf), use.number("max", inf)
    return use.x if (low, high) == (-inf, inf) else use.x.clamp(*_bounds(use.x, low, high))


def _bounds(x: Tensor, low: float, high: float) -> tuple[float | None, float | None]:
    """Bounds in the type of `x`: an integer tensor stays one."""
    kept = [None if abs(v) == inf else v if x.is_floating_point() else int(v) for v in (low, high)]
    return kept[0], kept[1]


@function("Cast", "CastLike")
def cast(use: Use) -> Tensor:
    """To the type that attribute `to` names."""
    return use.x.to(torch_dtype(use.text("to")))


@function("Dropout")
def dropout(use: Use) -> list[Tensor]:
    """In training mode: a mask from torch's generator, hence another one on every rank and in every call."""
    keep = torch.rand_like(use.x) >= use.number("ratio", 0.5)
    return [use.x * keep / (1.0 - use.number("ratio", 0.5)), keep]


@function("QuantizeLinear", "DequantizeLinear")
def quantization(use: Use) -> Tensor:
    """One scale, or one for each index of `axis`; integers of 8 and 16 bits."""
    x, scale, zero = use.x, use.operand(1), use.optional(2)
    if scale.ndim == 1 and scale.numel() > 1:
        shape = [1] * x.ndim
        shape[use.integer("axis", 1)] = -1
        scale = scale.reshape(shape)
        zero = zero if zero is None else zero.reshape(shape)
    if use.kind == "DequantizeLinear":
        return (x.to(scale.dtype) - (0 if zero is None else zero.to(scale.dtype))) * scale
    target = torch.uint8 if zero is None else zero.dtype
    if target.is_floating_point:
        raise refuse("quantization to a floating-point type is not executed", str(target))
    limits = torch.iinfo(target)
    shifted = torch.round(x / scale) + (0 if zero is None else zero.to(x.dtype))
    return shifted.clamp(limits.min, limits.max).to(target)
