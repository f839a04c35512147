"""The choice of the plan that a search returns, among what was found on all devices and on parts of the cluster.

It is the plainest one among the plans whose step times differ from that of the fastest plan by less than the price can
tell (a *tie*). It says what the fastest plan takes. With a tie of 0 the fastest plan itself is returned, in its
canonical form. Units: seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from agents.portfolio.any_trainer import WORTH_TELLING, AnyTrainer
from agents.portfolio.baseline_comparison import baseline_offer, baseline_time, comparison
from agents.portfolio.in_turn import with_record
from agents.portfolio.parts import OnPart
from agents.results.diverse_top_k import candidate, unlike_plans
from agents.results.fewer_devices import Part, on_all
from agents.results.history import history
from agents.results.plainest import NEAR, Offer, in_order, tidy
from agents.results.side_by_side import fastest_of_each, key_of
from agents.searcher import SearchResult
from automap.amounts import in_seconds
from automap.comparisons import TargetCost
from automap.export.baseline import Baseline
from automap.plan import Plan
from automap.price.estimate import error_band
from automap.price.evaluator import Evaluator
from automap.price.plan_reader import lower_plan
from automap.problem import Problem
from automap.search_record import SearchRecord
from automap.space.idle_hints import idle_hints
from automap.space.target_limits import why_whole
from automap.space.target_patterns import has_attention
from automap.verify import Verifier

NOTICEABLE = 1e-6
"""Share by which a plan must be slower than the fastest one for the plan to say so: less is rounding."""


@dataclass(frozen=True, slots=True)
class Found:
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
            None if self.yours is None else baseline_offer(self.yours, self.evaluator()),
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
        yours = None if self.yours is None else comparison(self.yours, offer.plan, self.evaluator())
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
            # A search without time for its own bound has a lower one than the look at the part before.
            bounds[part.devices] = max(part.bound_s, other.lower_bound_s or 0.0)
            proofs[part.devices] = other.proven or bounds[part.devices] >= fastest_s
        least = min((own.lower_bound_s or 0.0, *bounds.values()))
        baselines = {**own.baselines, "expert": expert_s} if "expert" in own.baselines else own.baselines
        if self.yours is not None:
            baselines = {**baselines, **baseline_time(self.yours)}
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


def _least(*records: Mapping[str, float | None]) -> dict[str, float | None]:
    """The best step time of each searcher in several searches; None where it has found no plan in any of them."""
    return {
        name: min((s for record in records if (s := record.get(name)) is not None), default=None)
        for name in dict.fromkeys(itertools.chain(*records))
    }
