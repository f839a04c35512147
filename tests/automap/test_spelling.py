"""One spelling of a layout: against the price, the verifier, and the way there and back through documents."""

from dataclasses import replace

import numpy as np
import pytest

from automap.cluster import parse_cluster
from automap.price.estimate import annotate, price
from automap.price.lowered_plan import same_lowered
from automap.price.plan_reader import lower_plan
from automap.price.plan_writer import to_plan
from automap.price.stage_reader import default_signatures
from automap.problem import Problem
from automap.space.simplified_axes import canonical, merges, num_unlike, repeats, role, sizes, without_idle
from automap.space.space import PlanSpace
from automap.space.templates import templates
from automap.verify import Verifier
from ir import zoo

GPT = "gpt:layers=2,hidden=64,heads=4,vocab_size=128,seq_len=32"
PROBLEMS = [
    (GPT, "2x4xA100-80GB", 32),
    ("resnet:blocks=1-1,image_size=32", "2x2xV100-16GB@10Gbit", 16),
    (GPT, "2xV100-16GB+4xP100-16GB", 24),
    ("moe:layers=2,hidden=32,heads=4,kv_heads=4,ffn=64,experts=4,seq_len=32,vocab_size=64", "1x8xA100-80GB", 16),
]


def build(spec, cluster, batch, **fix):
    return PlanSpace(Problem.build(zoo.build(spec), parse_cluster(cluster), {"global_batch": batch}, {"fix": fix}))


def illegal(check, lowered, evaluator):
    """Faults of a plan but that it does not fit."""
    plan = annotate(to_plan(lowered, evaluator), lowered, evaluator)
    return [v for v in check.violations(plan) if not v.what.startswith("does not fit")]


def with_idle(space, values, axis):
    """A plan with nothing split over an axis."""
    lowered, evaluator = space.lowered(values), space.evaluator
    chunks = []
    for segments in lowered.chunks:
        mine = []
        for segment in segments:
            unit_type = space.linkage.blocks.units[segment.unit].type
            chosen = segment.chosen.copy()
            chosen[:, axis] = [default_signatures(evaluator, unit_type, k)[0] for k in range(len(chosen))]
            mine.append(replace(segment, chosen=chosen))
        chunks.append(tuple(mine))
    return replace(lowered, chunks=tuple(chunks))


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "cluster", "batch"), PROBLEMS)
def test_respelling_twice_changes_nothing_and_no_plan_costs_more(spec, cluster, batch):
    space = build(spec, cluster, batch)
    evaluator, check = space.evaluator, Verifier(space.problem)
    rows = space.random_batch(np.random.default_rng(5), 40).tolist()
    rows += [values for _, values in list(templates(space))[:: max(1, len(list(templates(space))) // 40)]]
    num_respelled = 0
    for values in rows:
        lowered = space.lowered(values)
        once = canonical(lowered, evaluator)
        assert same_lowered(canonical(once, evaluator), once)
        before, after = (evaluator.evaluate(c) for c in (lowered, once))
        assert after.step_time_s <= before.step_time_s * (1.0 + 1e-8)
        if (sizes(once) > 1).sum() == (sizes(lowered) > 1).sum():
            assert after.step_time_s == pytest.approx(before.step_time_s, rel=1e-9)
        num_respelled += not same_lowered(once, lowered)
        others = [once] if not same_lowered(once, lowered) else []
        for other in (*others, *merges(lowered, evaluator), *without_idle(lowered, evaluator)):
            assert not illegal(check, other, evaluator)
            assert same_lowered(lower_plan(to_plan(other, evaluator), evaluator, space.axes), other)
    assert num_respelled


def test_pure_data_parallelism_has_one_axis_that_is_called_dp():
    """This holds on one host for any mesh it was found on; reductions in two levels over slow links stay."""
    space = build(GPT, "1x8xA100-80GB", 32)
    whole = space.lowered(next(v for shape, v in templates(space) if shape.dp == 8))
    found = set()
    for shape in space.shapes:
        if shape.pp == 1 and shape.num_micro_batches == 1:
            values = list(space.even_values(shape, recompute="none", zero=0))
            for slot in space.slots[space.first.signature :]:
                leader = space.linkage.types[slot.unit_type].groups[slot.group].leader
                values.append(default_signatures(space.evaluator, slot.unit_type, leader)[1])
            once = canonical(space.lowered(values), space.evaluator)
            found.add(to_plan(once, space.evaluator).stages[0].mesh)
            assert space.encode(to_plan(once, space.evaluator)) is not None
    assert found == {to_plan(whole, space.evaluator).stages[0].mesh} == {(("dp", 8),)}
    slow = build("resnet:blocks=1-1,image_size=32", "2x2xV100-16GB@10Gbit", 16)
    two_levels = [
        slow.lowered(v)
        for shape, v in templates(slow)
        if shape.dp == shape.tp == 2 and role(slow.lowered(v), slow.evaluator, 1) == "batch"
    ]
    kept = [c for c in two_levels if (sizes(canonical(c, slow.evaluator)) > 1).sum() == 2]
    assert kept
    for lowered in kept:
        for merged in merges(lowered, slow.evaluator, same_zero=True):
            costs = [slow.evaluator.evaluate(c).step_time_s for c in (lowered, merged)]
            assert costs[0] < costs[1]


def test_what_is_repeated_is_the_same_on_fewer_devices():
    space = build(GPT, "2x4xA100-80GB@25Gbit", 32, pp=1)
    evaluator, check = space.evaluator, Verifier(space.problem)
    one_host = build(GPT, "1x4xA100-80GB", 32, pp=1)
    shape = next(s for s in space.shapes if (s.dp, s.tp, s.num_micro_batches) == (2, 4, 1))
    values = next(v for s, v in templates(space) if s == shape and v[space.first.zero] == 0)
    lowered = with_idle(space, values, 0)
    assert role(lowered, evaluator, 0) == "idle" and repeats(lowered, evaluator)
    (alone,) = without_idle(lowered, evaluator)
    assert not repeats(alone, evaluator)
    plan = to_plan(alone, evaluator)
    assert [stage.devices for stage in plan.stages] == ["0-3"]
    assert not illegal(check, alone, evaluator)
    assert same_lowered(lower_plan(plan, evaluator, space.axes), alone)
    assert evaluator.evaluate(alone).step_time_s <= evaluator.evaluate(lowered).step_time_s
    there = replace(plan, cluster=one_host.problem.cluster.to_json())
    mine, same = price(space.problem, plan, evaluator), price(one_host.problem, there, one_host.evaluator)
    assert replace(mine, lower_bound_s=0.0) == replace(same, lower_bound_s=0.0)
    assert annotate(plan, alone, evaluator).launch.startswith("torchrun --standalone --nproc-per-node=4 ")


def test_one_stage_may_leave_devices_idle():
    space = build(GPT, "1x8xA100-80GB", 32, pp=2, dp=1)
    evaluator, check = space.evaluator, Verifier(space.problem)
    values = next(v for s, v in templates(space) if s.num_micro_batches == 4)
    lowered = space.lowered(values)
    assert not repeats(lowered, evaluator)
    last = with_idle(space, values, 1)
    lowered = replace(lowered, chunks=(lowered.chunks[0], last.chunks[1]))
    (alone,) = without_idle(lowered, evaluator)
    assert [stage.devices for stage in alone.layout.stages] == [(0, 1, 2, 3), (4,)]
    faults = illegal(check, alone, evaluator)
    assert all("hints.fix" in fault.what for fault in faults)
    assert same_lowered(lower_plan(to_plan(alone, evaluator), evaluator, space.axes), alone)


def test_unlike_operators_are_counted():
    space = build(GPT, "1x4xA100-80GB", 32, pp=1)
    plain = space.lowered(next(v for shape, v in templates(space) if shape.dp == 4))
    assert num_unlike(plain, space.evaluator) == 0
    megatron = space.lowered(next(v for shape, v in templates(space) if shape.tp == 4))
    assert num_unlike(megatron, space.evaluator) > 5
