"""Division of pipelines: divides units and devices again among the stages of the best pipelines, by the programs of
Piper, Alpa, Galvatron and SPP. The stages of the new pipelines may differ in their devices and strategies.

In the plan space only short pipelines have unlike stages; in others at most the first stage differs. So there may be
faster pipelines outside the space. They are searched where the pipelines of the space are about as fast as the best
plan, or where the space has slow pipelines only, or none that fits:

1. The dynamic programs of Piper (`agents.planners.piper`) and Alpa (`agents.planners.alpa`) divide units and devices
   among stages, with the ZeRO stage of such a pipeline and its number of micro-batches, or fewer or more of them. Each
   stage chooses its inner axis, and recomputes in no more units than memory requires. The partitions with the shortest
   simulated steps are priced under each schedule of the space, before and after units and devices have moved in them
   (`agents.planners.divided_settings`).
2. The dynamic program of Galvatron (`agents.planners.galvatron`) lets each layer of the stages of a pipeline choose by
   itself whether it recomputes.
3. Where any order of the passes may be run, the fastest of these plans are priced with DAPPLE's early warm-up and in
   the orders of SPP's list scheduling (`agents.planners.spp`).
4. In the fastest of all plans, single units and devices move from one stage to another as long as that gains
   (`agents.planners.moved_stages`).

The best plan found becomes that of the search if it is faster, also if it lies outside the space. Units: seconds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from agents.incumbent import Incumbent
from agents.planners import spp
from agents.planners.divided_settings import DividedSettings, Priced, Setting, with_prices
from agents.planners.division_effort import FAR, Effort, leads
from agents.planners.galvatron import layered
from agents.planners.moved_stages import moved
from agents.planners.solved_strategies import solved_strategies
from agents.planners.staged_plan import StagedPlan, price_staged
from agents.sampling.expert import Grid
from automap.space.shape import Shape
from automap.space.space import PlanSpace

NEAR = 1.1
"""A pipeline is divided again if it takes at most this many times the step time of the best plan (assumed); where there
is none, the fastest one, if it takes at most `FAR` times as long."""
NEARLY_FITS = 0.2
"""Where no plan fits, a pipeline is divided again if it overflows by at most this share of a device's memory
(assumed)."""
MOST_UNITS = 128
"""Largest number of units of a model (assumed): the time of the programs grows with its square."""
SETTINGS = 3
"""Number of pairs of micro-batches and ZeRO stage with which units and devices are divided (assumed)."""
LAYERED = 8
"""Number of pipelines whose layers choose their recomputation by Galvatron's program (assumed)."""
LISTED = 3
"""Number of partitions whose micro-batches are ordered by list scheduling (assumed)."""
MOVED = 3
"""Number of the fastest plans in which units and devices are moved (assumed)."""
MOVED_S = 0.25
"""Seconds for moves in `divide_quickly` (assumed). On 20 generated problems, plans of the first second then end 0.8 %
above the best ones known in the mean, instead of 1.5 %, in the same time: solves of skeletons have as much less."""
MOST_DEVICES = 64
"""Largest cluster for which SPP divides units and devices itself (assumed: the time grows with the square)."""
MOST_PASSES = 2_000
"""Largest number of forward passes that list scheduling orders: it takes a tenth of a second."""
LEAST_EVALUATIONS, LEAST_S = 100, 3.0
"""Least rest of a budget, in evaluations and in seconds, with which pipelines are divided. It takes some tenths of a
second, on 1,024 devices 2 seconds."""
SHARE, SHARE_S, LEADING_S = 0.6, 0.4, 0.8
"""Largest shares of the rest of a budget that dividing pipelines takes: of one in evaluations, of one in seconds, and
of one in seconds while the best plan lies outside the plan space (assumed). With 0.3 of the seconds, a search of 15 s
for 72 operators with branches on 160 devices ended before it had tried the best number of micro-batches."""
DIVIDED, ORDERED = 0.5, 0.6
"""Largest share of this that Piper's and Alpa's programs take, and share of the rest for orders of passes; moves have
the remainder (assumed). When the programs could take all of it, the portfolio was 1 to 4 % slower than SPP with 800
evaluations on seven A100s."""


def divide_pipelines(incumbent: Incumbent, grid: Grid) -> None:
    """Divides the best pipelines again, in the four steps that the module describes.

    Args:
        incumbent: takes the plans, credited to `galvatron`, `piper`, `dapple` and `spp`.
        grid: plans with their prices.
    """
    space = incumbent.space
    if is_short(incumbent):
        return
    near = _near(incumbent, grid, NEAR)
    settings = _settings(space, near or _near(incumbent, grid, FAR)[:1])
    if not settings:
        return
    began_s, left_s = incumbent.seconds, math.inf if incumbent.left_s is None else incumbent.left_s
    with _share(incumbent, SHARE, LEADING_S):
        effort = Effort(incumbent, DIVIDED * SHARE_S * left_s, DIVIDED * LEADING_S * left_s)
        with _share(incumbent, DIVIDED, 1.0):
            division = DividedSettings(incumbent, solved_strategies(space, grid), effort, at_length=True)
            division.run(settings)
        most_s = LEADING_S if leads(incumbent) else SHARE_S
        rest_s = max(began_s + most_s * left_s - incumbent.seconds, 0.0)
        with incumbent.share(seconds=rest_s if math.isfinite(rest_s) else None):
            _improve(incumbent, near, division)


def _improve(incumbent: Incumbent, near: Sequence[_Near], division: DividedSettings) -> None:
    """Steps 2 to 4 of `divide_pipelines`."""
    with _share(incumbent, DIVIDED, ORDERED):
        division.move()
    tried = list(division.priced)
    if not incumbent.finished:
        tried += _layered(incumbent, near)
    if incumbent.space.problem.any_order and not incumbent.finished:
        with _share(incumbent, ORDERED, ORDERED):
            tried += _listed(incumbent, division.priced)
    incumbent.searcher = "piper"
    found: Priced = []
    for plan in _unlike(tried)[:MOVED]:
        if not incumbent.finished:
            better = moved(incumbent, plan)
            found.append((price_staged(incumbent, [better]), better))
    for plan in _unlike(found):
        if not incumbent.finished:
            price_staged(incumbent, [moved(incumbent, plan, everywhere=True)])


def _share(incumbent: Incumbent, evaluations: float, seconds: float) -> AbstractContextManager[None]:
    """A part of the budget: these shares of the evaluations and of the seconds that are left."""
    left, left_s = incumbent.left, incumbent.left_s
    return incumbent.share(
        evaluations=None if left is None else int(evaluations * left),
        seconds=None if left_s is None else seconds * left_s,
    )


def is_short(incumbent: Incumbent) -> bool:
    """Whether the rest of the budget is too short to divide pipelines."""
    left, left_s = incumbent.left, incumbent.left_s
    return (left is not None and left < LEAST_EVALUATIONS) or (left_s is not None and left_s < LEAST_S)


def divide_quickly(incumbent: Incumbent, grid: Grid, seconds: float) -> None:
    """Does only step 1 of `divide_pipelines`, in which stages may have any strategy from the beginning.

    Units and devices then move in the best partitions for `MOVED_S` seconds, if a plan found is about as fast as the
    best one; a budget in evaluations leaves that to `divide_pipelines`.

    Args:
        incumbent: takes the plans, credited to `piper`.
        grid: plans with their prices.
        seconds: after so many seconds no further setting is begun; the plans of the settings before are still priced.
            While all these plans are far slower than the best one, it is `division_effort.LONGER` times as long.
    """
    settings = _settings(incumbent.space, _near(incumbent, grid, NEAR))
    if not settings:
        return
    effort, until_s = Effort(incumbent, seconds, seconds), incumbent.seconds + seconds + MOVED_S
    division = DividedSettings(incumbent, solved_strategies(incumbent.space, grid), effort, at_length=False)
    division.run(settings)
    divided_s = min((step_s for step_s, _ in division.priced), default=math.inf)
    if math.isfinite(until_s) and divided_s <= NEAR * incumbent.least_s:
        # The last setting may have taken longer than it had.
        division.move(max(until_s, incumbent.seconds + 0.5 * MOVED_S))


def _settings(space: PlanSpace, pipelines: Sequence[_Near]) -> list[Setting]:
    """The first `SETTINGS` settings of some pipelines.

    There are none for models that are too large, nor where the search allows other sync modes than synchronous: a plan
    outside the space is always synchronous.
    """
    if space.num_units > MOST_UNITS or space.problem.training.sync_modes != ("synchronous",):
        return []
    return list(dict.fromkeys(Setting(shape.num_micro_batches, zero) for shape, zero in pipelines))[:SETTINGS]


def _layered(incumbent: Incumbent, near: Sequence[_Near]) -> Priced:
    """Galvatron's plans for the first `LAYERED` pipelines without virtual stages, with their step times."""
    incumbent.searcher = "galvatron"
    plain = [(shape, zero) for shape, zero in near if shape.virtual == 1]
    plans = (layered(incumbent.space, shape, zero) for shape, zero in plain[:LAYERED])
    return with_prices(incumbent, filter(None, plans))


def _listed(incumbent: Incumbent, divided: Priced) -> Priced:
    """The fastest plans with DAPPLE's early warm-up and in the orders of list scheduling, and plans of SPP itself; all
    with their step times."""
    incumbent.searcher, unlike, space = "dapple", _unlike(divided), incumbent.space
    early = with_prices(incumbent, (replace(plan, schedule="eager-1f1b") for plan in unlike[:LISTED]))
    incumbent.searcher = "spp"
    few = [plan for plan in unlike if len(plan.stages) <= MOST_PASSES // plan.num_micro_batches]
    orders = with_prices(incumbent, itertools.chain(*(spp.listed(space, plan) for plan in few[:LISTED])))
    if space.meshes.devices > MOST_DEVICES or incumbent.finished:
        return early + orders
    return early + orders + list(spp.planned(incumbent, _counts(space, [plan.num_micro_batches for plan in few])))


def _counts(space: PlanSpace, counts: Sequence[int]) -> list[int]:
    """Distinct numbers of micro-batches, each followed by the next smaller and larger ones."""
    known = sorted({shape.num_micro_batches for shape in space.shapes} | set(counts))
    near = (known[max(0, at - 1) : at + 2] for at in map(known.index, counts))
    return list(dict.fromkeys(itertools.chain(*((count, *some) for count, some in zip(counts, near, strict=True)))))


def _unlike(plans: Priced) -> list[StagedPlan]:
    """The fastest plan of each partition, the fastest first."""
    found: dict[object, StagedPlan] = {}
    for _, plan in sorted((one for one in plans if math.isfinite(one[0])), key=lambda one: one[0]):
        found.setdefault((plan.num_micro_batches, *((stage.end, stage.devices) for stage in plan.stages)), plan)
    return list(found.values())


class _Near(NamedTuple):
    """A pipeline near the best plan."""

    shape: Shape
    zero: int
    """ZeRO stage."""


def _near(incumbent: Incumbent, grid: Grid, most: float) -> list[_Near]:
    """The distinct pipelines of a grid and of the best plan of the space, if they are near the best plan of all, the
    fastest first.

    If no plan fits, these are the pipelines that nearly fit, those with the least overflow first.

    Args:
        incumbent: knows the best plans. That of the space may not be in the grid: what is found last, when the time of
            a searcher is over, is known here only.
        grid: plans with their prices.
        most: largest step time, as a multiple of that of the best plan.
    """
    space = incumbent.space
    if incumbent.best is not None:
        rows = np.array([incumbent.best])
        grid = grid.joined(Grid(rows, space.price(rows)))
    times, overflows = grid.prices.T
    if math.isinf(incumbent.least_s):
        near = np.flatnonzero(overflows <= NEARLY_FITS)
        ranked = near[np.lexsort((times[near], overflows[near]))]
    else:
        near = np.flatnonzero((overflows <= 0.0) & (times <= most * incumbent.least_s))
        ranked = near[np.argsort(times[near], kind="stable")]
    found = []
    for row in ranked.tolist():
        plan = grid.values[row].tolist()
        shape = space.shape(plan)
        if shape.pp > 1 and shape.middle == 1:
            found.append(_Near(shape, plan[space.first.zero]))
    return list(dict.fromkeys(found))
