"""Descents: from a skeleton to the best plan that it leads to.

A skeleton is solved, and the plan found says what its decisions before the signatures should have been: where to cut,
what to recompute, the ZeRO stage, the order of micro-batches. These are tried in whole batches of exact prices, and
what is best is solved again. Signatures and recomputation both make a plan fit, and which of them costs less is known
only where both are tried: a plan that does not fit recomputes more, one that recomputes is also solved without.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from agents.planners.chunk_moves import moved
from agents.planners.linearization import MUCH_BETTER, NEAR_ENOUGH, leads_on
from agents.planners.neighbouring_skeletons import (
    with_other_micro_batches,
    with_other_schedule,
    with_other_virtual_stages,
    with_other_zero,
)
from agents.planners.pipeline_cuts import cut_anew
from agents.planners.promising import NEARLY_FITS
from agents.planners.recompute_less import recompute_less
from agents.planners.skeletons import SkeletonSearch, by_promise
from automap.arrays import Ints
from automap.space.space import Values

DESCENTS = 2
"""Number of times that a waiting skeleton is solved and its pipeline cut anew; then only while the step becomes much
shorter, see `MUCH_BETTER`. A GPT on 256 devices of which no template fits ends three times slower without."""


def descend(search: SkeletonSearch, values: Values) -> Values:
    """The best plan that a skeleton leads to.

    Solves the skeleton of a plan, and again at what is found where that `leads_on`. Then cuts the pipeline of what is
    found anew and recomputes no more than it takes to fit, also of faster plans that do not fit, and under all ZeRO
    stages where nothing fits; where that gains and is near the best plan so far, or still does not fit, the same is
    done with the new skeleton, and again while it gains much. In the end less recomputation, other orders of
    micro-batches and other numbers of virtual stages are tried, and units move between chunks.

    Args:
        search: the skeletons that are solved.
        values: a plan with the skeleton.
    """
    first = search.space.first.signature
    search.begun.add(values)
    before = min(search.price(_rows(search, [values])), default=(True, np.inf))
    if search.incumbent.left == 0:
        return values  # A solve prices at least one more.
    for number in itertools.count(1):
        beyond = search.solve(values, rounds=1)
        worth, solved = search.best[values[:first]]
        if not search.finished and leads_on(worth, before, search.incumbent.best_s):
            search.grant(1)
            beyond = search.solve(solved, rounds=1)
            worth, solved = search.best[values[:first]]
        begins = [solved, *(with_other_zero(search.space, solved) if worth[0] else ()), *beyond]
        plans = [plan for plan in _cut_and_fitted(search, begins) if plan != solved]
        found = search.price(_rows(search, plans))
        best = min(found, default=worth)
        if best >= worth:
            search.ended.add(solved)
            values = solved
            break
        values, before = plans[found.index(best)], best
        gains_much = not best[0] and (worth[0] or best[1] <= MUCH_BETTER * worth[1])
        may_lead_on = gains_much if number >= DESCENTS else best[0] or search.is_worth_polishing(best)
        if search.finished or not may_lead_on:
            break
    values = _with_micro_batches(search, _lightened(search, values))
    values = _with_other_schedule(search, values)
    return _with_moved_units(search, _with_virtual_stages(search, values))


def _cut_and_fitted(search: SkeletonSearch, begins: Sequence[Values]) -> list[Values]:
    """Plans, also with their pipelines cut anew, and that recompute what it takes to fit, until time is over.

    Args:
        search: the skeletons that are solved.
        begins: the plans; all keep their signatures.
    """
    found: list[Values] = []
    for begin in begins:
        if search.incumbent.finished:
            break
        for cut in (begin, *cut_anew(search.space, begin)):
            found += [cut, *recompute_less(search.space, cut)]
    return list(dict.fromkeys(found))


def _lightened(search: SkeletonSearch, values: Values) -> Values:
    """A plan that fits; where it would be faster with less recomputation or another ZeRO stage, also solved with these:
    other signatures may make that fit. Near the best plan of all it is also solved without recomputation and with the
    highest ZeRO stage.

    Returns:
        The best of these plans.
    """
    first, space = search.space.first, search.space
    (is_over, step_s), _ = search.best[values[: first.signature]]
    if search.finished or is_over:
        return values
    ranks = slice(first.recompute, first.recompute + space.shape(values).pp)
    light = list(values)
    light[ranks] = [0] * len(values[ranks])
    lightest = space.repair(light, first.recompute)
    plans = [plan for plan in (lightest, *with_other_zero(space, values)) if plan != values]
    for plan, (seconds, overflow) in zip(plans, space.price(_rows(search, plans)).tolist(), strict=True):
        if seconds < min(step_s, search.incumbent.best_s) and overflow <= NEARLY_FITS:
            _solve_lighter(search, plan, rounds=1)
    # What ZeRO costs depends on signatures that have less to gather: the first solve finds them, the second gains.
    sharded = [plan for plan in with_other_zero(space, lightest) if plan[first.zero] > values[first.zero]][-1:]
    if lightest != values and search.is_near(values):
        for plan in sharded:
            _solve_lighter(search, plan, rounds=2)
    skeletons = {plan[: first.signature] for plan in (values, *plans, *sharded)}
    return min(search.best[skeleton] for skeleton in skeletons if skeleton in search.best)[1]


def _solve_lighter(search: SkeletonSearch, plan: Values, *, rounds: int) -> None:
    """Solves the skeleton of a plan with less recomputation or another ZeRO stage, unless that was done before."""
    skeleton = plan[: search.space.first.signature]
    if not search.finished and skeleton not in search.lightened:
        search.lightened.add(skeleton)
        search.grant(1)
        search.solve(plan, rounds=rounds)


def _with_micro_batches(search: SkeletonSearch, values: Values) -> Values:
    """A plan; where it is not far from the best plan of all, the best of its numbers of micro-batches and ZeRO stages,
    as long as half or twice as many gain.

    The signatures found with one number of micro-batches often suit others better than what a solve finds there, since
    that one begins at the sensitivities of a worse plan.
    """
    (is_over, step_s), _ = search.best[values[: search.space.first.signature]]
    while not (search.finished or is_over or step_s > NEAR_ENOUGH * search.incumbent.best_s):
        before, values = values, _fastest_of(search, values, with_other_micro_batches(search.space, values))
        if values == before:
            break
    return values


def _with_other_schedule(search: SkeletonSearch, values: Values) -> Values:
    """A plan; where it is near the best plan of all, the best of its orders of micro-batches.

    Orders that keep more micro-batches alive wait less. Of an order that is faster but does not fit, there is the plan
    that recomputes as much as it takes.
    """
    if search.finished or not search.is_near(values):
        return values
    return _fastest_of(search, values, with_other_schedule(search.space, values))


def _fastest_of(search: SkeletonSearch, values: Values, others: list[Values]) -> Values:
    """The fastest of a plan that fits and of others, which recompute as much as it takes."""
    space = search.space
    (_, step_s), _ = search.best[values[: space.first.signature]]
    prices = space.price(_rows(search, others))
    faster = [one for one, seconds in zip(others, prices[:, 0].tolist(), strict=True) if seconds < step_s]
    plans = list(dict.fromkeys(plan for one in faster for plan in (one, *recompute_less(space, one))))
    found = search.price(_rows(search, plans))
    best = min(found, default=(True, 0.0))
    return plans[found.index(best)] if found and best < (False, step_s) else values


def _with_virtual_stages(search: SkeletonSearch, values: Values) -> Values:
    """A plan; where it may be the best plan of all with other numbers of virtual stages, the best of these, solved.

    Templates have no virtual stages. More of them shorten what ranks wait at both ends of a step, which is pp - 1 of
    (micro-batches x virtual stages + pp - 1) parts of it where ranks are equally fast. A plan that would be slower than
    the best one without any waiting is left as it is.
    """
    space, skeleton = search.space, values[: search.space.first.signature]
    (is_over, step_s), _ = search.best[skeleton]
    shape = space.shape(values)
    # Chunks that all ranks work on, beside those that the last rank waits for.
    chunks = shape.virtual * shape.num_micro_batches
    may_win = not is_over and step_s * chunks < search.incumbent.best_s * (chunks + shape.pp - 1)
    if search.finished or not may_win or shape in search.interleaved:
        return values
    plans = with_other_virtual_stages(space, values)
    search.interleaved.update(space.shape(plan) for plan in (values, *plans))
    prices = search.prices(_rows(search, plans))
    if not len(prices) or search.finished:
        return values
    # Of each number of micro-batches the most promising plan, and the next one that overflows less: before they are cut
    # anew, little tells which of them is the fastest that fits.
    begins: dict[int, list[int]] = {}
    for at in by_promise(prices).tolist():
        some = begins.setdefault(space.shape(plans[at]).num_micro_batches, [])
        if not some or (len(some) < 2 and 0.0 < prices[some[0], 1] > prices[at, 1]):
            some.append(at)
    cuts = _cut_and_fitted(search, [plans[at] for some in begins.values() for at in some])
    found = search.price(_rows(search, cuts))
    best = min(found, default=(True, np.inf))
    if search.finished or best >= search.best[skeleton][0]:
        return values
    plan = cuts[found.index(best)]
    search.grant(1)
    search.solve(plan, rounds=1)
    return search.best[plan[: space.first.signature]][1]


def _with_moved_units(search: SkeletonSearch, values: Values) -> Values:
    """A plan; where it is the best of all, units move between its chunks, and the new skeleton is solved too."""
    if search.finished or values != search.incumbent.best or search.space.shape(values).pp == 1:
        return values
    after = moved(search.space, values)
    if after == values or not search.price(_rows(search, [after])):
        return values
    search.solve(after, rounds=1)
    return search.best[after[: search.space.first.signature]][1]


def _rows(search: SkeletonSearch, plans: list[Values]) -> Ints:
    """[n, slots] plans."""
    return np.array(plans, dtype=np.int64).reshape(len(plans), len(search.space.slots))
