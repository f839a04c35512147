"""Seconds of one operator's kernel from its local extents: products, attention, and their least.

Units: seconds, bytes, elements.
"""

from __future__ import annotations

from numba import float64, int64, njit, void

from automap.price.attention import A_BACKWARD, A_COUNT, A_FLOOR_S, A_FLOPS, A_HEAD, REFERENCE_HEAD, attention_s
from automap.price.gemm import G_COUNT, G_FLOOR_S, G_FLOPS, gemm_s
from automap.price.placements import placement_of
from automap.price.shapes import (
    ATTENTION,
    BATCH,
    BATCHED_PRODUCT,
    PRODUCT,
    X_BATCH,
    X_CAUSAL,
    X_KIND,
    X_LEFT_GRADIENT,
    X_RIGHT_GRADIENT,
    X_SHARE,
    K,
    M,
    N,
)
from automap.price.tables import D_TENSOR, OP_OPERANDS, T_BATCH_DIM, T_DIMS, T_NDIM
from automap.price.vectors import (
    H_ATTENTION,
    H_ELEMENT,
    H_EXPERT_RATE,
    H_GEMM,
    H_MISALIGNED,
    H_WEIGHT_ELEMENT,
    H_WEIGHTS,
)

GRADIENT_BYTES = 4.0
"""Of one element of a weight's gradient, as the product that makes it writes it."""
ALIGNED = 8.0
"""Tensor cores take rows of a multiple of this many elements."""
GRANTED_HEADS = 4.0
"""The fused softmax takes multiples of this many heads of samples (Megatron-LM)."""


@njit(void(float64[::1], float64[::1], float64[::1], float64[::1]), cache=True)
def product_s(shape, dims, hardware, times):
    """Forward and backward seconds of a product of local extents `dims`, and those of the latter for its weight.

    Products with a weight run at their own precision; a batch of them is one of experts, each launched by itself.
    """
    element = hardware[H_ELEMENT]
    batch, m, n, k = dims[BATCH], dims[M], dims[N], dims[K]
    slow = 1.0
    again = 0.0
    if shape[X_KIND] == BATCHED_PRODUCT:
        curve = hardware[H_GEMM : H_GEMM + G_COUNT]
        width = element
        written = element
        if m % ALIGNED != 0.0 or n % ALIGNED != 0.0 or k % ALIGNED != 0.0:
            slow = hardware[H_MISALIGNED]
    else:
        curve = hardware[H_WEIGHTS : H_WEIGHTS + G_COUNT]
        width = hardware[H_WEIGHT_ELEMENT]
        written = GRADIENT_BYTES
        again = max(0.0, batch - 1.0) * curve[G_FLOOR_S]
        if shape[X_BATCH] > 1.0:
            slow = 1.0 / hardware[H_EXPERT_RATE]
    slow *= shape[X_SHARE]
    times[0] = slow * (gemm_s(m, n, k, batch, width, element, curve) + again)
    times[1] = 0.0
    times[2] = 0.0
    if shape[X_LEFT_GRADIENT] > 0.0:
        times[1] += slow * (gemm_s(m, k, n, batch, width, element, curve) + again)
    if shape[X_RIGHT_GRADIENT] > 0.0:
        right = slow * (gemm_s(k, n, m, batch, width, written, curve) + again)
        times[1] += right
        if shape[X_KIND] != BATCHED_PRODUCT:
            times[2] = right


@njit(void(float64[::1], float64[::1], float64[::1], float64[::1]), cache=True)
def attention_kernel_s(shape, dims, hardware, times):
    """Forward and backward seconds of fused attention whose scores have local extents `dims`; no weight is in it."""
    curve = hardware[H_ATTENTION : H_ATTENTION + A_COUNT]
    heads = dims[BATCH]
    times[2] = 0.0
    causal = shape[X_CAUSAL] > 0.0
    for way in range(2):
        times[way] = attention_s(
            1.0, heads, heads, dims[M], dims[N], dims[K], causal, hardware[H_ELEMENT], curve, way == 1
        )


@njit(void(float64[::1], float64[::1], float64, float64[::1], float64[::1]), cache=True)
def least_s(shape, dims, divisor, hardware, times):
    """Least seconds, as of `product_s`, of a product or of attention of which each rank does one part in `divisor`.

    The arithmetic at the rate of the curve and the smallest kernel: what `gemm_s` and `attention_s` come to at best.
    """
    times[2] = 0.0
    if shape[X_KIND] == ATTENTION:
        curve = hardware[H_ATTENTION : H_ATTENTION + A_COUNT]
        head = dims[K]
        # A split of the head size gains nothing by this, for small heads cost more an element.
        depth = (head + curve[A_HEAD]) * REFERENCE_HEAD / (REFERENCE_HEAD + curve[A_HEAD])
        amount = 4.0 * dims[BATCH] * dims[M] * dims[N] * depth / divisor
        times[0] = (0.5 if shape[X_CAUSAL] > 0.0 else 1.0) * amount / curve[A_FLOPS]
        times[1] = curve[A_FLOOR_S] + curve[A_BACKWARD] * times[0]
        times[0] += curve[A_FLOOR_S]
    else:
        start = H_WEIGHTS if shape[X_KIND] == PRODUCT else H_GEMM
        curve = hardware[start : start + G_COUNT]
        amount = 2.0 * dims[BATCH] * dims[M] * dims[N] * dims[K] / divisor
        times[0] = shape[X_SHARE] * (curve[G_FLOOR_S] + amount / curve[G_FLOPS])
        times[1] = times[0] * (shape[X_LEFT_GRADIENT] + shape[X_RIGHT_GRADIENT])
        if shape[X_KIND] != BATCHED_PRODUCT:
            times[2] = times[0] * shape[X_RIGHT_GRADIENT]


@njit(
    float64(
        int64[:, ::1],
        int64[:, ::1],
        int64[:, ::1],
        int64[:, ::1],
        int64[:, ::1],
        int64,
        int64,
        int64[::1],
        float64[::1],
        float64,
    ),
    cache=True,
)
def refused(tensors, operators, signatures, places, operands, op, slot, chosen, axes, samples):
    """1 where the local samples and heads of operand `slot` are none that the fused softmax takes."""
    tensor = operands[operators[op, OP_OPERANDS] + slot, D_TENSOR]
    heads = 1.0
    for dim in range(tensors[tensor, T_NDIM] - 2):
        heads *= tensors[tensor, T_DIMS + dim]
        if tensors[tensor, T_BATCH_DIM] == dim:
            heads *= samples
        for a in range(axes.shape[0]):
            if placement_of(operators, signatures, places, op, slot, chosen[a]) == dim:
                heads /= axes[a]
    return 0.0 if heads % GRANTED_HEADS == 0.0 else 1.0
