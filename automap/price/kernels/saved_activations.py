"""Memory that a unit keeps for its backward pass: views share the memory of their root, which counts once.

Copies of one tensor in unlike placements are memory of their own; those of two views of one root are taken for unlike
if their sizes are. A copy whose placement is undecided may turn out to be any of the others, so that only what it
exceeds them by counts. Units: bytes.
"""

from __future__ import annotations

from numba import boolean, float64, int64, void

from automap.jit import borrowing
from automap.price.kernels.collectives import UNKNOWN
from automap.price.tables import D_SAME, D_TENSOR, T_ROOT
from ir.factors import BROADCAST

NOT_KEPT = -1.0
"""Of `noted` where an operand adds no memory."""


@borrowing(
    void(
        int64[:, ::1],
        int64,
        int64,
        int64,
        float64,
        boolean,
        int64[:, ::1],
        float64[::1],
        float64[::1],
        float64[::1],
    ),
    inner=True,
)
def note(operands, start, row, root, amount, undecided, keeps, noted, known, loose):
    """Notes that `amount` bytes are kept, unless an operand before `row` keeps the same.

    Args:
        operands: see `Tables`.
        start: first operand row of the unit.
        row: the operand.
        root: tensor whose memory it is.
        amount: bytes.
        undecided: whether its placement is.
        keeps: [operands, axes] placement in which each row is kept.
        noted: [operands] bytes noted at each row, or NOT_KEPT; valid for the kept rows before this one.
        known: [tensors] bytes of the decided copies of each root.
        loose: [tensors] most bytes of an undecided copy.
    """
    noted[row] = NOT_KEPT
    if undecided:
        loose[root] = max(loose[root], amount)
        return
    before = operands[row, D_SAME]
    while before >= start:
        if noted[before] == amount:
            alike = True
            if operands[before, D_TENSOR] == operands[row, D_TENSOR]:
                for a in range(keeps.shape[1]):
                    alike = alike and keeps[before, a] == keeps[row, a]
            if alike:
                return
        before = operands[before, D_SAME]
    noted[row] = amount
    known[root] += amount


@borrowing(float64(int64[:, ::1], int64[:, ::1], int64[::1], float64[::1], float64[::1]), inner=True)
def settle(operands, tensors, rows, known, loose):
    """Bytes of all that was noted of `rows`; forgets it."""
    total = 0.0
    for i in range(rows.shape[0]):
        root = tensors[operands[rows[i], D_TENSOR], T_ROOT]
        total += known[root] + max(0.0, loose[root] - known[root])
        known[root] = 0.0
        loose[root] = 0.0
    return total


@borrowing(void(int64[::1], int64[::1], int64[::1]), inner=True)
def own_part(source, lies, placement):
    """Writes the placement in which a trainer keeps an operand that it gathers again: the rank's own part of it."""
    for a in range(lies.shape[0]):
        is_gathered = lies[a] == BROADCAST and (source[a] >= 0 or source[a] == UNKNOWN)
        placement[a] = source[a] if is_gathered else lies[a]
