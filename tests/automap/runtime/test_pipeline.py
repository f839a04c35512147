"""The pipeline executor on real processes against one process, and its orders before they run."""

from dataclasses import replace

import crossing_graphs
import plan_cases
import pytest
import stage_cases
from runtime_ranks import STEPS, errors, reference, run_ranks

from automap.errors import PlanError
from automap.plan import Schedule
from automap.runtime.executor.action_order import Action, action_lists, order_actions
from automap.schedule import BACKWARD, write_order


@pytest.mark.slow
def test_pipelines_and_plans_compute_the_step_of_one_process(tmp_path):
    """One set of processes for all: most of the time goes into starting them."""
    plans = [
        plan_cases.expert("pp4", "unet", 4, pp=4, count=4),
        *plan_cases.random_plans("shared weights", 4, 3, 0, fix=(("pp", 2),)),
        *(case for name in crossing_graphs.GRAPHS for case in plan_cases.random_plans(name, 4, 2, 0, fix=(("pp", 2),))),
    ]
    plans += [plan_cases.unlike(name, steps=STEPS if "ZeRO 1" in name else 0) for name in plan_cases.CASES]
    found = run_ranks(4, [*stage_cases.CASES, *plans], tmp_path, stage_cases.run)
    for name, ranks in zip(stage_cases.CASES, found, strict=False):
        assert not any(isinstance(errors_of_rank, str) for errors_of_rank in ranks), (name, ranks)
        assert any("loss" in mine for mine in ranks), name
        assert len({key for mine in ranks for key in mine}) > 3, name
        wrong = {k: v for mine in ranks for k, v in mine.items() if not v < 1e-4}
        assert not wrong, (name, wrong)
    for plan, outcomes in zip(plans, found[len(stage_cases.CASES) :], strict=True):
        assert max(errors(plan, outcomes, reference(plan)).values()) < 1e-7, plan.name


def actions(*words):
    return [Action("FBIW".index(word[1]), int(word[0]), int(word[2])) for word in words]


CHAIN = {"forward": {1: [0]}, "backward": {0: [1]}}


def test_an_order_that_can_be_finished_keeps_the_order_of_each_rank():
    order = write_order("1f1b", 2, 2, 3)
    lists = {rank: actions(*order[rank]) for rank in (0, 1)}
    found = order_actions(lists, [(0,), (1,)], **CHAIN)
    assert [a for a in found if a.stage == 0] == lists[0]
    assert [a for a in found if a.stage == 1] == lists[1]
    assert found.index(Action(0, 0, 0)) < found.index(Action(0, 1, 0)) < found.index(Action(1, 1, 0))


def test_a_deadlock_names_what_both_ranks_wait_at():
    lists = {0: actions("0F0", "0B0", "0F1", "0B1"), 1: actions("1F1", "1F0", "1B0", "1B1")}
    with pytest.raises(PlanError) as caught:
        order_actions(lists, [(0,), (1,)], **CHAIN)
    assert "rank 0 waits at 0B0 for 1B0 or 1I0; rank 1 waits at 1F1 for 0F1" in str(caught.value)


def test_ranks_of_one_stage_must_agree():
    lists = {0: actions("0F0", "0F1"), 1: actions("0F1", "0F0")}
    with pytest.raises(PlanError, match="rank 0 waits at 0F0 for the other ranks of its stage; rank 1 waits at 0F1"):
        order_actions(lists, [(0, 1)], {}, {})


def test_a_rank_that_two_stages_share_may_be_what_they_wait_for():
    # Rank 1 would do its backward pass of stage 0 before the forward pass of stage 1 that it waits for.
    lists = {0: actions("0F0", "0B0"), 1: actions("0F0", "0B0", "1F0", "1B0"), 2: actions("1F0", "1B0")}
    with pytest.raises(PlanError, match="rank 1 waits at 0B0 for 1B0 or 1I0"):
        order_actions(lists, [(0, 1), (1, 2)], **CHAIN)


def test_weights_wait_for_inputs_and_skips_for_their_makers():
    with pytest.raises(PlanError, match="rank 0 waits at 0W0 for 0I0"):
        order_actions({0: actions("0F0", "0W0", "0I0")}, [(0,)], {}, {})
    skip = {"forward": {1: [0], 2: [0, 1]}, "backward": {0: [1, 2], 1: [2]}}
    lists = {n: actions(f"{n}F0", f"{n}B0") for n in range(3)}
    found = order_actions(lists, [(0,), (1,), (2,)], **skip)
    assert [str(a) for a in found] == ["0F0", "1F0", "2F0", "2B0", "1B0", "0B0"]


def test_eager_1f1b_is_run_with_twice_the_warm_up():
    eager = plan_cases.unlike("dp2 -> 1, eager 1f1b").plan
    for schedule, before in ((eager.schedule, (3, 1)), (Schedule(kind="1f1b"), (2, 1))):
        lists = action_lists(replace(eager, schedule=schedule))
        found = {rank: [action.word for action in mine].index(BACKWARD) for rank, mine in lists.items()}
        assert found == {0: before[0], 1: before[0], 2: before[1]}
