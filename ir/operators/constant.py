"""Kinds without tensor operands: constants, ranges, filled tensors, random numbers."""

from __future__ import annotations

from math import ceil
from typing import Any

from ir.operators.base import Context, Result, Unsupported, kind


def _made(ctx: Context, shape: tuple[int, ...], dtype: str, attributes: dict[str, Any] | None = None) -> Result:
    """A tensor that every rank makes whole."""
    dims = [ctx.rule.loop(size, fixed=True) for size in shape]
    return Result([], [dims], [dtype], traffic=(1.0, 0.0), attributes=attributes or {})


@kind("Constant", "RandomNormal", "RandomUniform", rule="-> {size!}")
def constant(ctx: Context) -> Result:
    """Attributes `shape` and `dtype`; of a Constant also `value`, row-major, or one number that fills the shape."""
    return _made(ctx, ctx.ints("shape") or (), str(ctx.attributes.get("dtype", "float32")))


@kind("ConstantOfShape", rule="-> {size!}")
def constant_of_shape(ctx: Context) -> Result:
    """A tensor filled with one number, attribute `value`."""
    shape = ctx.ints("shape", 0)
    if shape is None:
        raise Unsupported("its shape is missing or depends on data")
    dtype = str(ctx.attributes.get("dtype", "float32"))
    return _made(ctx, shape, dtype, {"shape": shape, "dtype": dtype, "value": ctx.attributes.get("value", 0.0)})


@kind("Range", rule="-> size!")
def arange(ctx: Context) -> Result:
    """Numbers from `start` to below `limit` in steps of `delta`, all of them known."""
    given = [ctx.floats(n, i) for i, n in enumerate(("start", "limit", "delta"))]
    if not all(given):
        raise Unsupported("bounds depend on data")
    start, limit, delta = (g[0] for g in given if g)
    if delta == 0:
        raise Unsupported("a step of 0")
    size = max(ceil((limit - start) / delta), 0)
    dtype = str(ctx.attributes.get("dtype") or (ctx.tensor(0).dtype if ctx.has(0) else "int64"))
    return _made(ctx, (size,), dtype, {"start": start, "limit": limit, "delta": delta, "dtype": dtype})


@kind("RandomNormalLike", "RandomUniformLike", "Bernoulli", rule="{dims} -> {dims}")
def random_like(ctx: Context) -> Result:
    """Random numbers in the shape of the operand."""
    return Result(*ctx.factors(), [str(ctx.attributes.get("dtype", ctx.tensor(0).dtype))], traffic=(1.0, 0.0))


@kind("EyeLike", rule="{dims!!} -> {dims}")
def eye_like(ctx: Context) -> Result:
    """Ones on the diagonal: positions in the whole decide, hence replicated."""
    return Result(*ctx.factors(), [str(ctx.attributes.get("dtype", ctx.tensor(0).dtype))], traffic=(1.0, 0.0))
