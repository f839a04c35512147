"""Which gradients of parameters are sums over a mesh axis and are reduced once a step."""

from __future__ import annotations

import numpy as np
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

    The last axis reduces and scatters all of them, the ones before it what is left. A view, or an operator on
    parameters alone, hands a partial gradient on from its consumer: it is added up over the micro-batches and reduced
    once.
    """
    reader, place = op, slot
    settled = np.zeros(axes.shape[0], np.bool_)
    partial = np.zeros(axes.shape[0], np.bool_)
    unknown = np.zeros(axes.shape[0], np.bool_)
    found = 0
    while found >= 0:
        free = operators[reader, OP_FREE] == 1
        for a in range(axes.shape[0]):
            if free or settled[a]:
                continue
            if axes[a] <= 1.0 or chosen[reader - first, a] < 0:
                settled[a] = True
                unknown[a] = axes[a] > 1.0
                continue
            at = signatures[operators[reader, OP_SIGNATURES] + chosen[reader - first, a], S_PLACES] + place
            if places[at, 0] == BROADCAST and places[at, 1] == PARTIAL:
                partial[a] = True
                settled[a] = True
            elif places[at, 0] != BROADCAST:
                settled[a] = True
        if not free and operators[reader, OP_PARAMETRIC] == 0:
            break
        made = operands[operators[reader, OP_OPERANDS] + operators[reader, OP_INPUTS], D_TENSOR]
        found = -1
        for other in range(reader + 1, last):
            for s in range(operators[other, OP_INPUTS]):
                if found < 0 and operands[operators[other, OP_OPERANDS] + s, D_TENSOR] == made:
                    found = other
                    place = s
        reader = max(found, 0)
    for a in range(axes.shape[0] - 1, -1, -1):
        if partial[a]:
            out[C_REDUCE + a] += elements
        # An undecided axis may scatter them, but need not reduce any.
        if partial[a] or unknown[a]:
            elements /= axes[a]
