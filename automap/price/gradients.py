"""Which gradients of parameters are sums over a mesh axis and are reduced once a step."""

from __future__ import annotations

from numba import float64, int64, njit, void

from automap.price.tables import D_TENSOR, OP_FREE, OP_INPUTS, OP_OPERANDS, OP_PARAMETRIC, OP_SIGNATURES, S_PLACES
from automap.price.vectors import C_REDUCE
from ir.factors import BROADCAST, PARTIAL


@njit(
    void(
        int64[:, ::1],
        int64[:, ::1],
        int64[:, ::1],
        int64[:, ::1],
        int64[:, ::1],
        int64,
        int64,
        int64[:, ::1],
        int64,
        int64,
        float64[::1],
        float64,
        float64[::1],
    ),
    cache=True,
)
def reduce_axes(operators, operands, tensors, signatures, places, op, slot, chosen, first, last, axes, elements, out):
    """Adds a parameter's local gradient elements to every axis on which the gradient is partial.

    A view, or an operator on parameters alone, hands a partial gradient on from its consumer: it is added up over the
    micro-batches and reduced once. Each rank of an inner axis is left with its part, which the outer axes reduce.
    """
    reader, place = op, slot
    # Bit a stands for axis a.
    settled = 0
    partial = 0
    unknown = 0
    while True:
        free = operators[reader, OP_FREE] == 1
        for a in range(axes.shape[0]):
            if free or settled >> a & 1:
                continue
            if axes[a] <= 1.0 or chosen[reader - first, a] < 0:
                settled |= 1 << a
                if axes[a] > 1.0 and reader != op:
                    unknown |= 1 << a
                continue
            at = signatures[operators[reader, OP_SIGNATURES] + chosen[reader - first, a], S_PLACES] + place
            if places[at, 0] == BROADCAST and places[at, 1] == PARTIAL:
                partial |= 1 << a
                settled |= 1 << a
            elif places[at, 0] != BROADCAST:
                settled |= 1 << a
        if not free and operators[reader, OP_PARAMETRIC] == 0:
            break
        made = operands[operators[reader, OP_OPERANDS] + operators[reader, OP_INPUTS], D_TENSOR]
        found = -1
        for other in range(reader + 1, last):
            for s in range(operators[other, OP_INPUTS]):
                if found < 0 and operands[operators[other, OP_OPERANDS] + s, D_TENSOR] == made:
                    found = other
                    place = s
        if found < 0:
            break
        reader = found
    for a in range(axes.shape[0] - 1, -1, -1):
        if partial >> a & 1:
            out[C_REDUCE + a] += elements
        # Over an axis that is not decided there may be nothing to reduce and yet less left; where `op` itself is not
        # decided, `elements` says so already.
        if (partial | unknown) >> a & 1:
            elements /= axes[a]
