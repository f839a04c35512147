"""Finds loops over a leading dim that an exporter wrote out, such as recurrences over time in Python.

Such a loop picks the rows of a tensor one by one, by their numbers, and combines what it computes of one row with the
next row. Rows of samples are never combined, so this dim is not the batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ir.onnx.readers.nodes import Node, Source, small_value

JOINING = ("Concat", "SequenceConstruct", "SequenceInsert", "ScatterND", "ScatterElements")
"""Kinds that lay rows side by side and do not combine them: a loop over samples ends with one."""
MOST_MARKS = 4
"""Tensors whose rows are followed through one operator; those of further ones are left out (assumed)."""


def written_loops(source: Source) -> dict[str, int]:
    """The tensors whose rows are picked one by one and then combined.

    Args:
        source: the file, with its nodes after those that they read.

    Returns:
        name of a tensor -> how many of its rows are picked: all from 0 up to this number.
    """
    made = {name: node for node in source.nodes for name in node.outputs if name}
    rows: dict[str, set[int]] = {}
    combined = set[str]()
    marks: dict[str, dict[str, int]] = {}
    for node in source.nodes:
        picked = _rows(node, source, made)
        for name, row in picked.items():
            rows.setdefault(node.inputs[0], set()).add(row)
            marks[name] = {node.inputs[0]: row}
        if picked or node.kind in JOINING:
            continue
        found: dict[str, int] = {}
        for operand in node.inputs:
            for data, row in marks.get(operand, {}).items():
                if found.setdefault(data, row) != row:
                    combined.add(data)
        if found:
            kept = dict(list(found.items())[:MOST_MARKS])
            marks |= dict.fromkeys((name for name in node.outputs if name), kept)
    return {data: len(rows[data]) for data in combined if rows[data] == set(range(len(rows[data])))}


def _rows(node: Node, source: Source, made: Mapping[str, Node]) -> dict[str, int]:
    """The results of a node that are single rows of its first operand along dim 0, each with the row's number."""
    operands = [_numbers(name, source, made) for name in node.inputs[1:]]
    if node.kind == "Gather" and not node.attributes.get("axis", 0) and operands[0] is not None:
        index = operands[0]
        return {node.outputs[0]: int(index.reshape(-1)[0])} if index.size == 1 and index.min() >= 0 else {}
    if node.kind == "Split" and not node.attributes.get("axis", 0):
        parts = operands[0] if operands else np.asarray(node.attributes.get("split", ()))
        is_single = parts is not None and len(node.outputs) == parts.size and bool((parts == 1).all())
        return {name: row for row, name in enumerate(node.outputs) if name} if is_single else {}
    if node.kind == "Slice" and len(operands) >= 3 and all(n is not None and n.size == 1 for n in operands[:3]):
        start, stop, axis = (int(n.reshape(-1)[0]) for n in operands[:3] if n is not None)
        return {node.outputs[0]: start} if axis == 0 and start >= 0 and stop == start + 1 else {}
    return {}


def _numbers(name: str, source: Source, made: Mapping[str, Node]) -> np.ndarray | None:
    """The integers of a small constant; None for any other tensor."""
    if name in source.stored:
        value = source.stored[name].value
    else:
        maker = made.get(name)
        tensor = maker.attributes.get("value") if maker is not None and maker.kind == "Constant" else None
        value = small_value(tensor) if tensor is not None else None
    return value if value is not None and value.dtype.kind == "i" else None
