"""Cuts: the places where a graph may be divided between the stages of a pipeline, and the tensors that cross there.

A cut after an operator is legal if exactly one tensor that depends on the samples crosses it, the *boundary*. Tensors
that depend on parameters only (views), buffers, constants and data inputs are available in all stages and do not count.
A tensor that many later pieces read (the memory of an encoder, which every decoder layer reads) is *carried*: it may
cross cuts beside the boundary.

If a large part of a model has no such cut, several tensors may cross: the skips of a U-Net, the last two cells of
NASNet, the branches of HRNet, the other one of two towers. The boundary is then the tensor that is made last.

No cut is inside a fused group (`ir.groups`), since a kernel runs as a whole. In a model whose attention reads the data
input directly, no other rule would keep queries, keys and values together. A cut between an activation and its gate is
legal, because a whole tower may be between the two.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ir.graph import Graph, Operator, once_per_graph
from ir.groups import fused_groups
from ir.operators.measured import LAYER

MIN_CARRIED_PIECES = 3
"""Least number of pieces with heavy operators that read a carried tensor. A residual has two: where its branch begins
and where it ends."""
MAX_CARRIED = 8
"""Largest number of candidates that are tried, those with most readers first (assumed)."""
LOSSES = {"SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss", "MeanSquaredErrorLoss"}
MIN_SHARE = 1 / 16
"""Least share of the forward FLOPs of the part of a model around a cut with several tensors that has no better cut.
Chosen so that AmoebaNet-D can be cut between its first cells, as in torchgpipe's published pipelines; with 1/8, 1/12
and 1/14 it cannot. Blocks of most models have a smaller share."""
MIN_HEAVY = 8
"""Least number of heavy operators in this part (assumed). Each half of a layer without adapters has fewer."""
MAX_CROSSING = 64
"""Largest number of tensors that may cross a cut (assumed)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """The tensors that cross between two operators."""

    boundary: str
    """Name of the tensor that the units after the cut continue from."""
    beside: tuple[str, ...] = ()
    """Names of the other tensors that cross, in the order in which they are made."""


def find_cuts(graph: Graph, ignored: frozenset[str] = frozenset(), *, several: bool = True) -> Mapping[int, Cut]:
    """All cuts of a graph, see the module. Takes linear time, except for the search of carried tensors.

    Args:
        graph: in canonical order.
        ignored: names of tensors that do not count.
        several: whether several tensors may cross besides carried ones.

    Returns:
        Index of an operator -> the cut after it. Those with the default arguments are found once and kept with the
        graph.
    """
    return _found(graph, ignored, several=several) if ignored or not several else _all(graph)


@once_per_graph
def _all(graph: Graph) -> Mapping[int, Cut]:
    return _found(graph, frozenset(), several=True)


def _found(graph: Graph, ignored: frozenset[str], *, several: bool) -> Mapping[int, Cut]:
    carried = carried_tensors(graph, ignored)
    alone = legal_cuts(graph, ignored)
    boundaries = {**legal_cuts(graph, carried | ignored), **alone} if carried else alone
    if several:
        boundaries.update(_further_cuts(graph, boundaries, ignored))
    crossing = _crossing(graph, boundaries, ignored)
    return {
        index: Cut(boundary=name, beside=tuple(one for one in crossing[index] if one != name))
        for index, name in sorted(boundaries.items())
    }


@once_per_graph
def _inside_kernels(graph: Graph) -> tuple[int, ...]:
    """[operators] number of fused groups without gates that have members both up to the operator and after it."""
    change = [0] * len(graph.operators)
    for group in (each for each in fused_groups(graph) if each.kind != "activation"):
        change[group.members[0]] += 1
        change[group.members[-1]] -= 1
    return tuple(itertools.accumulate(change))


def legal_cuts(graph: Graph, ignored: frozenset[str] = frozenset()) -> dict[int, str]:
    """The legal cuts of a graph.

    Args:
        graph: in canonical order.
        ignored: names of tensors that do not count.

    Returns:
        index of an operator -> name of the tensor that alone crosses the cut after it.
    """
    num = len(graph.operators)
    change = [0] * (num + 1)
    total = [0] * (num + 1)
    names: list[str] = []
    for i, op in enumerate(graph.operators):
        if not op.is_live:
            continue
        for name in op.outputs:
            readers = graph.consumers[name]
            if not readers or name in ignored:
                continue
            names.append(name)
            change[i] += 1
            change[readers[-1]] -= 1
            total[i] += len(names)
            total[readers[-1]] -= len(names)
    cuts: dict[int, str] = {}
    inside = _inside_kernels(graph)
    count = number = 0
    for i in range(num):
        count += change[i]
        number += total[i]
        # Views come directly before their first consumer, so there is no cut after a view.
        if count == 1 and not inside[i] and not graph.operators[i].is_view:
            name = names[number - 1]
            if graph.tensors[name].batch_dim is not None:
                cuts[i] = name
    return cuts


def carried_tensors(graph: Graph, ignored: frozenset[str] = frozenset()) -> frozenset[str]:
    """Names of the tensors that may cross cuts beside the boundary; see the module.

    Args:
        graph: in canonical order.
        ignored: names of tensors that do not count at cuts.
    """
    producer, consumers = graph.producer, graph.consumers
    candidates = [
        name
        for name, tensor in graph.tensors.items()
        if len(consumers[name]) >= MIN_CARRIED_PIECES
        and tensor.is_float
        and tensor.batch_dim is not None
        and name in producer
        and 8 * (consumers[name][-1] - producer[name]) > len(graph.operators)
    ]
    candidates.sort(key=lambda n: (-len(consumers[n]), producer[n]))
    carried: frozenset[str] = frozenset()
    for name in candidates[:MAX_CARRIED]:
        cuts = sorted(legal_cuts(graph, carried | {name} | ignored))
        heavy = [reader for reader in consumers[name] if is_heavy(graph, graph.operators[reader])]
        if len({bisect_left(cuts, reader) for reader in heavy}) >= MIN_CARRIED_PIECES:
            carried |= {name}
    return carried


def is_heavy(graph: Graph, op: Operator) -> bool:
    """Whether an operator justifies a unit: it multiplies, looks up an embedding, is the loss or a trained layer."""
    if op.kind == LAYER:
        return any(graph.tensors[name].role == "parameter" for name in op.inputs)
    if op.forward_flops.fixed or op.forward_flops.per_sample or op.kind in LOSSES:
        return not op.is_constant
    # A look-up of positions is the same for all samples: it belongs to the unit where it is added.
    depends = graph.tensors[op.outputs[0]].batch_dim is not None
    return op.kind == "Gather" and len(op.inputs) > 1 and depends and graph.tensors[op.inputs[0]].role == "parameter"


def nearest_smaller(sizes: Sequence[float]) -> list[int]:
    """For each index, the nearest index before it with a smaller size, or -1."""
    found, stack = [], [-1]
    for i, count in enumerate(sizes):
        while stack[-1] >= 0 and sizes[stack[-1]] >= count:
            stack.pop()
        found.append(stack[-1])
        stack.append(i)
    return found


def _last_readers(graph: Graph, index: int, ignored: frozenset[str]) -> dict[str, int]:
    """The results of an operator that count at cuts -> index of the last operator that reads them."""
    op = graph.operators[index]
    names = [name for name in op.outputs if graph.consumers[name] and name not in ignored] if op.is_live else []
    return {name: graph.consumers[name][-1] for name in names}


def _crossing(graph: Graph, places: Collection[int], ignored: frozenset[str]) -> dict[int, tuple[str, ...]]:
    """Index of an operator -> names of the tensors that cross after it, in the order in which they are made."""
    found: dict[int, tuple[str, ...]] = {}
    until: dict[str, int] = {}
    for i in range(max(places, default=-1) + 1):
        until.update(_last_readers(graph, i, ignored))
        if i in places:
            until = {name: last for name, last in until.items() if last > i}
            found[i] = tuple(until)
    return found


def _further_cuts(graph: Graph, known: Collection[int], ignored: frozenset[str]) -> dict[int, str]:
    """Cuts where several tensors cross: index of the operator before the cut -> its boundary.

    Between two heavy operators, the candidate is the place where the fewest elements cross. It becomes a cut if the
    part of the graph between the nearest places before and after it where fewer elements cross has `MIN_HEAVY` heavy
    operators and the share `MIN_SHARE` of all FLOPs. So there is no cut inside a short branch, at whose ends fewer
    elements cross.

    Args:
        graph: in canonical order.
        known: indices of the operators after which cuts are known.
        ignored: names of tensors that do not count.
    """
    done = [0.0, *itertools.accumulate(op.forward_flops.at(1) for op in graph.operators)]
    if done[-1] <= 0.0:
        return {}
    heavy = [i for i, op in enumerate(graph.operators) if is_heavy(graph, op)]
    ends = [-1, *sorted(known), len(graph.operators) - 1]
    stretches = [
        (start, stop)
        for start, stop in itertools.pairwise(ends)
        if bisect_right(heavy, stop) - bisect_right(heavy, start) >= MIN_HEAVY
        and done[stop + 1] - done[start + 1] >= MIN_SHARE * done[-1]
    ]
    sizes, may_cross = _crossing_sizes(graph, ignored) if stretches else ([], [])
    found: list[int] = []
    for start, stop in stretches:
        inside = heavy[bisect_right(heavy, start) : bisect_right(heavy, stop)]
        between, shared = sizes[start + 1 : stop], _sharing(graph, start, stop, inside)
        lower = nearest_smaller(between)
        higher = [len(between) - 1 - i for i in nearest_smaller(between[::-1])][::-1]
        for one, other in itertools.pairwise(inside):
            places = [i - start - 1 for i in range(one, other) if may_cross[i] and not shared[i - start - 1]]
            # Of several such places the last one, so that the norm and the activation stay with the convolution.
            at = min(reversed(places), key=between.__getitem__, default=None)
            if at is None:
                continue
            before, behind = start + 1 + lower[at], start + 1 + higher[at]
            is_long = bisect_right(heavy, behind) - bisect_right(heavy, before) >= MIN_HEAVY
            if is_long and done[behind + 1] - done[before + 1] >= MIN_SHARE * done[-1]:
                found.append(start + 1 + at)
    return {place: names[-1] for place, names in _crossing(graph, set(found), ignored).items()}


def _crossing_sizes(graph: Graph, ignored: frozenset[str]) -> tuple[list[int], list[bool]]:
    """[operators] elements of one sample that cross after each operator; [operators] whether all can be sent."""
    num = len(graph.operators)
    elements, counts, unsent = ([0] * (num + 1) for _ in range(3))
    for i in range(num):
        for name, last in _last_readers(graph, i, ignored).items():
            tensor = graph.tensors[name]
            is_sent = tensor.is_float and tensor.batch_dim is not None
            for column, amount in ((elements, tensor.num_elements), (counts, 1), (unsent, not is_sent)):
                column[i] += amount
                column[last] -= amount
    sizes, counts, unsent = (list(itertools.accumulate(column[:num])) for column in (elements, counts, unsent))
    return sizes, [
        0 < count <= MAX_CROSSING and not others and not kernels and not op.is_view
        for count, others, kernels, op in zip(counts, unsent, _inside_kernels(graph), graph.operators, strict=True)
    ]


def _sharing(graph: Graph, start: int, stop: int, heavy: Sequence[int]) -> list[int]:
    """For each place between two cuts, the number of parameters that heavy operators read both before and after it, as
    in the steps of a recurrence, or in heads that share their weights."""
    last: dict[str, int] = {}
    change = [0] * (stop - start + 1)
    for i in heavy:
        for name in map(graph.viewed, graph.operators[i].inputs):
            if graph.tensors[name].role == "parameter":
                change[last.get(name, i) - start - 1] += 1
                change[i - start - 1] -= 1
                last[name] = i
    return list(itertools.accumulate(change[:-2]))
