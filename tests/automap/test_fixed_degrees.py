"""A degree that is fixed binds its axis to its name: tp is no second data parallelism."""

import itertools
import json

import numpy as np
import pytest

from agents import Budget, search
from automap.cluster import parse_cluster
from automap.errors import ProblemError
from automap.hints import Fix
from automap.plan import Plan
from automap.problem import Problem
from automap.space.space import PlanSpace
from automap.space.templates import templates
from automap.verify import verify
from ir import zoo
from service.strategy import strategy

GPT = "gpt:layers=3,hidden=64,heads=4,seq_len=32,vocab_size=128"
MOE = "moe:layers=2,hidden=64,heads=4,kv_heads=4,ffn=128,seq_len=32,vocab_size=128,experts=4,top_k=2"
RESNET = "resnet:blocks=1-1,width=32,image_size=32,num_classes=16"


def problem(model: str, constraints=(), cluster="8xA100", **fix) -> Problem:
    hints = {"fix": fix, "constraints": list(constraints)}
    return Problem.build(zoo.build(model), parse_cluster(cluster), {"global_batch": 16}, hints)


def splits(space: PlanSpace, values, axis: str):
    """(operator, its factor, whether a weight is split) of all operators that are split over an axis of some ranks."""
    shape, number = space.shape(values), space.axes.index(axis)
    if space.meshes.mesh(shape)[number] == 1:
        return
    dense, graph = space.signatures(values), space.problem.graph
    for kind, unit in enumerate(space.linkage.types):
        for offset, table in enumerate(unit.signatures):
            op = space.operator(kind, offset)
            signature = table[dense[int(space.evaluator.tables.spans[kind]) + offset, number]]
            if signature.factor is not None:
                weights = [n for n in op.inputs if graph.is_weight(n)]
                split = any(signature.inputs[op.inputs.index(n)] >= 0 for n in weights)
                yield op, op.rule.factors[signature.factor], split if weights and op.forward_flops.at(1) else None


def some(space: PlanSpace):
    """Plans of all kinds: random ones, and every so many templates."""
    rng = np.random.default_rng(0)
    yield from (space.random(rng) for _ in range(30))
    yield from itertools.islice((values for _, values in templates(space)), 0, None, 29)


WAYS = (
    ({"tp": 2}, "tp", True),
    ({"dp": 2}, "tp", None),
    ({"cp": 2}, "cp", False),
    ({"dp": 1, "cp": 2}, "tp", None),
)
"""What is fixed, an axis, and whether products with weights that are split over it split the weights."""


@pytest.mark.parametrize(
    ("model", "fix", "axis", "splits_weights"),
    [(model, *way) for model in (GPT, MOE, RESNET) for way in WAYS if model != RESNET or "cp" not in way[0]],
)
def test_ranks_of_an_axis_that_is_bound_work_on_the_same_samples(model, fix, axis, splits_weights):
    wanted = problem(model, **fix)
    space = PlanSpace(wanted)
    count = 0
    for values in some(space):
        for op, factor, split in splits(space, values, axis):
            count += 1
            assert not factor.is_batch, op.name
            if split is not None and splits_weights is not None:
                assert split is splits_weights, op.name
        assert verify(wanted, space.decode(values)) == ()
    assert count > 100


@pytest.mark.parametrize("stage", [1, 3])
def test_a_fixed_zero_stage_has_replicas_to_shard_over(stage):
    wanted = problem(GPT, zero=stage)
    space = PlanSpace(wanted)
    assert all(shape.replicas > 1 for shape in space.shapes)
    for values in some(space):
        assert all(not factor.is_batch for _, factor, _ in splits(space, values, "tp"))
        plan = space.decode(values)
        assert {one.zero.stage for one in plan.stages} == {stage}
        assert verify(wanted, plan) == ()
    # Where no plan has replicas, the rest is as it was.
    assert PlanSpace(problem(GPT, cluster="1xA100", zero=stage)).shapes


def test_experts_and_replicas_split_the_batch():
    space = PlanSpace(problem(MOE, dp=2, ep=2, pp=1))
    found = {axis: {f.is_batch for v in some(space) for _, f, _ in splits(space, v, axis)} for axis in space.axes}
    assert found == {"dp": {False, True}, "ep": {False, True}, "tp": {False}}


def test_without_expert_parallelism_no_axis_spreads_experts():
    wanted = problem(MOE, ep=1)
    space, free = PlanSpace(wanted), PlanSpace(problem(MOE, ep=1, pp=1))
    spread = {
        factor.name
        for values in some(space)
        for axis in space.axes
        for op, factor, _ in splits(space, values, axis)
        if op.kind.startswith("automap.")
    }
    assert spread and "e" not in spread
    assert all(verify(wanted, free.decode(values)) == () for values in some(free))
    over_tp = PlanSpace(problem(MOE, pp=1))
    plans = [values for values in some(over_tp) if any(f.name == "e" for _, f, _ in splits(over_tp, values, "tp"))]
    assert plans
    assert all(verify(wanted, over_tp.decode(values)) for values in plans)


def test_a_fixed_ep_divides_the_experts_over_its_axis_alone():
    wanted = problem(MOE, ep=2)
    space, free = PlanSpace(wanted), PlanSpace(problem(MOE))
    found = {
        (axis, factor.name)
        for values in some(space)
        for axis in space.axes
        for op, factor, _ in splits(space, values, axis)
        if op.kind == "automap.GroupedMatMul"
    }
    assert ("ep", "e") in found and {axis for axis, name in found if name == "e"} == {"ep"}
    assert {name for axis, name in found if axis == "ep"} == {"e"}
    assert all(verify(wanted, space.decode(values)) == () for values in some(space))
    others = [values for values in some(free) if free.shape(values).middle == 2]
    told = [(free.decode(values), verify(wanted, free.decode(values))) for values in others]
    for plan, faults in told:
        assert bool(faults) or all("ep" in degrees.expert_axes for degrees in plan.degrees)
    assert any(any("hints.fix.ep" in fault.where for fault in faults) for _, faults in told)


def test_a_layer_whose_experts_do_not_divide_over_ep_is_free():
    assert not Fix(ep=4).shares_experts(6) and Fix(ep=4).shares_experts(8)
    assert not Fix(ep=4).shares_experts(0) and not Fix(ep=1).shares_experts(8) and not Fix().shares_experts(8)


def test_the_verifier_finds_what_is_used_for_something_else():
    free, wanted = PlanSpace(problem(GPT, pp=1)), problem(GPT, pp=1, tp=2)
    told = set()
    for values in some(free):
        if free.shape(values).tp == 2:
            told |= {
                (one.where.rpartition(", ")[2], "over tp" in one.what) for one in verify(wanted, free.decode(values))
            }
    assert told == {("hints.fix.tp", True)}


STAGE = ({"scope": "h.1", "stage": 1},)


def test_plans_written_elsewhere_may_name_their_axes_freely():
    free = PlanSpace(problem(GPT, pp=1, num_micro_batches=1))
    shape = next(shape for shape in free.shapes if (shape.dp, shape.tp) == (4, 2))
    values = free.repair(
        (*free.even_values(shape, recompute="none", zero=0), *[0] * len(free.slots))[: len(free.slots)]
    )
    text = json.dumps(free.decode(values).to_json()).replace('"dp"', '"outer"').replace('"tp"', '"inner"')
    plan = Plan.from_json(json.loads(text))
    assert verify(free.problem, plan) == ()
    assert "hints.fix.dp is 4" in verify(problem(GPT, pp=1, dp=4, ep=1), plan)[0].what


@pytest.mark.parametrize(
    ("constraints", "fix", "field", "repair"),
    [
        ((), {"pp": 1, "virtual_stages": 2}, "hints.fix.virtual_stages", "leave out one of pp 1, virtual_stages 2."),
        ((), {"pp": 2, "virtual_stages": 2, "schedule": "1f1b"}, "hints.fix.virtual_stages", "schedule 1f1b"),
        (STAGE, {"pp": 2, "virtual_stages": 2}, "hints.fix.virtual_stages", "or the constraints."),
        (STAGE, {"pp": 1}, "hints.fix", "as many pipeline stages (pp) as the constraints name"),
    ],
)  # fmt: skip
def test_what_clashes_is_named(constraints, fix, field, repair):
    with pytest.raises(ProblemError) as fault:
        PlanSpace(problem(GPT, constraints, **fix))
    assert fault.value.field == field
    assert repair in fault.value.repair


def test_a_constraint_comes_first():
    """Who wants a batch split over tp, and says so of an operator, has it."""
    wanted = problem(
        GPT, [{"scope": "h.*.mlp.c_fc/MatMul", "sharding": {"tp": "S(0)"}}], pp=1, tp=2, dp=4, num_micro_batches=1
    )
    space = PlanSpace(wanted)
    for values in some(space):
        batched = {op.name for op, factor, _ in splits(space, values, "tp") if factor.is_batch}
        assert any("mlp.c_fc/MatMul" in name for name in batched)
        assert not any("attn" in name for name in batched)
        assert verify(wanted, space.decode(values)) == ()


@pytest.mark.slow
def test_a_search_with_tensor_parallelism_fixed_ends_with_it():
    plan = search(problem("gpt2", cluster="1x8xA100-80GB", tp=4), Budget.parse("60"), seed=0).plan
    assert "tensor parallel 4" in strategy(plan)


@pytest.mark.parametrize("fix", [{"tp": 2}, {"ep": 4, "tp": 2}])
def test_routers_may_split_the_sequence_over_tp_where_the_target_does(fix: dict[str, int]) -> None:
    """Megatron-LM's routers read a part of the tokens with whole weights, as do the norms in front of them."""
    model = "moe:layers=2,hidden=2048,heads=16,kv_heads=8,ffn=5504,seq_len=2048,vocab_size=512,experts=8"
    training = {"global_batch": 64, "target": "megatron-core"}
    given = Problem.build(zoo.build(model), parse_cluster("2x8xH100"), training, {"fix": fix})
    plan = search(given, Budget.parse("16")).plan
    assert not verify(given, plan)
    degrees = plan.degrees[0]
    assert {name: {"tp": degrees.tensor, "ep": degrees.expert}[name] for name in fix} == fix
    router = next(row for name, row in plan.stages[0].shardings.items() if name.endswith("mlp.gate/MatMul"))
    assert router["tp"].inputs == ("S(1)", "B")
