"""Replicas on real processes against the equations of local SGD and DaSGD, followed by one process."""

import json
from dataclasses import replace

import forked_ranks
import pytest
import sync_cases
from runtime_ranks import programs_of
from small_graphs import build_gpt
from sync_plans import plan_of, space_of

from automap.errors import PlanError
from automap.plan import Sync
from automap.price.estimate import annotate
from automap.price.local_sgd import held_bytes
from automap.runtime.executor.routes import StageBorder, backward_routes, forward_routes
from automap.runtime.executor.runner import join
from automap.runtime.executor.tied_gradients import tied_parameters
from automap.runtime.launch.launcher import Limits
from automap.runtime.mesh_groups import Groups
from automap.runtime.trial.trial import run_trial

DASGD = Sync(kind="dasgd", period=3, delay=2, merge="corrected")


@pytest.mark.slow
def test_replicas_go_as_the_equations_say(tmp_path):
    """Averaging every step under plain SGD is compared with one process and the whole batch."""
    forked_ranks.start(sync_cases.compare, 4, str(tmp_path))
    found = json.loads((tmp_path / "found.json").read_text())
    held = found.pop("memory")
    assert len(found) == len(sync_cases.CASES)
    wrong = {name: errors for name, errors in found.items() if not max(errors.values()) < 1e-9}
    assert not wrong, wrong
    for mode, sync in sync_cases.MODES.items():
        # Local SGD averages where gradients were, here 4 bytes.
        wanted = held_bytes(sync, 4.0) + (4.0 if sync.kind == "local_sgd" else 0.0)
        assert held[mode] == pytest.approx(wanted, abs=0.01), mode


@pytest.mark.slow
def test_a_trial_runs_whole_rounds_of_the_mode_of_the_plan():
    space = space_of(build_gpt(hidden=16), "2xA100")
    plan, lowered = plan_of(space)
    plan = annotate(replace(plan, sync=DASGD), lowered, space.evaluator)
    trial = run_trial(space.problem, plan, steps=4, limits=Limits(time_s=120))
    assert (trial.outcome, trial.message) == ("ok", "")
    assert len(trial.step_times_s) == 6, "two rounds of three steps"
    assert trial.num_warm_up_steps % 3 == 0
    assert trial.losses[-1] < trial.losses[0]


def test_what_goes_between_stages_stays_within_a_replica():
    """Of a shared weight every replica of a stage has the same part: anybody could give its gradient."""
    setting = sync_cases.Setting("6xA100-80GB")
    plan = setting.plan("dp2 -> dp2 x tp2", DASGD)
    stages = programs_of(plan, setting.evaluator)
    replica = {rank: number for s in stages for rank, number in zip(s.mesh.devices, s.mesh.replicas, strict=True)}
    assert replica == {0: 0, 1: 1, 2: 0, 3: 0, 4: 1, 5: 1}

    def crossing(*, are_apart):
        ends = [
            StageBorder(ranks=s.mesh.devices, inputs=s.inputs, outputs=s.outputs, parameters=s.parameters,
                 replicas=s.mesh.replicas if are_apart else ())
            for s in stages
        ]  # fmt: skip
        blocks = [block for tied in tied_parameters(ends).values() for block in tied.blocks]
        routes = [
            *forward_routes(ends),
            *backward_routes(ends),
            *(route for block in blocks for route in (*block.coming, *block.going)),
        ]
        assert {route.name for route in routes} > {"wte"}
        return [(r.name, p) for r in routes for p in r.pieces if replica[p.source] != replica[p.target]]

    assert crossing(are_apart=False) and not crossing(are_apart=True)


def test_what_is_refused_by_price_is_not_executed():
    space = space_of(cluster="2xA100")
    plan, _ = plan_of(space, zero=1)
    with pytest.raises(PlanError, match="under ZeRO"):
        join(space.evaluator, replace(plan, sync=DASGD), 0, {}, Groups())
