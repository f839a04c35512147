"""Recognises dense experts that are run once for each choice of the tokens, or on a copy of each token for each choice.

Both give the same sums as experts that are run once on all tokens (`ir.experts.dense`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ir.experts.emit import VIEWS
from ir.experts.routing import Routing, Use
from ir.graph import Graph


def is_by_choice(routing: Routing, uses: Sequence[Use]) -> bool:
    """Whether each expert is run once for each choice of the tokens, on the same tokens with equal results.

    Args:
        routing: the marks behind the router.
        uses: all multiplications of results by weights.
    """
    wanted = {(expert, slot) for expert in range(routing.experts) for slot in range(routing.k)}
    found = {(u.mark.expert, u.mark.slot): u.value for u in uses if u.mark.kind == "gate"}
    is_each = found.keys() == wanted and len(uses) == len(wanted)
    return is_each and all(_is_same(routing, value, found[expert, 0]) for (expert, _), value in found.items())


def _is_same(routing: Routing, one: str, other: str) -> bool:
    """Whether two tensors are computed by equal operators from the same tensors."""
    pairs = [(one, other)]
    while pairs:
        names = pairs.pop()
        fills = {routing.fill(name) for name in names}
        if names[0] == names[1] or (len(fills) == 1 and None not in fills):
            continue
        ops = [op for op in map(routing.graph.maker, names) if op is not None and op.is_live]
        same = {(op.kind, op.attributes, op.outputs.index(name)) for op, name in zip(ops, names, strict=False)}
        if len(ops) < len(names) or len(same) > 1 or len(ops[0].inputs) != len(ops[1].inputs):
            return False
        pairs.extend(zip(ops[0].inputs, ops[1].inputs, strict=True))
    return True


def copied_tokens(graph: Graph, name: str, tokens: int, k: int) -> str:
    """The tokens of which a tensor holds `k` copies each, one behind the other; the tensor itself if of none."""
    op = graph.maker(name)
    while op is not None and op.kind in VIEWS:
        op = graph.maker(op.inputs[0])
    if op is None or op.kind != "Expand":
        return name
    source, result = graph.tensors[op.inputs[0]].shape, graph.tensors[op.outputs[0]].shape
    is_copied = source[-2:-1] == (1,) and result[-2] == k and prod(source[:-1]) == tokens
    return op.inputs[0] if is_copied else name


def weighted_sum(graph: Graph, routing: Routing, at: int) -> tuple[int, str] | None:
    """Finds where the results of copied tokens are weighted and added for each token.

    Args:
        graph: the graph.
        routing: the marks behind the router.
        at: index of the operator that completes the results, `[tokens * k, features]`.

    Returns:
        index of the sum over the choices, and name of the weights; None if there is no such sum.
    """
    name, weights = graph.operators[at].outputs[0], ""
    while len(readers := graph.consumers[name]) == 1:
        op = graph.operators[readers[0]]
        others = [n for n in op.inputs if n != name]
        if op.kind == "ReduceSum" and weights:
            return (readers[0], weights) if routing.is_over_choices(op) else None
        if op.kind == "Mul" and not weights and len(others) == 1:
            if graph.tensors[others[0]].num_elements != routing.tokens * routing.k:
                return None
            weights = others[0]
        elif op.kind not in (*VIEWS, "Cast"):
            return None
        name = op.outputs[0]
    return None
