"""Batch shares of unlike devices: what is proposed, what it costs, and what is refused."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from automap.bounds.partial_plans import BoundTable, PartialPlans
from automap.cluster import parse_cluster
from automap.errors import PlanError
from automap.plan import Plan
from automap.price.estimate import estimate_lowered, price
from automap.price.evaluator import Evaluator
from automap.price.plan_reader import lower_plan
from automap.problem import Problem
from automap.space.batch_shares import TILTS, dealt, ways_to_share
from automap.space.space import PlanSpace
from automap.verify import Verifier
from ir import zoo

MIXED = "2xV100-16GB+2xP100"


def build(graph, cluster, batch, *, trainer="generic", **fix):
    training = {"global_batch": batch, "trainer": trainer}
    return PlanSpace(Problem.build(graph, parse_cluster(cluster), training, {"fix": fix}))


def one_stage(space, way=0, **wanted):
    """Pure data parallelism: all that can split their batch."""
    shape = next(
        s for s in space.shapes if s.pp == s.tp == s.middle == 1 and all(getattr(s, k) == v for k, v in wanted.items())
    )
    values = (*space.meshes.values(shape), *[0] * (space.first.shares - space.first.schedule), way)
    while len(values) < len(space.slots):
        slot, legal = space.slots[len(values)], np.flatnonzero(space.legal(values))
        batch = splitting_batch(space, slot) if slot.kind == "signature" and slot.index == 0 else None
        values = (*values, batch if batch in legal else int(legal[0]))
    return values


def splitting_batch(space, slot):
    leader = space.linkage.types[slot.unit_type].groups[slot.group].leader
    op, table = space.operator(slot.unit_type, leader), space.linkage.types[slot.unit_type].signatures[leader]
    splits = [s.factor is not None and op.rule.factors[s.factor].is_batch for s in table]
    return splits.index(True) if True in splits else None


def with_shares(plan, shares):
    return replace(plan, stages=(replace(plan.stages[0], batch_shares=shares), *plan.stages[1:]))


# -- what is proposed ------------------------------------------------------------------------------------------------


def test_proportional_shares_are_those_of_hand():
    """Ranks that take 1 and 3 seconds a sample: 2 + 2 ranks with 16 samples have 6 and 2 each."""
    balanced = np.array([[[2.0, 6.0]]])
    ranks = np.array([[2, 2]])
    samples, first = ways_to_share(balanced, np.array([[16.0, 48.0]]), ranks, np.array([1]), np.array([16]))
    found = [(int(slow) // 2, int(fast) // 2) for slow, fast in samples[0, 0]]
    assert found[1] == (2, 6)
    assert found[1 + TILTS.index(0.5)] == (3, 5)
    # Memory of 1 to 3 is the same division, which comes once.
    assert found[-1] == (2, 6) and first[0, 0, -1] == 1


def test_shares_add_up_and_leave_nobody_without():
    rng = np.random.default_rng(0)
    ranks = rng.integers(1, 6, (40, 3))
    ranks[::4, 2] = 0
    batch = np.array([15, 16, 64, 512])
    quanta = np.ones(40, dtype=np.int64)
    balanced = rng.uniform(0.1, 3.0, (40, 4, 3)) * (batch / ranks.sum(axis=1)[:, None])[:, :, None]
    samples, first = ways_to_share(balanced, rng.uniform(1.0, 5.0, (40, 3)), ranks, quanta, batch)
    legal = first > 0
    assert legal.mean() > 0.5
    assert (samples.sum(axis=3) == batch[:, None])[legal].all()
    assert (samples >= ranks[:, None, None, :]).all(axis=3)[legal].all()


@pytest.mark.parametrize(("total", "ranks", "quantum"), [(10, 4, 1), (12, 4, 1), (24, 5, 4)])
def test_shares_of_a_kind_are_as_even_as_they_go(total, ranks, quantum):
    found = dealt(total, ranks, quantum)
    assert sum(found) == total and len(found) == ranks
    assert max(found) - min(found) in (0, quantum) and all(n % quantum == 0 for n in found)


def test_only_stages_of_several_kinds_have_a_choice(mlp):
    for cluster in ("4xV100-16GB", "2x2xV100-16GB"):
        s = build(mlp(), cluster, 64)
        assert s.slots[s.first.shares].num_values == 1
    s = build(mlp(), MIXED, 64)
    plan = one_stage(s)
    assert s.legal(plan[: s.first.shares]).sum() > 2
    two = next(shape for shape in s.shapes if shape.pp == 2 and shape.virtual == 1)
    halves = (*s.meshes.values(two), *[0] * (s.first.shares - s.first.schedule))
    assert np.flatnonzero(s.legal(halves)).tolist() == [0]
    assert build(mlp(), MIXED, 64, batch_shares="even").slots[s.first.shares].num_values == 1
    asked = build(mlp(), MIXED, 64, batch_shares="proportional")
    assert np.flatnonzero(asked.legal(plan[: s.first.shares])).tolist() == [1]


# -- what they cost --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [(6, 6, 2, 2), (7, 7, 1, 1), (5, 6, 3, 2), (4, 5, 4, 3)])
def test_each_kind_is_priced_with_its_own_share(shares):
    """A stage of two kinds costs what the slower of two homogeneous ones does, each with the larger share of its kind.

    Those are clusters of one kind; the links are the same, for all stand in two hosts.
    """
    s = build(zoo.build("resnet:blocks=1-1-1-1,image_size=64"), MIXED, 16, num_micro_batches=1, zero=0, tp=1, pp=1,
              recompute="none")  # fmt: skip
    plan = with_shares(s.decode(one_stage(s)), shares)
    outcome = s.evaluator.evaluate(lower_plan(plan, s.evaluator, s.axes))
    found = []
    for cluster, most in (("2x2xV100-16GB", max(shares[:2])), ("2x2xP100", max(shares[2:]))):
        alone = build(s.problem.graph, cluster, 4 * most, num_micro_batches=1, zero=0, tp=1, pp=1, recompute="none")
        lowered = lower_plan(alone.decode(one_stage(alone)), alone.evaluator, alone.axes)
        found.append(alone.evaluator.evaluate(lowered).ranks[0])
    seen = {float(ranks[0]["compute_s"]) for ranks in outcome.of_views}
    assert seen == {float(row["compute_s"]) for row in found}
    assert outcome.step_time_s == max(float(ranks[0]["end_s"]) for ranks in outcome.of_views)
    slowest = max(outcome.of_views, key=lambda ranks: float(ranks[0]["end_s"]))
    assert outcome.ranks is slowest
    assert float(slowest[0]["compute_s"]) == max(seen)
    assert float(slowest[0]["overhead_s"]) == float(found[0]["overhead_s"])


@pytest.mark.parametrize(
    ("spec", "batch"),
    [
        ("resnet:blocks=2-2-2-2,image_size=64", 256),
        ("bert:layers=2,hidden=256,heads=4,seq_len=128,vocab_size=1024", 64),
    ],
)
def test_proposed_shares_are_near_the_best_of_all(spec, batch):
    """All divisions of the samples among two kinds, against those that the space offers."""
    s = build(zoo.build(spec), MIXED, batch, num_micro_batches=1, zero=0, tp=1, pp=1, recompute="none")
    values = one_stage(s)
    plan = s.decode(values)
    every = []
    for fast in range(1, batch // 2):
        shares = (*[fast] * 2, *[batch // 2 - fast] * 2)
        every.append(s.evaluator.evaluate(lower_plan(with_shares(plan, shares), s.evaluator, s.axes)).step_time_s)
    ways = np.flatnonzero(s.legal(values[: s.first.shares])).tolist()
    rows = np.array([(*values[: s.first.shares], way, *values[s.first.cut :]) for way in ways])
    offered = s.price(rows)[:, 0]
    assert offered.min() <= 1.03 * min(every)
    assert offered[1] <= 1.1 * min(every)
    # Most of so small a step is the host's time, which no share changes.
    assert offered.min() < 0.92 * offered[0]


def test_memory_is_that_of_the_kind():
    s = build(zoo.build("resnet:blocks=1-1-1-1,image_size=64"), MIXED, 64, num_micro_batches=1, tp=1, pp=1)
    plan = with_shares(s.decode(one_stage(s)), (28, 28, 4, 4))
    estimate = price(s.problem, plan, s.evaluator)
    fast, slow = estimate.memory_bytes
    assert (fast.devices, slow.devices) == ("0-1", "2-3")
    assert fast.parameters == slow.parameters
    assert 5.0 < fast.activations / slow.activations <= 7.0
    assert not Verifier(s.problem).violations(replace(plan, estimate=estimate))
    wrong = replace(estimate, memory_bytes=(fast, replace(slow, activations=fast.activations)))
    assert [v.where for v in Verifier(s.problem).violations(replace(plan, estimate=wrong))] == [
        "estimate.memory_bytes[1]"
    ]


# -- all plans -------------------------------------------------------------------------------------------------------


def test_bounds_and_documents_of_all_plans(mlp):
    """No bound is above any completion; documents come back; the verifier counts the same memory."""
    s = build(mlp((8, 8)), "1xV100-16GB+2xP100", 12, num_micro_batches=1, recompute="none", pp=1)
    plans, pending = [], [()]
    while pending:
        prefix = pending.pop()
        if len(prefix) == len(s.slots):
            plans.append(prefix)
        else:
            pending += [(*prefix, int(v)) for v in np.flatnonzero(s.legal(prefix))]
    assert 10**s.decades == pytest.approx(len(plans))
    prices = s.price(np.array(plans))
    shared = [values[s.first.shares] > 0 for values in plans]
    assert 0.2 < np.mean(shared) < 1.0
    walked = PartialPlans(BoundTable(s), len(plans))
    while not walked.done.all():
        assert (walked.episodes.bound[:, 0] <= prices[:, 0] * (1 + 1e-12)).all()
        assert (walked.episodes.bound[:, 1] <= prices[:, 1] + 1e-12).all()
        actions = np.zeros(len(plans), dtype=np.int64)
        for number in np.flatnonzero(~walked.done):
            legal = walked.episodes.legal[number, : walked.episodes.offered[number]]
            actions[number] = np.searchsorted(legal, plans[number][walked.episodes.position[number]])
        walked.step(actions)
    assert walked.episodes.bound.tolist() == prices.tolist()
    check = Verifier(s.problem)
    for values, mine in itertools.islice(zip(plans, prices.tolist(), strict=True), 0, None, max(1, len(plans) // 60)):
        lowered = s.lowered(values)
        outcome = s.evaluator.evaluate(lowered)
        assert mine == [outcome.step_time_s, outcome.overflow]
        plan = Plan.from_json(s.decode(values).to_json())
        assert s.encode(plan) == values
        assert price(s.problem, plan, s.evaluator).step_time_s == mine[0]
        assert not check.violations(replace(plan, estimate=estimate_lowered(lowered, s.evaluator)))


@pytest.mark.parametrize("shares", [(6, 6, 2), (6, 6, 2, 3), (8, 8, 0, 0), (9, 9, -1, -1)])
def test_what_is_no_division_is_refused(mlp, shares):
    s = build(mlp(), MIXED, 16, num_micro_batches=1, tp=1, pp=1)
    plan = with_shares(s.decode(one_stage(s)), shares)
    with pytest.raises(PlanError) as caught:
        lower_plan(plan, s.evaluator)
    assert caught.value.field == "plan.stages[0].batch_shares"
    assert [v.where for v in Verifier(s.problem).violations(plan)] == ["stages[0].batch_shares"]


def test_groups_inside_one_kind_use_their_own_links():
    """Pairs of V100s exchange over NVLink, those of T4s over PCIe, and replicas over what joins all hosts."""
    mixed = parse_cluster("2x2xV100-16GB+2x2xT4")
    layouts = Evaluator(Problem.build(zoo.build("vgg16"), mixed, {"global_batch": 16})).laid_out
    stage = layouts.stages[layouts.number(layouts.pattern(np.arange(8)), np.arange(8), (4, 2))]
    found = {}
    for kind in stage.kinds:
        (name,) = {mixed.hosts[mixed.node_of[2 * rank]].device for rank in kind.ranks}
        alone = Problem.build(zoo.build("vgg16"), parse_cluster(f"2x2x{name}"), {"global_batch": 16})
        assert kind.stage.links[1] == Evaluator(alone).laid_out.stage_layout(range(4), (2, 2)).links[1]
        assert kind.stage.links[0] == stage.links[0]
        found[name] = float(kind.stage.links[1]["bytes_per_s"].min())
    assert found["V100-16GB"] > found["T4-16GB"] == float(stage.links[1]["bytes_per_s"].min())
