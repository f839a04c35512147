"""A trial runs a plan for a few steps in processes of its own, with synthetic data, and measures it.

The outcome is typed: a plan that runs out of memory, hangs or dies is a data point. A step takes as long as its slowest
rank between two barriers. This module does not import torch; the ranks do. Units: seconds, bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from automap.errors import PlanError
from automap.plan import Plan, parse_devices
from automap.problem import Problem
from automap.records import to_json
from automap.runtime.launch.launcher import Limits, OutcomeKind, launch
from ir.serialize import graph_to_json

RANK = "automap.runtime.trial.rank:run_rank"
MIN_PROCESSES = 8
"""The number of processes that a trial may have on any host (assumed)."""
PROCESSES_PER_CORE = 2
"""The number of processes that it may have for each core (assumed): more would wait for each other and distort what is
measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What a trial measured; figures are None, or empty, unless the outcome is `ok`."""

    outcome: OutcomeKind
    message: str
    """What went wrong, for a reader."""
    step_time_s: float | None = None
    """The median of the measured steps."""
    step_times_s: tuple[float, ...] = ()
    num_warm_up_steps: int | None = None
    peak_memory_bytes: tuple[int, ...] = ()
    """[processes] the peak memory of tensors."""
    losses: tuple[float, ...] = ()
    """The loss of each step, from the first of the warm-up on."""
    predicted: Mapping[str, float] | None = None
    """{step_time_s, peak_memory_bytes} of the plan's estimate, if it has one."""
    time_s: float = 0.0
    """The wall-clock time of the whole trial."""

    def to_json(self) -> dict[str, Any]:
        """The JSON document {measured, predicted, outcome, message, time_s}."""
        return {
            "measured": self.measured,
            "predicted": self.predicted,
            "outcome": self.outcome,
            "message": self.message,
            "time_s": self.time_s,
        }

    @property
    def measured(self) -> dict[str, Any] | None:
        """The `measured` field of a plan: {step_time_s, peak_memory_bytes of the fullest process, num_steps}."""
        if self.step_time_s is None:
            return None
        return {
            "step_time_s": self.step_time_s,
            "peak_memory_bytes": max(self.peak_memory_bytes),
            "num_steps": len(self.step_times_s),
        }


def run_trial(
    problem: Problem,
    plan: Plan,
    *,
    steps: int,
    limits: Limits,
    seed: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
) -> Trial:
    """Runs a plan for real on this host.

    Args:
        problem: the problem of the plan.
        plan: the plan; it takes as many processes as `num_processes` says.
        steps: the number of steps that are measured after a warm-up.
        limits: the limits of the processes.
        seed: the seed of parameters and data.
        should_stop: called many times a second; once it returns true, the processes are ended.

    Raises:
        PlanError: the plan needs more processes than a trial may start on this host.
    """
    argument = {
        "graph": graph_to_json(problem.graph),
        "sha256": problem.graph.sha256,
        "plan": replace(plan, why=(), search=None, estimate=None).to_json(),
        "training": to_json(problem.training),
        "cluster": problem.cluster.to_json(),
        "steps": steps,
        "time_s": limits.time_s,
        "seed": seed,
    }
    done = launch(RANK, argument, num_processes(plan), limits, should_stop=should_stop)
    found: Mapping[str, Any] = done.results[0] if done.results else {}
    return Trial(
        outcome=done.outcome,
        message=done.message,
        step_time_s=found.get("step_time_s"),
        step_times_s=tuple(found.get("step_times_s", ())),
        num_warm_up_steps=found.get("num_warm_up_steps"),
        peak_memory_bytes=tuple(result["peak_memory_bytes"] for result in done.results),
        losses=tuple(next((r["losses"] for r in done.results if r["losses"]), ())),
        predicted=_predicted(plan),
        time_s=done.time_s,
    )


def num_processes(plan: Plan) -> int:
    """The number of processes of a plan on one host: one for each device number up to the highest in the plan.

    Raises:
        PlanError: the plan needs more than a trial may start on this host.
    """
    found = 1 + max(device for stage in plan.stages for device in parse_devices(stage.devices))
    most = max(MIN_PROCESSES, PROCESSES_PER_CORE * (os.cpu_count() or 1))
    if found > most:
        raise PlanError(
            f"this host runs at most {most} processes, one a device", field="plan.stages", value=f"{found} devices",
            repair="Try a plan for fewer devices, or on a larger host.",
        )  # fmt: skip
    return found


def refused(plan: Plan, message: str) -> Trial:
    """The trial of a plan that cannot be started on this host."""
    return Trial(outcome="refused", message=message, predicted=_predicted(plan))


def with_measured(plan: Plan, trial: Trial) -> Plan:
    """The plan with the measurements of a trial in its field `measured`."""
    return replace(plan, measured={"outcome": trial.outcome, **(trial.measured or {})})


def _predicted(plan: Plan) -> dict[str, float] | None:
    if plan.estimate is None:
        return None
    return {
        "step_time_s": plan.estimate.step_time_s,
        "peak_memory_bytes": max(device.total for device in plan.estimate.memory_bytes),
    }
