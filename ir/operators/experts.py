"""Mixture of experts: tokens are dispatched to the experts that the router chose, and their results are combined.

`Dispatch` copies each token into slots of its experts; every expert has a fixed number of slots per sample
(`capacity`). `GroupedMatMul` multiplies the slots of each expert by that expert's weight. `Combine` adds the `k`
results of every token, weighted by the router. In slots `[e, (b c), h]` the samples are the major part of the second
dim: if a mesh axis splits samples before `Dispatch` and experts after it, the reshard between the two placements is an
all-to-all.

A token takes the next free slot of its expert, in the order of tokens and of their `k` choices. Slots that remain empty
are zero, and tokens beyond the capacity contribute nothing (GShard, arXiv 2006.16668, section 3.2, without its random
routing). Attribute `batch_dim` is the token dim that holds the samples if that is not the first one.

With `groups` > 1 the tokens of a sample are divided into that many contiguous groups of equal length, along the first
token dim other than that of the samples, and each group has its own slots (the groups of GShard). The slots are then
`[e, g, (b c), h]`, and a mesh axis that splits the sequence (context or sequence parallelism) can also exchange tokens
with the experts by all-to-all. FLOPs are those of the routed tokens, not of all slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from ir.graph import Operator, Tensor
from ir.operators.base import Context, Dims, Result, Unsupported, kind

DISPATCH, PRODUCT, COMBINE = "automap.Dispatch", "automap.GroupedMatMul", "automap.Combine"

BALANCED_LOAD = (
    "mixture of experts: every expert is assumed to get an equal share of each sample's routed tokens; "
    "a real router's busiest expert takes longer and holds more"
)
"""Warning for every graph with experts: the assumption on which capacity, times and memory are based."""


def _routing(ctx: Context, x_lead: tuple[int, ...], batch_dim: int | None, index: int) -> Tensor:
    """Operand `index`, which must be of shape `[tokens ..., k]` for tokens of shape `x_lead`."""
    chosen = ctx.tensor(index)
    if chosen.shape[:-1] != x_lead or chosen.batch_dim != batch_dim or not chosen.shape:
        raise Unsupported(f"operand {index} is {chosen.shape} for tokens {x_lead}")
    return chosen


def _lead(ctx: Context, tensor: Tensor, groups: tuple[int, ...] = ()) -> Dims:
    """Factors of the token dims: samples and groups can be split, the tokens of a group cannot."""
    dims = range(len(tensor.shape) - 1)
    grouped = next((d for d in dims if d != tensor.batch_dim), None) if groups else None
    found: Dims = []
    for d in dims:
        if d != grouped:
            found.append(ctx.rule.dim(tensor, d, fixed=True))
            continue
        length, rest = divmod(tensor.shape[d], ctx.rule.size(groups))
        if rest:
            raise Unsupported(f"{ctx.rule.size(groups)} groups of {tensor.shape[d]} tokens")
        found.append((*groups, ctx.rule.factor(length, fixed=True)) if length > 1 else groups)
    if groups and grouped is None:
        raise Unsupported("groups of tokens that are all one dim with the samples")
    return found


@kind(DISPATCH, rule="{token! (g token!)} h, {token (g token)} k! -> e {g} c! h")
def dispatch(ctx: Context) -> Result:
    """Tokens `b (g s) h` and their experts `b (g s) k` become slots `e g (b c) h`.

    Attributes: `num_experts`, `groups` (default 1, then the result has no dim g), `capacity` (slots of an expert for
    one group of one sample). Splitting e needs no communication: each rank takes the tokens of its own experts.
    """
    x = ctx.tensor(0)
    rule = ctx.rule
    experts, capacity = ctx.int_attribute("num_experts", 0), ctx.int_attribute("capacity", 0)
    groups = ctx.int_attribute("groups", 1)
    if experts < 1 or capacity < 1 or groups < 1 or len(x.shape) < 2 or x.batch_dim == len(x.shape) - 1:
        raise Unsupported(f"{experts} experts of {capacity} slots for {groups} groups of tokens {x.shape}")
    chosen = _routing(ctx, x.shape[:-1], x.batch_dim, 1)
    g = rule.loop(groups, name="g")
    lead = _lead(ctx, x, g)
    k = rule.dim(chosen, len(chosen.shape) - 1, name="k", fixed=True)
    h = rule.dim(x, len(x.shape) - 1, name="h")
    e = rule.loop(experts, name="e")
    c = rule.loop(capacity, name="c", fixed=True)
    slots = (rule.batch(), *c) if rule.has_batch else c
    return Result(
        [(0, [*lead, h]), (1, [*lead, k])],
        [[e, g, slots, h] if g else [e, slots, h]],
        [x.dtype],
        passing="first",
        traffic=(1.0, 1.0),
        saved_inputs=(1,),
        attributes={"batch_dim": x.batch_dim or None},
    )


def token_copies(operators: Iterable[Operator], tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Number of copies of each token in the operands and results of `Dispatch` and `Combine`.

    Returns:
        tensor -> copies: 1 for the tokens that a `Dispatch` reads or a `Combine` returns, and the `k` experts of a
        token for the slots that a `Dispatch` returns or a `Combine` reads.
    """
    found: dict[str, float] = {}
    for op in operators:
        if op.kind in (DISPATCH, COMBINE):
            tokens, slots = (op.inputs[0], op.outputs[0])[:: 1 if op.kind == DISPATCH else -1]
            found[slots] = float(tensors[op.inputs[1]].shape[-1])
            found.setdefault(tokens, 1.0)
    return found


def num_experts(op: Operator) -> int:
    """Number of experts of a `GroupedMatMul`; 0 for all other operators."""
    return next((f.size for f in op.rule.factors if f.name == "e"), 0) if op.kind == PRODUCT else 0


def _is_slots(tensor: Tensor) -> bool:
    """Whether a shape is `[e, (b c), h]` or `[e, g, (b c), h]`."""
    return len(tensor.shape) in (3, 4) and tensor.batch_dim in (None, len(tensor.shape) - 2)


@kind(PRODUCT, rule="e {g} c k+, e k n -> e {g} c n")
def grouped_matmul(ctx: Context) -> Result:
    """The product of slots with the weight of their expert; the dim g exists only if tokens are divided into groups.

    Attribute `num_tokens`: routed tokens of one sample (tokens times top-k).
    """
    tokens, weight = ctx.tensor(0), ctx.tensor(1)
    if not _is_slots(tokens) or len(weight.shape) != 3:
        raise Unsupported("operands are not [experts, slots, k] and [experts, k, n]")
    if weight.batch_dim is not None or (weight.shape[0], weight.shape[1]) != (tokens.shape[0], tokens.shape[-1]):
        raise Unsupported(f"tokens {tokens.shape} for weights {weight.shape}")
    routed = ctx.int_attribute("num_tokens", 0)
    if not 1 <= routed <= prod(tokens.shape[:-1]):
        raise Unsupported(f"num_tokens={routed} for {tokens.shape[0]} experts of {prod(tokens.shape[1:-1])} slots")
    flops = 2.0 * routed * prod(weight.shape[1:])
    return Result(
        *ctx.factors(),
        passing="multi",
        forward_flops=flops,
        gradient_flops={0: flops, 1: flops},
        traffic=(1.0, 2.0),
        saved_inputs=[i for i in (0, 1) if ctx.needs_gradient[1 - i]],
    )


@kind(COMBINE, rule="e+ {g} c! h, {token! (g token!)} k!, {token (g token)} k -> {token (g token)} h")
def combine(ctx: Context) -> Result:
    """Slots `e g (b c) h`, the experts of tokens and their weights `b (g s) k` become tokens `b (g s) h`.

    Splitting e leaves each rank with the sum over its own experts. The gradient of the weights is the product of a
    token's results with the output gradient, hence partial where e or h is split.
    """
    tokens, weights = ctx.tensor(0), ctx.tensor(2)
    rule = ctx.rule
    if not _is_slots(tokens) or len(weights.shape) < 2:
        raise Unsupported("operands are not [experts, slots, h] and [tokens ..., k]")
    if (tokens.batch_dim is None) != (weights.batch_dim is None) or weights.batch_dim == len(weights.shape) - 1:
        raise Unsupported("only some operands depend on the sample")
    chosen = _routing(ctx, weights.shape[:-1], weights.batch_dim, 1)
    if chosen.shape != weights.shape:
        raise Unsupported(f"experts {chosen.shape} for weights {weights.shape}")
    g = (rule.factor(tokens.shape[1], name="g"),) if len(tokens.shape) == 4 else ()
    lead = _lead(ctx, weights, g)
    k = rule.dim(weights, len(weights.shape) - 1, name="k", fixed=True)
    e = rule.dim(tokens, 0, name="e", summed=True)
    c = rule.dim(tokens, len(tokens.shape) - 2, name="c", fixed=True)
    h = rule.dim(tokens, len(tokens.shape) - 1, name="h")
    held = float(tokens.num_elements)
    out = float(prod(weights.shape[:-1]) * tokens.shape[-1])
    return Result(
        [(0, [e, g, c, h] if g else [e, c, h]), (1, [*lead, k]), (2, [*lead, k])],
        [[*lead, h]],
        [tokens.dtype],
        passing="multi",
        linear=(0, 2),
        # Backward reads the slots and the output gradient and writes the gradient of the slots.
        traffic=(1.0, (2.0 * held + out) / (held + out)),
        saved_inputs=[*([0] if ctx.needs_gradient[2] else []), 1, 2],
        attributes={"capacity": tokens.shape[-2], "batch_dim": weights.batch_dim or None},
    )
