"""Rules about targets that shard whole modules: placements may change only at the inputs and outputs of modules.

A layer is a module with weights of its own and of at most two dims: a linear layer, an embedding or a norm. All other
operators are the user's code, which runs on the local tensors of a rank. The placement of a tensor may change at the
input of a module if all of its operators require the same placement.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence, Set

from automap.targets import Target
from automap.verify.model import Model
from automap.verify.reading import Chunk, Violation

LAYER_DIMS = 2
"""Largest number of dims of a parameter of a linear layer, an embedding or a norm."""
NAMES = (".weight", ".bias")
"""How the names of such parameters end in PyTorch."""


def check_modules(chunks: Sequence[Chunk], model: Model, target: Target) -> Iterator[Violation]:
    """Stages that share a layer, and operators that are finer than modules."""
    inside = _layers(model)
    home = set[tuple[str, str]]()
    for chunk in chunks:
        ops = (model.graph.operators[index] for index in chunk.operators)
        reads = {
            (op.scope, weight): op.name
            for op in ops if op.is_live and op.scope in inside
            for operand in op.inputs
            for weight in parameters_behind(model, operand)
        }  # fmt: skip
        for name in sorted(reads[weight] for weight in reads.keys() & home)[:1]:
            yield Violation(chunk.where, f"{target.name} has stages that share no layer, not {name}")
        home |= reads.keys()
    yield from _parts_again(chunks, model, target)
    for chunk in chunks:
        for axis in (axis for axis, size in chunk.sizes.items() if size > 1):
            for what in itertools.islice(_faults(chunk, model, axis, inside), 1):
                yield Violation(f"{chunk.where}.shardings", f"{target.name} runs whole modules: {what} on {axis}")


def _parts_again(chunks: Sequence[Chunk], model: Model, target: Target) -> Iterator[Violation]:
    """Operators that are recomputed although their layer is not recomputed as a whole, or that are code of a module
    which has several units. The loss may be recomputed alone.
    """
    operators = model.graph.operators
    again = frozenset[int]().union(*(chunk.again for chunk in chunks))
    layers, kept = _layers(model), set[str]()
    units: dict[str, set[int]] = {}
    for index, op in enumerate(operators):
        for path in itertools.accumulate(op.scope.split("."), "{}.{}".format) if op.is_live else ():
            units.setdefault(path, set()).add(model.unit_of.get(index, -1))
            kept |= {path} if index not in again else set()
    kept = {path for path in kept if path in layers or len(units[path]) > 1}
    for chunk in chunks:
        for index in sorted(chunk.again):
            op = operators[index]
            saves = model.graph.keeps_activations(op)
            if saves and (not op.scope or op.scope in kept) and op.outputs[0] != model.graph.outputs[-1]:
                yield Violation(
                    f"{chunk.where}.recompute", f"{target.name} computes modules or their code again, not {op.name}"
                )
                return


def _faults(chunk: Chunk, model: Model, axis: str, inside: frozenset[str]) -> Iterator[str]:
    """Texts about the placements on an axis that modules cannot run."""
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
            for name in parameters_behind(model, operand):
                dims = len(model.graph.tensors[operand].shape) if name.endswith(NAMES) else LAYER_DIMS + 1
                most[op.scope] = max(most.get(op.scope, 0), dims)
    return frozenset(scope for scope, dims in most.items() if dims <= LAYER_DIMS)


def parameters_behind(model: Model, name: str) -> Iterator[str]:
    """The parameters of the file that a tensor is a view of."""
    graph = model.graph
    if graph.tensors[name].role == "parameter":
        yield graph.pieces[name][0] if name in graph.pieces else name
    elif name in model.parametric:
        for operand in graph.operators[graph.producer[name]].inputs:
            yield from parameters_behind(model, operand)


def _leaves_batch(chunk: Chunk, model: Model, index: int, axis: str) -> bool:
    return chunk.placed[index][axis] != model.default(index, batch=True)


def _finer(chunk: Chunk, model: Model, index: int, axis: str) -> str:
    """The reason why the user's code cannot run an operator with its placements; empty if it can."""
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
        if text == "B" and name in model.graph.differentiable:
            return f"needs the gradient of {name} summed over ranks"
        if text != "B" and any(parameters_behind(model, name)):
            return f"splits {name}"
    return ""


def _changes(chunk: Chunk, model: Model, index: int, axis: str, inside: frozenset[str]) -> str:
    """Text about a result of an operator that code requires in another placement than it has, or in several; empty if
    there is none."""
    op = model.graph.operators[index]
    for position, name in enumerate(op.outputs):
        held = chunk.placed[index][axis].outputs[position]
        readers = {*_readers(chunk, model, name, axis)}
        wanted = {text for scope, text, _ in readers if scope not in inside and not _enters(scope, op.scope, readers)}
        if len(wanted) > 1 or (op.scope not in inside and not wanted <= {held}):
            return f"makes {name} as {held}, which is read as {' and '.join(sorted(wanted))}"
    return ""


def _enters(scope: str, maker: str, readers: Set[tuple[str, str, bool]]) -> bool:
    """Whether a reader is in a module in which all readers require the same placement of a tensor, and which does not
    make the tensor."""
    for path in itertools.accumulate(scope.split("."), "{}.{}".format):
        ways = {(text, partial) for other, text, partial in readers if f"{other}.".startswith(f"{path}.")}
        if path and len(ways) == 1 and not f"{maker}.".startswith(f"{path}."):
            return True
    return False


def _readers(chunk: Chunk, model: Model, name: str, axis: str) -> Iterator[tuple[str, str, bool]]:
    """For each operator in a stage that reads a tensor: its scope, the placement that it requires, and whether the
    gradient that it produces is P."""
    for reader in model.graph.consumers[name]:
        op = model.graph.operators[reader]
        if reader in chunk.placed and op.is_live:
            placed = chunk.placed[reader][axis]
            is_split = model.legal(reader)[placed] is not None
            for operand, text in zip(op.inputs, placed.inputs, strict=True):
                if operand == name:
                    yield op.scope, text, text == "B" and is_split
