"""Offer: the plan that a search returns to the user, plainer than the fastest one where the price cannot tell the two.

First the searchers work, in turn, on all devices; then, where parts of the cluster may be as fast, on these. Of
the plans within a tie of the fastest one, the plainest is returned, and says what the fastest one takes. With a tie of
0 that is the fastest plan itself, in its canonical form. Units: seconds, evaluations.
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
    divided,
    lifted_best,
    lifting,
    parts_to_search,
    scaled,
    scaled_on_part,
    shares_of,
)
from agents.results.diverse_top_k import candidate, unlike_plans
from agents.results.fewer_devices import Part, needed, on_all, promising, space_on_all, told_idle
from agents.results.history import history
from agents.results.plainest import NEAR, TIE, Offer, in_order, plainness, tidy
from agents.results.side_by_side import fastest_of_each, key_of
from agents.searcher import Budget, OnProgress, Progress, Reached, SearchResult, ShouldStop, check_tie
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
from automap.space.target_limits import has_attention, why_whole
from automap.verify import Verifier

LOOK_SHARE = 0.2
"""Share of a budget in seconds after which no further part is considered; a part takes a tenth of a second on one host
and a second on 32 hosts."""
LEAST_S = 0.01
"""Budget of the search on all devices where the choice of parts took too long; it is enough for a template."""
TOLD = 1e-6
"""Share by which a plan must be slower than the fastest one for the plan to say so."""


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
    """The plainest of the plans that the price cannot tell from the fastest one found within `budget`.

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
    idle = needed(parts)
    if idle is not None:
        (left,) = divided(budget, time.monotonic() - began, (), LEAST_S)
        lift = lifting(problem, idle, evaluator)
        alone = search_offer(
            idle.problem,
            left,
            searchers=searchers,
            seed=seed,
            tie=tie,
            on_progress=lambda progress: on_progress(replace(progress, best=lifted_best(progress, lift))),
            should_stop=should_stop,
        )
        return _on_all_devices(_beside_parts(alone, idle, parts), lift, evaluator())
    own, aside = set_aside(budget, problem)
    some = parts_to_search(parts, own)
    shares = shares_of(some)
    mine, *rest = divided(own, time.monotonic() - began, shares, LEAST_S)
    run = functools.partial(search_in_turn, searchers=searchers, seed=seed, should_stop=should_stop)
    yours = None if problem.hints.baseline is None else read_baseline(evaluator())
    begin = [*start, *([yours.plan] if yours is not None else [])]
    reached: dict[str, Reached] = {}
    done = 1.0 - sum(shares)

    def report(progress: Progress) -> None:
        reached.update(progress.members)
        on_progress(scaled(progress, 0.0, done))

    main = run(space or problem, mine, start=begin, on_progress=report)
    before = Before(main.plan, main.evaluations, main.seconds, reached)
    on_parts: list[OnPart] = []
    for part, share, amount in zip(some, shares, rest, strict=False):
        if should_stop():
            break
        told = _Told(on_progress, done, share, before, lifting(problem, part, evaluator))
        # It may be that no plan of the part fits, or that no searcher accepts it.
        with contextlib.suppress(UserError):
            on_parts.append(OnPart(part, run(part.problem, amount, on_progress=told)))
            before = before.after(on_parts[-1].found, told.lift)
        before, done = before._replace(reached=told.reached), done + share
    others = None
    if aside is not None and not should_stop():
        best_s = min(found.step_time_s for found in (main, *(one.found for one in on_parts)))
        others = search_any(problem, aside, main.plan, best_s, seed=seed, should_stop=should_stop)
    return _Found(problem, evaluator, main, tuple(on_parts), parts, tie, yours, others).result()


class _Told:
    """Reports the progress of a search on a part; `reached` is what each searcher has reached."""

    def __init__(self, on_progress: OnProgress, done: float, share: float, before: Before, lift: Lift) -> None:
        self.reached, self.lift = before.reached, lift
        self._on_progress = on_progress
        self._found = functools.partial(scaled_on_part, done=done, share=share, before=before, lift=lift)

    def __call__(self, progress: Progress) -> None:
        told = self._found(progress)
        self.reached = told.members
        self._on_progress(told)


def _least(*records: Mapping[str, float | None]) -> dict[str, float | None]:
    """The best step time of each searcher in several searches; None where it has found no plan in any of them."""
    return {
        name: min((s for record in records if (s := record.get(name)) is not None), default=None)
        for name in dict.fromkeys(itertools.chain(*records))
    }


def _beside_parts(found: SearchResult, own: Part, parts: Sequence[Part]) -> SearchResult:
    """The result of a search on one part, whose bound holds for the parts that were not searched too.

    Args:
        found: the result.
        own: the part that was searched; what it contains was looked at there.
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
        plan = _beside(plan, yours, evaluator)

    def lifted(plans: Sequence[Plan]) -> tuple[Plan, ...]:
        return tuple(one for one in map(lift, plans) if one is not None)

    return replace(
        found,
        plan=plan,
        unlike=lambda count: (plan, *lifted(found.unlike(count)[1:])),
        others=lambda count: lifted(found.others(count)),
    )


def _beside(plan: Plan, yours: Baseline, evaluator: Evaluator) -> Plan:
    """The plan of a search beside the one that the user runs today, or that one where it is faster."""
    kept, record = _kept(yours, evaluator), plan.search
    assert record is not None
    if kept is not None and _step_s(kept.plan) < _step_s(plan):
        plan, record = replace(kept.plan, warnings=plan.warnings), replace(record, found_by="yours", fastest_s=None)
    record = replace(record, yours=_compared(yours, plan, evaluator), baselines={**record.baselines, **_priced(yours)})
    return replace(plan, search=record)


def _kept(yours: Baseline, evaluator: Evaluator) -> Offer | None:
    """The plan that the user runs today; None where the search may not return it."""
    if Verifier(evaluator.problem).violations(yours.plan):
        return None
    rank = plainness(yours.lowered, evaluator, is_template=False)
    # The space need not have it.
    return Offer(plan=yours.plan, found_by="yours", plainness=rank, num_decisions=0, num_operator_decisions=0)


def _compared(yours: Baseline, plan: Plan, evaluator: Evaluator) -> Yours:
    """The plan that the user runs today beside the one that is returned."""
    own, notes = _estimate(yours.plan), yours.notes
    if not own.fits and not own.overflows and own.fit_probability is not None:
        asked = evaluator.problem.training.memory_confidence
        notes += (f"it fits with a probability of {own.fit_probability:.0%}, and {asked:.3g} is asked for",)
    return Yours(
        name=yours.name,
        step_time_s=_step_s(yours.plan),
        shortage=shortage(own),
        notes=notes,
        changes=changes_of_plans(yours.plan, plan, evaluator),
    )


def _priced(yours: Baseline) -> dict[str, float | None]:
    """The plan that the user runs today among the baselines of a search; it may be less sure to fit than asked for."""
    return {"yours": _step_s(yours.plan) if not _estimate(yours.plan).overflows else None}


@dataclass(frozen=True, slots=True)
class _Found:
    """What the searches on all devices and on a part of them have found.

    Attributes:
        problem: the problem on all devices.
        evaluator: returns its evaluator, which is made when it is first needed: that of a small problem takes longer
            than pricing its plans.
        main: result of the search on all devices.
        on_parts: the parts that were searched, and what was found on each.
        parts: all parts that may hold a fast plan.
        tie: see `search_offer`.
        yours: the plan that the user runs today, if it is known.
        others: what a search among the plans of any trainer found, if there is a target.
    """

    problem: Problem
    evaluator: Callable[[], Evaluator]
    main: SearchResult
    on_parts: tuple[OnPart, ...]
    parts: tuple[Part, ...]
    tie: float
    yours: Baseline | None
    others: AnyTrainer | None

    def result(self) -> SearchResult:
        """The result with the plainest plan within the tie."""
        main = self.main
        of_parts = [(one, plan) for one in self.on_parts if (plan := self._of_part(one, one.found.plan)) is not None]
        further = [
            None if self.yours is None else _kept(self.yours, self.evaluator()),
            self.others.offer if self.others is not None else None,
        ]
        known = [offer for offer in further if offer is not None]
        found = [main.plan, *(plan for _, plan in of_parts), *(offer.plan for offer in known)]
        fastest_s = min(map(_step_s, found))
        limit_s = fastest_s * (1.0 + self.tie * error_band(self.problem))
        offers = [_plainest(main, limit_s)] if _step_s(main.plan) <= limit_s else []
        for one, plan in of_parts:
            if _step_s(plan) <= limit_s:
                offer = _plainest(one.found, limit_s)
                lifted = self._of_part(one, offer.plan)
                if lifted is None:  # the hints may allow the fastest plan of the part and not its plainest one
                    offer, lifted = _plainest(one.found, 0.0), plan
                offers.append(replace(offer, plan=lifted))
        offers += [offer for offer in known if _step_s(offer.plan) <= limit_s]
        offer, *_ = in_order(offers, lambda some: some.plainness, NEAR * (limit_s - fastest_s))
        record = self._record(offer, fastest_s)
        yours = None if self.yours is None else _compared(self.yours, offer.plan, self.evaluator())
        chosen = replace(
            offer.plan,
            search=replace(record, yours=yours, any_trainer=self._cost(fastest_s)),
            why=(*offer.plan.why, *_told(offer.plan, fastest_s)),
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
        cost = None if self.others is None else self.others.cost
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
            baselines = {**baselines, **_priced(self.yours)}
        return replace(
            own,
            found_by=offer.found_by,
            baselines=baselines,
            evaluations=own.evaluations + sum(some.evaluations for some in (*others, self.others) if some is not None),
            seconds=sum(some.seconds or 0.0 for some in (own, *others)),
            fastest_s=fastest_s if _step_s(offer.plan) > fastest_s else None,
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


def _step_s(plan: Plan) -> float:
    return _estimate(plan).step_time_s


def _told(plan: Plan, fastest_s: float) -> tuple[str, ...]:
    """A sentence that says why a slower plan than the fastest one is returned, if it is one."""
    less = 1.0 - fastest_s / _step_s(plan)
    if less < TOLD:
        return ()
    return (
        f"The fastest plan found takes {fastest_s:.4g} s by the estimate, {less:.1%} less. This one is plainer, and "
        "the estimate is not exact enough to tell them apart; a tie of 0 gives the fastest.",
    )
