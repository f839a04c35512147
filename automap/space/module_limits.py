"""Limits of trainers that shard whole modules: placements may change only at the inputs and outputs of modules.

A layer is a module with weights of its own: a linear layer, an embedding or a norm. Collectives run at the inputs and
outputs of layers, and at the input of a module if all of its readers need the same placement. All other operators are
code of the user, which runs on the local tensors of each rank. `automap.runtime.trainer` checks the same with the
PyTorch module, and reports the parts of a plan that it cannot run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from automap.arrays import Ints
from automap.space.space import PlanSpace
from ir.blocks import Unit
from ir.factors import BROADCAST, PARTIAL, Placement, Signature
from ir.graph import Graph, Operator

MOST_DIMS = 2
"""Largest number of dims of a weight of a linear layer, an embedding or a norm."""
CONVOLUTIONS = ("Conv", "ConvTranspose", "DeformConv")
"""Kinds of convolutions: Megatron's pattern splits products and look-ups alone."""
LINEAR = ("MatMul", "Gemm", "Gather", "Add")
"""Kinds of operators of linear layers and embeddings that read a weight or a bias."""
_Reader = tuple[str, tuple[Placement, Placement]]
"""The scope of an operator, and the placements of a tensor that it reads and of the gradient that it produces."""


def finer_than_modules(space: PlanSpace, column: Ints, grain: str) -> str:
    """The reason why a trainer of whole modules cannot run some signatures on one axis; empty if it can run all.

    Args:
        space: the plan space of the model.
        column: [operator rows] signatures.
        grain: what it splits, see `Target.grain`.
    """
    graph = space.problem.graph
    chosen = dict(chosen_signatures(space, column))
    layers = layers_of(graph, grain)
    for op, signature in chosen.values():
        if grain == "linear" and splits_norm(graph, op, signature):
            return f"{graph.place(op)} is in no linear layer or embedding, and its weights would be split"
        if not can_run(graph, op, signature, layers):
            what = "is in no linear layer, embedding or norm, and would exchange or sum up data of ranks"
            return f"{graph.place(op)} {what}"
    for name in graph.tensors:
        if not agrees(graph, name, chosen, layers, grain):
            maker = graph.maker(name)
            made = f"the result of {graph.place(maker)}" if maker is not None else name
            if _is_constant(graph, name):
                return f"code between layers would read a part of {made}, which it makes as a whole on every rank"
            return f"code between layers would read {made} in several ways"
    return ""


def splits_norm(graph: Graph, op: Operator, signature: Signature) -> bool:
    """Whether weights are split of another operator than those of linear layers and embeddings."""
    operands = zip(op.inputs, signature.inputs, strict=True)
    return op.kind not in LINEAR and any(place >= 0 and any(weights_behind(graph, name)) for name, place in operands)


def is_whole(signature: Signature) -> bool:
    """Whether every rank has all operands and results whole."""
    return all(placement == BROADCAST for placement in (*signature.inputs, *signature.outputs))


def cuts_between_modules(graph: Graph, units: Sequence[Unit]) -> bool:
    """Whether each layer has its operators in one unit, so that no two stages share a layer.

    A network may call a layer several times. The position biases of T5, for example, are those of one layer for all.
    """
    layers, home = layers_of(graph), dict[tuple[str, str], int]()
    for number, unit in enumerate(units):
        for op in graph.operators[unit.start : unit.stop]:
            for operand in op.inputs if op.is_live and op.scope in layers else ():
                for name in weights_behind(graph, operand):
                    if home.setdefault((op.scope, name), number) != number:
                        return False
    return True


def recomputes_units(graph: Graph, units: Sequence[Unit]) -> bool:
    """Whether each unit consists of whole modules, so that it can be recomputed without the others.

    Operators that save no activations need not be recomputed, and the loss can be recomputed alone.
    """
    for unit in units:
        others = {
            path
            for number, op in enumerate(graph.operators)
            if op.is_live and not unit.start <= number < unit.stop
            for path in _paths(op.scope)
        }
        for op in graph.operators[unit.start : unit.stop]:
            # Operators outside of modules are never recomputed (`Evaluator.masks`).
            if op.is_live and op.scope and op.scope in others and graph.keeps_activations(op):
                return False
    return True


def recomputes_cores(space: PlanSpace) -> bool:
    """Whether the core of attention is code of a module in one unit, so that it can be recomputed without the module's
    layers."""
    graph, tables, units = space.problem.graph, space.evaluator.tables, space.linkage.blocks.units
    layers = layers_of(graph)
    units_of: dict[str, set[int]] = {}
    for number, unit in enumerate(units):
        for op in graph.operators[unit.start : unit.stop]:
            for path in _paths(op.scope) if op.is_live else ():
                units_of.setdefault(path, set()).add(number)
    for unit in units:
        core = tables.core[tables.rows(unit.type).start :]
        for offset, op in enumerate(graph.operators[unit.start : unit.stop]):
            if core[offset] and op.is_live and (op.scope in {*layers, ""} or len(units_of[op.scope]) > 1):
                return False
    return True


def _paths(scope: str) -> Iterator[str]:
    """The paths of a module and of all modules around it."""
    parts = scope.split(".")
    return (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))


def chosen_signatures(space: PlanSpace, column: Ints) -> Iterator[tuple[str, tuple[Operator, Signature]]]:
    """Every operator of the model with its signature, by name."""
    spans = space.evaluator.tables.spans
    for unit in space.linkage.blocks.units:
        for offset, index in enumerate(range(unit.start, unit.stop)):
            op = space.problem.graph.operators[index]
            if op.is_live:
                number = column[int(spans[unit.type]) + offset]
                yield op.name, (op, space.linkage.types[unit.type].signatures[offset][number])


def layers_of(graph: Graph, grain: str = "layers") -> set[str]:
    """Scopes whose operators read a weight and perhaps a bias, none with more than `MOST_DIMS` dims.

    The names of weights are not used, since a weight that several layers share has the name from one of them.

    Args:
        graph: the graph.
        grain: what a trainer splits, see `Target.grain`. With `linear`, norms are code between layers.
    """
    most: dict[str, int] = {}
    for op in graph.operators:
        for operand in op.inputs if op.is_live else ():
            for name in weights_behind(graph, operand):
                named = name.endswith((".weight", ".bias"))
                dims = len(graph.tensors[operand].shape) if named else MOST_DIMS + 1
                is_norm = grain == "linear" and op.kind not in LINEAR
                most[op.scope] = max(most.get(op.scope, 0), MOST_DIMS + 1 if is_norm else dims)
    return {scope for scope, dims in most.items() if dims <= MOST_DIMS}


def can_run(graph: Graph, op: Operator, signature: Signature, layers: set[str]) -> bool:
    """Whether a trainer of whole modules can run an operator with a signature."""
    is_loss = op.outputs[0] == graph.outputs[-1]
    if is_loss or is_whole(signature):
        return True
    if op.scope in layers:
        return True
    if signature.factor is not None and op.rule.factors[signature.factor].collective is not None:
        return False
    if PARTIAL in (*signature.inputs, *signature.outputs):
        return False
    operands = zip(op.inputs, signature.inputs, signature.input_gradients, strict=True)
    return all(
        name not in graph.differentiable
        or (gradient != PARTIAL and not (placement >= 0 and any(weights_behind(graph, name))))
        for name, placement, gradient in operands
    )


def agrees(
    graph: Graph, name: str, chosen: dict[str, tuple[Operator, Signature]], layers: set[str], grain: str
) -> bool:
    """Whether code outside of layers requires a tensor in the placement that it has there.

    The placement may change at the input of a module that reads the tensor in one placement alone and does not make it;
    with the grain `linear`, at those of linear layers and embeddings alone.
    """
    maker = graph.maker(name)
    if maker is not None and maker.is_constant:
        if grain == "layers" and _has_own_size(graph, name, maker, chosen):
            return True
        # Code makes it from sizes and numbers alone, and so as a whole, for instance the ALiBi of all heads.
        maker = None
    if graph.tensors[name].role == "parameter" or (maker is not None and maker.name not in chosen):
        return True
    held: Placement | None = BROADCAST
    if maker is not None:
        signature = chosen[maker.name][1]
        # The output of a layer is converted to the placement that the code requires.
        held = None if maker.scope in layers else signature.outputs[maker.outputs.index(name)]
    readers: list[_Reader] = []
    for index in graph.consumers[name]:
        if graph.operators[index].name in chosen:
            op, signature = chosen[graph.operators[index].name]
            slots = [slot for slot, operand in enumerate(op.inputs) if operand == name]
            # With the grain `linear`, a layer that is not split is called as it is.
            scope = "" if grain == "linear" and is_whole(signature) else op.scope
            readers += [(scope, (signature.inputs[slot], signature.input_gradients[slot])) for slot in slots]
    if maker is None or grain == "linear":
        around = [(scope, wanted) for scope, wanted in readers if scope not in layers]
    else:
        around = [(scope, wanted) for scope, wanted in _around(readers, maker.scope) if scope not in layers]
    wanted = {placement for _, (placement, _) in around}
    return len(wanted) <= 1 and (held is None or wanted <= {held})


def placements_of(op: Operator, signature: Signature, name: str) -> list[Placement]:
    """The placements in which an operator reads a tensor."""
    return [place for operand, place in zip(op.inputs, signature.inputs, strict=True) if operand == name]


def _has_own_size(graph: Graph, name: str, maker: Operator, chosen: dict[str, tuple[Operator, Signature]]) -> bool:
    """Whether code makes a tensor in the size of the parts that all of its readers need: its module splits a dim of
    this size, and a trainer of whole modules changes numbers of heads and the like there to those of one rank."""
    readers = [chosen[op.name] for n in graph.consumers[name] if (op := graph.operators[n]).name in chosen]
    wanted = {place for op, signature in readers for place in placements_of(op, signature, name)}
    (dim,) = wanted if len(wanted) == 1 else (BROADCAST,)
    return (
        dim >= 0
        and graph.repeats(name, dim)
        and any(
            graph.tensors[made].shape[place] == graph.tensors[name].shape[dim]
            for op, signature in chosen.values()
            if op.scope == maker.scope
            for made, place in zip(op.outputs, signature.outputs, strict=True)
            if place >= 0 and place != graph.tensors[made].batch_dim
        )
    )


def _around(readers: Sequence[_Reader], maker: str, depth: int = 1) -> Iterator[_Reader]:
    """The readers of a tensor outside of modules at whose inputs its placement may change, see `_agree`.

    Args:
        readers: scopes with the placements of the tensor and its gradient.
        maker: the scope in which it is made.
        depth: of the modules around the readers.
    """
    inside: dict[str, list[_Reader]] = {}
    for scope, wanted in readers:
        parts = scope.split(".") if scope else []
        if len(parts) < depth:
            yield scope, wanted
        else:
            inside.setdefault(".".join(parts[:depth]), []).append((scope, wanted))
    for path, some in inside.items():
        if f"{maker}.".startswith(f"{path}.") or len({wanted for _, wanted in some}) > 1:
            yield from _around(some, maker, depth + 1)


def _is_constant(graph: Graph, name: str) -> bool:
    maker, tensor = graph.maker(name), graph.tensors[name]
    if maker is None:
        return tensor.role in ("constant", "buffer") or not tensor.is_float
    return maker.is_constant


def weights_behind(graph: Graph, name: str) -> Iterator[str]:
    """The parameters that a tensor is a view of."""
    maker = graph.maker(name)
    if graph.tensors[name].role == "parameter":
        yield graph.pieces[name][0] if name in graph.pieces else name
    elif maker is not None and maker.is_view:
        for operand in maker.inputs:
            yield from weights_behind(graph, operand)
