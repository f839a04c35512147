"""The order of the operators: it does not depend on the order of the file, and is the same in equal layers.

A network can be written in any order in which each operator comes after its operands, and exporters and tools write
different ones. But a unit of a pipeline consists of consecutive operators, and two units have the same type only if
their operators are equal one by one. If each of twelve equal layers were written in another order, there would be
twelve types of units, each with a price of its own.

So operators are sorted into an order that follows from the graph alone, not from names or from the file: each operator
comes after its operands, which are computed one after the other. A few ways (`WAYS`) are tried to choose which of
several operands comes first, and which tensors are computed before everything else. The order of the file is used only
if it has fewer unlike operators.
"""

from __future__ import annotations

from collections.abc import Sequence

from ir.blocks import find_units
from ir.build import rebuilt
from ir.cuts import is_heavy
from ir.graph import Graph
from ir.localize import localize

FEWEST_TYPES = 3
"""Types of units of a model of equal layers: one before the layers, the layers, and one after them."""
WAYS = ((True, 6), (False, 6), (True, 1), (False, 2))
"""Each way is a pair. The first value says which operand is computed first: the one that ends the longest chain of
operators (true), or the first one (false). The second one is the least number of products that must read a tensor so
that the tensor is computed before everything else. The memory of an encoder is such a tensor: without this, the encoder
would be written among the layers of its decoder. (A norm feeds three products, or five with gates; a decoder of two
layers reads its memory four times.)

Of 150 exported models only two diffusion transformers have fewer unlike operators in the order of their file than in
the best of these ways."""


def alike_order(graph: Graph) -> Graph:
    """The localized graph in the order with the fewest unlike operators; of several such orders the first."""
    plain = _in_operand_order(graph, is_deepest_first=True)
    best: Graph | None = None
    fewest = 0
    for is_deepest_first, many in WAYS:
        found = localize(_in_operand_order(plain, is_deepest_first=is_deepest_first, many=many))
        blocks = find_units(found)
        # Without repeated units there are few types because there are few cuts: another order may have more.
        if blocks.num_types <= FEWEST_TYPES and blocks.num_blocks:
            return found
        if best is None or _num_unlike(found) < fewest:
            best, fewest = found, _num_unlike(found)
    given = localize(graph)
    return given if best is None or _num_unlike(given) < fewest else best


def _num_unlike(graph: Graph) -> int:
    """Number of unlike operators: those of one unit of each type, summed."""
    blocks = find_units(graph)
    return sum(unit.stop - unit.start for unit in map(blocks.representative, range(blocks.num_types)))


def _in_operand_order(graph: Graph, *, is_deepest_first: bool, many: int | None = None) -> Graph:
    """The graph with each operator after the last of its operands.

    Args:
        graph: the graph. Its order only decides which of several tensors that many products read comes first.
        is_deepest_first: see `WAYS`.
        many: see `WAYS`; None: no tensor is computed before everything else.
    """
    operators = graph.operators
    makers = [[graph.producer[name] for name in op.inputs if name in graph.producer] for op in operators]
    shared = [] if many is None else [i for i in range(len(operators)) if _feeds_many(graph, i, many)]
    results = [graph.producer[name] for name in graph.outputs if name in graph.producer]
    depths = _depths(makers) if is_deepest_first else [0] * len(operators)
    order: list[int] = []
    done = set[int]()
    for root in [*shared, *results]:
        stack = [root]
        while stack:
            index = stack[-1]
            ahead = [maker for maker in makers[index] if maker not in done] if index not in done else []
            if ahead:
                stack.append(max(ahead, key=depths.__getitem__))
                continue
            stack.pop()
            if index not in done:
                done.add(index)
                order.append(index)
    return rebuilt(graph, [operators[index] for index in order], graph.tensors)


def _depths(makers: Sequence[Sequence[int]]) -> list[int]:
    """[operators] number of operators on the longest chain that ends at each, given those that make its operands."""
    depths: list[int] = []
    for ahead in makers:
        depths.append(1 + max((depths[maker] for maker in ahead), default=0))
    return depths


def _feeds_many(graph: Graph, index: int, many: int) -> bool:
    """Whether this number of products reads a result of an operator that depends on the samples."""
    return any(
        graph.tensors[name].batch_dim is not None
        and sum(is_heavy(graph, graph.operators[reader]) for reader in graph.consumers[name]) >= many
        for name in graph.operators[index].outputs
    )
