"""Kinds without tensor operands: constants, ranges, filled tensors, random numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from automap.runtime.operators.base import Use, function, torch_dtype


@function("Constant", "ConstantOfShape")
def constant(use: Use) -> Tensor:
    """A tensor of row-major values; a single number fills the shape."""
    value = use.attributes.get("value", 0.0)
    dtype = torch_dtype(use.text("dtype", "float32"))
    if isinstance(value, tuple):
        return torch.tensor(value, dtype=dtype, device=use.device).reshape(use.shapes[0])
    return torch.full(use.shapes[0], value, dtype=dtype, device=use.device)


@function("Range")
def arange(use: Use) -> Tensor:
    """The sequence start, start + delta, ..., of the length of the result."""
    steps = torch.arange(use.shapes[0][0], dtype=torch.float64, device=use.device)
    return (use.number("start") + steps * use.number("delta", 1.0)).to(torch_dtype(use.text("dtype", "int64")))


@function("EyeLike")
def eye_like(use: Use) -> Tensor:
    """A matrix with ones on diagonal `k`."""
    rows, columns = use.shapes[0]
    found = torch.arange(columns, device=use.device) - torch.arange(rows, device=use.device)[:, None] == use.integer(
        "k"
    )
    return found.to(torch_dtype(use.text("dtype")) if "dtype" in use.attributes else use.x.dtype)


@function("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
def random(use: Use) -> Tensor:
    """Random numbers from torch's generator; the seed of the file is one of another generator."""
    like = use.optional(0)
    fallback = torch.float32 if like is None else like.dtype
    dtype = torch_dtype(use.text("dtype")) if "dtype" in use.attributes else fallback
    if "Normal" in use.kind:
        return use.number("mean", 0.0) + use.number("scale", 1.0) * torch.randn(
            use.shapes[0], dtype=dtype, device=use.device
        )
    low, high = use.number("low", 0.0), use.number("high", 1.0)
    return low + (high - low) * torch.rand(use.shapes[0], dtype=dtype, device=use.device)


@function("Bernoulli")
def bernoulli(use: Use) -> Tensor:
    """Ones with the probabilities that the operand gives, else zeros."""
    drawn = torch.bernoulli(use.x.detach())
    return drawn.to(torch_dtype(use.text("dtype")) if "dtype" in use.attributes else use.x.dtype)
