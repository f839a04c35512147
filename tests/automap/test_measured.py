"""Measured times through price, bounds and search. The profile is made up."""

import numpy as np
import pytest

from automap.cluster import parse_cluster
from automap.errors import ProblemError
from automap.price.estimate import estimate_lowered, lower_bound_s
from automap.price.tables import build_tables
from automap.problem import Problem
from automap.space.space import PlanSpace
from automap.space.templates import templates
from ir.graph import Graph
from ir.profile_import import load_profile

BATCH = 8
TRAINING = {"global_batch": 64, "precision": "fp32"}


def profile(length: int = 4) -> Graph:
    form = "node{} -- {} -- forward_compute_time={}, backward_compute_time={}, activation_size={}, parameter_size={}"
    lines = [form.format(1, "input", 9, 0, 3200, 0)]
    lines += [form.format(i, f"layer_{i}", 2.0, 6.0, 6400, 4000) for i in range(2, length + 2)]
    lines += [f"\tnode{i} -- node{i + 1}" for i in range(1, length + 1)]
    return load_profile("\n".join(lines), name="chain", batch=BATCH)


def build(cluster: str, hints: dict | None = None, graph: Graph | None = None) -> Problem:
    return Problem.build(graph or profile(), parse_cluster(cluster), TRAINING, hints)


def plans(space: PlanSpace, **wanted: int):
    for shape, values in templates(space):
        if all(getattr(shape, name) == value for name, value in wanted.items()):
            yield shape, values


def test_the_tables_hold_both_times():
    kernels = build_tables(build("4xV100-16GB")).arrays.kernels
    assert kernels[1].measured_forward_s == pytest.approx(2e-3 / BATCH)
    assert kernels[1].measured_backward_s == pytest.approx(6e-3 / BATCH)


def test_costs_of_hints_replace_both():
    kernels = build_tables(build("4xV100-16GB", {"costs": {"node3/layer_3": {"forward_s": 1.0}}})).arrays.kernels
    found = [(row.measured_forward_s, row.measured_backward_s) for row in kernels]
    assert [times for times in found if times[0] == 1.0] == [(1.0, 2.0)]


def test_a_cost_of_one_layer_among_equal_ones_counts(mlp, space):
    graph = mlp((64,) * 6)
    hints = {"costs": {"layers.3/MatMul": {"forward_s": 0.5}}}
    problem = Problem.build(graph, parse_cluster("1xA100"), {"global_batch": 1}, hints)
    slow = PlanSpace(problem)
    values = next(v for _, v in plans(slow))
    assert slow.evaluator.evaluate(slow.lowered(values)).step_time_s == pytest.approx(1.5, rel=0.01)


@pytest.mark.parametrize("cost", [{"forward_s": -1.0}, {"flops": float("nan")}, {"bytes": float("inf")}])
def test_impossible_costs_are_refused(cost):
    with pytest.raises(ProblemError, match=r"hints\.costs"):
        build("1xV100-16GB", {"costs": {"**": cost}})


@pytest.mark.parametrize("cluster", ["1xV100-16GB", "1xH100"])
def test_one_device_takes_the_measured_time(cluster):
    """Whatever the device: the time was measured where the user says."""
    space = PlanSpace(build(cluster))
    for _, values in plans(space, num_micro_batches=4):
        estimate = estimate_lowered(space.lowered(values), space.evaluator)
        recomputed = values[space.first.recompute] == space.levels.of_mode("full")
        measured = 64 / BATCH * 4 * (2 + 6 + (2 if recomputed else 0)) * 1e-3
        assert estimate.breakdown_s["compute"] == pytest.approx(measured, rel=1e-6)


def test_ranks_that_split_the_batch_share_the_time():
    space = PlanSpace(build("4xV100-16GB"))
    for dp in (1, 2, 4):
        _, values = next(plans(space, pp=1, dp=dp, num_micro_batches=1))
        estimate = estimate_lowered(space.lowered(values), space.evaluator)
        # An inner axis has nothing to split: its ranks all do the same.
        assert estimate.breakdown_s["compute"] == pytest.approx(64 / BATCH * 4 * 8e-3 / dp, rel=1e-6)


def test_no_plan_beats_the_lower_bound():
    problem = build("4xV100-16GB")
    space = PlanSpace(problem)
    bound = lower_bound_s(problem)
    assert bound == pytest.approx(64 / BATCH * 4 * 8e-3 / 4 + problem.trainer.step_overhead_ms * 1e-3)
    rng = np.random.default_rng(0)
    for _ in range(30):
        values = space.random(rng)
        assert space.evaluator.evaluate(space.lowered(values)).step_time_s >= bound


def test_even_cuts_follow_measured_times():
    """One layer as heavy as the three others: half the work is on either side of it."""
    form = "node{} -- a -- forward_compute_time={}, backward_compute_time=0, activation_size=64, parameter_size=64"
    lines = [form.format(i, t) for i, t in ((1, 3.0), (2, 1.0), (3, 1.0), (4, 1.0))]
    lines += ["node1 -- node2", "node2 -- node3", "node3 -- node4"]
    space = PlanSpace(build("2xV100-16GB", {"fix": {"pp": 2}}, load_profile("\n".join(lines), batch=BATCH)))
    _, values = next(plans(space, virtual=1))
    assert space.cuts(values, 1) == [1]
