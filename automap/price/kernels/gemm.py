"""Matrix products: seconds of one kernel from its shape and a device's fitted curve.

    t       = floor + (compute^p + memory^p)^(1/p) + quantisation
    compute = rounds * the time of one 128 x 128 tile, k + depth deep, on one multiprocessor
    rounds  = tiles / multiprocessors, partly rounded up to whole waves; below one wave split-k fills some of the rest
    memory  = bytes over the achieved bandwidth, faster while they fit into the cache

Grows with every dim and falls with every rate. The constants are in `automap/data/fitted/gemm.json`, fitted by
`benchmarks/fit_gemm.py`; the recipe of tiles and waves is that of NVIDIA's matrix multiplication guide. Units: seconds,
bytes, FLOP/s.
"""

from __future__ import annotations

import math

import numpy as np
from numba import float64

from automap.jit import borrowing

# Columns of a curve.
(
    G_FLOOR_S,
    G_FLOPS,
    G_BYTES_PER_S,
    G_NORM,
    G_DEPTH,
    G_SPLIT,
    G_TAIL,
    G_MULTIPROCESSORS,
    G_CACHE_BYTES,
    G_CACHE_SPEEDUP,
    G_QUANTISE_S,
    G_GRAIN,
) = range(12)
G_COUNT = 12
TILE = 128.0
"""Rows and columns of a tile."""
CACHE_SHARE = 0.2
"""Share of the last-level cache that the operands of one product keep."""
GRAIN = 64.0
"""Rows and columns are padded to multiples of this by the kernels of published GPUs."""


@borrowing(float64(float64, float64, float64, float64, float64, float64, float64[::1]))
def gemm_s(
    m: float, n: float, k: float, batch: float, input_bytes: float, output_bytes: float, curve: np.ndarray
) -> float:
    """Time of `batch` products [m, k] x [k, n] in one kernel.

    Args:
        m: rows of the result.
        n: columns of the result.
        k: summed elements.
        batch: independent products.
        input_bytes: of one element of the operands.
        output_bytes: of one element of the result.
        curve: [G_COUNT] floor in seconds; achieved FLOP/s and bytes/s; exponent p; depth in elements; split and tail
            in 0..1; multiprocessors; cache in bytes and its speed over memory; seconds that quantising one byte of the
            left operand adds; rows and columns that the result is padded to multiples of.

    Returns:
        Seconds; 0 where there is nothing to do.
    """
    if m <= 0.0 or n <= 0.0 or k <= 0.0 or batch <= 0.0:
        return 0.0
    grain = curve[G_GRAIN]
    tiles = batch * math.ceil(m / grain) * math.ceil(n / grain) * (grain * grain / (TILE * TILE))
    waves = tiles / curve[G_MULTIPROCESSORS]
    if waves < 1.0:
        rounds = waves ** (1.0 - curve[G_SPLIT])
    else:
        rounds = (1.0 - curve[G_TAIL]) * waves + curve[G_TAIL] * math.ceil(waves)
    compute = rounds * 2.0 * TILE * TILE * (k + curve[G_DEPTH]) * curve[G_MULTIPROCESSORS] / curve[G_FLOPS]
    moved = batch * (input_bytes * (m * k + k * n) + output_bytes * m * n)
    cached = min(moved, curve[G_CACHE_BYTES])
    memory = (cached / curve[G_CACHE_SPEEDUP] + moved - cached) / curve[G_BYTES_PER_S]
    larger = max(compute, memory)
    smaller = min(compute, memory)
    p = curve[G_NORM]
    both = larger * (1.0 + (smaller / larger) ** p) ** (1.0 / p)
    return float(curve[G_FLOOR_S] + both + curve[G_QUANTISE_S] * batch * m * k * input_bytes)
