"""Stacks: the weights of all layers in one tensor, `[layers, ...]`, are divided into those of each layer.

JAX's `scan` over layers stores weights like this, and each layer looks up its own. A single parameter would be tied
across all stages of a pipeline, and no two layers would be equal.
"""

from __future__ import annotations

from dataclasses import replace

from ir.graph import Graph
from ir.rewrite import Rewrite

FEWEST = 2
"""Least number of layers of a stack."""


def unstacked(graph: Graph) -> Graph:
    """The graph with every stack divided; `Graph.pieces` lists the origin of each weight.

    Stacks are tensors of matrices of which each layer looks up one, and tensors of vectors for the same number of
    layers.
    """
    places = {name: found for name in graph.tensors if (found := _layers(graph, name))}
    lengths = {len(found) for name, found in places.items() if len(graph.tensors[name].shape) > 2}
    rewrite = Rewrite(graph)
    for name, found in places.items():
        if len(found) not in lengths:
            continue
        stack = graph.tensors[name]
        for layer, index in found.items():
            op, fresh = graph.operators[index], f"{name}#{layer}"
            rewrite.tensors[fresh] = replace(stack, name=fresh, shape=(1, *stack.shape[1:]))
            rewrite.pieces[fresh] = (name, 0, layer, layer + 1)
            rewrite.make(index, "Squeeze", op.name, [fresh], op.outputs[0], {"axes": (0,)}, is_view=True)
    return rewrite.finish()


def _layers(graph: Graph, name: str) -> dict[int, int]:
    """Layer -> index of the operator that looks up its weights; empty if the tensor is not a stack whose layers are all
    read."""
    tensor, readers = graph.tensors[name], graph.consumers.get(name, ())
    if tensor.role != "parameter" or len(tensor.shape) < 2 or name in graph.pieces or name in graph.outputs:
        return {}
    found: dict[int, int] = {}
    for index in readers:
        op = graph.operators[index]
        attributes = dict(op.attributes)
        place = attributes.get("indices")
        if op.kind != "Gather" or not isinstance(place, int) or attributes.get("axis", 0) or op.inputs != (name,):
            return {}
        found[place % tensor.shape[0]] = index
    is_whole = len(readers) == len(found) == tensor.shape[0] >= FEWEST
    return found if is_whole else {}
