"""Collectives that one operator requires: to reshard its inputs, to reshard the gradients of these, and inside it.

Units: seconds, bytes.
"""

from __future__ import annotations

from numba import boolean, float64, int64, void

from automap.jit import borrowing
from automap.price.kernels.collectives import UNKNOWN, Reason, convert, spend
from automap.price.kernels.cost_records import BACKWARD_PASS, FORWARD_PASS, RESHARDED, UNIT_COST
from automap.price.kernels.placements import dual, whole_bytes
from automap.price.kernels.records import ALL_GATHER, ATTENTION, INSIDE, NUM_COLLECTIVES, REDUCE_SCATTER, TABLES
from automap.price.kernels.stage_records import STAGE
from automap.price.kernels.unit_workspace import UNIT_WORKSPACE


@borrowing(boolean(int64[::1], int64[::1]))
def differs(source, target):
    """Whether two placements, [axes], differ on an axis on which both are decided."""
    found = False
    for a in range(source.shape[0]):
        found = found or (source[a] != target[a] and source[a] != UNKNOWN and target[a] != UNKNOWN)
    return found


@borrowing(boolean(TABLES, int64, int64, UNIT_WORKSPACE), inner=True)
def is_shared(tables, row, start, workspace):
    """Whether the price of an earlier operand of the unit includes the same conversion of the tensor, or may do so.

    An earlier operand whose placement is undecided on all axes has been priced without conversions.

    Args:
        row: operand row.
        start: first operand row of the unit.
        workspace: with placements.
    """
    placement, gradient = workspace.placement, workspace.gradient
    earlier = tables.operands[row].earlier
    while earlier >= start:
        same = True
        charged = False
        for a in range(placement.shape[1]):
            if placement[earlier, a] != UNKNOWN:
                charged = True
                if placement[row, a] != UNKNOWN:
                    alike = placement[earlier, a] == placement[row, a] and gradient[earlier, a] == gradient[row, a]
                    same = same and alike
        if same and charged:
            return True
        earlier = tables.operands[earlier].earlier
    return False


@borrowing(void(RESHARDED), inner=True)
def _clear(sent):
    """Sets the cost of a conversion to zero."""
    for kind in range(NUM_COLLECTIVES):
        sent.comm_s[kind] = 0.0
    sent.waits = 0.0
    sent.ring_s = 0.0


@borrowing(boolean(TABLES, int64, int64[::1], int64[::1], STAGE, UNIT_WORKSPACE, RESHARDED, UNIT_COST), inner=True)
def convert_operand(tables, row, source, given, stage, workspace, sent, total):
    """Adds the collectives that reshard a tensor for an operand, and those that reshard its gradient.

    Args:
        row: operand row; `workspace.placement` holds the placement that it requires.
        source: [axes] placement of the tensor.
        given: [axes] gradient placement that the operator produces.
        stage: mesh, links and samples.
        workspace: with placements; its scratch row 2 is overwritten.
        sent: cost of resharding in the forward pass; written if the tensor is resharded.
        total: the costs of both passes are added to it.

    Returns:
        Whether the tensor is resharded in the forward pass.
    """
    operand = tables.operands[row]
    tensor = tables.tensors[operand.tensor]
    target, required = workspace.placement[row], workspace.scratch[2]
    for a in range(source.shape[0]):
        required[a] = dual(source[a])
    moves = differs(source, target)
    back = tensor.has_gradient == 1 and differs(given, required)
    is_ring = stage.hardware.ring > 0.0 and tables.kernels[operand.operator].kind in (ATTENTION, INSIDE)
    data = whole_bytes(tensor, stage.samples)
    if moves:
        _clear(sent)
        reason = Reason(operand.operator, operand.tensor, FORWARD_PASS, tensor.copies)
        batch_dim, times = tensor.batch_dim, sent.comm_s[:]
        sent.waits = convert(data, source, target, batch_dim, stage, times, reason, workspace.recorder)
        if is_ring:
            sent.ring_s = sent.comm_s[ALL_GATHER]
            sent.comm_s[ALL_GATHER] = 0.0
        for kind in range(NUM_COLLECTIVES):
            total.forward_comm_s[kind] += sent.comm_s[kind]
        total.forward_waits += sent.waits
        total.forward_ring_s += sent.ring_s
    if back:
        times = total.backward_comm_s[:]
        scattered = times[REDUCE_SCATTER]
        reason = Reason(operand.operator, operand.tensor, BACKWARD_PASS, tensor.copies)
        total.backward_waits += convert(
            data, given, required, tensor.batch_dim, stage, times, reason, workspace.recorder
        )
        if is_ring:
            # In the backward pass keys and values go round the ring once more, and so do their gradients.
            total.backward_ring_s += 2.0 * (times[REDUCE_SCATTER] - scattered)
            times[REDUCE_SCATTER] = scattered
    return moves


@borrowing(boolean(TABLES, int64, int64[::1], STAGE, float64, UNIT_WORKSPACE), inner=True)
def exchange_inside(tables, op, signatures, stage, divisor, workspace):
    """Adds the collectives inside an operator to its own cost: statistics of split norms, samples of experts.

    Args:
        signatures: [axes] signature of the operator on each axis; -1 where it is undecided.
        divisor: number of parts into which the work of the operator is divided.
        workspace: `own` and `resharded` of the operator are written.

    Returns:
        Whether there is such a collective in the forward pass.
    """
    own, sent = workspace.own[op], workspace.resharded[tables.operands.shape[0] + op]
    tensor = tables.operands[tables.operators[op].first_operand].tensor
    moves = False
    for a in range(stage.axes.shape[0]):
        if stage.axes[a] <= 1.0 or signatures[a] < 0:
            continue
        signature = tables.signatures[tables.operators[op].first_signature + signatures[a]]
        kind = signature.collective
        if kind < 0:
            continue
        # On each rank, the other axes divide the exchanged bytes.
        shard = divisor / stage.axes[a]
        wait, of_samples = stage.links[a].host_time, signature.splits_batch == 1
        data = (signature.forward_bytes + signature.forward_bytes_per_sample * stage.samples) / shard
        spent = spend(kind, a, of_samples, stage, data, Reason(op, tensor, FORWARD_PASS, 0.0), workspace.recorder)
        if data > 0.0:
            if not moves:
                _clear(sent)
            moves = True
            sent.comm_s[kind] += spent
            sent.waits += wait
            own.forward_comm_s[kind] += spent
            own.forward_waits += wait
        data = (signature.backward_bytes + signature.backward_bytes_per_sample * stage.samples) / shard
        spent = spend(kind, a, of_samples, stage, data, Reason(op, tensor, BACKWARD_PASS, 0.0), workspace.recorder)
        own.backward_comm_s[kind] += spent
        own.backward_waits += wait if data > 0.0 else 0.0
    return moves


@borrowing(void(RESHARDED, UNIT_COST))
def repeat(sent, total):
    """Adds collectives that recomputation repeats, see `convert_operand`."""
    for kind in range(NUM_COLLECTIVES):
        total.recompute_comm_s[kind] += sent.comm_s[kind]
    total.backward_waits += sent.waits
    total.recompute_ring_s += sent.ring_s
