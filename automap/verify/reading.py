"""Reads the stages of a plan and the placement of each operator, from the document and the graph alone.

Units: samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from automap.globs import first_match, matches, matches_operator
from automap.plan import AxisSharding, Plan, Stage, parse_devices
from automap.problem import Problem
from automap.verify.model import Model, Placed
from ir.factors import may_be_uneven, shares_out


@dataclass(frozen=True, slots=True)
class Violation:
    """One fault of a plan."""

    where: str
    """The path in the plan document."""
    what: str
    """The fault, with the values that show it."""


@dataclass(kw_only=True, slots=True)
class Chunk:
    """A stage of the plan with its operators and placements."""

    number: int
    stage: Stage
    rank: int
    """The pipeline rank that runs the stage."""
    operators: range
    """The indices of the operators in the graph."""
    sizes: Mapping[str, int]
    """Axis -> its size, for axes that have more than one rank in some stage, outermost first."""
    samples: int
    """The largest of `shares`, or that of the devices under consideration."""
    shares: tuple[int, ...]
    """The result of `spread_samples`."""
    again: frozenset[int]
    """The operators that the backward pass recomputes."""
    placed: dict[int, dict[str, Placed]] = field(default_factory=dict)
    """Operator -> axis -> placements of its operands and results."""

    @property
    def where(self) -> str:
        """The path in the document."""
        return f"stages[{self.number}]"


def num_ranks(plan: Plan) -> int:
    """The number of pipeline ranks: of the stages before the first one that has the devices of stage 0."""
    where = [parse_devices(stage.devices) for stage in plan.stages]
    return where.index(where[0], 1) if where[0] in where[1:] else len(where)


def spread_samples(plan: Plan, stage: Stage) -> tuple[int, ...]:
    """[ranks of the first batch axis] the samples of a micro-batch if all ranks had as many as this one.

    Where no shares are stated, all ranks count as the one with the most samples.
    """
    ranks = dict(stage.mesh).get(stage.batch_axes[0], 1) if stage.batch_axes else 1
    shares = stage.batch_shares or (math.ceil(plan.samples_per_micro_batch / ranks),) * ranks
    return tuple(share * ranks for share in shares)


def alike_ranks(plan: Plan, stage: Stage, problem: Problem) -> dict[tuple[int, ...], int]:
    """Devices of a stage whose ranks on the first batch axis have the same kinds of devices -> their samples.

    The samples are the largest `spread_samples` of these ranks. Where no unlike shares are stated, all devices count as
    alike.
    """
    devices = parse_devices(stage.devices)
    if len({*spread_samples(plan, stage)}) == 1:
        return {devices: max(spread_samples(plan, stage))}
    # Positions are numbered with the last axis running fastest.
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
    """The stages of a plan whose structure is sound, without placements."""
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


def layer_operators(chunk: Chunk, model: Model) -> list[int]:
    """The operators of a stage in layers."""
    return [i for i in chunk.operators if model.unit_of[i] in model.layers]


def place_operators(chunk: Chunk, model: Model) -> Iterator[Violation]:
    """Fills `chunk.placed`; yields the operators that cannot be placed as the plan says."""
    stage, graph = chunk.stage, model.graph
    names = {graph.operators[i].name for i in chunk.operators}
    # The name of an operator means this operator alone, even if it reads like a module of others.
    globs = tuple(sorted((k for k in stage.shardings if k not in names), key=lambda k: -len(k.translate(_WILD))))
    used: set[str] = set()
    followers: list[tuple[int, str, str]] = []
    for index in chunk.operators:
        name = graph.operators[index].name
        key = name if name in stage.shardings else first_match(globs, name)
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
                    f"{chunk.where}.shardings.{key}.{axis}",
                    f"{name} cannot have {_text(wanted)}: its rule allows " + "; ".join(map(_text, model.legal(index))),
                )
            else:
                mine[axis] = model.default(index, batch=False)
                followers.append((index, axis, key))
        if key is not None and matches_operator(key, name):
            used.add(key)
    for key, axes in stage.shardings.items():
        if key not in used:
            yield Violation(
                f"{chunk.where}.shardings.{key}",
                "no operator of the stage has this name, or none can have these placements",
            )
        for axis in axes:
            if axis not in dict(stage.mesh):
                yield Violation(f"{chunk.where}.shardings.{key}.{axis}", "the mesh has no such axis")
    for index, axis, key in followers:
        _follow(chunk, model, index, axis, key)


def place_chunks(plan: Plan, model: Model) -> tuple[Chunk, ...]:
    """The stages of a plan without faults, with every operator placed."""
    chunks = read_chunks(plan, model)
    for chunk in chunks:
        assert not tuple(place_operators(chunk, model)), "the plan has other faults"
    return chunks


_WILD = str.maketrans("", "", "*?")


def _text(placed: Placed) -> str:
    return f"{','.join(placed.inputs)} -> {','.join(placed.outputs)}"


def _follow(chunk: Chunk, model: Model, index: int, axis: str, key: str) -> None:
    """Places an operator that the key of its module does not fit, as the leader of its linkage group requires."""
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
    """The factors of an operator that do not divide into as many parts as the mesh axes split them, as messages.

    Args:
        model: the model, with its sharding rules.
        index: index of the operator.
        placed: name of an axis -> placements of the operator on it.
        sizes: name of an axis -> number of ranks.
        samples: size of the batch factor.
    """
    rule = model.graph.operators[index].rule
    parts: dict[int, int] = {}
    for axis, mine in placed.items():
        number = model.legal(index)[mine]
        if number is not None:
            parts[number] = parts.get(number, 1) * sizes[axis]
    found = []
    for number, count in parts.items():
        factor = rule.factors[number]
        extent = samples if factor.is_batch else factor.size
        if not shares_out(extent, count, unevenly=model.is_uneven(index) and may_be_uneven(rule, number)):
            what = "samples" if factor.is_batch else f"of factor {factor.name}"
            found.append(f"{extent} {what} do not divide into {count} parts")
    return found


def uneven(chunk: Chunk, model: Model) -> Iterator[Violation]:
    """The splits of a stage that do not divide evenly over its ranks."""
    shares = tuple(dict.fromkeys(chunk.shares))  # of each rank, mostly the same
    for index, placed in chunk.placed.items():
        left = [remainders(model, index, placed, chunk.sizes, samples) for samples in shares]
        for what in dict.fromkeys(what for some in left for what in some):
            name = model.graph.operators[index].name
            yield Violation(f"{chunk.where}.shardings.{name}", f"{what} on {dict(chunk.sizes)}")
