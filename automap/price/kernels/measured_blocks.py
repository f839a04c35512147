"""Measured blocks: times that the user measured of whole blocks, in place of what their kernels are priced at.

A time holds for one degree of tensor parallelism and one micro-batch, and only where a plan divides the block so: its
products split by samples on the first axis, by something else on the last, and no axis between them. Units: seconds,
samples of a replica.
"""

from __future__ import annotations

from numba import boolean, float64, int64

from automap.jit import borrowing
from automap.price.kernel_shapes import ATTENTION, BATCHED_PRODUCT, MEASURED, PRODUCT, ROOFLINE, X_KIND
from automap.price.kernels.columns import C_BACKWARD, C_FORWARD, C_INPUT, C_RECOMPUTE, C_WEIGHT, TABLES
from automap.price.tables import (
    OP_SIGNATURES,
    S_BATCH,
    S_DIVIDES,
    Z_BACKWARD,
    Z_FIRST,
    Z_FORWARD,
    Z_LAST,
    Z_SAMPLES,
    Z_TP,
)

OTHERWISE, MAYBE, SO = range(3)
WEIGHT_SHARE = 0.5
"""Of a measured backward pass, what makes gradients of weights: products do as much for these as for their inputs."""


@borrowing(int64(TABLES, int64, int64, int64[:, ::1], float64[::1]), inner=True)
def _division(tables, first, last, chosen, axes):
    """Whether the products of a block are split within samples on the innermost axis and by samples on all others."""
    found = SO
    innermost = axes.shape[0] - 1
    for op in range(first, last):
        kind = tables.shapes[op, X_KIND]
        if kind not in (PRODUCT, BATCHED_PRODUCT, ATTENTION, ROOFLINE, MEASURED):
            continue
        for a in range(axes.shape[0]):
            if axes[a] <= 1.0:
                continue
            if chosen[op - first, a] < 0:
                found = min(found, MAYBE)
                continue
            signature = tables.operators[op, OP_SIGNATURES] + chosen[op - first, a]
            by_samples = tables.signatures[signature, S_BATCH] == 1
            divides = tables.signatures[signature, S_DIVIDES] == 1
            if by_samples == (a == innermost) or not divides:
                return OTHERWISE
    return found


@borrowing(boolean(TABLES, int64, int64, int64[:, ::1], boolean, float64[::1], float64, float64[::1]), inner=True)
def measured_block(tables, first, last, chosen, whole, axes, samples, out):
    """Writes the measured seconds of a block over the modelled ones, if some were measured so.

    While signatures are undecided, the lesser of the two is written: a lower bound.

    Args:
        tables: see `Tables.arrays`.
        first, last, chosen, axes, samples: see `unit_cost`.
        whole: whether all of it is recomputed.
        out: of `unit_cost`; the modelled seconds of forward, backward and recomputation stand in it.

    Returns:
        Whether a measured time was found. It holds what the device waits for its host to launch kernels.
    """
    for i in range(tables.blocks.shape[0]):
        row = tables.blocks[i]
        if row[Z_FIRST] != first or row[Z_LAST] != last:
            continue
        innermost = axes.shape[0] - 1
        replicas = 1.0
        for a in range(innermost):
            replicas *= axes[a]
        if row[Z_TP] != axes[innermost] or row[Z_SAMPLES] * replicas != samples:
            continue
        division = _division(tables, first, last, chosen, axes)
        if division == OTHERWISE:
            continue
        share = 0.0
        if whole:
            share = 1.0
        elif division == SO and out[C_FORWARD] > 0.0:
            share = out[C_RECOMPUTE] / out[C_FORWARD]
        forward, backward = row[Z_FORWARD], row[Z_BACKWARD]
        again = share * forward
        weight = WEIGHT_SHARE * backward
        others = backward - weight
        if division == MAYBE:
            forward = min(forward, out[C_FORWARD])
            backward = min(backward, out[C_BACKWARD])
            again = min(again, out[C_RECOMPUTE])
            weight = min(weight, out[C_WEIGHT])
            others = min(others, out[C_INPUT])
        out[C_FORWARD] = forward
        out[C_BACKWARD] = backward
        out[C_INPUT] = others
        out[C_WEIGHT] = weight
        out[C_RECOMPUTE] = again
        return True
    return False
