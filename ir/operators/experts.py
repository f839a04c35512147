"""Mixture of experts: routed tokens go to the experts that the router chose, and come back.

`Dispatch` gives each expert a fixed number of slots a sample (`capacity`), `GroupedMatMul` multiplies what stands in
the slots of each expert by that expert's weight, `Combine` brings every token's `k` results back and adds them up by
the router's weights. In `[e, (b c), h]` samples are the major part of the slots: an axis that splits samples in front
of the experts and the experts inside them exchanges tokens by all-to-all, as for any other two placements.

A token takes the next free slot of its expert, in the order of tokens and of its `k` choices; slots that stay empty
are zero, tokens beyond the capacity add nothing (GShard, arXiv 2006.16668, section 3.2, without its random routing).
Attribute `batch_dim` says which token dim holds the samples where it is not the first.
FLOPs are those of the routed tokens, not of the slots.
"""

from __future__ import annotations

from math import prod

from ir.graph import Tensor
from ir.operators.base import Context, Dims, Result, Unsupported, kind

DISPATCH, PRODUCT, COMBINE = "automap.Dispatch", "automap.GroupedMatMul", "automap.Combine"

BALANCED_LOAD = (
    "mixture of experts: every expert is assumed to get an equal share of each sample's routed tokens; "
    "a real router's busiest expert takes longer and holds more"
)
"""Warning of every graph with experts: what capacity, times and memory rest on."""


def _routing(ctx: Context, x_lead: tuple[int, ...], batch_dim: int | None, index: int) -> Tensor:
    """Operand `index`, `[tokens ..., k]` for tokens of shape `x_lead`."""
    chosen = ctx.tensor(index)
    if chosen.shape[:-1] != x_lead or chosen.batch_dim != batch_dim or not chosen.shape:
        raise Unsupported(f"operand {index} is {chosen.shape} for tokens {x_lead}")
    return chosen


def _lead(ctx: Context, tensor: Tensor) -> Dims:
    """Factors of the token dims: samples are free, tokens of a sample stay together."""
    return [ctx.rule.dim(tensor, d, fixed=True) for d in range(len(tensor.shape) - 1)]


@kind(DISPATCH)
def dispatch(ctx: Context) -> Result:
    """`b s! h, b s! k! -> e (b c!) h`; attributes `num_experts`, `capacity` (slots of an expert for one sample).

    Splitting e needs no exchange: each rank takes the tokens of its own experts.
    """
    x = ctx.tensor(0)
    rule = ctx.rule
    experts, capacity = ctx.int_attribute("num_experts", 0), ctx.int_attribute("capacity", 0)
    if experts < 1 or capacity < 1 or len(x.shape) < 2 or x.batch_dim == len(x.shape) - 1:
        raise Unsupported(f"{experts} experts of {capacity} slots for tokens {x.shape}")
    chosen = _routing(ctx, x.shape[:-1], x.batch_dim, 1)
    lead = _lead(ctx, x)
    k = rule.dim(chosen, len(chosen.shape) - 1, name="k", fixed=True)
    h = rule.dim(x, len(x.shape) - 1, name="h")
    e = (rule.factor(experts, name="e"),) if experts > 1 else ()
    c = (rule.factor(capacity, name="c", fixed=True),) if capacity > 1 else ()
    slots = (rule.batch(), *c) if rule.has_batch else c
    return Result(
        [(0, [*lead, h]), (1, [*lead, k])],
        [[e, slots, h]],
        [x.dtype],
        passing="first",
        traffic=(1.0, 1.0),
        saved_inputs=(1,),
        attributes={"batch_dim": x.batch_dim or None},
    )


@kind(PRODUCT)
def grouped_matmul(ctx: Context) -> Result:
    """`e (b c) k+, e k+ n -> e (b c) n`; attribute `num_tokens`: routed tokens of one sample (tokens times top-k)."""
    tokens, weight = ctx.tensor(0), ctx.tensor(1)
    rule = ctx.rule
    if len(tokens.shape) != 3 or len(weight.shape) != 3 or tokens.batch_dim not in (None, 1):
        raise Unsupported("operands are not [experts, slots, k] and [experts, k, n]")
    if weight.batch_dim is not None or (weight.shape[0], weight.shape[1]) != (tokens.shape[0], tokens.shape[2]):
        raise Unsupported(f"tokens {tokens.shape} for weights {weight.shape}")
    routed = ctx.int_attribute("num_tokens", 0)
    if not 1 <= routed <= tokens.shape[0] * tokens.shape[1]:
        raise Unsupported(f"num_tokens={routed} for {tokens.shape[0]} experts of {tokens.shape[1]} slots")
    e = rule.dim(tokens, 0, name="e")
    c = rule.dim(tokens, 1, name="c")
    k = rule.dim(tokens, 2, name="k", summed=True)
    n = rule.dim(weight, 2, name="n")
    flops = 2.0 * routed * prod(weight.shape[1:])
    return Result(
        [(0, [e, c, k]), (1, [e, k, n])],
        [[e, c, n]],
        passing="multi",
        forward_flops=flops,
        gradient_flops={0: flops, 1: flops},
        traffic=(1.0, 2.0),
        saved_inputs=[i for i in (0, 1) if ctx.needs_gradient[1 - i]],
    )


@kind(COMBINE)
def combine(ctx: Context) -> Result:
    """`e+ (b c!) h, b s! k!, b s! k! -> b s! h`: slots, chosen experts and their weights to tokens.

    Splitting e leaves each rank with the sum over its own experts. The gradient of the weights is the product of a
    token's results with the output gradient, hence partial where e or h is split.
    """
    tokens, weights = ctx.tensor(0), ctx.tensor(2)
    rule = ctx.rule
    if len(tokens.shape) != 3 or tokens.batch_dim not in (None, 1) or len(weights.shape) < 2:
        raise Unsupported("operands are not [experts, slots, h] and [tokens ..., k]")
    if (tokens.batch_dim is None) != (weights.batch_dim is None) or weights.batch_dim == len(weights.shape) - 1:
        raise Unsupported("only some operands depend on the sample")
    chosen = _routing(ctx, weights.shape[:-1], weights.batch_dim, 1)
    if chosen.shape != weights.shape:
        raise Unsupported(f"experts {chosen.shape} for weights {weights.shape}")
    lead = _lead(ctx, weights)
    k = rule.dim(weights, len(weights.shape) - 1, name="k", fixed=True)
    e = rule.dim(tokens, 0, name="e", summed=True)
    c = rule.dim(tokens, 1, name="c", fixed=True)
    h = rule.dim(tokens, 2, name="h")
    held = float(tokens.num_elements)
    out = float(prod(weights.shape[:-1]) * tokens.shape[2])
    return Result(
        [(0, [e, c, h]), (1, [*lead, k]), (2, [*lead, k])],
        [[*lead, h]],
        [tokens.dtype],
        passing="multi",
        linear=(0, 2),
        # Backward reads the slots and the output gradient and writes the gradient of the slots.
        traffic=(1.0, (2.0 * held + out) / (held + out)),
        saved_inputs=[*([0] if ctx.needs_gradient[2] else []), 1, 2],
        attributes={"capacity": tokens.shape[1], "batch_dim": weights.batch_dim or None},
    )
