"""Trials led by the DQN, on a host that contradicts the price: pipelines really take twice as long."""

import math

import numpy as np
import pytest

from agents import Budget, search
from agents.learning.trials import LEARNT, PROPOSED, Effort, _Trials, lead_trials
from automap.cluster import parse_cluster
from automap.problem import Problem
from automap.space.space import PlanSpace
from automap.verify import Verifier
from envs.decision import REWARD_SCALE
from ir import zoo

MODEL = "gpt:layers=4,hidden=1024,heads=8,seq_len=128,vocab_size=512"
CLUSTER = "2x1xV100-16GB@10Gbit"


def problem_with(**fix):
    return Problem.build(zoo.build(MODEL), parse_cluster(CLUSTER), {"global_batch": 128}, {"fix": fix})


@pytest.fixture(scope="module")
def problem():
    return problem_with()


@pytest.fixture(scope="module")
def plans(problem):
    """What a search finds, the best by its estimate first."""
    return search(problem, Budget(evaluations=1000), searcher="mcmc", seed=0).unlike(16)


def is_pipelined(plan):
    return len(plan.stages) > 1


def truth(plan):
    return plan.estimate.step_time_s * (2.0 if is_pipelined(plan) else 1.0)


def decided(plan):
    return plan.stages, plan.num_micro_batches, plan.schedule


def led(problem, plans, measure, **options):
    """Effort of the trials and the proposals that ran, each with its measured time."""
    ran = []

    def run(proposal):
        measured_s = measure(proposal.plan)
        ran.append((proposal, measured_s))
        return measured_s

    return lead_trials(problem, plans, run, **{"most": 5, "round_s": 60.0, **options}), ran


@pytest.mark.slow
def test_trials_end_at_the_plan_that_is_really_the_fastest(problem, plans):
    effort, ran = led(problem, plans, truth)
    assert ran[0][0].plan == plans[0] and is_pipelined(plans[0])
    best, best_s = min(ran, key=lambda one: one[1])
    # Who knows the truth searches among the plans that are no pipelines.
    oracle_s = search(problem_with(pp=1), Budget(evaluations=1900), searcher="mcmc", seed=1).step_time_s
    assert best_s < 1.02 * oracle_s
    assert best.plan.search.found_by == "dqn"
    # The three best by the estimate, measured alone, would have ended more than that behind it.
    assert min(truth(plan) for plan in plans[:3]) > 1.1 * best_s
    assert effort.evaluations == (len(ran) - 1) * (PROPOSED + LEARNT) and effort.look_aheads > 0
    # A plan only runs where it may be the fastest, and none runs twice.
    for number, (proposal, _) in enumerate(ran[1:], start=1):
        assert math.exp(-1.0) * proposal.expected_s < min(measured_s for _, measured_s in ran[:number])
        assert all(decided(proposal.plan) != decided(other.plan) for other, _ in ran[:number])
    # What a pipeline takes is expected of the next one.
    again = [one for one in ran[1:] if is_pipelined(one[0].plan)]
    assert all(proposal.expected_s == pytest.approx(measured_s, rel=0.25) for proposal, measured_s in again)


@pytest.mark.slow
def test_measured_times_are_in_the_replay(problem, plans):
    space = PlanSpace(problem)
    trials = _Trials(problem, plans, seed=0)
    tried = [plans[0], search(problem_with(pp=1), Budget(evaluations=200), seed=0).plan]
    for plan in tried:
        trials.learn(plan, truth(plan))
    trials.look(60.0, lambda: False)
    episodes, scale = trials._episodes, math.exp(trials._episodes.known.corrections.common)
    returns = trials._agent.replay_buffer.draw(50_000).returns.numpy()
    for plan in tried:
        expected = REWARD_SCALE * math.log(episodes.first_bound_s / (truth(plan) / scale))
        assert np.isclose(returns, expected, atol=1e-4).any()
    found = episodes.known.arrays
    known = found.values[: found.num_known[0]]
    # Of the known plans, those that have run now have the prices that were measured.
    for plan in tried:
        at = (known == np.array(space.encode(plan))).all(axis=1).argmax()
        assert found.prices[at, 0] * scale == pytest.approx(truth(plan))


@pytest.mark.slow
def test_a_run_that_fails_is_avoided(problem, plans):
    _, ran = led(problem, plans, lambda plan: None if is_pipelined(plan) else truth(plan), most=3)
    assert ran[0][1] is None
    assert not is_pipelined(ran[-1][0].plan)
    _, ran = led(problem, plans, lambda plan: None, most=2)
    assert len(ran) == 2


@pytest.mark.slow
def test_nothing_runs_that_cannot_be_the_fastest():
    fixed = problem_with(pp=1, tp=1, num_micro_batches=1, recompute="none", zero=0)
    plans = search(fixed, Budget(evaluations=50), searcher="expert", seed=0).unlike(16)
    # A first run that is ten times as fast as the others are found to be ends the trials as soon as that is known.
    times = iter([0.001] + [10.0] * 20)
    assert len(led(fixed, plans, lambda plan: next(times), most=12)[1]) < 6


@pytest.mark.slow
def test_trials_of_a_target_are_plans_of_it():
    training = {"global_batch": 128, "target": "accelerate"}
    problem = Problem.build(zoo.build(MODEL), parse_cluster(CLUSTER), training)
    plans = search(problem, Budget(evaluations=50), searcher="expert").unlike(4)
    trials = _Trials(problem, plans, seed=0)
    trials.learn(plans[0], 2.0 * truth(plans[0]))
    rng, verifier = np.random.default_rng(0), Verifier(problem)
    for space in (trials._incumbent.space, trials._episodes.space):
        for values in space.random_batch(rng, 20):
            assert not verifier.violations(space.decode(values.tolist()), memory=False)


def test_one_run_needs_no_agent(problem, plans):
    effort, ran = led(problem, plans, truth, most=1)
    assert effort == Effort() and len(ran) == 1
    stops = iter([True])
    assert led(problem, plans, truth, should_stop=lambda: next(stops))[1] == ran
