"""Seconds of one operator's kernel from its local extents: products, attention, and their least.

Units: seconds, bytes, elements.
"""

from __future__ import annotations

from numba import boolean, float64, int64, void

from automap.jit import borrowing
from automap.price.kernel_shapes import (
    ATTENTION,
    BATCH,
    BATCHED_PRODUCT,
    INSIDE,
    MEASURED,
    MEMORY,
    PRODUCT,
    ROOFLINE,
    X_BATCH,
    X_CAUSAL,
    X_HEADS,
    X_KIND,
    X_LEFT_GRADIENT,
    X_LOSS,
    X_RIGHT_GRADIENT,
    X_ROUTED,
    X_SAMPLED,
    X_SHARE,
    X_WEIGHT,
    K,
    M,
    N,
)
from automap.price.kernels.attention import A_BACKWARD, A_COUNT, A_FLOOR_S, A_FLOPS, A_HEAD, REFERENCE_HEAD, attention_s
from automap.price.kernels.columns import (
    H_ATTENTION,
    H_BANDWIDTH,
    H_CONVOLUTION,
    H_ELEMENT,
    H_ELEMENTWISE,
    H_EXPERT_RATE,
    H_FALLBACK,
    H_GEMM,
    H_KERNEL_S,
    H_LOSS,
    H_MISALIGNED,
    H_QUANTISE_KERNELS,
    H_ROUTING,
    H_ROUTING_KERNELS,
    H_WEIGHT_ELEMENT,
    H_WEIGHTS,
    TABLES,
)
from automap.price.kernels.gemm import G_COUNT, G_FLOOR_S, G_FLOPS, gemm_s
from automap.price.tables import (
    B_FIXED,
    B_KERNELS,
    B_MEASURED,
    B_SAMPLE,
    D_TENSOR,
    F_BYTES,
    F_FIXED,
    F_KERNELS,
    F_MEASURED,
    F_SAMPLE,
    OP_OPERANDS,
    OP_SIGNATURES,
    S_CLASS,
    T_BACKWARD,
    T_BATCH_DIM,
    T_DIMS,
    T_FORWARD,
    T_NDIM,
)

GRADIENT_BYTES = 4.0
"""Of one element of a weight's gradient, as the product that makes it writes it."""
ALIGNED = 8.0
"""Tensor cores take rows of a multiple of this many elements."""
GRANTED_HEADS = 4.0
"""The fused softmax takes multiples of this many heads of samples (Megatron-LM)."""


@borrowing(void(float64[::1], float64[::1], float64[::1], float64[::1]))
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


@borrowing(void(float64[::1], float64[::1], float64[::1], float64[::1]))
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


@borrowing(void(float64[::1], float64[::1], float64, float64[::1], float64[::1]), inner=True)
def _least_s(shape, dims, divisor, hardware, times):
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


@borrowing(float64(int64[:, ::1], int64, int64[::1], float64[::1], float64), inner=True)
def _refused(tensors, tensor, lies, axes, samples):
    """1 where the local samples and heads of a tensor are none that the fused softmax takes."""
    heads = 1.0
    for dim in range(tensors[tensor, T_NDIM] - 2):
        heads *= tensors[tensor, T_DIMS + dim]
        if tensors[tensor, T_BATCH_DIM] == dim:
            heads *= samples
        for a in range(axes.shape[0]):
            if lies[a] == dim:
                heads /= axes[a]
    return 0.0 if heads % GRANTED_HEADS == 0.0 else 1.0


@borrowing(void(float64[::1], float64[::1], float64, float64, float64, float64[::1], float64[::1]), inner=True)
def _memory_s(costs, shape, moved, divisor, samples, hardware, times):
    """Seconds of a kernel that is bound by `moved` bytes or, convolutions and what is like them, by its arithmetic."""
    passes = 1.0
    if shape[X_KIND] == MEMORY:
        passes = hardware[H_ELEMENTWISE] * (hardware[H_LOSS] if shape[X_LOSS] > 0.0 else 1.0)
        passes *= hardware[H_ROUTING] if shape[X_ROUTED] > 0.0 else 1.0
    forward = moved * costs[T_FORWARD] * passes / hardware[H_BANDWIDTH]
    backward = moved * costs[T_BACKWARD] * passes / hardware[H_BANDWIDTH]
    if shape[X_KIND] == ROOFLINE:
        rate = hardware[H_GEMM + G_FLOPS] * hardware[H_CONVOLUTION] * divisor
        forward = max(forward, (costs[F_FIXED] + costs[F_SAMPLE] * samples) / rate)
        backward = max(backward, (costs[B_FIXED] + costs[B_SAMPLE] * samples) / rate)
    if forward > 0.0:
        forward += hardware[H_KERNEL_S] * costs[F_KERNELS]
    if backward > 0.0:
        backward += hardware[H_KERNEL_S] * costs[B_KERNELS]
    times[0] = forward
    times[1] = backward


@borrowing(
    float64(
        TABLES,
        int64,
        int64,
        int64[:, ::1],
        int64[:, ::1],
        float64[::1],
        float64,
        boolean,
        float64,
        float64[::1],
        float64,
        float64[::1],
        float64[::1],
    ),
    forceinline=True,
    inner=True,
)
def operator_s(tables, op, first, chosen, lies, axes, divisor, undecided, moved, hardware, samples, dims, times):
    """Forward and backward seconds of an operator on one rank.

    Args:
        tables: see `Tables.arrays`.
        op: operator row.
        first: first operator row of the unit.
        chosen: see `shard_unit`.
        lies: see `Sharded`.
        axes: [axes] ranks of each mesh axis.
        divisor: parts that the work is divided into.
        undecided: whether a signature is, so that the least of all is meant.
        moved: bytes that its operands hold.
        hardware: see the H_ constants.
        samples: of the micro-batch.
        dims: [4] scratch.
        times: [3], written; the last is the part of the backward pass that makes gradients of weights.

    Returns:
        Kernels that the host launches for its forward pass.
    """
    shape = tables.shapes[op]
    costs = tables.costs[op]
    kernel = shape[X_KIND]
    kernels = costs[F_KERNELS]
    times[0] = 0.0
    times[1] = 0.0
    times[2] = 0.0
    if kernel == MEASURED:
        times[0] = costs[F_MEASURED] * samples / divisor
        times[1] = costs[B_MEASURED] * samples / divisor
        times[2] = times[1] * shape[X_WEIGHT]
    elif kernel in (MEMORY, ROOFLINE):
        if costs[F_BYTES] >= 0.0:
            moved = costs[F_BYTES] * samples / divisor
        _memory_s(costs, shape, moved, divisor, samples, hardware, times)
        times[2] = times[1] * shape[X_WEIGHT]
        if kernel == MEMORY and shape[X_ROUTED] > 0.0:
            kernels += hardware[H_ROUTING_KERNELS]
        if times[0] == 0.0 and times[1] == 0.0:
            kernels = 0.0
        if shape[X_HEADS] >= 0.0 and not undecided:
            row = tables.operators[op, OP_OPERANDS] + int64(shape[X_HEADS])
            tensor = tables.operands[row, D_TENSOR]
            kernels += hardware[H_FALLBACK] * _refused(tables.tensors, tensor, lies[row], axes, samples)
    elif kernel != INSIDE:
        for c in range(4):
            dims[c] = shape[X_BATCH + c]
        if shape[X_SAMPLED] >= 0.0:
            dims[int64(shape[X_SAMPLED])] *= samples
        if undecided:
            _least_s(shape, dims, divisor, hardware, times)
        else:
            for a in range(axes.shape[0]):
                if axes[a] > 1.0:
                    row = tables.operators[op, OP_SIGNATURES] + chosen[op - first, a]
                    split = tables.signatures[row, S_CLASS]
                    if split >= 0:
                        dims[split] /= axes[a]
            if kernel == ATTENTION:
                attention_kernel_s(shape, dims, hardware, times)
            else:
                product_s(shape, dims, hardware, times)
                if kernel == PRODUCT:
                    kernels *= dims[BATCH]
        if kernel == PRODUCT:
            kernels *= 1.0 + hardware[H_QUANTISE_KERNELS]
    return kernels
