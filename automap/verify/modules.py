"""Rules about targets that train whole modules: placements change at the borders of layers alone.

A layer is a module with weights of its own and of at most two dims: a linear layer, an embedding or a norm. All other
operators are the user's code, which runs on what a rank has.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from automap.targets import Target
from automap.verify.model import Model
from automap.verify.reading import Chunk, Violation
from ir.graph import Operator

LAYER_DIMS = 2
NAMES = (".weight", ".bias")
AGAIN = "@"
"""In the name of an operator that runs in another stage again, for its readers there."""


def check_modules(chunks: Sequence[Chunk], model: Model, target: Target) -> Iterator[Violation]:
    """Stages that hand on more than one tensor or share a layer, and operators that are finer than modules."""
    inside = _layers(model)
    if len(chunks) > 1:
        again = [op.name for op in model.graph.operators if AGAIN in op.name and op.scope in inside]
        for name in sorted([*model.carried, *again])[:1]:
            yield Violation("stages", f"{target.name} has stages that share one tensor and no layer, not {name}")
    yield from _parts_again(chunks, model, target)
    for chunk in chunks:
        for axis in (axis for axis, size in chunk.sizes.items() if size > 1):
            for what in itertools.islice(_faults(chunk, model, axis, inside), 1):
                yield Violation(f"{chunk.where}.shardings", f"{target.name} runs whole modules: {what} on {axis}")


def _parts_again(chunks: Sequence[Chunk], model: Model, target: Target) -> Iterator[Violation]:
    """Operators that run again though their modules do not as a whole; the loss may run again alone."""
    operators, tensors = model.graph.operators, model.graph.tensors
    again = frozenset[int]().union(*(chunk.again for chunk in chunks))
    kept = {
        path
        for index, op in enumerate(operators)
        if op.is_live and index not in again
        for path in itertools.accumulate(op.scope.split("."), "{}.{}".format)
    }
    for chunk in chunks:
        for index in sorted(chunk.again):
            op = operators[index]
            saves = any(tensors[name].role == "activation" for name in op.saved)
            if saves and (not op.scope or op.scope in kept) and op.outputs[0] != model.graph.outputs[-1]:
                yield Violation(
                    f"{chunk.where}.recompute", f"{target.name} computes whole modules again, not {op.name}"
                )
                return


def _faults(chunk: Chunk, model: Model, axis: str, inside: frozenset[str]) -> Iterator[str]:
    """What modules cannot run as the plan says on an axis."""
    for index in chunk.operators:
        op = model.graph.operators[index]
        if not op.is_live:
            continue
        if axis in chunk.stage.batch_axes:
            what = "does not split its batch" if _leaves_batch(chunk, model, index, axis) else ""
        else:
            what = "" if op.scope in inside else _finer(chunk, model, index, axis)
            what = what or _changes(chunk, model, index, axis, inside)
        if what:
            yield f"{op.name} {what}"


def _layers(model: Model) -> frozenset[str]:
    """The scopes of layers."""
    most: dict[str, int] = {}
    for op in model.graph.operators:
        for operand in op.inputs if op.is_live else ():
            for name in _weights(model, operand):
                dims = len(model.graph.tensors[operand].shape) if name.endswith(NAMES) else LAYER_DIMS + 1
                most[op.scope] = max(most.get(op.scope, 0), dims)
    return frozenset(scope for scope, dims in most.items() if dims <= LAYER_DIMS)


def _weights(model: Model, name: str) -> Iterator[str]:
    """The parameters of the file that a tensor is a view of."""
    graph = model.graph
    if graph.tensors[name].role == "parameter":
        yield graph.pieces[name][0] if name in graph.pieces else name
    elif name in model.parametric:
        for operand in graph.operators[graph.producer[name]].inputs:
            yield from _weights(model, operand)


def _leaves_batch(chunk: Chunk, model: Model, index: int, axis: str) -> bool:
    return chunk.placed[index][axis] != model.default(index, batch=True)


def _finer(chunk: Chunk, model: Model, index: int, axis: str) -> str:
    """What code cannot do of the placements of an operator; empty where it can."""
    op, placed = model.graph.operators[index], chunk.placed[index][axis]
    number = model.legal(index)[placed]
    if op.outputs[0] == model.graph.outputs[-1]:
        return ""
    if "P" in (*placed.inputs, *placed.outputs):
        return "leaves a sum untaken"
    if number is None:
        return ""
    if op.rule.factors[number].collective is not None:
        return "exchanges data inside itself"
    for name, text in zip(op.inputs, placed.inputs, strict=True):
        if text == "B" and not _is_constant(model, name):
            return f"needs the gradient of {name} summed over ranks"
        if text != "B" and any(_weights(model, name)):
            return f"splits {name}"
    return ""


def _is_constant(model: Model, name: str) -> bool:
    """Whether a tensor depends on no data and no parameter, or carries no gradient."""
    index, tensor = model.graph.producer.get(name), model.graph.tensors[name]
    if index is None:
        return tensor.role in ("constant", "buffer") or not tensor.is_float
    return model.graph.operators[index].is_constant


def _changes(chunk: Chunk, model: Model, index: int, axis: str, inside: frozenset[str]) -> str:
    """Which result of an operator is read by code in another placement than it has, or in several."""
    op = model.graph.operators[index]
    for position, name in enumerate(op.outputs):
        held = chunk.placed[index][axis].outputs[position]
        wanted = {
            text for reader in _readers(chunk, model, name, inside) for text in _read(chunk, model, reader, name, axis)
        }
        if len(wanted) > 1 or (op.scope not in inside and not wanted <= {held}):
            return f"makes {name} as {held}, which is read as {' and '.join(sorted(wanted))}"
    return ""


def _readers(chunk: Chunk, model: Model, name: str, inside: frozenset[str]) -> Iterator[Operator]:
    """The operators of code in a stage that read a tensor."""
    for reader in model.graph.consumers[name]:
        op = model.graph.operators[reader]
        if reader in chunk.placed and op.is_live and op.scope not in inside:
            yield op


def _read(chunk: Chunk, model: Model, op: Operator, name: str, axis: str) -> Iterator[str]:
    texts = chunk.placed[model.position[op.name]][axis].inputs
    yield from (text for operand, text in zip(op.inputs, texts, strict=True) if operand == name)
