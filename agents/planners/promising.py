"""Promising templates: which mesh and number of micro-batches may lead to the best plan, before anything is solved.

Two kinds of templates often lead to much faster plans: those that overflow memory by a little, and those that recompute
everything to fit. Planners make them fit with recomputation of some units, other cuts, or other signatures. So
templates that differ only in recomputation are rated together. Their step time with just enough recomputation is
estimated, by interpolation between the template with the least recomputation and that with the most.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from agents.sampling.expert import Grid
from automap.arrays import Floats, Ints, Mask, numbered, row_digests
from automap.space.space import PlanSpace, Values

NEARLY_FITS = 0.5
"""Overflow up to which a template may be made to fit, as share of a device's memory."""
BEGINS = 0.7
"""Overflow up to which a planner begins with a promising template rather than with one of its mesh that fits
(assumed; with 0.2 `benchmarks/network_gap.py` ends as near, within what its runs differ by)."""
FITTING = 2.0
"""Share of the step time that a plan loses for each share of a device's memory by which it must still shrink when all
is recomputed (assumed)."""


TRANSFERRED = 256
"""Number of promising templates whose skeletons are tried with the signatures of the best plans (assumed)."""
DONORS = 4
"""Number of plans whose signatures a skeleton takes at most, of those that split work over the same axes (assumed). Of
those that split it over other axes it takes the best one of each set of axes: without, a mixture of experts on 64
devices whose best plan is on a mesh of which templates are slow ended 1.2 times slower."""
RESHAPED = 4
"""Number of pairs of inner axes whose best plan is tried on other shapes (assumed)."""
SHAPES = 128
"""Number of other shapes for each of them: the nearest by the logarithms of their sizes (assumed)."""
VARIED = 32
"""Number of plans that are tried with other recomputation and ZeRO stages (assumed)."""


class Promise(NamedTuple):
    """Templates that differ in recomputation alone, and what the best of them would take."""

    light: Ints
    """[n] row of the one that recomputes least."""
    heavy: Ints
    """[n] row of the one that recomputes most."""
    seconds: Floats
    """[n] step time with as much recomputation as it takes to fit, or with the most."""
    overflow: Floats
    """[n] overflow of memory then; at most 0 where one of them fits."""


def promises(space: PlanSpace, grid: Grid) -> Promise:
    """What templates would take with no more recomputation than it takes to fit.

    Args:
        space: the space.
        grid: templates with their prices.
    """
    first = space.first
    group, _ = numbered(row_digests(grid.values, without=slice(first.recompute, first.zero)))
    # Of each group the rows with the lightest and the heaviest level.
    order = np.lexsort((grid.values[:, first.recompute], group))
    starts = np.flatnonzero(np.r_[True, np.diff(group[order]) > 0])
    light, heavy = order[starts], order[np.r_[starts[1:], len(order)] - 1]
    one, other = grid.prices[light], grid.prices[heavy]
    share = _share(one[:, 1], other[:, 1])
    seconds = one[:, 0] + share * (other[:, 0] - one[:, 0])
    # A template that fits may recompute other operators than the levels between the two do.
    fitting_s = np.where(grid.prices[order, 1] <= 0.0, grid.prices[order, 0], np.inf)
    seconds = np.minimum(seconds, np.minimum.reduceat(fitting_s, starts))
    return Promise(light, heavy, seconds, np.minimum(one[:, 1], other[:, 1]))


def promising_meshes(space: PlanSpace, grid: Grid) -> Ints:
    """[n, slots] a template of each mesh with each number of micro-batches and of virtual stages.

    Those come first that may lead to the fastest plans; see `promises`.
    """
    found = promises(space, grid)
    over = np.maximum(found.overflow, 0.0)
    rank = np.lexsort((found.seconds * (1.0 + FITTING * over), over > NEARLY_FITS))
    shape, firsts = numbered(row_digests(grid.values[:, : space.first.schedule]))
    by_promise = list(dict.fromkeys(shape[found.light[rank]].tolist()))
    seconds, overflow = grid.prices.T
    over, hopeless = np.maximum(overflow, 0.0), overflow > BEGINS
    order = np.lexsort((np.where(hopeless, overflow, seconds * (1.0 + FITTING * over)), hopeless))
    best = np.empty_like(firsts)
    # The first row of each shape is written last.
    best[shape[order[::-1]]] = order[::-1]
    rows: Ints = grid.values[best[by_promise]]
    return rows


def like_the_best(space: PlanSpace, grid: Grid, found: Ints) -> Ints:
    """[n, slots] plans of promising skeletons with the signatures of good plans: the fastest that fits, then the most
    promising ones.

    What suits a model on one mesh mostly suits it on another, and templates may have none of it. A skeleton takes the
    signatures of each of the first `DONORS` good plans with distinct signatures that split work over the same axes of
    the mesh, and those of the best plan of each other set of axes, as far as they are legal. The most promising of
    these plans are also priced on other shapes (`with_other_shapes`), and with the recomputation and the ZeRO stages of
    the templates of their mesh. Good plans and those on other shapes may have skeletons that no template has. Behind
    the first plan there is one for each mesh with a number of micro-batches and of virtual stages; those that overflow
    memory by much come last.

    Args:
        space: the space.
        grid: templates with their prices, of which the `TRANSFERRED` most promising meshes are taken.
        found: [k, slots] plans that planners have found, the best first; the best of each mesh gives its skeleton too.
    """
    if not len(found):
        return found
    own = found[numbered(row_digests(found[:, : space.first.schedule]))[1]]
    rows = np.concatenate([promising_meshes(space, grid)[:TRANSFERRED], own])
    tried = _priced(space, np.concatenate([own, _with_donors(space, rows, found)]))
    tried = tried.joined(_priced(space, with_other_shapes(space, promising_meshes(space, tried))))
    tried = tried.joined(_priced(space, _varied(space, grid, promising_meshes(space, tried)[:VARIED])))
    seconds = np.where(tried.prices[:, 1] <= 0.0, tried.prices[:, 0], np.inf)
    # Where memory is scarce, one that fits may be slow beside what others promise, and the only one for long.
    fastest = tried.values[[seconds.argmin()]] if np.isfinite(seconds).any() else tried.values[:0]
    return np.concatenate([fastest, promising_meshes(space, tried)])


def with_other_shapes(space: PlanSpace, found: Ints) -> Ints:
    """[n, slots] good plans with other numbers of stages, replicas, micro-batches and virtual stages.

    Signatures mean the same on all shapes whose inner axes are alike, also on those of which there are no templates, or
    only ones that overflow memory by much. Pipelines are cut evenly; ranks recompute what those of the plan do at the
    same place, nothing, or everything.

    Args:
        space: the space.
        found: [k, slots] plans, the best first, of which the best ones of `RESHAPED` inner axes are taken.
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
    """The best plans of `RESHAPED` pairs of inner axes, of plans, the best first."""
    best: dict[tuple[int, int], Values] = {}
    for values in map(tuple, found.tolist()):
        shape = space.shape(values)
        best.setdefault((shape.tp, shape.middle), values)
        if len(best) == RESHAPED:
            break
    return list(best.values())


def _with_donors(space: PlanSpace, rows: Ints, found: Ints) -> Ints:
    """[n, slots] the skeletons of some plans with the signatures of others, see `like_the_best`."""
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
    """[n, slots] plans with the recomputation, cuts and ZeRO stages of the templates on the same mesh."""
    first = space.first
    keys = row_digests(np.concatenate([plans[:, : first.cut], grid.values[:, : first.cut]]))
    of_plans, of_grid = keys[: len(plans)], keys[len(plans) :]
    found = [plans[:0]]
    for plan, key in zip(plans, of_plans, strict=True):
        others = grid.values[np.flatnonzero(of_grid == key)].copy()
        others[:, first.signature :] = plan[first.signature :]
        found.append(others)
    return np.concatenate(found)


def _priced(space: PlanSpace, plans: Ints) -> Grid:
    return Grid(plans, space.price(plans))


def split_axes(space: PlanSpace, values: Values) -> tuple[bool, ...]:
    """Which axes of the mesh of a plan have more than one device."""
    shape = space.shape(values)
    return shape.dp > 1, shape.middle > 1, shape.tp > 1


def _split_axes(space: PlanSpace, rows: Ints) -> Mask:
    """[n, 3] `split_axes` of [n, slots] plans."""
    return np.array([split_axes(space, tuple(row.tolist())) for row in rows], dtype=np.bool_).reshape(-1, 3)


def _share(over: Floats, under: Floats) -> Floats:
    """Share of the way from one overflow to another at which memory suffices, from 0 to 1."""
    way: Floats = np.clip(over / np.maximum(over - under, 1e-9), 0.0, 1.0)
    return way
