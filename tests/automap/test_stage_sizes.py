"""Stages of unlike size, orders of devices and schedules as decisions: brute force, closed forms, round trips."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from all_plans import every_plan

from automap.bounds.partial_plans import BoundTable, PartialPlans
from automap.cluster import parse_cluster
from automap.errors import PlanError, ProblemError
from automap.plan import Plan
from automap.price.estimate import estimate_lowered, price
from automap.price.lowered_plan import spread
from automap.price.plan_reader import lower_plan
from automap.problem import Problem
from automap.space.encode import values_of
from automap.space.space import PlanSpace
from automap.space.stage_sizes import MAX_UNEVEN_STAGES, part_size, ways_to_fill
from automap.space.templates import templates
from automap.verify import Verifier
from ir import zoo

SLOW = "16x1xV100-16GB@10Gbit"
GPT = "gpt:layers=4,hidden=64,heads=4,seq_len=32,vocab_size=128"
MOE = "moe:layers=4,hidden=64,heads=4,seq_len=32,vocab_size=128,kv_heads=4,ffn=128,experts=4"


def is_uneven(space, values):
    shape = space.shape(values)
    is_decided = any(values[space.first.schedule + 2 : space.first.shares])
    return is_decided or shape.samples % shape.dp > 0 or not space.meshes.is_even(shape)


def shape_of(space, **wanted):
    return next(s for s in space.shapes if all(getattr(s, name) == value for name, value in wanted.items()))


def whole(space, prefix):
    """The plan that takes the first legal value of every slot behind `prefix`."""
    values = tuple(prefix)
    while len(values) < len(space.slots):
        values = (*values, int(np.flatnonzero(space.legal(values))[0]))
    return values


# -- what is offered -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cluster", "part"),
    [("16x1xV100", 1), ("8xV100+8xP100", 1), ("4x8xA100", 2), ("6x8xA100", 4), ("128x8xH100", 64), ("3x3xA100", 1),
     ("17x8xA100", 136), ("2x6xA100+1x4xA100", 1), ("1xA100", 1)],
)  # fmt: skip
def test_parts_are_whole_hosts_or_divide_them(cluster, part):
    assert part_size(parse_cluster(cluster)) == part


def test_samples_are_spread_by_their_largest_share():
    assert (spread(512, 15), spread(512, 16), spread(15, 15), spread(16, 15), spread(1, 1)) == (525, 512, 15, 30, 1)


@pytest.mark.parametrize("splits_batch", [False, True])
def test_ways_to_fill_are_those_of_brute_force(splits_batch):
    cluster = parse_cluster("12xA100")
    inner, middle, samples = [1, 2, 4], [1, 2], [4, 6, 12]
    found = ways_to_fill(cluster, inner, middle, samples, splits_batch=splits_batch)
    for (i, tp), (j, mid), (k, batch) in itertools.product(enumerate(inner), enumerate(middle), enumerate(samples)):
        alone = [
            n for n in range(1, 13)
            if n % (tp * mid) == 0 and n // tp // mid <= batch
            and not (splits_batch and math.ceil(batch / (n // tp // mid)) % mid)
        ]  # fmt: skip
        for stages in range(MAX_UNEVEN_STAGES):
            sums = {sum(sizes) for sizes in itertools.product(alone, repeat=stages)}
            assert set(np.flatnonzero(found[i, j, k, stages]).tolist()) == {n for n in sums if n <= 12}


def test_every_division_of_the_devices_is_offered_once(mlp, space):
    s = space(mlp((16,) * 5), "8xA100", 8, pp=4, num_micro_batches=1, recompute="none", zero=0)
    shape = shape_of(s, tp=1, virtual=1)
    found, pending = [], [(*s.meshes.values(shape), 0, 0)]
    while pending:
        prefix = pending.pop()
        if len(prefix) == s.first.shares:
            found.append(s.stage_devices(prefix))
        else:
            pending += [(*prefix, int(v)) for v in np.flatnonzero(s.legal(prefix))]
    expected = {sizes for sizes in itertools.product(range(1, 9), repeat=4) if sum(sizes) == 8}
    assert len(found) == len(expected)
    assert set(found) == expected


def test_samples_divide_unevenly_only_where_they_cannot_evenly(mlp, space):
    s = space(mlp((56, 56)), "1x7xA100", 64)
    even = [x for x in s.shapes if s.meshes.is_even(x)]
    assert {(x.dp, x.num_micro_batches) for x in even if x.dp > 1} == {(7, 1), (7, 2), (7, 4), (7, 8)}
    assert not any(x.samples % x.dp for x in s.shapes if x not in even)
    assert {x.dp for x in space(mlp((8,) * 9), "13xA100", 121, tp=1).shapes if x.pp > 1} == {2, 3, 4, 11}
    for batch, cluster in ((64, "2x4xA100"), (24, "2x3xA100"), (1024, "4x8xA100")):
        assert not any(x.samples % x.dp for x in space(mlp((48, 48)), cluster, batch).shapes)
    mixed = space(mlp((48, 48)), "6xA100", 8).shapes
    assert {x.dp for x in mixed if x.samples % x.dp} == {3, 6}
    assert all(x.samples >= x.dp for x in mixed)
    fix = {"dp": 7, "num_micro_batches": 1}
    ragged, full = (space(mlp((56, 56)), "1x7xA100", batch, **fix) for batch in (64, 70))
    for (_, mine), (_, same) in zip(templates(ragged), templates(full), strict=True):
        assert ragged.price(np.array([mine]))[0].tolist() == full.price(np.array([same]))[0].tolist()


def test_inner_axes_are_common_and_virtual_stages_even(gpt, space):
    s = space(gpt(layers=8), SLOW, 64)
    for row in s.random_batch(np.random.default_rng(0), 300):
        values = tuple(row.tolist())
        shape, stages = s.shape(values), s.layout(values).stages
        assert {int(stage.axes[-1]) for stage in stages} == {shape.tp}
        assert sum(len(stage.devices) for stage in stages) == 16
        if is_uneven(s, values):
            assert shape.virtual == 1
            assert 1 < shape.pp <= MAX_UNEVEN_STAGES
            assert all(stage.axes[0] <= shape.samples for stage in stages)


@pytest.mark.parametrize("devices", [1, 3, 7, 12, 37, 64, 83, 296, 575])
@pytest.mark.parametrize("batch", [6, 64, 1170])
def test_numbers_of_stages_are_missing_nowhere(mlp, space, devices, batch):
    """Equal stages wherever they divide the devices; else the first has fewer."""
    s = space(mlp((8,) * 40), f"{devices}x1xA100", batch)
    meshes, counts = s.meshes, s.meshes.degrees
    assert [one.stages for one in meshes.divisions if one.stages * one.size == devices] == counts
    for stages, size in meshes.divisions:
        first = devices - (stages - 1) * size
        assert 0 < first <= size
        if first < size:
            fewer, more = max(n for n in counts if n < stages), min(n for n in counts if n > stages)
            assert more > 2 * fewer
    for shape in s.shapes:
        sizes = meshes.sizes(shape)
        assert sum(sizes) == devices
        assert s.stage_devices(meshes.values(shape)) == sizes
        assert meshes.shape(meshes.values(shape)) == shape
        if not meshes.is_even(shape):
            assert shape.samples >= shape.dp and shape.virtual == 1
    # No gap is left that is much wider than that between numbers near which one is looked for.
    offered = sorted({1} | {stages for stages, _ in meshes.divisions if stages <= s.num_units})
    assert all(more <= 3 * fewer for fewer, more in itertools.pairwise(offered) if more <= min(devices, 40) / 2)


def test_a_first_stage_has_fewer_devices(mlp, space):
    s = space(mlp((8,) * 6), "7xA100", 8, pp=4)
    shape = next(one for one in s.shapes if one.dp == 2)
    assert s.meshes.sizes(shape) == (1, 2, 2, 2)
    values = whole(s, s.meshes.values(shape))
    assert s.layout(values).stages[0].devices == (0,)
    assert [stage.devices for stage in s.decode(values).stages] == ["0", "1-2", "3-4", "5-6"]
    equal = space(mlp((8,) * 6), "7xA100", 56, dp=7).meshes.divisions
    assert [one.stages for one in equal] == [1, 7]


def test_inner_axes_stay_inside_hosts_where_equal_stages_share_one(mlp, space):
    """Seven hosts of four: 2 and 4 equal stages share a host, whose four devices are then no inner axis."""
    s = space(mlp((8,) * 8), "7x4xA100", 16)
    offered = {(one.pp, one.tp): s.meshes.sizes(one) for one in s.shapes}
    assert offered[4, 4] == offered[4, 2] == (4, 8, 8, 8) and offered[2, 4] == (12, 16)
    # Equal stages stay where the inner axis lets them be equal, so that each plan is there once.
    assert offered[4, 1] == offered[4, 7] == (7,) * 4 and offered[2, 2] == (14, 14)
    for fixed in (2, 4):
        alone = space(mlp((8,) * 8), "7x4xA100", 16, pp=fixed).shapes
        assert set(alone) == {one for one in s.shapes if one.pp == fixed}
    for values in map(tuple, s.random_batch(np.random.default_rng(0), 200).tolist()):
        again = values_of(s, s.lowered(values))
        assert again is not None and s.shape(again) == s.shape(values)
    assert len(space(mlp((8,) * 8), "7x4xA100", 16, dp=2).meshes.divisions) == 6


@pytest.mark.parametrize(("cluster", "pp", "sizes"), [("8xA100", 3, (2, 3, 3)), ("7xA100", 2, (3, 4))])
def test_a_fixed_number_of_stages_that_does_not_divide_the_devices(mlp, space, cluster, pp, sizes):
    s = space(mlp((8,) * 6), cluster, 12, pp=pp)
    assert {s.meshes.sizes(shape) for shape in s.shapes} == {sizes}
    (found,) = s.random_batch(np.random.default_rng(0), 1)
    assert [len(stage.devices) for stage in s.layout(found.tolist()).stages] == list(sizes)


def test_a_number_of_stages_that_leaves_the_first_one_nothing_is_refused(mlp, space):
    with pytest.raises(ProblemError, match="no pipelines with this number of stages") as caught:
        space(mlp((8,) * 6), "4xA100", 7, pp=3)
    assert caught.value.field == "hints.fix.pp"
    assert caught.value.repair == "Use one of 1, 2, 4."


def test_a_fixed_dp_leaves_no_unlike_stages(mlp, space):
    assert space(mlp((16,) * 4), "8xA100", 8, dp=2).meshes.longest == 0
    assert space(mlp((16,) * 4), "8xA100", 8).meshes.longest == 4


def test_trainers_offer_what_they_can_run(mlp, space):
    def kinds(trainer, **fix):
        return space(mlp(), "4xA100", 8, training={"trainer": trainer}, **fix).schedules

    assert kinds("megatron-lm") == kinds("deepspeed") == ("1f1b",)
    assert kinds("generic") == ("1f1b", "gpipe")
    assert kinds("torchtitan") == ("1f1b", "gpipe", "zb1p", "zb2p")
    assert kinds("torchtitan", schedule="gpipe") == kinds("megatron-lm", schedule="gpipe") == ("gpipe",)
    assert kinds("generic", schedule="interleaved") == ("1f1b",)


def test_one_stage_has_no_order_unless_links_were_measured(mlp):
    document = parse_cluster("4xV100-16GB").to_json()
    matrix = [[50.0 if (a + b) % 2 == 0 else 2.0 for b in range(4)] for a in range(4)]
    for cluster, orders in (("2xV100-16GB+2xP100", 1), ({**document, "bandwidth_GBps": matrix}, 3)):
        s = PlanSpace(Problem.build(mlp((16,) * 4), parse_cluster(cluster), {"global_batch": 8}))
        one = (*s.meshes.values(shape_of(s, pp=1, tp=2)), 0)
        assert s.legal(one).sum() == orders
        assert s.legal((*s.meshes.values(shape_of(s, pp=2)), 0)).sum() == len(s.meshes.orders) > 1


# -- brute force -----------------------------------------------------------------------------------------------------

SMALL = [
    ((8, 8, 8), "2xV100-16GB+2xP100", 6, "automap", {"num_micro_batches": 1, "pp": 2, "recompute": "none", "zero": 1}),
    ((16, 16), "3xV100-16GB+3xP100", 6, "generic", {"num_micro_batches": 1, "recompute": "none", "zero": 2}),
    ((6, 6, 6), "6x1xV100-16GB@10Gbit", 12, "megatron-lm", {"num_micro_batches": 2, "pp": 3, "tp": 1, "zero": 0,
                                                              "recompute": "none"}),
    ((16, 16), "4xA100", 12, "torchtitan", {"pp": 2, "tp": 1, "zero": 3}),
    ((12, 12), "3xA100", 8, "generic", {"recompute": "none", "pp": 1}),
    ((8, 8, 8), "5xV100-16GB", 20, "torchtitan", {"num_micro_batches": 2, "tp": 1, "recompute": "none", "zero": 1}),
    ((8, 8, 8), "2xV100-16GB+3xP100", 20, "generic", {"tp": 1, "num_micro_batches": 1, "recompute": "none", "zero": 2}),
    ((8, 8, 8), "7x2xA100", 84, "megatron-lm", {"tp": 2, "num_micro_batches": 2, "recompute": "none", "zero": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("widths", "cluster", "batch", "trainer", "fix"), SMALL)
def test_counts_prices_and_bounds_of_all_plans(mlp, space, widths, cluster, batch, trainer, fix):
    s = space(mlp(widths), cluster, batch, training={"trainer": trainer}, **fix)
    plans = list(every_plan(s))
    assert len(plans) == len(set(plans))
    assert 10**s.decades == pytest.approx(len(plans))
    assert 0 < sum(is_uneven(s, values) for values in plans) < len(plans)
    prices = s.price(np.array(plans))
    for values, mine in list(zip(plans, prices.tolist(), strict=True))[:: max(1, len(plans) // 200)]:
        outcome = s.evaluator.evaluate(s.lowered(values))
        assert mine == [outcome.step_time_s, outcome.overflow]
    walked = PartialPlans(BoundTable(s), len(plans))
    while not walked.done.all():
        bound = walked.episodes.bound
        assert (bound[:, 0] <= prices[:, 0] * (1 + 1e-12)).all()
        assert (bound[:, 1] <= prices[:, 1] + 1e-12).all()
        actions = np.zeros(len(plans), dtype=np.int64)
        for number in np.flatnonzero(~walked.done):
            slot = walked.episodes.position[number]
            legal = walked.episodes.legal[number, : walked.episodes.offered[number]]
            assert legal.tolist() == np.flatnonzero(s.legal(plans[number][:slot])).tolist()
            actions[number] = np.searchsorted(legal, plans[number][slot])
        walked.step(actions)
    assert walked.episodes.bound.tolist() == prices.tolist()


MIXED = [
    (GPT, SLOW, 64, "generic", {}),
    (GPT, "4xV100-16GB+4xP100", 24, "torchtitan", {}),
    (GPT, "2xV100-16GB+4xP100+2xA100", 48, "deepspeed", {"pp": 2}),
    (GPT, "8xA100", 16, "megatron-lm", {"cp": 2}),
    (MOE, "8xA100", 16, "megatron-core", {}),
    (GPT, "1x7xA100", 64, "generic", {}),
    (GPT, "11x1xV100-16GB@10Gbit", 24, "torchtitan", {}),
    (GPT, "3xV100-16GB+4xP100", 32, "generic", {}),
    (MOE, "7x2xA100", 64, "generic", {}),
    (MOE, "5xA100", 16, "megatron-core", {"pp": 2}),
    (MOE, "2x3xA100@10Gbit", 64, "deepspeed", {}),
    ("t5:layers=2,hidden=64,heads=4,seq_len=32,vocab_size=128", "8xA100", 24, "generic", {"pp": 2}),
    ("resnet:blocks=1-2-1-1,image_size=64", "8xV100-16GB+4xP100", 48, "generic", {}),
    # Convolutions that are whole or split samples, which no number of micro-batches spreads evenly.
    ("vgg:convolutions=2-2-2-2,width=64,ffn=64,image_size=224", "5xA100", 64, "megatron-core", {"dp": 5}),
]


@pytest.mark.parametrize(("spec", "cluster", "batch", "trainer", "fix"), MIXED)
def test_random_plans_are_sound_and_come_back(spec, cluster, batch, trainer, fix):
    training = {"global_batch": batch, "trainer": trainer}
    problem = Problem.build(zoo.build(spec), parse_cluster(cluster), training, {"fix": fix})
    s, check, table = PlanSpace(problem), Verifier(problem), None
    rows = s.random_batch(np.random.default_rng(3), 60)
    rows = np.array([row for row in rows.tolist() if is_uneven(s, row) or row[s.first.schedule + 1]][:15])
    assert len(rows) >= 3
    table = BoundTable(s)
    walked = PartialPlans(table, len(rows))
    for row, mine in zip(rows.tolist(), s.price(rows).tolist(), strict=True):
        values = s.repair(row)
        assert values == tuple(row)
        lowered = s.lowered(values)
        outcome = s.evaluator.evaluate(lowered)
        assert mine == [outcome.step_time_s, outcome.overflow]
        plan = Plan.from_json(s.decode(values).to_json())
        again = s.encode(plan)
        assert again is not None
        # A mode of recomputation that changes nothing on a rank is read as none.
        assert [a for slot, a in zip(s.slots, again, strict=True) if slot.kind != "recompute"] == [
            a for slot, a in zip(s.slots, values, strict=True) if slot.kind != "recompute"
        ]
        assert s.decode(again) == plan
        assert price(problem, plan, s.evaluator).step_time_s == mine[0]
        stated = replace(plan, estimate=estimate_lowered(lowered, s.evaluator))
        assert not [v for v in check.violations(stated) if not v.what.startswith("does not fit")]
    while not walked.done.all():
        actions = np.zeros(len(rows), dtype=np.int64)
        for number in np.flatnonzero(~walked.done):
            legal = walked.episodes.legal[number, : walked.episodes.offered[number]]
            actions[number] = np.searchsorted(legal, rows[number, walked.episodes.position[number]])
        before = walked.episodes.bound.copy()
        walked.step(actions)
        assert (walked.episodes.bound >= before - 1e-12).all()
    assert walked.episodes.bound.tolist() == s.price(rows).tolist()


# -- what unlike stages cost ------------------------------------------------------------------------------------------


def test_a_stage_is_priced_by_its_largest_share(mlp, space):
    """15 replicas with 35 or 34 of 512 samples each cost what 15 with 35 do."""
    s = space(mlp((64, 64, 64)), SLOW, 1024, pp=2, tp=1, num_micro_batches=2, zero=0, recompute="none")
    values = whole(s, (*s.meshes.values(s.shapes[0]), 0, 0, 15))
    lowered = s.lowered(values)
    assert lowered.rank_samples.tolist() == [525.0, 512.0]
    assert [int(stage.axes[0]) for stage in lowered.layout.stages] == [15, 1]
    priced = s.evaluator.evaluate(lowered).ranks
    even = s.evaluator.evaluate(replace(lowered, samples=525, spread_over=())).ranks
    assert priced[0]["compute_s"] == even[0]["compute_s"]
    names = ["optimizer_s", "sync_s", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes"]
    names += ["buffer_bytes", "capacity_bytes"]
    assert [priced[0][name] for name in names] == [even[0][name] for name in names]
    assert priced[1]["compute_s"] < even[1]["compute_s"]


def test_several_that_send_to_one_divide_its_link(mlp, space):
    s = space(mlp((64, 64, 64)), SLOW, 1024, pp=2, tp=1, num_micro_batches=2)
    prefix = s.meshes.values(s.shapes[0])
    rates = {n: s.layout((*prefix, 0, 0, n)).send_bytes_per_s[0] for n in (0, 1, 12, 15)}
    assert rates[1] == rates[0]
    assert rates[12] == rates[0] / 3
    assert rates[15] == rates[0] / 15


def test_cuts_follow_the_speed_of_the_stages(mlp, space):
    s = space(mlp((64,) * 17), SLOW, 64, pp=2, tp=1, num_micro_batches=1)
    prefix = s.meshes.values(shape_of(s, virtual=1))
    weight = s.cumulative_weight / s.cumulative_weight[-1]
    for devices in (0, 2, 12):
        values = (*prefix, 0, 0, devices, 0)
        (end,) = s.cuts((*values, 0), 1)
        assert np.abs(weight[1:-1] - (devices or 8) / 16).min() == pytest.approx(abs(weight[end] - (devices or 8) / 16))
    mixed = space(mlp((64,) * 17), "4xV100-16GB+4xP100", 64, pp=2, tp=1, num_micro_batches=1)
    values = mixed.meshes.values(shape_of(mixed, virtual=1))
    fast, slow = (stage.speed for stage in mixed.layout((*values, 0, 0, 0)).stages)
    assert fast == 4.0
    assert slow < 2.0
    assert mixed.cut_shares((*values, 0, 0, 0, 0))[0] == (fast + slow) / fast
    assert mixed.cut_shares((*values, 0, 1, 0, 0))[0] == (fast + slow) / slow
    # Six devices, two of them slow: each at its own speed where shares are in proportion, else all like the slowest.
    assert mixed.cut_shares((*values, 0, 0, 6, 0))[0] == (6 * slow / 4 + 2 * slow / 4) / (6 * slow / 4)
    assert mixed.cut_shares((*values, 0, 0, 6, 1))[0] == pytest.approx((fast + slow) / (fast + slow / 2))


def test_dapple_plans_of_vgg_can_be_had():
    """15:1 on sixteen hosts with one GPU each, where the last stage holds most of the parameters and little work."""
    problem = Problem.build(zoo.build("vgg19"), parse_cluster(SLOW), {"global_batch": 2048})
    s = PlanSpace(problem)
    found = {values[s.first.schedule + 2]: values for _, values in templates(s) if s.shape(values).pp == 2}
    assert {15, 14, 1, 0} <= set(found)
    rows = np.array([values for _, values in templates(s)])
    prices = s.price(rows)
    step = np.where(prices[:, 1] <= 0.0, prices[:, 0], np.inf)
    uneven = np.array([is_uneven(s, row) for row in rows.tolist()])
    assert step[uneven].min() < 0.9 * step[~uneven].min()
    plan = s.decode(found[15])
    assert [stage.devices for stage in plan.stages] == ["0-14", "15"]
    assert [stage.mesh for stage in plan.stages] == [(("dp", 15),), (("dp", 1),)]


# -- documents --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uneven():
    """A space and a plan of it with stages of 5 and 3 devices."""
    problem = Problem.build(zoo.build(GPT), parse_cluster("8xA100"), {"global_batch": 32, "trainer": "generic"})
    s = PlanSpace(problem)
    prefix = s.even_values(
        shape_of(s, pp=2, tp=1, num_micro_batches=2, virtual=1), recompute="none", zero=1, stages=(1, 0, 5)
    )
    return s, s.decode(whole(s, prefix))


def test_a_document_says_who_does_what(uneven):
    s, plan = uneven
    assert plan.schedule.kind == "gpipe"
    assert [stage.devices for stage in plan.stages] == ["0-4", "5-7"]
    assert all(stage.batch_axes[0] == "dp" and stage.zero.axes == ("dp",) for stage in plan.stages)
    lowered = lower_plan(plan, s.evaluator, s.axes)
    assert lowered.rank_samples.tolist() == [20.0, 18.0]
    shares = replace(plan, stages=(replace(plan.stages[0], batch_shares=(4, 3, 3, 3, 3)), plan.stages[1]))
    assert lower_plan(shares, s.evaluator, s.axes).rank_samples.tolist() == [20.0, 18.0]


def with_shares(plan, shares):
    return replace(plan, stages=(replace(plan.stages[0], batch_shares=shares), *plan.stages[1:]))


def test_shares_of_alike_devices_cost_what_the_largest_does(uneven):
    s, plan = uneven
    lowered = lower_plan(with_shares(plan, (6, 4, 2, 2, 2)), s.evaluator, s.axes)
    assert lowered.rank_samples.tolist() == [30.0, 18.0]
    assert s.decode(s.encode(plan)) == plan
    assert s.encode(with_shares(plan, (6, 4, 2, 2, 2))) is None


def test_plans_outside_the_space_have_no_values(uneven):
    s, plan = uneven
    first, second = plan.stages
    swapped = (replace(first, devices="3-7"), replace(second, devices="0-2"))
    assert s.encode(plan) is not None
    assert s.encode(replace(plan, stages=swapped)) is None
    assert s.encode(replace(plan, schedule=replace(plan.schedule, kind="zb1p"))) is None


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda plan: replace(plan, num_micro_batches=8, samples_per_micro_batch=4), "plan.stages[0].batch_axes"),
        (lambda plan: with_shares(plan, (5, 5, 2, 2, 3)), "plan.stages[0].batch_shares"),
        (lambda plan: with_shares(plan, (8, 8)), "plan.stages[0].batch_shares"),
        (lambda plan: with_shares(plan, (6, 6, 2, 2, 0)), "plan.stages[0].batch_shares"),
        (lambda plan: with_shares(plan, ()), "plan.stages[0].batch_shares"),
    ],
)  # fmt: skip
def test_shares_that_cannot_be_priced_are_refused(uneven, change, field):
    s, plan = uneven
    with pytest.raises(PlanError) as caught:
        price(s.problem, change(plan), s.evaluator)
    assert caught.value.field == field
    assert caught.value.repair


@pytest.mark.parametrize("pp", [2, 4])
def test_constraints_hold_on_all_meshes(pp):
    """What is asked of an operator must divide on the meshes of all stages, else nothing is asked."""
    constraints = [{"scope": "h.*.mlp.c_fc/MatMul", "sharding": {"dp": "S(2)"}}]
    hints = {"fix": {"pp": pp, "tp": 1}, "constraints": constraints}
    problem = Problem.build(zoo.build(GPT), parse_cluster("8xA100"), {"global_batch": 32}, hints)
    s, check = PlanSpace(problem), Verifier(problem)
    for row in s.random_batch(np.random.default_rng(1), 12).tolist():
        plan = replace(s.decode(row), estimate=estimate_lowered(s.lowered(row), s.evaluator))
        assert not [v for v in check.violations(plan) if not v.what.startswith("does not fit")]
