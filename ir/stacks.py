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
    layers. A layer looks up its part by its number (`Gather`), or by a slice or a split that keeps the dim of layers.
    """
    places = {name: found for name in graph.tensors if (found := _layers(graph, name))}
    lengths = {len(found) for name, found in places.items() if len(graph.tensors[name].shape) > 2}
    rewrite = Rewrite(graph)
    for name, found in places.items():
        if len(found) not in lengths:
            continue
        stack = graph.tensors[name]
        for layer, (index, output) in found.items():
            op, fresh = graph.operators[index], f"{name}#{layer}"
            rewrite.tensors[fresh] = replace(stack, name=fresh, shape=(1, *stack.shape[1:]))
            rewrite.pieces[fresh] = (name, 0, layer, layer + 1)
            kind, attributes = ("Squeeze", {"axes": (0,)}) if op.kind == "Gather" else ("Identity", {})
            rewrite.make(
                index,
                kind,
                op.name if layer == 0 or op.kind != "Split" else f"{op.name}_{layer}",
                [fresh],
                output,
                attributes,
                is_view=True,
            )
    return rewrite.finish()


def _layers(graph: Graph, name: str) -> dict[int, tuple[int, str]]:
    """Layer -> index of the operator that looks up its weights, and name of its result there; empty if the tensor is
    not a stack whose layers are all read."""
    tensor, readers = graph.tensors[name], graph.consumers.get(name, ())
    if tensor.role != "parameter" or len(tensor.shape) < 2 or name in graph.pieces or name in graph.outputs:
        return {}
    found = [(layer, (index, output)) for index in readers for layer, output in _parts(graph, index, name)]
    is_whole = sorted(layer for layer, _ in found) == list(range(tensor.shape[0])) and len(found) >= FEWEST
    return dict(found) if is_whole else {}


def _parts(graph: Graph, index: int, name: str) -> list[tuple[int, str]]:
    """The layers that an operator looks up in a stack, each with the name of its result; -1 for an unknown one."""
    op, num = graph.operators[index], graph.tensors[name].shape[0]
    attributes = dict(op.attributes)
    if op.inputs != (name,):
        return [(-1, "")]
    place = attributes.get("indices")
    if op.kind == "Gather" and isinstance(place, int) and not attributes.get("axis", 0):
        return [(place % num, op.outputs[0])]
    if op.kind == "Slice" and attributes["axes"] == (0,) and attributes.get("steps", (1,)) == (1,):
        start = attributes["starts"][0] % num
        return [(start if graph.tensors[op.outputs[0]].shape[0] == 1 else -1, op.outputs[0])]
    if op.kind == "Split" and not attributes.get("axis", 0) and set(attributes["split"]) == {1}:
        return list(enumerate(op.outputs))
    return [(-1, "")]
