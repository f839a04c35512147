"""Attention and rotary embedding as single operators (ONNX version 23), and recurrent layers.

FLOPs: two products of `heads * queries * keys * head size` multiply-adds; a causal mask is not halved. The backward
pass of a fused kernel recomputes the scores (5 products against 2) but only the four gradients are counted.
"""

from __future__ import annotations

from ir.factors import InternalCollective
from ir.graph import Tensor
from ir.operators.base import (
    AcrossSamples,
    BakedBatch,
    Context,
    Dims,
    MissingBatch,
    Result,
    Unsupported,
    bytes_of,
    kind,
)


def _split_heads(ctx: Context, tensor: Tensor, heads: int | None) -> tuple[int, int, int]:
    """(heads, length, head size) of a `[b, h, s, d]` or `[b, s, h*d]` operand."""
    if len(tensor.shape) == 4:
        return tensor.shape[1], tensor.shape[2], tensor.shape[3]
    if len(tensor.shape) != 3 or not heads or tensor.shape[2] % heads:
        raise Unsupported("operands are neither [b, h, s, d] nor [b, s, h*d] with a number of heads")
    return heads, tensor.shape[1], tensor.shape[2] // heads


@kind(
    "Attention",
    rule=tuple(
        f"samples {q}, samples {k}, samples {v}, [{{samples (h g) s t 1}}] -> samples {out}"
        for q, out in (("(h g) s d!", "(h g) s e!?"), ("s (h g d!)", "s (h g e!?)"))
        for k, v in (("h t@attention d", "h t e"), ("t@attention (h d)", "t (h e)"))
    ),
)
def attention(ctx: Context) -> Result:
    """Queries, keys, values, all `[b, heads, length, size]` or `[b, length, heads * size]`, and a mask.

    Splitting the heads means splitting the kv heads (factor h). Splitting the key-value sequence (factor t) combines
    partial softmaxes: each rank attends to its own keys, and the row maximum, the row sum and the rescaled result are
    all-reduced; in the backward pass, the gradients of the row sums are summed over all ranks. Splitting the queries
    over the same ranks, with keys and values gathered, is the signature of factor s.
    """
    q, k, v = ctx.tensor(0), ctx.tensor(1), ctx.tensor(2)
    rule = ctx.rule
    heads, num_q, size = _split_heads(ctx, q, ctx.attributes.get("q_num_heads"))
    kv_heads, num_k, _ = _split_heads(ctx, k, ctx.attributes.get("kv_num_heads"))
    _, _, size_v = _split_heads(ctx, v, ctx.attributes.get("kv_num_heads"))
    if ctx.has(4) or ctx.has(5):
        raise Unsupported("it reads a key-value cache, which training does not have")
    if ctx.has(6):
        raise Unsupported("it reads lengths of keys as data, which training does not have")
    if heads % kv_heads:
        raise Unsupported(f"{heads} heads share {kv_heads} kv heads")
    if any(tensor.batch_dim not in (None, 0) for tensor in (q, k, v)):
        raise AcrossSamples("its samples are not the first dim of queries, keys and values")
    has_batch = q.batch_dim == 0

    carries = any(ctx.has(i) and ctx.tensor(i).batch_dim == 0 and len(ctx.tensor(i).shape) > 2 for i in (1, 2, 3))
    if carries and not has_batch:
        raise MissingBatch(0, 0)
    b = rule.dim(q, 0)
    h, g = rule.loop(kv_heads, name="h"), rule.loop(heads // kv_heads, name="g")
    rows = q.shape[0] * heads * num_q
    amount = float(rows * size_v) * bytes_of(q.dtype) + 2.0 * rows * bytes_of("float32")
    sums = float(rows) * bytes_of("float32")
    ring = InternalCollective(
        name="attention",
        kind="all_reduce",
        forward_bytes=(0.0, amount) if has_batch else (amount, 0.0),
        backward_bytes=(0.0, sums) if has_batch else (sums, 0.0),
    )
    s, t = rule.loop(num_q, name="s"), rule.loop(num_k, name="t", collective=ring)
    d, e = rule.loop(size, name="d", fixed=True), rule.loop(size_v, name="e", fixed=len(v.shape) == 3)

    def operand(tensor: Tensor, length: tuple[int, ...], head: tuple[int, ...], depth: tuple[int, ...]) -> Dims:
        lead = b if tensor.batch_dim == 0 or tensor.shape[0] == rule.size(b) != 1 else ()
        return [lead, head, length, depth] if len(tensor.shape) == 4 else [lead, length, (*head, *depth)]

    operands: list[tuple[int, Dims]] = [
        (0, operand(q, s, (*h, *g), d)),
        (1, operand(k, t, h, d)),
        (2, operand(v, t, h, e)),
    ]
    out = operand(q, s, (*h, *g), e)
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
        saved_inputs=tuple(i for i, _ in operands),
        saved_outputs=(0,),
    )


TABLE = "{samples length row! pair! 1}"


@kind(
    "RotaryEmbedding",
    rule=(
        f"samples heads length size!, {TABLE}, {TABLE}, [{{samples length 1}}] -> samples heads length size",
        f"samples length (h d!), {TABLE}, {TABLE}, [{{samples length 1}}] -> samples length (h d)",
    ),
)
def rotary(ctx: Context) -> Result:
    """Rotary position embedding: rotates pairs of elements within each head.

    The head size therefore stays whole; heads, samples and positions can be split.
    """
    x = ctx.tensor(0)
    rule = ctx.rule
    if x.batch_dim is None and any(ctx.has(i) and ctx.tensor(i).batch_dim == 0 for i in (1, 2, 3)):
        raise MissingBatch(0, 0)
    for i, tensor in ctx.present[1:]:
        if x.batch_dim == 0 and tensor.batch_dim is None and len(tensor.shape) == (2 if i == 3 else 3):
            ctx.keep_one_sample(i)
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
    saved = (1, 2, 3) if ctx.has(3) else (1, 2)
    return Result(operands, [dims], passing="first", traffic=(1.0, 1.0), saved_inputs=saved)


STATE = "[{samples direction hidden 1}]"


@kind(
    "LSTM",
    "GRU",
    "RNN",
    rule="{samples time!} feature!, direction! gates! feature, direction gates hidden!,"
    f" [{{bias!}}], [{{length! samples}}], {STATE}, {STATE}, [{{peephole!}}]"
    " -> {samples time direction hidden}, {samples direction hidden}, {samples direction hidden}",
)
def recurrent(ctx: Context) -> Result:
    """RNN, GRU and LSTM layers: samples can be split; time, features and gates stay whole."""
    x, w, r = ctx.tensor(0), ctx.tensor(1), ctx.tensor(2)
    rule = ctx.rule
    layout = ctx.int_attribute("layout", 0)
    t_dim, b_dim = (1, 0) if layout else (0, 1)
    if len(x.shape) != 3 or x.batch_dim not in (None, b_dim):
        raise Unsupported("the batch is not where `layout` says")
    directions, hidden = w.shape[0], r.shape[2]
    num_gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[ctx.kind]
    if w.shape[1] != num_gates * hidden:
        raise Unsupported(f"its weights have {w.shape[1]} rows, and {num_gates} gates of {hidden} features need others")
    if any(tensor.shape[-1] != hidden for i, tensor in ctx.present if i in (5, 6)):
        raise Unsupported(
            f"its states do not have {hidden} features, as its outputs have: ONNX has no projected LSTM (proj_size), "
            "and PyTorch's exporter cuts the weights of one"
        )
    time, batch = rule.dim(x, t_dim, fixed=True), rule.dim(x, b_dim)
    k, h, d, gates = (rule.loop(n, fixed=True) for n in (x.shape[2], hidden, directions, w.shape[1]))
    dims_x: Dims = [batch, time, k] if layout else [time, batch, k]
    operands: list[tuple[int, Dims]] = [(0, dims_x), (1, [d, gates, k]), (2, [d, gates, h])]
    state: Dims = [batch, d, h] if layout else [d, batch, h]
    for i, tensor in ctx.present[3:]:
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
    gradient_flops = {0: flops_x, 1: flops_x, 2: flops_r}
    # Backpropagation through time passes the gradient of the state from step to step, whichever operand needs one.
    for i in [i for i in gradient_flops if ctx.needs_gradient[i]][:1]:
        gradient_flops[i] += flops_r
    return Result(
        operands,
        [y, state, state],
        [x.dtype] * 3,
        forward_flops=flops_x + flops_r,
        gradient_flops=gradient_flops,
        saved_inputs=(0, 1, 2),
        saved_outputs=(0,),
    )
