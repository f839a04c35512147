"""The operators around the softmax of an attention: from the product of the scores to the product with the values."""

from __future__ import annotations

from ir.graph import Graph
from ir.group_kinds import PRODUCTS, SCORES, WEIGHTS

MAX_MEMBERS = 48
"""Largest number of operators in a fused group (assumed)."""


def maker_of_data(graph: Graph, name: str) -> int | None:
    """Index of the live operator that writes a tensor from data."""
    index = graph.producer.get(name)
    return index if index is not None and graph.operators[index].is_live else None


def is_product_of_data(graph: Graph, index: int) -> bool:
    """Whether an operator multiplies two different tensors that are computed from data."""
    op = graph.operators[index]
    made = [n for n in op.inputs if maker_of_data(graph, n) is not None and not graph.is_weight(n)]
    return op.kind in PRODUCTS and len(op.inputs) == 2 and len(set(made)) == 2


def scores_before(graph: Graph, softmax: int) -> tuple[int, set[int]] | None:
    """The product from which the operand of a softmax comes, and the operators between; None if there are several
    products.

    Args:
        graph: in canonical order.
        softmax: index of the softmax.
    """
    products: set[int] = set()
    leads: dict[int, bool] = {}

    def walk(name: str, depth: int) -> bool:
        index = maker_of_data(graph, name)
        if index is None or depth > MAX_MEMBERS:
            return False
        if is_product_of_data(graph, index):
            products.add(index)
            return True
        if graph.operators[index].kind not in SCORES:
            return False
        if index not in leads:
            leads[index] = False
            hits = [walk(n, depth + 1) for n in graph.operators[index].inputs]
            leads[index] = any(hits)
        return leads[index]

    walk(graph.operators[softmax].inputs[0], 0)
    return (products.pop(), {i for i, hit in leads.items() if hit}) if len(products) == 1 else None


def weights_behind(graph: Graph, softmax: int) -> tuple[int, set[int]] | None:
    """The product that uses the result of a softmax, and the operators between; None if there are several products.

    Args:
        graph: in canonical order.
        softmax: index of the softmax.
    """
    products: set[int] = set()
    between: set[int] = set()
    stack = [softmax]
    while stack:
        for name in graph.operators[stack.pop()].outputs:
            if name in graph.outputs:
                return None
            for index in graph.consumers[name]:
                if is_product_of_data(graph, index):
                    products.add(index)
                elif graph.operators[index].kind in WEIGHTS and len(between) < MAX_MEMBERS:
                    if index not in between:
                        between.add(index)
                        stack.append(index)
                else:
                    return None
    return (products.pop(), between) if len(products) == 1 else None
