"""Bounds of families of plans against the price of the plans in them."""

import itertools

import numpy as np
import pytest

from automap.bounds.enumeration import Enumeration
from automap.bounds.known_plans import priced_templates
from automap.cost_graph.family_bounds import FamilyBounds
from automap.cost_graph.unlike_stages import Standing, fastest_spread, partitions
from ir import zoo

MOE = "moe:layers=2,hidden=64,heads=4,experts=4,seq_len=32,vocab_size=128"


def family_of(space, bounds, values):
    """The family of a plan, with its ZeRO stage alone."""
    shape = space.shape(values)
    zero = values[space.first.zero]
    is_unlike = any(values[space.first.devices : space.first.shares])
    way = 0 if is_unlike else values[space.first.shares]
    found = [
        family
        for family in bounds.families(space.shapes)
        if shape in family.shapes and zero in family.zeros and (family.way, family.is_unlike) == (way, is_unlike)
    ]
    assert len(found) == 1, "each plan stands in one family"
    return found[0]


def check(space, plans):
    """No plan is faster than the bound of its family, nor than that of the part with its ZeRO stage."""
    bounds, known, closest = FamilyBounds(space), {}, []
    for values, (seconds, over) in zip(plans.tolist(), space.price(plans).tolist(), strict=True):
        if over > 0.0:
            continue
        family = family_of(space, bounds, values)
        for each in (family, *bounds.parts(family)):
            if values[space.first.zero] in each.zeros:
                if each not in known:
                    known[each] = bounds.bound(each, np.inf)
                assert known[each] <= seconds * (1.0 + 1e-9), (each, known[each], seconds)
                closest.append(known[each] / seconds)
    return np.array(closest)


def some_plans(space, seed, count):
    """Random plans, and the templates, which are near the best ones."""
    return np.concatenate([space.random_batch(np.random.default_rng(seed), count), priced_templates(space)[0][::7]])


@pytest.mark.parametrize(
    ("cluster", "training", "fix"),
    [
        ("2x2xV100@10Gbit", {}, {}),
        ("2xV100-16GB+2xP100-16GB", {"trainer": "alpa"}, {"pp": 2, "zero": 0}),
        ("2xV100-16GB+2xP100-16GB", {}, {"pp": 1}),
        ("6xA100", {}, {"tp": 1, "zero": 1}),
        ("4xA100", {}, {"schedule": "zb1p", "pp": 2}),
        ("4xA100", {}, {"schedule": "eager-1f1b", "tp": 1}),
    ],
)
def test_no_plan_of_a_transformer_is_faster(gpt, space, cluster, training, fix):
    s = space(gpt(layers=3), cluster, 12, training=training, **fix)
    assert len(check(s, some_plans(s, 0, 100))) > 50


@pytest.mark.slow
@pytest.mark.parametrize(("model", "cluster", "pp"), [(MOE, "4xA100-80GB", 1), ("resnet50", "2xV100-16GB", 1)])
def test_no_plan_with_experts_or_convolutions_is_faster(space, model, cluster, pp):
    s = space(zoo.build(model), cluster, 16, pp=pp)
    assert len(check(s, some_plans(s, 1, 60)))


def test_no_plan_of_an_enumerable_space_is_faster_and_the_best_is_near(mlp, space):
    s = space(mlp((32, 64, 128)), "2xV100", 2, pp=1, zero=0, recompute="none", num_micro_batches=1)
    plans = np.concatenate(list(Enumeration(s).plans()))
    found = check(s, plans)
    best = plans[s.price(plans)[:, 0].argmin()]
    assert found.max() > 0.98
    bounds = FamilyBounds(s)
    of_families = [bounds.bound(family, np.inf) for family in bounds.families(s.shapes)]
    assert min(of_families) == pytest.approx(s.price(best[None])[0, 0], rel=0.02)


def test_a_bound_is_not_raised_beyond_its_target(gpt, space):
    s = space(gpt(layers=3), "2x2xV100@10Gbit", 12)
    bounds = FamilyBounds(s)
    for family in bounds.families(s.shapes)[:6]:
        sharp = bounds.bound(family, np.inf)
        for share in (0.5, 0.9, 1.5):
            assert bounds.bound(family, share * sharp) <= max(1.0, share) * sharp * (1.0 + 1e-9)


def test_parts_hold_all_sums():
    """Against all tuples of sizes."""
    for total, count, sizes in ((6, 2, (1, 2, 3, 5)), (8, 3, (1, 2, 4, 6)), (4, 4, (1, 2)), (5, 3, (2, 4))):
        expected = {tuple(sorted(some)) for some in itertools.product(sizes, repeat=count) if sum(some) == total}
        found = [tuple(sorted(some)) for some in partitions(total, count, sizes)]
        assert sorted(found) == sorted(expected)


def test_the_fastest_spread_is_that_of_the_corners():
    """One type of units on two ranks: shares in inverse proportion to the seconds, unless a path is longer."""

    def on(busy_s, trip_s):
        return [Standing(busy_s=np.array([busy_s]), trip_s=np.array([[trip_s]]), crossing=0.0)]

    assert fastest_spread([on(3.0, 0.0), on(6.0, 0.0)], 1.0, [0.0]) == pytest.approx(3.0, rel=1e-5)
    assert fastest_spread([on(3.0, 5.0), on(6.0, 5.0)], 1.0, [0.5]) == pytest.approx(5.5, rel=1e-5)
    assert fastest_spread([on(3.0, 0.0)], 1.0, []) == 4.0
