"""Scans over a sequence: each token updates a state of fixed size, and its result is read from that state.

Linear attention in its gated and delta forms (Gated DeltaNet, Yang et al., arXiv 2412.06464; the kind of ONNX version
27), and Mamba's selective scan (Gu and Dao, arXiv 2312.00752). The sequence stays whole; heads and channels can be
split.

FLOPs of linear attention are those of the chunked algorithm that kernels use: products within chunks of `chunk_size`
tokens, and products of each chunk with the state. Let d and e be the sizes of a key and of a value, and C the number of
tokens of a chunk. Per token and query head, scores and values within the chunk take 2 C d + 2 C e, and reading the
state takes 2 d e; per token and key head, updating the state takes 2 d e. The delta rule also subtracts from each value
the prediction of the state, which takes, per token and key head, 2 C d for products of keys, 2/3 C^2 for the inverse of
a triangular matrix of C rows, 2 C e + 2 C d for its products with values and keys, and 2 d e for keys times the state.
"""

from __future__ import annotations

from ir.operators.base import Context, Dims, Result, Unsupported, kind

RULES = {"linear": (), "gated": (4,), "delta": (5,), "gated_delta": (4, 5)}
"""Update rule -> positions of its operands besides queries, keys and values (4: decay, 5: rate)."""
CHUNK = 64
"""Tokens per chunk if attribute `chunk_size` is absent: the default of the ONNX standard."""


@kind(
    "LinearAttention",
    "automap.LinearAttention",
    rule="samples length! (h g d!), samples length (h d), samples length (h e!), [samples h d e],"
    " [samples length {(h d) h}], [samples length {h 1}] -> samples length (h g e), samples h d e",
)
def linear_attention(ctx: Context) -> Result:
    """Linear attention of queries, keys and values, with optional state, decay and update rate.

    Heads are merged into the last dim. Splitting the heads means splitting those of keys and values (factor h), with
    their states.
    """
    q, k, v = ctx.tensor(0), ctx.tensor(1), ctx.tensor(2)
    heads, kv_heads = ctx.int_attribute("q_num_heads", 0), ctx.int_attribute("kv_num_heads", 0)
    update = ctx.attributes.get("update_rule", "gated_delta")
    if any(len(x.shape) != 3 for x in (q, k, v)) or min(heads, kv_heads) < 1 or heads % kv_heads:
        raise Unsupported(f"{heads} heads of queries {q.shape} for {kv_heads} heads of keys {k.shape}")
    if ctx.has(3):
        raise Unsupported("a state of earlier tokens is not for training")
    if update not in RULES or not all(map(ctx.has, RULES[update])):
        raise Unsupported(f"update rule {update!r} without its decay or rate")
    size, size_v = k.shape[2] // kv_heads, v.shape[2] // kv_heads
    length, delta = q.shape[1], 5 in RULES[update]
    rule = ctx.rule
    b, s = rule.dim(q, 0), rule.dim(q, 1, name="length", fixed=True)
    h, g = rule.loop(kv_heads, name="h"), rule.loop(heads // kv_heads, name="g")
    d, e = rule.loop(size, name="d", fixed=True), rule.loop(size_v, name="e", fixed=True)
    operands: list[tuple[int, Dims]] = [(0, [b, s, (*h, *g, *d)]), (1, [b, s, (*h, *d)]), (2, [b, s, (*h, *e)])]
    for index in RULES[update]:
        last = ctx.tensor(index).shape[2]
        operands.append((index, [b, s, {kv_heads: h, 1: ()}.get(last, (*h, *d))]))
    tokens, chunk = float(q.shape[0] * length), min(ctx.int_attribute("chunk_size", CHUNK), length)
    scores, read = 2.0 * tokens * heads * chunk * size, 2.0 * tokens * heads * size * size_v
    values, update_flops = 2.0 * tokens * heads * chunk * size_v, 2.0 * tokens * kv_heads * size * size_v
    correction = 2.0 * tokens * kv_heads * (2.0 * chunk * size + chunk * size_v + chunk**2 / 3.0 + size * size_v)
    flops = scores + read + values + update_flops + (correction if delta else 0.0)
    # Every product has two gradients; those of scores within a chunk are counted with the values.
    gradient_flops = {0: scores + read, 2: 2.0 * values + update_flops}
    return Result(
        operands,
        [[b, s, (*h, *g, *e)], [b, h, d, e]],
        [q.dtype, q.dtype],
        forward_flops=flops,
        gradient_flops={**gradient_flops, 1: 2.0 * flops - sum(gradient_flops.values())},
        saved_inputs=tuple(index for index, _ in operands),
    )


SELECTIVE_SCAN_FLOPS = 7.0
"""FLOPs per token and element of the state: two for the decay, one for the value that is written, two for the update,
two for the product that reads the state."""


@kind(
    "automap.SelectiveScan",
    rule="samples channel length!, samples channel length, channel state!, samples state length, samples state length"
    " -> samples channel length",
)
def selective_scan(ctx: Context) -> Result:
    """Values and steps `[b, channels, length]`, A `[channels, states]`, B and C `[b, states, length]`.

    For each token, the state of a channel becomes `exp(step * A) * state + step * value * B`, and the result is its
    inner product with C. If the channels are split, every rank reads B and C whole, and their gradients are summed over
    the ranks.
    """
    x, rates = ctx.tensor(0), ctx.tensor(2)
    if len(x.shape) != 3 or len(rates.shape) != 2 or rates.shape[0] != x.shape[1]:
        raise Unsupported(f"values {x.shape} for states {rates.shape}")
    flops = SELECTIVE_SCAN_FLOPS * x.num_elements * rates.shape[1]
    # The backward pass recomputes the scan and runs it in reverse, for the gradients of all operands together.
    return Result(*ctx.factors(), forward_flops=flops, gradient_flops={0: 2.0 * flops}, saved_inputs=(0, 1, 2, 3, 4))
