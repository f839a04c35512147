"""Finds the batch dims of inputs that recurrent layers read.

`RNN`, `GRU` and `LSTM` define which dim of their operands is the batch: with `layout=0`, as PyTorch exports them, the
second one of sequences `[time, batch, features]` and of states `[directions, batch, hidden]`. PyTorch's layers have the
sequence first unless `batch_first=True` is given, so that the leading dim of the model's inputs is not the batch. A
recurrence that a loop in Python computes, cell by cell, says the same of the dim through which it steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ir.onnx.readers.nodes import Declared, Node, Source
from ir.onnx.readers.written_loops import written_loops

RECURRENT = ("RNN", "GRU", "LSTM")
STATEFUL = (0, 5, 6)
"""Positions of the operands of recurrent kinds that have the batch: the sequence, the initial state and cell."""
ONE_OPERAND = frozenset(
    {"Identity", "Cast", "Dropout", "Slice", "Split", "LayerNormalization", "MatMul", "Relu", "Gelu", "Tanh", "Sigmoid",
     "Elu", "LeakyRelu", "Sqrt", "Clip"}
)  # fmt: skip
"""Kinds whose result has the batch in the same dim as their first operand, counted from the last dim (for MatMul:
unless it is the last dim)."""
ALL_OPERANDS = frozenset({"Add", "Sub", "Mul", "Div", "Concat"})
"""Kinds whose result has the batch in the same dim as all of their operands that have it, counted from the last dim."""


def recurrent_places(source: Source) -> dict[str, tuple[int, str]]:
    """The batch dims that recurrent layers and written-out loops define.

    Args:
        source: the file.

    Returns:
        name of an input -> its batch dim, and why it is this one, in words; without inputs of which two layers define
        different dims, and those that no layer reads through kinds that keep the batch in its place.
    """
    made = {name: node for node in source.nodes for name in node.outputs if name}
    found: dict[str, set[int]] = {}
    layers: dict[str, str] = {}
    seen = set[tuple[str, int]]()
    for layer in source.nodes:
        if layer.kind not in RECURRENT:
            continue
        # Dims are counted from the last one (-1), since the ranks of inner tensors are not known here.
        place = -3 if layer.attributes.get("layout") else -2
        pending = [(layer.inputs[i], place) for i in STATEFUL if i < len(layer.inputs) and layer.inputs[i]]
        while pending:
            name, place = pending.pop()
            if (name, place) in seen:
                continue
            seen.add((name, place))
            rank = _rank(source.inputs, name)
            if rank and 0 <= rank + place < rank:
                found.setdefault(name, set()).add(rank + place)
                label = layer.scope or layer.name or layer.outputs[0]
                layers.setdefault(name, f"as the recurrent layer {label} defines it")
            elif name in made:
                pending += _before(made[name], place, source)
    for name, dim in _stepped(source, made).items():
        found.setdefault(name, set()).add(0 if dim else 1)
        layers.setdefault(name, f"since operators combine the rows of dim {dim} with each other")
    return {name: (places.pop(), layers[name]) for name, places in found.items() if len(places) == 1}


def _stepped(source: Source, made: Mapping[str, Node]) -> dict[str, int]:
    """The inputs through whose first or second dim a written-out loop steps, and this dim.

    An input of integers is left out unless it is looked up in a table: it may be a list of sizes.
    """
    found: dict[str, int] = {}
    pending = [(name, 0, size, False) for name, size in written_loops(source).items()]
    seen = set[tuple[str, int, int, bool]]()
    while pending:
        name, dim, size, is_looked_up = key = pending.pop()
        given = source.inputs.get(name)
        if given is not None:
            shape, is_data = given.shape or (), is_looked_up or given.dtype.startswith(("float", "bfloat"))
            if is_data and len(shape) > 1 and dim < 2 and shape[dim] == size:
                found.setdefault(name, dim)
        elif name in made and key not in seen:
            seen.add(key)
            node = made[name]
            is_ids = is_looked_up or node.kind == "Gather"
            pending += [(operand, at, size, is_ids) for operand, at in _same_rows(node, dim, source)]
    return found


def _same_rows(node: Node, dim: int, source: Source) -> Sequence[tuple[str, int]]:
    """The operands of a node that have its result's rows along `dim`, counted from the first dim, and where."""
    if node.kind == "Transpose" and len(perm := node.attributes.get("perm", ())) > dim:
        return [(node.inputs[0], perm[dim])]
    if node.kind == "Gather" and node.attributes.get("axis", 0) == 0 and node.inputs[0] in source.stored:
        return [(node.inputs[1], dim)]
    if node.kind in ONE_OPERAND and node.inputs[0] not in source.stored:
        return [(node.inputs[0], dim)]
    if node.kind in ALL_OPERANDS - {"Concat"}:
        return [(name, dim) for name in node.inputs if name and name not in source.stored]
    return []


def _rank(inputs: Mapping[str, Declared], name: str) -> int:
    return len(inputs[name].shape or ()) if name in inputs else 0


def _before(node: Node, place: int, source: Source) -> Sequence[tuple[str, int]]:
    """The operands of a node that have the batch if its result has it in dim `place`, and their batch dims."""
    if node.kind == "Transpose" and len(perm := node.attributes.get("perm", ())) >= -place:
        return [(node.inputs[0], perm[place] - len(perm))]
    if node.kind == "Gather" and node.attributes.get("axis", 0) == 0 and node.inputs[0] in source.stored:
        # A look-up appends the dims of a row to those of the indices.
        row = len(source.stored[node.inputs[0]].shape) - 1
        return [(node.inputs[1], place + row)] if place + row < 0 else []
    if node.kind in ONE_OPERAND and (node.kind != "MatMul" or place < -1):
        return [(node.inputs[0], place)]
    if node.kind in ALL_OPERANDS:
        return [(name, place) for name in node.inputs if name and name not in source.stored]
    return []
