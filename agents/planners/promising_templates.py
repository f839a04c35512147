"""Promising templates: from which meshes and numbers of micro-batches a search of signatures should begin.

Two kinds of templates often lead to much faster plans: those that overflow memory by a little, and those that recompute
everything to fit. Planners make the first kind fit, and the second kind faster, with recomputation of some units, other
cuts, or other signatures. So templates that differ only in recomputation are one group here. The step time of a group
with just enough recomputation is estimated by interpolation between its templates with the least and the most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from agents.sampling.expert import Grid
from automap.arrays import Floats, Ints, Mask, numbered, row_digests
from automap.space.space import PlanSpace, Values

NEARLY_FITS = 0.5
"""Largest overflow, as a share of a device's memory, that a planner is expected to remove from a template (assumed)."""
BEGINS = 0.7
"""Largest overflow with which a template may be the first plan of its mesh, where it promises more than those of the
mesh that fit (assumed; with 0.2 the results of `benchmarks/network_gap.py` differ no more than those of two runs)."""
FITTING = 2.0
"""A plan with full recomputation that overflows by the share x of a device's memory is assumed to become slower by the
share `FITTING` * x of its step time when it is made to fit."""
TRANSFERRED = 256
"""Number of promising templates whose skeletons are tried with the signatures of the best plans (assumed)."""
DONORS = 4
"""Largest number of plans whose signatures a skeleton takes, of those that split work over the same axes (assumed). It
also takes those of the best plan of each other set of axes: without these, a mixture of experts on 64 devices ended 1.2
times slower, because all templates on the mesh of its best plan are slow."""
RESHAPED = 4
"""Number of pairs of inner axes whose best plan is tried on other shapes (assumed)."""
SHAPES = 128
"""Number of other shapes for each of these plans: those with the nearest logarithms of sizes (assumed)."""
VARIED = 32
"""Number of plans that are tried with other recomputation and ZeRO stages (assumed)."""
AT_ONCE = 256
"""Number of plans that are priced between two looks at the clock (assumed)."""


class Promise(NamedTuple):
    """Groups of templates that differ in recomputation alone, and the estimated step time of each group."""

    light: Ints
    """[n] row of the template of each group that recomputes least."""
    heavy: Ints
    """[n] row of the template of each group that recomputes most."""
    seconds: Floats
    """[n] estimated step time with as much recomputation as memory requires, or with the most if that does not fit."""
    overflow: Floats
    """[n] least overflow of memory in the group, as a share of a device's; at most 0 where a template fits."""


def promises(space: PlanSpace, grid: Grid) -> Promise:
    """Estimates the step times of templates with just as much recomputation as they need to fit.

    Args:
        space: the plan space.
        grid: templates with their prices.
    """
    first = space.first
    group, _ = numbered(row_digests(grid.values, without=slice(first.recompute, first.zero)))
    # The rows of each group with the lightest and with the heaviest level of recomputation.
    order = np.lexsort((grid.values[:, first.recompute], group))
    starts = np.flatnonzero(np.r_[True, np.diff(group[order]) > 0])
    light, heavy = order[starts], order[np.r_[starts[1:], len(order)] - 1]
    one, other = grid.prices[light], grid.prices[heavy]
    share = _share(one[:, 1], other[:, 1])
    seconds = one[:, 0] + share * (other[:, 0] - one[:, 0])
    # A template between the two that fits may be faster than the interpolation.
    fitting_s = np.where(grid.prices[order, 1] <= 0.0, grid.prices[order, 0], np.inf)
    seconds = np.minimum(seconds, np.minimum.reduceat(fitting_s, starts))
    return Promise(light, heavy, seconds, np.minimum(one[:, 1], other[:, 1]))


def promising_meshes(space: PlanSpace, grid: Grid) -> Ints:
    """[n, slots] one template for each mesh, number of micro-batches and number of virtual stages.

    They are sorted by the estimates of `promises`, the fastest first; those that overflow memory by much come last.
    """
    rows: Ints = grid.values[_promising(space, grid)]
    return rows


def _promising(space: PlanSpace, grid: Grid) -> Ints:
    """[n] the rows of a grid that `promising_meshes` returns."""
    found = promises(space, grid)
    over = np.maximum(found.overflow, 0.0)
    rank = np.lexsort((found.seconds * (1.0 + FITTING * over), over > NEARLY_FITS))
    shape, firsts = numbered(row_digests(grid.values[:, : space.first.schedule]))
    by_promise = list(dict.fromkeys(shape[found.light[rank]].tolist()))
    seconds, overflow = grid.prices.T
    over, hopeless = np.maximum(overflow, 0.0), overflow > BEGINS
    order = np.lexsort((np.where(hopeless, overflow, seconds * (1.0 + FITTING * over)), hopeless))
    best = np.empty_like(firsts)
    # Of several rows of a shape, the last write stays: that of its first row in `order`.
    best[shape[order[::-1]]] = order[::-1]
    rows: Ints = best[by_promise]
    return rows


def like_the_best(space: PlanSpace, grid: Grid, found: Ints, should_stop: Callable[[], bool] = lambda: False) -> Grid:
    """Gives the signatures of good plans to promising skeletons.

    Signatures that are good on one mesh are mostly good on another, and templates may not have them. The skeletons are
    those of the `TRANSFERRED` most promising meshes of the templates, and those of the good plans. Each skeleton takes
    the signatures of up to `DONORS` good plans that split work over the same axes of the mesh, and those of the best
    plan for each other set of axes, as far as they are legal. The most promising of these plans are also priced on
    other shapes (`with_other_shapes`), and with the recomputation and the ZeRO stages of the templates of their mesh.

    Args:
        space: the plan space.
        grid: templates with their prices.
        found: [k, slots] plans that planners have found, the best first.
        should_stop: called now and then; once it returns true, the plans that have been priced until then are all.

    Returns:
        The fastest plan that fits, if one does; then one plan for each mesh, number of micro-batches and number of
        virtual stages, in the order of `promising_meshes`; all with their prices.
    """
    if not len(found):
        return _priced(space, found, should_stop)
    own = found[numbered(row_digests(found[:, : space.first.schedule]))[1]]
    rows = np.concatenate([promising_meshes(space, grid)[:TRANSFERRED], own])
    tried = _priced(space, np.concatenate([own, _with_donors(space, rows, found)]), should_stop)
    if not should_stop():
        tried = tried.joined(_priced(space, with_other_shapes(space, promising_meshes(space, tried)), should_stop))
    if not should_stop():
        varied = _varied(space, grid, promising_meshes(space, tried)[:VARIED])
        tried = tried.joined(_priced(space, varied, should_stop))
    seconds = np.where(tried.prices[:, 1] <= 0.0, tried.prices[:, 0], np.inf)
    # Where memory is scarce, a plan that fits may look slow beside promises; for long it may be the only one that fits.
    fastest = [seconds.argmin()] if np.isfinite(seconds).any() else []
    rows = np.concatenate([np.array(fastest, dtype=np.int64), _promising(space, tried)])
    return Grid(tried.values[rows], tried.prices[rows])


def with_other_shapes(space: PlanSpace, found: Ints) -> Ints:
    """[n, slots] good plans with other numbers of stages, replicas, micro-batches and virtual stages.

    Signatures mean the same on all shapes with the same inner axes, also on shapes that templates do not have. If the
    number of chunks changes, pipelines are cut evenly. There are three plans for each shape: the ranks recompute as
    those of the good plan at the same place, nothing, or everything.

    Args:
        space: the plan space.
        found: [k, slots] plans, the best first; the best one of each of the first `RESHAPED` pairs of inner axes is
            used.
    """
    first, plans = space.first, []
    for values in _of_unlike_axes(space, found):
        shape = space.shape(values)
        alike = [other for other in space.shapes if (other.tp, other.middle) == (shape.tp, shape.middle)]
        sizes = np.log(np.array([(other.pp, other.num_micro_batches, other.virtual) for other in alike]))
        own = np.log(np.array([shape.pp, shape.num_micro_batches, shape.virtual]))
        for at in np.argsort(np.abs(sizes - own).sum(axis=1), kind="stable")[:SHAPES].tolist():
            plan = np.array(values)
            plan[: first.schedule] = space.meshes.values(alike[at])
            if alike[at].pp != shape.pp or alike[at].virtual != shape.virtual:
                plan[first.cut : first.recompute] = 0
            ranks = np.arange(alike[at].pp)
            plan[first.recompute + ranks] = plan[first.recompute + ranks * shape.pp // len(ranks)]
            plans.append(plan)
            for level in (0, len(space.levels) - 1):
                other = plan.copy()
                other[first.recompute : first.zero] = level
                plans.append(other)
    rows = np.array(plans, dtype=np.int64).reshape(len(plans), len(space.slots))
    return space.repair_many(rows, first.schedule)


def _of_unlike_axes(space: PlanSpace, found: Ints) -> list[Values]:
    """The first plan of each of the first `RESHAPED` pairs of inner axes among [n, slots] plans."""
    best: dict[tuple[int, int], Values] = {}
    for values in map(tuple, found.tolist()):
        shape = space.shape(values)
        best.setdefault((shape.tp, shape.middle), values)
        if len(best) == RESHAPED:
            break
    return list(best.values())


def _with_donors(space: PlanSpace, rows: Ints, found: Ints) -> Ints:
    """[n, slots] the skeletons of some plans with the signatures of others, see `like_the_best`.

    Args:
        space: the plan space.
        rows: [m, slots] plans whose skeletons are used.
        found: [k, slots] plans whose signatures are used, the best first.
    """
    first = space.first.signature
    donors = found[numbered(row_digests(found[:, first:]))[1]]
    axes, of_donors = _split_axes(space, rows), _split_axes(space, donors)
    plans = []
    for some in np.unique(axes, axis=0):
        taken = np.concatenate(
            [
                np.flatnonzero((of_donors == other).all(axis=1))[: DONORS if (other == some).all() else 1]
                for other in np.unique(of_donors, axis=0)
            ]
        )
        skeletons = rows[(axes == some).all(axis=1)]
        given = np.repeat(skeletons, len(taken), axis=0)
        given[:, first:] = np.tile(donors[taken, first:], (len(skeletons), 1))
        plans.append(given)
    repaired = space.repair_many(np.concatenate(plans), first)
    distinct: Ints = repaired[numbered(row_digests(repaired))[1]]
    return distinct


def _varied(space: PlanSpace, grid: Grid, plans: Ints) -> Ints:
    """[n, slots] the templates with the shape of one of `plans`, [m, slots], and with its signatures."""
    first = space.first
    keys = row_digests(np.concatenate([plans[:, : first.cut], grid.values[:, : first.cut]]))
    of_plans, of_grid = keys[: len(plans)], keys[len(plans) :]
    found = [plans[:0]]
    for plan, key in zip(plans, of_plans, strict=True):
        others = grid.values[np.flatnonzero(of_grid == key)].copy()
        others[:, first.signature :] = plan[first.signature :]
        found.append(others)
    return np.concatenate(found)


def _priced(space: PlanSpace, plans: Ints, should_stop: Callable[[], bool]) -> Grid:
    """Plans with their prices; only the first of them once `should_stop` returns true."""
    prices = [space.price(plans[:AT_ONCE])]
    for first in range(AT_ONCE, len(plans), AT_ONCE):
        if should_stop():
            break
        prices.append(space.price(plans[first : first + AT_ONCE]))
    joined = np.concatenate(prices)
    return Grid(plans[: len(joined)], joined)


def split_axes(space: PlanSpace, values: Values) -> tuple[bool, ...]:
    """Whether the dp axis, the middle axis and the tp axis of the mesh of a plan have more than one device."""
    shape = space.shape(values)
    return shape.dp > 1, shape.middle > 1, shape.tp > 1


def _split_axes(space: PlanSpace, rows: Ints) -> Mask:
    """[n, 3] `split_axes` of [n, slots] plans."""
    return np.array([split_axes(space, tuple(row.tolist())) for row in rows], dtype=np.bool_).reshape(-1, 3)


def _share(over: Floats, under: Floats) -> Floats:
    """[n] the share of the way from one overflow to a smaller one at which the overflow is 0; between 0 and 1."""
    way: Floats = np.clip(over / np.maximum(over - under, 1e-9), 0.0, 1.0)
    return way
