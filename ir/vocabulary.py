"""A graph with a padded vocabulary, as in trainers that split it: embeddings, the product with it, and the scores.

The dim of the classes is followed from the losses backwards through the factors of operators. Embedding tables with
the same number of rows are padded too. Units: elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ir.graph import Graph, Operator, Tensor
from ir.loss import class_dim, scores_of_losses
from ir.operators.embedding import look_up_share
from ir.serialize import graph_digest

_Dims = set[tuple[str, int]]
"""Tensor and dim."""


def padded(graph: Graph, multiple: int) -> Graph:
    """The graph with its vocabulary padded to a multiple; the same graph if it has no vocabulary, or one that already
    is a multiple.

    A vocabulary is a dim of classes of a loss with as many classes as some embedding has rows. A graph that merges its
    vocabulary with other dims is not padded, and gets a warning.
    """
    losses = [graph.tensors[name] for name in sorted(scores_of_losses(graph))]
    seeds = {(tensor.name, class_dim(tensor)): tensor.shape[class_dim(tensor)] for tensor in losses if tensor.shape}
    tables = {name: graph.tensors[name].shape[0] for name in _tables(graph)}
    found = graph
    for size in sorted(set(seeds.values()) & set(tables.values())):
        new = math.ceil(size / multiple) * multiple
        dims = {key for key, classes in seeds.items() if classes == size}
        dims |= {(name, 0) for name, rows in tables.items() if rows == size}
        found = found if new == size else _resized(found, dims, size, new)
    return found


def _tables(graph: Graph) -> Iterable[str]:
    """Parameters whose rows are looked up by data."""
    for op in graph:
        is_rows = op.kind == "Gather" and dict(op.attributes).get("axis", 0) == 0
        if is_rows and graph.is_weight(op.inputs[0]) and not op.is_view and not op.is_constant:
            yield op.inputs[0]


def _resized(graph: Graph, dims: _Dims, old: int, new: int) -> Graph:
    """The graph in which some dims of size `old`, and all dims that follow from them, have size `new`."""
    loops = _followed(graph, dims)
    if any(graph.tensors[name].shape[dim] != old for name, dim in dims):
        warning = f"the vocabulary of {old} is merged with other dims, and is not padded to {new}"
        return replace(graph, warnings=(*graph.warnings, warning))
    tensors = dict(graph.tensors)
    for name, dim in dims:
        shape = tensors[name].shape
        tensors[name] = replace(tensors[name], shape=(*shape[:dim], new, *shape[dim + 1 :]))
    operators = tuple(_with_loops(op, loops.get(op.name, set()), old, new) for op in graph)
    looked_up = {name for name in _tables(graph) if (name, 0) in dims}
    operators = tuple(_looked_up(op, tensors) if op.kind == "Gather" and op.inputs[0] in looked_up else op
                      for op in operators)  # fmt: skip
    # The digest stays that of the graph before, since it is the same model.
    return replace(graph, operators=operators, tensors=tensors, sha256=graph.sha256 or graph_digest(graph))


def _followed(graph: Graph, dims: _Dims) -> dict[str, set[int]]:
    """Name of an operator -> its factors of the given dims, or that follow from these; adds such dims to `dims`."""
    loops: dict[str, set[int]] = {}
    size = -1
    while size != len(dims):
        size = len(dims)
        for op in graph:
            places = _places(op)
            inside = {factor for key, factors in places if key in dims for factor in factors}
            if inside:
                loops[op.name] = inside
                dims |= {key for key, factors in places if inside & set(factors)}
    return loops


def _places(op: Operator) -> list[tuple[tuple[str, int], tuple[int, ...]]]:
    """The dims of an operator's operands, each with its factors."""
    sides = ((op.inputs, op.rule.inputs), (op.outputs, op.rule.outputs))
    return [
        ((name, dim), factors)
        for names, rules in sides
        for name, rule in zip(names, rules, strict=False)
        for dim, factors in enumerate(rule)
    ]


def _with_loops(op: Operator, loops: set[int], old: int, new: int) -> Operator:
    """An operator whose factors `loops` have another size."""
    if not loops:
        return op
    factors = tuple(replace(f, size=new) if i in loops else f for i, f in enumerate(op.rule.factors))
    return replace(
        op,
        rule=replace(op.rule, factors=factors),
        forward_flops=op.forward_flops.scaled(new / old),
        backward_flops=op.backward_flops.scaled(new / old),
        attributes=tuple((name, _with_size(name, value, old, new)) for name, value in op.attributes),
    )


def _looked_up(op: Operator, tensors: Mapping[str, Tensor]) -> Operator:
    """A look-up in a longer table: it reads as many rows as before, but the gradient has the size of the table."""
    rows = tensors[op.outputs[0]].num_elements
    return replace(op, traffic=(look_up_share(tensors[op.inputs[0]].num_elements, rows), op.traffic[1]))


def _with_size(name: str, value: Any, old: int, new: int) -> Any:
    """An attribute in which shapes have the new size."""
    if name != "shape" or not isinstance(value, tuple):
        return value
    return tuple(new if size == old else size for size in value)
