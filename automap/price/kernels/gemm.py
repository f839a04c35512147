"""Matrix products: seconds of one kernel from its shape and a device's fitted curve.

    t       = floor + (compute^p + memory^p)^(1/p) + quantisation
    compute = rounds * the time of one 128 x 128 tile, k + depth deep, on one multiprocessor
    rounds  = tiles / multiprocessors, partly rounded up to whole waves; below one wave, split-k uses some of the idle
              multiprocessors
    memory  = bytes over the achieved bandwidth, which is higher while the operands fit into the cache

The time grows with every dim and falls with every rate. The constants are in `automap/data/fitted/gemm.json`, fitted by
`benchmarks/fit_gemm.py`. The model of tiles and waves is that of NVIDIA's matrix multiplication guide. Units: seconds,
bytes, FLOP/s.
"""

from __future__ import annotations

import math

from numba import float64

from automap.jit import borrowing
from automap.price.kernels.array_types import Record
from automap.price.kernels.stage_records import GEMM_CURVE

TILE = 128.0
"""Rows and columns of the tile in which rounds are counted (assumed, a usual one of NVIDIA's matrix multiplication
guide; the constants of the curve were fitted with it)."""
CACHE_SHARE = 0.2
"""Share of the last-level cache that the operands of one product keep (assumed; `cache_speedup` was fitted with it)."""
GRAIN = 64.0
"""Rows and columns are padded to multiples of this by the kernels of published GPUs."""


@borrowing(float64(float64, float64, float64, float64, float64, GEMM_CURVE), inner=True)
def arithmetic_s(m: float, n: float, k: float, batch: float, split: float, curve: Record) -> float:
    """Seconds of the arithmetic of `batch` products [m, k] x [k, n], with `split` in place of `GemmCurveRow.split`."""
    grain = curve.grain
    tiles = batch * math.ceil(m / grain) * math.ceil(n / grain) * (grain * grain / (TILE * TILE))
    waves = tiles / curve.multiprocessors
    rounds = (1.0 - curve.tail) * waves + curve.tail * math.ceil(waves)
    if waves < 1.0:
        rounds = waves ** (1.0 - split)
    return float(rounds * 2.0 * TILE * TILE * (k + curve.depth) * curve.multiprocessors / curve.flops_per_s)


@borrowing(float64(float64, float64, GEMM_CURVE), inner=True)
def overlapped_s(compute: float, memory: float, curve: Record) -> float:
    """Seconds of a kernel whose arithmetic and memory accesses, given in seconds, overlap."""
    larger = max(compute, memory)
    if larger <= 0.0:
        return 0.0
    p = curve.norm
    return float(larger * (1.0 + (min(compute, memory) / larger) ** p) ** (1.0 / p))


@borrowing(float64(float64, float64, float64, float64, float64, float64, GEMM_CURVE))
def gemm_s(m: float, n: float, k: float, batch: float, input_bytes: float, output_bytes: float, curve: Record) -> float:
    """Time of `batch` products [m, k] x [k, n] in one kernel.

    Args:
        m: rows of the result.
        n: columns of the result.
        k: summed elements.
        batch: independent products.
        input_bytes: bytes of one element of the operands.
        output_bytes: bytes of one element of the result.
        curve: fitted curve of the device.

    Returns:
        Seconds; 0 where there is nothing to do.
    """
    if m <= 0.0 or n <= 0.0 or k <= 0.0 or batch <= 0.0:
        return 0.0
    compute = arithmetic_s(m, n, k, batch, curve.split, curve)
    moved = batch * (input_bytes * (m * k + k * n) + output_bytes * m * n)
    cached = min(moved, curve.cache_bytes)
    memory = (cached / curve.cache_speedup + moved - cached) / curve.bytes_per_s
    return float(curve.floor_s + overlapped_s(compute, memory, curve) + curve.quantise_s * batch * m * k * input_bytes)
