"""The cost of a target: how much faster the best plan would be if any trainer could run it.

A short search among the plans of any trainer begins with the best plan of the target, and has a tenth of the budget.
The difference between the step times of the two plans is a lower bound on the cost of the target, since the search may
miss a faster plan. If the target can express the plan found, this is a plan for the target too. Units: seconds,
evaluations.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

from agents.results.plainest import Offer, plainness
from agents.searcher import Budget, ShouldStop, search
from automap.comparisons import TargetCost
from automap.errors import UserError
from automap.plan import Plan
from automap.price.estimate import annotate
from automap.problem import Problem
from automap.space.target_limits import plan_space
from automap.targets import ANY, Target
from automap.verify import Verifier

SHARE = 0.1
"""Share of the budget for the search among all plans (assumed)."""
MOST_S, MOST_EVALUATIONS = 3.0, 1000
"""Largest budget of this search, in evaluations and in seconds (assumed): enough to improve the templates of the whole
space and to anneal for a moment, in this process alone."""
WORTH_TELLING = 0.01
"""Smallest cost of a target, as a share of the step time, that is reported: two searches find plans that differ by less
(assumed)."""
PLAIN = 0.1
"""Largest share of the gain over the target that the plan of any trainer may lose for a plainer plan (assumed). So only
features that cause the gain remain in it besides those of the target."""


def set_aside(budget: Budget, problem: Problem) -> tuple[Budget, Budget | None]:
    """The budget of the search for a target, and that of the search among all plans; None without a target."""
    if problem.target is None:
        return budget, None
    if budget.evaluations is not None:
        few = min(int(SHARE * budget.evaluations), MOST_EVALUATIONS)
        return Budget(evaluations=budget.evaluations - few), Budget(evaluations=few) if few else None
    assert budget.seconds is not None
    some_s = min(SHARE * budget.seconds, MOST_S)
    return Budget(seconds=budget.seconds - some_s), Budget(seconds=some_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class AnyTrainer:
    """The result of the search among the plans of any trainer."""

    offer: Offer | None
    """The plan found, where the target can express it; else None."""
    cost: TargetCost | None
    """What the target costs; None where nothing faster was found that it cannot express."""
    evaluations: int
    """Number of plans that were priced."""


def search_any(
    problem: Problem, budget: Budget, start: Plan, best_s: float, *, seed: int, should_stop: ShouldStop
) -> AnyTrainer | None:
    """The best plan of any trainer, found from the best plan of the target; None where nothing was found.

    Args:
        problem: a problem with a target.
        budget: budget of this search.
        start: the best plan of the target on all devices.
        best_s: step time of the best plan of the target.
        seed, should_stop: see `agents.searcher.search`.
    """
    target = problem.target
    assert target is not None
    training, hints = replace(problem.training, target=ANY), replace(problem.hints, baseline=None)
    free = replace(problem, training=training, hints=hints)
    with contextlib.suppress(UserError):
        found = search(free, budget, seed=seed, should_stop=should_stop, start=[start])
        gain_s = best_s - found.step_time_s
        if found.plainest is None or gain_s <= 0.0:
            return AnyTrainer(offer=None, cost=None, evaluations=found.evaluations)
        offer = found.plainest(found.step_time_s + PLAIN * gain_s)
        faults = Verifier(free).beyond(offer.plan, target.name)
        beyond = tuple(dict.fromkeys(fault.what for fault in faults)) or _rounded(offer.plan, target)
        assert offer.plan.estimate is not None
        return AnyTrainer(
            offer=None if beyond else _of_target(problem, offer),
            cost=TargetCost(step_time_s=offer.plan.estimate.step_time_s, beyond=beyond) if beyond else None,
            evaluations=found.evaluations,
        )
    return None


def _rounded(plan: Plan, target: Target) -> tuple[str, ...]:
    """What an export of a plan would round."""
    axes = [axis for axis, use in plan.degrees[0].axes.items() if use == "data"]
    if len({*axes} - {*plan.degrees[0].expert_axes}) > 1:
        return (f"{target.name} reduces gradients over all replicas at once, not inside groups of them first",)
    return ()


def _of_target(problem: Problem, offer: Offer) -> Offer | None:
    """A plan of any trainer as a plan of the target; None where the target's space has no such plan."""
    space = plan_space(problem)
    values = space.encode(offer.plan)
    if values is None:
        return None
    lowered = space.lowered(values)
    plan = annotate(space.decode(values), lowered, space.evaluator)
    rank = plainness(lowered, space.evaluator, plan.step_time_s, is_template=False)
    return None if Verifier(problem).violations(plan) else replace(offer, plan=plan, plainness=rank)
