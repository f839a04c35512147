"""Reading: what a plan says of each of its operators, taken from the document and the graph alone.

Shared by the rules of `automap.verify`. Signatures are derived here from the factor rules: a second way to the same
answer as `ir.factors.signatures`, in the words of the document (`S(i)`, `B`, `P`). Units: samples.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from automap.globs import matches, matches_operator
from automap.plan import AxisSharding, Plan, Stage, parse_devices
from automap.problem import Problem
from ir.blocks import Blocks, carried_tensors, find_units
from ir.factors import FactorRule, placement_text
from ir.graph import Graph, Operator
from ir.groups import FusedGroup, fused_groups
from ir.linkage import Group, Linkage, link

Texts = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    """One way in which a plan is wrong."""

    where: str
    """Path in the plan document."""
    what: str
    """The fault, with the values that show it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """How an operator lies on one mesh axis."""

    inputs: Texts
    outputs: Texts


WholeOrSplit = Mapping[Placed, int | None]
"""Legal placements of an operator on one axis -> the factor that is split, None where none is."""


@dataclass(kw_only=True, slots=True)
class Chunk:
    """A stage of the plan, resolved."""

    number: int
    stage: Stage
    rank: int
    """Pipeline rank that runs it."""
    operators: range
    sizes: Mapping[str, int]
    """Axes that have more than one rank here or in another stage, outermost first."""
    samples: int
    """The most of `spread_samples`, unless some of its devices are looked at."""
    shares: tuple[int, ...]
    """See `spread_samples`."""
    again: frozenset[int]
    """Operators that the backward pass runs again."""
    placed: dict[int, dict[str, Placed]] = field(default_factory=dict)
    """Operator -> axis -> placements."""

    @property
    def where(self) -> str:
        """Path in the document."""
        return f"stages[{self.number}]"


class Model:
    """What the rules must know of a problem's graph, found once.

    Attributes:
        position: index of each operator by name.
        parametric: tensors that are parameters, or made of parameters, constants or nothing by free operators.
        unit_of: number of the unit of each operator that is not constant.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.graph: Graph = problem.graph
        self.position = {op.name: i for i, op in enumerate(self.graph.operators)}
        self.parametric = {t.name for t in self.graph.tensors.values() if t.role == "parameter"}
        for op in self.graph.operators:
            if not is_live(op):
                self.parametric.update(op.outputs)
        self.blocks: Blocks = find_units(self.graph)
        self.unit_of = {i: n for n, unit in enumerate(self.blocks.units) for i in range(unit.start, unit.stop)}
        self._rules: dict[FactorRule, WholeOrSplit] = {}
        self._legal: dict[int, WholeOrSplit] = {}

    @functools.cached_property
    def of_parameters(self) -> frozenset[str]:
        """Parameters, constants and what is made of such alone: gradients of these add up over the micro-batches."""
        made = {tensor.name for tensor in self.graph.tensors.values() if tensor.role != "input"}
        made.difference_update(self.graph.producer)
        for op in self.graph.operators:
            if made.issuperset(op.inputs):
                made.update(op.outputs)
        return frozenset(made)

    @functools.cached_property
    def carried(self) -> frozenset[str]:
        """Tensors that may cross a cut beside the one that must."""
        return carried_tensors(self.graph)

    @functools.cached_property
    def linkage(self) -> Linkage:
        """Linkage groups, see `ir.linkage`."""
        return link(self.graph, self.blocks)

    @functools.cached_property
    def kernels(self) -> Mapping[int, FusedGroup]:
        """Operator -> the group that the trainer runs as one kernel; groups lie within a unit."""
        found = {}
        for group in fused_groups(self.graph):
            is_fused = group.kind != "attention" or self.problem.trainer.fused_attention
            kernel = group if is_fused else group.unfused
            if kernel is not None and len({self.unit_of.get(i, -1) for i in kernel.members}) == 1:
                found.update(dict.fromkeys(kernel.members, kernel))
        return found

    def live_maker(self, name: str) -> int | None:
        """The operator that makes a tensor from data, if one does."""
        index = self.graph.producer.get(name)
        return index if index is not None and is_live(self.graph.operators[index]) else None

    def legal(self, index: int) -> WholeOrSplit:
        """What the factor rule of an operator allows on one mesh axis."""
        if index not in self._legal:
            op = self.graph.operators[index]
            found = dict(self._of_rule(op.rule))
            carries = [name not in self.parametric for name in op.inputs]
            if op.kind == "Add" and len(op.inputs) == 2 and self._is_bias(op):
                # A bias is added on the first rank only: the sum stays partial, the bias never is.
                found.pop(Placed(inputs=("P", "P"), outputs=("P",)), None)
                found[Placed(inputs=tuple("P" if c else "B" for c in carries), outputs=("P",))] = None
            self._legal[index] = found
        return self._legal[index]

    def _is_bias(self, op: Operator) -> bool:
        tensors = self.graph.tensors
        return sum(tensors[n].role == "activation" and n not in self.parametric for n in op.inputs) == 1

    def _of_rule(self, rule: FactorRule) -> WholeOrSplit:
        if rule not in self._rules:
            self._rules[rule] = _allowed(rule)
        return self._rules[rule]

    def ways(self, unit_type: int, group: Group) -> Iterator[list[Placed]]:
        """The placements on one axis of all members of a linkage group, one for each of its leader."""
        table = self.linkage.types[unit_type].signatures
        for row in group.assignment:
            chosen = [table[member][value] for member, value in zip(group.members, row, strict=True)]
            yield [
                Placed(inputs=tuple(map(placement_text, s.inputs)), outputs=tuple(map(placement_text, s.outputs)))
                for s in chosen
            ]

    def default(self, index: int, *, batch: bool) -> Placed:
        """What an operator does where the plan says nothing: split its batch if it can and should, else be whole."""
        op = self.graph.operators[index]
        if batch:
            for placed, factor in self.legal(index).items():
                if factor is not None and op.rule.factors[factor].is_batch:
                    return placed
        return Placed(inputs=("B",) * len(op.inputs), outputs=("B",) * len(op.outputs))


def is_live(op: Operator) -> bool:
    """Whether a stage must run an operator: it is no view and no constant."""
    return not op.is_view and not op.is_constant


def _allowed(rule: FactorRule) -> WholeOrSplit:
    """A split of one factor, no split, or a partial value passed on; the first factor of equal placements counts."""
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
    """Sets of inputs in which the operator is linear together."""
    slots = range(len(rule.inputs))
    if not slots or rule.passing == "none":
        return
    if rule.passing == "multi":
        yield from (frozenset((slot,)) for slot in rule.linear or slots)
    elif rule.passing == "joint":
        yield frozenset(slots)
    else:
        yield frozenset(slots[:1] if rule.passing == "first" else slots[1:])


# -- from the document to operators ----------------------------------------------------------------------------------


def devices_of(stage: Stage) -> tuple[int, ...]:
    """Device numbers of a stage.

    Raises:
        PlanError: not such a list.
    """
    return parse_devices(stage.devices)


def num_ranks(plan: Plan) -> int:
    """Pipeline ranks: stages before one that stands where the first one does."""
    where = [devices_of(stage) for stage in plan.stages]
    return where.index(where[0], 1) if where[0] in where[1:] else len(where)


def spread_samples(plan: Plan, stage: Stage) -> tuple[int, ...]:
    """Of each rank of the first batch axis the samples of a micro-batch as if all ranks had as many.

    Where no shares are stated, all count as the one that has most.
    """
    ranks = dict(stage.mesh).get(stage.batch_axes[0], 1) if stage.batch_axes else 1
    shares = stage.batch_shares or (math.ceil(plan.samples_per_micro_batch / ranks),) * ranks
    return tuple(share * ranks for share in shares)


def alike_ranks(plan: Plan, stage: Stage, problem: Problem) -> dict[tuple[int, ...], int]:
    """Devices of a stage that have the same kinds of devices in their rank of the first batch axis -> samples.

    These are `spread_samples` of the rank that has most. Where no unlike shares are stated all devices count as alike.
    """
    devices = parse_devices(stage.devices)
    if len({*spread_samples(plan, stage)}) == 1:
        return {devices: max(spread_samples(plan, stage))}
    # Places are numbered with the last axis running fastest.
    sizes = [size for _, size in stage.mesh]
    at = [axis for axis, _ in stage.mesh].index(stage.batch_axes[0])
    ranks = [place // math.prod(sizes[at + 1 :]) % sizes[at] for place in range(len(devices))]
    kinds = [
        frozenset(problem.cluster.device(d).name for d, rank in zip(devices, ranks, strict=True) if rank == mine)
        for mine in range(sizes[at])
    ]
    samples = spread_samples(plan, stage)
    found: dict[tuple[int, ...], int] = {}
    for kind in dict.fromkeys(kinds):
        mine = tuple(sorted(d for d, rank in zip(devices, ranks, strict=True) if kinds[rank] == kind))
        found[mine] = max(count for count, other in zip(samples, kinds, strict=True) if other == kind)
    return dict(sorted(found.items()))


def read_chunks(plan: Plan, model: Model) -> tuple[Chunk, ...]:
    """The stages of a plan whose structure is sound."""
    ranks = num_ranks(plan)
    live = {axis for stage in plan.stages for axis, size in stage.mesh if size > 1}
    found = []
    for number, stage in enumerate(plan.stages):
        first, last = (model.position[name] for name in stage.operators)
        names = [model.graph.operators[i].name for i in range(first, last + 1)]
        globs = [glob for glob in stage.recompute if glob not in names]
        again = (
            i
            for i, name in enumerate(names, first)
            if name in stage.recompute or any(matches(glob, name) for glob in globs)
        )
        found.append(
            Chunk(
                number=number,
                stage=stage,
                rank=number % ranks,
                operators=range(first, last + 1),
                sizes={axis: size for axis, size in stage.mesh if axis in live},
                samples=max(spread_samples(plan, stage)),
                shares=spread_samples(plan, stage),
                again=frozenset(again),
            )
        )
    return tuple(found)


def place(chunk: Chunk, model: Model) -> Iterator[Violation]:
    """Writes `chunk.placed`; yields what cannot be placed as the plan says."""
    stage, graph = chunk.stage, model.graph
    names = {graph.operators[i].name for i in chunk.operators}
    # The name of an operator names it alone, even if it reads like a module of others.
    globs = sorted((k for k in stage.shardings if k not in names), key=lambda k: -len(k.translate(_WILD)))
    used: set[str] = set()
    followers: list[tuple[int, str, str]] = []
    for index in chunk.operators:
        name = graph.operators[index].name
        key = name if name in stage.shardings else next((g for g in globs if matches(g, name)), None)
        entry: Mapping[str, AxisSharding] = {} if key is None else stage.shardings[key]
        mine = chunk.placed.setdefault(index, {})
        for axis in chunk.sizes:
            mine[axis] = model.default(index, batch=axis in stage.batch_axes)
            if axis not in entry or key is None:
                continue
            wanted = Placed(inputs=entry[axis].inputs, outputs=entry[axis].outputs)
            if wanted in model.legal(index):
                mine[axis] = wanted
                used.add(key)
            elif matches_operator(key, name):
                yield Violation(
                    where=f"{chunk.where}.shardings.{key}.{axis}",
                    what=f"{name} cannot have {_text(wanted)}: its rule allows "
                    + "; ".join(map(_text, model.legal(index))),
                )
            else:
                mine[axis] = model.default(index, batch=False)
                followers.append((index, axis, key))
        if key is not None and matches_operator(key, name):
            used.add(key)
    for key, axes in stage.shardings.items():
        if key not in used:
            yield Violation(where=f"{chunk.where}.shardings.{key}", what="names no operator that can be placed so")
        for axis in axes:
            if axis not in dict(stage.mesh):
                yield Violation(where=f"{chunk.where}.shardings.{key}.{axis}", what="the mesh has no such axis")
    for index, axis, key in followers:
        _follow(chunk, model, index, axis, key)


_WILD = str.maketrans("", "", "*?")


def _text(placed: Placed) -> str:
    return f"{','.join(placed.inputs)} -> {','.join(placed.outputs)}"


def _follow(chunk: Chunk, model: Model, index: int, axis: str, key: str) -> None:
    """An operator of a sharded module that cannot be placed as its key says does as its linkage group's leader asks."""
    unit = model.blocks.units[model.unit_of[index]]
    for group in model.linkage.types[unit.type].groups:
        members = [unit.start + member for member in group.members]
        leader = unit.start + group.leader
        if index in members and leader in chunk.placed and matches(key, model.graph.operators[leader].name):
            for way in model.ways(unit.type, group):
                if way[members.index(leader)] == chunk.placed[leader][axis]:
                    chunk.placed[index][axis] = way[members.index(index)]


def remainders(
    model: Model, index: int, placed: Mapping[str, Placed], sizes: Mapping[str, int], samples: int
) -> list[str]:
    """What of an operator does not divide evenly: each factor by the product of all axes that split it."""
    factors = model.graph.operators[index].rule.factors
    parts: dict[int, int] = {}
    for axis, mine in placed.items():
        number = model.legal(index)[mine]
        if number is not None:
            parts[number] = parts.get(number, 1) * sizes[axis]
    found = []
    for number, count in parts.items():
        factor = factors[number]
        extent = samples if factor.is_batch else factor.size
        if extent % count:
            what = "samples" if factor.is_batch else f"of factor {factor.name}"
            found.append(f"{extent} {what} do not divide into {count} parts")
    return found


def uneven(chunk: Chunk, model: Model) -> Iterator[Violation]:
    """Splits that do not divide evenly."""
    for index, placed in chunk.placed.items():
        left = [remainders(model, index, placed, chunk.sizes, samples) for samples in dict.fromkeys(chunk.shares)]
        for what in dict.fromkeys(what for some in left for what in some):
            name = model.graph.operators[index].name
            yield Violation(where=f"{chunk.where}.shardings.{name}", what=f"{what} on {dict(chunk.sizes)}")
