"""Elementwise kinds, with numpy broadcasting. Kinds whose result is one expression stand in tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce
from math import inf

import torch
from torch import Tensor
from torch.nn import functional

from automap.runtime.operators.base import FUNCTIONS, Use, function, refuse, repeated_rows, torch_dtype

UNARY: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Relu": torch.relu, "Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "Exp": torch.exp, "Sqrt": torch.sqrt,
    "Reciprocal": torch.reciprocal, "Softplus": functional.softplus, "Softsign": functional.softsign,
    "Erf": torch.erf, "Erfc": torch.erfc, "Cos": torch.cos, "Sin": torch.sin, "Tan": torch.tan,
    "Acos": torch.acos, "Asin": torch.asin, "Atan": torch.atan, "Sinh": torch.sinh, "Cosh": torch.cosh,
    "Asinh": torch.asinh, "Acosh": torch.acosh,
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
    "Add": torch.add, "Sum": torch.add, "Max": torch.maximum, "Min": torch.minimum,
}  # fmt: skip
"""Kinds of one operand or more, which are joined one after the other."""

EXPRESSIONS: Mapping[str, Callable[[Use], Tensor]] = {
    "Mean": lambda use: reduce(torch.add, use.given()) / len(use.given()),
    "Elu": lambda use: functional.elu(use.x, use.number("alpha", 1.0)),
    "Celu": lambda use: functional.celu(use.x, use.number("alpha", 1.0)),
    "Selu": lambda use: (
        use.number("gamma", 1.0507009873554805) * functional.elu(use.x, use.number("alpha", 1.6732632423543772))
    ),
    "LeakyRelu": lambda use: functional.leaky_relu(use.x, use.number("alpha", 0.01)),
    "PRelu": lambda use: torch.where(use.x < 0, use.x * use.operand(1), use.x),
    "HardSigmoid": lambda use: (use.number("alpha", 0.2) * use.x + use.number("beta", 0.5)).clamp(0, 1),
    "ThresholdedRelu": lambda use: torch.where(use.x > use.number("alpha", 1.0), use.x, torch.zeros_like(use.x)),
    "Swish": lambda use: use.x * torch.sigmoid(use.number("alpha", 1.0) * use.x),
    "com.microsoft.QuickGelu": lambda use: use.x * torch.sigmoid(use.number("alpha", 1.702) * use.x),
    "Gelu": lambda use: functional.gelu(use.x, approximate=use.text("approximate", "none")),
    "BitCast": lambda use: use.x.view(torch_dtype(use.text("to"))),
    "Cast": lambda use: use.x.to(torch_dtype(use.text("to"))),
    "CastLike": lambda use: use.x.to(torch_dtype(use.text("to"))),
    # The sign of the divisor, or with `fmod` that of the dividend.
    "Mod": lambda use: (torch.fmod if use.integer("fmod") else torch.remainder)(use.x, use.operand(1)),
    "Pow": lambda use: torch.pow(use.x, use.operand(1)).to(use.x.dtype),
    "Where": lambda use: torch.where(use.x.to(torch.bool), use.operand(1), use.operand(2)),
}
"""Kinds whose result is one expression of operands and attributes; defaults are those of ONNX."""

FUNCTIONS.update(EXPRESSIONS)
for _kind, _unary in UNARY.items():
    FUNCTIONS[_kind] = lambda use, made=_unary: made(use.x)  # type: ignore[misc]
for _kind, _binary in BINARY.items():
    FUNCTIONS[_kind] = lambda use, made=_binary: made(use.x, use.operand(1))  # type: ignore[misc]
for _kind, _folded in FOLDED.items():
    FUNCTIONS[_kind] = lambda use, made=_folded: reduce(made, use.given())  # type: ignore[misc]


def _over_batch(made: Callable[[Use], Tensor]) -> Callable[[Use], Tensor]:
    """The function of a kind, whose operands are repeated where each sample has the same rows and the rows of all
    samples are one dim."""

    def run(use: Use) -> Tensor:
        operands = [None if x is None else repeated_rows(x, use.shapes[0]) for x in use.operands]
        return made(replace(use, operands=operands))

    return run


for _kind in (*BINARY, *FOLDED, "Mean", "PRelu", "Mod", "Pow", "Where"):
    FUNCTIONS[_kind] = _over_batch(FUNCTIONS[_kind])  # type: ignore[arg-type]


@function("Shrink")
def shrink(use: Use) -> Tensor:
    """The operand moved towards zero by `bias`, and zero within `lambd` of zero."""
    bias, bound, x = use.number("bias", 0.0), use.number("lambd", 0.5), use.x
    return torch.where(x < -bound, x + bias, torch.where(x > bound, x - bias, torch.zeros_like(x)))


@function("IsInf")
def is_inf(use: Use) -> Tensor:
    """Whether an element is infinite, of both signs or of the one that the attributes leave."""
    found = torch.isinf(use.x)
    if not use.integer("detect_positive", 1):
        found &= use.x < 0
    if not use.integer("detect_negative", 1):
        found &= use.x > 0
    return found


@function("Div")
def div(use: Use) -> Tensor:
    """The quotient; that of integers is rounded towards zero."""
    x, by = (repeated_rows(operand, use.shapes[0]) for operand in (use.x, use.operand(1)))
    return torch.div(x, by) if x.is_floating_point() else torch.div(x, by, rounding_mode="trunc")


@function("BitShift")
def bit_shift(use: Use) -> Tensor:
    """Unsigned integers shifted by bits. Torch shifts only uint8 and signed types, hence the way through int64."""
    x, by = use.x.to(torch.int64), use.operand(1).to(torch.int64)
    shifted = x << by if use.text("direction") == "LEFT" else x >> by
    return shifted.to(use.x.dtype)


@function("Clip")
def clip(use: Use) -> Tensor:
    """The operand between two bounds, which are attributes."""
    low, high = use.number("min", -inf), use.number("max", inf)
    return use.x if (low, high) == (-inf, inf) else use.x.clamp(*_bounds(use.x, low, high))


def _bounds(x: Tensor, low: float, high: float) -> tuple[float | None, float | None]:
    """The bounds in the type of `x`, so that an integer tensor stays one; None for an infinite bound."""
    kept = [None if abs(v) == inf else v if x.is_floating_point() else int(v) for v in (low, high)]
    return kept[0], kept[1]


@function("Dropout")
def dropout(use: Use) -> list[Tensor]:
    """Dropout in training mode: the mask comes from torch's generator, and differs between ranks and between calls."""
    keep = torch.rand_like(use.x) >= use.number("ratio", 0.5)
    return [use.x * keep / (1.0 - use.number("ratio", 0.5)), keep]


@function("QuantizeLinear", "DequantizeLinear")
def quantization(use: Use) -> Tensor:
    """Integers of 8 and 16 bits, with one scale, or with one for each index of `axis`."""
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
