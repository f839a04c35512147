"""Pruning against full enumeration: lossless rules keep the price of the best plan, all of them leave less."""

import math

import numpy as np
import pytest

from automap.bounds.enumeration import Enumeration
from automap.cluster import parse_cluster
from automap.price.kernels.cost_records import UNIT_COST_DTYPE
from automap.problem import Problem
from automap.space.count import alone, count_decades, grouped
from automap.space.limits import Limits
from automap.space.space import PlanSpace
from envs.dominance import GroupSignatures, costs_no_more
from envs.pruning import (
    LOSSLESS,
    RULES,
    dominated_signatures,
    prune,
    shape_bounds,
    steps,
    symmetry_decades,
)
from ir import zoo


def build(graph, cluster="2x2xV100-16GB@10Gbit", batch=8, reserve=0.0, **fix):
    hints = {"fix": fix, "memory_reserve_bytes": reserve}
    return PlanSpace(Problem.build(graph, parse_cluster(cluster), {"global_batch": batch}, hints))


def optimum(space):
    """Price of the best plan that fits, and the number of plans, by enumeration."""
    best, count = math.inf, 0
    for rows in Enumeration(space).plans():
        found = space.price(rows)
        best = min(best, float(found[found[:, 1] <= 0.0, 0].min(initial=math.inf)))
        count += len(rows)
    return best, count


SPACES = {
    "shapes": lambda mlp: build(mlp((512, 4096)), zero=0, recompute="none"),
    # Twice a prime: all samples at once are too many for the activations.
    "memory": lambda mlp: build(
        mlp((64, 32768)), batch=2 * 10007, reserve=14.5 * (1 << 30), dp=2, zero=0, recompute="none"
    ),
    "cuts": lambda mlp: build(mlp((1024,) * 5), "4xV100", 8, pp=2, dp=2, num_micro_batches=4, zero=0),
}


@pytest.mark.parametrize("rule", [*LOSSLESS, None])
@pytest.mark.parametrize("name", SPACES)
def test_lossless_rules_keep_the_optimum(name, rule, mlp):
    space = SPACES[name](mlp)
    best, count = optimum(space)
    left = prune(space, LOSSLESS if rule is None else (rule,))
    kept, fewer = optimum(left)
    assert math.isfinite(best)
    assert kept == best
    assert fewer <= count
    assert 10**left.decades == pytest.approx(fewer)
    if (name, rule) in (("shapes", "beaten_shapes"), ("memory", "memory")):
        assert fewer < count


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_leaves_plans_of_the_space(rule, gpt, space):
    s = space(gpt(layers=3), "2x2xV100@25Gbit", 16)
    left = prune(s, (rule,))
    assert left.decades <= s.decades + 1e-9
    for row in left.random_batch(np.random.default_rng(0), 20).tolist():
        plan = left.decode(row)
        values = s.encode(plan)
        assert values is not None
        assert s.price(np.array([values])).tolist() == left.price(np.array([row])).tolist()


def test_no_plan_of_a_shape_is_below_its_bounds(gpt, space):
    s = space(gpt(), "2x2xV100@25Gbit", 8)
    bounds = shape_bounds(s)
    plans = s.random_batch(np.random.default_rng(0), 3000)
    prices = s.price(plans)
    number = {s.meshes.values(shape): i for i, shape in enumerate(s.shapes)}
    depth = len(s.meshes.values(s.shapes[0]))
    of = [number[tuple(row[:depth])] for row in plans.tolist()]
    assert (bounds[of] <= prices + 1e-12).all()


def test_cuts_stay_near_an_even_split(mlp):
    s = build(mlp((256,) * 13), "4xV100", 8, pp=4, tp=1)
    left = prune(s, ("balanced_cuts",))
    narrower = 0
    mean = s.cumulative_weight[-1] / 4
    for chunk in range(3):
        low, high = left.constrained.window(chunk, 4)
        first, last = s.constrained.window(chunk, 4)
        narrower += (last - first) - (high - low)
        ends = s.cumulative_weight[low : high + 1]
        assert (np.abs(ends - (chunk + 1) * mean) <= 0.5 * mean + s.evaluator.unit_weights.max()).all()
    assert narrower > 0


def test_one_of_two_signatures_without_a_difference_is_pruned(mlp):
    s = build(mlp((64, 128, 64)), "2xV100", 8, pp=1, num_micro_batches=1)
    assert dominated_signatures(s).signatures.all()
    for number in range(len(s.group_rows)):
        signatures = GroupSignatures(s, number)
        assert signatures.dominates(1, 0, 0)
        outside = signatures.placements_outside()
        assert len(set(outside)) == len(outside)


def test_less_attention_to_hide_a_ring_under_is_no_gain():
    one, other = np.zeros(2, dtype=UNIT_COST_DTYPE)
    one["forward_s"] = other["forward_s"] = 2.0
    one.forward_attended_s = 1.0
    assert not costs_no_more(one, other)
    assert costs_no_more(other, one)


def test_fewer_frozen_parameters_are_no_gain_where_more_are_trained():
    one, other = np.zeros(2, dtype=UNIT_COST_DTYPE)
    one["parameters"], one["frozen"] = 8.0, 8.0
    other["parameters"], other["frozen"] = 6.0, 3.0
    assert not costs_no_more(one, other)
    other["frozen"] = 6.0
    assert costs_no_more(one, other)


def test_what_is_built_into_the_space_is_counted_off(mlp, space):
    """On one axis of two ranks and with even sizes every signature divides."""
    s = space(mlp((64, 64, 64, 64)), "2xA100", 4, pp=1, dp=2, num_micro_batches=1, zero=0, recompute="none")
    legal = [
        len(s.linkage.types[unit.type].signatures[offset])
        for unit in s.linkage.blocks.units
        for offset in range(unit.stop - unit.start)
    ]
    assert 10 ** count_decades(s, signing=alone(s, views=True)) == pytest.approx(math.prod(legal))
    leaders = [len(g.assignment) for unit in s.linkage.blocks.units for g in s.linkage.types[unit.type].groups]
    assert 10 ** count_decades(s, signing=grouped(s, every_unit=True)) == pytest.approx(math.prod(leaders))
    found = steps(s, ())
    assert [step.rule for step in found] == ["parameters_only", "linkage_groups", "repeated_blocks"]
    assert found[-1].after == s.decades


def test_a_rule_that_leaves_nothing_out_leaves_the_space_itself(gpt, space):
    s = space(gpt(), "1x2xA100", 4)
    for rule in RULES:
        left = prune(s, (rule,))
        assert (left is s) == (left.decades == s.decades)
    assert prune(s, ("memory",)) is s


def test_what_a_target_leaves_out_stays_left_out(gpt):
    training = {"global_batch": 8, "trainer": "alpa"}
    problem = Problem.build(gpt(layers=4), parse_cluster("1x4xA100"), training)
    whole, s = PlanSpace(problem), PlanSpace(problem, limits=Limits(cores=False, one_mode=True))
    assert s.modes.sum() < whole.modes.sum()
    left = prune(s, ("balanced_cuts",))
    assert left.decades < s.decades
    assert left.modes.tolist() == s.modes.tolist()
    assert left.limits.one_mode


def test_equal_devices_and_hosts_are_exchangeable(mlp, space):
    one = space(mlp(), "1x8xA100", 8)
    two = space(mlp(), "3x2xA100", 12)
    assert 10 ** symmetry_decades(one) == pytest.approx(math.factorial(8))
    assert 10 ** symmetry_decades(two) == pytest.approx(math.factorial(3) * 2**3)


@pytest.mark.slow
def test_searchers_walk_a_pruned_space(space):
    s = prune(
        space(zoo.build("gpt:layers=4,hidden=64,heads=4,seq_len=32,vocab_size=128"), "2x4xA100", 16), tuple(RULES)
    )
    for row in s.random_batch(np.random.default_rng(0), 50).tolist():
        assert s.repair(row) == tuple(row)
