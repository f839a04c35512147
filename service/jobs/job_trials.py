"""Trials of a job: runs plans for some steps on this host, led by the DQN, and chooses the one measured fastest.

A trial that fails is a data point and says so in the plan's record. Knows nothing of HTTP, queues or terminals; imports
torch only where there are trials. Units: seconds.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from automap.errors import PlanError
from automap.plan import Plan
from automap.problem import Problem
from automap.runtime.launch.host import memory_bytes
from automap.runtime.launch.launcher import Limits
from automap.runtime.trial import trial as runtime
from automap.runtime.trial.calibration import calibrate
from automap.search_record import TrialRecord
from service.jobs.trial_options import PROPOSE_S, Trials
from service.strategy import strategy

if TYPE_CHECKING:
    from agents.learning.trials import Effort, Proposal

OnTrial = Callable[[int, float, float | None], None]
"""(number of the trial from 0, share of its time limit that is spent, fastest measured step so far)."""


@dataclass(frozen=True, slots=True)
class _Tried:
    """A plan that has run."""

    plan: Plan
    expected_s: float
    trial: runtime.Trial


def try_plans(
    problem: Problem,
    plans: Sequence[Plan],
    options: Trials,
    *,
    seed: int,
    on_trial: OnTrial,
    should_stop: Callable[[], bool],
) -> Plan:
    """Runs plans one after another, in processes of their own, as `agents.learning.trials` proposes them.

    Args:
        problem: the problem that the plans solve, on a cluster that is this host.
        plans: plans of a search, at least one, the best by its estimate first.
        options: how many plans run, for how many steps, and how long.
        seed: seed of the DQN, and of random parameters and data.
        on_trial: called many times a second.
        should_stop: called as often; once it is true, the processes are ended and what was measured so far decides.

    Returns:
        The plan measured fastest, or the first one if none could be measured. Its record describes all trials.
    """
    from agents.learning.trials import lead_trials

    tried: list[_Tried] = []
    began = time.monotonic()
    stopped = False

    def asked() -> bool:
        best_s = min((t.trial.step_time_s for t in tried if t.trial.step_time_s is not None), default=None)
        share = min((time.monotonic() - began) / (options.time_limit_s + PROPOSE_S), 1.0)
        is_over = len(tried) == options.top_k
        on_trial(len(tried) - is_over, 1.0 if is_over else share, best_s)
        return stopped or should_stop()

    def measure(proposal: Proposal) -> float | None:
        nonlocal stopped, began
        stopped = asked()
        if stopped:
            return None
        trial = _try(problem, proposal.plan, options, seed=seed, should_stop=asked)
        stopped = trial.outcome == "stopped"
        if stopped:
            return None
        tried.append(_Tried(runtime.with_measured(proposal.plan, trial), proposal.expected_s, trial))
        began = time.monotonic()
        return trial.step_time_s

    effort = lead_trials(problem, plans, measure, most=options.top_k, round_s=PROPOSE_S, seed=seed, should_stop=asked)
    return _described(_chosen(plans, tried), tried, effort, stopped_at=options.top_k if asked() else None)


def _described(chosen: Plan, tried: Sequence[_Tried], effort: Effort, stopped_at: int | None) -> Plan:
    """The plan that is returned, with a record of all trials.

    Args:
        chosen: the plan.
        tried: the plans that have run.
        effort: what the DQN has done.
        stopped_at: number of trials that were asked for, where the caller stopped them; else None.
    """
    assert chosen.search is not None
    measured = [
        (t.plan.estimate, t.trial.step_time_s)
        for t in tried
        if t.plan.estimate is not None and t.trial.step_time_s is not None
    ]
    record = replace(
        chosen.search,
        evaluations=chosen.search.evaluations + effort.evaluations,
        look_aheads=chosen.search.look_aheads + effort.look_aheads,
        searchers=_reached(chosen.search.searchers, tried),
        trials=tuple(_record(t) for t in tried),
        calibration=calibrate(measured),
    )
    warnings = [*chosen.warnings]
    if stopped_at is not None and len(tried) < stopped_at:
        warnings.append(f"stopped after {len(tried)} of {stopped_at} trials")
    elif record.calibration is None:
        outcomes = Counter(t.trial.outcome.replace("_", " ") for t in tried)
        told = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
        warnings.append(f"no trial could be measured ({told}): the plan is the best by its estimate")
    return replace(chosen, search=record, warnings=tuple(warnings))


def _reached(before: Mapping[str, float | None], tried: Sequence[_Tried]) -> Mapping[str, float | None]:
    """Best estimated step time of each searcher: of the search, and of the DQN's plans that have run."""
    reached = dict(before)
    for one in tried:
        assert one.plan.search is not None and one.plan.estimate is not None
        name, seconds = one.plan.search.found_by, one.plan.estimate.step_time_s
        if name == "dqn":
            reached[name] = min(seconds, reached.get(name) or seconds)
    return reached


def _try(problem: Problem, plan: Plan, options: Trials, *, seed: int, should_stop: Callable[[], bool]) -> runtime.Trial:
    try:
        limits = Limits(time_s=options.time_limit_s, memory_bytes=memory_bytes(runtime.num_processes(plan)))
        return runtime.run_trial(problem, plan, steps=options.steps, limits=limits, seed=seed, should_stop=should_stop)
    except PlanError as fault:
        return runtime.refused(plan, str(fault))


def _chosen(plans: Sequence[Plan], tried: Sequence[_Tried]) -> Plan:
    measured = [(t.trial.step_time_s, t.plan) for t in tried if t.trial.step_time_s is not None]
    if measured:
        return min(measured, key=lambda item: item[0])[1]
    return tried[0].plan if tried else plans[0]


def _record(tried: _Tried) -> TrialRecord:
    trial, search = tried.trial, tried.plan.search
    assert search is not None
    return TrialRecord(
        strategy=strategy(tried.plan),
        found_by=search.found_by,
        expected_s=tried.expected_s,
        outcome=trial.outcome,
        message=trial.message,
        predicted=trial.predicted or {},
        measured=trial.measured,
        time_s=trial.time_s,
    )
