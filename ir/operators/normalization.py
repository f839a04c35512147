"""Softmax and normalisation: statistics over some dims, which split at the price of an all-reduce of them.

Traffic: one fused kernel forward (1.0); backward reads output gradient and saved tensor and writes the input
gradient (3 transfers against 2, 1.5), once more for the gradients of scale and bias (2.0).
"""

from __future__ import annotations

from collections.abc import Sequence

from ir.graph import Tensor
from ir.operators.base import Context, Dims, MissingBatch, Result, Unsupported, all_reduce, kind


def _over(
    ctx: Context, tensor: Tensor, axes: Sequence[int], name: str, floats: float, *, backward: float = 1.0
) -> Dims:
    """Factors of `tensor`, those of `axes` splittable by an all-reduce of `floats` numbers a row.

    Args:
        ctx: the use.
        tensor: the operand.
        axes: dims that the statistics cover.
        name: of the collective.
        floats: numbers a row, forward.
        backward: share of them that the backward pass all-reduces.
    """
    dims = ctx.rule.dims(tensor)
    rows = [s for i, s in enumerate(tensor.shape) if i not in axes]
    has_batch = tensor.batch_dim is not None and tensor.batch_dim not in axes
    collective = all_reduce(name, rows, floats, has_batch=has_batch, backward=backward)
    for axis in axes:
        ctx.rule.collect(dims[axis], collective)
    return dims


@kind("Softmax", "LogSoftmax", "Hardmax")
def softmax(ctx: Context) -> Result:
    """Row maximum and row sum forward, one row sum backward. Before version 13 all dims from `axis` on are one."""
    tensor = ctx.tensor(0)
    rank = len(tensor.shape)
    flattens = 0 < ctx.opset < 13
    axis = ctx.axis("axis", 1 if flattens else -1, rank)
    axes = range(axis, rank) if flattens else (axis,)
    dims = _over(ctx, tensor, list(axes), "softmax", 2.0, backward=0.5)
    return Result([(0, dims)], [dims], traffic=(1.0, 1.5), saved_outputs=(0,))


def _affine(ctx: Context, dims: Dims, tensor: Tensor, indices: Sequence[int]) -> list[tuple[int, Dims]]:
    """Scale and bias that broadcast to the trailing dims."""
    operands: list[tuple[int, Dims]] = []
    for i in indices:
        if not ctx.has(i):
            continue
        side = ctx.tensor(i)
        offset = len(tensor.shape) - len(side.shape)
        if offset < 0:
            raise Unsupported("the scale has more dims than the input")
        own: Dims = []
        for d, size in enumerate(side.shape):
            if side.batch_dim == d and tensor.batch_dim != offset + d:
                raise MissingBatch(0, offset + d)
            if size == 1 and side.batch_dim != d:
                own.append(())
            elif size == tensor.shape[offset + d]:
                own.append(dims[offset + d])
            else:
                raise Unsupported("the scale does not broadcast")
        operands.append((i, own))
    return operands


@kind("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
def layer_norm(ctx: Context) -> Result:
    """Statistics over the dims from `axis` on: sum and sum of squares forward, two sums backward."""
    tensor = ctx.tensor(0)
    axis = ctx.axis("axis", -1, len(tensor.shape))
    axes = list(range(axis, len(tensor.shape)))
    dims = _over(ctx, tensor, axes, "norm", 2.0 if ctx.kind == "LayerNormalization" else 1.0)
    operands = [(0, dims), *_affine(ctx, dims, tensor, (1, 2))]
    rows: Dims = [d if i not in axes else () for i, d in enumerate(dims)]
    return Result(
        operands,
        [dims, rows, rows],
        [tensor.dtype, "float32", "float32"],
        traffic=(1.0, 2.0),
        saved_inputs=(0, 1) if ctx.has(1) else (0,),
    )


@kind("com.microsoft.SkipLayerNormalization", "com.microsoft.SkipSimplifiedLayerNormalization")
def skip_layer_norm(ctx: Context) -> Result:
    """A residual sum (with a bias) and its normalisation; the sum is the fourth output (contributed operators)."""
    tensor = ctx.tensor(0)
    last = len(tensor.shape) - 1
    is_simple = "Simplified" in ctx.kind
    dims = _over(ctx, tensor, [last], "norm", 1.0 if is_simple else 2.0)
    operands = [(0, dims), *_affine(ctx, dims, tensor, (1, 2, 3, 4))]
    rows: Dims = [*dims[:-1], ()]
    return Result(
        operands,
        [dims, rows, rows, dims],
        [tensor.dtype, "float32", "float32", tensor.dtype],
        traffic=(1.0, 2.0),
        saved_inputs=(0, 1),
    )


@kind("BatchNormalization")
def batch_norm(ctx: Context) -> Result:
    """Statistics over samples and space, one pair a channel; splitting the batch synchronises them."""
    tensor = ctx.tensor(0)
    rule = ctx.rule
    dims = rule.dims(tensor)
    channels = tensor.shape[1] if len(tensor.shape) > 1 else 1
    collective = all_reduce("batch_norm", [channels], 2.0, has_batch=False)
    for d, factors in enumerate(dims):
        if d != 1:
            rule.collect(factors, collective)
    channel: Dims = [dims[1]] if len(dims) > 1 else [()]
    operands: list[tuple[int, Dims]] = [(0, dims)]
    operands += [(i, channel) for i in (1, 2, 3, 4) if ctx.has(i)]
    return Result(
        operands,
        [dims, channel, channel, channel, channel],
        [tensor.dtype] + ["float32"] * 4,
        # Forward reads the operand twice, for statistics and for the result; backward reads both twice.
        traffic=(1.5, 2.5),
        saved_inputs=(0, 1),
    )


@kind("InstanceNormalization")
def instance_norm(ctx: Context) -> Result:
    """Statistics over space for each sample and channel."""
    tensor = ctx.tensor(0)
    dims = _over(ctx, tensor, list(range(2, len(tensor.shape))), "norm", 2.0)
    operands: list[tuple[int, Dims]] = [(0, dims), (1, [dims[1]]), (2, [dims[1]])]
    return Result(operands, [dims], traffic=(1.0, 2.0), saved_inputs=(0, 1))


@kind("GroupNormalization")
def group_norm(ctx: Context) -> Result:
    """Statistics over space and the channels of a group; splitting the channels means splitting the groups."""
    tensor = ctx.tensor(0)
    groups = ctx.int_attribute("num_groups", 1)
    channels = tensor.shape[1]
    if groups < 1 or channels % groups:
        raise Unsupported(f"{channels} channels in {groups} groups")
    rule = ctx.rule
    rows = [tensor.shape[0], groups]
    collective = all_reduce("norm", rows, 2.0, has_batch=tensor.batch_dim is not None)
    g = (rule.factor(groups, name="g"),) if groups > 1 else ()
    inner = (rule.factor(channels // groups, name="c", fixed=True),) if channels > groups else ()
    dims: Dims = [rule.dim(tensor, 0), (*g, *inner)]
    for d in range(2, len(tensor.shape)):
        dims.append(rule.dim(tensor, d, collective=collective))
    side: Dims = [(*g, *inner)] if ctx.has(1) and ctx.tensor(1).shape[0] == channels else [g]
    operands: list[tuple[int, Dims]] = [(0, dims)] + [(i, side) for i in (1, 2) if ctx.has(i)]
    return Result(operands, [dims], traffic=(1.0, 2.0), saved_inputs=(0, 1) if ctx.has(1) else (0,))


@kind("LRN")
def local_response_norm(ctx: Context) -> Result:
    """A window over channels: the channels stay whole."""
    dims = ctx.rule.dims(ctx.tensor(0))
    ctx.rule.fix(dims[1])
    return Result([(0, dims)], [dims], traffic=(1.0, 2.0), saved_inputs=(0,), saved_outputs=(0,))


@kind("LpNormalization", "MeanVarianceNormalization")
def other_norm(ctx: Context) -> Result:
    """Statistics over `axis` or `axes`."""
    tensor = ctx.tensor(0)
    rank = len(tensor.shape)
    axes = ctx.ints("axes") or (0, 2, 3)
    if ctx.kind == "LpNormalization":
        axes = (ctx.axis("axis", -1, rank),)
    floats = 1.0 if ctx.kind == "LpNormalization" else 2.0
    dims = _over(ctx, tensor, [a % rank for a in axes], "norm", floats)
    return Result([(0, dims)], [dims], traffic=(1.0, 1.5), saved_inputs=(0,))
