"""Units: the pieces of a graph between legal cuts (`ir.cuts`), with repeated structure recognised.

A piece without heavy operators is merged with a neighbour that has some. Then each repeated sequence of up to twelve
pieces becomes one unit, so that a transformer layer is one unit.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ir.cuts import Cut, find_cuts, is_heavy
from ir.graph import Graph, Operator, Tensor, once_per_graph
from ir.operators.measured import LAYER

MAX_PERIOD = 12
"""Largest number of pieces between legal cuts in one repeat (assumed)."""
NORMALISATIONS = {
    "LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization", "GroupNormalization", "ReduceMean",
}  # fmt: skip
"""Kinds of operators in a cheap piece that belongs to the next unit: a norm before a layer, or before the head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Consecutive operators between two legal cuts."""

    start: int
    """Index of the first operator."""
    stop: int
    """One past the index of the last operator."""
    type: int
    """Unit type. Units of one type are isomorphic operator by operator, and the tensors that cross them are alike."""
    structure: int
    """Number of the structure. Isomorphic units have the same number, whatever tensors cross them."""
    boundary: str | None
    """Name of the tensor that crosses the cut after the unit, see `Cut`; None for the last unit."""
    beside: tuple[str, ...] = ()
    """Names of the other tensors that cross it."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """All units of a graph; together they cover every operator that is not constant."""

    units: tuple[Unit, ...]
    """Units in graph order."""
    num_types: int
    """Number of unit types."""
    handed_on: tuple[frozenset[tuple[int, int]], ...] = ()
    """[types] the tensors that cross out of a unit of the type beside its boundary tensor, given by the place where the
    unit first reads or makes each: offset of the operator in the unit, and position among its operands and results.
    Units of a type may differ in this (the last unit that reads a carried tensor does not hand it on); the union over
    all units of the type is stored."""

    @functools.cached_property
    def carried(self) -> frozenset[str]:
        """Names of all tensors that cross a cut beside its boundary."""
        return frozenset(name for unit in self.units for name in unit.beside)

    def carried_results(self, graph: Graph, type: int) -> set[tuple[int, int]]:  # noqa: A002
        """The results of units of a type that are carried tensors: offset of the operator, and number of its result."""
        return {
            (offset, slot)
            for unit in self.units
            if unit.type == type and self.carried
            for offset, op in enumerate(graph.operators[unit.start : unit.stop])
            for slot, name in enumerate(op.outputs)
            if name in self.carried
        }

    def representative(self, type: int) -> Unit:  # noqa: A002
        """The first unit of a type."""
        return self._first_units[type]

    @functools.cached_property
    def _first_units(self) -> Mapping[int, Unit]:
        """The first unit of each type."""
        return {unit.type: unit for unit in reversed(self.units)}

    @property
    def num_blocks(self) -> int:
        """Number of units whose type occurs at least twice."""
        counts = [0] * self.num_types
        for unit in self.units:
            counts[unit.type] += 1
        return sum(c for c in counts if c > 1)


def find_units(graph: Graph, *, several: bool = True) -> Blocks:
    """Units of a graph in canonical order; see the module. Linear in the graph except for the search of repeats. They
    are found once and kept with the graph: the price, the verifier and the summary of a problem read them.

    Args:
        graph: in canonical order.
        several: see `find_cuts`.
    """
    return _units(graph) if several else _units_of_single_cuts(graph)


@once_per_graph
def _units(graph: Graph) -> Blocks:
    return _found(graph, several=True)


@once_per_graph
def _units_of_single_cuts(graph: Graph) -> Blocks:
    return _found(graph, several=False)


def _found(graph: Graph, *, several: bool) -> Blocks:
    ops = graph.operators
    first = next((i for i, op in enumerate(ops) if not op.is_constant), len(ops))
    if first == len(ops):
        return Blocks(units=(), num_types=0)
    cuts = find_cuts(graph, several=several)
    ends = [i + 1 for i in cuts if first <= i < len(ops) - 1] + [len(ops)]
    hasher = _Hasher(graph)
    pieces = list(zip([first, *ends[:-1]], ends, strict=True))
    segments = _merge(graph, pieces, [hasher.segment(start, stop, cuts.get(start - 1)) for start, stop in pieces], cuts)
    kinds = [hasher.segment(start, stop, cuts.get(start - 1)) for start, stop in segments]
    # Each layer of a profile is a unit of its own. If repeats were fused, alternating layers could never be cut apart.
    is_profile = any(op.kind == LAYER for op in ops)
    groups = [(k, k + 1) for k in range(len(kinds))] if is_profile else repeats(kinds)
    types: dict[Any, int] = {}
    structures: dict[tuple[int, ...], int] = {}
    units = []
    handed_on: dict[int, set[tuple[int, int]]] = {}
    for low, high in groups:
        start, stop = segments[low][0], segments[high - 1][1]
        cut = cuts.get(stop - 1) if stop < len(ops) else None
        beside = () if cut is None else cut.beside
        places = _places(ops[start:stop], beside)
        passed = sorted(_form(graph.tensors[name]) for name in beside if name not in places)
        kind = types.setdefault((tuple(kinds[low:high]), tuple(passed), _reads_again(graph, start, stop)), len(types))
        handed_on.setdefault(kind, set()).update(places.values())
        structure = structures.setdefault(tuple(kinds[low:high]), len(structures))
        boundary = None if cut is None else cut.boundary
        units.append(Unit(start=start, stop=stop, type=kind, boundary=boundary, beside=beside, structure=structure))
    sites = tuple(frozenset(handed_on[kind]) for kind in range(len(types)))
    return Blocks(units=tuple(units), num_types=len(types), handed_on=sites)


def _places(ops: Sequence[Operator], names: Collection[str]) -> Mapping[str, tuple[int, int]]:
    """For each of some tensors, the place where a unit first reads or makes it, see `Blocks.handed_on`."""
    found: dict[str, tuple[int, int]] = {}
    for offset, op in enumerate(ops if names else ()):
        for slot, name in enumerate((*op.inputs, *op.outputs)):
            if name in names:
                found.setdefault(name, (offset, slot))
    return found


def _reads_again(graph: Graph, start: int, stop: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For each parameter that a unit reads more than once: offsets of the operators, and positions of the operand.

    This distinguishes a unit that reads one parameter twice from a unit, equal otherwise, that reads two parameters.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    for offset, op in enumerate(graph.operators[start:stop]):
        for slot, name in enumerate(op.inputs):
            if graph.tensors[name].role == "parameter":
                found.setdefault(name, []).append((offset, slot))
    return tuple(tuple(places) for places in found.values() if len(places) > 1)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """The properties of a tensor on which the cost of sending it depends."""
    return tensor.dtype, tensor.batch_dim, tensor.shape


def _merge(
    graph: Graph, segments: list[tuple[int, int]], kinds: Sequence[int], cuts: Mapping[int, Cut]
) -> list[tuple[int, int]]:
    """Merges segments without heavy operators with the heavy ones before and after them.

    A norm before a segment that itself begins with a norm is merged with the segment before. This is the case for the
    norm after BLOOM's embedding; merged with the first layer, it would make this layer unlike all others. Where fewer
    segments are unlike after `_alike`, the places between are those that it returns.

    Args:
        graph: in canonical order.
        segments: start and stop of all segments.
        kinds: [segments] numbers of their structures.
        cuts: the cuts of the graph by the operator before.
    """
    heavy = [i for i, (a, b) in enumerate(segments) if any(is_heavy(graph, graph.operators[k]) for k in range(a, b))]
    if not heavy:
        return [(segments[0][0], segments[-1][1])]
    begins = [0]
    for before, after in itertools.pairwise(heavy):
        opening = (
            i
            for i in range(before + 1, after)
            if _opens(graph, *segments[i]) and not _begins_with_norm(graph, *segments[i + 1])
        )
        begins.append(next(opening, after))
    moved = _alike(graph, segments, kinds, heavy, begins, cuts)
    begins = min(begins, moved, key=lambda places: len({tuple(kinds[a:b]) for a, b in _spans(places, len(kinds))}))
    return [(segments[first][0], segments[stop - 1][1]) for first, stop in _spans(begins, len(segments))]


def _spans(begins: Sequence[int], stop: int) -> list[tuple[int, int]]:
    """Start and stop of consecutive spans, given by their starts and the stop of the last one."""
    return list(zip(begins, [*begins[1:], stop], strict=True))


def _alike(
    graph: Graph,
    segments: Sequence[tuple[int, int]],
    kinds: Sequence[int],
    heavy: Sequence[int],
    begins: Sequence[int],
    cuts: Mapping[int, Cut],
) -> list[int]:
    """Moves the places between heavy segments so that equal ones are merged with equal neighbours.

    A heavy segment that occurs several times takes, of the cheap ones behind it, those that are behind all of them, and
    of the cheap ones in front of it those that are in front of all. The norm of ConvNeXt's downsampling is behind the
    last layer of a stage and behind no other layer: it belongs to the downsampling. A place is moved only where no more
    crosses there: a pooling stays with the layer before it.

    Args:
        graph, segments, kinds, cuts: see `_merge`.
        heavy: numbers of the heavy segments.
        begins: [heavy] number of the first segment that is merged with each.
    """
    pairs = list(itertools.pairwise(heavy))
    behind: dict[int, list[Sequence[int]]] = {}
    in_front: dict[int, list[Sequence[int]]] = {}
    for before, after in pairs:
        run = kinds[before + 1 : after]
        behind.setdefault(kinds[before], []).append(run)
        in_front.setdefault(kinds[after], []).append(run[::-1])
    moved = list(begins)
    for number, (before, after) in enumerate(pairs, 1):
        followers, leaders = behind[kinds[before]], in_front[kinds[after]]
        lowest = after - _num_common(leaders)
        highest = before + 1 + _num_common(followers)
        place = min(max(begins[number], lowest), highest)
        if lowest <= highest and place != begins[number]:
            sizes = [_crossing_elements(graph, cuts[segments[at][0] - 1]) for at in (place, begins[number])]
            moved[number] = place if sizes[0] <= sizes[1] else begins[number]
    return moved


def _num_common(runs: Sequence[Sequence[int]]) -> int:
    """The number of equal values with which all sequences begin."""
    return sum(1 for _ in itertools.takewhile(lambda values: len(set(values)) == 1, zip(*runs, strict=False)))


def _crossing_elements(graph: Graph, cut: Cut) -> float:
    """Elements that cross a cut for one sample."""
    return sum(graph.tensors[name].elements.at(1) for name in (cut.boundary, *cut.beside))


def _opens(graph: Graph, start: int, stop: int) -> bool:
    """Whether a cheap segment belongs to the next one."""
    is_all_views = all(o.is_view for o in graph.operators[start:stop])
    return is_all_views or any(o.kind in NORMALISATIONS for o in graph.operators[start:stop])


def _begins_with_norm(graph: Graph, start: int, stop: int) -> bool:
    """Whether the first operator of a segment that computes something is a norm.

    A mean of a tensor that nothing else reads is a pooling.
    """
    op = next((o for o in graph.operators[start:stop] if not o.is_view), None)
    is_pooling = op is not None and op.kind == "ReduceMean" and len(graph.consumers[op.inputs[0]]) == 1
    return op is not None and op.kind in NORMALISATIONS and not is_pooling


class _Hasher:
    """Numbers segments by structure: kinds, attributes, shapes, rules, wiring and roles, never names."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.alike: dict[Any, int] = {}
        self.parts: dict[int, int] = {}
        """Numbers of rules and attributes by the identity of the object, since hashing them takes long and most
        operators share the objects. Equal objects have the same number."""
        self.known: dict[Any, int] = {}
        self.segments: dict[tuple[int, ...], int] = {}

    def segment(self, start: int, stop: int, cut: Cut | None) -> int:
        """Number of the structure of the operators of a segment, which come after a cut."""
        local: dict[str, tuple[int, int]] = {}
        outside: dict[str, int] = {}
        keys = []
        for offset, op in enumerate(self.graph.operators[start:stop]):
            keys.append(self._operator(op, local, outside))
            for j, name in enumerate(op.outputs):
                local[name] = (offset, j)
        entering = -1 if cut is None else outside.get(cut.boundary, -1)
        return self.segments.setdefault((entering, *keys), len(self.segments))

    def _operator(self, op: Operator, local: dict[str, tuple[int, int]], outside: dict[str, int]) -> int:
        tensors = self.graph.tensors
        wires = []
        for name in op.inputs:
            tensor = tensors[name]
            where: Any = local.get(name)
            if where is None:
                where = (tensor.role, outside.setdefault(name, len(outside)) if tensor.role == "activation" else -1)
            wires.append((where, tensor.shape, tensor.dtype, tensor.batch_dim))
        results = tuple((tensors[n].shape, tensors[n].dtype, tensors[n].batch_dim) for n in op.outputs)
        # Two layers that are equal otherwise may differ in whether they are frozen.
        gradients = tuple(n in self.graph.trained for n in op.inputs) if self.graph.has_frozen else ()
        key = (
            op.kind,
            self._number(op.attributes),
            self._number(op.rule),
            op.traffic,
            self._number(op.forward_flops),
            self._number(op.backward_flops),
            op.measured_s,
            op.is_view,
            tuple(wires),
            results,
            gradients,
        )
        return self.known.setdefault(key, len(self.known))

    def _number(self, part: Any) -> int:
        number = self.parts.get(id(part))
        if number is None:
            number = self.parts[id(part)] = self.alike.setdefault(part, len(self.alike))
        return number


def repeats(kinds: Sequence[int]) -> list[tuple[int, int]]:
    """Divides a sequence into groups: the repeat that covers most of it, and recursively the parts before and after it.

    Returns:
        (start, stop) of each group in order; equal periods of one repeat are one group each.
    """
    groups: list[tuple[int, int]] = []
    stretches = [(0, len(kinds))]
    while stretches:
        first, last = stretches.pop()
        repeat = _longest_repeat(kinds, first, last)
        if repeat is None:
            groups += [(number, number + 1) for number in range(first, last)]
            continue
        begins = range(repeat.start, repeat.stop, repeat.period)
        groups += [(begin, begin + repeat.period) for begin in begins]
        stretches += [(first, repeat.start), (repeat.stop, last)]
    return sorted(groups)


class _Repeat(NamedTuple):
    """A sequence of numbers that occurs two or more times consecutively."""

    start: int
    """Index of the first number."""
    stop: int
    """One past the index of the last number."""
    period: int
    """Length of the repeated sequence."""


def _longest_repeat(kinds: Sequence[int], first: int, last: int) -> _Repeat | None:
    """The repeat that covers most of `kinds[first:last]`; of equal ones that with the shortest period."""
    best: _Repeat | None = None
    for period in range(1, min(MAX_PERIOD, (last - first) // 2) + 1):
        start = first
        while start + period < last:
            # From `start` to `stop`, every number occurs again one period later.
            stop = start
            while stop + period < last and kinds[stop] == kinds[stop + period]:
                stop += 1
            count = (stop - start) // period + 1
            if count >= 2 and (best is None or count * period > best.stop - best.start):
                best = _Repeat(start, start + count * period, period)
            start = max(stop, start + 1)
    return best
