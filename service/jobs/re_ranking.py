"""Re-ranking: runs the best plans of a search for some steps on this host, and chooses the one measured fastest.

A trial that fails is a data point and says so in the plan's record. Knows nothing of HTTP, queues or terminals; imports
no torch. Units: seconds.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from automap.errors import PlanError
from automap.plan import Plan, TrialRecord
from automap.problem import Problem
from automap.runtime.launch.host import memory_bytes
from automap.runtime.launch.launcher import Limits
from automap.runtime.trial import trial as runtime
from automap.runtime.trial.calibration import calibrate
from service.strategy import strategy

OnTrial = Callable[[int, float, float | None], None]
"""(number of the trial from 0, share of its time limit that is spent, fastest measured step so far)."""


def re_rank(
    problem: Problem,
    plans: Sequence[Plan],
    *,
    steps: int,
    time_limit_s: float,
    seed: int,
    on_trial: OnTrial,
    should_stop: Callable[[], bool],
) -> Plan:
    """Tries plans one after another, in processes of their own.

    Args:
        problem: the problem that the plans solve, on a cluster that is this host.
        plans: plans of a search, at least one, the best by its estimate first.
        steps: steps that are measured of each plan.
        time_limit_s: seconds that each trial may take.
        seed: seed of random parameters and data.
        on_trial: called many times a second.
        should_stop: called as often; once it is true, the processes are ended and what was measured so far decides.

    Returns:
        The plan measured fastest, or the first one if none could be measured. Its record describes all trials.
    """
    tried: list[tuple[Plan, runtime.Trial]] = []
    stopped = False
    for number, plan in enumerate(plans):
        began = time.monotonic()
        best_s = min((t.step_time_s for _, t in tried if t.step_time_s is not None), default=None)

        def asked(number: int = number, began: float = began, best_s: float | None = best_s) -> bool:
            on_trial(number, min((time.monotonic() - began) / time_limit_s, 1.0), best_s)
            return should_stop()

        stopped = asked()
        if not stopped:
            trial = _try(problem, plan, steps=steps, time_limit_s=time_limit_s, seed=seed, should_stop=asked)
            stopped = trial.outcome == "stopped"
        if stopped:
            break
        tried.append((runtime.with_measured(plan, trial), trial))
    chosen = _chosen(plans, tried)
    assert chosen.search is not None
    record = replace(
        chosen.search,
        trials=tuple(_record(plan, trial) for plan, trial in tried),
        calibration=calibrate(
            [
                (plan.estimate, trial.step_time_s)
                for plan, trial in tried
                if plan.estimate is not None and trial.step_time_s is not None
            ]
        ),
    )
    warnings = [*chosen.warnings]
    if stopped:
        warnings.append(f"stopped after {len(tried)} of {len(plans)} trials")
    elif record.calibration is None:
        outcomes = Counter(trial.outcome.replace("_", " ") for _, trial in tried)
        told = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
        warnings.append(f"no trial could be measured ({told}): the plan is the best by its estimate")
    return replace(chosen, search=record, warnings=tuple(warnings))


def _try(
    problem: Problem, plan: Plan, *, steps: int, time_limit_s: float, seed: int, should_stop: Callable[[], bool]
) -> runtime.Trial:
    try:
        limits = Limits(time_s=time_limit_s, memory_bytes=memory_bytes(runtime.num_processes(plan)))
        return runtime.run_trial(problem, plan, steps=steps, limits=limits, seed=seed, should_stop=should_stop)
    except PlanError as fault:
        return runtime.refused(plan, str(fault))


def _chosen(plans: Sequence[Plan], tried: Sequence[tuple[Plan, runtime.Trial]]) -> Plan:
    measured = [(trial.step_time_s, plan) for plan, trial in tried if trial.step_time_s is not None]
    if measured:
        return min(measured, key=lambda item: item[0])[1]
    return tried[0][0] if tried else plans[0]


def _record(plan: Plan, trial: runtime.Trial) -> TrialRecord:
    return TrialRecord(
        strategy=strategy(plan),
        outcome=trial.outcome,
        message=trial.message,
        predicted=trial.predicted or {},
        measured=trial.measured,
        time_s=trial.time_s,
    )
