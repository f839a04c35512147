"""Memory that a unit saves for its backward pass.

A tensor and all views of it share one memory, which counts once; the tensor is called the root of these views. Copies
of one tensor in unlike placements count separately. Copies of two different views of one root count separately if their
sizes differ. A copy whose placement is undecided may be equal to another copy, so for a lower bound only the bytes
beyond all decided copies count. Units: bytes.
"""

from __future__ import annotations

from numba import boolean, float64, int64, void

from automap.jit import borrowing
from automap.price.kernels.collectives import UNKNOWN
from automap.price.kernels.records import TABLES
from automap.price.kernels.unit_workspace import UNIT_WORKSPACE
from ir.factors import BROADCAST

NOT_SAVED = -1.0
"""Value of `UnitWorkspace.noted` where an operand adds no memory."""


@borrowing(void(TABLES, int64, int64, float64, boolean, UNIT_WORKSPACE), inner=True)
def note(tables, start, row, amount, undecided, workspace):
    """Notes that an operand is saved for the backward pass, unless an operand before it saves the same memory.

    Args:
        start: first operand row of the unit.
        row: row of the operand; `saved_placement` of it and of all saved rows before it must be filled in.
        amount: bytes that a rank saves.
        undecided: whether the placement of the operand is undecided.
        workspace: `noted`, `known` and `loose` are written.
    """
    noted, kept_as = workspace.noted, workspace.saved_placement
    operand = tables.operands[row]
    root = tables.tensors[operand.tensor].root
    noted[row] = NOT_SAVED
    if undecided:
        workspace.loose[root] = max(workspace.loose[root], amount)
        return
    before = operand.same_memory
    while before >= start:
        if noted[before] == amount:
            alike = True
            if tables.operands[before].tensor == operand.tensor:
                for a in range(kept_as.shape[1]):
                    alike = alike and kept_as[before, a] == kept_as[row, a]
            if alike:
                return
        before = tables.operands[before].same_memory
    noted[row] = amount
    workspace.known[root] += amount


@borrowing(float64(TABLES, int64[::1], UNIT_WORKSPACE), inner=True)
def take_noted(tables, rows, workspace):
    """Total bytes noted for the roots of these operand rows; sets `known` and `loose` of these back to 0."""
    known, loose = workspace.known, workspace.loose
    total = 0.0
    for i in range(rows.shape[0]):
        root = tables.tensors[tables.operands[rows[i]].tensor].root
        total += known[root] + max(0.0, loose[root] - known[root])
        known[root] = 0.0
        loose[root] = 0.0
    return total


@borrowing(void(int64[::1], int64[::1], int64[::1]), inner=True)
def own_part(source, placement, kept_as):
    """Writes the placement in which a trainer that gathers operands again saves one: not gathered.

    Args:
        source: [axes] placement before the gather.
        placement: [axes] placement that the operator requires.
        kept_as: [axes] written.
    """
    for a in range(placement.shape[0]):
        is_gathered = placement[a] == BROADCAST and (source[a] >= 0 or source[a] == UNKNOWN)
        kept_as[a] = source[a] if is_gathered else placement[a]
