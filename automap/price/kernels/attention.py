"""Fused attention: seconds of one kernel from its shape and a device's fitted curve.

    t       = floor + blocks / multiprocessors * mean + tail * longest + bytes / bandwidth
    mean    = seconds of a block of mean length on one multiprocessor
    longest = seconds of the longest block on one multiprocessor

A block is 128 queries of one head, together with the keys that they read, in whole blocks of 128 keys. With a causal
mask the mean block reads half of the keys, and the longest one reads all. With a window each block reads about as many
keys as the window has. The forward kernel computes two products: of queries with keys, and of weights with values. The
backward kernel computes five: three over the elements of a key and two over those of a value (FlashAttention-2, arXiv
2307.08691, algorithm 2). The constants are in `automap/data/fitted/attention.json`, fitted by
`benchmarks/fit_attention.py` to causal kernels. It is assumed that the same constants hold with a window. The time
grows with every size and falls with every rate. Units: seconds, bytes, FLOP/s.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from numba import boolean, float64

from automap.jit import borrowing
from automap.price.kernels.array_types import Record, tuple_type
from automap.price.kernels.stage_records import ATTENTION_CURVE

BLOCK = 128.0
"""Queries of a block, and keys of a block of keys (FlashAttention-2, arXiv 2307.08691: typically 64 or 128)."""
REFERENCE_HEAD = 128.0
"""Head size at which the achieved rate is stated (chosen, the usual one; for others the curve has `small_head`)."""
BACKWARD_TRAFFIC = 2.5
"""Bytes of the backward kernel over those of the forward one: it reads q, k, v, o and the gradient of o, and writes
three gradients (FlashAttention-2, arXiv 2307.08691)."""


class Visible(NamedTuple):
    """How much of the keys the kernel reads; it leaves out blocks that the mask hides from all their queries."""

    share: float
    """Keys that a query sees on average, as a share of all keys, 0 to 1. The key at an edge of what it sees counts
    half."""
    edges: float
    """Edges of what a query sees, on average: 0 where it sees all keys, 1 with a causal mask, about 2 in a window. The
    kernel reads half a block more at each."""
    widest: float
    """The largest share of the keys that a query sees, `share`..1."""


ALL_KEYS = Visible(1.0, 0.0, 1.0)
"""Attention without a mask."""
EARLIER_KEYS = Visible(0.5, 1.0, 1.0)
"""A causal mask: on average half of the keys, and all of them for the last query."""


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
    """Head size that would take as long at the stated rate: kernels reach a lower rate with a head below
    `REFERENCE_HEAD`."""
    return float((head_size + curve.small_head) * REFERENCE_HEAD / (REFERENCE_HEAD + curve.small_head))


@borrowing(float64(float64, float64, ATTENTION_CURVE, boolean), inner=True)
def product_depth(head_size: float, value_size: float, curve: Record, backward: bool) -> float:
    """Multiply-adds of one pair of a query and a key in two products of a kernel, with head sizes by `head_depth`.

    The backward kernel computes five products. The value is two fifths of their sum, since `AttentionCurveRow.backward`
    holds the factor from the forward to the backward kernel.
    """
    keys, values = head_depth(head_size, curve), head_depth(value_size, curve)
    return float((3.0 * keys + 2.0 * values) / 2.5 if backward else keys + values)


@borrowing(float64(tuple_type(AttentionShape), ATTENTION_CURVE, boolean))
def attention_s(shape: AttentionShape, curve: Record, backward: bool) -> float:
    """Time of softmax(q k^T) v in one kernel that never writes the scores to memory.

    Args:
        shape: sizes of the attention on one device.
        curve: fitted curve of the device.
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
