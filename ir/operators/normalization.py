"""Softmax and normalisation: statistics over some dims; splitting these dims takes an all-reduce of the statistics.

Traffic: the forward pass is one fused kernel (1.0); the backward pass reads the output gradient and the saved tensor
and writes the input gradient (3 transfers instead of 2: 1.5), and has one more transfer if scale and bias need
gradients (2.0).
"""

from __future__ import annotations

from collections.abc import Sequence

from ir.graph import Tensor
from ir.operators.base import Context, Dims, MissingBatch, Result, Unsupported, all_reduce, kind, statistics, within


@kind("Softmax", "LogSoftmax", "Hardmax", rule="{rows axis@softmax} -> {rows axis}")
def softmax(ctx: Context) -> Result:
    """The statistics are the row maximum and the row sum in the forward pass, and one row sum in the backward pass.

    Before version 13 the rows extend over all dims from `axis` on.
    """
    tensor = ctx.tensor(0)
    rank = len(tensor.shape)
    flattens = 0 < ctx.opset < 13
    axis = ctx.axis("axis", 1 if flattens else -1, rank)
    axes = range(axis, rank) if flattens else (axis,)
    exchange = statistics("softmax", tensor, axes, 2.0, backward=0.5)
    return Result(*ctx.factors(where={"axis": axes}, collectives=exchange), traffic=(1.0, 1.5), saved_outputs=(0,))


def _affine(ctx: Context, dims: Dims, tensor: Tensor, indices: Sequence[int]) -> list[tuple[int, Dims]]:
    """ONNX positions and factors of scale and bias, which broadcast to the trailing dims of the input."""
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


LAYER_NORM = "{rows axis@norm}, [{rows axis 1}], [{rows axis 1}] -> {rows axis}, {rows 1}, {rows 1}"


@kind("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization", rule=LAYER_NORM)
def layer_norm(ctx: Context) -> Result:
    """Statistics over the dims from `axis` on: sum and sum of squares forward, two sums backward."""
    tensor = ctx.tensor(0)
    axes = range(ctx.axis("axis", -1, len(tensor.shape)), len(tensor.shape))
    floats = 2.0 if ctx.kind == "LayerNormalization" else 1.0
    dims = _with_statistics(ctx, tensor, axes, floats)
    rows: Dims = [d if i not in axes else () for i, d in enumerate(dims)]
    return Result(
        [(0, dims), *_affine(ctx, dims, tensor, (1, 2))],
        [dims, rows, rows],
        [tensor.dtype, "float32", "float32"],
        saved_inputs=(0, 1) if ctx.has(1) else (0,),
    )


def _with_statistics(ctx: Context, tensor: Tensor, axes: Sequence[int], floats: float) -> Dims:
    """Factors of `tensor`; splitting those of `axes` takes an all-reduce of `floats` numbers per row."""
    dims = ctx.rule.dims(tensor)
    for axis in axes:
        ctx.rule.mark(dims[axis], collective=statistics("norm", tensor, axes, floats)["norm"])
    return dims


BATCH_NORM = (
    "{channels rows@batch_norm}, [channels], [channels], [channels], [channels]"
    " -> {channels rows}, channels, channels, channels, channels"
)


@kind("BatchNormalization", rule=BATCH_NORM)
def batch_norm(ctx: Context) -> Result:
    """Mean and variance of each channel, over samples and space; if the batch is split, ranks all-reduce them."""
    tensor = ctx.tensor(0)
    rule = ctx.rule
    dims = rule.dims(tensor)
    channels = tensor.shape[1] if len(tensor.shape) > 1 else 1
    collective = all_reduce("batch_norm", [channels], 2.0, has_batch=False)
    for d, factors in enumerate(dims):
        if d != 1:
            rule.mark(factors, collective=collective)
    channel: Dims = [dims[1]] if len(dims) > 1 else [()]
    return Result(
        [(0, dims), *((i, channel) for i in (1, 2, 3, 4) if ctx.has(i))],
        [dims, channel, channel, channel, channel],
        [tensor.dtype] + ["float32"] * 4,
        # Forward reads the operand twice, for statistics and for the result; backward reads both twice.
        traffic=(1.5, 2.5),
        saved_inputs=(0, 1),
    )


@kind("InstanceNormalization", rule="samples channels {space@norm}, channels, channels -> samples channels {space}")
def instance_norm(ctx: Context) -> Result:
    """Statistics over space for each sample and channel."""
    tensor = ctx.tensor(0)
    dims = _with_statistics(ctx, tensor, range(2, len(tensor.shape)), 2.0)
    return Result([(0, dims), (1, [dims[1]]), (2, [dims[1]])], [dims], saved_inputs=(0, 1))


GROUP_NORM = "samples (g c!) {space@norm}, [(g c!)], [(g c!)] -> samples (g c!) {space}"


@kind("GroupNormalization", rule=(GROUP_NORM, GROUP_NORM.replace("[(g c!)]", "[g]")))
def group_norm(ctx: Context) -> Result:
    """Statistics over space and the channels of a group; splitting the channels means splitting the groups.

    Scale and bias have one number per channel, or in versions 18 to 20 one per group.
    """
    tensor = ctx.tensor(0)
    groups = ctx.int_attribute("num_groups", 1)
    channels = tensor.shape[1]
    if groups < 1 or channels % groups:
        raise Unsupported(f"{channels} channels in {groups} groups")
    rule = ctx.rule
    collective = all_reduce("norm", [tensor.shape[0], groups], 2.0, has_batch=tensor.batch_dim is not None)
    g = rule.loop(groups, name="g")
    inner = rule.loop(channels // groups, name="c", fixed=True)
    dims: Dims = [rule.dim(tensor, 0), (*g, *inner)]
    for d in range(2, len(tensor.shape)):
        dims.append(rule.dim(tensor, d, collective=collective))
    side: Dims = [(*g, *inner)] if ctx.has(1) and ctx.tensor(1).shape[0] == channels else [g]
    operands: list[tuple[int, Dims]] = [(0, dims), *((i, side) for i in (1, 2) if ctx.has(i))]
    return Result(operands, [dims], saved_inputs=(0, 1) if ctx.has(1) else (0,))


@kind("LRN", rule="{rows channels!!} -> {rows channels}")
def local_response_norm(ctx: Context) -> Result:
    """Local response normalisation: a window slides over the channels, which stay whole."""
    return Result(*ctx.factors(where={"channels": (1,)}), saved_inputs=(0,), saved_outputs=(0,))


@kind("LpNormalization", "MeanVarianceNormalization", rule="{rows axis@norm} -> {rows axis}")
def other_norm(ctx: Context) -> Result:
    """Statistics over `axis` or `axes`."""
    tensor = ctx.tensor(0)
    rank = len(tensor.shape)
    if ctx.kind == "LpNormalization":
        axes, floats = {ctx.axis("axis", -1, rank)}, 1.0
    else:
        axes, floats = {within(a, rank) for a in ctx.ints("axes") or (0, 2, 3)}, 2.0
    exchange = statistics("norm", tensor, axes, floats)
    return Result(*ctx.factors(where={"axis": axes}, collectives=exchange), traffic=(1.0, 1.5), saved_inputs=(0,))
