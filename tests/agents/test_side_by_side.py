"""Plans of unlike degrees beside the plan of a search: against all plans sorted by hand."""

import numpy as np
import pytest

from agents import Budget, search_offer
from agents.results.side_by_side import fastest_of_each, key_of, of_unlike_degrees
from automap.cluster import parse_cluster
from automap.price.degrees import degrees_of
from automap.problem import Problem
from automap.space.space import PlanSpace
from automap.space.templates import templates
from automap.verify import verify
from ir import zoo

GPT = "gpt:layers=4,hidden=256,heads=4,vocab_size=512,seq_len=128"


@pytest.fixture(scope="module")
def space():
    return PlanSpace(Problem.build(zoo.build(GPT), parse_cluster("2x4xV100-16GB@25Gbit"), {"global_batch": 32}))


def step_s(plan):
    return plan.estimate.step_time_s


def by_hand(space, rows):
    """Step time of the fastest plan of each key that fits, and the rows that fit, the fastest first."""
    prices = space.price(rows)
    fit = [(float(time), tuple(row)) for (time, more), row in zip(prices, rows.tolist(), strict=True) if more <= 0.0]
    best = {}
    for time, row in sorted(fit):
        best.setdefault(key_of(degrees_of(space.lowered(row), space.evaluator)), time)
    return best, [row for _, row in sorted(fit)]


def test_the_fastest_known_plan_of_each_degrees_is_shown(space):
    best, known = by_hand(space, space.random_batch(np.random.default_rng(0), 150))
    assert len(best) > 5
    shown = of_unlike_degrees(space, known, 5)
    # Written plainly, with axes merged, a plan takes as long.
    np.testing.assert_allclose([step_s(plan) for plan in shown], sorted(best.values())[:5], rtol=1e-6)
    assert len({key_of(plan.degrees) for plan in shown}) == 5


def test_templates_fill_up_what_a_search_has_not_found(space):
    best, _ = by_hand(space, np.array([values for _, values in templates(space)]))
    shown = of_unlike_degrees(space, [], 6)
    np.testing.assert_allclose([step_s(plan) for plan in shown], sorted(best.values())[:6], rtol=1e-6)
    # They are shown without a check, which they would pass.
    assert all(not verify(space.problem, plan) for plan in shown)


def test_plans_that_are_shown_obey_the_hints():
    """Without the constraint, ranks that repeat all work would be left out, and with them the axis that splits."""
    cluster, hints = parse_cluster("4xV100-16GB"), {"constraints": [{"scope": "features.0/Conv", "split": True}]}
    model = "vgg:convolutions=1-1,width=8,ffn=64,image_size=32"
    constrained = PlanSpace(Problem.build(zoo.build(model), cluster, {"global_batch": 8}, hints))
    rows = constrained.random_batch(np.random.default_rng(0), 200)
    shown = of_unlike_degrees(constrained, by_hand(constrained, rows)[1], 20)
    assert len(shown) > 5
    assert not [wrong for plan in shown for wrong in verify(constrained.problem, plan)]


def test_of_equal_degrees_the_fastest_is_kept(space):
    shown = of_unlike_degrees(space, [], 4)
    assert fastest_of_each((*reversed(shown), *shown), 3) == shown[:3]


def test_a_search_shows_none_with_the_degrees_of_its_plan(space):
    result = search_offer(space.problem, Budget.parse(60), searchers=("mcmc",))
    others = result.others(4)
    assert len({key_of(plan.degrees) for plan in (result.plan, *others)}) == 5
    assert list(others) == sorted(others, key=step_s)
    assert result.step_time_s <= step_s(others[0]) * 1.05
