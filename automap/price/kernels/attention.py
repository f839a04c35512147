"""Fused attention: seconds of one kernel from its shape and a device's fitted curve.

    t = floor + blocks / multiprocessors * work + tail * longest + bytes / bandwidth

The forward kernel makes two products, of queries with keys and of weights with values; the backward one makes five,
three over the elements of a key and two over those of a value (FlashAttention-2, arXiv 2307.08691, algorithm 2). A
block is 128 queries of one head against the keys that it reads, in whole blocks of 128 keys. With a causal mask the
mean block reads half of the keys, the longest all; in a window all blocks read about as many as the window has. The
constants are in `automap/data/fitted/attention.json`, fitted by `benchmarks/fit_attention.py` to causal kernels; that
windows cost what their blocks cost is assumed. Grows with every size and falls with every rate. Units: seconds, bytes,
FLOP/s.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from numba import boolean, float64

from automap.jit import borrowing
from automap.price.kernels.array_types import Record, tuple_type
from automap.price.kernels.stage_records import ATTENTION_CURVE

BLOCK = 128.0
"""Queries of a block."""
REFERENCE_HEAD = 128.0
"""Head size at which the achieved rate is stated."""
BACKWARD_TRAFFIC = 2.5
"""Bytes of the backward kernel over those of the forward one: it reads q, k, v, o and the gradient of o, and writes
three gradients (FlashAttention-2, arXiv 2307.08691)."""


class Visible(NamedTuple):
    """How much of the keys the kernel reads; it leaves out blocks that the mask hides from all their queries."""

    share: float
    """Keys that a query sees on average, as a share of all, those at the edges of what it sees counted half; 0..1."""
    edges: float
    """Edges of what a query sees, on average: 0 where it sees all keys, 1 with a causal mask, about 2 in a window. The
    kernel reads half a block more at each."""
    widest: float
    """The largest share of the keys that a query sees, `share`..1."""


ALL_KEYS = Visible(1.0, 0.0, 1.0)
EARLIER_KEYS = Visible(0.5, 1.0, 1.0)
"""A causal mask."""


class AttentionShape(NamedTuple):
    """Sizes of one fused attention on one device."""

    samples: float
    """Number of samples."""
    heads: float
    """Heads of the queries."""
    kv_heads: float
    """Heads of keys and values."""
    queries: float
    """Positions of the queries on this device."""
    keys: float
    """Positions of the keys."""
    head_size: float
    """Elements of one head of queries and keys."""
    value_size: float
    """Elements of one head of values and results."""
    visible: Visible
    """Which of the keys the kernel reads."""
    element_bytes: float
    """Bytes of one element."""


@borrowing(float64(float64, ATTENTION_CURVE), inner=True)
def head_depth(head_size: float, curve: Record) -> float:
    """Elements that a head costs: a small head costs more an element than the one at which the rate is stated."""
    return float((head_size + curve.small_head) * REFERENCE_HEAD / (REFERENCE_HEAD + curve.small_head))


@borrowing(float64(float64, float64, ATTENTION_CURVE, boolean), inner=True)
def product_depth(head_size: float, value_size: float, curve: Record, backward: bool) -> float:
    """Elements that a pair of a query and a key costs in all products of a kernel; in the backward one as a number of
    two products, since the curve says how much longer five of them take."""
    keys, values = head_depth(head_size, curve), head_depth(value_size, curve)
    return float((3.0 * keys + 2.0 * values) / 2.5 if backward else keys + values)


@borrowing(float64(tuple_type(AttentionShape), ATTENTION_CURVE, boolean))
def attention_s(shape: AttentionShape, curve: Record, backward: bool) -> float:
    """Time of softmax(q k^T) v in one kernel, scores never leaving the multiprocessor.

    Args:
        backward: whether it is the backward kernel.

    Returns:
        Seconds; 0 where there is nothing to do.
    """
    samples, heads, kv_heads, queries, keys, head_size, value_size, visible, element_bytes = shape
    if samples <= 0.0 or heads <= 0.0 or queries <= 0.0 or keys <= 0.0 or head_size <= 0.0:
        return 0.0
    blocks = samples * heads * math.ceil(queries / BLOCK)
    padded = math.ceil(keys / BLOCK) * BLOCK
    depth = product_depth(head_size, value_size, curve, backward)
    whole = 2.0 * BLOCK * padded * depth
    longest = min(whole, visible.widest * whole + 2.0 * BLOCK * BLOCK * depth)
    mean = min(longest, visible.share * whole + visible.edges * BLOCK * BLOCK * depth)
    rate = curve.flops_per_s / curve.multiprocessors
    arithmetic = (blocks / curve.multiprocessors * mean + curve.tail * longest) / rate
    moved = samples * (head_size + value_size) * (queries * heads + keys * kv_heads) * element_bytes
    if backward:
        arithmetic *= curve.backward
        moved *= BACKWARD_TRAFFIC
    return float(curve.floor_s + arithmetic + moved / curve.bytes_per_s)
