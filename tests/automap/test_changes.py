"""The changes between two plans: they add up, and each is priced as the plan with that one change."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from automap.cluster import parse_cluster
from automap.errors import PlanError
from automap.price.evaluator import Evaluator
from automap.price.lowered_plan import LoweredPlan
from automap.price.plan_reader import lower_plan
from automap.price.plan_writer import to_plan
from automap.problem import Problem
from automap.space.changes import beyond_degrees, changes, nearest, shortage
from automap.space.space import PlanSpace
from automap.space.stated_strategy import Strategy, hand_made
from ir import zoo

GPT = "gpt:layers=8,hidden=256,heads=4,seq_len=128,vocab_size=1024"
STRATEGIES = [
    Strategy(tp=4, micro_batch=2, recompute="full"),
    Strategy(pp=2, virtual=2, zero=1, micro_batch=4),
    Strategy(tp=2, pp=4, sequence_parallel=True, layers=(1, 2, 2, 3)),
    Strategy(tp=2, pp=2, schedule="gpipe", micro_batch=2, zero=1),
    Strategy(zero=3, micro_batch=8),
]


@functools.cache
def evaluator() -> Evaluator:
    return Evaluator(Problem.build(zoo.build(GPT), parse_cluster("2x4xA100-80GB@25Gbit"), {"global_batch": 64}))


@pytest.mark.parametrize("first", range(len(STRATEGIES)))
@pytest.mark.parametrize("last", range(len(STRATEGIES)))
def test_stated_plans_differ_by_their_degrees_alone(first: int, last: int) -> None:
    yours, best = (hand_made(evaluator(), STRATEGIES[number]) for number in (first, last))
    found = changes(yours, best, evaluator())
    times = [evaluator().evaluate(plan).step_time_s for plan in (yours, best)]
    assert sum(change.saved_s for change in found) == pytest.approx(times[0] - times[1], abs=1e-9 * times[0])
    for change in found:
        assert sum(change.parts_s.values()) == pytest.approx(change.saved_s, abs=1e-9 * times[0])
        assert "→" in change.about
    assert bool(found) == (first != last)
    assert not list(beyond_degrees(yours, nearest(yours, evaluator()), evaluator()))


def test_a_change_alone_and_all_but_it_are_priced_as_those_plans() -> None:
    ours, theirs = STRATEGIES[0], replace(STRATEGIES[0], micro_batch=4, recompute="none", zero=1)
    found = changes(hand_made(evaluator(), ours), hand_made(evaluator(), theirs), evaluator())
    fields = {"micro-batch": "micro_batch", "recompute": "recompute", "ZeRO": "zero"}
    seen = {field: change for change in found for words, field in fields.items() if change.about.startswith(words)}
    assert len(seen) == len(found) == 3
    assert seen["recompute"].about == "recompute full → none"
    for field, change in seen.items():
        alone = replace(ours, **{field: getattr(theirs, field)})
        without = replace(theirs, **{field: getattr(ours, field)})
        for strategy, seconds in ((alone, change.alone_s), (without, change.without_s)):
            assert seconds == evaluator().evaluate(hand_made(evaluator(), strategy)).step_time_s
    # What saves most is changed first.
    assert max(change.saved_s for change in found) == found[0].saved_s > 0.0


def test_what_no_degree_says_is_a_change_of_its_own() -> None:
    space = PlanSpace(evaluator().problem, evaluator())
    yours = hand_made(evaluator(), STRATEGIES[0])
    before_s = evaluator().evaluate(yours).step_time_s
    named = 0
    for values in space.random_batch(np.random.default_rng(3), 12).tolist():
        best = space.lowered(values)
        found = changes(yours, best, evaluator())
        if found:
            after_s = evaluator().evaluate(best).step_time_s
            assert sum(change.saved_s for change in found) == pytest.approx(before_s - after_s, abs=1e-9 * before_s)
            named += "own way" in found[-1].about
    assert named >= 3


def test_a_plan_that_does_not_fit_says_where() -> None:
    problem = Problem.build(zoo.build("gpt2-xl"), parse_cluster("2xP100"), {"global_batch": 8})
    large = Evaluator(problem)
    from automap.price.estimate import estimate_lowered

    estimate = estimate_lowered(hand_made(large, Strategy(micro_batch=4)), large)
    text = shortage(estimate)
    assert text is not None and text.startswith("devices 0-1 need ")
    (memory,) = estimate.memory_bytes
    assert f"{memory.total / 2**30:.1f} GiB of {memory.capacity / 2**30:.1f}" in text
    small = estimate_lowered(hand_made(evaluator(), Strategy()), evaluator())
    assert small.fits and shortage(small) is None


def test_what_two_plans_have_alike_is_no_change() -> None:
    problem = Problem.build(zoo.build(GPT), parse_cluster("2xA100-40GB+2xV100-16GB+2xT4-16GB"), {"global_batch": 64})
    on_six = Evaluator(problem)

    small = Evaluator(Problem.build(zoo.build(GPT), parse_cluster("4xA100-40GB"), {"global_batch": 64}))
    plain = to_plan(hand_made(small, Strategy(micro_batch=16)), small)

    def replicas(shares: tuple[int, ...] | None, devices: str) -> LoweredPlan:
        stage = replace(plain.stages[0], devices=devices, batch_shares=shares)
        moved = replace(plain, stages=(stage,), cluster=problem.cluster.to_json(), training=problem.training)
        return lower_plan(moved, on_six)

    even, uneven = replicas(None, "0-3"), replicas((24, 24, 8, 8), "0-3")
    assert [change.about for change in changes(even, uneven, on_six)] == ["shares of the samples even → unequal"]
    # Other devices are a change, though no fewer than before.
    assert [change.about for change in changes(even, replicas(None, "2-5"), on_six)] == ["other devices"]
    # What two plans on the same part of the cluster differ in is told on that part.
    whole = replicas(None, "0-3")
    found = changes(whole, hand_made(on_six, Strategy(tp=2, micro_batch=32, devices=(0, 1, 2, 3))), on_six)
    assert {change.about for change in found} == {"tensor parallel 1 → 2, micro-batch 16 → 32, replicas 4 → 2"}


def test_a_zero_over_an_axis_that_is_not_there_names_the_axis() -> None:
    plan = to_plan(hand_made(evaluator(), Strategy(zero=1, micro_batch=8)), evaluator())
    (stage,) = plan.stages
    wrong = replace(plan, stages=(replace(stage, zero=replace(stage.zero, axes=("up",))),))
    with pytest.raises(PlanError, match=r"stages\[0\]\.zero\.axes: no such mesh axis \(got up\)\. Use dp"):
        lower_plan(wrong, evaluator())
