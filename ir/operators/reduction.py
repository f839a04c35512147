"""Reductions, scans and selections over dims."""

from __future__ import annotations

from ir.operators.base import Context, Dims, Result, Unsupported, all_reduce, kind


def _axes(ctx: Context) -> tuple[int, ...]:
    rank = len(ctx.tensor(0).shape)
    axes = ctx.ints("axes", 1)
    if not axes:
        if axes is not None and ctx.int_attribute("noop_with_empty_axes", 0):
            return ()
        return tuple(range(rank))
    return tuple(sorted({a % rank for a in axes}))


@kind(
    "ReduceSum",
    "ReduceMean",
    "ReduceMax",
    "ReduceMin",
    "ReduceProd",
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceSumSquare",
)
def reduce(ctx: Context) -> Result:
    """Sums split into partial sums; other reductions split at the price of an all-reduce of the result."""
    tensor = ctx.tensor(0)
    axes = _axes(ctx)
    keep = bool(ctx.int_attribute("keepdims", 1))
    dims = ctx.rule.dims(tensor)
    is_sum = ctx.kind == "ReduceSum"
    rows = [s for i, s in enumerate(tensor.shape) if i not in axes]
    has_batch = tensor.batch_dim is not None and tensor.batch_dim not in axes
    floats = 2.0 if ctx.kind == "ReduceLogSumExp" else 1.0
    collective = all_reduce("norm", rows, floats, has_batch=has_batch, backward=0.0)
    out: Dims = []
    for d, factors in enumerate(dims):
        if d not in axes:
            out.append(factors)
            continue
        for index in factors:
            ctx.rule.mark(index, summed=is_sum, collective=None if is_sum else collective)
        if keep:
            out.append(())
    saved = {
        "ReduceMax": (0,),
        "ReduceMin": (0,),
        "ReduceProd": (0,),
        "ReduceL1": (0,),
        "ReduceL2": (0,),
        "ReduceLogSum": (0,),
        "ReduceLogSumExp": (0,),
        "ReduceSumSquare": (0,),
    }.get(ctx.kind, ())
    linear = ctx.kind in ("ReduceSum", "ReduceMean")
    attributes = {"axes": axes, "keepdims": int(keep)}
    return Result(
        [(0, dims)],
        [out],
        passing="joint" if linear else "none",
        traffic=(1.0, 1.0),
        saved_inputs=saved,
        saved_outputs=(0,) if ctx.kind in ("ReduceL2", "ReduceLogSumExp") else (),
        attributes=attributes,
    )


@kind("ArgMax", "ArgMin")
def arg(ctx: Context) -> Result:
    """Position of the extreme: the axis stays whole."""
    tensor = ctx.tensor(0)
    axis = ctx.axis("axis", 0, len(tensor.shape))
    dims = ctx.rule.dims(tensor)
    ctx.rule.fix(dims[axis])
    keep = bool(ctx.int_attribute("keepdims", 1))
    out: Dims = [() if d == axis else f for d, f in enumerate(dims) if keep or d != axis]
    return Result([(0, dims)], [out], ["int64"], traffic=(1.0, 0.0))


@kind("CumSum", "CumProd")
def scan(ctx: Context) -> Result:
    """The axis stays whole."""
    tensor = ctx.tensor(0)
    axes = ctx.ints("axis", 1)
    if not axes:
        raise Unsupported("no axis")
    dims = ctx.rule.dims(tensor)
    ctx.rule.fix(dims[axes[0] % len(tensor.shape)])
    return Result(
        [(0, dims)],
        [dims],
        traffic=(1.0, 1.0),
        attributes={"axis": axes[0]},
        passing="joint" if ctx.kind == "CumSum" else "none",
    )


@kind("DFT")
def fourier(ctx: Context) -> Result:
    """A Fourier transform along `axis` of `[..., real and imaginary part]`: both dims stay whole."""
    tensor = ctx.tensor(0)
    rank = len(tensor.shape)
    axes, length = ctx.ints("axis", 2), ctx.ints("dft_length", 1)
    axis = (axes[0] if axes else (1 if 0 < ctx.opset < 20 else -2)) % rank
    if tensor.batch_dim in (axis, rank - 1) or axis == rank - 1:
        raise Unsupported("a transform over samples, or over real and imaginary part")
    is_onesided, is_inverse = bool(ctx.int_attribute("onesided", 0)), bool(ctx.int_attribute("inverse", 0))
    is_real = is_onesided and is_inverse
    if tensor.shape[-1] not in (1, 2) or (is_onesided and (tensor.shape[-1] == 2) != is_inverse):
        raise Unsupported(f"a last dim of {tensor.shape[-1]} is not real and imaginary part")
    size = length[0] if length else 2 * (tensor.shape[axis] - 1) if is_real else tensor.shape[axis]
    if is_onesided and not is_inverse:
        size = size // 2 + 1
    dims = ctx.rule.dims(tensor)
    ctx.rule.fix(dims[axis])
    ctx.rule.fix(dims[-1])
    out = list(dims)
    if size != tensor.shape[axis]:
        out[axis] = (ctx.rule.factor(size, fixed=True),) if size != 1 else ()
    if is_real:
        out[-1] = ()
    elif tensor.shape[-1] == 1:
        out[-1] = (ctx.rule.factor(2, fixed=True),)
    attributes = {"axis": axis, "dft_length": length[0] if length else None}
    return Result([(0, dims)], [out], passing="joint", traffic=(1.0, 1.0), attributes=attributes)


@kind("TopK")
def top_k(ctx: Context) -> Result:
    """Values and positions; the axis stays whole."""
    tensor = ctx.tensor(0)
    axis = ctx.axis("axis", -1, len(tensor.shape))
    k = ctx.ints("k", 1)
    if not k:
        raise Unsupported("no k")
    dims = ctx.rule.dims(tensor)
    if tensor.batch_dim == axis:
        raise Unsupported("top-k over samples")
    ctx.rule.fix(dims[axis])
    out = list(dims)
    out[axis] = (ctx.rule.factor(k[0], fixed=True),) if k[0] != 1 else ()
    return Result(
        [(0, dims)], [out, out], [tensor.dtype, "int64"], traffic=(1.0, 1.0), saved_outputs=(1,), attributes={"k": k[0]}
    )


@kind("Trilu")
def trilu(ctx: Context) -> Result:
    """Which elements survive depends on the position in the last two dims."""
    tensor = ctx.tensor(0)
    offset = ctx.ints("k", 1) or (0,)
    dims = ctx.rule.dims(tensor)
    for factors in dims[-2:]:
        ctx.rule.fix(factors)
    return Result([(0, dims)], [dims], passing="joint", traffic=(1.0, 1.0), attributes={"k": offset[0]})
