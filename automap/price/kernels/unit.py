"""The cost of one unit of a plan: of its operators, of the tensors that cross into it, and of recomputation.

`automap.price.kernels.crossing_tensors` says what boundary and carried tensors are. Units: seconds, bytes, samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from numba import boolean, float64, int64, void

from automap.jit import borrowing, kernel
from automap.price.kernels.array_types import Ints2, Mask, Rows, dtype_of, rows_type, tuple_type
from automap.price.kernels.collectives import UNKNOWN
from automap.price.kernels.cost_records import UNIT_COST
from automap.price.kernels.crossing_tensors import add_sum, arrive, enter, hand_on, keep_scattered
from automap.price.kernels.host_overhead import add_host_waits
from automap.price.kernels.measured_blocks import measured_block
from automap.price.kernels.placements import local_bytes
from automap.price.kernels.records import (
    ALL_GATHER,
    ATTENTION,
    BOUNDARY,
    CARRIED,
    REDUCE_SCATTER,
    TABLES,
)
from automap.price.kernels.resharding import repeat
from automap.price.kernels.saved_activations import NOT_SAVED, note, own_part, take_noted
from automap.price.kernels.shard_unit import saved_share, shard_unit
from automap.price.kernels.stage_records import STAGE, UNIT, Stage, Unit
from automap.price.kernels.step_records import STAGE_ARRAYS
from automap.price.kernels.unit_workspace import UNIT_WORKSPACE, new_unit_workspace
from ir.factors import BROADCAST


@borrowing(void(TABLES, int64, int64, int64[::1], STAGE, UNIT_WORKSPACE), inner=True)
def _note_operand(tables, row, start, incoming, stage, workspace):
    """Notes the bytes of an operand that an operator which is not recomputed saves: those from before the gather if the
    trainer gathers operands again.

    Args:
        row: row of the operand.
        start: first operand row of the unit.
        incoming: [axes] placement of the boundary tensor, or SUMMED.
    """
    placement, kept_as, arrives = workspace.placement, workspace.saved_placement, workspace.scratch[0]
    operand = tables.operands[row]
    tensor, op = tables.tensors[operand.tensor], operand.operator
    regathers = stage.hardware.regathers > 0.0
    amount = workspace.stored[row]
    for a in range(arrives.shape[0]):
        kept_as[row, a] = placement[row, a]
    if regathers and tensor.role in (BOUNDARY, CARRIED):
        arrive(tensor, incoming, arrives)
        own_part(arrives, placement[row], kept_as[row])
        amount = local_bytes(tensor, kept_as[row], stage)
        amount *= saved_share(operand, tables.kernels[op], stage.hardware)
    elif regathers and operand.maker >= start:
        own_part(placement[operand.maker], placement[row], kept_as[row])
    note(tables, start, row, amount, workspace.undecided[op], workspace)


@borrowing(
    void(TABLES, UNIT, int64[::1], boolean[::1], boolean, STAGE, UNIT_WORKSPACE, UNIT_COST),
    forceinline=True,
    inner=True,
)
def _save(tables, unit, incoming, recomputed, whole, stage, workspace, cost):
    """Writes the bytes that a unit saves for its backward pass where it recomputes operators or gathers operands again.

    In a unit that is recomputed in part, some trainers save the results of each operator that is not recomputed, and
    none of its operands that recomputed operators make, see `HardwareRow.keeps_results`.

    Args:
        recomputed: [operators] whether the operator is recomputed.
        whole: whether all operators are recomputed.
        cost: `saved_bytes` is written.
    """
    placement, kept_as, arrives = workspace.placement, workspace.saved_placement, workspace.scratch[0]
    first = unit.first
    start = tables.operators[first].first_operand
    keeps_results = False
    if stage.hardware.keeps_results > 0.0:
        for op in range(first, unit.last):
            keeps_results = keeps_results or recomputed[op - first]
    saved = workspace.saved[start : start + workspace.num_saved[first]]
    for row in saved:
        operand = tables.operands[row]
        tensor, op = tables.tensors[operand.tensor], operand.operator
        is_crossing = tensor.role in (BOUNDARY, CARRIED)
        keeper = tables.tensors[tensor.root].producer
        workspace.noted[row] = NOT_SAVED
        if whole and is_crossing and operand.earlier >= 0:
            # The tensor is saved once, as it crosses into the unit.
            continue
        if whole and is_crossing:
            arrive(tensor, incoming, arrives)
            keep_scattered(arrives, placement[row], whole, stage, kept_as[row])
            note(tables, start, row, local_bytes(tensor, kept_as[row], stage), False, workspace)
        elif operand.is_saved == 1 and not (
            (keeps_results or recomputed[op - first]) and keeper >= first and recomputed[keeper - first]
        ):
            _note_operand(tables, row, start, incoming, stage, workspace)
    cost.saved_bytes = take_noted(tables, saved, workspace)
    if keeps_results:
        for op in range(first, unit.last):
            for row in range(tables.operators[op].first_output, tables.operators[op].end):
                operand = tables.operands[row]
                if not recomputed[op - first] and operand.is_moved == 1 and operand.is_kept == 0:
                    cost.saved_bytes += workspace.held[row]


@borrowing(float64(TABLES, UNIT, int64, int64[::1], STAGE, UNIT_WORKSPACE), inner=True)
def _kept_too(tables, unit, number, arrives, stage, workspace):
    """Bytes of a tensor that crosses into a unit, if the operators of the unit save the same memory when nothing is
    recomputed; else 0. While placements are undecided: the largest value that is possible.

    Args:
        number: row of the tensor.
        arrives: [axes] placement in which it is in memory.
    """
    start, kept_as = tables.operators[unit.first].first_operand, workspace.scratch[1]
    amount, is_open, most = local_bytes(tables.tensors[number], arrives, stage), False, 0.0
    for a in range(arrives.shape[0]):
        is_open = is_open or (arrives[a] == UNKNOWN and stage.axes[a] > 1.0)
    for row in workspace.saved[start : start + workspace.num_saved[unit.first]]:
        operand = tables.operands[row]
        if operand.is_saved == 0 or tables.tensors[operand.tensor].root != number:
            continue
        if is_open or workspace.undecided[operand.operator]:
            most = max(most, min(amount, workspace.held[row]))
            continue
        if saved_share(operand, tables.kernels[operand.operator], stage.hardware) != 1.0 or operand.copy_share > 0.0:
            continue
        # A view of as many bytes counts as the same memory, see `note`.
        is_same = operand.tensor != number and workspace.held[row] == amount
        if operand.tensor == number:
            is_same = True
            own_part(arrives, workspace.placement[row], kept_as)
            for a in range(arrives.shape[0]):
                kept = kept_as[a] if stage.hardware.regathers > 0.0 else workspace.placement[row, a]
                is_same = is_same and (kept == arrives[a] or stage.axes[a] <= 1.0)
        if is_same:
            return amount
    return most


@borrowing(float64(TABLES, UNIT, int64[::1], STAGE, UNIT_WORKSPACE), inner=True)
def _held_bytes(tables, unit, incoming, stage, workspace):
    """Bytes of the tensor that crosses into a unit, if the backward pass of the unit before needs it and this unit does
    not save it for its own; else 0, also while its placement is undecided."""
    start = tables.operators[unit.first].first_operand
    for held in workspace.entering[start : start + workspace.num_entering[unit.first]]:
        if tables.operands[held].is_held == 0:
            continue
        number, arrives = tables.operands[held].tensor, workspace.scratch[0]
        tensor = tables.tensors[number]
        arrive(tensor, incoming, arrives)
        for a in range(arrives.shape[0]):
            if arrives[a] == UNKNOWN and stage.axes[a] > 1.0:
                return 0.0
        too = _kept_too(tables, unit, number, arrives, stage, workspace)
        return 0.0 if too > 0.0 else local_bytes(tensor, arrives, stage)
    return 0.0


@borrowing(void(TABLES, UNIT, int64[::1], STAGE, UNIT_WORKSPACE, UNIT_COST), inner=True)
def _live_again(tables, unit, incoming, stage, workspace, cost):
    """Writes `live_bytes` of a unit that is recomputed as a whole: the bytes that it would save without recomputation,
    less those of the tensors that cross into it, which it saves in any case."""
    start, arrives, kept = tables.operators[unit.first].first_operand, workspace.scratch[0], workspace.scratch[2]
    if stage.hardware.regathers > 0.0:
        saved = workspace.saved[start : start + workspace.num_saved[unit.first]]
        for row in saved:
            workspace.noted[row] = NOT_SAVED
            if tables.operands[row].is_saved == 1:
                _note_operand(tables, row, start, incoming, stage, workspace)
        cost.live_bytes = take_noted(tables, saved, workspace)
    for row in workspace.entering[start : start + workspace.num_entering[unit.first]]:
        number = tables.operands[row].tensor
        if tables.operands[row].earlier < 0:
            arrive(tables.tensors[number], incoming, arrives)
            keep_scattered(arrives, workspace.placement[row], True, stage, kept)
            cost.live_bytes -= _kept_too(tables, unit, number, kept, stage, workspace)


@borrowing(boolean(TABLES, UNIT, boolean[::1], int64[::1], int64, STAGE, UNIT_WORKSPACE, UNIT_COST[::1]), apart=True)
def unit_cost(tables, unit, recomputed, incoming, crossing, stage, workspace, out):
    """Cost of the operators of one unit for one micro-batch on one rank.

    Args:
        unit: operators and signatures.
        recomputed: [operators] whether the operator is recomputed in the backward pass.
        incoming: [axes] placement of the boundary tensor that crosses into the unit, or SUMMED.
        crossing: operand row whose tensor crosses out of the unit, or -1.
        stage: mesh, links, hardware and samples.
        workspace: as `shard_unit` wrote it for this unit and stage.
        out: [1] overwritten.

    Returns:
        Whether the unit is recomputed as a whole.
    """
    first, last = unit.first, unit.last
    operands, axes, hardware = tables.operands, stage.axes, stage.hardware
    out[0] = workspace.totals[last - 1]
    cost = out[0]
    relaunched = 0.0
    attended_again = 0.0
    num_again = 0
    for op in range(first, last):
        if recomputed[op - first]:
            own = workspace.own[op]
            num_again += 1
            cost.recompute_s += own.forward_s
            relaunched += own.launched
            if tables.kernels[op].kind == ATTENTION:
                attended_again += own.forward_s
    whole = num_again == last - first
    add_sum(tables, unit, incoming, stage, workspace, cost)
    enter(tables, unit, incoming, (recomputed, whole), stage, workspace, cost)
    hand_on(tables, unit, incoming, crossing, stage, workspace, cost)
    if tables.operators[first].first_operand <= crossing < tables.operators[last - 1].end:
        sent = workspace.held[crossing]
        for a in range(1, axes.shape[0]):
            if hardware.scatters_sends > 0.0 and workspace.placement[crossing, a] == BROADCAST:
                sent /= axes[a]
        cost.boundary_bytes += sent
        keeper = tables.tensors[tables.tensors[operands[crossing].tensor].root].producer
        if operands[crossing].is_kept_behind == 1 and (whole or keeper < first or not recomputed[keeper - first]):
            cost.result_bytes = workspace.held[crossing]
    cost.saved_bytes = cost.live_bytes
    if num_again > 0 or hardware.regathers > 0.0:
        for op in range(first, last):
            if recomputed[op - first]:
                for row in range(tables.operators[op].first_operand, tables.operators[op].end):
                    if workspace.moves[row] and recomputed[operands[operands[row].maker].operator - first]:
                        repeat(workspace.resharded[row], cost)
                if workspace.moves[operands.shape[0] + op]:
                    repeat(workspace.resharded[operands.shape[0] + op], cost)
        _save(tables, unit, incoming, recomputed, whole, stage, workspace, cost)
    if whole:
        _live_again(tables, unit, incoming, stage, workspace, cost)
    else:
        cost.saved_bytes += _held_bytes(tables, unit, incoming, stage, workspace)
    # The ring is hidden as long as the attention that needs its keys and values lasts.
    shown = hardware.exposed
    cost.forward_comm_s[ALL_GATHER] += max(0.0, cost.forward_ring_s - shown * cost.forward_attended_s)
    cost.backward_comm_s[REDUCE_SCATTER] += max(0.0, cost.backward_ring_s - shown * cost.backward_attended_s)
    cost.recompute_comm_s[ALL_GATHER] += max(0.0, cost.recompute_ring_s - shown * attended_again)
    if tables.blocks.shape[0] > 0 and measured_block(tables, unit, stage, whole, cost):
        cost.launched = cost.unanswered = cost.weight_kernels = relaunched = 0.0
    add_host_waits(relaunched, workspace.apart[0], hardware, cost)
    return whole


@dataclass(kw_only=True, slots=True)
class CallRow:
    """One unit to be priced, with its place in the plan."""

    first: int
    """First operator row."""
    last: int
    """One past the last operator row."""
    begin: int
    """Row of `Calls.chosen` and of `Calls.recomputed` with its first operator."""
    crossing: int
    """Operand row whose tensor crosses out of the unit, or -1."""
    rank: int
    """Pipeline rank."""


CALL_DTYPE = dtype_of(CallRow)


class Calls(NamedTuple):
    """Units to be priced."""

    rows: Annotated[Rows, rows_type(CALL_DTYPE)]
    """[units] see `CallRow`."""
    chosen: Ints2
    """[operators, axes] signatures, one unit after the other; -1 where they are undecided."""
    recomputed: Mask
    """[operators] whether the operator is recomputed in the backward pass."""
    incoming: Ints2
    """[units, axes] placement of the boundary tensor that crosses into each unit, or SUMMED."""


@borrowing(
    void(TABLES, tuple_type(Calls), STAGE_ARRAYS, boolean[::1], float64[::1], UNIT_COST[::1], UNIT_WORKSPACE),
    inner=True,
)
def _unit_costs(tables, calls, stages, zero_axes, samples, out, workspace):
    for i in range(calls.rows.shape[0]):
        call = calls.rows[i]
        stop, rank = call.begin + call.last - call.first, call.rank
        unit = Unit(call.first, call.last, calls.chosen[call.begin : stop])
        stage = Stage(stages.axes[rank], stages.links[rank], stages.hardware[rank], zero_axes, samples[rank])
        shard_unit(tables, unit, stage, False, workspace)
        recomputed = calls.recomputed[call.begin : stop]
        unit_cost(tables, unit, recomputed, calls.incoming[i], call.crossing, stage, workspace, out[i : i + 1])


@kernel(void(TABLES, tuple_type(Calls), STAGE_ARRAYS, boolean[::1], float64[::1], UNIT_COST[::1]))
def unit_costs(tables, calls, stages, zero_axes, samples, out):
    """Writes the `unit_cost` of many units.

    Args:
        calls: the units.
        stages: the stages; their rows are the pipeline ranks.
        zero_axes: [axes] whether ZeRO shards over the axis.
        samples: [ranks] samples of a micro-batch that each rank is priced with.
        out: [units] overwritten.
    """
    workspace = new_unit_workspace(tables, zero_axes.shape[0], 0)
    _unit_costs(tables, calls, stages, zero_axes, samples, out, workspace)
