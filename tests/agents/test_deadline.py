"""Budgets in seconds: what the end of a search takes is kept, and phases of a search end when the time is over."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from small_graphs import build_gpt

from agents.incumbent import Incumbent
from agents.planners.promising_templates import like_the_best
from agents.portfolio.deadline import MOST, PLANS_AT_END, SLACK_S, Deadline
from agents.portfolio.offer import search_offer
from agents.results.infeasibility_advice import fastest_template_s
from agents.results.plainest import plainest
from agents.sampling.expert import grid_of, price_grid
from agents.searcher import Budget
from automap.bounds.priced_templates import AT_ONCE, priced_so_far
from automap.price.estimate import lower_bound_s
from automap.problem import Problem
from automap.space.space import PlanSpace
from automap.verify import Verifier
from ir import zoo


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_the_end_takes_is_kept_from_the_first_search_and_from_parts():
    clock = Clock()
    deadline = Deadline(Budget(seconds=10.0), clock)
    clock.now += 1.0
    deadline.end_s = 0.5
    assert deadline.spent_s == pytest.approx(1.0)
    assert deadline.kept_s(3) == pytest.approx(1.0 + 1.5 - SLACK_S)
    assert deadline.shortened(Budget(seconds=2.0), 2) == Budget(seconds=2.0)
    clock.now += 7.0
    assert deadline.shortened(Budget(seconds=2.0), 2) == Budget(seconds=pytest.approx(2.0 - 1.0 + SLACK_S))
    clock.now += 1.5
    assert deadline.shortened(Budget(seconds=2.0), 2) is None


def test_ends_that_are_short_keep_nothing_and_long_ones_half_of_what_is_left():
    clock = Clock()
    deadline = Deadline(Budget(seconds=10.0), clock)
    clock.now += 2.0
    deadline.end_s = SLACK_S / 2
    assert deadline.kept_s(2) == pytest.approx(2.0)
    deadline.end_s = 100.0
    assert deadline.kept_s(1) == pytest.approx(2.0 + MOST * 8.0)


def test_a_share_of_the_seconds_passes_and_of_evaluations_none_does():
    clock = Clock()
    timed, counted = (Deadline(budget, clock) for budget in (Budget(seconds=10.0), Budget(evaluations=10)))
    clock.now += 2.5
    assert timed.passed(0.2) and not timed.passed(0.3)
    assert not counted.passed(0.0)
    counted.end_s = 9.0
    assert counted.kept_s(5) == pytest.approx(2.5)
    assert counted.shortened(Budget(evaluations=7), 3) == Budget(evaluations=7)


def test_the_end_is_measured_with_one_plan_and_only_for_seconds():
    space = PlanSpace(Problem.build(build_gpt(), "2xA100-80GB", {"global_batch": 8}))
    priced_so_far(space)
    ticks = itertools.count()
    timed = Deadline(Budget(seconds=10.0), lambda: float(next(ticks)))
    timed.measure(space)
    assert timed.end_s == PLANS_AT_END  # the clock was read before and after
    counted = Deadline(Budget(evaluations=10), lambda: float(next(ticks)))
    counted.measure(space)
    assert counted.end_s == 0.0


def many_templates() -> PlanSpace:
    """A space with more templates than are priced at once, of which some of the first fit."""
    return PlanSpace(Problem.build(zoo.build("gpt2"), "2x8xA100-80GB", {"global_batch": 64}))


def test_when_the_time_is_over_no_further_templates_are_priced():
    space, clock = many_templates(), Clock()
    incumbent = Incumbent(space, Budget(seconds=1.0), searcher="expert", clock=clock, began=clock.now - 2.0)
    grid = price_grid(incumbent)
    assert len(grid.values) == AT_ONCE < len(grid_of(many_templates()).values)
    assert incumbent.best is not None
    assert incumbent.baselines["expert"] == incumbent.best_s == grid.prices[grid.prices[:, 1] <= 0.0, 0].min()
    assert incumbent.result(seed=0).step_time_s == incumbent.best_s


def test_a_reference_that_is_stopped_is_the_best_template_until_then():
    space = many_templates()
    found = fastest_template_s(space.problem, space, lambda: True)
    values, prices = priced_so_far(space)
    assert len(values) == AT_ONCE
    assert found == prices[prices[:, 1] <= 0.0, 0].min()
    whole = fastest_template_s(space.problem, space)
    assert whole is not None and found is not None and whole <= found


def test_plans_like_the_best_that_are_stopped_are_some_of_all():
    space = many_templates()
    grid = grid_of(space)
    donors = grid.values[np.argsort(grid.prices[:, 0])[:8]]
    whole = like_the_best(space, grid, donors)
    for looks in (1, 2, 3):
        left = itertools.chain([False] * (looks - 1), itertools.repeat(True))
        some = like_the_best(space, grid, donors, lambda left=left: next(left))
        assert 0 < len(some.values) <= len(whole.values)
        np.testing.assert_array_equal(some.prices, space.price(some.values))


def test_a_bound_that_nobody_has_computed_is_left_out_when_the_time_is_over():
    problem = Problem.build(zoo.build("gpt2"), "2x8xV100-16GB@10Gbit", {"global_batch": 64})
    clock = Clock()
    late = Incumbent(PlanSpace(problem), Budget(seconds=1.0), searcher="expert", clock=clock, began=clock.now - 2.0)
    early = Incumbent(PlanSpace(problem), Budget(seconds=1.0), searcher="expert", clock=clock)
    bounds = []
    for incumbent in (late, early):
        price_grid(incumbent)
        bounds.append(incumbent.result(seed=0).record.lower_bound_s)
    assert "table" not in vars(late) and "table" in vars(early)
    assert bounds == [lower_bound_s(problem), max(lower_bound_s(problem), early.table.first.time_s)]
    assert bounds[0] < bounds[1]


def test_a_part_that_had_no_time_for_its_bound_keeps_the_one_that_is_known(monkeypatch):
    problem = Problem.build(zoo.build("vgg19"), "2x8xV100-16GB@10Gbit", {"global_batch": 64})
    whole = search_offer(problem, Budget(evaluations=40)).record

    def without_time(self: Incumbent) -> float:
        return self.table.first.time_s if self.space.problem.cluster.num_devices == 16 else 0.0

    monkeypatch.setattr(Incumbent, "_table_bound_s", property(without_time))
    late = search_offer(problem, Budget(evaluations=40)).record
    assert late.lower_bound_s == whole.lower_bound_s
    assert not late.proven


def test_the_fastest_plan_is_written_once_where_it_is_the_plainest(monkeypatch):
    space = PlanSpace(Problem.build(zoo.build("resnet50"), "1x8xV100-16GB", {"global_batch": 256}))
    incumbent = Incumbent(space, Budget(evaluations=10), searcher="expert")
    price_grid(incumbent)
    result = incumbent.result(seed=0)
    assert result.plainest is not None
    whole = plainest(space, (incumbent.best, "expert"), [], 0.0, Verifier(space.problem))
    assert whole.plan == replace(result.plan, search=None)
    monkeypatch.setattr(Verifier, "violations", lambda self, plan: pytest.fail("verified again"))
    offer = result.plainest(0.0)
    assert offer.plan == whole.plan and offer.plainness == whole.plainness
