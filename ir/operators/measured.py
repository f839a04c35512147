"""Kinds of measured layer graphs (`ir.profile_import`): layers with measured sizes and times, bundles of their tensors.

Tensors are `[1, n]` at one sample, with the batch in dim 0. The operators inside a layer are unknown, so only the batch
can be split.
"""

from __future__ import annotations

from ir.operators.base import Context, Dims, Result, kind

LAYER = "Layer"


def _rows(ctx: Context, sizes: tuple[int, ...]) -> list[Dims]:
    """Factors of results `[batch, size]`."""
    batch = ctx.rule.batch()
    return [[(batch,), ctx.rule.loop(size, fixed=True)] for size in sizes]


def _operands(ctx: Context) -> list[tuple[int, Dims]]:
    return [(i, ctx.rule.dims(t, fixed=True)) for i, t in ctx.present]


@kind(LAYER, "Unbundle", rule="{dims!}* -> 1 size!*")
def layer(ctx: Context) -> Result:
    """Results of `sizes` elements per sample.

    A Layer saves its results for the backward pass; an Unbundle is the inverse of a Bundle, and saves nothing.
    """
    sizes = ctx.ints("sizes") or ()
    operands, outputs = _operands(ctx), _rows(ctx, sizes)
    if ctx.kind == LAYER:
        return Result(operands, outputs, saved_outputs=range(len(outputs)))
    return Result(operands, outputs, traffic=(0.0, 0.0))


@kind("Bundle", rule="{dims!}* -> 1 size!")
def bundle(ctx: Context) -> Result:
    """Combines all operands into one tensor, so that a single tensor crosses a stage boundary; free of cost."""
    size = sum(t.num_elements for _, t in ctx.present)
    return Result(_operands(ctx), _rows(ctx, (size,)), traffic=(0.0, 0.0))


@kind("LayerLoss", rule="{dims!}* -> ()")
def layer_loss(ctx: Context) -> Result:
    """A scalar that depends on every operand, summed over samples; its time is included in that of the last layers."""
    operands = _operands(ctx)
    ctx.rule.mark([ctx.rule.batch()], summed=True)
    return Result(operands, [[]], traffic=(0.0, 0.0))
