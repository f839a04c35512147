"""Localization: cheap values that many layers share (masks, rotary tables, position biases) are computed where they are
used.

A mask that is computed once from a data input, and read by every layer, would cross every cut between layers. Instead
the few small operators that compute it are repeated in each *stretch*, a part of the graph between legal cuts.
Parameters among their operands are then tied parameters. Operators whose results only one stretch needs are not
repeated.

A view of parameters that several stretches read, such as the transposed weight of layers that share it, is repeated
too: each pipeline stage with such a layer holds the weight itself, and the gradient is summed over these stages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace

from ir.build import rebuilt
from ir.cuts import find_cuts
from ir.graph import Graph, Operator, Tensor

MAX_COPIES = 20_000
"""Largest number of operators that are added (assumed); a graph that would need more is not changed."""
MAX_FLOPS_SHARE = 1e-3
"""Largest share of the graph's forward FLOPs that the added copies together may have (assumed)."""


def _is_local(graph: Graph, op: Operator, local: Mapping[str, int], gradients: set[str]) -> bool:
    """Whether an operator reads inputs, parameters, constants and `local` values only, without gradients by sample."""
    if not op.is_live or not op.outputs:
        return False
    for name in op.inputs:
        if graph.tensors[name].role == "activation" and name not in local and not graph.is_weight(name):
            return False
    trains = any(n in gradients for n in op.inputs)
    return not (trains and any(graph.tensors[n].batch_dim is not None for n in op.outputs))


def localize(graph: Graph) -> Graph:
    """The graph with shared cheap values computed in each stretch that reads them; see the module."""
    gradients: set[str] = {t.name for t in graph.tensors.values() if t.role == "parameter" and t.is_float}
    local: dict[str, int] = {}
    computed: set[int] = set()
    for i, op in enumerate(graph.operators):
        is_local = _is_local(graph, op, local, gradients)
        if any(n in gradients for n in op.inputs):
            gradients.update(n for n in op.outputs if graph.tensors[n].is_float)
        if is_local:
            computed.add(i)
            local.update(dict.fromkeys(op.outputs, i))
    views = {i for i, op in enumerate(graph.operators) if op.is_view}
    shared = any(len(graph.consumers[name]) > 1 for i in views for name in graph.operators[i].outputs)
    for chain in (computed | views, views) if computed else (views,):
        found = _localized(graph, chain) if computed or shared else None
        if found is not None:
            return found
    return graph


def _localized(graph: Graph, chain: set[int]) -> Graph | None:
    """The graph with some operators repeated in each stretch that reads them; None where none or too many are."""
    local = {name: i for i in chain for name in graph.operators[i].outputs}
    cuts = list(find_cuts(graph, frozenset(local)))
    readers = _readers(graph, chain, local, cuts)
    if readers is None:
        return None
    # The first of the copies of an operator is the operator itself: it repeats no work.
    added = Counter(i for need in readers.values() for i in need)
    added.subtract(added.keys())
    flops = sum(number * graph.operators[i].forward_flops.at(1) for i, number in added.items())
    if len(readers) < 2 or not 0 < added.total() <= MAX_COPIES or flops > MAX_FLOPS_SHARE * graph.forward_flops:
        return None
    return _repeat(graph, chain, local, cuts, readers)


def _stretch(cuts: list[int], index: int) -> int:
    """Number of the stretch between cuts that operator `index` is in."""
    return bisect_left(cuts, index)


def _readers(graph: Graph, chain: set[int], local: dict[str, int], cuts: list[int]) -> dict[int, set[int]] | None:
    """Stretch -> indices of the operators of the chain that it needs; None where those are too many."""
    found: dict[int, set[int]] = {}
    total = 0
    for i, op in enumerate(graph.operators):
        if i in chain:
            continue
        needed = [local[n] for n in op.inputs if n in local]
        if not needed:
            continue
        have = found.setdefault(_stretch(cuts, i), set())
        while needed:
            index = needed.pop()
            if index not in have:
                have.add(index)
                total += 1
                if total > MAX_COPIES + len(chain):
                    return None
                needed += [local[n] for n in graph.operators[index].inputs if n in local]
    return found


def _repeat(
    graph: Graph, chain: set[int], local: dict[str, int], cuts: list[int], readers: dict[int, set[int]]
) -> Graph:
    kept_for_outputs = {local[n] for n in graph.outputs if n in local}
    tensors: dict[str, Tensor] = dict(graph.tensors)
    operators: list[Operator] = []
    seen: dict[int, int] = {}
    done: dict[int, set[int]] = defaultdict(set)
    renamed: dict[int, dict[str, str]] = {}
    unread = chain - set().union(*readers.values(), set())
    for i, op in enumerate(graph.operators):
        if i in chain:
            if i in unread or (i in kept_for_outputs and i not in seen):
                operators.append(op)
                seen[i] = 1
            continue
        if not any(n in local for n in op.inputs):
            operators.append(op)
            continue
        stretch = _stretch(cuts, i)
        names = renamed.setdefault(stretch, {})
        # Views are moved to their readers in any case (`ir.build.arrange`); all others come before their first reader.
        computes = any(n in local and not graph.operators[local[n]].is_view for n in op.inputs)
        for index in sorted(readers[stretch]):
            if index not in done[stretch] and (computes or graph.operators[index].is_view):
                done[stretch].add(index)
                operators.append(_copy(graph.operators[index], seen, index, names, tensors))
        operators.append(op.renamed(names))
    return rebuilt(graph, operators, tensors)


def _copy(
    op: Operator, seen: dict[int, int], index: int, names: dict[str, str], tensors: dict[str, Tensor]
) -> Operator:
    number = seen.get(index, 0)
    seen[index] = number + 1
    if number == 0:
        return op.renamed(names)
    for name in op.outputs:
        names[name] = f"{name}@{number}"
        tensors[names[name]] = replace(tensors[name], name=names[name])
    return op.renamed(names, name=f"{op.name}@{number}")
