"""Kinds without tensor operands: constants, ranges, filled tensors, random numbers."""

from __future__ import annotations

from math import ceil

from ir.operators.base import Context, Dims, Result, Unsupported, kind


def _filled(ctx: Context, shape: tuple[int, ...]) -> Dims:
    return [(ctx.rule.factor(s, fixed=True),) if s != 1 else () for s in shape]


@kind("Constant")
def constant(ctx: Context) -> Result:
    """Attributes `shape`, `dtype` and `value` (row-major; a single number fills the shape)."""
    shape = ctx.ints("shape") or ()
    return Result([], [_filled(ctx, shape)], [str(ctx.attributes.get("dtype", "float32"))], traffic=(1.0, 0.0))


@kind("ConstantOfShape")
def constant_of_shape(ctx: Context) -> Result:
    """A filled tensor."""
    shape = ctx.ints("shape", 0)
    if shape is None:
        raise Unsupported("no shape")
    value = ctx.attributes.get("value", 0.0)
    dtype = str(ctx.attributes.get("dtype", "float32"))
    return Result(
        [],
        [_filled(ctx, shape)],
        [dtype],
        traffic=(1.0, 0.0),
        attributes={"shape": shape, "dtype": dtype, "value": value},
    )


@kind("Range")
def arange(ctx: Context) -> Result:
    """start, limit, delta."""
    given = [ctx.floats(n, i) for i, n in enumerate(("start", "limit", "delta"))]
    if not all(given):
        raise Unsupported("bounds depend on data")
    start, limit, delta = (g[0] for g in given if g)
    if delta == 0:
        raise Unsupported("a step of 0")
    size = max(ceil((limit - start) / delta), 0)
    dtype = str(ctx.attributes.get("dtype") or (ctx.tensor(0).dtype if ctx.has(0) else "int64"))
    return Result(
        [],
        [_filled(ctx, (size,))],
        [dtype],
        traffic=(1.0, 0.0),
        attributes={"start": start, "limit": limit, "delta": delta, "dtype": dtype},
    )


@kind("RandomNormal", "RandomUniform")
def random(ctx: Context) -> Result:
    """Shape is an attribute."""
    return Result(
        [], [_filled(ctx, ctx.ints("shape") or ())], [str(ctx.attributes.get("dtype", "float32"))], traffic=(1.0, 0.0)
    )


@kind("RandomNormalLike", "RandomUniformLike", "Bernoulli")
def random_like(ctx: Context) -> Result:
    """Shaped like the operand."""
    dims = ctx.rule.dims(ctx.tensor(0))
    return Result([(0, dims)], [dims], [str(ctx.attributes.get("dtype", ctx.tensor(0).dtype))], traffic=(1.0, 0.0))


@kind("EyeLike")
def eye_like(ctx: Context) -> Result:
    """Position decides: replicated."""
    dims = ctx.rule.dims(ctx.tensor(0), fixed=True)
    if ctx.rule.has_batch:
        ctx.rule.mark(ctx.rule.batch(), fixed=True)
    return Result([(0, dims)], [dims], [str(ctx.attributes.get("dtype", ctx.tensor(0).dtype))], traffic=(1.0, 0.0))
