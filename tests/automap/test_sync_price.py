"""Sync modes in plan and price: closed forms of time and memory, what is offered, what is refused and by whom."""

import math
from dataclasses import replace

import numpy as np
import pytest
from sync_plans import MODES, plan_of, space_of

from automap.errors import PlanError, ProblemError
from automap.plan import Plan, Sync, Zero, plan_schema
from automap.price.estimate import annotate, price
from automap.price.kernels.collectives import collective_s
from automap.price.kernels.records import ALL_REDUCE
from automap.price.local_sgd import best_sync, evaluate_plan, offers
from automap.space.space import PlanSpace
from automap.space.templates import templates
from automap.verify import Verifier
from ir import zoo


@pytest.fixture(scope="module")
def slow():
    """A space, a plan of four replicas with its choice, and the closed forms that all tests use."""
    space = space_of()
    plan, lowered = plan_of(space)
    row = space.evaluator.evaluate(lowered).ranks[0]
    stage = lowered.layout.stages[0]
    count = space.problem.graph.num_parameters
    all_reduce_s = collective_s(ALL_REDUCE, 4.0, stage.links[0], 4.0 * count)
    bare_s = row["end_s"] - row["sync_s"]
    copy_s = count / stage.hardware.bytes_per_s
    assert all_reduce_s > 2.0 * bare_s
    return space, plan, lowered, bare_s, all_reduce_s, copy_s


def step_s(slow, **sync):
    space, plan, lowered, *_ = slow
    return evaluate_plan(replace(plan, sync=Sync(**sync)), lowered, space.evaluator).step_time_s


def corrected(period, delay):
    return {"kind": "dasgd", "period": period, "delay": delay, "merge": "corrected"}


# -- time ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("period", [1, 2, 3, 64])
def test_local_sgd_spreads_one_averaging_over_its_period(slow, period):
    """With a period of one it is synchronous training that hides nothing, but for copies."""
    *_, bare_s, all_reduce_s, copy_s = slow
    wanted = bare_s + (all_reduce_s + 16.0 * copy_s) / period
    assert step_s(slow, kind="local_sgd", period=period) == pytest.approx(wanted, rel=1e-12)


def test_longer_periods_and_delays_are_never_slower(slow):
    local = [step_s(slow, kind="local_sgd", period=period) for period in range(1, 20)]
    assert local == sorted(local, reverse=True) and local[-1] < local[0]
    for period in (4, 16):
        late = [step_s(slow, **corrected(period, delay)) for delay in range(1, period + 1)]
        assert late == sorted(late, reverse=True)
        assert late[0] < step_s(slow, kind="local_sgd", period=period)


@pytest.mark.parametrize(("merge", "touched"), [("corrected", 32.0), ("mixing", 20.0)])
@pytest.mark.parametrize(("period", "delay"), [(1, 1), (4, 1), (4, 2), (64, 64)])
def test_dasgd_shows_what_the_delay_does_not_hide(slow, period, delay, merge, touched):
    *_, bare_s, all_reduce_s, copy_s = slow
    rest = max(0.0, all_reduce_s - delay * bare_s)
    share = 0.25 if merge == "mixing" else None
    found = step_s(slow, kind="dasgd", period=period, delay=delay, merge=merge, local_share=share)
    assert found == pytest.approx(bare_s + (rest + touched * copy_s) / period, rel=1e-12)


def test_each_pipeline_rank_averages_its_own_and_other_axes_keep_their_reductions():
    space = space_of(cluster="2x4xA100@25Gbit")
    plan, lowered = plan_of(space, pp=2, tp=2, micro=4)
    plain = space.evaluator.evaluate(lowered)
    found = evaluate_plan(replace(plan, sync=Sync(kind="local_sgd", period=5)), lowered, space.evaluator)
    for rank, stage in enumerate(lowered.layout.stages):
        count = plain.ranks[rank]["parameter_bytes"] / 4.0
        more = collective_s(ALL_REDUCE, 2.0, stage.links[0], 4.0 * count) + 16.0 * count / stage.hardware.bytes_per_s
        ends = plain.ranks[rank]["end_s"] - plain.ranks[rank]["sync_s"]
        assert found.ranks[rank]["end_s"] == pytest.approx(ends + found.ranks[rank]["sync_s"] + more / 5.0, rel=1e-12)
        # The embedding is the head as well: both stages still exchange its gradient.
        assert 0.0 < found.ranks[rank]["sync_s"] < plain.ranks[rank]["sync_s"]


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_copies_take_memory(precision):
    space = space_of(precision=precision)
    plan, lowered = plan_of(space)
    count, gradient = space.problem.graph.num_parameters, space.problem.state_bytes[1]
    before = space.evaluator.evaluate(lowered).ranks[0]
    for sync, wanted in (
        (Sync(kind="local_sgd", period=2), max(0.0, 4.0 - gradient)),
        (Sync(kind="dasgd", period=2, delay=1, merge="mixing", local_share=0.5), 4.0),
        (Sync(kind="dasgd", period=2, delay=1, merge="corrected"), 8.0),
    ):
        after = evaluate_plan(replace(plan, sync=sync), lowered, space.evaluator)
        assert after.ranks[0]["buffer_bytes"] - before["buffer_bytes"] == pytest.approx(wanted * count)
        found = annotate(replace(plan, sync=sync), lowered, space.evaluator)
        assert not Verifier(space.problem).violations(found)
        memory = found.estimate.memory_bytes[0]
        wrong = replace(memory, buffers=memory.buffers + 4.0 * count)
        lies = replace(found, estimate=replace(found.estimate, memory_bytes=(wrong,)))
        assert [v.where for v in Verifier(space.problem).violations(lies)] == ["estimate.memory_bytes[0]"]


def test_a_mode_whose_copies_do_not_fit_is_not_chosen(slow):
    space, plan, lowered, *_ = slow
    row = space.evaluator.evaluate(lowered).ranks[0]
    need = row.parameter_bytes + row.gradient_bytes + row.optimizer_bytes + row.activation_bytes + row.buffer_bytes
    capacity = space.problem.cluster.device(0).memory_bytes
    assert best_sync(plan, lowered, space.evaluator).kind == "dasgd"
    hints = replace(space.problem.hints, memory_reserve_bytes=int(capacity - need - 1000))
    training = replace(space.problem.training, memory_confidence=0.5)
    tight = PlanSpace(replace(space.problem, hints=hints, training=training))
    plan, lowered = plan_of(tight)
    assert best_sync(plan, lowered, tight.evaluator).kind == "local_sgd", "in fp32 it averages where gradients were"


# -- what is offered ---------------------------------------------------------------------------------------------------


def test_the_delay_just_hides_the_averaging(slow):
    space, plan, lowered, bare_s, all_reduce_s, copy_s = slow
    found = list(offers(plan, lowered, space.evaluator))
    delay = math.ceil(all_reduce_s / bare_s)
    assert found == [Sync(), Sync(kind="local_sgd", period=64), Sync(**corrected(delay, delay))]
    assert step_s(slow, **corrected(delay, delay)) == pytest.approx(bare_s + 32.0 * copy_s / delay, rel=1e-12)
    assert step_s(slow, **corrected(delay, delay - 1)) > step_s(slow, **corrected(delay, delay))
    brief = PlanSpace(replace(space.problem, training=replace(space.problem.training, sync_period=2)))
    assert list(offers(plan, lowered, brief.evaluator))[2] == Sync(**corrected(2, 2))


def test_only_what_is_allowed_is_offered(slow):
    space, plan, lowered, *_ = slow
    for modes in (("synchronous",), ("synchronous", "local_sgd"), ("dasgd", "synchronous")):
        some = PlanSpace(replace(space.problem, training=replace(space.problem.training, sync_modes=modes)))
        assert {sync.kind for sync in offers(plan, lowered, some.evaluator)} == set(modes)


def test_the_estimate_shows_it(slow):
    space, plan, lowered, *_ = slow
    found = annotate(replace(plan, sync=Sync(**corrected(2, 2))), lowered, space.evaluator)
    parts = dict(found.estimate.breakdown_s)
    exposed = parts.pop("exposed_communication")
    assert sum(parts.values()) + sum(exposed.values()) == pytest.approx(found.estimate.step_time_s, rel=1e-12)
    assert exposed["averaging"] > 0.0 and "gradient_sync" not in exposed
    assert any("the averaging of replicas, every 2 steps" in reason for reason in found.why)
    assert any("the 2 steps of the delay hide" in reason for reason in found.why)
    again = Plan.from_json(found.to_json())
    assert again == found and price(space.problem, again, space.evaluator) == found.estimate
    assert space.encode(plan) is not None and space.encode(found) is None


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"kind": "sometimes"}, "plan.sync.kind"),
        ({"kind": "local_sgd"}, "plan.sync.period"),
        ({"kind": "local_sgd", "period": 0}, "plan.sync.period"),
        ({"kind": "local_sgd", "period": 2.5}, "plan.sync.period"),
        ({"period": 2}, "plan.sync.period"),
        ({"kind": "local_sgd", "period": 2, "delay": 1}, "plan.sync.delay"),
        ({"kind": "dasgd", "period": 2, "delay": 3, "merge": "corrected"}, "plan.sync.delay"),
        ({"kind": "dasgd", "period": 2, "delay": 0, "merge": "corrected"}, "plan.sync.delay"),
        ({"kind": "dasgd", "period": 2, "delay": 1, "merge": "none"}, "plan.sync.merge"),
        ({"kind": "local_sgd", "period": 2, "merge": "corrected"}, "plan.sync.merge"),
        ({"kind": "dasgd", "period": 2, "delay": 1, "merge": "mixing"}, "plan.sync.local_share"),
        ({"kind": "dasgd", "period": 2, "delay": 1, "merge": "mixing", "local_share": 1.0}, "plan.sync.local_share"),
        ({"kind": "dasgd", "period": 2, "delay": 1, "merge": "mixing", "local_share": float("nan")}, "local_share"),
        ({"kind": "dasgd", "period": 2, "delay": 1, "merge": "corrected", "local_share": 0.5}, "local_share"),
        ({"kind": "dasgd", "periods": 2}, "plan.sync.periods"),
    ],
)
def test_a_malformed_mode_names_its_field(slow, document, field):
    with pytest.raises(PlanError) as caught:
        Plan.from_json({**slow[1].to_json(), "sync": document})
    assert field in caught.value.field and caught.value.repair


def test_dasgd_corrects_unless_it_is_told_to_mix():
    assert Sync(kind="dasgd", period=2, delay=1) == Sync(**corrected(2, 1))


def test_the_schema_tells_of_the_modes():
    found = plan_schema()["$defs"]["Sync"]
    assert found["properties"]["kind"]["enum"] == list(MODES)
    assert set(found["properties"]) == {"kind", "period", "delay", "merge", "local_share"}


def test_a_period_of_none_is_no_period():
    with pytest.raises(ProblemError, match=r"training\.sync_period"):
        space_of(sync_period=0)


LOCAL = Sync(kind="local_sgd", period=4)


def both_refuse(space, plan, lowered, what):
    """The price names the reason, and the verifier, which shares no code with it, finds a fault as well."""
    with pytest.raises(PlanError, match=what):
        evaluate_plan(plan, lowered, space.evaluator)
    assert Verifier(space.problem).violations(plan)


def test_what_was_not_allowed_is_refused():
    space = space_of(sync_modes=["synchronous", "local_sgd"], sync_period=4)
    plan, lowered = plan_of(space)
    assert not Verifier(space.problem).violations(replace(plan, sync=LOCAL))
    both_refuse(space, replace(plan, sync=Sync(**corrected(2, 2))), lowered, "was not allowed")
    both_refuse(space, replace(plan, sync=Sync(kind="local_sgd", period=5)), lowered, "longer than the 4 steps")


def test_replicas_must_be_there_and_alike():
    space = space_of()
    plan, lowered = plan_of(space, tp=4)
    both_refuse(space, replace(plan, sync=LOCAL), lowered, "no replicas")
    plan, lowered = plan_of(space, zero=1)
    both_refuse(space, replace(plan, sync=LOCAL), lowered, "under ZeRO")
    assert [s.kind for s in offers(plan, lowered, space.evaluator)] == ["synchronous"]
    other = replace(plan, sync=LOCAL, stages=(replace(plan.stages[0], zero=Zero()),))
    assert not Verifier(space.problem).violations(other)


def test_statistics_of_all_samples_tie_replicas():
    graph = zoo.build("resnet:blocks=1-1-1-1,image_size=32")
    for batch_norm in ("local", "synchronized"):
        space = space_of(graph, batch_norm=batch_norm)
        plan, lowered = plan_of(space)
        plan = replace(plan, sync=LOCAL)
        if batch_norm == "local":
            assert not Verifier(space.problem).violations(annotate(plan, lowered, space.evaluator))
        else:
            both_refuse(space, plan, lowered, "needs an all-reduce among them")


def judged(space, choices):
    """Whether price and verifier take plans whose replicas are apart, apart from what does not fit."""
    check, found = Verifier(space.problem), []
    for plan, lowered in choices:
        plan = replace(plan, sync=LOCAL)  # noqa: PLW2901
        try:
            plan = annotate(plan, lowered, space.evaluator)  # noqa: PLW2901
            priced = True
        except PlanError:
            priced = False
        wrong = [v for v in check.violations(plan) if not v.what.startswith("does not fit")]
        found.append((priced, wrong))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "cluster"),
    [
        ("gpt:layers=2,hidden=64,heads=4,seq_len=32,vocab_size=128", "2x4xA100"),
        ("moe:layers=2,hidden=64,heads=4,kv_heads=4,ffn=128,experts=4,seq_len=32,vocab_size=128", "8xA100"),
        ("t5:layers=1,hidden=64,heads=4,seq_len=32,vocab_size=128", "2x2xA100"),
        ("resnet:blocks=1-1-1-1,image_size=64", "4xV100-16GB+4xP100"),
    ],
)
def test_price_and_verifier_agree_on_which_replicas_can_be_apart(spec, cluster):
    space = space_of(zoo.build(spec), cluster)
    rows = [values for _, values in templates(space)][::17]
    rows += [tuple(row) for row in space.random_batch(np.random.default_rng(0), 20).tolist()]
    zero = [tuple(0 if slot.kind == "zero" else v for slot, v in zip(space.slots, row, strict=True)) for row in rows]
    rows = list(dict.fromkeys(space.repair(row) for row in zero))
    found = judged(space, [(space.decode(row), space.lowered(row)) for row in rows])
    assert not [(row, wrong) for row, (priced, wrong) in zip(rows, found, strict=True) if priced == bool(wrong)]
    assert {priced for priced, _ in found} == {True, False}
