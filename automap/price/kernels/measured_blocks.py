"""Measured blocks: times of whole blocks that the user measured, in place of the predicted ones.

A time holds for one degree of tensor parallelism and one size of micro-batch. It is used only where a plan divides the
block in the same way: products are split within samples on the last mesh axis, and by samples on all axes before it.
Units: seconds, samples of a replica.
"""

from __future__ import annotations

from numba import boolean, int64

from automap.jit import borrowing
from automap.price.kernels.cost_records import UNIT_COST
from automap.price.kernels.records import ATTENTION, BATCHED_PRODUCT, CONVOLUTION, MEASURED, PRODUCT, ROOFLINE, TABLES
from automap.price.kernels.stage_records import STAGE, UNIT

OTHERWISE, MAYBE, SO = range(3)
"""Whether a block is divided as the measured one was: no, not decided yet, yes."""
WEIGHT_SHARE = 0.5
"""Share of a measured backward pass that makes gradients of weights. Assumed, since a matrix product has as many FLOPs
for these as for the gradients of its inputs."""


@borrowing(int64(TABLES, UNIT, STAGE), inner=True)
def _division(tables, unit, stage):
    """Whether the products of a block are split within samples on the innermost axis and by samples on all others:
    OTHERWISE, MAYBE or SO."""
    found = SO
    innermost = stage.axes.shape[0] - 1
    for op in range(unit.first, unit.last):
        if tables.kernels[op].kind not in (PRODUCT, BATCHED_PRODUCT, ATTENTION, CONVOLUTION, ROOFLINE, MEASURED):
            continue
        for a in range(stage.axes.shape[0]):
            if stage.axes[a] <= 1.0:
                continue
            if unit.chosen[op - unit.first, a] < 0:
                found = min(found, MAYBE)
                continue
            signature = tables.signatures[tables.operators[op].first_signature + unit.chosen[op - unit.first, a]]
            if (signature.splits_batch == 1) == (a == innermost) or signature.divides_work == 0:
                return OTHERWISE
    return found


@borrowing(boolean(TABLES, UNIT, STAGE, boolean, UNIT_COST), inner=True)
def measured_block(tables, unit, stage, whole, cost):
    """Replaces the predicted seconds of a block by the measured ones, if it was measured divided as it is here.

    While signatures are undecided, the smaller of the two is written, which is a lower bound.

    Args:
        whole: whether all of the unit is recomputed.
        cost: cost of the unit with the predicted seconds of forward pass, backward pass and recomputation; written.

    Returns:
        Whether a measured time was found. It includes the waits of the device for kernels that its host launches.
    """
    for i in range(tables.blocks.shape[0]):
        block = tables.blocks[i]
        if block.first != unit.first or block.last != unit.last:
            continue
        innermost = stage.axes.shape[0] - 1
        replicas = 1.0
        for a in range(innermost):
            replicas *= stage.axes[a]
        if block.tp != stage.axes[innermost] or block.samples * replicas != stage.samples:
            continue
        division = _division(tables, unit, stage)
        if division == OTHERWISE:
            continue
        share = 0.0
        if whole:
            share = 1.0
        elif division == SO and cost.forward_s > 0.0:
            share = cost.recompute_s / cost.forward_s
        forward, backward = block.forward_s, block.backward_s
        again = share * forward
        weight = WEIGHT_SHARE * backward
        others = backward - weight
        if division == MAYBE:
            forward = min(forward, cost.forward_s)
            backward = min(backward, cost.backward_s)
            again = min(again, cost.recompute_s)
            weight = min(weight, cost.weight_s)
            others = min(others, cost.input_s)
        cost.forward_s = forward
        cost.backward_s = backward
        cost.input_s = others
        cost.weight_s = weight
        cost.recompute_s = again
        return True
    return False
