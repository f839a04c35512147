"""The facts about a problem's graph that the rules need: legal placements, units, linkage groups, fused kernels.

Signatures are derived here from the factor rules: a second way to the same answer as `ir.factors.signatures`, in the
words of the plan document (`S(i)`, `B`, `P`).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from automap.execution import Execution, execution
from automap.problem import Problem
from automap.units import units_of
from ir.blocks import Blocks
from ir.cuts import find_cuts
from ir.factors import FactorRule, placement_text
from ir.graph import Graph
from ir.groups import FusedGroup, fused_groups
from ir.linkage import Group, Linkage, link

Texts = tuple[str, ...]
"""Placements as the plan document writes them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """The placements of an operator's operands and results on one mesh axis."""

    inputs: Texts
    outputs: Texts


WholeOrSplit = Mapping[Placed, int | None]
"""Legal placements of an operator on one axis -> the factor that the axis splits, None where it splits none."""


class Model:
    """The facts about a problem's graph, each computed once.

    Attributes:
        position: name of an operator -> its index in the graph.
        parametric: tensors that are parameters, or made from parameters and constants by views.
        unit_of: index of an operator that is not constant -> the number of its unit.
        times: type of unit -> how many units of it the model has.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.graph: Graph = problem.graph
        self.position = {op.name: i for i, op in enumerate(self.graph.operators)}
        self.parametric = {t.name for t in self.graph.tensors.values() if t.role == "parameter"}
        for op in self.graph.operators:
            if not op.is_live:
                self.parametric.update(op.outputs)
        self.blocks: Blocks = units_of(problem)
        self.unit_of = {i: n for n, unit in enumerate(self.blocks.units) for i in range(unit.start, unit.stop)}
        self.times = Counter(unit.type for unit in self.blocks.units)
        self._legal: dict[int, WholeOrSplit] = {}
        self._roots: dict[str, str] = {}

    def crossing(self, end: int) -> frozenset[str]:
        """The tensors that depend on data and cross a cut before an operator."""
        graph = self.graph
        return frozenset(
            name
            for i in range(end)
            if graph.operators[i].is_live
            for name in graph.operators[i].outputs
            if graph.consumers[name] and graph.consumers[name][-1] >= end
        )

    @functools.cached_property
    def crossings(self) -> frozenset[frozenset[str]]:
        """The set of tensors that cross each legal cut."""
        return frozenset(frozenset({cut.boundary, *cut.beside}) for cut in find_cuts(self.graph).values())

    @property
    def carried(self) -> frozenset[str]:
        """Tensors that may cross a cut between stages beside its boundary tensor."""
        return self.blocks.carried

    @functools.cached_property
    def layers(self) -> frozenset[int]:
        """Numbers of the units that are in layers, as trainers count them.

        These are the units that the model has several times. A neighbouring unit is a layer too if it has as many
        attentions, alone or together with the unit after it, and the same shapes of operands and results.
        """
        units, groups = self.blocks.units, fused_groups(self.graph)
        heads = Counter(self.unit_of.get(min(group.members)) for group in groups if group.kind == "attention")
        times = Counter(unit.structure for unit in units)
        found = {number for number, unit in enumerate(units) if times[unit.structure] > 1}
        attending = {number for number in heads if heads[number] in {heads[one] for one in found}}
        shapes = {self.crossing_shapes(number) for number in found}
        waiting = set[int]()
        for number in range(min(found, default=0) - 1, -1, -1):
            if self.crossing_shapes(number) not in shapes:
                break
            waiting.add(number)
            if number in attending:
                found, waiting = found | waiting, set()
        for number in range(max(found, default=len(units)) + 1, len(units)):
            if number not in attending or self.crossing_shapes(number) not in shapes:
                break
            found.add(number)
        return frozenset(found)

    def crossing_shapes(self, number: int) -> tuple[tuple[int, ...] | None, ...]:
        """The shapes of the tensors that cross into a unit and out of it; None if there is no such tensor."""
        into = self.blocks.units[number - 1].boundary if number else None
        both = into, self.blocks.units[number].boundary
        return tuple(None if name is None else self.graph.tensors[name].shape for name in both)

    @functools.cached_property
    def linkage(self) -> Linkage:
        """The linkage groups of the graph, see `ir.linkage`."""
        return link(self.graph, self.blocks)

    @functools.cached_property
    def execution(self) -> Execution:
        """How the trainer runs the graph."""
        return execution(self.problem)

    @functools.cached_property
    def kernels(self) -> Mapping[int, FusedGroup]:
        """Operator -> the group of operators that the trainer runs as one kernel, if all belong to one unit."""
        found = {}
        for kernel in self.execution.kernels:
            if len({self.unit_of.get(i, -1) for i in kernel.members}) == 1:
                found.update(dict.fromkeys(kernel.members, kernel))
        return found

    def live_maker(self, name: str) -> int | None:
        """The operator that makes a tensor and that a stage must run; None for others."""
        index = self.graph.producer.get(name)
        return index if index is not None and self.graph.operators[index].is_live else None

    def root(self, name: str) -> str:
        """The tensor that another one is a view of; a tensor that is not a view itself."""
        if name not in self._roots:
            found = name
            while (maker := self.live_maker(found)) is not None and self.graph.operators[maker].is_alias:
                found = self.graph.operators[maker].inputs[0]
            self._roots[name] = found
        return self._roots[name]

    def legal(self, index: int) -> WholeOrSplit:
        """The placements that the factor rule of an operator allows on one mesh axis."""
        if index not in self._legal:
            op = self.graph.operators[index]
            found = dict(_allowed(op.rule))
            carries = [self._is_data(name) for name in op.inputs]
            if op.kind == "Add" and len(op.inputs) == 2 and sum(carries) == 1:
                # A bias is added on the first rank only: the sum stays P, but the bias itself is never P.
                found.pop(Placed(inputs=("P", "P"), outputs=("P",)), None)
                found[Placed(inputs=tuple("P" if c else "B" for c in carries), outputs=("P",))] = None
            self._legal[index] = found
        return self._legal[index]

    def _is_data(self, name: str) -> bool:
        """Whether a tensor is an input of the model or computed from one."""
        return self.graph.tensors[name].role in ("activation", "input") and name not in self.parametric

    def ways(self, unit_type: int, group: Group) -> Iterator[list[Placed]]:
        """The placements of all members of a linkage group on one axis, for each placement of its leader."""
        table = self.linkage.types[unit_type].signatures
        for row in group.assignment:
            chosen = [table[member][value] for member, value in zip(group.members, row, strict=True)]
            yield [
                Placed(inputs=tuple(map(placement_text, s.inputs)), outputs=tuple(map(placement_text, s.outputs)))
                for s in chosen
            ]

    def is_uneven(self, index: int) -> bool:
        """Whether dims of an operator may be split unevenly; with a target only outside of layers."""
        target = self.problem.target
        return target is None or (target.uneven and self.times[self.blocks.units[self.unit_of[index]].type] == 1)

    def default(self, index: int, *, batch: bool) -> Placed:
        """The placement of an operator that the plan does not mention: its batch is split if `batch` and possible."""
        op = self.graph.operators[index]
        if batch:
            for placed, factor in self.legal(index).items():
                if factor is not None and op.rule.factors[factor].is_batch:
                    return placed
        return Placed(inputs=("B",) * len(op.inputs), outputs=("B",) * len(op.outputs))


@functools.lru_cache(maxsize=1024)
def _allowed(rule: FactorRule) -> WholeOrSplit:
    """The placements that split one factor, split nothing, or pass a partial sum on.

    Where two factors give equal placements, the first one counts.
    """
    found: dict[Placed, int | None] = {}
    operands = (*rule.inputs, *rule.outputs)
    for number, factor in enumerate(rule.factors):
        if factor.fixed or (factor.size == 1 and not factor.is_batch):
            continue
        held = [[d for d, parts in enumerate(dims) if number in parts] for dims in operands]
        is_major = all(
            len(places) <= 1 and all(dims[d][0] == number for d in places)
            for places, dims in zip(held, operands, strict=True)
        )
        if not is_major or not any(held):
            continue
        texts = [f"S({places[0]})" if places else "B" for places in held]
        outputs = texts[len(rule.inputs) :]
        if factor.summed:
            outputs = ["P" if text == "B" else text for text in outputs]
        found.setdefault(Placed(inputs=tuple(texts[: len(rule.inputs)]), outputs=tuple(outputs)), number)
    count = len(rule.inputs)
    found.setdefault(Placed(inputs=("B",) * count, outputs=("B",) * len(rule.outputs)), None)
    for together in _linear(rule):
        inputs = tuple("P" if slot in together else "B" for slot in range(count))
        found.setdefault(Placed(inputs=inputs, outputs=("P",) * len(rule.outputs)), None)
    return found


def _linear(rule: FactorRule) -> Iterator[frozenset[int]]:
    """The sets of inputs in which the operator is jointly linear."""
    slots = range(len(rule.inputs))
    if not slots or rule.passing == "none":
        return
    if rule.passing == "multi":
        yield from (frozenset((slot,)) for slot in rule.linear or slots)
    elif rule.passing == "joint":
        yield frozenset(slots)
    else:
        yield frozenset(slots[:1] if rule.passing == "first" else slots[1:])
