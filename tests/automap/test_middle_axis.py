"""The mesh axis between dp and tp: where it is, what it does to gradients and memory, bounds against brute force."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from all_plans import every_plan
from collective_list import list_collectives

from automap.bounds.partial_plans import BoundTable, PartialPlan
from automap.cluster import parse_cluster
from automap.errors import PlanError, ProblemError
from automap.plan import Plan
from automap.price.estimate import estimate_lowered, price
from automap.price.plan_reader import lower_plan
from automap.problem import Problem
from automap.space.count import count_decades
from automap.space.mesh_shapes import MIN_TOKENS_A_RANK
from automap.space.shape import divisors
from automap.space.space import PlanSpace
from automap.space.templates import templates
from ir import zoo
from ir.build import GraphBuilder
from ir.graph import Graph
from ir.loss import with_loss

MakeSpace = Callable[..., PlanSpace]
MIXTURE = "moe:layers=2,hidden=256,heads=4,ffn=512,experts=8,seq_len=256,vocab_size=512"
LONG = "llama:layers=2,hidden=256,heads=8,kv_heads=2,seq_len=16384,vocab_size=512"


def routed(experts: int = 2, *, copies: int = 1, tokens: int = 8, width: int = 16) -> Graph:
    """One product with the weights of the `copies` experts that data choose for each token, and a loss."""
    b = GraphBuilder()
    x, weights = b.input("x", (1, tokens, width)), b.input("weights", (1, tokens, copies))
    chosen = b.input("chosen", (1, tokens, copies), "int64")
    routing = {"num_experts": experts, "capacity": tokens * copies // experts}
    (slots,) = b.add("automap.Dispatch", [x, chosen], ["slots"], attributes=routing)
    w = b.parameter("w", (experts, width, 32))
    (y,) = b.add("automap.GroupedMatMul", [slots, w], ["y"], attributes={"num_tokens": tokens * copies})
    (out,) = b.add("automap.Combine", [y, chosen, weights], ["out"])
    return with_loss(b.finish([out], name="routed"), "mse")


# -- where it is ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "fix", "axes", "degrees"),
    [
        (MIXTURE, {}, ("dp", "ep", "tp"), [1, 2, 4, 8]),
        (MIXTURE.replace("experts=8", "experts=6"), {}, ("dp", "ep", "tp"), [1, 2]),
        (MIXTURE.replace("experts=8", "experts=7"), {}, ("dp", "tp"), [1]),
        (MIXTURE, {"ep": 1}, ("dp", "tp"), [1]),
        (MIXTURE, {"ep": 4}, ("dp", "ep", "tp"), [4]),
        (MIXTURE, {"cp": 2}, ("dp", "cp", "tp"), [2]),
        (LONG, {}, ("dp", "cp", "tp"), [1, 2, 4]),
        (LONG, {"cp": 8}, ("dp", "cp", "tp"), [8]),
        (LONG, {"cp": 1}, ("dp", "tp"), [1]),
        (LONG.replace("16384", str(2 * MIN_TOKENS_A_RANK - 2)), {}, ("dp", "tp"), [1]),
    ],
)
def test_the_model_and_the_hints_say_which_axis(space: MakeSpace, spec, fix, axes, degrees) -> None:
    s = space(zoo.build(spec), "8xA100", 16, **fix)
    assert s.axes == axes
    assert sorted({shape.middle for shape in s.shapes}) == degrees
    assert [slot.kind for slot in s.slots].count("middle") == len(axes) - 2


@pytest.mark.parametrize(
    ("spec", "fix", "field"),
    [
        (MIXTURE, {"ep": 3}, "hints.fix.ep"),
        (MIXTURE, {"ep": 2, "cp": 2}, "hints.fix"),
        (LONG, {"ep": 2}, "hints.fix.ep"),
        (LONG.replace("16384", "16387"), {"cp": 2}, "hints.fix.cp"),
        (MIXTURE, {"ep": 4, "tp": 4}, "hints.fix"),
        (MIXTURE, {"ep": 0}, "hints.fix.ep"),
    ],
)
def test_what_cannot_be_is_refused_by_name(space: MakeSpace, spec, fix, field) -> None:
    with pytest.raises(ProblemError) as caught:
        space(zoo.build(spec), "8xA100", 16, **fix)
    assert caught.value.field == field and caught.value.repair


def test_placements_are_bound_on_axes_that_there_are(space: MakeSpace) -> None:
    def build(axis: str) -> PlanSpace:
        hints = {"constraints": [{"scope": "layers.*.mlp.experts", "sharding": {axis: "S(0)"}}], "fix": {"ep": 2}}
        return PlanSpace(Problem.build(zoo.build(MIXTURE), parse_cluster("4xA100"), {"global_batch": 8}, hints))

    s = build("ep")
    products = {
        name: sharding
        for values in s.random_batch(np.random.default_rng(0), 20).tolist()
        for stage in s.decode(values).stages
        for name, sharding in stage.shardings.items()
        if "GroupedMatMul" in name
    }
    assert products and all(sharding["ep"].outputs == ("S(0)",) for sharding in products.values())
    with pytest.raises(ProblemError) as caught:
        build("cp")
    assert caught.value.field == "hints.constraints[0].sharding"


def test_every_factorisation_is_there(space: MakeSpace) -> None:
    s = space(zoo.build(MIXTURE), "2x4xA100", 16)
    shapes = {(x.dp, x.middle, x.tp, x.pp) for x in s.shapes}
    every = itertools.product(divisors(8), repeat=4)
    assert shapes == {x for x in every if np.prod(x) == 8 and x[3] <= s.num_units}
    for dp, ep, tp, pp in shapes:
        counts = {x.num_micro_batches for x in s.shapes if (x.dp, x.middle, x.tp, x.pp) == (dp, ep, tp, pp)}
        assert counts == {m for m in divisors(16) if (16 // m) % (dp * ep) == 0}


def test_virtual_stages_divide_the_blocks_of_a_rank(space: MakeSpace, gpt) -> None:
    s = space(zoo.build("gpt:layers=80,hidden=64,heads=4,seq_len=32,vocab_size=128"), "8xA100", 16)
    found = {pp: sorted({x.virtual for x in s.shapes if x.pp == pp}) for pp in (1, 4, 8)}
    assert found == {1: [1], 4: [1, 2, 4, 5, 10, 20], 8: [1, 2, 5, 10]}
    assert {x.virtual for x in space(gpt(layers=6), "2xA100", 4, virtual_stages=4).shapes} == {4}
    shape = next(x for x in s.shapes if (x.pp, x.virtual) == (4, 20))
    values = s.even_values(shape, recompute="none", zero=0)
    while len(values) < len(s.slots):
        values = (*values, int(np.flatnonzero(s.legal(values))[0]))
    plan = s.decode(values)
    assert len(plan.stages) == 80 and s.encode(plan) == values


# -- a middle axis of one rank ----------------------------------------------------------------------------------------


def test_an_axis_of_one_rank_leaves_nothing_to_decide(space: MakeSpace) -> None:
    wide = space(zoo.build(MIXTURE), "2x2xA100", 8)
    narrow = space(zoo.build(MIXTURE), "2x2xA100", 8, ep=1)
    rng = np.random.default_rng(0)
    for values in narrow.random_batch(rng, 20).tolist():
        plan = narrow.decode(values)
        mine = wide.encode(plan)
        assert mine is not None and wide.decode(mine) == plan
        free = [i for i in range(len(mine)) if wide.legal(mine[:i]).sum() > 1 and wide.slots[i].kind != "middle"]
        assert len(free) == sum(narrow.legal(values[:i]).sum() > 1 for i in range(len(values)))
        one, other = (s.evaluator.evaluate(s.lowered(v)) for s, v in ((wide, mine), (narrow, values)))
        assert (one.step_time_s, one.overflow) == (other.step_time_s, other.overflow)


# -- counting, drawing, bounds ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> PlanSpace:
    fix = {"pp": 1, "tp": 1, "ep": 2, "num_micro_batches": 1, "recompute": "none"}
    constraints = [
        {"scope": "loss", "sharding": {"dp": "P", "ep": "P"}},
        {"scope": "out", "sharding": {"dp": "S(0)"}},
    ]
    hints = {"fix": fix, "constraints": constraints}
    return PlanSpace(Problem.build(routed(), parse_cluster("2x2xA100"), {"global_batch": 8}, hints))


def test_all_plans_are_counted_and_drawn(small: PlanSpace) -> None:
    plans = list(every_plan(small))
    assert 10**small.decades == pytest.approx(len(plans)) and len(plans) > 500
    rng = np.random.default_rng(0)
    drawn = Counter(map(tuple, small.random_batch(rng, 30 * len(plans)).tolist()))
    assert set(drawn) <= set(plans)
    # One decision after the other: the chance of a plan is the product over its decisions.
    chance = {p: 1.0 / np.prod([small.legal(p[:i]).sum() for i in range(len(p))]) for p in plans[::5]}
    total = sum(drawn.values())
    for plan, expected in chance.items():
        spread = np.sqrt(expected * total)
        assert abs(drawn[plan] - expected * total) < 5.5 * spread + 1, plan


@pytest.fixture(scope="module")
def sent_once() -> PlanSpace:
    """Tokens with eight experts each, which go once to each rank: what an exchange sends decides the step."""
    fix = {"pp": 1, "tp": 1, "ep": 2, "num_micro_batches": 1, "recompute": "none", "zero": 0}
    hints = {"fix": fix, "constraints": [{"scope": "loss", "sharding": {"dp": "P", "ep": "P"}}]}
    graph = routed(8, copies=8, tokens=512, width=4096)
    training = {"global_batch": 8, "trainer": "megatron-core-26.06"}
    return PlanSpace(Problem.build(graph, parse_cluster("4xA100"), training, hints))


@pytest.fixture(scope="module")
def paired() -> PlanSpace:
    """Tokens whose exchanges run under another micro-batch."""
    fix = {"tp": 1, "ep": 2, "zero": 0}
    hints = {"fix": fix, "constraints": [{"scope": "loss", "sharding": {"dp": "P", "ep": "P"}}]}
    training = {"global_batch": 32, "trainer": "megatron-core-26.06", "overlap_expert_exchange": True}
    return PlanSpace(Problem.build(routed(8, copies=8, tokens=512, width=4096), "4xA100", training, hints))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small", "sent_once", "paired"])
def test_no_completion_beats_its_bound(request: pytest.FixtureRequest, name: str) -> None:
    """Every bound of every prefix of every plan with experts and three axes, by brute force."""
    space: PlanSpace = request.getfixturevalue(name)
    table = BoundTable(space)
    plans = list(every_plan(space))
    prices = dict(zip(plans, space.price(np.array(plans)).tolist(), strict=True))
    best: dict[tuple[int, ...], list[float]] = {}
    for plan, outcome in prices.items():
        for depth in range(len(plan) + 1):
            least = best.setdefault(plan[:depth], outcome)
            best[plan[:depth]] = [min(a, b) for a, b in zip(least, outcome, strict=True)]
    checked = 0
    for plan in plans[:: max(1, len(plans) // 400)]:
        prefix = PartialPlan(space, table)
        while not prefix.done:
            for value, (seconds, overflow) in zip(prefix.legal(), prefix.bounds(), strict=True):
                least = best[(*prefix.values, int(value))]
                assert seconds <= least[0] * (1 + 1e-12) and overflow <= least[1] + 1e-12
                checked += 1
            prefix.decide(plan[prefix.position])
        assert [prefix.bound.time_s, prefix.bound.overflow] == prices[plan]
    assert checked > 1000


SPACES = [(MIXTURE, "2x4xA100", {}), (LONG, "2x4xA100", {}), (LONG, "4xV100-16GB+4xP100", {"cp": 2, "pp": 2})]


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "cluster", "fix"), SPACES)
def test_plans_drawn_and_templates_are_of_the_space(space: MakeSpace, spec, cluster, fix) -> None:
    """Legal, encoded as decoded, and at one price in the compiled kernel, alone, as a prefix and as a document."""
    s = space(zoo.build(spec), cluster, 16, **fix)
    listed = [values for _, values in templates(s)]
    assert len(listed) == len(set(listed))
    drawn = [tuple(values) for values in s.random_batch(np.random.default_rng(0), 30).tolist()]
    plans = [*drawn, *listed[:: max(1, len(listed) // 30)]]
    assert sum(s.shape(v).middle > 1 for v in plans) > 10
    prices = s.price(np.array(plans)).tolist()
    table = BoundTable(s)
    for number, (values, (seconds, overflow)) in enumerate(zip(plans, prices, strict=True)):
        assert s.repair(values) == values
        plan = s.decode(values)
        # Levels of recomputation may mean the same where chunks are uneven.
        assert s.decode(s.encode(plan)) == plan
        outcome = s.evaluator.evaluate(s.lowered(values))
        assert (outcome.step_time_s, outcome.overflow) == (seconds, overflow)
        if number % 6 == 0:
            document = Plan.from_json(s.decode(values).to_json())
            assert price(s.problem, document, s.evaluator) == estimate_lowered(s.lowered(values), s.evaluator)
            prefix = PartialPlan(s, table)
            while not prefix.done:
                assert prefix.bound.time_s <= seconds * (1 + 1e-12) and prefix.bound.overflow <= overflow + 1e-12
                prefix.decide(values[prefix.position])
            assert prefix.bound.time_s == seconds
    assert count_decades(s) > 0


# -- what it costs ----------------------------------------------------------------------------------------------------


def template(s: PlanSpace, *, zero: int = 0, **degrees: int) -> tuple[int, ...]:
    wanted = {"pp": 1, "tp": 1, "num_micro_batches": 1, **degrees}
    return next(
        values
        for shape, values in templates(s)
        if all(getattr(shape, name) == degree for name, degree in wanted.items()) and values[s.first.zero] == zero
    )


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_shards_over_both_axes_what_is_whole_there(space: MakeSpace, zero: int) -> None:
    s = space(zoo.build(LONG), "8xA100-80GB", 16, recompute="none")
    row = s.evaluator.evaluate(s.lowered(template(s, dp=2, middle=4, zero=zero))).ranks[0]
    graph = s.problem.graph
    fields = ("optimizer_bytes", "gradient_bytes", "parameter_bytes")
    for name, one, since in zip(fields, (2, 1, 0), (1, 2, 3), strict=True):
        expected = graph.num_parameters * s.problem.state_bytes[one] / (8 if zero >= since else 1)
        assert row[name] == pytest.approx(expected)


def test_spread_experts_are_sharded_over_the_other_axis_alone(space: MakeSpace) -> None:
    s = space(zoo.build(MIXTURE), "8xA100-80GB", 16, recompute="none")
    row = s.evaluator.evaluate(s.lowered(template(s, dp=2, middle=4, zero=1))).ranks[0]
    experts = sum(t.num_elements for t in s.problem.graph.parameters if ".experts." in t.name)
    dense = s.problem.graph.num_parameters - experts
    assert row["parameter_bytes"] == pytest.approx((dense + experts / 4) * s.problem.state_bytes[0])
    assert row["optimizer_bytes"] == pytest.approx((dense + experts) / 8 * s.problem.state_bytes[2])


def test_outer_axes_reduce_and_gather_what_inner_ones_leave(space: MakeSpace) -> None:
    s = space(zoo.build(MIXTURE), "8xA100-80GB", 16, recompute="none")
    lowered = s.lowered(template(s, dp=2, middle=4, zero=3))
    costs = [
        s.evaluator.unit_cost(segment, incoming, lowered.stages[0])
        for _, segment, incoming in s.evaluator.surroundings(lowered)
    ]
    total = {
        name: sum(cost[name] for cost in costs) for name in ("parameters", "zero_parameters", "reduced", "gathered")
    }
    experts = sum(t.num_elements for t in s.problem.graph.parameters if ".experts." in t.name)
    dense = s.problem.graph.num_parameters - experts
    assert total["parameters"] == dense + experts / 4 and total["zero_parameters"] == (dense + experts) / 8
    for name in ("reduced", "gathered"):
        # dp stands outside: it sees a quarter of everything, the experts' for they are spread.
        assert total[name][:3].tolist() == [(dense + experts) / 4, dense, 0.0]


def test_over_cp_only_keys_and_values_are_exchanged(space: MakeSpace) -> None:
    s = space(zoo.build(LONG), "8xA100-80GB", 8, recompute="none")
    found = list(list_collectives(s.lowered(template(s, dp=2, middle=4)), s.evaluator))
    assert {c.axis for c in found} == {"cp"}
    gathers = [c for c in found if c.operator.startswith("layers.1.") and c.direction == "forward"]
    # Two kv heads of eight of size 32, for the samples of one replica; repeated for the heads that share them first.
    assert [c.kind for c in gathers] == ["all_gather"] * 2
    assert {c.bytes for c in gathers} <= {n * 4 * 16384 * 32 * s.problem.activation_bytes for n in (2, 8)}
    backward = [c for c in found if c.operator.startswith("layers.1.") and c.direction == "backward"]
    assert Counter(c.kind for c in backward) == {"reduce_scatter": 2}
    assert not [c for c in found if not c.operator.startswith("layers.")]


# -- documents --------------------------------------------------------------------------------------------------------


def test_axes_of_a_document_may_stand_in_any_one_order(space: MakeSpace) -> None:
    s = space(zoo.build(LONG), "8xA100-80GB", 8, pp=1)
    values = template(s, dp=1, middle=4, tp=2)
    plan = s.decode(values)
    (stage,) = plan.stages
    assert stage.mesh == (("cp", 4), ("tp", 2)) and stage.batch_axes == ()
    turned = dataclasses.replace(plan, stages=(dataclasses.replace(stage, mesh=stage.mesh[::-1]),))
    assert lower_plan(turned, s.evaluator).axes == ("tp", "cp", "dp")
    assert s.encode(turned) is None
    assert lower_plan(plan, s.evaluator).axes == ("dp", "cp", "tp")
    other = dataclasses.replace(stage, mesh=(("tp", 2), ("cp", 4)), devices="8-15")
    with pytest.raises(PlanError):
        lower_plan(dataclasses.replace(plan, stages=(stage, other)), s.evaluator)


def test_zero_over_other_axes_is_outside_the_space(space: MakeSpace) -> None:
    s = space(zoo.build(LONG), "8xA100-80GB", 8, pp=1)
    values = template(s, dp=2, middle=4, zero=1)
    plan = s.decode(values)
    assert plan.stages[0].zero.axes == ("dp", "cp")
    zero = dataclasses.replace(plan.stages[0].zero, axes=("dp",))
    other = dataclasses.replace(plan, stages=(dataclasses.replace(plan.stages[0], zero=zero),))
    assert s.encode(plan) == values and s.encode(other) is None
    assert price(s.problem, other).memory_bytes[0].optimizer == pytest.approx(
        4 * price(s.problem, plan).memory_bytes[0].optimizer
    )
