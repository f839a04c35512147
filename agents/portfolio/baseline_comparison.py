"""What the user runs today beside the plan that a search returns: which of the two is faster, and what changes.

Units: seconds.
"""

from __future__ import annotations

from dataclasses import replace

from agents.results.plainest import Offer, plainness
from automap.comparisons import Yours
from automap.export.baseline import Baseline
from automap.plan import Estimate, Plan
from automap.price.evaluator import Evaluator
from automap.space.changes import changes_of_plans, shortage
from automap.verify import Verifier


def with_baseline(plan: Plan, yours: Baseline, evaluator: Evaluator) -> Plan:
    """The faster one of a found plan and of the plan that the user runs today; its record compares the two."""
    offer, record = baseline_offer(yours, evaluator), plan.search
    assert record is not None
    if offer is not None and offer.plan.step_time_s < plan.step_time_s:
        plan, record = replace(offer.plan, warnings=plan.warnings), replace(record, found_by="yours", fastest_s=None)
    record = replace(
        record, yours=comparison(yours, plan, evaluator), baselines={**record.baselines, **baseline_time(yours)}
    )
    return replace(plan, search=record)


def baseline_offer(yours: Baseline, evaluator: Evaluator) -> Offer | None:
    """The plan that the user runs today, as one that the search may return; None where it is not allowed."""
    if Verifier(evaluator.problem).violations(yours.plan):
        return None
    step_s = evaluator.evaluate(yours.lowered).step_time_s
    rank = plainness(yours.lowered, evaluator, step_s, is_template=False)
    # Numbers of decisions are those of a plan space, which need not have this plan.
    return Offer(plan=yours.plan, found_by="yours", plainness=rank, num_decisions=0, num_operator_decisions=0)


def comparison(yours: Baseline, plan: Plan, evaluator: Evaluator) -> Yours:
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


def baseline_time(yours: Baseline) -> dict[str, float | None]:
    """An entry for the baselines of a search: step time of the plan that the user runs today; None where it overflows.

    The plan need not fit with the probability that is asked for: the user runs it.
    """
    return {"yours": yours.plan.step_time_s if not _estimate(yours.plan).overflows else None}


def _estimate(plan: Plan) -> Estimate:
    assert plan.estimate is not None
    return plan.estimate
