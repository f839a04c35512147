"""Certificates of searches."""

from dataclasses import replace

import numpy as np
import pytest

from agents import Budget, search_offer
from agents.portfolio.certificate import certified_s, certify
from automap.bounds.enumeration import Enumeration
from automap.bounds.partial_plans import BoundTable
from automap.cluster import parse_cluster
from automap.price.estimate import lower_bound_s
from automap.problem import Problem
from automap.space.target_limits import plan_space
from ir import zoo
from service.report import bound

MODEL = "gpt:layers=2,hidden=64,heads=4,seq_len=32,vocab_size=128"


def problem(**training):
    fix = {"fix": {"pp": 1, "recompute": "none"}}
    return Problem.build(zoo.build(MODEL), parse_cluster("2xA100-80GB"), {"global_batch": 4, **training}, fix)


def never():
    return False


def test_no_plan_is_below_a_certificate_which_is_sharper_than_the_bound_of_the_shapes(mlp, space):
    s = space(mlp((32, 64, 128)), "2xV100", 4, recompute="none")
    plans = np.concatenate(list(Enumeration(s).plans()))
    best_s = s.price(plans)[:, 0].min()
    found = certified_s(s, best_s, never)
    assert BoundTable(s).first.time_s < found <= best_s
    assert found > 0.9 * best_s
    # A plan that is not the best gets a bound that holds as well.
    assert certified_s(s, 2.0 * best_s, never) <= best_s * (1.0 + 1e-9)


def test_a_certificate_without_time_is_the_bound_of_the_shapes():
    s = plan_space(problem())
    known_s = max(BoundTable(s).first.time_s, lower_bound_s(s.problem))
    assert certified_s(s, 1.0, lambda: True) == pytest.approx(known_s)


def test_a_plan_says_what_is_proven():
    given = problem()
    plan = search_offer(given, Budget(evaluations=200)).plan
    certified = certify(given, plan, 5.0)
    assert plan.search.lower_bound_s <= certified.search.lower_bound_s <= plan.estimate.step_time_s
    assert replace(certified, search=plan.search) == plan
    if not certified.search.proven:
        assert "% faster: none takes less than" in bound(certified)


def test_other_modes_than_synchronous_are_not_certified():
    given = problem(sync_modes=["synchronous", "local_sgd"])
    plan = search_offer(given, Budget(evaluations=50)).plan
    assert certify(given, plan, 5.0) == plan


def test_parts_on_which_the_hints_leave_no_plan_are_left_out():
    """One device cannot split what must be split; without time, parts are not looked at before they are bounded."""
    hints = {"constraints": [{"scope": "h.0.mlp.*", "split": True}]}
    given = Problem.build(zoo.build(MODEL), parse_cluster("2xA100-80GB"), {"global_batch": 4}, hints)
    plan = search_offer(given, Budget(evaluations=200)).plan
    assert certify(given, plan, 0.0).search.lower_bound_s <= plan.estimate.step_time_s
