"""Attention and rotary embedding as single operators (ONNX version 23), and recurrent layers.

FLOPs: two products of `heads * queries * keys * head size` multiply-adds; a causal mask is not halved. The backward
pass of a fused kernel recomputes the scores (5 products against 2) but only the four gradients are counted.
"""

from __future__ import annotations

from ir.factors import InternalCollective
from ir.graph import Tensor
from ir.operators.base import BakedBatch, Context, Dims, MissingBatch, Result, Unsupported, bytes_of, kind


def _split_heads(ctx: Context, tensor: Tensor, heads: int | None) -> tuple[int, int, int]:
    """(heads, length, head size) of a `[b, h, s, d]` or `[b, s, h*d]` operand."""
    if len(tensor.shape) == 4:
        return tensor.shape[1], tensor.shape[2], tensor.shape[3]
    if len(tensor.shape) != 3 or not heads or tensor.shape[2] % heads:
        raise Unsupported("operands are neither [b, h, s, d] nor [b, s, h*d] with a number of heads")
    return heads, tensor.shape[1], tensor.shape[2] // heads


@kind("Attention")
def attention(ctx: Context) -> Result:
    """Queries, keys, values; the kv heads are a factor; a split of the kv sequence combines partial softmaxes.

    Each rank attends to its own keys; the row maximum, the row sum and the result, scaled by them, are all-reduced.
    Backward the row sums get their gradient from all ranks.
    Splitting the queries over the same ranks with keys and values gathered is the signature of factor `s`.
    """
    q, k, v = ctx.tensor(0), ctx.tensor(1), ctx.tensor(2)
    rule = ctx.rule
    heads, num_q, size = _split_heads(ctx, q, ctx.attributes.get("q_num_heads"))
    kv_heads, num_k, _ = _split_heads(ctx, k, ctx.attributes.get("kv_num_heads"))
    _, _, size_v = _split_heads(ctx, v, ctx.attributes.get("kv_num_heads"))
    if ctx.has(4) or ctx.has(5):
        raise Unsupported("a key-value cache is not for training")
    if ctx.has(6):
        raise Unsupported("lengths of keys that are data are for inference")
    if heads % kv_heads:
        raise Unsupported(f"{heads} heads share {kv_heads} kv heads")
    has_batch = q.batch_dim == 0

    def some(n: int, **marks: object) -> tuple[int, ...]:
        return (rule.factor(n, **marks),) if n != 1 else ()  # type: ignore[arg-type]

    carries = any(ctx.has(i) and ctx.tensor(i).batch_dim == 0 and len(ctx.tensor(i).shape) > 2 for i in (1, 2, 3))
    if carries and not has_batch:
        raise MissingBatch(0, 0)
    b = rule.dim(q, 0)
    h, g = some(kv_heads, name="h"), some(heads // kv_heads, name="g")
    rows = q.shape[0] * heads * num_q
    amount = float(rows * size_v) * bytes_of(q.dtype) + 2.0 * rows * bytes_of("float32")
    sums = float(rows) * bytes_of("float32")
    ring = InternalCollective(
        name="attention",
        kind="all_reduce",
        forward_bytes=(0.0, amount) if has_batch else (amount, 0.0),
        backward_bytes=(0.0, sums) if has_batch else (sums, 0.0),
    )
    s, t = some(num_q, name="s"), some(num_k, name="t", collective=ring)
    d, e = some(size, name="d", fixed=True), some(size_v, name="e", fixed=len(v.shape) == 3)

    def operand(tensor: Tensor, length: tuple[int, ...], head: tuple[int, ...], depth: tuple[int, ...]) -> Dims:
        lead = b if tensor.batch_dim == 0 or tensor.shape[0] == rule.size(b) != 1 else ()
        return [lead, head, length, depth] if len(tensor.shape) == 4 else [lead, length, (*head, *depth)]

    operands: list[tuple[int, Dims]] = [
        (0, operand(q, s, (*h, *g), d)),
        (1, operand(k, t, h, d)),
        (2, operand(v, t, h, e)),
    ]
    out = operand(
        Tensor(name="", shape=(*q.shape[:-1], 0), dtype=q.dtype, role="activation", batch_dim=q.batch_dim),
        s,
        (*h, *g),
        e,
    )
    if ctx.has(3):
        mask = ctx.tensor(3)
        loops = [b, (*h, *g), s, t][4 - len(mask.shape) :]
        if mask.shape[-1] not in (1, num_k):
            raise Unsupported(f"a mask for {mask.shape[-1]} of {num_k} keys")
        own: Dims = [() if n == 1 and mask.batch_dim != i else loops[i] for i, n in enumerate(mask.shape)]
        operands.append((3, own))
    num_b = q.shape[0]
    qk = 2.0 * num_b * heads * num_q * num_k * size
    av = 2.0 * num_b * heads * num_q * num_k * size_v
    return Result(
        operands,
        [out],
        [q.dtype],
        forward_flops=qk + av,
        gradient_flops={0: qk, 1: qk, 2: 2 * av},
        traffic=(1.0, 2.0),
        saved_inputs=tuple(i for i, _ in operands),
        saved_outputs=(0,),
    )


@kind("RotaryEmbedding")
def rotary(ctx: Context) -> Result:
    """Rotates pairs of the head size: that dim stays whole; heads, samples and positions are free."""
    x = ctx.tensor(0)
    rule = ctx.rule
    if x.batch_dim is None and any(ctx.has(i) and ctx.tensor(i).batch_dim == 0 for i in (1, 2, 3)):
        raise MissingBatch(0, 0)
    heads = ctx.int_attribute("num_heads", 0)
    rank = len(x.shape)
    if rank == 3:
        if not heads:
            raise Unsupported("3-D operand without num_heads")
        last = (rule.factor(heads, name="h"), rule.factor(x.shape[2] // heads, name="d", fixed=True))
        dims: Dims = [rule.dim(x, 0), rule.dim(x, 1), last]
        s = dims[1]
    else:
        dims = [rule.dim(x, 0), rule.dim(x, 1), rule.dim(x, 2), rule.dim(x, 3, fixed=True)]
        s = dims[2]
    operands: list[tuple[int, Dims]] = [(0, dims)]
    for i in (1, 2):
        table = ctx.tensor(i)
        tail = rule.dim(table, len(table.shape) - 1, fixed=True)
        if len(table.shape) == 3:
            lead = () if table.shape[0] == 1 and table.batch_dim != 0 else dims[0]
            operands.append((i, [lead, () if table.shape[1] == 1 else s, tail]))
        else:
            operands.append((i, [rule.dim(table, 0, fixed=True), tail]))
    if ctx.has(3):
        positions = ctx.tensor(3)
        operands.append((3, [dims[0] if positions.batch_dim == 0 or positions.shape[0] != 1 else (), s]))
    return Result(
        operands,
        [dims],
        passing="first",
        traffic=(1.0, 1.0),
        saved_inputs=(1, 2, *((3,) if ctx.has(3) else ())),
    )


@kind("LSTM", "GRU", "RNN")
def recurrent(ctx: Context) -> Result:
    """Samples are free; time, features and gates stay whole."""
    x, w, r = ctx.tensor(0), ctx.tensor(1), ctx.tensor(2)
    rule = ctx.rule
    layout = ctx.int_attribute("layout", 0)
    t_dim, b_dim = (1, 0) if layout else (0, 1)
    if len(x.shape) != 3 or x.batch_dim not in (None, b_dim):
        raise Unsupported("the batch is not where `layout` says")
    directions, hidden = w.shape[0], r.shape[2]
    time, batch = rule.dim(x, t_dim, fixed=True), rule.dim(x, b_dim)

    def fixed(n: int) -> tuple[int, ...]:
        return (rule.factor(n, fixed=True),) if n != 1 else ()

    k, h, d = fixed(x.shape[2]), fixed(hidden), fixed(directions)
    gates = fixed(w.shape[1])
    dims_x: Dims = [batch, time, k] if layout else [time, batch, k]
    operands: list[tuple[int, Dims]] = [(0, dims_x), (1, [d, gates, k]), (2, [d, gates, h])]
    state: Dims = [batch, d, h] if layout else [d, batch, h]
    for i in range(3, len(ctx.inputs)):
        tensor = ctx.inputs[i]
        if tensor is None:
            continue
        if i == 4 and x.batch_dim is not None and tensor.batch_dim is None:
            raise MissingBatch(4, 0)
        if i in (5, 6):
            place = 0 if layout else 1
            if x.batch_dim is not None and tensor.batch_dim is None and tensor.shape[place] != 1:
                raise BakedBatch(i, place, 1)
            operands.append((i, state if tensor.batch_dim is not None else [() for _ in tensor.shape]))
        else:
            operands.append((i, rule.dims(tensor, fixed=True)))
    y: Dims = [batch, time, d, h] if layout else [time, d, batch, h]
    steps = x.shape[t_dim] * x.shape[b_dim]
    flops_x, flops_r = 2.0 * steps * w.num_elements, 2.0 * steps * r.num_elements
    return Result(
        operands,
        [y, state, state],
        [x.dtype] * 3,
        forward_flops=flops_x + flops_r,
        gradient_flops={0: flops_x + flops_r, 1: flops_x, 2: flops_r},
        traffic=(1.0, 2.0),
        saved_inputs=(0, 1, 2),
        saved_outputs=(0,),
    )
