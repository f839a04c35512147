"""Levels of recomputation: how many units of a rank run again, from one mode to the next."""

import itertools

import numpy as np
import pytest

from agents.planners.recompute_less import recompute_less
from agents.searcher import Budget, search
from automap.bounds.partial_plans import BoundTable, walk
from automap.cluster import parse_cluster
from automap.problem import Problem
from automap.space.limits import Limits
from automap.space.recomputation import Levels
from automap.space.space import PlanSpace
from automap.space.target_limits import plan_space
from automap.space.templates import templates
from automap.verify import Verifier
from envs.pruning import prune
from ir import zoo

BIG = {"layers": 12, "hidden": 1024, "heads": 16, "seq": 1024, "vocab": 50000}


def build(graph, cluster="2xV100-16GB", batch=32, training=(), limits=None, **fix):
    problem = Problem.build(graph, parse_cluster(cluster), {"global_batch": batch, **dict(training)}, {"fix": fix})
    return PlanSpace(problem) if limits is None else PlanSpace(problem, limits=limits)


@pytest.mark.parametrize("units", [1, 2, 3, 5, 12, 16, 40])
@pytest.mark.parametrize("modes", [(1, 1, 1), (1, 0, 1), (0, 1, 1), (0, 0, 1)])
def test_any_number_of_units_up_to_the_steps_may_run_again(units, modes):
    levels = Levels(np.array(modes, dtype=np.bool_), units, mixes=True)
    legal = np.flatnonzero(levels.legal(1)).tolist()
    found = [tuple(levels.mode(level, place, units) for place in range(units)) for level in legal]
    kept = [mode for mode, is_kept in zip(("none", "selective", "full"), modes, strict=True) if is_kept]
    if units <= levels.steps:
        # The first units in the heavier of two neighbouring modes, any number of them.
        wanted = [(kept[0],) * units] + [
            (heavy,) * first + (light,) * (units - first)
            for light, heavy in itertools.pairwise(kept)
            for first in range(1, units + 1)
        ]
        assert found == wanted
    assert len(set(found)) == len(found)
    assert levels.shares().sum(axis=1) == pytest.approx(1.0)


def test_in_longer_chunks_levels_are_steps():
    levels = Levels(np.ones(3, dtype=np.bool_), 96, mixes=True)
    assert levels.legal(1).all()
    counts = [sum(levels.mode(level, place, 96) == "full" for place in range(96)) for level in range(16, 33)]
    assert counts == list(range(0, 97, 6))


@pytest.mark.parametrize(("target", "mixes"), [("megatron-core", False), ("automap", True)])
def test_targets_have_one_mode_for_all_ranks_or_levels(target, mixes):
    graph = zoo.build("gpt:layers=4,hidden=64,heads=4,seq_len=32,vocab_size=96")
    training = {"global_batch": 8, "target": target}
    space = plan_space(Problem.build(graph, parse_cluster("2xV100-16GB"), training))
    assert (space.levels.legal(1).sum() > space.modes.sum()) == mixes
    first = space.first.recompute
    drawn = space.random_batch(np.random.default_rng(0), 24).tolist()
    levels = [row[first : first + space.shape(row).pp] for row in drawn]
    assert any(len({*some}) > 1 for some in levels) == mixes


@pytest.mark.parametrize("fix", [{}, {"pp": 2, "virtual_stages": 2}, {"pp": 2, "schedule": "zb1p"}])
def test_plans_with_levels_cost_the_same_everywhere(gpt, fix):
    """One price by two programs, the memory by a third, and the plan back from its document."""
    space = build(gpt(layers=6, **{k: v for k, v in BIG.items() if k != "layers"}), "4xV100-16GB", 16, **fix)
    rng, mixed = np.random.default_rng(0), 0
    check = Verifier(space.problem)
    rows = space.random_batch(rng, 40)
    prices = space.price(rows)
    for row, price in zip(rows.tolist(), prices.tolist(), strict=True):
        lowered = space.lowered(row)
        outcome = space.evaluator.evaluate(lowered)
        assert (outcome.step_time_s, outcome.overflow) == tuple(price)
        again = {s.recomputed.all() for chunk in lowered.chunks for s in chunk}
        if len(again) == 2:
            mixed += 1
            plan = space.decode(row)
            assert not [v for v in check.violations(plan) if "fit" not in v.what]
            assert space.decode(space.encode(plan)) == plan
    assert mixed > 10


def template_at_every_level(space):
    """A template at all legal levels of its only rank, the lightest first."""
    _, values = next(templates(space))
    legal = np.flatnonzero(space.levels.legal(1)).tolist()
    rows = [[*values[: space.first.recompute], level, *values[space.first.zero :]] for level in legal]
    assert all(space.repair(row) == tuple(row) for row in rows)
    return np.array(rows)


def test_more_recomputation_takes_longer_and_keeps_less(gpt):
    space = build(gpt(**BIG), pp=1, tp=1, num_micro_batches=4, zero=0)
    prices = space.price(template_at_every_level(space))
    assert (np.diff(prices[:, 0]) >= 0.0).all() and prices[-1, 0] > 1.1 * prices[0, 0]
    # What runs again one at a time needs room for one of them, an embedding little and the scores of the loss much.
    assert (np.diff(prices[2:-1, 1]) <= 0.0).all() and prices[-2, 1] < prices[0, 1]


def test_no_completion_beats_the_bound_behind_any_level(gpt):
    """Brute force goes over the levels of three ranks; other decisions are drawn."""
    space = build(gpt(**BIG), "3xV100-16GB", 24, pp=3, tp=1, num_micro_batches=4)
    table, rng = BoundTable(space), np.random.default_rng(1)
    begin, legal = space.first.recompute, np.flatnonzero(space.levels.legal(3)).tolist()
    for values in space.random_batch(rng, 2).tolist():
        rows = []
        for levels in itertools.product(legal, repeat=3):
            rows.append([*values[:begin], *levels, *values[begin + 3 :]])
        prices = space.price(np.array(rows)).reshape(len(legal), len(legal) ** 2, 2).min(axis=1)
        partial = walk(space, table, tuple(values[:begin]))
        assert partial.position == begin
        bounds = partial.bounds()
        assert (bounds <= prices + 1e-9).all()
        # They tell levels apart.
        assert (np.diff(bounds[:, 0]) >= 0.0).all() and bounds[-1, 0] > bounds[0, 0]


def test_where_memory_binds_some_layers_run_again(gpt):
    """The level with the fewest layers that fits is found; one mode for all is slower."""
    space = build(gpt(**BIG), batch=52, pp=1, tp=1, num_micro_batches=2, zero=1, dp=2)
    whole, one = (best_template_s(s) for s in (space, prune(space, ("one_mode_a_rank",))))
    assert whole < 0.95 * one
    plan = search(space.problem, Budget(evaluations=100), seed=0).plan
    assert plan.estimate.step_time_s <= whole * (1 + 1e-9)
    assert 0 < len(plan.stages[0].recompute) < 14


def best_template_s(space):
    prices = space.price(template_at_every_level(space))
    return prices[prices[:, 1] <= 0.0, 0].min()


@pytest.mark.parametrize("fix", [{"pp": 3, "virtual_stages": 1}, {"pp": 3, "virtual_stages": 2}, {"pp": 1}])
def test_no_level_of_a_rank_can_be_lighter(gpt, fix):
    space = build(gpt(**BIG), "3xV100-16GB", 96, tp=1, zero=0, **fix)
    begin, found = space.first.recompute, 0
    for shape, values in templates(space):
        for plan in recompute_less(space, values)[:1]:
            found += 1
            (seconds, overflow), rest = space.price(np.array([plan]))[0], (*plan[:begin], *plan[begin + shape.pp :])
            assert overflow <= 0.0 and rest == (*values[:begin], *values[begin + shape.pp :])
            for rank in range(begin, begin + shape.pp):
                lighter = [
                    level for level in np.flatnonzero(space.levels.legal(shape.num_chunks)) if level < plan[rank]
                ]
                rows = np.array([[*plan[:rank], level, *plan[rank + 1 :]] for level in lighter], dtype=np.int64)
                prices = space.price(rows.reshape(-1, len(plan)))
                # Only the embedding, which keeps nothing that recomputation would spare, may make more than one fit.
                assert (prices[:, 1] > 0.0).all() or (prices[prices[:, 1] <= 0.0, 0] >= seconds * (1 - 1e-12)).all()
    assert found > 3


def test_a_configuration_cannot_say_that_some_layers_run_again(gpt):
    space = build(gpt(layers=4), pp=1, tp=1, dp=2, zero=0, num_micro_batches=2)
    check, units, asked = Verifier(space.problem), space.num_units, set()
    for row in template_at_every_level(space):
        modes = [space.levels.mode(int(row[space.first.recompute]), place, units) for place in range(units)]
        refused = [v.what for v in check.beyond(space.decode(row), "onnx")]
        # The embedding comes first, then four layers.
        is_mixed = len(set(modes[1:5])) > 1
        assert any("one mode for all equal blocks" in what for what in refused) == is_mixed
        asked.add(is_mixed)
    assert asked == {False, True}


def test_limits_leave_one_mode(gpt):
    space = build(gpt(layers=4), limits=Limits(mixes=False))
    assert set(np.flatnonzero(space.levels.legal(1)).tolist()) <= {
        space.levels.of_mode(m) for m in ("none", "full")
    } | {space.levels.of_mode("selective")}
