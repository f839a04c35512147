"""Memory that a unit keeps for its backward pass: views share the memory of their root, which counts once.

Copies of one tensor in unlike placements are memory of their own; those of two views of one root are taken for unlike
if their sizes are. A copy whose placement is undecided may turn out to be any of the others, so that only what it
exceeds them by counts. Units: bytes.
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
    """Notes that an operand is kept for the backward pass, unless an operand before it keeps the same memory.

    Args:
        start: first operand row of the unit.
        row: the operand; its `saved_placement` is written, and so are those of all saved rows before it.
        amount: bytes that a rank keeps.
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
    """Bytes of all that was noted of operand rows; forgets it."""
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
    """Writes the placement in which a trainer keeps an operand that it gathers again: the rank's own part of it.

    Args:
        source: [axes] placement before the gather.
        placement: [axes] placement that the operator requires.
        kept_as: [axes] written.
    """
    for a in range(placement.shape[0]):
        is_gathered = placement[a] == BROADCAST and (source[a] >= 0 or source[a] == UNKNOWN)
        kept_as[a] = source[a] if is_gathered else placement[a]
