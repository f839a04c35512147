"""Seconds of the kernel of one operator from the extents of its loops on one rank.

While a signature is undecided, the extents on a rank are unknown, and the seconds are a lower bound. Units: seconds,
bytes, elements.
"""

from __future__ import annotations

from numba import float64, int64, void

from automap.jit import borrowing
from automap.price.kernels.attention import AttentionShape, Visible, attention_s, product_depth
from automap.price.kernels.gemm import arithmetic_s, gemm_s, overlapped_s
from automap.price.kernels.records import (
    ATTENTION,
    BATCH,
    BATCHED_PRODUCT,
    CONVOLUTION,
    INSIDE,
    KERNEL,
    MEASURED,
    MEMORY,
    NUM_CLASSES,
    PRODUCT,
    ROOFLINE,
    TABLES,
    TENSOR,
    VALUES,
    K,
    M,
    N,
)
from automap.price.kernels.stage_records import HARDWARE, STAGE
from automap.price.kernels.unit_workspace import UNIT_WORKSPACE

GRADIENT_BYTES = 4.0
"""Bytes of an element of a weight's gradient, as the product that makes it writes it (fp32, Megatron-LM)."""
ALIGNED = 8.0
"""Tensor cores take rows of a multiple of this many elements (NVIDIA's matrix multiplication guide)."""
VECTOR, EVEN = 16.0, 4.0
"""Bytes of a vector that a kernel on tensor cores loads if rows are a multiple of it, and of the shorter vector that it
loads if rows are a multiple of that alone (names of cuBLAS's kernels: align8, align2, align1 in bf16)."""
GRANTED_HEADS = 4.0
"""The fused softmax of Megatron-LM needs a number of samples times heads that is a multiple of this."""


@borrowing(void(KERNEL, float64[::1], HARDWARE, float64[::1]))
def product_s(kernel, extents, hardware, times):
    """Seconds of a product: forward, backward, and the part of the backward pass for the gradient of its weight.

    Products with a weight run at their own precision. A batch of them is one product for each expert; each is a kernel
    of its own unless the trainer groups them.

    Args:
        kernel: a `KernelRow` of kind PRODUCT or BATCHED_PRODUCT.
        extents: [NUM_CLASSES] extents of its loops on a rank, by class.
        hardware: of the stage.
        times: [3] the seconds, written.
    """
    element = hardware.element_bytes
    batch, m, n, k = extents[BATCH], extents[M], extents[N], extents[K]
    slow = 1.0
    again = 0.0
    if kernel.kind == BATCHED_PRODUCT:
        curve = hardware.products
        width = element
        written = element
        # The product of a matrix and a vector uses no tensor cores, whatever its dims.
        if min(m, n, k) > 1.0 and (m % ALIGNED != 0.0 or n % ALIGNED != 0.0 or k % ALIGNED != 0.0):
            curve = hardware.misaligned
    else:
        curve = hardware.weights
        width = hardware.weight_element_bytes
        written = GRADIENT_BYTES
        again = max(0.0, batch - 1.0) * curve.floor_s * hardware.launches_singly
        if kernel.extents[BATCH] > 1.0:
            slow = 1.0 / hardware.expert_rate
        # Rows are as long as the last dims of the operands and of the result.
        if min(m, n, k) > 1.0:
            if n * width % EVEN != 0.0 or k * width % EVEN != 0.0:
                slow *= hardware.odd_rows
            elif n * width % VECTOR != 0.0 or k * width % VECTOR != 0.0:
                slow *= hardware.short_rows
    slow *= kernel.share
    cast = hardware.weight_cast_bytes * batch * n * k / hardware.bytes_per_s if kernel.kind == PRODUCT else 0.0
    times[0] = slow * (gemm_s(m, n, k, batch, width, element, curve) + again)
    times[1] = 0.0
    times[2] = 0.0
    if kernel.left_gradient == 1:
        times[1] += slow * (gemm_s(m, k, n, batch, width, element, curve) + again)
    if kernel.right_gradient == 1:
        right = slow * (gemm_s(k, n, m, batch, width, written, curve) + again)
        times[1] += right
        if kernel.kind != BATCHED_PRODUCT:
            times[2] = right + cast
        times[1] += cast
    times[0] += cast


@borrowing(void(KERNEL, float64[::1], HARDWARE, float64[::1]), inner=True)
def _attention_s(kernel, extents, hardware, times):
    """Seconds of fused attention from the extents of its scores on a rank; arguments as for `product_s`."""
    heads, element = extents[BATCH], hardware.element_bytes
    kv_heads = kernel.kv_share * heads
    visible = Visible(kernel.visible_share, kernel.visible_edges, kernel.widest_share)
    shape = AttentionShape(1.0, heads, kv_heads, extents[M], extents[N], extents[K], extents[VALUES], visible, element)
    times[0] = attention_s(shape, hardware.attention, False)
    times[1] = attention_s(shape, hardware.attention, True)
    times[2] = 0.0


@borrowing(void(KERNEL, float64[::1], float64, HARDWARE, float64[::1]), inner=True)
def _least_s(kernel, extents, divisor, hardware, times):
    """Lower bound on the seconds of a product or of attention whose work is divided into `divisor` equal parts.

    It is the time of the smallest kernel plus the arithmetic at the highest rate of the curve; `gemm_s` and
    `attention_s` are never below it. `extents` are those of the whole operator, other arguments as for `product_s`.
    """
    times[2] = 0.0
    if kernel.kind == ATTENTION:
        attention = hardware.attention
        # If the split is that of the head size, the bound holds too: smaller heads take more time for each element.
        pairs = 2.0 * kernel.visible_share * extents[BATCH] * extents[M] * extents[N] / divisor / attention.flops_per_s
        times[0] = attention.floor_s + pairs * product_depth(extents[K], extents[VALUES], attention, False)
        pairs *= attention.backward
        times[1] = attention.floor_s + pairs * product_depth(extents[K], extents[VALUES], attention, True)
    else:
        curve = hardware.weights if kernel.kind == PRODUCT else hardware.products
        amount = 2.0 * extents[BATCH] * extents[M] * extents[N] * extents[K] / divisor
        times[0] = kernel.share * (curve.floor_s + amount / curve.flops_per_s)
        times[1] = times[0] * (kernel.left_gradient + kernel.right_gradient)
        if kernel.kind != BATCHED_PRODUCT:
            times[2] = times[0] * kernel.right_gradient


@borrowing(void(KERNEL, float64[::1], float64, float64, HARDWARE, float64[::1]))
def convolution_s(kernel, extents, divisor, moved, hardware, times):
    """Seconds of a convolution: forward, backward, and the part of the backward pass for the gradient of its weight.

    Each pass is priced as a matrix product of equal extents that reads the images once, whatever the window. Kernels
    for groups of few channels, and for channels that are not a multiple of 16 bytes, use no tensor cores.

    Args:
        kernel: a `KernelRow` of kind CONVOLUTION.
        extents: [4] extents of its loops by class, on a rank or, while a signature is undecided, of the whole operator.
        divisor: 0, or, while a signature is undecided, the number of parts into which the work is divided; the seconds
            are then a lower bound.
        moved: bytes of its operands on a rank.
        hardware: of the stage.
        times: [3] the seconds, written.
    """
    groups, rows, filters, channels = extents[BATCH], extents[M], extents[N], extents[K]
    window, curve = kernel.window, hardware.products
    vector = VECTOR / hardware.element_bytes
    is_grouped = kernel.extents[BATCH] > 1.0 and kernel.extents[K] < vector
    is_odd = channels % vector != 0.0 or filters % vector != 0.0
    amount = 2.0 * groups * rows * filters * channels * window / max(1.0, divisor)
    memory = moved * kernel.forward_traffic / hardware.bytes_per_s
    for number in range(3):
        if is_grouped:
            rates = hardware.grouped_last if kernel.images_last == 1 else hardware.grouped_first
            compute = amount / rates[number]
        elif is_odd:
            rates = hardware.odd_last if kernel.images_last == 1 else hardware.odd_first
            compute = amount / rates[number]
        else:
            if divisor > 0.0:
                compute = amount / curve.flops_per_s
            elif number == 0:
                compute = arithmetic_s(rows, filters, channels * window, groups, curve.split, curve)
            elif number == 1:
                compute = arithmetic_s(rows, channels, filters * window, groups, curve.split, curve)
            else:
                # The gradient of a weight is a sum over so many rows that it fills all multiprocessors.
                compute = arithmetic_s(channels * window, filters, rows, groups, 0.0, curve)
            compute /= hardware.convolution_rates[number]
        times[number] = hardware.kernel_s + overlapped_s(compute, memory, curve)
    image, weight = kernel.left_gradient * times[1], kernel.right_gradient * times[2]
    times[1] = image + weight
    times[2] = weight


@borrowing(float64(TENSOR, int64[::1], STAGE), inner=True)
def _refused(tensor, placement, stage):
    """1 where the fused softmax does not support the samples and heads of a tensor on a rank, see `GRANTED_HEADS`;
    else 0."""
    heads = 1.0
    for dim in range(tensor.num_dims - 2):
        heads *= tensor.dims[dim]
        if tensor.batch_dim == dim:
            heads *= stage.samples
        for a in range(stage.axes.shape[0]):
            if placement[a] == dim:
                heads /= stage.axes[a]
    return 0.0 if heads % GRANTED_HEADS == 0.0 else 1.0


@borrowing(void(KERNEL, float64, float64, STAGE, float64[::1]), inner=True)
def _memory_s(kernel, moved, divisor, stage, times):
    """Writes the seconds of a kernel that is bound by memory or by its arithmetic, see `operator_s`."""
    hardware, samples = stage.hardware, stage.samples
    passes = 1.0
    if kernel.kind == MEMORY:
        passes = hardware.elementwise_passes * (hardware.loss_passes if kernel.is_loss == 1 else 1.0)
        passes *= hardware.routing_passes if kernel.is_routed == 1 else 1.0
    forward = moved * kernel.forward_traffic * passes / hardware.bytes_per_s
    backward = moved * kernel.backward_traffic * passes / hardware.bytes_per_s
    if kernel.kind == ROOFLINE:
        rate = hardware.products.flops_per_s * hardware.other_rate * divisor
        forward = max(forward, (kernel.forward_flops + kernel.forward_flops_per_sample * samples) / rate)
        backward = max(backward, (kernel.backward_flops + kernel.backward_flops_per_sample * samples) / rate)
    if forward > 0.0:
        forward += hardware.kernel_s * kernel.forward_kernels
    if backward > 0.0:
        backward += hardware.kernel_s * kernel.backward_kernels
    times[0] = forward
    times[1] = backward


@borrowing(float64(TABLES, int64, int64[::1], STAGE, float64, float64, UNIT_WORKSPACE), inner=True)
def operator_s(tables, op, signatures, stage, divisor, moved, workspace):
    """Seconds of an operator on one rank; a lower bound while a signature is undecided.

    Args:
        op: operator row.
        signatures: [axes] signature of the operator on each axis; -1 where it is undecided.
        stage: mesh, hardware and samples.
        divisor: number of parts into which the work is divided.
        moved: bytes of its operands on a rank.
        workspace: with the placements of its operands and whether it is `undecided`; `times` is written: forward,
            backward, and the part of the backward pass for gradients of weights.

    Returns:
        Kernels that the host launches for its forward pass.
    """
    kernel, hardware = tables.kernels[op], stage.hardware
    kind = kernel.kind
    launched = kernel.forward_kernels
    times, extents, undecided = workspace.times, workspace.extents, workspace.undecided[op]
    times[0] = 0.0
    times[1] = 0.0
    times[2] = 0.0
    if kind == MEASURED:
        times[0] = kernel.measured_forward_s * stage.samples / divisor
        times[1] = kernel.measured_backward_s * stage.samples / divisor
        times[2] = times[1] * kernel.weight_share
    elif kind in (MEMORY, ROOFLINE):
        if kernel.stated_bytes >= 0.0:
            moved = kernel.stated_bytes * stage.samples / divisor
        _memory_s(kernel, moved, divisor, stage, times)
        times[2] = times[1] * kernel.weight_share
        if kind == MEMORY and kernel.is_routed == 1:
            launched += hardware.routing_kernels
        if times[0] == 0.0 and times[1] == 0.0:
            launched = 0.0
        if kernel.heads >= 0 and not undecided:
            row = tables.operators[op].first_operand + kernel.heads
            tensor = tables.tensors[tables.operands[row].tensor]
            launched += hardware.fallback_kernels * _refused(tensor, workspace.placement[row], stage)
    elif kind != INSIDE:
        for c in range(NUM_CLASSES):
            extents[c] = kernel.extents[c]
        if kernel.sampled >= 0:
            extents[kernel.sampled] *= stage.samples
        if undecided and kind == CONVOLUTION:
            convolution_s(kernel, extents, divisor, moved, hardware, times)
        elif undecided:
            _least_s(kernel, extents, divisor, hardware, times)
        else:
            for a in range(stage.axes.shape[0]):
                if stage.axes[a] > 1.0:
                    split = tables.signatures[tables.operators[op].first_signature + signatures[a]].loop_class
                    if split >= 0:
                        extents[split] /= stage.axes[a]
            if kind == CONVOLUTION:
                convolution_s(kernel, extents, 0.0, moved, hardware, times)
            elif kind == ATTENTION:
                _attention_s(kernel, extents, hardware, times)
            else:
                product_s(kernel, extents, hardware, times)
                if kind == PRODUCT and hardware.launches_singly > 0.0:
                    launched *= extents[BATCH]
        if kind == PRODUCT:
            launched *= 1.0 + hardware.quantise_kernels
    if kernel.casts > 0.0:
        samples, rate = stage.samples, divisor * hardware.bytes_per_s
        forward = kernel.forward_cast_bytes + kernel.forward_cast_bytes_per_sample * samples
        backward = kernel.backward_cast_bytes + kernel.backward_cast_bytes_per_sample * samples
        times[0] += forward / rate + kernel.casts * hardware.kernel_s
        times[1] += backward / rate + kernel.casts * hardware.kernel_s
        launched += kernel.casts
    if kernel.is_frozen == 1:
        times[1] = 0.0
        times[2] = 0.0
    return launched
