"""Descents: local searches that start from a skeleton and alternate between its signatures and its other decisions.

A skeleton is all decisions of a plan but the signatures. A descent finds the best signatures of a skeleton (a solve).
With these signatures it tries other decisions: where to cut, what to recompute, the ZeRO stage, the order of
micro-batches. All tries are priced exactly, many in one call. The best of them gives the next skeleton to solve.

A plan can be made to fit by recomputation or by other signatures. Which of them costs less time is known only when both
are tried. So a plan that does not fit is tried with more recomputation, and one that recomputes is also solved without.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from agents.planners.chunk_moves import moved
from agents.planners.linearization import MUCH_BETTER, NEAR_ENOUGH, Worth, leads_on
from agents.planners.neighbouring_skeletons import (
    with_other_micro_batches,
    with_other_schedule,
    with_other_virtual_stages,
    with_other_zero,
)
from agents.planners.pipeline_cuts import cut_anew
from agents.planners.promising_templates import NEARLY_FITS
from agents.planners.recompute_less import recompute_less
from agents.planners.skeletons import SkeletonSearch, by_promise
from automap.arrays import Ints
from automap.space.space import Values

DESCENTS = 2
"""Number of rounds of a descent, in each of which a skeleton is solved and its pipeline cut again. Further rounds
follow only while the step becomes much shorter, see `MUCH_BETTER`: without them, a GPT on 256 devices of which no
template fits ends three times slower."""


def descend(search: SkeletonSearch, values: Values, worth: Worth | None = None) -> Values:
    """Descends from the skeleton of a plan.

    In each round, it

    1. solves the skeleton, and once more at the plan that is found if this promises a further gain (`leads_on`);
    2. cuts the pipelines of the plans found again, with no more recomputation than they need to fit. Plans that are
       faster but do not fit are among them, and other ZeRO stages if no plan fits.

    The best plan of the second step gives the skeleton of the next round, if it is better than that of the first step,
    and is near the best plan of the search or does not fit yet. After `DESCENTS` rounds it must be much better. In the
    end, other numbers of micro-batches and of virtual stages, less recomputation and other schedules are tried, and
    units move between chunks.

    Args:
        search: solves skeletons and prices plans.
        values: values of the plan.
        worth: its worth if it was priced before, so that it does not count as an evaluation again; None = it is priced.

    Returns:
        Values of the best plan that the descent has found.
    """
    first = search.space.first.signature
    search.begun.add(values)
    if worth is None:
        before = min(search.price(_rows(search, [values])), default=(True, np.inf))
    else:
        search.keep(values, worth)
        before = worth
    if search.incumbent.left == 0:
        return values  # A solve prices at least one more.
    for number in itertools.count(1):
        too_large = search.solve(values, rounds=1)
        worth, solved = search.best[values[:first]]
        if not search.finished and leads_on(worth, before, search.incumbent.best_s):
            search.grant(1)
            too_large = search.solve(solved, rounds=1)
            worth, solved = search.best[values[:first]]
        begins = [solved, *(with_other_zero(search.space, solved) if worth[0] else ()), *too_large]
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
    """Some plans, the same plans with other cuts, and all of these with as little recomputation as they need to fit.

    Args:
        search: says when its budget has ended; the plans that follow are then left out.
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
    """Tries less recomputation and other ZeRO stages than those of a plan that fits.

    A variant that would be faster but overflows memory a little is solved: other signatures may make it fit. If the
    plan is near the best one of the search, its skeleton is also solved without recomputation and with the highest ZeRO
    stage.

    Returns:
        The best plan among these and the given one.
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
    # Two rounds: under ZeRO other signatures are good, those with less to gather. The first solve starts from the
    # sensitivities of the old signatures, the second one from those of the new ones.
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
    """Tries other numbers of micro-batches and ZeRO stages, as long as that makes a plan faster.

    The signatures stay: those that were found with one number of micro-batches are often better for another number than
    those that a solve would find there, because such a solve begins at the sensitivities of a worse plan. Nothing is
    tried where the plan is much slower than the best plan of the search.
    """
    (is_over, step_s), _ = search.best[values[: search.space.first.signature]]
    while not (search.finished or is_over or step_s > NEAR_ENOUGH * search.incumbent.best_s):
        before, values = values, _fastest_of(search, values, with_other_micro_batches(search.space, values))
        if values == before:
            break
    return values


def _with_other_schedule(search: SkeletonSearch, values: Values) -> Values:
    """Tries the other schedules, if the plan is near the best one of the search.

    Schedules with more micro-batches in flight have smaller bubbles and need more memory. A plan that is faster with
    another schedule but does not fit is tried with as much recomputation as it needs.
    """
    if search.finished or not search.is_near(values):
        return values
    return _fastest_of(search, values, with_other_schedule(search.space, values))


def _fastest_of(search: SkeletonSearch, values: Values, others: list[Values]) -> Values:
    """The fastest of a plan that fits and some others; those that do not fit recompute as much as they need."""
    space = search.space
    (_, step_s), _ = search.best[values[: space.first.signature]]
    prices = space.price(_rows(search, others))
    faster = [one for one, seconds in zip(others, prices[:, 0].tolist(), strict=True) if seconds < step_s]
    plans = list(dict.fromkeys(plan for one in faster for plan in (one, *recompute_less(space, one))))
    found = search.price(_rows(search, plans))
    best = min(found, default=(True, 0.0))
    return plans[found.index(best)] if found and best < (False, step_s) else values


def _with_virtual_stages(search: SkeletonSearch, values: Values) -> Values:
    """Tries other numbers of virtual stages, and solves the skeleton of the best plan with them.

    Templates have no virtual stages. With more of them the bubble is smaller: where ranks are equally fast, it is the
    share (pp - 1) / (micro-batches * virtual stages + pp - 1) of the step. Nothing is tried where the plan would be
    slower than the best one of the search even without any bubble.
    """
    space, skeleton = search.space, values[: search.space.first.signature]
    (is_over, step_s), _ = search.best[skeleton]
    shape = space.shape(values)
    # A step without its bubble takes the share chunks / (chunks + pp - 1) of its time.
    chunks = shape.virtual * shape.num_micro_batches
    may_win = not is_over and step_s * chunks < search.incumbent.best_s * (chunks + shape.pp - 1)
    if search.finished or not may_win or shape in search.interleaved:
        return values
    plans = with_other_virtual_stages(space, values)
    search.interleaved.update(space.shape(plan) for plan in (values, *plans))
    prices = search.prices(_rows(search, plans))
    if not len(prices) or search.finished:
        return values
    # For each number of micro-batches: the most promising plan, and, if that overflows memory, the next one that
    # overflows less. Which of them is the fastest that fits is known only after they have been cut again.
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
    """Moves units between the chunks of a plan, and solves the new skeleton, if the plan is the best one of the search.

    Returns:
        Values of the better plan.
    """
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
