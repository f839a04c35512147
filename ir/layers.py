"""Layers: the units that the configurations of trainers count.

They are the units that a model has several times. In a transformer, a unit that occurs once is a layer too if it is
next to these, has as many attentions, and reads and makes tensors of the same shapes; an example is a first layer with
a plain MLP before layers with experts. Such a layer may consist of two units, since units end wherever a single tensor
crosses.
"""

from __future__ import annotations

import itertools
from collections import Counter

from ir.blocks import Blocks
from ir.graph import Graph
from ir.groups import fused_groups

Shapes = tuple[tuple[int, ...] | None, ...]


def layer_spans(graph: Graph, blocks: Blocks) -> tuple[range, ...]:
    """Numbers of the units of each layer, in order; empty if no unit occurs twice.

    Args:
        blocks: the units of the graph.
    """
    units = blocks.units
    times = Counter(unit.structure for unit in units)
    found = [range(number, number + 1) for number, unit in enumerate(units) if times[unit.structure] > 1]
    known = {_shapes(graph, blocks, span[0]) for span in found}
    count = _attention(graph, blocks)
    usual = {count[span[0]] for span in found} - {0}
    attends = {number for number, times_there in enumerate(count) if times_there in usual}
    while found and found[0].start > 0:
        first = found[0].start - 1
        while first > 0 and first not in attends and _shapes(graph, blocks, first) in known:
            first -= 1
        if first not in attends or _shapes(graph, blocks, first) not in known:
            break
        found.insert(0, range(first, found[0].start))
    while found and found[-1].stop in attends and _shapes(graph, blocks, found[-1].stop) in known:
        found.append(range(found[-1].stop, found[-1].stop + 1))
    return tuple(found)


def layer_types(graph: Graph, blocks: Blocks) -> frozenset[int]:
    """The unit types of layers."""
    return frozenset(blocks.units[number].type for span in layer_spans(graph, blocks) for number in span)


def layers_of_modules(graph: Graph, blocks: Blocks) -> frozenset[int]:
    """The unit types of layers that share no module with units of other types.

    Modules that save no activations may be shared.
    """
    found = layer_types(graph, blocks)
    code: dict[int, set[str]] = {kind: set() for kind in range(blocks.num_types)}
    kept: dict[int, set[str]] = {kind: set() for kind in range(blocks.num_types)}
    for unit in blocks.units:
        for op in graph.operators[unit.start : unit.stop]:
            if op.is_live and op.scope:
                code[unit.type].update(itertools.accumulate(op.scope.split("."), "{}.{}".format))
                if graph.keeps_activations(op):
                    kept[unit.type].add(op.scope)
    while True:
        outside = set[str]().union(*(paths for kind, paths in code.items() if kind not in found))
        left = frozenset(kind for kind in found if not kept[kind] & outside)
        if left == found:
            return found
        found = left


def layer_units(graph: Graph, blocks: Blocks) -> dict[int, int]:
    """Number of the last unit of each span of `layer_spans`, ascending -> number of layers in that span.

    A span has several layers if layers of several kinds alternate, for instance if every second one has experts: the
    repeated unit then contains one layer of each kind. In a single stack, a span has as many layers as attentions.
    """
    spans = layer_spans(graph, blocks)
    if not is_one_stack(graph, blocks):
        return {span[-1]: 1 for span in spans}
    count = _attention(graph, blocks)
    return {span[-1]: max(1, sum(count[number] for number in span)) for span in spans}


def layers_with(graph: Graph, blocks: Blocks, kind: str) -> tuple[bool, ...]:
    """[layers] whether each layer has an operator of a kind."""
    found: list[bool] = []
    begins = sorted(group.members[0] for group in fused_groups(graph) if group.kind == "attention")
    times = layer_units(graph, blocks)
    for span in layer_spans(graph, blocks):
        first, last = blocks.units[span[0]].start, blocks.units[span[-1]].stop
        inside = [begin for begin in begins if first <= begin < last][: times[span[-1]]]
        cuts = [first, *inside[1:], last]
        found += [any(op.kind == kind for op in graph.operators[a:b]) for a, b in itertools.pairwise(cuts)]
    return tuple(found)


def _attention(graph: Graph, blocks: Blocks) -> list[int]:
    """[units] number of attentions of each unit."""
    first = [group.members[0] for group in fused_groups(graph) if group.kind == "attention"]
    return [sum(unit.start <= member < unit.stop for member in first) for unit in blocks.units]


def is_one_stack(graph: Graph, blocks: Blocks) -> bool:
    """Whether all layers are consecutive, read and make tensors of one shape, and no other tensors cross them.

    An encoder and a decoder are two stacks, and so are the stages of a pyramid.
    """
    spans = layer_spans(graph, blocks)
    numbers = [number for span in spans for number in span]
    follow = bool(numbers) and numbers == list(range(numbers[0], numbers[-1] + 1))
    beside = any(blocks.units[number].beside for number in numbers)
    return follow and len({_shapes(graph, blocks, n) for n in numbers}) == 1 and not beside


def _shapes(graph: Graph, blocks: Blocks, number: int) -> Shapes:
    """Shapes of the tensors that cross into a unit and out of it."""
    before = blocks.units[number - 1].boundary if number else None
    crossing = (before, blocks.units[number].boundary)
    return tuple(None if name is None else graph.tensors[name].shape for name in crossing)
