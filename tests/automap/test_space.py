"""The space against brute force: counts, legality, bounds."""

import itertools
import math

import numpy as np
import pytest
from all_plans import every_plan

from automap.bounds.partial_plans import BoundTable, PartialPlan, PartialPlans, walk
from automap.cluster import parse_cluster
from automap.errors import ProblemError
from automap.problem import Problem
from automap.space.shape import divisors
from automap.space.space import PlanSpace
from automap.space.templates import templates


def small(mlp, space):
    return space(mlp((16, 32, 16)), "2xA100", 4, num_micro_batches=2)


def test_divisors_are_all_numbers_that_divide():
    for n in (1, 2, 12, 97, 360):
        assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


def test_size_is_the_number_of_plans(mlp, space):
    s = small(mlp, space)
    plans = list(every_plan(s))
    assert len(plans) == len(set(plans))
    assert 10**s.decades == pytest.approx(len(plans))


def test_every_factorisation_and_divisor_is_there(gpt, space):
    s = space(gpt(layers=8), "2x4xA100", 16)
    shapes = {(x.dp, x.tp, x.pp) for x in s.shapes}
    expected = {(d, t, p) for d in divisors(8) for t in divisors(8) for p in divisors(8) if d * t * p == 8}
    assert shapes == expected
    for dp, tp, pp in expected:
        counts = {x.num_micro_batches for x in s.shapes if (x.dp, x.tp, x.pp) == (dp, tp, pp)}
        assert counts == {m for m in divisors(16) if (16 // m) % dp == 0}


def test_more_stages_than_units_are_refused_by_their_name(mlp, space):
    with pytest.raises(ProblemError, match="can be cut into 3 stages at most") as caught:
        space(mlp((16, 32, 16)), "4xA100", 4, pp=4)
    assert (caught.value.field, caught.value.value) == ("hints.fix.pp", "4")


def test_unlike_units_may_have_any_small_number_of_virtual_stages(mlp, space):
    """Eleven unlike layers and the loss on two ranks: six units each, which four chunks do not divide."""
    s = space(mlp(tuple(range(16, 200, 16))), "2xA100", 4, pp=2, num_micro_batches=4)
    assert s.num_units == 12
    assert {shape.virtual for shape in s.shapes} == {1, 2, 3, 4, 6}


def test_every_cut_is_there(mlp, space):
    s = space(mlp((16,) * 7), "2xA100", 2, pp=2, num_micro_batches=1, recompute="none")
    shape = next(x for x in s.shapes if x.virtual == 1)
    placed = (0,) * (s.first.cut - s.first.schedule)
    ends = {s.cuts((*s.meshes.values(shape), *placed, k), 1)[0] for k in range(s.num_units - 1)}
    assert ends == set(range(1, s.num_units))


def test_no_completion_beats_its_bound(mlp, space):
    """Every bound of every prefix of every plan, by brute force."""
    s = small(mlp, space)
    table = BoundTable(s)
    prices = {}
    for values in every_plan(s):
        prices[values] = s.evaluator.evaluate(s.lowered(values))
    checked = 0
    for values, outcome in prices.items():
        prefix = PartialPlan(s, table)
        while True:
            assert prefix.bound.time_s <= outcome.step_time_s * (1 + 1e-12)
            assert prefix.bound.overflow <= outcome.overflow + 1e-12
            checked += 1
            if prefix.done:
                break
            prefix.decide(values[prefix.position])
    assert checked > len(prices) > 100


@pytest.mark.parametrize("name", ["squeezenet", "shufflenet", "inception_v1"])
def test_bounds_hold_on_real_models(light_graph, space, name):
    s = space(light_graph(name), "2x2xV100@25Gbit", 8)
    check_bounds(s, 25)


def test_bounds_hold_on_a_transformer(gpt, space):
    check_bounds(space(gpt(), "2x4xA100", 16), 40)


@pytest.mark.parametrize("kind", ["gpipe", "zb1p", "zb2p"])
def test_bounds_hold_under_every_schedule(gpt, space, kind):
    check_bounds(space(gpt(layers=4), "2x4xA100", 16, schedule=kind), 15)


@pytest.mark.parametrize("backward_s", [1e-5, 1e-3])
def test_bounds_hold_where_split_passes_were_measured(gpt, backward_s):
    """Faster and slower than modelled: the halves of a measured pass, or the parts of the modelled one."""
    blocks = [
        {"scope": "h.*", "tp": tp, "samples": n, "forward_s": backward_s / 2, "backward_s": backward_s}
        for tp in (1, 2)
        for n in (1, 2)
    ]
    hints = {"fix": {"schedule": "zb2p", "pp": 2}, "measured_blocks": blocks}
    problem = Problem.build(gpt(layers=4), parse_cluster("8xA100"), {"global_batch": 16}, hints)
    check_bounds(PlanSpace(problem), 15)


@pytest.mark.parametrize("kind", ["explicit", "dualpipe"])
def test_schedules_that_cannot_be_fixed_are_refused(mlp, space, kind):
    with pytest.raises(ProblemError, match=r"unknown value .*Use one of gpipe") as caught:
        space(mlp(), "4xA100", 8, schedule=kind)
    assert caught.value.field == "hints.fix.schedule"


def check_bounds(s, count):
    table, rng = BoundTable(s), np.random.default_rng(7)
    for _ in range(count):
        values = s.random(rng)
        outcome = s.evaluator.evaluate(s.lowered(values))
        prefix = PartialPlan(s, table)
        previous = 0.0
        while not prefix.done:
            assert previous <= prefix.bound.time_s <= outcome.step_time_s * (1 + 1e-12)
            assert prefix.bound.overflow <= outcome.overflow + 1e-12
            previous = prefix.bound.time_s
            prefix.decide(values[prefix.position])
        assert (prefix.bound.time_s, prefix.bound.overflow) == (outcome.step_time_s, outcome.overflow)


def test_decisions_that_are_not_asked_take_the_preferred_values(gpt, space):
    s = space(gpt(), "2x2xA100", 8)
    table, rng = BoundTable(s), np.random.default_rng(0)
    for _ in range(5):
        values = s.random(rng)
        unasked = PartialPlans(table, 3, asks=lambda slot: False, preferred=np.array(values))
        assert unasked.done.all()
        assert unasked.episodes.values.tolist() == [list(values)] * 3
        assert set(unasked.episodes.bound[:, 0].tolist()) == {walk(s, table, values).bound.time_s}


def test_fixed_decisions_and_constraints_are_obeyed(gpt, space):
    from automap.cluster import parse_cluster
    from automap.problem import Problem
    from automap.space.space import PlanSpace

    hints = {
        "fix": {"dp": 2, "pp": 1, "zero": 2, "recompute": "full"},
        "constraints": [{"scope": "h.*.mlp.**", "replicate": True}],
    }
    s = PlanSpace(Problem.build(gpt(), parse_cluster("2x2xA100"), {"global_batch": 8}, hints))
    rng = np.random.default_rng(0)
    for _ in range(20):
        plan = s.decode(s.random(rng))
        (stage,) = plan.stages
        assert dict(stage.mesh)["dp"] == 2
        assert stage.zero.stage == 2
        assert stage.recompute == ("**",)
        for name, axes in stage.shardings.items():
            if name.startswith("h.*.mlp.up/MatMul"):
                for sharding in axes.values():
                    assert sharding.inputs[1] == "B"


def test_repair_keeps_what_is_legal(gpt, space):
    s = space(gpt(), "2x2xA100", 8)
    values = s.random(np.random.default_rng(0))
    assert s.repair(values) == values


def test_many_plans_are_repaired_as_each_alone(gpt, space):
    s = space(gpt(layers=2), "4xA100", 8)
    plans = s.random_batch(np.random.default_rng(0), 20)
    plans[:, s.first.signature :] = plans[::-1, s.first.signature :]
    repaired = s.repair_many(plans, s.first.signature)
    assert (repaired != plans).any()
    assert repaired.tolist() == [list(s.repair(row)) for row in plans.tolist()]


@pytest.mark.parametrize("fixed", [{}, {"cp": 2}, {"pp": 2}])
def test_what_is_legal_on_an_axis_is_legal_slot_by_slot(gpt, space, fixed):
    s = space(gpt(layers=4, heads=4), "2x6xA100", 12, **fixed)
    rng, first, num_axes, unlike = np.random.default_rng(0), s.first.signature, len(s.axes), set()
    for values in (s.random(rng) for _ in range(20)):
        for axis in range(num_axes):
            found = s.legal_on_axis(np.array(values), axis)
            for group, row in enumerate(found):
                legal = s.legal(values[: first + group * num_axes + axis])
                assert row[: len(legal)].tolist() == legal.tolist() and not row[len(legal) :].any()
            unlike.add(found.tobytes())
    assert len(unlike) > num_axes


@pytest.mark.parametrize("fixed", [{}, {"recompute": "full"}])
def test_levels_that_are_legal_on_a_rank_are_legal_slot_by_slot(gpt, space, fixed):
    s = space(gpt(layers=6), "4xA100", 8, pp=4, **fixed)
    rng, first = np.random.default_rng(0), s.first.recompute
    for values in (s.random(rng) for _ in range(20)):
        found = s.legal_on_ranks(values)
        assert found.any(axis=1).all()
        for rank, row in enumerate(found):
            assert row.tolist() == s.legal(values[: first + rank]).tolist()


def test_a_prime_batch_is_spread_as_evenly_as_it_goes(mlp, space):
    assert {shape.dp for shape in space(mlp(), "4xA100", 7).shapes} == {1, 2, 4}
    assert {shape.dp for shape in space(mlp(), "4xA100", 3).shapes} == {1, 2}
    assert space(mlp(), "4xA100", 7, dp=1).shapes
    assert math.isfinite(space(mlp(), "4xA100", 1).decades)


@pytest.mark.parametrize(
    ("cluster", "batch", "fix"),
    [
        ("2x4xA100", 16, {}),
        ("4xV100-16GB+4xP100", 8, {}),
        ("8xA100", 16, {"virtual_stages": 2}),
        ("8xA100", 16, {"schedule": "gpipe", "pp": 4}),
        ("8xA100", 16, {"schedule": "zb1p"}),
        ("8xA100", 16, {"schedule": "zb2p", "pp": 4}),
    ],
)
@pytest.mark.parametrize("name", ["gpt", "squeezenet"])
def test_many_plans_at_once_cost_what_each_costs_alone(gpt, light_graph, space, name, cluster, batch, fix):
    graph = gpt(layers=4) if name == "gpt" else light_graph(name)
    s = space(graph, cluster, batch, **fix)
    rng = np.random.default_rng(0)
    plans = [s.random(rng) for _ in range(40)]
    plans += [values for _, values in itertools.islice(templates(s), 40)]
    alone = [s.evaluator.evaluate(s.lowered(values)) for values in plans]
    assert s.price(np.array(plans)).tolist() == [[o.step_time_s, o.overflow] for o in alone]


@pytest.mark.parametrize("cluster", ["2x4xA100", "4xV100-16GB+4xP100"])
def test_many_prefixes_at_once_have_bounds_that_no_plan_beats(gpt, space, cluster):
    s = space(gpt(layers=3), cluster, 16)
    values = s.random_batch(np.random.default_rng(0), 50)
    prices = s.price(values)
    decided = values.copy()
    for end in range(len(s.slots), s.first.signature - 1, -1):
        decided[:, end:] = -1
        bounds = s.bound(decided)
        assert (bounds <= prices + 1e-12).all()
    table = BoundTable(s)
    for row, (seconds, over) in zip(values, bounds.tolist(), strict=True):
        prefix = walk(s, table, row[: s.first.signature])
        assert prefix.bound.time_s >= seconds and prefix.bound.overflow >= over
