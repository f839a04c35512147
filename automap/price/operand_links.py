"""The fields of operand rows that refer to other rows of the same unit type: which rows make a tensor, read it too, or
save the same memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from automap.price.kernels.records import BOUNDARY, CARRIED, NUM_BITS, PARAMETER, OperandRow, OperatorRow, TensorRow


class UnlinkedRows(NamedTuple):
    """Rows of tables while they are built."""

    operators: Sequence[OperatorRow]
    operands: Sequence[OperandRow]
    tensors: Sequence[TensorRow]
    copies: Sequence[object]
    """For each operand row, a key of the copy that its operator reads: rows with equal keys read the same copy."""


def link_operands(rows: UnlinkedRows, first: int) -> None:
    """Fills these fields for the last unit type of the tables, whose operators begin at row `first`."""
    begin = rows.operators[first].first_operand
    _link_readers(rows, begin)
    _link_makers(rows, begin)
    for owner in rows.operators[first:]:
        for operand in rows.operands[owner.first_operand : owner.end]:
            for row in _beside(rows, operand):
                owner.neighbours |= 1 << (rows.operands[row].operator - first) % NUM_BITS
    kept = {rows.tensors[o.tensor].root for o in rows.operands[begin:] if o.is_saved}
    for operand in rows.operands[begin:]:
        operand.is_kept = int(rows.tensors[operand.tensor].root in kept)


def _link_readers(rows: UnlinkedRows, begin: int) -> None:
    """Fills two fields of the operand rows from `begin` on. `sibling`: the next row that reads the same tensor;
    `next_reader`: the first row that reads what a view, or another operator on parameters alone, makes of it."""
    readers: dict[int, int] = {}
    for row in range(len(rows.operands) - 1, begin - 1, -1):
        operand = rows.operands[row]
        owner = rows.operators[operand.operator]
        if row >= owner.first_output:
            continue
        if owner.is_free or owner.is_parametric:
            operand.next_reader = readers.get(rows.operands[owner.first_output].tensor, -1)
        operand.sibling = readers.get(operand.tensor, -1)
        readers[operand.tensor] = row


def _link_makers(rows: UnlinkedRows, begin: int) -> None:
    """Fills `maker` and `same_memory` of the operand rows from `begin` on, and clears `is_saved` of parameters and of
    what views make of them."""
    same: dict[tuple[int, object], int] = {}
    for row in range(begin, len(rows.operands)):
        operand = rows.operands[row]
        tensor = rows.tensors[operand.tensor]
        is_input = row < rows.operators[operand.operator].first_output
        is_free = tensor.producer >= 0 and rows.operators[tensor.producer].is_free == 1
        if is_input and tensor.producer >= 0 and not is_free:
            operand.maker = rows.operators[tensor.producer].first_output + tensor.slot
        if tensor.role == PARAMETER or is_free:
            operand.is_saved = 0
        if operand.is_saved or (is_input and tensor.role in (BOUNDARY, CARRIED)):
            key = (tensor.root, rows.copies[row] if operand.copy_share > 0.0 else None)
            operand.same_memory = same.get(key, -1)
            same[key] = row


def _beside(rows: UnlinkedRows, operand: OperandRow) -> set[int]:
    """The rows of a unit on whose placements the cost of an operand depends: for a parameter, those that reduce its
    gradient; for another tensor, the row that makes it and the rows that read it earlier."""
    if rows.tensors[operand.tensor].role == PARAMETER:
        return _behind(rows, operand)
    found = {operand.maker} - {-1}
    row = operand.earlier
    while row >= 0:
        found.add(row)
        row = rows.operands[row].earlier
    return found


def _behind(rows: UnlinkedRows, operand: OperandRow) -> set[int]:
    """The rows that read the results which views, and other operators on parameters alone, compute from an operand."""
    found: set[int] = set()
    left = [operand.next_reader]
    while left:
        row = left.pop()
        while row >= 0 and row not in found:
            found.add(row)
            left.append(rows.operands[row].next_reader)
            row = rows.operands[row].sibling
    return found
