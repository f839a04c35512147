"""Corrections of the price by real runs, held against the textbook formulas of Gaussian processes."""

import numpy as np
import pytest
from small_graphs import build_mlp

from automap.bounds.corrections import NOISE, Corrections
from automap.cluster import parse_cluster
from automap.problem import Problem
from automap.space.space import PlanSpace


@pytest.fixture(scope="module")
def space():
    problem = Problem.build(build_mlp((64, 256, 256, 32)), parse_cluster("2x2xV100-16GB"), {"global_batch": 32})
    return PlanSpace(problem)


@pytest.fixture(scope="module")
def plans(space):
    return np.unique(np.array([space.random(np.random.default_rng(seed)) for seed in range(40)]), axis=0)


def distance(space, one, other):
    """Kinds of decisions in which two plans differ: those about the mesh count 1, the others 1/4."""
    total = 0.0
    for kind in {slot.kind for slot in space.slots}:
        slots = [number for number, slot in enumerate(space.slots) if slot.kind == kind]
        share = np.mean([one[number] != other[number] for number in slots])
        total += share * (1.0 if kind in ("pp", "tp", "middle") else 0.25)
    return total


def test_nothing_is_corrected_before_the_first_run(space, plans):
    assert (Corrections(space).factors(plans) == 1.0).all()


def test_a_plan_that_has_run_takes_what_was_measured(space, plans):
    corrections = Corrections(space)
    ratios = (2.0, 0.7, 1.4, 5.0)
    for values, ratio in zip(plans[:4].tolist(), ratios, strict=True):
        corrections.learn(tuple(values), ratio)
    found = corrections.factors(plans[:4]) * np.exp(corrections.common)
    np.testing.assert_allclose(found, ratios)
    assert corrections.least_factor * np.exp(corrections.common) < 0.7


def test_other_plans_take_what_a_gaussian_process_expects(space, plans):
    corrections, tried, others = Corrections(space), plans[:5], plans[5:]
    logs = np.log([2.0, 0.7, 1.4, 5.0, 1.1])
    for values, log in zip(tried.tolist(), logs, strict=True):
        corrections.learn(tuple(values), float(np.exp(log)))

    def covariance(left, right):
        return corrections.spread**2 * np.exp([[-distance(space, a, b) for b in right] for a in left])

    # The mean is one more weight, with a flat prior: minimise the generalised squares over it.
    known = covariance(tried, tried) + NOISE**2 * np.eye(5)
    means = np.linspace(-1.0, 2.0, 30_001)
    residuals = logs[None] - means[:, None]
    costs = np.einsum("ni,ij,nj->n", residuals, np.linalg.inv(known), residuals)
    mean = means[costs.argmin()]
    assert corrections.common == pytest.approx(mean, abs=1e-3)
    cross = covariance(others, tried)
    expected = cross @ np.linalg.solve(known, logs - mean)
    np.testing.assert_allclose(np.log(corrections.factors(others)), expected, atol=2e-3)
    variance = np.diag(covariance(others, others) - cross @ np.linalg.solve(known, cross.T))
    np.testing.assert_allclose(corrections.uncertainty(others), np.sqrt(variance), rtol=1e-6)


def test_plans_near_to_one_that_failed_are_avoided(space, plans):
    corrections = Corrections(space)
    corrections.learn(tuple(plans[0].tolist()), 2.0)
    before = corrections.common
    corrections.learn(tuple(plans[1].tolist()), None)
    assert corrections.common == before, "a failure says nothing about the scale"
    near = np.array(sorted(plans[2:].tolist(), key=lambda plan: distance(space, plan, plans[1])))
    factors = corrections.factors(np.concatenate([plans[1:2], near[:1], near[-1:]]))
    assert factors[0] == pytest.approx(np.e)
    assert factors[0] > factors[1] > factors[2]


def test_a_plan_outside_the_space_tells_what_all_plans_share(space, plans):
    corrections = Corrections(space)
    corrections.learn(None, 3.0)
    corrections.learn(None, 3.0)
    assert corrections.common == pytest.approx(np.log(3.0))
    np.testing.assert_allclose(corrections.factors(plans), 1.0)
    np.testing.assert_allclose(corrections.uncertainty(plans), corrections.spread, rtol=1e-3)
