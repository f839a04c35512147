"""Pooling and resizing: samples and channels are free, space stays whole."""

from __future__ import annotations

from ir.operators.base import Context, Dims, MissingBatch, Result, Unsupported, kind
from ir.operators.contraction import spatial_sizes


def _spatial(ctx: Context, sizes: list[int]) -> tuple[Dims, Dims]:
    """Input and output factors for new spatial sizes."""
    tensor = ctx.tensor(0)
    rule = ctx.rule
    if tensor.batch_dim is not None and tensor.batch_dim >= len(tensor.shape) - len(sizes):
        raise Unsupported("a window over samples")
    lead = len(tensor.shape) - len(sizes)
    head = [rule.dim(tensor, d) for d in range(lead)]
    source: Dims = [(rule.factor(s, fixed=True),) if s != 1 else () for s in tensor.shape[lead:]]
    target: Dims = [(rule.factor(s, fixed=True),) if s != 1 else () for s in sizes]
    return head + source, head + target


@kind("MaxPool", "AveragePool", "LpPool")
def pool(ctx: Context) -> Result:
    """Sliding window. Max keeps its input and the positions, average nothing."""
    kernel = ctx.ints("kernel_shape")
    if kernel is None:
        raise Unsupported("no kernel_shape")
    source, target = _spatial(ctx, spatial_sizes(ctx, ctx.tensor(0).shape[2:], kernel))
    if ctx.num_outputs > 1:
        # The places count through the whole operand, samples and channels included.
        for factors in source:
            ctx.rule.fix(factors)
    linear = ctx.kind == "AveragePool"
    return Result(
        [(0, source)],
        [target, target],
        [ctx.tensor(0).dtype, "int64"],
        passing="joint" if linear else "none",
        traffic=(1.0, 1.0 if linear else 1.5),
        saved_inputs=() if linear else (0,),
    )


@kind("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def global_pool(ctx: Context) -> Result:
    """One value a channel."""
    rank = len(ctx.tensor(0).shape) - 2
    source, target = _spatial(ctx, [1] * rank)
    linear = ctx.kind == "GlobalAveragePool"
    return Result(
        [(0, source)],
        [target],
        passing="joint" if linear else "none",
        traffic=(1.0, 1.0),
        saved_inputs=() if linear else (0,),
    )


@kind("Resize", "Upsample")
def resize(ctx: Context) -> Result:
    """New spatial sizes from `sizes` or `scales`."""
    tensor = ctx.tensor(0)
    rank = len(tensor.shape)
    is_old = ctx.kind == "Upsample" or 0 < ctx.opset < 11
    axes = [a % rank for a in ctx.ints("axes") or range(rank)]
    scales = ctx.floats("scales", 1 if is_old else 2)
    sizes = None if is_old else ctx.ints("sizes", 3)
    if "target" in ctx.attributes:
        full = list(ctx.ints("target") or ())
    elif sizes:
        full = list(tensor.shape)
        for axis, size in zip(axes, sizes, strict=True):
            full[axis] = size // ctx.export_batch if tensor.batch_dim == axis else size
        policy = str(ctx.attributes.get("keep_aspect_ratio_policy", "stretch"))
        if policy != "stretch":
            ratios = [full[a] / tensor.shape[a] for a in axes]
            ratio = min(ratios) if policy == "not_larger" else max(ratios)
            scales = tuple(ratio if a in axes else 1.0 for a in range(rank))
            full = [int(s * f + 0.5) for s, f in zip(tensor.shape, scales, strict=True)]
    elif scales:
        each = dict(zip(axes, scales, strict=True))
        scales = tuple(each.get(a, 1.0) for a in range(rank))
        full = [int(s * f) for s, f in zip(tensor.shape, scales, strict=True)]
    else:
        raise Unsupported("neither scales nor sizes")
    lead = next((d for d in range(rank) if full[d] != tensor.shape[d]), rank)
    source, target = _spatial(ctx, full[max(lead, 1 if tensor.batch_dim == 0 else 0) :])
    # Where scales are given, positions follow them and not the rounded sizes.
    return Result(
        [(0, source)],
        [target],
        passing="joint",
        traffic=(1.0, 1.0),
        attributes={
            "target": tuple(full),
            "scales": scales or None,
            "sizes": None,
            "axes": None,
            "keep_aspect_ratio_policy": None,
        },
    )


@kind("GridSample")
def grid_sample(ctx: Context) -> Result:
    """Interpolates `x` at the points of a grid `[n, h, w, 2]`: samples and channels are free."""
    x, grid = ctx.tensor(0), ctx.tensor(1)
    if x.batch_dim not in (None, 0) or grid.batch_dim not in (None, 0):
        raise Unsupported("the batch does not lead")
    if (x.batch_dim is None) != (grid.batch_dim is None):
        raise MissingBatch(0 if x.batch_dim is None else 1, 0)
    rule = ctx.rule
    n, c = rule.dim(x, 0), rule.dim(x, 1)

    def fixed(sizes: tuple[int, ...]) -> Dims:
        return [(rule.factor(s, fixed=True),) if s != 1 else () for s in sizes]

    points = fixed(grid.shape[1:-1])
    operands: list[tuple[int, Dims]] = [(0, [n, c, *fixed(x.shape[2:])]), (1, [n, *points, *fixed(grid.shape[-1:])])]
    return Result(operands, [[n, c, *points]], [x.dtype], traffic=(1.0, 2.0), saved_inputs=(0, 1))


@kind("AffineGrid")
def affine_grid(ctx: Context) -> Result:
    """Points of a grid for each sample's affine map `[n, 2, 3]`."""
    theta, size = ctx.tensor(0), ctx.ints("size", 1)
    if size is None:
        raise Unsupported("no size")
    rule = ctx.rule
    n = rule.dim(theta, 0)
    rest: Dims = [(rule.factor(s, fixed=True),) if s != 1 else () for s in (*size[2:], len(size) - 2)]
    operand: Dims = [n, *[(rule.factor(s, fixed=True),) for s in theta.shape[1:]]]
    attributes = {"size": (theta.shape[0], *size[1:])}
    return Result([(0, operand)], [[n, *rest]], traffic=(1.0, 1.0), passing="joint", attributes=attributes)


@kind("Pad")
def pad(ctx: Context) -> Result:
    """Padded dims stay whole."""
    tensor = ctx.tensor(0)
    rank = len(tensor.shape)
    pads = ctx.ints("pads", 1)
    if pads is None:
        raise Unsupported("no pads")
    axes = ctx.ints("axes", 3) or tuple(range(rank))
    begin, end = [0] * rank, [0] * rank
    for i, axis in enumerate(axes):
        begin[axis % rank], end[axis % rank] = pads[i], pads[i + len(axes)]
    rule = ctx.rule
    source: Dims = []
    target: Dims = []
    for d in range(rank):
        grown = tensor.shape[d] + begin[d] + end[d]
        if begin[d] == end[d] == 0:
            factors = rule.dim(tensor, d)
            source.append(factors)
            target.append(factors)
            continue
        if tensor.batch_dim == d:
            raise Unsupported("padding of samples")
        source.append((rule.factor(tensor.shape[d], fixed=True),) if tensor.shape[d] != 1 else ())
        target.append((rule.factor(grown, fixed=True),) if grown != 1 else ())
    attributes = {"pads": (*begin, *end), "axes": None}
    value = ctx.floats("value", 2) if "value" not in ctx.attributes else None
    if value:
        attributes["value"] = value[0]  # type: ignore[assignment]
    fill = value[0] if value else float(ctx.attributes.get("value", 0.0))
    linear = str(ctx.attributes.get("mode", "constant")) != "constant" or fill == 0.0
    return Result(
        [(0, source)], [target], passing="joint" if linear else "none", traffic=(1.0, 1.0), attributes=attributes
    )
