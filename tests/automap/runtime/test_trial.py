"""Trials: a plan really run and measured, and what becomes of one that cannot be."""

from dataclasses import replace

import psutil
import pytest
from child_processes import called, living
from small_graphs import build_mlp

from automap.cluster import parse_cluster
from automap.errors import PlanError
from automap.plan import AxisSharding, Plan, Schedule
from automap.price.evaluator import Evaluator
from automap.price.plan_reader import lower_plan
from automap.problem import Problem
from automap.runtime.launch.launcher import Limits
from automap.runtime.trial.trial import run_trial, with_measured
from automap.space.space import PlanSpace

LIMITS = Limits(time_s=120)
WIDTHS = (64, 256, 256, 32)


def planned(cluster="2xH100", precision="fp32", **fix):
    """A problem, and the plan of even stages with an estimate."""
    from automap.price.estimate import annotate
    from automap.price.plan_reader import lower_plan

    problem = Problem.build(
        build_mlp(WIDTHS), parse_cluster(cluster), {"global_batch": 32, "precision": precision}, {"fix": fix}
    )
    space = PlanSpace(problem)
    shape = next(s for s in space.meshes.shapes if s.virtual == 1)
    plan = space.decode(space.even_values(shape, recompute="none", zero=0))
    return problem, annotate(plan, lower_plan(plan, space.evaluator), space.evaluator)


@pytest.mark.slow
def test_a_plan_is_run_and_measured():
    problem, plan = planned(pp=2, num_micro_batches=4)
    trial = run_trial(problem, plan, steps=5, limits=LIMITS)
    assert (trial.outcome, trial.message) == ("ok", "")
    assert len(trial.step_times_s) == 5
    assert 0.0 < min(trial.step_times_s) <= trial.step_time_s <= max(trial.step_times_s) < trial.time_s
    assert trial.losses[-1] < trial.losses[0], "the same data again and again: Adam must get better at it"
    # Parameters, gradients and two moments of each stage, plus little else in so small a model.
    states = 16 * problem.graph.num_parameters
    assert states < sum(trial.peak_memory_bytes) < 1.5 * states
    assert trial.predicted["step_time_s"] == plan.estimate.step_time_s
    found = with_measured(plan, trial)
    assert found.measured["step_time_s"] == trial.step_time_s
    assert Plan.from_json(found.to_json()) == found


@pytest.mark.slow
def test_a_plan_that_is_not_executed_is_refused_by_name():
    problem, plan = planned("1xH100", "fp8")
    trial = run_trial(problem, plan, steps=1, limits=LIMITS)
    assert trial.outcome == "refused"
    assert "plan.training.precision" in trial.message
    assert trial.measured is None
    assert with_measured(plan, trial).measured == {"outcome": "refused"}


def test_a_plan_for_a_larger_host_is_refused(gpt):
    problem = Problem.build(gpt(), parse_cluster("64x8xH100"), {"global_batch": 512}, {"fix": {"dp": 512}})
    space = PlanSpace(problem)
    plan = space.decode(space.even_values(space.meshes.shapes[0], recompute="none", zero=0))
    with pytest.raises(PlanError, match="512 devices"):
        run_trial(problem, plan, steps=1, limits=LIMITS)


class Killer:
    """Ends one rank with SIGKILL as soon as the ranks talk to each other."""

    def __init__(self):
        self.ranks = []

    def __call__(self):
        """Whether the trial is to stop: never."""
        if not self.ranks:
            found = called("automap.runtime.launch.rank", psutil.Process().children())
            if len(found) == 2 and all(self._talks(rank) for rank in found):
                self.ranks = found
                found[1].kill()
        return False

    def _talks(self, rank):
        return any(c.status == psutil.CONN_ESTABLISHED for c in rank.net_connections("tcp"))


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_trial():
    problem, plan = planned(pp=2, num_micro_batches=4)
    killer = Killer()
    trial = run_trial(problem, plan, steps=10**9, limits=LIMITS, should_stop=killer)
    assert (trial.outcome, trial.measured) == ("crashed", None)
    assert "rank 1: ended by SIGKILL" in trial.message
    assert killer.ranks
    assert not living(killer.ranks)
    assert trial.time_s < LIMITS.time_s


def unlike(plan, **changes):
    """The plan with its first stage changed."""
    return replace(plan, stages=(replace(plan.stages[0], **changes), *plan.stages[1:]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: replace(plan, model=replace(plan.model, sha256="0" * 64)), "plan.model.sha256"),
        (lambda plan: unlike(plan, devices="0-2", mesh=(("dp", 3), ("tp", 1))), "the cluster has devices 0 to 1"),
        (lambda plan: unlike(plan, mesh=(("dp", 2), ("tp", 1))), "mesh"),
        (lambda plan: replace(plan, samples_per_micro_batch=7), "samples_per_micro_batch"),
        (
            lambda plan: replace(
                plan,
                schedule=Schedule(
                    kind="explicit",
                    order=(
                        ("0F0", "0B0", "0F1", "0B1", "0F2", "0B2", "0F3", "0B3"),
                        ("1F1", "1B1", "1F0", "1B0", "1F2", "1B2", "1F3", "1B3"),
                    ),
                ),
            ),
            "rank 0 waits forever: 0B0",
        ),
    ],
)
def test_plans_that_cannot_be_run_are_refused_by_name(change, message):
    problem, plan = planned(pp=2, num_micro_batches=4)
    with pytest.raises(PlanError, match=message):
        lower_plan(change(plan), Evaluator(problem))


def test_a_mesh_that_does_not_divide_a_dim_is_refused_by_name():
    problem, plan = planned("4xH100", pp=1, tp=1, num_micro_batches=1)
    columns = {"layers.0/MatMul": {"tp": AxisSharding(inputs=("B", "S(1)"), outputs=("S(1)",))}}
    split = unlike(plan, devices="0-2", mesh=(("dp", 1), ("tp", 3)), shardings=columns)
    with pytest.raises(PlanError, match="cannot be shared by the ranks of the mesh"):
        lower_plan(split, Evaluator(problem))
