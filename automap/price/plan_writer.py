"""Plan documents written from lowered plans.

`to_plan` writes a plan with the fewest keys: one glob for equal operators where possible, and no key for an operator
with the default signature. `automap.price.plan_reader.lower_plan` is its inverse.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from automap.globs import select
from automap.plan import AxisSharding, Plan, Schedule, Stage, Zero, format_devices, model_ref
from automap.price.evaluator import Evaluator
from automap.price.lowered_plan import LoweredPlan, Segment
from automap.price.stage_reader import default_signatures
from automap.schedule import words
from ir.graph import Operator

Defaults = Sequence[Sequence[tuple[int, int]]]
"""[unit types][operators] the pair of `default_signatures`."""


def to_plan(lowered: LoweredPlan, evaluator: Evaluator) -> Plan:
    """The plan document of a lowered plan, without estimate."""
    problem, axes = evaluator.problem, lowered.axes
    sharded = tuple(axis for axis, is_zero in zip(axes, lowered.zero_axes, strict=True) if is_zero) or axes[:1]
    num_ranks = len(lowered.layout.stages)
    widest = np.max([stage.axes for stage in lowered.layout.stages], axis=0)
    types = range(evaluator.blocks.num_types)
    defaults = [[default_signatures(evaluator, t, k) for k in range(len(evaluator.tables.rows(t)))] for t in types]
    stages = []
    for number, segments in enumerate(lowered.chunks):
        layout = lowered.layout.stages[number % num_ranks]
        sizes = [int(s) for s in layout.axes]
        # An axis with one rank in this stage and more in others is named too: operators have placements on it.
        named = [a for a, size in enumerate(widest) if size > 1]
        mesh = tuple((axes[a], sizes[a]) for a in named) or ((axes[0], 1),)
        names = [op.name for segment in segments for op in _segment_operators(evaluator, segment)]
        split = {a: _splits_batch(evaluator, segments, a, defaults) for a in named}
        batch_axes = [axes[a] for a in split if split[a]] if split else [axes[0]]
        shares = lowered.shares[number % num_ranks] if lowered.shares else None
        if shares is not None or lowered.rank_samples[number % num_ranks] != lowered.samples:
            # The axis over which samples are spread comes first, whatever most operators split on it.
            first = 0 if shares is not None else lowered.spread_over[number % num_ranks]
            split[first] = True
            batch_axes = [axes[first], *(axis for axis in batch_axes if axis != axes[first])]
        stages.append(
            Stage(
                operators=(names[0], names[-1]),
                devices=format_devices(layout.devices),
                mesh=mesh,
                batch_axes=tuple(batch_axes),
                batch_shares=shares,
                zero=Zero(stage=lowered.zero, axes=sharded if lowered.zero else ()),
                shardings=_shardings(evaluator, segments, names, split, axes, defaults),
                recompute=_recompute(evaluator, segments, names),
            )
        )
    return Plan(
        model=model_ref(problem.graph),
        cluster=problem.cluster.to_json(),
        training=problem.training,
        num_micro_batches=lowered.num_micro_batches,
        samples_per_micro_batch=lowered.samples,
        schedule=Schedule(
            kind=lowered.kind,  # type: ignore[arg-type]
            order=words(lowered.program, num_ranks) if lowered.kind == "explicit" else None,
        ),
        stages=tuple(stages),
        warnings=(*problem.graph.warnings, *problem.cluster.warnings),
    )


def _splits_batch(evaluator: Evaluator, segments: Iterable[Segment], axis: int, defaults: Defaults) -> bool:
    """Whether more operators split their batch over an axis than are whole on it; of equally many, true for the
    outermost axis alone."""
    more = 0
    for segment in segments:
        unit_type = evaluator.blocks.units[segment.unit].type
        offset = segment.first - int(evaluator.tables.spans[unit_type])
        for value, (whole, split) in zip(segment.chosen[:, axis], defaults[unit_type][offset:], strict=False):
            more += int(value == split) - int(value == whole)
    return more > 0 or (more == 0 and axis == 0)


def _segment_operators(evaluator: Evaluator, segment: Segment) -> Sequence[Operator]:
    """The operators of a segment, in order."""
    unit = evaluator.blocks.units[segment.unit]
    base = int(evaluator.tables.spans[unit.type])
    operators = evaluator.problem.graph.operators
    return operators[unit.start + segment.first - base : unit.start + segment.last - base]


def _shardings(
    evaluator: Evaluator,
    segments: Sequence[Segment],
    names: Sequence[str],
    batch: Mapping[int, bool],
    axes: Sequence[str],
    defaults: Defaults,
) -> Mapping[str, Mapping[str, AxisSharding]]:
    """`Stage.shardings`: the operators whose signature on some axis is not the default one.

    Args:
        batch: for the number of each axis that the mesh names, whether operators split their batch over it by default.
    """
    entries: dict[str, dict[str, AxisSharding]] = {}
    groups: dict[tuple[int, int], list[str]] = {}
    for segment in segments:
        unit_type = evaluator.blocks.units[segment.unit].type
        base = int(evaluator.tables.spans[unit_type])
        for k, op in enumerate(_segment_operators(evaluator, segment)):
            offset = segment.first - base + k
            table = evaluator.tables.linkage.types[unit_type].signatures[offset]
            entry = {}
            for a, splits in batch.items():
                value = int(segment.chosen[k, a])
                if value != defaults[unit_type][offset][splits]:
                    entry[axes[a]] = AxisSharding.of(table[value])
            entries[op.name] = entry
            groups.setdefault((unit_type, offset), []).append(op.name)
    return _compress(entries, groups.values(), names)


def _compress(
    entries: Mapping[str, Mapping[str, AxisSharding]], groups: Iterable[list[str]], names: Sequence[str]
) -> dict[str, Mapping[str, AxisSharding]]:
    """The entries with one glob for each group of equal operators, if a glob matches these operators and no others.

    Args:
        entries: name of an operator -> its shardings.
        groups: names of the operators at the same position in units of one type.
        names: all operators of the stage.
    """
    found: dict[str, Mapping[str, AxisSharding]] = {}
    for group in groups:
        entry = entries[group[0]]
        if not entry:
            continue
        glob = _glob(group)
        if all(entries[n] == entry for n in group) and set(select(glob, names)) == set(group):
            found[glob] = entry
        else:
            found.update({n: entries[n] for n in group if entries[n]})
    return found


def _glob(names: Sequence[str]) -> str:
    """The glob with one star for the part in which the names differ; a single name is returned as it is."""
    first, last = min(names), max(names)
    if first == last:
        return first
    start = 0
    while start < min(len(first), len(last)) and first[start] == last[start]:
        start += 1
    # The star replaces whole numbers: h.1 and h.12 become h.*, not h.1*.
    while start and first[start - 1].isdigit():
        start -= 1
    ends = [name[start:][::-1] for name in names]
    low, high = min(ends), max(ends)
    stop = 0
    while stop < min(len(low), len(high)) and low[stop] == high[stop]:
        stop += 1
    return first[:start] + "*" + low[:stop][::-1]


def _recompute(evaluator: Evaluator, segments: Sequence[Segment], names: Sequence[str]) -> tuple[str, ...]:
    """`Stage.recompute`: globs of modules for units that are recomputed as a whole, and of operators for others."""
    if all(segment.recomputed.all() for segment in segments):
        return ("**",)
    groups: dict[tuple[int, int], list[str]] = {}
    modules: dict[int, list[str]] = {}
    inside = set()
    for segment in segments:
        unit_type = evaluator.blocks.units[segment.unit].type
        operators = _segment_operators(evaluator, segment)
        if segment.recomputed.all():
            modules.setdefault(unit_type, []).append(_module([op.name for op in operators]))
        for k, op in enumerate(operators):
            if segment.recomputed[k]:
                inside.add(op.name)
                groups.setdefault((unit_type, k), []).append(op.name)
    found: list[str] = []
    named: set[str] = set()
    for paths in modules.values():
        # One glob for all modules or, where some of their kind are not recomputed, their names. The only layer of a
        # stage is written like the layers of other stages.
        every = _glob(paths) if len(paths) > 1 else re.sub(r"\b\d+\b", "*", paths[0])
        for glob in (every, *paths) if all(paths) else ():
            members = set(select(glob, names))
            if members <= inside and not members <= named:
                found.append(glob)
                named |= members
    for group in groups.values():
        if set(group) <= named:
            continue
        glob = _glob(group)
        # A star matches within one component, so modules at different depths may have no common glob.
        found += [glob] if set(group) <= set(select(glob, names)) <= inside else group
    return tuple(dict.fromkeys(found))


def _module(names: Sequence[str]) -> str:
    """The innermost module that contains all operators of these names; empty if there is none."""
    shared: list[str] = []
    for parts in zip(*(name.partition("/")[0].split(".") for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
