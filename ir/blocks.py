"""Units: the pieces of a graph between legal cuts, with repeated structure recognised.

A cut after an operator is legal where exactly one tensor that depends on the samples crosses it. Tensors that depend on
parameters only (views), buffers, constants and data inputs are available everywhere and do not count. A piece without
heavy work is merged with a neighbour that has some; then repeats of one to twelve pieces are fused, so that a
transformer layer is one unit.

A tensor that many later pieces read (the memory of an encoder, read by every decoder layer) is *carried*: it may cross
cuts beside the one tensor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ir.graph import Graph, Operator
from ir.operators.measured import LAYER

MIN_CARRIED_PIECES = 3
"""Least number of pieces in which a carried tensor feeds heavy work: a residual feeds two, where its branch begins and
ends."""
MAX_CARRIED = 8
"""Number of candidates that are tried, those with most readers first (assumed)."""
MAX_PERIOD = 12
"""Largest number of pieces between legal cuts in one repeat (assumed)."""
NORMALISATIONS = {
    "LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization", "GroupNormalization", "ReduceMean",
}  # fmt: skip
"""Kinds with which a cheap piece belongs to the next unit: pre-norm, or the final norm and the head."""
LOSSES = {"SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss", "MeanSquaredErrorLoss"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Consecutive operators between two legal cuts."""

    start: int
    """Index of the first operator."""
    stop: int
    """Index behind the last operator."""
    type: int
    """Unit type; units of equal type are isomorphic operator by operator."""
    boundary: str | None
    """Name of the tensor that crosses the cut behind the unit, beside carried ones; None for the last unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """All units of a graph; together they cover every operator that is not constant."""

    units: tuple[Unit, ...]
    """Units in graph order."""
    num_types: int
    """Number of unit types."""

    def representative(self, type: int) -> Unit:  # noqa: A002
        """The first unit of a type."""
        return next(u for u in self.units if u.type == type)

    @property
    def num_blocks(self) -> int:
        """Number of units whose type occurs at least twice."""
        counts = [0] * self.num_types
        for unit in self.units:
            counts[unit.type] += 1
        return sum(c for c in counts if c > 1)


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
    count = number = 0
    for i in range(num):
        count += change[i]
        number += total[i]
        # Views stand before their first consumer: cut behind the consumer before them, not between.
        if count == 1 and not graph.operators[i].is_view:
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


def find_units(graph: Graph) -> Blocks:
    """Units of a graph in canonical order; see the module. Linear in the graph except for the search of repeats."""
    ops = graph.operators
    first = next((i for i, op in enumerate(ops) if not op.is_constant), len(ops))
    if first == len(ops):
        return Blocks(units=(), num_types=0)
    carried = carried_tensors(graph)
    cuts = {**legal_cuts(graph, carried), **legal_cuts(graph)} if carried else legal_cuts(graph)
    ends = [i + 1 for i in sorted(cuts) if first <= i < len(ops) - 1] + [len(ops)]
    segments = _merge(graph, list(zip([first, *ends[:-1]], ends, strict=True)))
    hasher = _Hasher(graph)
    kinds = [hasher.segment(start, stop) for start, stop in segments]
    # The layers of a profile are units as they are: two that take turns would otherwise never be cut apart.
    is_profile = any(op.kind == LAYER for op in ops)
    groups = [(k, k + 1) for k in range(len(kinds))] if is_profile else repeats(kinds)
    types: dict[tuple[int, ...], int] = {}
    units = []
    for low, high in groups:
        start, stop = segments[low][0], segments[high - 1][1]
        kind = types.setdefault(tuple(kinds[low:high]), len(types))
        units.append(Unit(start=start, stop=stop, type=kind, boundary=cuts.get(stop - 1) if stop < len(ops) else None))
    return Blocks(units=tuple(units), num_types=len(types))


def _merge(graph: Graph, segments: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merges segments without heavy work with a neighbour: the next one where `_opens`, else the one before."""
    heavy = [any(is_heavy(graph, graph.operators[i]) for i in range(a, b)) for a, b in segments]
    if not any(heavy):
        return [(segments[0][0], segments[-1][1])]
    last = max(i for i, h in enumerate(heavy) if h)
    merged: list[tuple[int, int]] = []
    pending: int | None = None
    for i, (start, stop) in enumerate(segments):
        if heavy[i]:
            merged.append((start if pending is None else pending, stop))
            pending = None
        elif pending is not None:
            continue
        elif i < last and (not merged or _opens(graph, start, stop)):
            pending = start
        else:
            merged[-1] = (merged[-1][0], stop)
    return merged


def _opens(graph: Graph, start: int, stop: int) -> bool:
    """Whether a cheap segment belongs to the next one."""
    op = next((o for o in graph.operators[start:stop] if not o.is_view), None)
    if op is None or op.kind in NORMALISATIONS:
        return True
    return any(o.kind in NORMALISATIONS for o in graph.operators[start:stop])


class _Hasher:
    """Numbers segments by structure: kinds, attributes, shapes, rules, wiring and roles, never names."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.alike: dict[Any, int] = {}
        self.parts: dict[int, int] = {}
        """Rules and attributes, by the object -> the number of those equal to it: hashing them takes long, and most
        operators share them."""
        self.known: dict[Any, int] = {}
        self.segments: dict[tuple[int, ...], int] = {}

    def segment(self, start: int, stop: int) -> int:
        local: dict[str, tuple[int, int]] = {}
        outside: dict[str, int] = {}
        keys = []
        for offset, op in enumerate(self.graph.operators[start:stop]):
            keys.append(self._operator(op, local, outside))
            for j, name in enumerate(op.outputs):
                local[name] = (offset, j)
        return self.segments.setdefault(tuple(keys), len(self.segments))

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
        # Of two layers that are alike, one may be trained and the other one frozen.
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
    """Divides a sequence into groups: the repeats that cover most, then likewise the rest before and behind them.

    Returns:
        (start, stop) of each group in order; equal periods of one repeat are one group each.
    """
    done: list[tuple[int, int]] = []
    stretches = [(0, len(kinds))]
    while stretches:
        a, b = stretches.pop()
        best = (0, 0, 0, 0)
        for period in range(1, min(MAX_PERIOD, (b - a) // 2) + 1):
            i = a
            while i + period < b:
                if kinds[i] != kinds[i + period]:
                    i += 1
                    continue
                stop = i
                while stop + period < b and kinds[stop] == kinds[stop + period]:
                    stop += 1
                count = (stop - i) // period + 1
                covered = count * period
                if count >= 2 and covered > best[0]:
                    best = (covered, -period, i, count)
                i = max(stop, i + 1)
        covered, period, i, count = best
        if not covered:
            done += [(k, k + 1) for k in range(a, b)]
            continue
        period = -period
        done += [(i + r * period, i + (r + 1) * period) for r in range(count)]
        stretches += [(a, i), (i + covered, b)]
    return sorted(d for d in done if d[0] < d[1])
