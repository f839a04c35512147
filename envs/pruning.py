"""Pruning: what is not asked, and what that can lose. Every rule is on a switch of its own.

Three rules are built into the plan space, since nothing would be gained by asking: `parameters_only`, `linkage_groups`
and `repeated_blocks`; so is `device_symmetry`. Their effect is counted. The others take a space and leave a smaller
one, which every searcher searches alike: `prune(space, ("memory", "dominated_signatures"))`.

Lossless rules keep a plan as fast as the fastest that fits. Illegal values are no rule: they are no plans.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from automap.bounds.enumeration import Enumeration
from automap.bounds.partial_plans import BoundTable
from automap.price.kernels.array_types import Record
from automap.price.kernels.collectives import UNKNOWN
from automap.price.kernels.cost_records import UNIT_COST_DTYPE
from automap.price.kernels.stage_records import Stage
from automap.price.lowered_plan import Segment
from automap.space.count import alone, count_decades, grouped
from automap.space.kernels.masks import signature_mask
from automap.space.limits import Limits
from automap.space.space import PlanSpace
from automap.space.templates import templates

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

BALANCE = 0.5
"""Of the mean weight of a chunk: how far a cut may stray from an even one under `balanced_cuts`."""
ASKED_GROUPS = 24
"""Groups that `influential_groups` leaves open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What one rule leaves."""

    rule: str
    before: float
    """log10 of the number of plans."""
    after: float
    lossless: bool


# -- shapes ---------------------------------------------------------------------------------------------------------


def shape_bounds(space: PlanSpace) -> Floats:
    """[shapes, 2] seconds and overflow that no plan of a shape goes below.

    Those of `BoundTable`; where there is one stage, of every choice of recomputation and ZeRO with signatures at their
    best.
    """
    found = BoundTable(space).shape_bounds.copy()
    enumeration = Enumeration(space)
    number_of = {space.meshes.values(shape): number for number, shape in enumerate(space.shapes)}
    some = enumeration.root()
    while some.values.shape[1] < len(space.meshes.values(space.shapes[0])):
        some = enumeration.extend(some)
    some = some.take(np.array([space.shape(row).pp == 1 for row in some.values.tolist()], dtype=np.bool_))
    if not len(some):
        return found
    depth = some.values.shape[1]
    while some.values.shape[1] < space.first_signature:
        some = enumeration.extend(some)
    some = enumeration.bounded(some)
    sharper = np.full_like(found, np.inf)
    for row, bound in zip(some.values.tolist(), some.bounds, strict=True):
        number = number_of[tuple(row[:depth])]
        sharper[number] = np.minimum(sharper[number], bound)
    return np.where(np.isfinite(sharper), np.maximum(found, sharper), found)


def memory(space: PlanSpace) -> Limits:
    """Shapes of which a lower bound on memory says that no plan fits are left out. Lossless.

    Where none fits, the shape that comes nearest stays.
    """
    overflow = shape_bounds(space)[:, 1]
    return _shapes(space, overflow <= max(0.0, float(overflow.min())))


def beaten_shapes(space: PlanSpace) -> Limits:
    """Shapes of which no plan is faster than the best template that fits are left out. Lossless.

    The template stays in the space; the others of the same speed may go.
    """
    plans = np.array([values for _, values in templates(space)], dtype=np.int64)
    prices = space.price(plans) if len(plans) else np.empty((0, 2))
    best = float(prices[prices[:, 1] <= 0.0, 0].min(initial=math.inf))
    return _shapes(space, shape_bounds(space)[:, 0] <= best)


def _shapes(space: PlanSpace, stay: Mask) -> Limits:
    left = frozenset(itertools.compress(space.shapes, stay))
    return Limits(shapes=left.__contains__)


# -- cuts -----------------------------------------------------------------------------------------------------------


def balanced_cuts(space: PlanSpace) -> Limits:
    """Chunks end within `BALANCE` mean chunk weights of where an even cut would be. Lossy.

    Loses the optimum where memory, a slow link or ranks of unlike speed ask for very uneven chunks.
    """
    total = space.cumulative_weight
    windows = {}
    for num_chunks in {shape.num_chunks for shape in space.shapes if shape.num_chunks > 1}:
        mean = total[-1] / num_chunks
        rows = []
        earliest = 0
        for chunk in range(num_chunks):
            low, high = space.constrained.window(chunk, num_chunks)
            low = max(low, earliest + 1)
            ends = np.arange(low, high + 1)
            away = np.abs(total[ends] - (chunk + 1) * mean)
            earliest = int(ends[away.argmin()])
            near = ends[away <= BALANCE * mean]
            rows.append([min(int(near.min(initial=earliest)), earliest), max(int(near.max(initial=0)), earliest)])
        for chunk in range(1, num_chunks):
            rows[chunk][0] = max(rows[chunk][0], rows[chunk - 1][0] + 1)
        for chunk in range(num_chunks - 2, -1, -1):
            rows[chunk][1] = min(rows[chunk][1], rows[chunk + 1][1] - 1)
        windows[num_chunks] = tuple((low, high) for low, high in rows)
    return Limits(windows=windows)


# -- signatures -----------------------------------------------------------------------------------------------------


def influence(space: PlanSpace) -> dict[tuple[int, int], float]:
    """(unit type, group) -> its share of the model's FLOPs and parameters."""
    graph = space.problem.graph
    units = space.linkage.blocks.units
    shares: dict[tuple[int, int], float] = {}
    for unit_type, unit in enumerate(space.linkage.types):
        times = sum(u.type == unit_type for u in units)
        for number, group in enumerate(unit.groups):
            ops = [space.operator(unit_type, m) for m in group.members]
            flops = sum(op.forward_flops.at(1) for op in ops) / max(graph.forward_flops, 1.0)
            weights = sum(
                graph.tensors[n].num_elements for op in ops for n in op.inputs if graph.tensors[n].role == "parameter"
            ) / max(graph.num_parameters, 1)
            shares[unit_type, number] = times * (flops + weights)
    return shares


def most_influential(space: PlanSpace, limit: int) -> frozenset[tuple[int, int]]:
    """The `limit` linkage groups with the largest share of FLOPs and parameters, as (unit type, group)."""
    shares = influence(space)
    ranked = sorted(shares, key=lambda key: (-shares[key], key))
    return frozenset(ranked[:limit])


def batch_split(space: PlanSpace) -> npt.NDArray[np.int64]:
    """[slots] the value of each signature that splits the batch, -1 where there is none."""
    found = np.full(len(space.slots), -1, dtype=np.int64)
    for number, slot in enumerate(space.slots):
        if slot.kind == "signature":
            unit = space.linkage.types[slot.unit_type]
            leader = unit.groups[slot.group].leader
            rule = space.operator(slot.unit_type, leader).rule
            factors = [signature.factor for signature in unit.signatures[leader]]
            split = [v for v, factor in enumerate(factors) if factor is not None and rule.factors[factor].is_batch]
            found[number] = split[0] if split else -1
    return found


def influential_groups(space: PlanSpace) -> Limits:
    """Groups beyond the `ASKED_GROUPS` with the largest share of FLOPs and parameters split the batch. Lossy.

    Loses the optimum where such a group gains from anything else. Where the batch does not divide, what does stays
    legal.
    """
    asked = most_influential(space, ASKED_GROUPS)
    by_batch = batch_split(space)
    stay = np.ones_like(space.arrays.obeys)
    for number, key in enumerate(space.group_rows):
        value = int(by_batch[space.first_signature + number * len(space.axes)])
        if key not in asked and value >= 0:
            first, count = space.arrays.groups[number][["first_value", "num_values"]]
            stay[:, first : first + count] = np.arange(count) == value
    return Limits(signatures=stay)


def dominated_signatures(space: PlanSpace) -> Limits:
    """A signature of a group goes where another one costs no more and no neighbour sees the difference. Lossless.

    On one mesh axis, whatever the signatures on the others: the same placements of everything that operators outside
    the group read or write, legal wherever the first one is, and no larger in any component of the unit's cost, on
    every mesh and in every recompute mode.
    """
    stay = np.ones_like(space.arrays.obeys)
    for number in range(len(space.group_rows)):
        first, count = space.arrays.groups[number][["first_value", "num_values"]]
        for axis in range(len(space.axes)):
            seen = _seen_by_others(space, number)
            for value, other in itertools.permutations(range(count), 2):
                here = stay[axis, first : first + count]
                obeys = space.arrays.obeys[axis, first : first + count]
                if here[value] and here[other] and obeys[other] >= obeys[value] and seen[value] == seen[other]:
                    here[value] = not _dominates(space, number, axis, other, value)
    return Limits(signatures=stay)


def _seen_by_others(space: PlanSpace, number: int) -> list[tuple[object, ...]]:
    """[values] placements of all operands of a group's members that others read, write or share."""
    (unit_type, group), (rows, assignment) = list(space.group_rows.items())[number]
    tables = space.evaluator.tables.arrays
    unit = space.linkage.types[unit_type]
    graph = space.problem.graph
    members = unit.groups[group].members
    operands = [(*op.inputs, *op.outputs) for op in (space.operator(unit_type, m) for m in range(len(unit.signatures)))]
    names = [name for m in members for name in operands[m]]
    others = {name for offset, own in enumerate(operands) if offset not in members for name in own}
    shared = {name for name, _, _ in space.evaluator.tied.parameters} | {unit.boundary_in, unit.boundary_out}
    start = space.linkage.blocks.representative(unit_type)
    inside = {name for op in graph.operators[start.start : start.stop] for name in op.outputs}
    found: list[tuple[object, ...]] = []
    for chosen in assignment:
        places: list[object] = []
        at = 0
        for row, signature in zip(rows, chosen, strict=True):
            operator = tables.operators[row]
            begin = tables.signatures[operator.first_signature + signature].first_placement
            for slot in range(operator.end - operator.first_operand):
                name = names[at]
                at += 1
                is_own = graph.tensors[name].role == "parameter" or name in inside
                if name in others or name in shared or not is_own:
                    places.append(tables.placements[begin + slot].item())
        found.append(tuple(places))
    return found


def _dominates(space: PlanSpace, number: int, axis: int, better: int, worse: int) -> bool:
    """Whether `better` is legal wherever `worse` is, and costs no more, on all meshes and beside all outer choices."""
    (unit_type, _), (_, assignment) = list(space.group_rows.items())[number]
    whole = int(space.arrays.groups[number]["whole"])
    for row, samples in BoundTable(space).settings:
        sizes = space.arrays.axes[row]
        free: list[Iterable[int]] = [range(len(assignment)) if size > 1 else [whole] for size in sizes]
        if sizes[axis] == 1:
            continue
        for picked in itertools.product(*free[:axis], [worse], *free[axis + 1 :]):
            instead = (*picked[:axis], better, *picked[axis + 1 :])
            if not _is_legal(space, number, sizes, samples, picked):
                continue
            if not _is_legal(space, number, sizes, samples, instead):
                return False
            for mode in space.evaluator.masks(unit_type).values():
                costs = [_unit_cost(space, number, row, samples, values, mode) for values in (picked, instead)]
                if not _costs_no_more(*costs):
                    return False
    return True


def _is_legal(space: PlanSpace, number: int, sizes: Floats, samples: int, picked: Sequence[int]) -> bool:
    rows, assignment = list(space.group_rows.values())[number]
    chosen = space.signatures(())
    mask = np.empty(len(assignment), dtype=np.bool_)
    meshes, of_meshes = sizes[None].copy(), np.array([samples], dtype=np.int64)
    for axis, value in enumerate(picked):
        signature_mask(space.evaluator.tables.arrays, space.arrays, number, axis, chosen, meshes, of_meshes, mask)
        if not mask[value]:
            return False
        chosen[rows, axis] = assignment[value]
    return True


def _unit_cost(space: PlanSpace, number: int, row: int, samples: int, picked: Sequence[int], mode: Mask) -> Record:
    """The cost of the unit of a group, on a distinct stage, where only the group is decided; a `UnitCostRow`."""
    (unit_type, _), (rows, assignment) = list(space.group_rows.items())[number]
    arrays, spans = space.arrays, space.evaluator.tables.spans
    first, last = int(spans[unit_type]), int(spans[unit_type + 1])
    chosen = np.full((last - first, len(space.axes)), -1, dtype=np.int64)
    chosen[rows - first] = assignment[list(picked)].T
    zero_axes = arrays.axes[row] > 1.0
    zero_axes[-1] = False
    return space.evaluator.unit_cost(
        Segment(unit=0, first=first, last=last, chosen=chosen, recomputed=mode),
        np.full(len(space.axes), UNKNOWN, dtype=np.int64),
        Stage(arrays.axes[row], arrays.links[row], arrays.hardware[row], zero_axes, float(samples)),
    )


def _costs_no_more(worse: Record, better: Record) -> bool:
    """Whether no component of a unit's cost is larger, nor the compute that nothing hides behind attention."""
    # More attention hides more of a ring: it is compared with the rest of the pass instead.
    attended = ("forward_attended_s", "backward_attended_s")
    plain = all(np.all(better[name] <= worse[name]) for name in UNIT_COST_DTYPE.names or () if name not in attended)
    rest = (
        better.forward_s - better.forward_attended_s <= worse.forward_s - worse.forward_attended_s
        and better.backward_s - better.backward_attended_s <= worse.backward_s - worse.backward_attended_s
    )
    return bool(plain and rest)


# -- all together ---------------------------------------------------------------------------------------------------

RULES: dict[str, tuple[Callable[[PlanSpace], Limits], bool]] = {
    "memory": (memory, True),
    "beaten_shapes": (beaten_shapes, True),
    "dominated_signatures": (dominated_signatures, True),
    "balanced_cuts": (balanced_cuts, False),
    "influential_groups": (influential_groups, False),
}
"""Name -> what it leaves, and whether it is lossless; in the order in which they are applied."""
LOSSLESS = tuple(name for name, (_, lossless) in RULES.items() if lossless)


def prune(space: PlanSpace, rules: Collection[str] = LOSSLESS) -> PlanSpace:
    """What is left of a space under some of `RULES`."""
    for name in RULES:
        if name in rules:
            space = _limited(space, RULES[name][0](space))
    return space


def _limited(space: PlanSpace, more: Limits) -> PlanSpace:
    old = space.limits
    merged = Limits(
        shapes=lambda shape: old.shapes(shape) and more.shapes(shape),
        windows={**old.windows, **more.windows},
        signatures=_both(old.signatures, more.signatures),
    )
    return PlanSpace(space.problem, space.evaluator, limits=merged)


def _both(one: Mask | None, other: Mask | None) -> Mask | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def steps(space: PlanSpace, rules: Collection[str] = tuple(RULES)) -> list[Step]:
    """What each rule leaves, one after the other: those built into the space, then some of `RULES`."""
    sizes = [
        ("", count_decades(space, signing=alone(space, views=True)), True),
        ("parameters_only", count_decades(space, signing=alone(space, views=False)), True),
        ("linkage_groups", count_decades(space, signing=grouped(space, every_unit=True)), False),
        ("repeated_blocks", space.decades, False),
    ]
    for name, (rule, lossless) in RULES.items():
        if name in rules:
            space = _limited(space, rule(space))
            sizes.append((name, space.decades, lossless))
    return [
        Step(rule=name, before=before, after=after, lossless=lossless)
        for (_, before, _), (name, after, lossless) in itertools.pairwise(sizes)
    ]


def symmetry_decades(space: PlanSpace) -> float:
    """log10 of the number of ways to exchange equal devices of a host, and equal hosts.

    `device_symmetry`, lossless: of so many plans, which differ only in which of them does what and cost the same, the
    space has one.
    """
    cluster = space.problem.cluster
    if cluster.bandwidth_GBps is not None:
        return 0.0
    exchanges = sum(
        node.count * math.lgamma(node.num_devices + 1) + math.lgamma(node.count + 1) for node in cluster.nodes
    )
    return exchanges / math.log(10.0)
