"""Layers that are alike in the same order: tools that rewrite files write the operators of each layer in an own order.

Units of a pipeline are of one type where their operators are equal one by one, so that a file of twelve equal layers
would have as many types as it has orders. In operand order (each operator behind its operands, the first operand's
first) equal layers are written alike. What many products read, as the memory of an encoder, is computed first, so that
an encoder is not written among the layers of its decoder.
"""

from __future__ import annotations

from dataclasses import replace

from ir.blocks import find_units
from ir.cuts import is_heavy
from ir.graph import Graph
from ir.localize import localize

FEWEST_TYPES = 3
"""Types of units of a model of equal layers: what is before them, they, what is behind them."""
MANY_READERS = 6
"""Least number of products that read what is computed first (assumed): a norm feeds three, or five with gates."""


def alike_order(graph: Graph) -> Graph:
    """The localized graph, with its operators in operand order where fewer of them are unlike then."""
    given = localize(graph)
    if find_units(given).num_types <= FEWEST_TYPES:
        return given
    found = localize(_in_operand_order(graph))
    return found if _num_unlike(found) < _num_unlike(given) else given


def _num_unlike(graph: Graph) -> int:
    """Number of operators of one unit of each type."""
    blocks = find_units(graph)
    return sum(unit.stop - unit.start for unit in map(blocks.representative, range(blocks.num_types)))


def _in_operand_order(graph: Graph) -> Graph:
    """The graph with each operator behind the last of its operands; constants are first, what nothing reads is last."""
    operators = graph.operators
    constants = [index for index, op in enumerate(operators) if op.is_constant]
    many = [index for index, op in enumerate(operators) if any(_feeds_many(graph, name) for name in op.outputs)]
    last = [graph.producer[name] for name in graph.outputs if name in graph.producer]
    order: list[int] = []
    done = set[int]()
    for root in [*constants, *many, *last, *range(len(operators))]:
        stack = [root]
        while stack:
            index = stack[-1]
            makers = (graph.producer[name] for name in operators[index].inputs if name in graph.producer)
            ahead = None if index in done else next((maker for maker in makers if maker not in done), None)
            if ahead is not None:
                stack.append(ahead)
                continue
            stack.pop()
            if index not in done:
                done.add(index)
                order.append(index)
    return replace(graph, operators=tuple(operators[index] for index in order))


def _feeds_many(graph: Graph, name: str) -> bool:
    """Whether many products read an activation that depends on the samples."""
    if graph.tensors[name].batch_dim is None:
        return False
    return sum(is_heavy(graph, graph.operators[reader]) for reader in graph.consumers[name]) >= MANY_READERS
