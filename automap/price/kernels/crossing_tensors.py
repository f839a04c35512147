"""Tensors that cross from unit to unit: in which placements they arrive and are handed on, and what resharding costs.

One tensor crosses from each unit to the next, the boundary tensor. Tensors that later units read too, such as the
memory of an encoder, are handed on beside it; these are called carried tensors. Units: seconds, bytes, samples.
"""

from __future__ import annotations

from numba import boolean, int64, types, void

from automap.jit import borrowing
from automap.price.kernels.collectives import SUMMED, UNKNOWN, Reason, convert
from automap.price.kernels.cost_records import BEFORE_SENDING, FORWARD_PASS, UNIT_COST
from automap.price.kernels.placements import dual, local_bytes, whole_bytes
from automap.price.kernels.records import (
    ALL_REDUCE,
    BOUNDARY,
    CARRIED,
    REDUCE_SCATTER,
    TABLES,
    TENSOR,
)
from automap.price.kernels.resharding import convert_operand, differs, is_shared, repeat
from automap.price.kernels.stage_records import STAGE, UNIT
from automap.price.kernels.unit_workspace import UNIT_WORKSPACE
from ir.factors import BROADCAST, PARTIAL


@borrowing(void(TENSOR, int64[::1], int64[::1]), inner=True)
def carry(tensor, given, carried):
    """Writes the placement in which a carried tensor is handed on from unit to unit.

    Args:
        tensor: the carried tensor.
        given: [axes] placement of the boundary tensor; in the unit that makes the tensor, its own placement there.
        carried: [axes] written: split by samples where `given` is, and B otherwise.
    """
    for a in range(given.shape[0]):
        carried[a] = given[a] if given[a] in (UNKNOWN, tensor.batch_dim) else BROADCAST


@borrowing(void(TENSOR, int64[::1], int64[::1]), inner=True)
def arrive(tensor, incoming, arrives):
    """Writes the placement in which a boundary or carried tensor crosses into a unit.

    Args:
        tensor: the tensor.
        incoming: [axes] placement of the boundary tensor, or SUMMED.
        arrives: [axes] written.
    """
    if tensor.role == CARRIED:
        carry(tensor, incoming, arrives)
        return
    for a in range(incoming.shape[0]):
        arrives[a] = BROADCAST if incoming[a] == SUMMED else incoming[a]


@borrowing(void(TABLES, UNIT, int64[::1], STAGE, UNIT_WORKSPACE, UNIT_COST), inner=True)
def add_sum(tables, unit, incoming, stage, workspace, cost):
    """Adds the all-reduce of a boundary tensor that is SUMMED.

    The chunk before this unit runs it before sending. It is priced here, on the links of this rank.
    """
    made, whole = workspace.scratch[0], workspace.scratch[1]
    is_sum = False
    for a in range(incoming.shape[0]):
        is_sum = is_sum or incoming[a] == SUMMED
        made[a] = PARTIAL if incoming[a] == SUMMED else incoming[a]
        whole[a] = dual(made[a])
    start = tables.operators[unit.first].first_operand
    for row in workspace.entering[start : start + (workspace.num_entering[unit.first] if is_sum else 0)]:
        operand = tables.operands[row]
        tensor = tables.tensors[operand.tensor]
        if tensor.role == BOUNDARY:
            reason = Reason(operand.operator, operand.tensor, BEFORE_SENDING, tensor.copies)
            batch_dim = tensor.batch_dim
            data, times = whole_bytes(tensor, stage.samples), cost.forward_comm_s[:]
            cost.forward_waits += convert(data, made, whole, batch_dim, stage, times, reason, workspace.recorder)
            return


@borrowing(boolean(int64[::1], int64[::1], boolean, STAGE, int64[::1]), inner=True)
def keep_scattered(arrives, placement, whole, stage, kept_as):
    """Writes the placement in which a unit that is recomputed as a whole saves a tensor that crosses into it.

    This is the placement in which the tensor arrives. With trainers that gather operands again there is one exception,
    a tensor that arrives as P: Megatron reduces and scatters the results of the embedding before the first layer, and
    that layer saves its shard of the sum.

    Args:
        arrives: [axes] placement in which the tensor arrives.
        placement: [axes] placement that its first reader in the unit requires.
        whole: whether the unit is recomputed as a whole.
        stage: with the trainer's kernels.
        kept_as: [axes] written.

    Returns:
        Whether the exception applies.
    """
    is_summed = False
    for a in range(arrives.shape[0]):
        kept_as[a] = arrives[a]
        if whole and stage.hardware.regathers > 0.0 and arrives[a] == PARTIAL:
            is_summed = True
            if placement[a] >= 0 or placement[a] == UNKNOWN:
                kept_as[a] = placement[a]
    return is_summed


@borrowing(
    void(TABLES, UNIT, int64[::1], types.Tuple((boolean[::1], boolean)), STAGE, UNIT_WORKSPACE, UNIT_COST), inner=True
)
def enter(tables, unit, incoming, again, stage, workspace, cost):
    """Adds the collectives that reshard the tensors which cross into a unit, and the bytes of those that it hands on.

    Args:
        again: [operators] whether the operator is recomputed; and whether all are.
    """
    recomputed, whole = again
    arrives, gradient = workspace.scratch[0], workspace.gradient
    sent = workspace.resharded[workspace.resharded.shape[0] - 1]
    start = tables.operators[unit.first].first_operand
    for row in workspace.entering[start : start + workspace.num_entering[unit.first]]:
        operand = tables.operands[row]
        tensor = tables.tensors[operand.tensor]
        arrive(tensor, incoming, arrives)
        required = workspace.scratch[1]
        for a in range(arrives.shape[0]):
            required[a] = dual(arrives[a])
        moves = differs(arrives, workspace.placement[row]) or differs(gradient[row], required)
        if (
            moves
            and not is_shared(tables, row, start, workspace)
            and convert_operand(tables, row, arrives, gradient[row], stage, workspace, sent, cost)
            and recomputed[operand.operator - unit.first]
        ):
            # The saved sum is not reduced again.
            if keep_scattered(arrives, workspace.placement[row], whole, stage, workspace.scratch[1]):
                sent.comm_s[REDUCE_SCATTER] = 0.0
                sent.comm_s[ALL_REDUCE] = 0.0
            repeat(sent, cost)
        if operand.goes_on == 1:
            carry(tensor, incoming, arrives)
            cost.boundary_bytes += local_bytes(tensor, arrives, stage)


@borrowing(void(TABLES, UNIT, int64[::1], int64, STAGE, UNIT_WORKSPACE, UNIT_COST), inner=True)
def hand_on(tables, unit, incoming, crossing, stage, workspace, cost):
    """Adds the cost of carried tensors that the unit makes, and the bytes of those that pass it without being read.

    Where a carried tensor is made, it is gathered on all axes on which it is not split by samples.
    """
    carried = workspace.scratch[0]
    passes = tables.operators[unit.first].passes
    if passes >= 0:
        carry(tables.tensors[passes], incoming, carried)
        cost.boundary_bytes += local_bytes(tables.tensors[passes], carried, stage)
    row = tables.operators[unit.first].hands_on
    while row >= 0:
        operand, made = tables.operands[row], workspace.placement[row]
        tensor = tables.tensors[operand.tensor]
        carry(tensor, made, carried)
        if operand.goes_on == 1 and row != crossing:
            cost.boundary_bytes += local_bytes(tensor, carried, stage)
        if differs(made, carried):
            reason = Reason(operand.operator, operand.tensor, FORWARD_PASS, tensor.copies)
            batch_dim = tensor.batch_dim
            data, times = whole_bytes(tensor, stage.samples), cost.forward_comm_s[:]
            cost.forward_waits += convert(data, made, carried, batch_dim, stage, times, reason, workspace.recorder)
        row = operand.next_handed_on
