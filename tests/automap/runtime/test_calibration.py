"""Trials tell computing and communicating apart, and a calibrated cluster is priced accordingly."""

from dataclasses import replace

import numpy as np
import pytest
from made_up_host import two_ranks
from small_graphs import build_gpt

from automap.price.estimate import estimate_lowered
from automap.price.evaluator import Evaluator
from automap.problem import Problem
from automap.runtime.profiler import measure_host as profiler
from automap.runtime.trial.calibration import calibrate, calibrated, communication_s
from automap.space.stated_strategy import Strategy, hand_made

PLANS = [
    Strategy(micro_batch=4),
    Strategy(micro_batch=2, zero=3),
    Strategy(tp=2, micro_batch=8),
    Strategy(tp=2, micro_batch=2, sequence_parallel=True),
    Strategy(micro_batch=2, recompute="full"),
]


@pytest.fixture(scope="module")
def cluster():
    return profiler.build_cluster("cpu", two_ranks(), profiler.step_plans("cpu"))


@pytest.fixture(scope="module")
def priced(cluster):
    """Estimates of `PLANS` on a cluster."""
    graph = build_gpt(layers=2, hidden=64, seq=32, vocab=128)

    def price(cluster=cluster):
        problem = Problem.build(graph, cluster, {"global_batch": 8, "precision": "fp32", "trainer": "automap"})
        evaluator = Evaluator(problem)
        return [estimate_lowered(hand_made(evaluator, plan), evaluator) for plan in PLANS]

    return price


def parts(estimate):
    """Seconds of everything but communication, and of that."""
    shown = communication_s(estimate)
    return np.array([estimate.step_time_s - shown, shown])


def test_two_factors_are_found_and_explain_the_other_plans(cluster, priced):
    before = priced()
    true = [1.3 * compute + 2.5 * communication for compute, communication in map(parts, before)]
    few, many = (calibrate([(before[i], true[i]) for i in (0, 1, 2)] * times) for times in (1, 30))
    assert (many.compute, many.communication) == (pytest.approx(1.3, rel=0.05), pytest.approx(2.5, rel=0.2))
    # Where trials differ by less than noise would, that both are alike is given credit.
    assert many.compute < few.compute < few.communication < many.communication
    for found, error in ((few, 0.1), (many, 0.05)):
        for estimate, seconds in zip(priced(calibrated(cluster, found)), true, strict=True):
            assert estimate.step_time_s == pytest.approx(seconds, rel=error)


def test_a_calibrated_cluster_prices_each_part_so_many_times(cluster, priced):
    before = priced()
    found = replace(calibrate([(before[0], before[0].step_time_s)]), compute=1.5, communication=0.5)
    for old, new in zip(before, priced(calibrated(cluster, found)), strict=True):
        np.testing.assert_allclose(parts(new), parts(old) * [1.5, 0.5], rtol=1e-9)


def test_alike_trials_share_one_factor(priced):
    estimate = priced()[2]
    found = calibrate([(estimate, 2.0 * estimate.step_time_s)] * 3)
    assert (found.factor, found.spread) == (pytest.approx(2.0), 1.0)
    assert (found.compute, found.communication) == (pytest.approx(2.0), pytest.approx(2.0))
    assert calibrate([]) is None
