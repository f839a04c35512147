"""The best plans that are unlike each other: against all plans sorted by hand."""

import json
from dataclasses import replace

import numpy as np

from agents import Budget, search, search_in_turn
from agents.results import diverse_top_k
from agents.results.diverse_top_k import Candidate, DiverseTopK, unlike
from automap.cluster import parse_cluster
from automap.problem import Problem
from automap.space.space import PlanSpace


def problem(graph):
    return Problem.build(graph, parse_cluster("2x2xV100@25Gbit"), {"global_batch": 8})


def by_hand(space, plans, count):
    """(step time, values) of the fastest of `plans`, sorted, at most one of a shape and two of a mesh."""
    found = []
    for step_time_s, values in sorted(plans):
        shape = space.shape(values)
        mesh = (shape.pp, shape.dp, shape.middle, shape.tp)
        others = [space.shape(other) for _, other in found]
        alike = sum((o.pp, o.dp, o.middle, o.tp) == mesh for o in others)
        if shape not in others and alike < 2 and len(found) < count:
            found.append((step_time_s, values))
    return found


def test_the_plans_kept_are_those_that_sorting_all_plans_gives(gpt, monkeypatch):
    space = PlanSpace(problem(gpt()))
    monkeypatch.setattr(diverse_top_k, "_WAITING", 50)  # several looks, and most plans dropped
    monkeypatch.setattr(diverse_top_k, "MOST", 5)
    mine, plans = DiverseTopK(space), []
    rng = np.random.default_rng(3)
    for number in range(12):
        values = space.random_batch(rng, 30)
        times = rng.permutation(30) / 30 + rng.random()
        mine.add(values, times, str(number))
        plans += [(time, tuple(row)) for time, row in zip(times.tolist(), values.tolist(), strict=True)]
    expected = [values for _, values in by_hand(space, plans, 5)]
    assert len(expected) == 5
    assert [values for values, _ in mine.best(9, expected[0])] == expected


def test_the_first_of_equal_plans_counts():
    plans = [Candidate(1.0, "a", number, number) for number in range(4)] + [Candidate(0.5, "b", 9, 9)]
    assert [found.item for found in unlike(plans, 9)] == [9, 0, 1]
    assert unlike(plans, 0) == []


def documents(plans):
    return [json.dumps(replace(plan, search=replace(plan.search, seconds=None)).to_json()) for plan in plans]


def test_a_search_hands_over_unlike_plans_the_best_first(gpt):
    p = problem(gpt())
    result, again = (search(p, Budget.parse(300), searcher="mcmc", seed=1) for _ in range(2))
    plans = result.unlike(4)
    assert plans[0] == result.plan
    assert documents(plans) == documents(again.unlike(4))
    times = [plan.estimate.step_time_s for plan in plans]
    assert times == sorted(times)
    shapes = [(len(plan.stages), plan.stages[0].mesh, plan.num_micro_batches) for plan in plans]
    assert len(set(shapes)) == len(plans) == 4
    assert all(plan.estimate.fits and plan.search.num_decisions for plan in plans)
    assert result.unlike(2) == plans[:2]


def test_several_searchers_give_the_best_of_all(gpt):
    p = problem(gpt())
    result = search_in_turn(p, Budget.parse(120), searchers=["random", "mcmc"], seed=1)
    alone = [search(p, Budget.parse(60), searcher=name, seed=1) for name in ("random", "mcmc")]
    plans = result.unlike(3)
    assert plans[0] == result.plan
    assert all(plan.search.searchers == result.plan.search.searchers for plan in plans)
    offered = [plan.estimate for one in alone for plan in one.unlike(3)]
    assert all(plan.estimate in offered for plan in plans)
    assert plans[1].estimate.step_time_s <= sorted(e.step_time_s for e in offered)[2]
