"""Gives each attention the product of its own scores.

Exporters write equal products once. Two attentions with the same queries and keys, such as those of the two halves of
the values in differential attention (https://arxiv.org/abs/2410.05258), then read one product of scores. The kernel of
an attention computes its scores itself, so that each one has a product again.
"""

from __future__ import annotations

from dataclasses import replace

from ir.graph import Graph
from ir.rewrite import Rewrite
from ir.score_chains import scores_before, weights_behind


def with_own_scores(graph: Graph) -> Graph:
    """The graph in which no two attentions share the product of their scores, or what is between it and the softmax."""
    rewrite = Rewrite(graph)
    uses: dict[int, int] = {}
    for anchor, softmax in enumerate(graph.operators):
        if softmax.kind != "Softmax" or not softmax.is_live:
            continue
        before = scores_before(graph, anchor)
        if before is None or weights_behind(graph, anchor) is None:
            continue
        path = [*sorted((before[0], *before[1])), anchor]
        shared, own = [i for i in path if i in uses], [i for i in path if i not in uses]
        if shared and shared[-1] < own[0]:
            _copy(rewrite, shared, own, uses[shared[0]])
        for index in path:
            uses[index] = uses.get(index, 0) + 1
    return rewrite.finish()


def _copy(rewrite: Rewrite, shared: list[int], own: list[int], number: int) -> None:
    """Repeats operators in front of others, which then read the copies.

    Args:
        rewrite: takes the new operators.
        shared: indices of the operators that are repeated.
        own: indices of the operators that read the copies, the first one first.
        number: how many other attentions read the shared operators.
    """
    graph, names = rewrite.graph, dict[str, str]()
    copies = []
    for index in shared:
        op = graph.operators[index]
        for name in op.outputs:
            names[name] = f"{name}@{number}"
            rewrite.tensors[names[name]] = replace(graph.tensors[name], name=names[name])
        copies.append(op.renamed(names, name=f"{op.name}@{number}"))
    for index in own:
        rewrite.made[index] = [*copies, graph.operators[index].renamed(names)]
        copies = []
