"""Adapters: two products with thin matrices, whose result is added to that of a layer with the same input (LoRA, arXiv
2106.09685).

If ranks split the layer, they split an adapter only along dims that are not thin: the outputs of its second product if
the outputs of the layer are split, and the inputs of its first product if the inputs of the layer are split.
"""

from __future__ import annotations

from collections.abc import Mapping

from ir.graph import Graph, Operator, once_per_graph

CARRIED = frozenset({"Add", "Cast", "Div", "Dropout", "Identity", "Mul"})
"""Kinds of operators for a scale, a bias, a dropout or a conversion of types, in which one operand depends on data."""


@once_per_graph
def adapters(graph: Graph) -> Mapping[str, str]:
    """The name of the second product of each adapter -> that of its first one."""
    found: dict[str, str] = {}
    for op in graph.operators:
        operands = _data(graph, op) if op.kind == "Add" else []
        if len(operands) == 2:
            products = [_made_by(graph, name) for name in operands]
            for second, layer in (products, products[::-1]):
                first = None if second is None else _made_by(graph, _data(graph, second)[0])
                if (
                    second is not None
                    and layer is not None
                    and first is not None
                    and _adapts(graph, first, second, layer)
                ):
                    found[second.name] = first.name
    return found


def _adapts(graph: Graph, first: Operator, second: Operator, layer: Operator) -> bool:
    """Whether two products are an adapter of a layer: they read the same input, and the tensor between them is thin."""
    origins = [_origin(graph, _data(graph, op)[0]) for op in (first, layer)]
    widths = [graph.tensors[name].shape[-1] for name in (_data(graph, first)[0], first.outputs[0], second.outputs[0])]
    return origins[0] == origins[1] and layer is not first and widths[1] < min(widths[0], widths[2])


def _data(graph: Graph, op: Operator) -> list[str]:
    """The operands that depend on data."""
    return [
        name for name in op.inputs if graph.tensors[name].role in ("activation", "input") and not _is_view(graph, name)
    ]


def _is_view(graph: Graph, name: str) -> bool:
    maker = graph.maker(name)
    return maker is not None and (maker.is_view or maker.is_constant)


def _origin(graph: Graph, name: str) -> str:
    """The tensor from which a tensor is made by operators of `CARRIED` alone."""
    maker = graph.maker(name)
    while maker is not None and maker.kind in CARRIED and len(operands := _data(graph, maker)) == 1:
        (name,) = operands
        maker = graph.maker(name)
    return name


def _made_by(graph: Graph, name: str) -> Operator | None:
    """The product with a weight that makes a tensor, with nothing but operators of `CARRIED` between."""
    maker = graph.maker(_origin(graph, name))
    is_product = maker is not None and maker.kind in ("MatMul", "Gemm") and len(_data(graph, maker)) == 1
    return maker if is_product else None
