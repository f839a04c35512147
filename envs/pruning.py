"""Pruning: rules that make a plan space smaller, and what they can lose. Every rule can be switched on by itself.

Four rules are built into the plan space: `parameters_only`, `linkage_groups`, `repeated_blocks` and `device_symmetry`.
Their effect is only counted here. The other rules take a space and return a smaller one, which every searcher can use:
`prune(space, ("memory", "dominated_signatures"))`. Lossless rules keep a plan as fast as the fastest one that fits.
Illegal values are in no space, so no rule removes them.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from automap.bounds.enumeration import Enumeration
from automap.bounds.partial_plans import BoundTable
from automap.bounds.priced_templates import priced_templates
from automap.space.count import alone, count_decades, grouped
from automap.space.group_flow import group_flow
from automap.space.limits import Limits
from automap.space.space import PlanSpace
from envs.dominance import GroupSignatures

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

BALANCE = 0.5
"""Largest distance of a cut from an even one under `balanced_cuts`, in multiples of the mean weight of a chunk
(assumed)."""
OPEN_GROUPS = 24
"""Number of linkage groups whose signatures `influential_groups` leaves undecided (assumed)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The effect of one rule."""

    rule: str
    """Name of the rule."""
    before: float
    """log10 of the number of plans before it."""
    after: float
    """log10 of the number of plans that it leaves."""
    lossless: bool
    """Whether it keeps a plan as fast as the fastest one that fits."""


# -- shapes ---------------------------------------------------------------------------------------------------------

_BOUNDS: weakref.WeakKeyDictionary[PlanSpace, Floats] = weakref.WeakKeyDictionary()
"""Cache of `shape_bounds` by space, since two rules need them."""


def shape_bounds(space: PlanSpace) -> Floats:
    """[shapes, 2] lower bounds on the step time in seconds, and on the overflow of memory, of all plans of a shape.

    The bounds are those of `BoundTable`. For shapes with one stage they are sharper: the least lower bound over all
    choices of recomputation and ZeRO, with the signatures undecided.
    """
    if space not in _BOUNDS:
        _BOUNDS[space] = _shape_bounds(space)
    return _BOUNDS[space]


def _shape_bounds(space: PlanSpace) -> Floats:
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
    while some.values.shape[1] < space.first.signature:
        some = enumeration.extend(some)
    some = enumeration.bounded(some)
    sharper = np.full_like(found, np.inf)
    for row, bound in zip(some.values.tolist(), some.bounds, strict=True):
        number = number_of[tuple(row[:depth])]
        sharper[number] = np.minimum(sharper[number], bound)
    return np.where(np.isfinite(sharper), np.maximum(found, sharper), found)


def memory(space: PlanSpace) -> Limits:
    """Leaves out shapes of which, by the lower bound on memory, no plan fits. Lossless.

    If that holds for all shapes, the one with the least overflow stays.
    """
    overflow = shape_bounds(space)[:, 1]
    return _shapes(space, overflow <= max(0.0, float(overflow.min())))


def beaten_shapes(space: PlanSpace) -> Limits:
    """Leaves out shapes of which, by the lower bound, every plan is slower than the best template that fits. Lossless.

    The template stays in the space; other plans that are as fast may be left out.
    """
    _, prices = priced_templates(space)
    best = float(prices[prices[:, 1] <= 0.0, 0].min(initial=math.inf))
    return _shapes(space, shape_bounds(space)[:, 0] <= best)


def _shapes(space: PlanSpace, stay: Mask) -> Limits:
    """The limits that leave the shapes where `stay`, [shapes], is true."""
    left = frozenset(itertools.compress(space.shapes, stay))
    return Limits(shapes=left.__contains__)


# -- cuts -----------------------------------------------------------------------------------------------------------


def balanced_cuts(space: PlanSpace) -> Limits:
    """Keeps cuts that are at most `BALANCE` mean chunk weights away from an even cut. Lossy.

    It loses the optimum where memory, a slow link or ranks of different speed require very uneven chunks.
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


# -- recomputation --------------------------------------------------------------------------------------------------


def one_mode_a_rank(space: PlanSpace) -> Limits:
    """Keeps levels of recomputation in which all units of a pipeline rank have the same mode. Lossy.

    It loses the optimum where it is best that only some of the units recompute.
    """
    return Limits(mixes=False)


# -- signatures -----------------------------------------------------------------------------------------------------


def influence(space: PlanSpace) -> dict[tuple[int, int], float]:
    """(unit type, group) -> sum of its shares of the model's FLOPs and parameters."""
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


def influential_groups(space: PlanSpace) -> Limits:
    """Leaves only the groups with the largest shares of FLOPs and parameters undecided; the others split the batch.
    Lossy.

    It loses the optimum where one of the other groups gains from another signature. Where the batch cannot be split,
    other signatures stay legal.
    """
    open_groups = most_influential(space, OPEN_GROUPS)
    by_batch = group_flow(space).batch
    stay = np.ones_like(space.arrays.obeys)
    for number, key in enumerate(space.group_rows):
        value = int(by_batch[number])
        if key not in open_groups and value >= 0:
            first, count = space.arrays.groups[number][["first_value", "num_values"]]
            stay[:, first : first + count] = np.arange(count) == value
    return Limits(signatures=stay)


def dominated_signatures(space: PlanSpace) -> Limits:
    """Leaves out signatures that another signature of the group dominates, see `envs.dominance`. Lossless."""
    stay = np.ones_like(space.arrays.obeys)
    for number, (first, count) in enumerate(space.arrays.groups[["first_value", "num_values"]].tolist()):
        values = slice(first, first + count)
        signatures = GroupSignatures(space, number)
        outside = signatures.placements_outside()
        for axis in range(len(space.axes)):
            here, obeys = stay[axis, values], space.arrays.obeys[axis, values]
            for value, other in itertools.permutations(range(count), 2):
                if here[value] and here[other] and obeys[other] >= obeys[value] and outside[value] == outside[other]:
                    here[value] = not signatures.dominates(axis, other, value)
    return Limits(signatures=stay)


# -- all together ---------------------------------------------------------------------------------------------------

RULES: dict[str, tuple[Callable[[PlanSpace], Limits], bool]] = {
    "memory": (memory, True),
    "beaten_shapes": (beaten_shapes, True),
    "dominated_signatures": (dominated_signatures, True),
    "balanced_cuts": (balanced_cuts, False),
    "one_mode_a_rank": (one_mode_a_rank, False),
    "influential_groups": (influential_groups, False),
}
"""Name -> rule, and whether it is lossless; in the order in which rules are applied."""
LOSSLESS = tuple(name for name, (_, lossless) in RULES.items() if lossless)


def prune(space: PlanSpace, rules: Collection[str] = LOSSLESS) -> PlanSpace:
    """The plans of a space that some of `RULES` keep."""
    for name in RULES:
        if name in rules:
            space = _limited(space, RULES[name][0](space))
    return space


def _limited(space: PlanSpace, more: Limits) -> PlanSpace:
    """The space under further limits; the same one where they leave nothing out."""
    old = space.limits
    signs_all = more.signatures is None or not (space.arrays.obeys & ~more.signatures).any()
    if signs_all and not more.windows and more.mixes >= old.mixes and all(map(more.shapes, space.shapes)):
        return space
    merged = replace(
        old,
        shapes=lambda shape: old.shapes(shape) and more.shapes(shape),
        windows={**old.windows, **more.windows},
        signatures=_both(old.signatures, more.signatures),
        mixes=old.mixes and more.mixes,
    )
    return PlanSpace(space.problem, space.evaluator, limits=merged)


def _both(one: Mask | None, other: Mask | None) -> Mask | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def steps(space: PlanSpace, rules: Collection[str] = tuple(RULES)) -> list[Step]:
    """The effect of each rule, one after the other: those built into the space, then some of `RULES`."""
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

    This is the effect of `device_symmetry`, which is lossless: of so many plans that differ only by an exchange of
    equal devices, and so cost the same, the space has one.
    """
    cluster = space.problem.cluster
    if cluster.bandwidth_GBps is not None:
        return 0.0
    exchanges = sum(
        node.count * math.lgamma(node.num_devices + 1) + math.lgamma(node.count + 1) for node in cluster.nodes
    )
    return exchanges / math.log(10.0)
