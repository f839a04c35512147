"""Fused attention: seconds of one kernel from its shape and a device's fitted curve.

    t = floor + blocks / multiprocessors * work + tail * longest + bytes / bandwidth

A block is 128 queries of one head against all keys that it may see; with a causal mask the mean block sees half of
them, the longest all. The constants are in `automap/data/fitted/attention.json`, fitted by
`benchmarks/fit_attention.py`. Grows with every size and falls with every rate. Units: seconds, bytes, FLOP/s.
"""

from __future__ import annotations

import math

import numpy as np
from numba import boolean, float64

from automap.jit import borrowing

# Columns of a curve.
A_FLOOR_S, A_FLOPS, A_BYTES_PER_S, A_TAIL, A_HEAD, A_MULTIPROCESSORS, A_BACKWARD = range(7)
A_COUNT = 7
BLOCK = 128.0
"""Queries of a block."""
REFERENCE_HEAD = 128.0
"""Head size at which the achieved rate is stated."""
BACKWARD_TRAFFIC = 2.5
"""Bytes of the backward kernel over those of the forward one: it reads q, k, v, o and the gradient of o, and writes
three gradients (FlashAttention-2, arXiv 2307.08691)."""


@borrowing(float64(float64, float64, float64, float64, float64, float64, boolean, float64, float64[::1], boolean))
def attention_s(
    batch: float,
    heads: float,
    kv_heads: float,
    queries: float,
    keys: float,
    head_size: float,
    causal: bool,
    element_bytes: float,
    curve: np.ndarray,
    backward: bool,
) -> float:
    """Time of softmax(q k^T) v in one kernel, scores never leaving the multiprocessor.

    Args:
        batch: samples.
        heads: of the queries.
        kv_heads: of keys and values.
        queries: positions of the queries on this device.
        keys: positions of the keys.
        head_size: elements of one head.
        causal: whether half of the keys are hidden on average.
        element_bytes: of one element.
        curve: [A_COUNT] floor in seconds; achieved FLOP/s at a head size of 128 and bytes/s; share of the longest
            block that is not hidden; elements that a small head wastes; multiprocessors; arithmetic of the backward
            pass over that of the forward pass, at their rates.
        backward: the backward kernel.

    Returns:
        Seconds; 0 where there is nothing to do.
    """
    if batch <= 0.0 or heads <= 0.0 or queries <= 0.0 or keys <= 0.0 or head_size <= 0.0:
        return 0.0
    blocks = batch * heads * math.ceil(queries / BLOCK)
    padded = math.ceil(keys / BLOCK) * BLOCK
    # A small head costs more an element: the rate is stated at a head of 128.
    depth = (head_size + curve[A_HEAD]) * REFERENCE_HEAD / (REFERENCE_HEAD + curve[A_HEAD])
    longest = 4.0 * BLOCK * padded * depth
    mean = 0.5 * longest + 2.0 * BLOCK * BLOCK * depth if causal else longest
    rate = curve[A_FLOPS] / curve[A_MULTIPROCESSORS]
    arithmetic = (blocks / curve[A_MULTIPROCESSORS] * mean + curve[A_TAIL] * longest) / rate
    moved = 2.0 * batch * head_size * (queries * heads + keys * kv_heads) * element_bytes
    if backward:
        arithmetic *= curve[A_BACKWARD]
        moved *= BACKWARD_TRAFFIC
    return float(curve[A_FLOOR_S] + arithmetic + moved / curve[A_BYTES_PER_S])
