"""Training losses, summed over samples; the trainer divides the sum by the global number of samples."""

from __future__ import annotations

from ir.operators.base import BakedBatch, Context, Dims, MissingBatch, Result, Unsupported, all_reduce, kind


@kind(
    "SoftmaxCrossEntropyLoss",
    "NegativeLogLikelihoodLoss",
    rule=(
        "{rows+@norm? classes@cross_entropy}, {rows}, [classes] -> (), {rows classes}",
        "{rows classes@cross_entropy}, {rows}, [classes] -> {rows}, {rows classes}",
        "samples!! rows@cross_entropy, other -> (), samples rows",
    ),
)
def cross_entropy(ctx: Context) -> Result:
    """Cross entropy of scores `[n, c, ...]` and integer labels, which lack the class dim.

    The class dim is 1, or that of attribute `class_dim`. Splitting the classes all-reduces the row maximum, the sum of
    exponentials and the score of the label. Splitting the rows is free if `reduction` is a sum or none, and all-reduces
    sum and count if it is the mean. The last line of the rule is for similarities between samples, as in contrastive
    losses.
    """
    scores, labels = ctx.tensor(0), ctx.tensor(1)
    rank = len(scores.shape)
    dim = ctx.axis("class_dim", 1 if rank > 1 else 0, rank)
    rule = ctx.rule
    reduction = str(ctx.attributes.get("reduction", "mean"))
    dims = rule.dims(scores)
    rows = [s for i, s in enumerate(scores.shape) if i != dim]
    floats = 3.0 if ctx.kind == "SoftmaxCrossEntropyLoss" else 1.0
    exchange = all_reduce("cross_entropy", rows, floats, has_batch=scores.batch_dim is not None, backward=0.0)
    rule.mark(dims[dim], collective=exchange)
    rest: Dims = [f for d, f in enumerate(dims) if d != dim]
    known = ctx.value(1)
    if known is not None and len(rows) == known.ndim == 1 and known.size == rows[0] * ctx.export_batch != rows[0]:
        raise BakedBatch(1, 0, rows[0])
    dtypes = [scores.dtype, scores.dtype]
    if dim == scores.batch_dim and scores.shape[dim] == 1 and tuple(rows) == labels.shape:
        # Similarities between samples, transposed: the row of one sample.
        rule.mark([rule.batch()], fixed=True)
        return Result([(0, dims), (1, rule.dims(labels))], [[], dims], dtypes, saved_inputs=(0, 1))
    if scores.batch_dim not in (None, dim) and labels.batch_dim is None and tuple(rows) == labels.shape:
        raise MissingBatch(1, scores.batch_dim - (scores.batch_dim > dim))
    if tuple(rows) != labels.shape or (labels.batch_dim is None) != (scores.batch_dim is None):
        raise Unsupported(f"labels {labels.shape} for scores {scores.shape}")
    operands: list[tuple[int, Dims]] = [(0, dims), (1, rest)]
    if ctx.has(2):
        operands.append((2, [dims[dim]]))
    out = rest if reduction == "none" else []
    loops = [index for factors in rest for index in factors]
    if reduction == "sum":
        rule.mark(loops, summed=True)
    elif reduction != "none":
        rule.mark(loops, collective=all_reduce("norm", [], 2.0, has_batch=False, backward=0.0))
    return Result(operands, [out, dims], dtypes, traffic=(1.0, 1.0), saved_inputs=(0, 1))


@kind("MeanSquaredErrorLoss", rule="{dims+}, {dims} -> ()")
def mean_squared_error(ctx: Context) -> Result:
    """Mean of the squared difference over the dims of a sample, summed over samples (not an ONNX operator)."""
    scores, target = ctx.tensor(0), ctx.tensor(1)
    if scores.shape != target.shape or scores.batch_dim != target.batch_dim:
        raise Unsupported("operands differ in shape")
    # A shard also divides by the number of elements of the whole sample.
    elements = ctx.int_attribute("elements", scores.num_elements)
    return Result(*ctx.factors(), traffic=(1.0, 1.0), saved_inputs=(0, 1), attributes={"elements": elements})
