"""`automap trial`: a plan of a file, run for real on this host; a page for people."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from automap.amounts import in_seconds
from service.command.estimation import own_problem, price_file
from service.jobs.run_job import JobRequest

if TYPE_CHECKING:
    from automap.plan import Plan
    from automap.runtime.trial.trial import Trial

MIB = 1 << 20


def try_file(data: bytes, request: JobRequest, path: Path, *, steps: int, time_s: float, seed: int
             ) -> tuple[Plan, Trial]:  # fmt: skip
    """Runs the plan of a file on random data.

    Args:
        data: the model's file; empty for a named model.
        request: model and hints.
        path: file of the plan.
        steps: steps that are measured.
        time_s: seconds that the whole trial may take.
        seed: seed of random parameters and data.

    Returns:
        The plan with a new estimate and with what was measured, and the trial.

    Raises:
        UserError: the file, the model, or that the plan is illegal, for another model, or needs too many processes.
    """
    from automap.runtime.launch.host import memory_bytes
    from automap.runtime.launch.launcher import Limits
    from automap.runtime.trial.trial import num_processes, run_trial, with_measured

    plan = price_file(data, request, {}, path)
    limits = Limits(time_s=time_s, memory_bytes=memory_bytes(num_processes(plan)))
    trial = run_trial(own_problem(data, request, plan), plan, steps=steps, limits=limits, seed=seed)
    return with_measured(plan, trial), trial


def page(trial: Trial) -> list[str]:
    """The lines of a trial for people."""
    if trial.step_time_s is None:
        return [
            f"outcome   {trial.outcome.replace('_', ' ')} after {in_seconds(trial.time_s)}",
            *trial.message.split("\n"),
        ]
    lines = [
        f"outcome   ok after {in_seconds(trial.time_s)} and {trial.num_warm_up_steps} steps of warm-up",
        f"step      {in_seconds(trial.step_time_s)}, the median of {len(trial.step_times_s)}: "
        f"{in_seconds(min(trial.step_times_s))} to {in_seconds(max(trial.step_times_s))}",
        f"memory    {max(trial.peak_memory_bytes) / MIB:,.0f} MiB of tensors in the fullest process",
    ]
    if trial.predicted is not None:
        step, memory = trial.predicted["step_time_s"], trial.predicted["peak_memory_bytes"]
        lines.append(f"predicted {in_seconds(step)} and {memory / MIB:,.0f} MiB on the cluster of the plan")
    return lines
