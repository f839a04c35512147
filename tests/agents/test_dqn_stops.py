"""A DQN that is told to stop: what it still does is counted, so that no clock of a busy machine decides."""

import time
from itertools import groupby

import pytest
from long_cases import long_but

from agents import Budget, search
from agents.learning.dqn import MaskedDQN
from agents.learning.hyperparameters import Hyperparameters
from agents.learning.plan_vec_env import PlanVecEnv
from automap.bounds.priced_templates import AT_ONCE
from automap.cluster import parse_cluster
from automap.problem import Problem
from automap.space.space import PlanSpace
from ir import zoo


@pytest.fixture(scope="module")
def gpt2():
    return Problem.build(zoo.build("gpt2"), parse_cluster("2x4xV100@25Gbit"), {"global_batch": 64})


@pytest.fixture
def events(monkeypatch):
    """What a search does, in order."""
    happened = []

    def noted(owner, name, event, amount=lambda given: 1):
        done = getattr(owner, name)

        def doing(self, *given, **named):
            happened.extend([event] * amount({**dict(enumerate(given)), **named}))
            return done(self, *given, **named)

        monkeypatch.setattr(owner, name, doing)

    noted(PlanVecEnv, "step_wait", "step")
    noted(MaskedDQN, "train", "update", lambda given: given["gradient_steps"])
    noted(PlanSpace, "price", "price", lambda given: len(given[0]))
    return happened


@pytest.mark.slow
@pytest.mark.parametrize("last_poll", long_but([1, 2, 8], [1, 2, 8, 2000]))
def test_it_asks_often_and_does_little_after_the_last_time(gpt2, events, last_poll):
    known = [search(gpt2, Budget.parse(20), searcher="random", seed=seed).plan for seed in range(6)]
    events.clear()

    def stop():
        events.append("poll")
        return events.count("poll") >= last_poll

    found = search(gpt2, Budget.parse("600s"), searcher="dqn", seed=0, should_stop=stop, start=known)
    assert found.plan.estimate.fits
    between = {
        event: max(sum(e == event for e in run) for is_poll, run in groupby(events, "poll".__eq__) if not is_poll)
        for event in set(events) - {"poll"}
    }
    # Plans come several at a time.
    assert between.get("step", 0) <= len(PlanSpace(gpt2).slots)
    assert between.get("update", 0) <= Hyperparameters().updates_per_step
    at = [number for number, event in enumerate(events) if event == "poll"][last_poll - 1]
    after = events[at + 1 :]
    assert after.count("update") == 0
    assert after.count("step") <= 1
    assert after.count("price") <= AT_ONCE
    if last_poll == 2000:
        assert events.count("update") > 0


@pytest.mark.slow
@pytest.mark.parametrize("last_poll", [1, 100])
def test_it_ends_within_a_second(gpt2, last_poll):
    search(gpt2, Budget.parse(1), searcher="dqn")  # so that nothing is imported below
    asked = []

    def stop():
        asked.append(time.process_time())
        return len(asked) >= last_poll

    search(gpt2, Budget.parse("600s"), searcher="dqn", should_stop=stop)
    # Of the processor's time: others may be using it.
    assert time.process_time() - asked[last_poll - 1] < 1.0
