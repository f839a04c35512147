"""The cost of the operators of a unit under their signatures: the one place where signatures become seconds and bytes.

`shard_unit` adds up the costs that follow from the signatures of a unit; `automap.price.kernels.unit` adds those that
follow from recomputation and from the tensors that cross into the unit. An undecided signature (-1) is priced at a
lower bound of all legal ones, so that the costs of partial plans are lower bounds. Neither fast-math nor the number of
plans that are priced at once changes the order of sums. Units: seconds, bytes, samples.
"""

from __future__ import annotations

from numba import boolean, float64, int64, void

from automap.jit import borrowing
from automap.price.kernels.gradients import add_elements, add_reduction
from automap.price.kernels.hashes import mix
from automap.price.kernels.operators import operator_s
from automap.price.kernels.placements import local_bytes, place_operands
from automap.price.kernels.records import (
    ATTENTION,
    BATCHED_PRODUCT,
    BOUNDARY,
    CARRIED,
    KERNEL,
    NUM_BITS,
    OPERAND,
    PARAMETER,
    PRODUCT,
    TABLES,
)
from automap.price.kernels.resharding import convert_operand, differs, exchange_inside, is_shared
from automap.price.kernels.saved_activations import NOT_SAVED, note, own_part, take_noted
from automap.price.kernels.stage_records import HARDWARE, STAGE, UNIT
from automap.price.kernels.unit_workspace import UNIT_WORKSPACE
from ir.factors import BROADCAST, PARTIAL


@borrowing(float64(OPERAND, KERNEL, HARDWARE))
def saved_share(operand, kernel, hardware):
    """Bytes that a kernel saves of an operand, over the bytes of the operand in the format of activations."""
    if operand.copy_share > 0.0:
        return operand.copy_share
    return hardware.saved_share if kernel.kind == PRODUCT and kernel.weight_share > 0.0 else 1.0


@borrowing(int64(TABLES, UNIT, UNIT_WORKSPACE), inner=True)
def _find_stale(tables, unit, workspace):
    """Writes `changed`, whether an operator has other signatures than it was priced with, and `stale`, whether it or an
    operator on which its cost depends has.

    Returns:
        The first stale operator; one past the last operator if there is none.
    """
    first, changed, stale = unit.first, workspace.changed, workspace.stale
    bits = 0
    for op in range(first, unit.last):
        changed[op] = False
        for a in range(unit.chosen.shape[1]):
            changed[op] = changed[op] or workspace.priced[op, a] != unit.chosen[op - first, a]
        if changed[op]:
            bits |= 1 << (op - first) % NUM_BITS
    begin = unit.last
    for op in range(unit.last - 1 if bits != 0 else first - 1, first - 1, -1):
        stale[op] = changed[op] or tables.operators[op].neighbours & bits != 0
        if stale[op]:
            begin = op
    return begin


@borrowing(void(TABLES, UNIT, STAGE, boolean, UNIT_WORKSPACE), apart=True)
def shard_unit(tables, unit, stage, again, workspace):
    """Writes the costs of the operators of a unit for one micro-batch on one rank, whatever crosses into the unit.

    Args:
        unit: operators and signatures.
        stage: mesh, links, hardware and samples.
        again: whether `workspace` holds these operators priced on the same axes, ZeRO axes, hardware and samples. Only
            operators whose cost has changed since then are priced again, and no collectives are recorded.
        workspace: written; `unit_cost` reads it.
    """
    operators, operands = tables.operators, tables.operands
    first, last = unit.first, unit.last
    begin = first
    if again:
        begin = _find_stale(tables, unit, workspace)
        if begin == last:
            return
    else:
        for op in range(first, last):
            workspace.changed[op] = workspace.stale[op] = True
        _list_rows(tables, unit, workspace)
    start, stop = operators[first].first_operand, operators[last - 1].end
    place_operands(tables, unit, stage, workspace)
    for op in range(begin, last):
        if workspace.stale[op]:
            _join(tables, op, start, stop, stage, workspace)
        if workspace.changed[op]:
            signatures = unit.chosen[op - first]
            for a in range(signatures.shape[0]):
                workspace.priced[op, a] = signatures[a]
            _remember(tables, op, signatures, start, stop, stage, workspace)
        _add_up(op, first, workspace)
    saved = workspace.saved[start : start + workspace.num_saved[first]]
    for row in saved:
        workspace.noted[row] = NOT_SAVED
        if operands[row].is_saved == 1:
            op = operands[row].operator
            amount = saved_share(operands[row], tables.kernels[op], stage.hardware) * workspace.held[row]
            for a in range(stage.axes.shape[0]):
                workspace.saved_placement[row, a] = workspace.placement[row, a]
            note(tables, start, row, amount, workspace.undecided[op], workspace)
    workspace.totals[last - 1].live_bytes = take_noted(tables, saved, workspace)


@borrowing(void(int64, int64, UNIT_WORKSPACE), inner=True)
def _add_up(op, first, workspace):
    """Writes the sums of costs from the first operator of a unit, `first`, to an operator; those to the operator before
    it must be there."""
    total, own, joined = workspace.totals_numbers[op], workspace.own_numbers[op], workspace.joined_numbers[op]
    largest = workspace.own[op].workspace_bytes
    # The lengths of these loops are not constants on purpose: the compiler then uses vector instructions, and otherwise
    # unrolls the loops.
    if workspace.joins[op]:
        for c in range(total.shape[0]):
            total[c] = own[c] + joined[c]
    else:
        for c in range(total.shape[0]):
            total[c] = own[c]
    if op > first:
        before = workspace.totals_numbers[op - 1]
        for c in range(total.shape[0]):
            total[c] += before[c]
        largest = max(largest, workspace.totals[op - 1].workspace_bytes)
    workspace.totals[op].workspace_bytes = largest


@borrowing(void(TABLES, UNIT, UNIT_WORKSPACE), inner=True)
def _list_rows(tables, unit, workspace):
    """Lists the operand rows that cross into a unit, and those that its backward pass may need."""
    start = tables.operators[unit.first].first_operand
    num_entering, num_saved = 0, 0
    for row in range(start, tables.operators[unit.last - 1].end):
        operand = tables.operands[row]
        role = tables.tensors[operand.tensor].role
        if role == PARAMETER:
            continue
        enters = row < tables.operators[operand.operator].first_output and role in (BOUNDARY, CARRIED)
        if enters:
            workspace.entering[start + num_entering] = row
            num_entering += 1
        if enters or operand.is_saved == 1:
            workspace.saved[start + num_saved] = row
            num_saved += 1
    workspace.num_entering[unit.first], workspace.num_saved[unit.first] = num_entering, num_saved


@borrowing(void(TABLES, int64, int64[::1], int64, int64, STAGE, UNIT_WORKSPACE), inner=True)
def _remember(tables, op, signatures, start, stop, stage, workspace):
    """Does the same as `_work`; products and attention, which take the longest to price, are looked up in
    `workspace.memory` first."""
    memory, surroundings = workspace.memory, workspace.surroundings
    is_known = memory.keys.shape[0] > 0 and surroundings[0] != 0
    if not is_known or tables.kernels[op].kind not in (PRODUCT, BATCHED_PRODUCT, ATTENTION):
        _work(tables, op, signatures, start, stop, stage, workspace)
        return
    one, two = mix(surroundings[0], surroundings[1], op)
    undecided = False
    for a in range(signatures.shape[0]):
        one, two = mix(one, two, signatures[a])
        undecided = undecided or (signatures[a] < 0 and stage.axes[a] > 1.0)
    one |= 1
    place, inside = two & (memory.keys.shape[0] - 1), tables.operands.shape[0] + op
    if memory.keys[place, 0] == one and memory.keys[place, 1] == two:
        workspace.undecided[op] = undecided
        workspace.own[op] = memory.own[place]
        workspace.moves[inside] = memory.moves[place]
        if memory.moves[place]:
            workspace.resharded[inside] = memory.inside[place]
        return
    _work(tables, op, signatures, start, stop, stage, workspace)
    memory.keys[place, 0], memory.keys[place, 1] = one, two
    memory.own[place] = workspace.own[op]
    memory.moves[place] = workspace.moves[inside]
    memory.inside[place] = workspace.resharded[inside]


@borrowing(void(TABLES, int64, int64[::1], int64, int64, STAGE, UNIT_WORKSPACE), inner=True)
def _work(tables, op, signatures, start, stop, stage, workspace):
    """Writes the costs of one operator that depend on its own signature alone: `own`, and the collectives inside it.

    Args:
        op: operator row.
        signatures: [axes] signature of the operator on each axis; -1 where it is undecided.
        start: first operand row of the unit.
        stop: one past its last operand row.
        workspace: with the operands of the unit placed.
    """
    operator = tables.operators[op]
    own, numbers = workspace.own[op], workspace.own_numbers[op]
    for c in range(numbers.shape[0]):
        numbers[c] = 0.0
    divisor = 1.0
    undecided = False
    for a in range(stage.axes.shape[0]):
        if stage.axes[a] > 1.0:
            divides = operator.is_divisible
            if signatures[a] < 0:
                undecided = True
            else:
                divides = tables.signatures[operator.first_signature + signatures[a]].divides_work
            if divides == 1:
                divisor *= stage.axes[a]
    workspace.undecided[op] = undecided
    moved = 0.0
    scores = 0.0
    for row in range(operator.first_operand, operator.end):
        operand = tables.operands[row]
        # Tensors inside a fused kernel stay in registers; a tensor that several of its operators read is read once.
        if operand.is_moved == 1:
            moved += workspace.held[row]
            if row < operator.first_output:
                scores = max(scores, workspace.held[row] * operand.is_scores)
            elif operand.is_scores == 0 and operator.is_free == 0:
                # The memory of a loss, in relation to its scores, is counted below; views of parameters write nothing.
                own.workspace_bytes += workspace.held[row]
        tensor = tables.tensors[operand.tensor]
        if tensor.role == PARAMETER and operand.earlier < 0:
            add_elements(tensor, workspace.placement[row], stage, own)
            own.num_parameters += tensor.num_parameters
            if tensor.has_gradient == 1 and operand.next_reader < 0:
                add_reduction(tables, row, start, stop, stage, workspace, own)
    # `working_bytes` doubles `workspace_bytes`, for a result and its gradient; those of a loss are given as a whole.
    of_loss = 0.5 * stage.hardware.loss_bytes / stage.hardware.element_bytes * scores
    own.workspace_bytes = max(own.workspace_bytes, of_loss)
    inside = tables.operands.shape[0] + op
    workspace.moves[inside] = False
    if operator.is_free == 1:
        return
    launched = operator_s(tables, op, signatures, stage, divisor, moved, workspace)
    times = workspace.times
    own.forward_s = times[0]
    own.backward_s = times[1]
    own.input_s = times[1] - times[2]
    own.weight_s = times[2]
    own.launched = launched
    own.unanswered = launched if tables.kernels[op].is_frozen == 1 else 0.0
    own.weight_kernels = launched * tables.kernels[op].weight_share
    if tables.kernels[op].kind == ATTENTION:
        own.forward_attended_s = times[0]
        own.backward_attended_s = times[1]
    workspace.moves[inside] = exchange_inside(tables, op, signatures, stage, divisor, workspace)


@borrowing(void(TABLES, int64, int64, int64, STAGE, UNIT_WORKSPACE), inner=True)
def _join(tables, op, start, stop, stage, workspace):
    """Writes the costs of one operator that depend on its signature and on those of its neighbours: `joined`, and the
    collectives that reshard its operands.

    Args:
        op: operator row.
        start: first operand row of the unit.
        stop: one past its last operand row.
        workspace: with the operands of the unit placed.
    """
    operands, placement, gradient = tables.operands, workspace.placement, workspace.gradient
    joined, numbers = workspace.joined[op], workspace.joined_numbers[op]
    if workspace.joins[op]:
        for c in range(numbers.shape[0]):
            numbers[c] = 0.0
    workspace.joins[op] = False
    for row in range(tables.operators[op].first_operand, tables.operators[op].end):
        operand = operands[row]
        tensor = tables.tensors[operand.tensor]
        workspace.moves[row] = False
        if tensor.role == PARAMETER:
            # `_work` adds the gradients that depend on the signature of this operator alone.
            if operand.earlier < 0 and tensor.has_gradient == 1 and operand.next_reader >= 0:
                workspace.joins[op] = True
                add_reduction(tables, row, start, stop, stage, workspace, joined)
            continue
        source = operand.maker
        if source >= start:
            given = gradient[row]
            if tables.operators[operands[source].operator].is_parametric == 1:
                given = workspace.scratch[0]
                for a in range(given.shape[0]):
                    # The gradient of a tensor that depends on parameters alone stays partial until the end of the step.
                    summed = placement[source, a] == BROADCAST and gradient[row, a] == PARTIAL
                    given[a] = BROADCAST if summed else gradient[row, a]
            moves = differs(placement[source], placement[row]) or differs(given, gradient[source])
            if moves and not is_shared(tables, row, start, workspace):
                workspace.joins[op] = True
                sent = workspace.resharded[row]
                workspace.moves[row] = convert_operand(
                    tables, row, placement[source], given, stage, workspace, sent, joined
                )
        if operand.is_saved == 1:
            share = saved_share(operand, tables.kernels[op], stage.hardware)
            workspace.stored[row] = share * workspace.held[row]
            if source >= start and stage.hardware.regathers > 0.0:
                own_part(placement[source], placement[row], workspace.scratch[1])
                workspace.stored[row] = share * local_bytes(tensor, workspace.scratch[1], stage)
