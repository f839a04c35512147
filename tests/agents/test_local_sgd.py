"""Sync modes in a search: the fastest that the user allows leaves, with the plan that it is fastest with."""

import pytest
from small_graphs import build_gpt

from agents import search
from agents.searcher import Budget
from automap.cluster import parse_cluster
from automap.plan import Sync
from automap.price.estimate import price
from automap.problem import Problem
from automap.verify import verify

MODES = ("synchronous", "local_sgd", "dasgd")


def searched(cluster, *modes, batch=64, **hints):
    """The result of a search for a decoder whose parameters take longer to send than its samples to compute."""
    training = {"global_batch": batch, "precision": "fp32", "sync_modes": list(modes), "sync_period": 8}
    problem = Problem.build(build_gpt(hidden=512, vocab=8192), parse_cluster(cluster), training, hints)
    return problem, search(problem, Budget(evaluations=300), searcher="expert", seed=0)


@pytest.mark.slow
def test_on_a_slow_network_each_mode_that_is_allowed_is_faster():
    found = [searched("4x1xV100@10Gbit", *MODES[:count]) for count in (1, 2, 3)]
    steps = [result.plan.estimate.step_time_s for _, result in found]
    assert steps == sorted(steps, reverse=True) and steps[2] < 0.5 * steps[0]
    assert [result.plan.sync.kind for _, result in found] == list(MODES)
    for problem, result in found:
        plans = result.unlike(4)
        assert plans[0] == result.plan and len(plans) > 1
        assert [p.estimate.step_time_s for p in plans] == sorted(p.estimate.step_time_s for p in plans)
        for plan in plans:
            assert not verify(problem, plan)
            assert price(problem, plan) == plan.estimate
            assert plan.search.lower_bound_s < plan.estimate.step_time_s
    assert found[0][1].plan.sync == Sync()
    assert not found[2][1].proven


@pytest.mark.slow
def test_where_nothing_is_reduced_plans_stay_synchronous():
    _, result = searched("1xV100", *MODES)
    assert result.plan.sync == Sync()
    _, result = searched("4x1xV100@10Gbit", *MODES, fix={"tp": 4})
    assert result.plan.sync == Sync()
