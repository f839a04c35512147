"""Slots of the vectors that the kernels hand on: costs of a unit, hardware; and numba's type of the tables.

Units: seconds, bytes, samples, elements.
"""

from __future__ import annotations

from numba import float64, int64, types

from automap.price.kernels.attention import A_COUNT
from automap.price.kernels.collectives import KIND_COUNT
from automap.price.kernels.gemm import G_COUNT
from automap.price.tables import Arrays

# Slots of the result of unit_cost.
C_FORWARD, C_BACKWARD, C_RECOMPUTE, C_PARAMETERS, C_ZERO, C_SAVED, C_LIVE, C_WORKSPACE, C_BOUNDARY = range(9)
C_FORWARD_COMM = 9
C_BACKWARD_COMM = C_FORWARD_COMM + KIND_COUNT
C_RECOMPUTE_COMM = C_BACKWARD_COMM + KIND_COUNT
C_REDUCE = C_RECOMPUTE_COMM + KIND_COUNT
MAX_AXES = 4
C_FORWARD_HOST = C_REDUCE + MAX_AXES
C_BACKWARD_HOST = C_FORWARD_HOST + 1
C_INPUT, C_WEIGHT, C_INPUT_HOST, C_WEIGHT_HOST = range(C_BACKWARD_HOST + 1, C_BACKWARD_HOST + 5)
C_LAUNCHED, C_WEIGHING, C_FORWARD_WAITS, C_BACKWARD_WAITS = range(C_WEIGHT_HOST + 1, C_WEIGHT_HOST + 5)
C_FORWARD_RING, C_BACKWARD_RING, C_RECOMPUTE_RING, C_FORWARD_ATTENDED, C_BACKWARD_ATTENDED = range(
    C_BACKWARD_WAITS + 1, C_BACKWARD_WAITS + 6
)
C_GATHER = C_BACKWARD_ATTENDED + 1
C_TENSORS = C_GATHER + MAX_AXES
C_SCATTER = C_TENSORS + 1
C_COUNT = C_SCATTER + MAX_AXES
"""C_REDUCE + axis: local elements of parameter gradients that are all-reduced over that axis once a step without ZeRO.
With ZeRO, C_GATHER + axis: those of parameters that are gathered over it; C_SCATTER + axis: those of gradients that are
scattered over it, or, if ZeRO does not shard over it, all-reduced once a step. Where several axes take part, the inner
ones come first, and an outer one carries what a rank is left with behind them; with ZeRO the axes that it shards over
come before all others. C_TENSORS: parameters of the unit. C_FORWARD_HOST, C_BACKWARD_HOST: what
the device waits for its host, recomputation included; C_WEIGHT: the part of C_BACKWARD that makes gradients of weights,
C_INPUT the rest; C_INPUT_HOST, C_WEIGHT_HOST: the waits when these two run apart; C_LAUNCHED: kernels of the forward
pass; C_WEIGHING: those whose backward pass makes gradients of weights; C_FORWARD_WAITS, C_BACKWARD_WAITS: host time of
collectives, in that of a group of two, recomputation included; RING: keys and values on their way round a ring;
ATTENDED: the attention that hides them."""

# Slots of the hardware vector: the curves of products of activations, of products with a weight and of attention, then
# memory bytes/s; passes of memory-bound kernels and of the loss over
# their bytes; seconds of the smallest kernel; bytes of an element; products whose dims are no multiples of 8, over
# others; launches of a softmax that the fused kernel refuses; host seconds a kernel, backward over forward, and a
# collective; the exponent in which host and device overlap; the part of the
# collectives that nothing hides; 1 where each rank sends its part of a tensor that is whole on an axis; 1 where a
# gathered operand is kept as the rank's own part and gathered again; bytes of an operand of a product with a weight and
# the kernels that make them so; passes over the bytes of routed tokens and kernels of one way of theirs; the part of
# all-to-alls that nothing hides; 1 where keys and values go round a ring under attention; rate of experts' products
# over that of others; bytes that are kept of an operand of a product with a weight over those of the activation; rate
# of convolutions over that of large products.
H_GEMM, H_WEIGHTS, H_ATTENTION = 0, G_COUNT, 2 * G_COUNT
(
    H_BANDWIDTH,
    H_ELEMENTWISE,
    H_LOSS,
    H_KERNEL_S,
    H_ELEMENT,
    H_MISALIGNED,
    H_FALLBACK,
    H_HOST_S,
    H_HOST_BACKWARD,
    H_HOST_COLLECTIVE_S,
    H_OVERLAP_EXPONENT,
    H_EXPOSED,
    H_SCATTERED,
    H_REGATHERS,
    H_WEIGHT_ELEMENT,
    H_QUANTISE_KERNELS,
    H_ROUTING,
    H_ROUTING_KERNELS,
    H_EXPOSED_EXCHANGE,
    H_RING,
    H_EXPERT_RATE,
    H_KEPT,
    H_CONVOLUTION,
) = range(2 * G_COUNT + A_COUNT, 2 * G_COUNT + A_COUNT + 23)
H_COUNT = H_CONVOLUTION + 1


TABLES = types.NamedTuple(
    (
        int64[:, ::1],
        float64[:, ::1],
        int64[:, ::1],
        int64[:, ::1],
        float64[:, ::1],
        int64[:, ::1],
        float64[:, ::1],
        int64[:, ::1],
        float64[:, ::1],
        float64[:, ::1],
    ),
    Arrays,
)
"""Numba's type of `Tables.arrays`."""
