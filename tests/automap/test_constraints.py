"""Constraints: whatever plan is drawn, it obeys; what cannot be obeyed is refused by name."""

import itertools
import math

import numpy as np
import pytest

from agents import search
from agents.searcher import Budget
from automap.bounds.partial_plans import BoundTable
from automap.cluster import parse_cluster
from automap.errors import ProblemError
from automap.globs import select
from automap.price.evaluator import Evaluator
from automap.problem import Problem
from automap.space.count import cut_decades
from automap.space.space import PlanSpace
from automap.space.templates import templates
from automap.verify import verify
from envs.hybrid import HybridEnv
from service.priced_plans import hand_made_plan


def problem(graph, constraints, cluster="8xA100", batch=16, trainer="generic", **fix) -> Problem:
    hints = {"constraints": constraints, "fix": fix}
    return Problem.build(graph, parse_cluster(cluster), {"global_batch": batch, "trainer": trainer}, hints)


@pytest.mark.parametrize(
    ("first", "second", "field"),
    [
        ({"replicate": True}, {"split": True}, r"constraints\[1\]: contradicts hints.constraints\[0\]"),
        ({"recompute": True}, {"recompute": False}, r"constraints\[1\]: contradicts"),
        ({"replicate": True, "split": True}, {"split": True}, r"constraints\[0\]: asks for .* both divided and whole"),
    ],
)
def test_opposite_constraints_are_refused(gpt, first, second, field):
    both = [{"scope": "**mlp**", **first}, {"scope": "**", **second}]
    with pytest.raises(ProblemError, match=field):
        problem(gpt(), both)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"replicate": True}, {"split": True}, "divided, and .* as whole"),
        ({"sharding": {"tp": "S(2)"}}, {"sharding": {"tp": "B"}}, r"B, and .* as S\(2\)"),
    ],
)
def test_opposite_shardings_of_equal_layers_are_refused(gpt, first, second, said):
    """Equal layers are sharded alike, so that no plan could obey both."""
    scopes = ("h.0.mlp.up/MatMul", "h.1.mlp.up/MatMul")
    asked = [{"scope": scope, **hint} for scope, hint in zip(scopes, (first, second), strict=True)]
    with pytest.raises(ProblemError, match=f"asks for h.1.mlp.up/MatMul as {said}") as caught:
        PlanSpace(problem(gpt(), asked))
    assert caught.value.field == "hints.constraints[1]"
    PlanSpace(problem(gpt(), [asked[0], asked[0] | {"scope": scopes[1]}]))


def test_constraints_bind_only_operators_that_the_target_recomputes(gpt):
    """Megatron-LM runs layers again, and neither the head nor the loss."""

    def found(scope):
        hints = {"constraints": [{"scope": scope, "recompute": True}]}
        asked = Problem.build(gpt(), "2xA100", {"global_batch": 8, "target": "megatron-core"}, hints)
        return search(asked, Budget(evaluations=10)).plan

    assert all(stage.recompute for stage in found("**").stages)
    with pytest.raises(ProblemError, match="megatron-core can recompute none of these operators") as caught:
        found("loss")
    assert caught.value.field == "hints.constraints[0].recompute"


def test_the_opposite_of_a_fixed_recomputation_is_refused(gpt):
    constraints = [{"scope": "**", "recompute": False}]
    assert problem(gpt(), constraints, recompute="none").hints.fix.recompute == "none"
    with pytest.raises(ProblemError, match=r"constraints\[0\].recompute: contradicts hints.fix.recompute"):
        problem(gpt(), constraints, recompute="full")


def test_a_reserve_larger_than_a_device_is_refused(gpt):
    with pytest.raises(ProblemError, match="memory_reserve_bytes: leaves no memory"):
        Problem.build(gpt(), parse_cluster("8xA100"), {"global_batch": 16}, {"memory_reserve_bytes": 1e11})


def drawn(space: PlanSpace, count: int = 60) -> list:
    rng = np.random.default_rng(0)
    return [space.random(rng) for _ in range(count)]


def stage_of(space: PlanSpace, values, name: str) -> int:
    """Pipeline rank that holds an operator, read off the plan document."""
    plan = space.decode(values)
    order = [op.name for op in space.problem.graph.operators]
    first = [order.index(stage.operators[0]) for stage in plan.stages]
    number = max(i for i, start in enumerate(first) if start <= order.index(name))
    return number % len({stage.devices for stage in plan.stages})


def test_operators_bound_to_stages_are_on_them_in_every_plan(gpt):
    graph = gpt(layers=6)
    space = PlanSpace(problem(graph, [{"scope": "h.1", "stage": 0}, {"scope": "h.2.mlp", "stage": 1}]))
    # Embedding, six layers and head are eight units, three of which stage 0 holds.
    assert {s.pp for s in space.shapes} == {2, 4}
    assert {s.virtual for s in space.shapes} == {1}
    plans = [*drawn(space, 15), *itertools.islice((v for _, v in templates(space)), 0, None, 97)]
    for values in plans:
        assert stage_of(space, values, "h.1.mlp.up/MatMul") == 0
        assert stage_of(space, values, "h.2.mlp.up/MatMul") == 1
        assert space.repair(values) == tuple(values)
        plan = space.decode(values)
        assert space.decode(space.encode(plan)) == plan


def test_cuts_under_constraints_are_all_there(mlp):
    """They are compared with brute force over all cuts of eight units into three or fewer stages."""
    graph = mlp((16,) * 9)
    wanted = [{"scope": "layers.2", "stage": 0}, {"scope": "layers.4", "stage": 1}]
    space = PlanSpace(problem(graph, wanted, "4xA100", 4, num_micro_batches=1, recompute="none", zero=0, tp=1))
    names = [graph.operators[u.start].name for u in space.linkage.blocks.units]
    two, four = names.index("layers.2/MatMul"), names.index("layers.4/MatMul")
    total = 0
    for shape in space.shapes:
        n = shape.num_chunks
        expected = {
            ends
            for ends in itertools.combinations(range(1, len(names)), n - 1)
            if two < ends[0] <= four and (n == 2 or four < ends[1])
        }
        found, pending = set(), [space.meshes.values(shape)]
        while pending:
            prefix = pending.pop()
            if len(prefix) == space.first.recompute:
                found.add(tuple(space.cuts(prefix, n - 1)))
            else:
                pending += [(*prefix, int(v)) for v in np.flatnonzero(space.legal(prefix))]
        assert found == expected
        ways = cut_decades(space, n, None)
        assert 10**ways == pytest.approx(len(expected))
        total += len(expected)
    assert total > 0


def test_operators_bound_to_recomputation_obey_in_every_plan(gpt):
    graph = gpt(layers=4)
    space = PlanSpace(problem(graph, [{"scope": "h.0", "recompute": True}, {"scope": "h.3", "recompute": False}]))
    names = [op.name for op in graph.operators]
    together = apart = 0
    for values in [*drawn(space, 20), *itertools.islice((v for _, v in templates(space)), 0, None, 97)]:
        plan = space.decode(values)
        again = {n for stage in plan.stages for glob in stage.recompute for n in select(glob, _span(stage, names))}
        assert "h.0.mlp.up/MatMul" in again
        if stage_of(space, values, "h.0.mlp.up/MatMul") == stage_of(space, values, "h.3.mlp.up/MatMul"):
            together += 1
        else:
            apart += 1
            assert not any(n.startswith("h.3.") for n in again)
    assert together and apart


def _span(stage, names):
    return names[names.index(stage.operators[0]) : names.index(stage.operators[1]) + 1]


def test_selective_recomputation_satisfies_attention_scopes(gpt):
    graph = gpt()
    space = PlanSpace(problem(graph, [{"scope": "h.*.attn/Softmax", "recompute": True}], trainer="alpa", pp=1))
    names = [op.name for op in graph.operators]
    asked = {name for name in names if name.endswith("attn/Softmax")}
    levels = set()
    for values in drawn(space):
        (stage,) = space.decode(values).stages
        assert asked <= {name for glob in stage.recompute for name in select(glob, names)}
        level = space.levels.levels[values[space.first.recompute]]
        levels.add((level.light, level.heavy))
    assert {(1, 1), (1, 2), (2, 2)} <= levels


def test_modules_are_split_replicated_and_sharded(gpt):
    """A constraint leaves of all placements of the layer those that it names, and takes none of these away."""
    graph = gpt(layers=4)

    def placements(*constraints, axis="tp"):
        space = PlanSpace(problem(graph, list(constraints), pp=1, tp=2))
        return {_placement(space, values, "mlp.up/MatMul", axis) for values in drawn(space, 40)}

    free, replicate = placements(), {"scope": "h.*.mlp.up", "replicate": True}
    assert {"whole", 2} < free
    assert placements({"scope": "h.*.mlp.up", "split": True}) == free - {"whole"}
    assert placements({"scope": "h.*.mlp.up/MatMul", "sharding": {"tp": "S(2)"}}) == {2}
    assert placements(replicate) == {"whole"}
    assert "batch" in placements(replicate, axis="dp")


def _placement(space: PlanSpace, values, ending: str, axis: str):
    """How an operator of a layer is split on an axis: `whole`, `batch` or the dim of its output."""
    tables = space.evaluator.tables
    for kind, unit in enumerate(space.linkage.types):
        for offset, table in enumerate(unit.signatures):
            op = space.operator(kind, offset)
            if op.name.startswith("h.") and op.name.endswith(ending):
                signature = table[space.signatures(values)[int(tables.spans[kind]) + offset, ("dp", "tp").index(axis)]]
                if signature.factor is not None and op.rule.factors[signature.factor].is_batch:
                    return "batch"
                return "whole" if signature.outputs[0] == -1 and signature.factor is None else signature.outputs[0]
    raise AssertionError(ending)


def test_a_split_needs_an_inner_axis(gpt):
    space = PlanSpace(problem(gpt(), [{"scope": "h.*.mlp", "split": True}]))
    assert min(s.tp for s in space.shapes) == 2


@pytest.mark.parametrize("searcher", ["piper", "dapple", "spp", "whale"])
def test_planners_obey_a_split_outside_the_space_too(gpt, searcher):
    """What they divide by samples alone has no axis that could split anything."""
    free = problem(gpt(), [])
    bound = problem(gpt(), [{"scope": "h.*.mlp.up", "split": True}])
    alone = hand_made_plan(Evaluator(free), {"dp": 8})
    assert not verify(free, alone)
    told = [fault for fault in verify(bound, alone) if "hints.constraints[0]" in str(fault)]
    assert told and "h.0.mlp.up" in str(told[0]) and "no axis tp" in str(told[0])
    plan = search(bound, Budget(evaluations=60), searcher=searcher).plan
    assert not verify(bound, plan)
    assert all(dict(stage.mesh).get("tp", 1) > 1 for stage in plan.stages)


def test_environments_obey(gpt):
    space = PlanSpace(problem(gpt(layers=6), [{"scope": "h.1", "stage": 0}, {"scope": "h.2", "stage": 1}]))
    env = HybridEnv(space, BoundTable(space))
    rng = np.random.default_rng(1)
    observation, _ = env.reset(seed=0)
    done = False
    while not done:
        legal = np.flatnonzero(observation["action_mask"])
        observation, _, done, _, info = env.step(int(rng.choice(legal)))
    assert stage_of(space, info["finished"].values, "h.1.mlp.up/MatMul") == 0
    assert stage_of(space, info["finished"].values, "h.2.mlp.up/MatMul") == 1


@pytest.mark.parametrize("wanted", [{"dp": "S(0)", "tp": "S(0)"}, {"dp": "S(0)", "tp": "S(1)"}, {"tp": "B"}])
def test_templates_obey(light_graph, wanted):
    """They do so even if no expert would shard an operator in this way."""
    graph = light_graph("resnet50")
    add = next(op for op in graph if op.kind in ("Add", "Sum"))
    space = PlanSpace(problem(graph, [{"scope": add.name, "sharding": wanted}], "2xA100", pp=1))
    listed = [values for _, values in templates(space)]
    assert any(space.shape(values).tp == 2 for values in listed)
    assert all(space.repair(values) == values for values in listed)


@pytest.mark.slow
def test_a_search_obeys(gpt):
    wanted = [{"scope": "h.2", "stage": 1}, {"scope": "h.1", "stage": 0}, {"scope": "h.0", "recompute": True}]
    asked = problem(gpt(layers=4), wanted)
    plan = search(asked, Budget(evaluations=200), searcher="portfolio", seed=0).plan
    assert len(plan.stages) >= 2
    assert "h.2" not in plan.stages[0].operators[1]
    assert "h.1" not in plan.stages[1].operators[0]
    assert plan.stages[0].recompute == ("**",) or "h.0" in plan.stages[0].recompute


@pytest.mark.parametrize(
    ("constraints", "fix", "field"),
    [
        ([{"scope": "h.0", "stage": -1}], {}, "hints.constraints[0].stage"),
        ([{"scope": "h.0", "stage": 8}], {}, "hints.constraints"),
        ([{"scope": "h.0", "stage": 1}, {"scope": "h.1", "stage": 0}], {}, "hints.constraints"),
        ([{"scope": "h.0.attn", "stage": 0}, {"scope": "h.0.mlp", "stage": 1}], {}, "hints.constraints[1].stage"),
        ([{"scope": "h.0", "split": True}], {"tp": 1}, "hints.fix.tp"),
        ([{"scope": "h.9", "stage": 1}], {}, "hints.constraints[0].scope"),
        ([{"scope": "h.*.mlp.up", "sharding": {"tp": "S(x)"}}], {}, "hints.constraints[0].sharding.tp"),
        ([{"scope": "h.*.mlp.up", "sharding": {"tp": "S(7)"}}], {}, "hints.constraints[0].sharding.tp"),
        ([{"scope": "h.0", "stages": 1}], {}, "hints.constraints[0].stages"),
    ],
)
def test_what_cannot_be_obeyed_is_refused(gpt, constraints, fix, field):
    with pytest.raises(ProblemError) as found:
        PlanSpace(problem(gpt(), constraints, **fix))
    assert found.value.field == field
    assert found.value.repair


def test_the_number_of_plans_follows_what_is_fixed(mlp):
    graph = mlp((16, 32, 16))
    free = PlanSpace(problem(graph, [], "2xA100", 4, pp=1, tp=1, num_micro_batches=2))
    fixed = PlanSpace(problem(graph, [], "2xA100", 4, pp=1, tp=1, num_micro_batches=2, zero=1, recompute="full"))
    assert free.decades - fixed.decades == pytest.approx(math.log10(4 * free.levels.legal(1).sum()))
