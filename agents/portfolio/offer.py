"""The search that users call, and the choice of the plan that it returns.

First the searchers work, one after the other, on all devices; then on parts of the cluster that may be as fast. The
returned plan is the plainest one among the plans whose step times differ from that of the fastest plan by less than the
price can tell (a *tie*). It says what the fastest plan takes. With a tie of 0 the fastest plan itself is returned, in
its canonical form. Units: seconds, evaluations.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from agents.portfolio.any_trainer import WORTH_TELLING, AnyTrainer, search_any, set_aside
from agents.portfolio.in_turn import search_in_turn, with_record
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
from agents.results.diverse_top_k import candidate, unlike_plans
from agents.results.fewer_devices import Part, needed, on_all, promising, space_on_all, told_idle
from agents.results.history import history
from agents.results.plainest import NEAR, TIE, Offer, in_order, plainness, tidy
from agents.results.side_by_side import fastest_of_each, key_of
from agents.searcher import Budget, OnProgress, Progress, Reached, SearchResult, ShouldStop, check_tie
from automap.amounts import in_seconds
from automap.comparisons import TargetCost, Yours
from automap.errors import NothingFits, UserError
from automap.export.baseline import Baseline, read_baseline
from automap.plan import Estimate, Plan
from automap.price.estimate import error_band
from automap.price.evaluator import Evaluator
from automap.price.plan_reader import lower_plan
from automap.problem import Problem
from automap.search_record import SearchRecord
from automap.space.changes import changes_of_plans, shortage
from automap.space.idle_hints import idle_hints
from automap.space.target_limits import why_whole
from automap.space.target_patterns import has_attention
from automap.verify import Verifier

LOOK_SHARE = 0.2
"""Share of a budget in seconds after which no further part of the cluster is considered (assumed). To consider a part
takes a tenth of a second on one host and a second on 32 hosts."""
NOTICEABLE = 1e-6
"""Share by which a plan must be slower than the fastest one for the plan to say so: less is rounding."""


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
        ProblemError: see `search_in_turn` and `check_tie`.
    """
    check_tie(tie)
    began = time.monotonic()
    space = space_on_all(problem)
    evaluator = functools.cache(lambda: Evaluator(problem) if space is None else space.evaluator)

    def looked_enough() -> bool:
        limit_s = budget.seconds and LOOK_SHARE * budget.seconds
        return should_stop() or (limit_s is not None and time.monotonic() - began > limit_s)

    parts = promising(space or problem, looked_enough)
    part = needed(parts)
    if part is not None:
        (left,) = divided(budget, time.monotonic() - began, ())
        search_part = functools.partial(
            search_offer, budget=left, searchers=searchers, seed=seed, tie=tie, should_stop=should_stop
        )
        return _search_needed_part(evaluator(), part, parts, search_part, on_progress)
    own_budget, any_trainer_budget = set_aside(budget, problem)
    chosen = parts_to_search(parts, own_budget)
    shares = shares_of(chosen)
    main_budget, *part_budgets = divided(own_budget, time.monotonic() - began, shares)
    run = functools.partial(search_in_turn, searchers=searchers, seed=seed, should_stop=should_stop)
    yours = None if problem.hints.baseline is None else read_baseline(evaluator())
    begin = [*start, *([yours.plan] if yours is not None else [])]
    reached: dict[str, Reached] = {}
    main_share = 1.0 - sum(shares)

    def report(progress: Progress) -> None:
        reached.update(progress.members)
        on_progress(scaled(progress, 0.0, main_share))

    main = run(space or problem, main_budget, start=begin, on_progress=report)
    before, done = Before(main.plan, main.evaluations, main.seconds, reached), main_share
    on_parts: list[OnPart] = []
    for part, share, part_budget in zip(chosen, shares, part_budgets, strict=False):
        search_part = functools.partial(run, budget=part_budget)
        if should_stop():
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
    return _Found(problem, evaluator, main, tuple(on_parts), parts, tie, yours, of_any_trainer).result()


def _search_needed_part(
    evaluator: Evaluator,
    part: Part,
    parts: Sequence[Part],
    search_part: Callable[..., SearchResult],
    on_progress: OnProgress,
) -> SearchResult:
    """Searches the part of the cluster that the hints or the target ask for, where no plan uses all devices.

    Args:
        evaluator: evaluator of the problem on all devices.
        part: the part to search.
        parts: all parts that have plans.
        search_part: `search_offer` with all arguments but `problem` and `on_progress`.
        on_progress: see `search_offer`.

    Raises:
        NothingFits: see `search_offer`.
        ProblemError: see `search_offer`.
    """
    lift = lifting(evaluator.problem, part, lambda: evaluator)

    def report(progress: Progress) -> None:
        on_progress(replace(progress, best=lifted_best(progress, lift)))

    found = search_part(part.problem, on_progress=report)
    return _on_all_devices(_with_bound_of_parts(found, part, parts), lift, evaluator)


def _least(*records: Mapping[str, float | None]) -> dict[str, float | None]:
    """The best step time of each searcher in several searches; None where it has found no plan in any of them."""
    return {
        name: min((s for record in records if (s := record.get(name)) is not None), default=None)
        for name in dict.fromkeys(itertools.chain(*records))
    }


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
        plan = _with_baseline(plan, yours, evaluator)

    def lifted(plans: Sequence[Plan]) -> tuple[Plan, ...]:
        return tuple(one for one in map(lift, plans) if one is not None)

    return replace(
        found,
        plan=plan,
        unlike=lambda count: (plan, *lifted(found.unlike(count)[1:])),
        others=lambda count: lifted(found.others(count)),
    )


def _with_baseline(plan: Plan, yours: Baseline, evaluator: Evaluator) -> Plan:
    """The faster one of a found plan and of the plan that the user runs today; its record compares the two."""
    offer, record = _baseline_offer(yours, evaluator), plan.search
    assert record is not None
    if offer is not None and offer.plan.step_time_s < plan.step_time_s:
        plan, record = replace(offer.plan, warnings=plan.warnings), replace(record, found_by="yours", fastest_s=None)
    record = replace(
        record, yours=_comparison(yours, plan, evaluator), baselines={**record.baselines, **_baseline_time(yours)}
    )
    return replace(plan, search=record)


def _baseline_offer(yours: Baseline, evaluator: Evaluator) -> Offer | None:
    """The plan that the user runs today, as one that the search may return; None where it is not allowed."""
    if Verifier(evaluator.problem).violations(yours.plan):
        return None
    rank = plainness(yours.lowered, evaluator, is_template=False)
    # Numbers of decisions are those of a plan space, which need not have this plan.
    return Offer(plan=yours.plan, found_by="yours", plainness=rank, num_decisions=0, num_operator_decisions=0)


def _comparison(yours: Baseline, plan: Plan, evaluator: Evaluator) -> Yours:
    """How the plan that the user runs today differs from the plan that is returned."""
    own, notes = _estimate(yours.plan), yours.notes
    if not own.fits and not own.overflows and own.fit_probability is not None:
        asked = evaluator.problem.training.memory_confidence
        notes += (f"it fits with a probability of {own.fit_probability:.0%}, and {asked:.3g} is asked for",)
    return Yours(
        name=yours.name,
        step_time_s=yours.plan.step_time_s,
        shortage=shortage(own),
        notes=notes,
        changes=changes_of_plans(yours.plan, plan, evaluator),
    )


def _baseline_time(yours: Baseline) -> dict[str, float | None]:
    """An entry for the baselines of a search: step time of the plan that the user runs today; None where it overflows.

    The plan need not fit with the probability that is asked for: the user runs it.
    """
    return {"yours": yours.plan.step_time_s if not _estimate(yours.plan).overflows else None}


@dataclass(frozen=True, slots=True)
class _Found:
    """What the searches on all devices and on parts of them have found.

    Attributes:
        problem: the problem on all devices.
        evaluator: returns the evaluator of this problem, which is made at the first call.
        main: result of the search on all devices.
        on_parts: the parts that were searched, and what was found on each.
        parts: all parts that may hold a fast plan.
        tie: see `search_offer`.
        yours: the plan that the user runs today, if it is known.
        of_any_trainer: what a search among the plans of any trainer found, if there is a target.
    """

    problem: Problem
    evaluator: Callable[[], Evaluator]
    main: SearchResult
    on_parts: tuple[OnPart, ...]
    parts: tuple[Part, ...]
    tie: float
    yours: Baseline | None
    of_any_trainer: AnyTrainer | None

    def result(self) -> SearchResult:
        """The result with the plainest plan within the tie."""
        main = self.main
        of_parts = [(one, plan) for one in self.on_parts if (plan := self._of_part(one, one.found.plan)) is not None]
        further = [
            None if self.yours is None else _baseline_offer(self.yours, self.evaluator()),
            self.of_any_trainer.offer if self.of_any_trainer is not None else None,
        ]
        known = [offer for offer in further if offer is not None]
        found = [main.plan, *(plan for _, plan in of_parts), *(offer.plan for offer in known)]
        fastest_s = min(plan.step_time_s for plan in found)
        limit_s = fastest_s * (1.0 + self.tie * error_band(self.problem))
        offers = [_plainest(main, limit_s)] if main.plan.step_time_s <= limit_s else []
        for one, plan in of_parts:
            if plan.step_time_s <= limit_s:
                offer = _plainest(one.found, limit_s)
                lifted = self._of_part(one, offer.plan)
                if lifted is None:  # the hints may allow the fastest plan of the part and not its plainest one
                    offer, lifted = _plainest(one.found, 0.0), plan
                offers.append(replace(offer, plan=lifted))
        offers += [offer for offer in known if offer.plan.step_time_s <= limit_s]
        offer, *_ = in_order(offers, lambda some: some.plainness, NEAR * (limit_s - fastest_s))
        record = self._record(offer, fastest_s)
        yours = None if self.yours is None else _comparison(self.yours, offer.plan, self.evaluator())
        chosen = replace(
            offer.plan,
            search=replace(record, yours=yours, any_trainer=self._cost(fastest_s)),
            why=(*offer.plan.why, *_why_plainer(offer.plan, fastest_s)),
            warnings=(*offer.plan.warnings, *idle_hints(offer.plan, self.problem.hints), *self._unsplit()),
        )

        def unlike(count: int) -> tuple[Plan, ...]:
            return (chosen, *self._others(chosen, record, count))[:count]

        def others(count: int) -> tuple[Plan, ...]:
            if self.problem.cluster.num_devices == 1:
                return ()  # all its plans have the same degrees
            plans = [*main.others(count + 1), *(plan for _, plan in of_parts)]
            mine = key_of(chosen.degrees)
            return fastest_of_each((plan for plan in plans if key_of(plan.degrees) != mine), count)

        return replace(
            main,
            plan=chosen,
            unlike=unlike,
            others=others,
            by_searcher=self._by_searcher(),
            evaluations=record.evaluations,
            seconds=record.seconds or main.seconds,
            proven=record.proven,
            plainest=None,
        )

    def _unsplit(self) -> tuple[str, ...]:
        """Why the target splits no layers of a model whose layers can be split."""
        target = self.problem.target
        if target is None or self.problem.cluster.num_devices == 1 or not has_attention(self.problem.graph):
            return ()
        why = why_whole(self.problem, self.evaluator())
        return (f"the target {target.name} has no plan of this model with tensor parallelism: {why}",) if why else ()

    def _by_searcher(self) -> dict[str, list[tuple[int, float, float]]]:
        """What each searcher reached when, on all devices and then on the parts."""
        found = {name: list(own) for name, own in self.main.by_searcher.items()}
        done, done_s = self.main.evaluations, self.main.seconds
        for _, result in self.on_parts:
            for name, own in result.by_searcher.items():
                before = found.setdefault(name, [])
                for evaluations, seconds, step_s in own:
                    if not before or step_s < before[-1][2]:
                        before.append((done + evaluations, done_s + seconds, step_s))
            done, done_s = done + result.evaluations, done_s + result.seconds
        return found

    def _cost(self, fastest_s: float) -> TargetCost | None:
        """What the target costs, whose fastest plan is known; None where that is not worth telling."""
        cost = None if self.of_any_trainer is None else self.of_any_trainer.cost
        return cost if cost is not None and cost.step_time_s < (1.0 - WORTH_TELLING) * fastest_s else None

    def _of_part(self, one: OnPart, plan: Plan) -> Plan | None:
        """A plan of a part as a plan of the whole cluster; None where the hints forbid it."""
        return on_all(plan, one.part, self.problem, self.evaluator())

    def _record(self, offer: Offer, fastest_s: float) -> SearchRecord:
        """The record of all searches, for the plan that is returned."""
        own, others = self.main.record, [one.found.record for one in self.on_parts]
        assert offer.plan.estimate is not None
        templates = [own.baselines.get("expert"), *(part.template_s for part in self.parts)]
        expert_s = min((step_s for step_s in templates if step_s is not None), default=None)
        # A part that was not searched may hold a plan as fast as its bound.
        bounds = {part.devices: part.bound_s for part in self.parts}
        proofs = {part.devices: part.bound_s >= fastest_s for part in self.parts}
        for (part, _), other in zip(self.on_parts, others, strict=True):
            bounds[part.devices] = other.lower_bound_s or 0.0
            proofs[part.devices] = other.proven or bounds[part.devices] >= fastest_s
        least = min((own.lower_bound_s or 0.0, *bounds.values()))
        baselines = {**own.baselines, "expert": expert_s} if "expert" in own.baselines else own.baselines
        if self.yours is not None:
            baselines = {**baselines, **_baseline_time(self.yours)}
        return replace(
            own,
            found_by=offer.found_by,
            baselines=baselines,
            evaluations=own.evaluations
            + sum(some.evaluations for some in (*others, self.of_any_trainer) if some is not None),
            seconds=sum(some.seconds or 0.0 for some in (own, *others)),
            fastest_s=fastest_s if offer.plan.step_time_s > fastest_s else None,
            proven=own.proven and all(proofs.values()),
            lower_bound_s=min(fastest_s, max(least, offer.plan.estimate.lower_bound_s)),
            searchers=_least(own.searchers, *(other.searchers for other in others)),
            history=history(self._by_searcher()),
            num_decisions=offer.num_decisions,
            num_operator_decisions=offer.num_operator_decisions,
        )

    def _others(self, chosen: Plan, record: SearchRecord, count: int) -> list[Plan]:
        """The best plans that are unlike the one that is returned."""
        verifier, evaluator = Verifier(self.problem), self.evaluator()
        plans = list(self.main.unlike(count + 1))
        for one in self.on_parts:
            plans += [p for p in (self._of_part(one, mine) for mine in one.found.unlike(count)) if p]
        tidied = [
            plan if plan.sync.kind != "synchronous" else tidy(plan, lower_plan(plan, evaluator), evaluator, verifier)
            for plan in plans
        ]
        shape = candidate(chosen, 0.0, None).shape
        others = [plan for plan in unlike_plans(tidied, count + 1) if candidate(plan, 0.0, None).shape != shape]
        return [with_record(plan, record) for plan in others]


def _plainest(found: SearchResult, limit_s: float) -> Offer:
    assert found.plainest is not None
    return found.plainest(limit_s)


def _estimate(plan: Plan) -> Estimate:
    assert plan.estimate is not None
    return plan.estimate


def _why_plainer(plan: Plan, fastest_s: float) -> tuple[str, ...]:
    """A sentence that says why `plan` is returned and not the fastest plan, if it is slower."""
    less = 1.0 - fastest_s / plan.step_time_s
    if less < NOTICEABLE:
        return ()
    share = f"{less:.1%}" if less >= 0.0005 else "less than 0.1%"
    return (
        f"The fastest plan found takes {in_seconds(fastest_s)} by the estimate, {share} less. This one is plainer, "
        "and the estimate is not exact enough to tell them apart; a tie of 0 gives the fastest.",
    )
