"""Builds a graph with many layers from one with a few, by copying a layer under new names (fast, and exact)."""

from __future__ import annotations

from ir.build import make_graph
from ir.graph import Graph, Tensor


def stretch(graph: Graph, prefix: str, last: int, count: int) -> Graph:
    """Repeats the last layer of a stack.

    Args:
        graph: the graph; the scope of operators of layer `i` is `{prefix}.{i}` or begins with `{prefix}.{i}.`.
        prefix: scope of the stack.
        last: index of its last layer, which is copied; within the stack, it may read only the results of the layer
            before it, and parameters.
        count: number of layers of the result, at least `last + 1`.

    Returns:
        the graph with layers `0 ... count - 1`, equal to the graph that would be built with that number of layers.
    """
    if count <= last + 1:
        return graph
    old, before = f"{prefix}.{last}", f"{prefix}.{last - 1}"
    members = [i for i, op in enumerate(graph.operators) if _within(op.scope, old)]
    start, stop = members[0], members[-1] + 1
    layer = graph.operators[start:stop]
    assert len(layer) == len(members)
    touched = dict.fromkeys(name for op in layer for name in (*op.inputs, *op.outputs))
    own = [name for name in touched if _within(name, old)]
    tails = [name[len(old) :] for name in own]
    # Names, without the prefix of the layer, of the tensors that one layer passes to the next.
    crossing = [
        name[len(before) :] for name in touched if graph.tensors[name].role == "activation" and _within(name, before)
    ]
    tensors = dict(graph.tensors)
    templates = [(op, op.name[len(old) :]) for op in layer]
    kept = [graph.tensors[name] for name in own]
    pieces = dict(graph.pieces)
    fused = [(name, piece) for name, piece in graph.pieces.items() if _within(name, old)]
    operators = list(graph.operators[:start])
    renamed: dict[str, str] = {}
    for i in range(last, count):
        here, there = f"{prefix}.{i}", f"{prefix}.{i - 1}"
        renamed = {name: here + tail for name, tail in zip(own, tails, strict=True)}
        renamed |= {before + tail: there + tail for tail in crossing}
        for t in kept:
            name = renamed[t.name]
            tensors[name] = Tensor(name=name, shape=t.shape, dtype=t.dtype, role=t.role, batch_dim=t.batch_dim)
        operators += [
            op.renamed(renamed, name=here + tail, scope=here + op.scope[len(old) :]) for op, tail in templates
        ]
        for name, (source, *rest) in fused:
            pieces[here + name[len(old) :]] = (here + source[len(old) :], *rest)  # type: ignore[assignment]
    operators += [op.renamed(renamed) for op in graph.operators[stop:]]
    return make_graph(operators, tensors, graph.outputs, name=graph.name, warnings=graph.warnings, pieces=pieces)


def _within(name: str, scope: str) -> bool:
    return name.startswith(scope) and (len(name) == len(scope) or name[len(scope)] in "./")
