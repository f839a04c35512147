"""Pooling, resizing and padding: samples and channels can be split, spatial dims stay whole."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ir.factors import Passing
from ir.operators.base import Context, Dims, MissingBatch, Result, Unsupported, kind, within
from ir.operators.windows import spatial_sizes, window_of

SPACE = "{lead space!} -> {lead new!}"


def _spatial(ctx: Context, sizes: Sequence[int]) -> tuple[list[tuple[int, Dims]], list[Dims]]:
    """Factors of an operand and its result, whose last dims have the given sizes."""
    tensor = ctx.tensor(0)
    lead = len(tensor.shape) - len(sizes)
    if tensor.batch_dim is not None and tensor.batch_dim >= lead:
        raise Unsupported("its windows cover several samples")
    return ctx.factors(where={"space": range(lead, len(tensor.shape))}, sizes={"new": sizes})


@kind("AveragePool", "LpPool", rule=SPACE)
@kind("MaxPool", rule="{lead!? space!} -> {lead new!}, {lead new}")
def pool(ctx: Context) -> Result:
    """Pooling over a sliding window. All kinds except the average save their operand.

    If the second result of MaxPool is used, the indices of the maxima, nothing can be split: they are indices into the
    whole operand, including samples and channels. With `within_channels`, an attribute of AutoMAP's own, they are
    indices into one channel of one sample, so that samples and channels can be split.
    """
    kernel = ctx.ints("kernel_shape")
    if kernel is None:
        raise Unsupported("its kernel_shape is missing")
    tensor = ctx.tensor(0)
    if len(kernel) != len(tensor.shape) - 2:
        raise Unsupported(f"kernel_shape={kernel} for {tensor.shape}, which is not [batch, channels, ...]")
    operands, outputs = _spatial(ctx, spatial_sizes(ctx, tensor.shape[2:], window_of(ctx, kernel)))
    if ctx.num_outputs > 1 and not ctx.int_attribute("within_channels", 0):
        ctx.rule.mark((index for factors in operands[0][1] for index in factors), fixed=True)
    is_linear = ctx.kind == "AveragePool"
    return Result(
        operands,
        outputs * 2,
        [tensor.dtype, "int64"],
        passing="joint" if is_linear else "none",
        traffic=(1.0, 1.0 if is_linear else 1.5),
        saved_inputs=() if is_linear else (0,),
    )


@kind("Col2Im", rule="samples (channels window!) {places!} -> samples channels {image!}")
def columns_to_image(ctx: Context) -> Result:
    """Adds overlapping windows, each a column of the operand, into an image (torch's `fold`); linear."""
    columns, image, block = ctx.tensor(0), ctx.ints("image_shape", 1), ctx.ints("block_shape", 2)
    if image is None or block is None or len(image) != len(block):
        raise Unsupported(f"an image of {image} and windows of {block}")
    window, rank = window_of(ctx, block), len(image)
    padded = tuple(size + window.pads[i] + window.pads[i + rank] for i, size in enumerate(image))
    count = prod((p - e) // s + 1 for p, e, s in zip(padded, window.extents, window.strides, strict=True))
    if len(columns.shape) != 3 or columns.shape[1] % prod(block) or columns.shape[2] != count:
        raise Unsupported(f"{columns.shape} are not the windows {block} of an image {image}")
    rule = ctx.rule
    n, channels = rule.dim(columns, 0), rule.loop(columns.shape[1] // prod(block))
    source: Dims = [n, (*channels, *rule.loop(prod(block), fixed=True)), rule.loop(count, fixed=True)]
    target: Dims = [n, channels, *[rule.loop(size, fixed=True) for size in image]]
    attributes = {"image_shape": image, "block_shape": block}
    return Result([(0, source)], [target], passing="joint", traffic=(1.0, 1.0), attributes=attributes)


@kind("MaxUnpool", rule="{lead!? space!}, {lead!? space!} -> {lead!? new!}")
def unpool(ctx: Context) -> Result:
    """Puts elements back to the indices of a MaxPool, among zeros; linear in its first operand.

    What can be split is what can be in that MaxPool: see `pool`.
    """
    x, places = ctx.tensor(0), ctx.tensor(1)
    rank = len(x.shape) - 2
    if rank < 1 or places.shape != x.shape or places.batch_dim != x.batch_dim or x.batch_dim not in (None, 0):
        raise Unsupported(f"indices {places.shape} for {x.shape}, which is not [batch, channels, ...]")
    sizes = ctx.ints("target")
    if sizes is None and ctx.has(2):
        sizes = (ctx.ints("output_shape", 2) or ())[2:]
    if sizes is None:
        kernel, strides = ctx.ints("kernel_shape"), ctx.ints("strides") or (1,) * rank
        pads = ctx.ints("pads") or (0,) * 2 * rank
        if kernel is None or not len(kernel) == len(strides) == rank or len(pads) != 2 * rank:
            raise Unsupported(f"kernel_shape={kernel}, strides={strides} and pads={pads} for {x.shape}")
        sizes = tuple(
            (n - 1) * strides[i] - pads[i] - pads[i + rank] + kernel[i] for i, n in enumerate(x.shape[2:])
        )  # fmt: skip
    if len(sizes) != rank or min(sizes) < 1:
        raise Unsupported(f"an image of {sizes} for {x.shape}")
    rule = ctx.rule
    lead = [rule.dim(x, 0), rule.dim(x, 1)]
    if not ctx.int_attribute("within_channels", 0):
        rule.mark((index for factors in lead for index in factors), fixed=True)
    space: Dims = [rule.loop(size, fixed=True) for size in x.shape[2:]]
    image: Dims = [rule.loop(size, fixed=True) for size in sizes]
    return Result(
        [(0, [*lead, *space]), (1, [*lead, *space])],
        [[*lead, *image]],
        [x.dtype],
        passing="first",
        traffic=(1.0, 1.0),
        saved_inputs=(1,),
        attributes={"target": sizes},
    )


@kind("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool", rule=SPACE)
def global_pool(ctx: Context) -> Result:
    """Pooling over all spatial dims: one value per channel."""
    is_linear = ctx.kind == "GlobalAveragePool"
    return Result(
        *_spatial(ctx, [1] * (len(ctx.tensor(0).shape) - 2)),
        passing="joint" if is_linear else "none",
        traffic=(1.0, 1.0),
        saved_inputs=() if is_linear else (0,),
    )


@kind("Resize", "Upsample", rule=SPACE)
def resize(ctx: Context) -> Result:
    """Interpolation to new spatial sizes, which `sizes` or `scales` determine."""
    tensor = ctx.tensor(0)
    rank = len(tensor.shape)
    is_old = ctx.kind == "Upsample" or 0 < ctx.opset < 11
    axes = [within(a, rank) for a in ctx.ints("axes") or range(rank)]
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
        raise Unsupported("its scales and sizes are missing or depend on data")
    lead = next((d for d in range(rank) if full[d] != tensor.shape[d]), rank)
    # If scales are given, sampling positions depend on them and not on the rounded sizes.
    attributes = {"target": tuple(full), "scales": scales or None}
    return Result(
        *_spatial(ctx, full[max(lead, 1 if tensor.batch_dim == 0 else 0) :]),
        passing="joint",
        traffic=(1.0, 1.0),
        attributes=attributes | dict.fromkeys(("sizes", "axes", "keep_aspect_ratio_policy")),
    )


@kind("GridSample", rule="samples channels {space!}, samples {points!} pair! -> samples channels {points}")
def grid_sample(ctx: Context) -> Result:
    """Interpolates an image at the points of a grid `[n, h, w, 2]`: samples and channels can be split."""
    x, grid = ctx.tensor(0), ctx.tensor(1)
    if x.batch_dim not in (None, 0) or grid.batch_dim not in (None, 0):
        raise Unsupported("the batch is not the first dim of its operands")
    if (x.batch_dim is None) != (grid.batch_dim is None):
        raise MissingBatch(0 if x.batch_dim is None else 1, 0)
    rule = ctx.rule
    n, channels = rule.dim(x, 0), rule.dim(x, 1)
    points: Dims = [rule.loop(size, fixed=True) for size in grid.shape[1:-1]]
    space: Dims = [rule.loop(size, fixed=True) for size in x.shape[2:]]
    pair: Dims = [rule.loop(size, fixed=True) for size in grid.shape[-1:]]
    operands: list[tuple[int, Dims]] = [(0, [n, channels, *space]), (1, [n, *points, *pair])]
    return Result(operands, [[n, channels, *points]], [x.dtype], saved_inputs=(0, 1))


@kind("AffineGrid", rule="samples {map!} -> samples {points!}")
def affine_grid(ctx: Context) -> Result:
    """The grid of sampling points for each sample's affine map `[n, 2, 3]`."""
    theta, size = ctx.tensor(0), ctx.ints("size", 1)
    if size is None:
        raise Unsupported("its size is missing or depends on data")
    rule = ctx.rule
    n = rule.dim(theta, 0)
    points: Dims = [rule.loop(s, fixed=True) for s in (*size[2:], len(size) - 2)]
    operand: Dims = [n, *[(rule.factor(s, fixed=True),) for s in theta.shape[1:]]]
    attributes = {"size": (theta.shape[0], *size[1:])}
    return Result([(0, operand)], [[n, *points]], traffic=(1.0, 1.0), passing="joint", attributes=attributes)


@kind("Pad", rule="{kept padded!} -> {kept new!}")
def pad(ctx: Context) -> Result:
    """Padding: padded dims stay whole; padding with zeros or with elements of the operand is linear."""
    tensor = ctx.tensor(0)
    rank = len(tensor.shape)
    pads = ctx.ints("pads", 1)
    if pads is None:
        raise Unsupported("its pads are missing or depend on data")
    axes = ctx.ints("axes", 3) or tuple(range(rank))
    begin, end = [0] * rank, [0] * rank
    if len(pads) != 2 * len(axes):
        raise Unsupported(f"it has {len(pads)} pads for {len(axes)} dims, which take two each")
    for i, axis in enumerate(axes):
        begin[within(axis, rank)], end[within(axis, rank)] = pads[i], pads[i + len(axes)]
    rule = ctx.rule
    source: Dims = []
    target: Dims = []
    for d in range(rank):
        if begin[d] == end[d] == 0:
            source.append(rule.dim(tensor, d))
            target.append(source[-1])
            continue
        if tensor.batch_dim == d:
            raise Unsupported("it pads the batch")
        source.append(rule.loop(tensor.shape[d], fixed=True))
        target.append(rule.loop(tensor.shape[d] + begin[d] + end[d], fixed=True))
    attributes: dict[str, Any] = {"pads": (*begin, *end), "axes": None}
    value = ctx.floats("value", 2) if "value" not in ctx.attributes else None
    if value:
        attributes["value"] = value[0]
    fill = value[0] if value else float(ctx.attributes.get("value", 0.0))
    is_linear = str(ctx.attributes.get("mode", "constant")) != "constant" or fill == 0.0
    passing: Passing = "joint" if is_linear else "none"
    return Result([(0, source)], [target], passing=passing, traffic=(1.0, 1.0), attributes=attributes)
