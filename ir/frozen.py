"""Frozen parameters: the tensors of a graph that are not trained, and the work that is not needed for them.

A frozen parameter is in memory and is read like any other one. It needs no gradient, and no activations are saved for
this gradient alone. Operators at or before which nothing is trained have no backward pass. Both follow from
`ir.operators`: each operator is made again there, given which operands need a gradient now.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ir.graph import Amount, Graph, Operator, Tensor
from ir.operators import BakedBatch, MissingBatch, Unsupported, make_operator

Fresh = tuple[Amount, float, tuple[str, ...]]
"""FLOPs of a backward pass, bytes that it moves in multiples of those of all operands, and tensors saved for it."""


def names_in_file(graph: Graph, parameter: str) -> tuple[str, ...]:
    """The names of a parameter of the graph in its file: for a piece the name of the whole parameter; for the parameter
    of all experts, the names of those of each expert."""
    if parameter in graph.pieces:
        return names_in_file(graph, graph.pieces[parameter][0])
    return graph.expert_names.get(parameter, (parameter,))


def freeze(graph: Graph, names: Collection[str]) -> Graph:
    """The graph with some parameters frozen, beside those that are frozen already.

    Args:
        graph: any graph. Costs that were stated for its operators are assumed to be those of a fully trained model.
        names: names of parameters in the file; other names are ignored. The parameter of all experts of a layer is
            frozen if the parameters of all of its experts are.
    """
    names = set(names)
    found = {t.name for t in graph.parameters if not t.frozen and names.issuperset(names_in_file(graph, t.name))}
    if not found:
        return graph
    tensors = {name: replace(t, frozen=True) if name in found else t for name, t in graph.tensors.items()}
    marked = replace(graph, tensors=tensors)
    known: dict[Any, Fresh | None] = {}
    operators = tuple(_fitted(graph, marked, op, known) for op in graph.operators)
    return replace(marked, operators=operators)


def backward_share(graph: Graph, op: Operator) -> float:
    """The FLOPs of the backward pass over those of the forward pass, for an operator with stated costs.

    This is 2 if inputs and weights need gradients, which have as many FLOPs each.
    """
    if not graph.has_frozen:
        return 2.0
    if not graph.runs_backward(op):
        return 0.0
    weights = [name for name in op.inputs if graph.is_weight(name)]
    return 1.0 if weights and not any(name in graph.trained for name in weights) else 2.0


def _fitted(before: Graph, graph: Graph, op: Operator, known: dict[Any, Fresh | None]) -> Operator:
    """An operator with the part of its backward pass that is still needed.

    Args:
        before: the graph as it was.
        graph: the graph with further frozen parameters.
        known: results of operators that are alike.
    """
    needed, needs = ([n in g.trained and g.tensors[n].is_float for n in op.inputs] for g in (before, graph))
    if needed == needs or not op.is_live:
        return op
    if op.measured_s is not None or op.stated_bytes is not None or not any(needs):
        return _scaled(op, backward_share(graph, op) / 2.0)
    tensors = [graph.tensors[n] for n in op.inputs]
    key = (op.kind, op.attributes, op.opset, len(op.outputs), tuple(needs), *map(_shape, tensors))
    if key not in known:
        # An operator with stated FLOPs or padded dims cannot be made again: the table would give another one.
        as_it_was = [before.tensors[n] for n in op.inputs]
        known[key] = _made(op, tensors, needs) if _made(op, as_it_was, needed) == _own(op) else None
    fresh = known[key]
    if fresh is None:
        return _scaled(op, backward_share(graph, op) / 2.0)
    flops, traffic, saved = fresh
    operands = {str(i): name for i, name in enumerate(op.inputs)} | {f":{i}": name for i, name in enumerate(op.outputs)}
    return replace(
        op,
        backward_flops=flops,
        traffic=(op.traffic[0], traffic),
        saved=tuple(dict.fromkeys(operands[name] for name in saved)),
    )


def _shape(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.role, tensor.batch_dim, tensor.frozen


def _own(op: Operator) -> Fresh:
    """The backward pass of an operator as it is, with its operands by number."""
    numbers: Mapping[str, str] = {name: f":{i}" for i, name in enumerate(op.outputs)}
    numbers = {**numbers, **{name: str(i) for i, name in reversed([*enumerate(op.inputs)])}}
    return op.backward_flops, op.traffic[1], tuple(numbers[name] for name in op.saved)


def _made(op: Operator, tensors: Sequence[Tensor], needs: Sequence[bool]) -> Fresh | None:
    """The backward pass of an operator by the table of kinds, given which operands need a gradient; None if the table
    cannot express it."""
    try:
        made = make_operator(
            op.kind,
            name="",
            inputs=[replace(tensor, name=str(i)) for i, tensor in enumerate(tensors)],
            outputs=[f":{i}" for i in range(len(op.outputs))],
            attributes=dict(op.attributes),
            needs_gradient=needs,
            opset=op.opset,
        ).operator
    except (BakedBatch, MissingBatch, Unsupported):
        return None
    return _own(made)


def _scaled(op: Operator, share: float) -> Operator:
    """An operator with a part of its backward pass; without any, it saves nothing."""
    measured = op.measured_s
    return replace(
        op,
        backward_flops=op.backward_flops.scaled(share),
        measured_backward_s=None if measured is None else share * measured[1],
        traffic=(op.traffic[0], op.traffic[1] if share else 0.0),
        saved=op.saved if share else (),
    )
