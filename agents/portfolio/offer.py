"""The search that users call.

First the searchers work, one after the other, on all devices; then on parts of the cluster that may be as fast. Among
what they have found, `agents.portfolio.choice` chooses the plan that is returned. Units: seconds, evaluations.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from agents.portfolio.any_trainer import search_any, set_aside
from agents.portfolio.baseline_comparison import with_baseline
from agents.portfolio.choice import Found
from agents.portfolio.deadline import Deadline
from agents.portfolio.in_turn import search_in_turn
from agents.portfolio.parts import (
    Before,
    Lift,
    OnPart,
    PartProgress,
    divided,
    lifted_best,
    lifting,
    parts_to_search,
    scaled,
    shares_of,
)
from agents.results.fewer_devices import Part, needed, on_every, promising, space_on_all, told_idle
from agents.results.infeasibility_advice import nothing_fits_on_all
from agents.results.plainest import TIE
from agents.searcher import Budget, OnProgress, Progress, Reached, SearchResult, ShouldStop, check_budget, check_tie
from automap.errors import NothingFits, UserError
from automap.export.baseline import read_baseline
from automap.plan import Plan
from automap.price.evaluator import Evaluator
from automap.problem import Problem

LOOK_SHARE = 0.2
"""Share of a budget in seconds after which no further part of the cluster is considered (assumed). To consider a part
takes a tenth of a second on one host and a second on 32 hosts."""


def search_offer(
    problem: Problem,
    budget: Budget,
    *,
    searchers: Sequence[str] = ("portfolio",),
    seed: int = 0,
    tie: float = TIE,
    on_progress: OnProgress = lambda progress: None,
    should_stop: ShouldStop = lambda: False,
    start: Sequence[Plan] = (),
) -> SearchResult:
    """The plainest plan among those that the price cannot tell from the fastest plan found within `budget`.

    Args:
        problem, budget, seed, on_progress, should_stop, start: see `agents.searcher.search`.
        searchers: names of `agents.searcher.SEARCHERS`, in the order of their turns.
        tie: share of the error band, to either side of an estimate, within which plans count as equally fast.

    Raises:
        NothingFits: no plan that fits was found.
        ProblemError: see `search_in_turn`, `check_budget` and `check_tie`.
    """
    check_budget(budget)
    check_tie(tie)
    deadline = Deadline(budget, time.monotonic)
    space = space_on_all(problem)
    evaluator = functools.cache(lambda: Evaluator(problem) if space is None else space.evaluator)
    parts = promising(space or problem, lambda: should_stop() or deadline.passed(LOOK_SHARE))
    on_one = functools.partial(search_offer, searchers=searchers, seed=seed, tie=tie, should_stop=should_stop)
    if space is None and (part := needed(parts)) is not None:
        on_one = functools.partial(on_one, budget=divided(budget, deadline.spent_s, ())[0])
        return _search_one_part(evaluator(), part, parts, on_one, on_progress)
    own_budget, any_trainer_budget = set_aside(budget, problem)
    chosen = parts_to_search(parts, own_budget)
    shares = shares_of(chosen)
    if space is not None:
        deadline.measure(space)
    main_budget, *part_budgets = divided(own_budget, deadline.kept_s(1 + len(chosen)), shares)
    run = functools.partial(search_in_turn, searchers=searchers, seed=seed, should_stop=should_stop)
    yours = None if problem.hints.baseline is None else read_baseline(evaluator())
    reached: dict[str, Reached] = {}
    main_share = 1.0 - sum(shares)

    def report(progress: Progress) -> None:
        reached.update(progress.members)
        on_progress(scaled(progress, 0.0, main_share))

    begin = start if yours is None else (*start, yours.plan)
    try:
        main = run(space or problem, main_budget, start=begin, on_progress=report)
    except NothingFits:
        if space is None or not part_budgets:
            raise
        on_one = functools.partial(on_one, budget=part_budgets[0])
        return _search_one_part(evaluator(), chosen[0], (*parts, on_every(space)), on_one, on_progress, main_share)
    before, done = Before(main.plan, main.evaluations, main.seconds, reached), main_share
    on_parts: list[OnPart] = []
    for number, (part, share, part_budget) in enumerate(zip(chosen, shares, part_budgets, strict=False)):
        searches = 1 + len(part_budgets) - number
        search_part = functools.partial(run, budget=(shortened := deadline.shortened(part_budget, searches)))
        if should_stop() or shortened is None:
            if (part.template_s or inf) >= before.best.step_time_s:
                break
            # What is known of the part is not a plan yet. Its templates are priced in a moment, and are no worse.
            search_part = functools.partial(
                search_in_turn, budget=Budget(evaluations=1), searchers=("expert",), seed=seed
            )
        progress_on_part = PartProgress(on_progress, done, share, before, lifting(problem, part, evaluator))
        # It may be that no plan of the part fits, or that no searcher accepts it.
        with contextlib.suppress(UserError):
            on_parts.append(OnPart(part, search_part(part.problem, on_progress=progress_on_part)))
            before = before.after(on_parts[-1].found, progress_on_part.lift)
        before, done = before._replace(reached=progress_on_part.reached), done + share
    of_any_trainer = None
    if any_trainer_budget is not None and not should_stop():
        best_s = min(found.step_time_s for found in (main, *(one.found for one in on_parts)))
        of_any_trainer = search_any(problem, any_trainer_budget, main.plan, best_s, seed=seed, should_stop=should_stop)
    return Found(problem, evaluator, main, tuple(on_parts), parts, tie, yours, of_any_trainer).result()


def _search_one_part(
    evaluator: Evaluator,
    part: Part,
    parts: Sequence[Part],
    search_part: Callable[..., SearchResult],
    on_progress: OnProgress,
    done: float = 0.0,
) -> SearchResult:
    """Searches a part of the cluster, where no plan that uses all devices is legal, or none that fits was found.

    Args:
        evaluator: evaluator of the problem on all devices.
        part: the part to search.
        parts: all parts that have plans, the whole cluster too if plans on all devices are legal.
        search_part: `search_offer` with all arguments but `problem` and `on_progress`.
        on_progress: see `search_offer`.
        done: share of the whole budget that was spent before.

    Raises:
        NothingFits: see `search_offer`.
        ProblemError: see `search_offer`.
    """
    lift = lifting(evaluator.problem, part, lambda: evaluator)

    def report(progress: Progress) -> None:
        on_progress(replace(scaled(progress, done, 1.0 - done), best=lifted_best(progress, lift)))

    try:
        found = search_part(part.problem, on_progress=report)
    except NothingFits as fault:
        raise nothing_fits_on_all(fault, part.devices, evaluator.problem.cluster) from None
    return _on_all_devices(_with_bound_of_parts(found, part, parts), lift, evaluator)


def _with_bound_of_parts(found: SearchResult, own: Part, parts: Sequence[Part]) -> SearchResult:
    """The result of a search on one part, with a lower bound that also holds for the parts that were not searched.

    Args:
        found: the result.
        own: the part that was searched; parts that lie inside it need no bound of their own.
        parts: all parts that have plans.
    """
    others = [part.bound_s for part in parts if not set(part.devices) <= set(own.devices)]
    record = found.record
    fastest_s = record.fastest_s or found.step_time_s
    least_s = min((record.lower_bound_s or 0.0, *others))
    proven = record.proven and min(others, default=inf) >= fastest_s
    plan = replace(found.plan, search=replace(record, lower_bound_s=least_s, proven=proven))
    return replace(found, plan=plan, proven=proven)


def _on_all_devices(found: SearchResult, lift: Lift, evaluator: Evaluator) -> SearchResult:
    """The result of a search on a part, with plans of the whole cluster.

    Args:
        found: the result.
        lift: writes its plans as those of the whole cluster.
        evaluator: evaluator of the problem on all devices.

    Raises:
        NothingFits: the hints forbid the plan there.
    """
    problem = evaluator.problem
    plan = lift(found.plan)
    if plan is None:
        raise NothingFits("no plan on all devices", field="hints.fix", value="", repair="Fix fewer degrees.")
    plan = replace(plan, warnings=(*plan.warnings, told_idle(problem, plan)))
    yours = read_baseline(evaluator)
    if yours is not None:
        plan = with_baseline(plan, yours, evaluator)

    def lifted(plans: Sequence[Plan]) -> tuple[Plan, ...]:
        return tuple(one for one in map(lift, plans) if one is not None)

    return replace(
        found,
        plan=plan,
        unlike=lambda count: (plan, *lifted(found.unlike(count)[1:])),
        others=lambda count: lifted(found.others(count)),
    )
