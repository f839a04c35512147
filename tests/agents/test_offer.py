"""The plan that leaves: within the tie of the fastest, plainer than it, on no more devices than are of use."""

import json
from dataclasses import replace

import numpy as np
import pytest

from agents import Budget, search, search_offer
from agents.learning.problems import generate
from agents.portfolio import choice
from agents.portfolio.any_trainer import set_aside
from agents.portfolio.baseline_comparison import with_baseline
from agents.portfolio.certificate import certify
from agents.portfolio.offer import _with_bound_of_parts
from agents.portfolio.parts import divided, parts_to_search, shares_of
from agents.results.cluster_parts import clusters_within, filled_within
from agents.results.fewer_devices import check_hints, on_all, promising
from agents.results.infeasibility_advice import fastest_template_s
from agents.results.plainest import Plainness, in_order, plain, plainest, plainness, simplified
from automap.bounds.partial_plans import BoundTable
from automap.cluster import parse_cluster
from automap.errors import NothingFits, ProblemError
from automap.export.baseline import read_baseline
from automap.group_links import group_link
from automap.hints import Fix
from automap.plan import Plan, parse_devices
from automap.price.estimate import error_band, price
from automap.price.evaluator import Evaluator
from automap.price.stage_layout import PipelineLayouts
from automap.problem import Problem
from automap.space import stepping
from automap.space import templates as template_list
from automap.space.space import PlanSpace
from automap.space.templates import templates
from automap.verify import Verifier, verify
from ir import zoo
from ir.build import GraphBuilder

GPT = "gpt:layers=2,hidden=256,heads=4,vocab_size=512,seq_len=128"
RESNET = "resnet:blocks=1-1-1-1,image_size=64"
WHO = ("expert", "mcmc")
PROBLEMS = [(GPT, "1x4xA100-80GB", 32), (GPT, "2x2xV100-16GB@10Gbit", 8), (RESNET, "2x4xV100-16GB@25Gbit", 64)]


def build(spec, cluster, batch, **hints):
    return Problem.build(zoo.build(spec), parse_cluster(cluster), {"global_batch": batch}, hints)


def step_s(plan):
    return plan.estimate.step_time_s


def part_to_search(parts):
    """The part of a small search."""
    return next(iter(parts_to_search(parts, Budget(evaluations=100))), None)


def reported(problem, budget):
    """Reports of a search, with the best plan so far of each."""
    seen = []

    def note(progress):
        if progress.best is not None:
            seen.append((progress, progress.best(0)))

    search_offer(problem, budget, searchers=["expert"], on_progress=note)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "cluster", "batch"), PROBLEMS)
def test_the_returned_plan_ties_with_the_fastest(spec, cluster, batch):
    problem = build(spec, cluster, batch)
    budget, who = Budget.parse(200), ("mcmc",)
    exact, tied = (search_offer(problem, budget, searchers=who, seed=1, tie=tie).plan for tie in (0.0, 0.1))
    fastest_s = tied.search.fastest_s or step_s(tied)
    assert step_s(tied) <= fastest_s * (1.0 + 0.1 * error_band(problem))
    assert step_s(exact) <= fastest_s * (1.0 + 1e-9)
    assert exact.search.fastest_s is None or exact.search.fastest_s >= step_s(exact) * (1.0 - 1e-9)
    assert (tied.search.fastest_s is None) == (not any("plainer" in line for line in tied.why))
    for plan in (exact, tied):
        assert not verify(problem, plan)
        assert price(problem, Plan.from_json(json.loads(json.dumps(plan.to_json())))) == plan.estimate
        assert plan.estimate.lower_bound_s <= plan.search.lower_bound_s <= fastest_s
    if not promising(problem):
        assert step_s(exact) == pytest.approx(step_s(search(problem, budget, searcher="mcmc", seed=1).plan), rel=1e-9)


def test_a_template_is_returned_before_other_plans_on_as_many_devices():
    space = PlanSpace(build(GPT, "1x4xA100-80GB", 32, fix={"dp": 4}))
    listed = np.array([values for _, values in templates(space)])
    prices = space.price(listed)
    fits = prices[:, 1] <= 0.0
    best_s = prices[fits, 0].min()
    rows = space.random_batch(np.random.default_rng(0), 400)
    found = space.price(rows)
    at = int(np.where(found[:, 1] <= 0.0, found[:, 0], np.inf).argmin())
    best = tuple(rows[at].tolist()), "random"
    offer = plainest(space, best, [], max(best_s * 1.001, found[at, 0]), Verifier(space.problem))
    assert offer.found_by == "expert"
    (stage,) = offer.plan.stages
    assert (stage.mesh, stage.shardings, stage.zero.stage, stage.recompute) == ((("dp", 4),), {}, 0, ())
    alone = plainest(space, best, [], 0.0, Verifier(space.problem))
    assert alone.found_by == "random" and step_s(alone.plan) <= found[at, 0] * (1.0 + 1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_decisions_go_back_to_what_is_ordinary_within_the_limit(seed):
    space = PlanSpace(build(RESNET, "2x2xV100-16GB@25Gbit", 32, fix={"pp": 1, "num_micro_batches": 1}))
    rng = np.random.default_rng(seed)
    rows = space.random_batch(rng, 200)
    prices = space.price(rows)
    values = tuple(rows[int(np.where(prices[:, 1] <= 0.0, prices[:, 0], np.inf).argmin())].tolist())
    before_s = float(space.price(np.array([values]))[0, 0])
    ranks = []
    for limit_s in (before_s, 1.1 * before_s, 10.0 * before_s):
        other = simplified(space, values, limit_s)
        found_s, overflow = space.price(np.array([other]))[0]
        assert overflow <= 0.0 and found_s <= limit_s * (1.0 + 1e-12)
        assert space.repair(other) == other
        simple = plain(space.lowered(other), space.evaluator, limit_s)
        simple_s = space.evaluator.evaluate(simple).step_time_s
        ranks.append(plainness(simple, space.evaluator, simple_s, is_template=False))
    given = plainness(space.lowered(values), space.evaluator, before_s, is_template=False)
    assert ranks[0].num_unusual <= given.num_unusual
    assert ranks[2].kind <= ranks[0].kind
    # Whatever it costs, nothing out of the ordinary is left.
    assert (ranks[2].num_axes, ranks[2].num_unusual) <= (1, 0)


def rank(devices=8, template=True, axes=1, unusual=0, step_s=1.0, repeats=False):
    return Plainness(repeats, devices, not template, axes, unusual, step_s)


def plainest_of(*ranks, near_s=0.01):
    return in_order(ranks, lambda one: one, near_s)[0]


def test_half_the_devices_come_before_whatever_is_plain_about_a_plan():
    few = rank(devices=32, template=False, axes=3, unusual=5, step_s=1.02)
    assert plainest_of(rank(devices=64), few) == few
    assert plainest_of(rank(devices=1, repeats=True), few) == few
    # One device of seven is worth less than an axis, a third of the tie at most, and more than ZeRO.
    all_seven = rank(devices=7, unusual=1)
    assert plainest_of(all_seven, rank(devices=6, axes=2)) == all_seven
    assert plainest_of(all_seven, rank(devices=6, unusual=2, step_s=1.02)) == all_seven
    six = rank(devices=6, unusual=2, step_s=1.009)
    assert plainest_of(all_seven, six) == six
    template = rank(axes=2, step_s=1.02)
    assert plainest_of(rank(template=False), template) == template


def test_details_cost_a_third_of_a_tie_at_most():
    """Of plans of one kind, whatever they are, the chosen one is within a third of the tie of the fastest."""
    exact, near, far = rank(unusual=4), rank(unusual=2, step_s=1.009), rank(unusual=0, step_s=1.03)
    assert plainest_of(exact, near, far) == near
    assert plainest_of(exact, far) == exact
    # Another kind is worth the whole tie, and then its own fastest plans count.
    one_axis = rank(axes=1, unusual=9, step_s=1.03)
    assert plainest_of(rank(axes=2), rank(axes=2, unusual=3, step_s=0.999), one_axis) == one_axis
    rng = np.random.default_rng(0)
    for _ in range(200):
        some = [
            rank(axes=int(a), unusual=int(u), step_s=1.0 + float(s)) for a, u, s in rng.random((9, 3)) * (3, 6, 0.03)
        ]
        found = plainest_of(*some)
        alike = [one for one in some if one.kind == found.kind]
        assert found.kind == min(one.kind for one in some)
        fastest_s = min(one.step_s for one in alike)
        assert found.step_s <= fastest_s + 0.01
        # Ties are no chain: none that is as near to the fastest is plainer.
        assert not [o for o in alike if o.num_unusual < found.num_unusual and o.step_s <= fastest_s + 0.01]


def test_ties_out_of_bounds_are_refused():
    problem = build(GPT, "1x2xA100-80GB", 8)
    for tie in (-0.1, 1.1, float("nan")):
        with pytest.raises(ProblemError) as caught:
            search_offer(problem, Budget.parse(5), tie=tie)
        assert caught.value.field == "tie"


@pytest.mark.parametrize(
    ("budget", "searchers", "repair"),
    [
        ("30s", ["expert"], "Budget.parse('30s')"),
        (Budget(), ["expert"], "Budget.parse('30s')"),
        (Budget.parse(5), "expert", 'Write ["expert"].'),
    ],
)
def test_what_is_no_budget_and_no_list_is_refused_with_a_repair(budget, searchers, repair):
    with pytest.raises(ProblemError) as caught:
        search_offer(build(GPT, "1x2xA100-80GB", 8), budget, searchers=searchers)
    assert repair in caught.value.repair


# -- parts of a cluster ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cluster", "batch", "names"),
    [
        ("4x2xV100-16GB", 8, {"2x2": range(4), "1x2": range(2), "1x1": range(1)}),
        ("1x2xV100-16GB+3x2xV100-16GB", 8, {"2x2": range(4), "1x2": range(2), "1x1": range(1)}),
        ("1x7xA100-80GB", 64, {"1x6": range(6), "1x4": range(4), "1x1": range(1)}),
        ("1x12xA100-80GB", 24, {f"1x{n}x": range(n) for n in (8, 6, 4, 3, 2, 1)}),
        ("23x1xT4-16GB@10Gbit", 64, {f"{n}x1": range(n) for n in (22, 21, 20, 16, 1)}),
        ("2xV100-16GB+2xP100", 4, {"1x2xV100": range(2), "1x1xV100": range(1), "1x2xP100": range(2, 4),
                                   "1x1xP100": range(2, 3)}),
    ],
)  # fmt: skip
def test_parts_are_whole_hosts_or_devices_of_one(cluster, batch, names):
    found = {part.name: devices for part, devices in clusters_within(parse_cluster(cluster), batch)}
    assert len(found) == len(names)
    for start, devices in names.items():
        assert [d for name, d in found.items() if name.startswith(start)] == [tuple(devices)]
    for part, devices in clusters_within(parse_cluster(cluster), batch):
        assert part.num_devices == len(devices)
        assert parse_cluster(json.loads(json.dumps(part.to_json()))) == part


@pytest.mark.parametrize("cluster", ["2x8xV100-32GB@10Gbit", "4x6xA100-80GB", "2x4xP100+8xV100-16GB@25Gbit"])
def test_all_links_of_a_part_are_those_of_its_devices_in_the_whole_cluster(cluster):
    """This holds for groups, and for pipelines of single devices in every order that crosses hosts."""
    whole = parse_cluster(cluster)
    model = zoo.build(GPT)
    layouts = PipelineLayouts(Problem.build(model, whole, {"global_batch": 64}))
    rng = np.random.default_rng(0)
    seen = 0
    for fixed in (5, 6, 7, 10):
        for part, devices in filled_within(whole, 64, Fix(pp=fixed)):
            own = PipelineLayouts(Problem.build(model, part, {"global_batch": 64}))
            for size in {2, 3, part.num_devices} & set(range(2, part.num_devices + 1)):
                ranks = rng.permutation(part.num_devices)[:size]
                there = np.array(devices)[ranks]
                assert group_link(part, ranks.tolist()) == group_link(whole, there.tolist())
                halves = [(side[: size // 2], side[size // 2 : size // 2 * 2]) for side in (ranks, there)]
                found = [
                    some.sends.of((some.pattern(one), some.pattern(other)), one, other)
                    for some, (one, other) in zip((own, layouts), halves, strict=True)
                ]
                assert found[0] == pytest.approx(found[1], rel=1e-12)
                seen += len(part.hosts) > 1
    assert seen > 4


@pytest.mark.parametrize(("inside_GBps", "sizes"), [(300.0, set()), (20.0, {1, 2})])
def test_equally_many_devices_of_every_host_are_parts_where_the_links_inside_are_slow(inside_GBps, sizes):  # noqa: N803
    cluster = parse_cluster("3x4xA100-80GB@200Gbit")
    (node,) = cluster.nodes
    slow = replace(cluster.links[node.intra_node_link], bandwidth_GBps=inside_GBps)
    cluster = replace(cluster, links={**cluster.links, node.intra_node_link: slow})
    spread = {
        devices: part
        for part, devices in clusters_within(cluster, 24)
        if {cluster.node_of[device] for device in devices} == {0, 1, 2}
    }
    assert set(spread) == {tuple(4 * host + one for host in range(3) for one in range(size)) for size in sizes}
    for devices, part in spread.items():
        (own,) = part.nodes
        assert (own.count, own.num_devices, own.idle_devices) == (3, len(devices) // 3, 4 - len(devices) // 3)
        assert own.nics_per_device == node.nics_per_device


def test_parts_are_all_hosts_of_some_kinds():
    cluster = parse_cluster("4xA100-40GB+8xV100-16GB+16xT4+2xA100-40GB")
    found = [(part, devices) for part, devices in clusters_within(cluster, 256) if len(part.nodes) > 1]
    assert {tuple(part.devices): devices for part, devices in found} == {
        ("A100-40GB",): (*range(4), 28, 29),
        ("A100-40GB", "V100-16GB"): (*range(12), 28, 29),
        ("A100-40GB", "T4-16GB"): (*range(4), *range(12, 30)),
        ("V100-16GB", "T4-16GB"): tuple(range(4, 28)),
    }
    assert all(part.device(number).name == cluster.device(device).name for part, devices in found
               for number, device in enumerate(devices))  # fmt: skip
    # Of five kinds the fastest ones.
    five = parse_cluster("1xH100+1xA100-40GB+1xV100-16GB+1xP100+1xT4")
    assert sorted(len(part.nodes) for part, _ in clusters_within(five, 8) if len(part.nodes) > 1) == [2, 3, 4]


def test_experts_may_leave_devices_idle_that_do_not_divide_them():
    # Eight experts are spread over four of six devices, or over two.
    model = "moe:layers=4,hidden=512,heads=8,ffn=1024,experts=8,seq_len=256,vocab_size=4096"
    part = part_to_search(promising(build(model, "6xA100", 12)))
    assert part is not None and part.devices == tuple(range(4))


@pytest.mark.parametrize("slow", range(4))
def test_whichever_device_has_slow_links_it_is_left_idle(slow):
    matrix = np.full((4, 4), 100.0)
    matrix[slow] = matrix[:, slow] = 0.01
    cluster = parse_cluster({**parse_cluster("4xA100").to_json(), "bandwidth_GBps": matrix.tolist()})
    model = zoo.build("gpt:layers=2,hidden=1024,heads=16,seq_len=512,vocab_size=512")
    part = part_to_search(promising(Problem.build(model, cluster, {"global_batch": 24})))
    assert part is not None and {*part.devices} == {*range(4)} - {slow}
    assert min(min(filter(None, row)) for row in part.problem.cluster.bandwidth_GBps) == 100.0


@pytest.mark.slow
def test_a_slow_kind_of_devices_is_left_idle():
    problem = build("gpt2", "8xH100+8xA100-80GB+8xV100-16GB", 48)
    part = part_to_search(promising(problem))
    assert part is not None and part.devices == tuple(range(16)) and part.template_s < part.reference_s


def test_a_prime_number_of_devices_leaves_one_idle():
    # Stages of equal size and inner axes need divisors, which 11 has not.
    found = part_to_search(promising(build("vgg16", "11x1xP100-16GB@10Gbit", 96)))
    assert found is not None and found.devices == tuple(range(10))
    assert found.template_s is not None and found.template_s < 0.5 * found.reference_s
    # The search there has half of the budget, and a quarter where templates are no faster.
    assert shares_of((found,)) == (0.5,) and shares_of((replace(found, template_s=found.reference_s),)) == (0.25,)
    assert shares_of(()) == ()


def test_a_search_with_time_for_it_looks_at_three_parts():
    parts = promising(build("vgg16", "11x1xP100-16GB@10Gbit", 96))
    small, large = (parts_to_search(parts, Budget(evaluations=n)) for n in (255, 256))
    assert len(small) == 1 and len(large) == 3 and large[0] == small[0]
    assert [part.template_s for part in large] == sorted(part.template_s for part in parts)[:3]
    assert (
        len(parts_to_search(parts, Budget(seconds=3.9))) == 1 and len(parts_to_search(parts, Budget(seconds=4.0))) == 3
    )
    for count in (1, 2, 3):
        shares = shares_of(large[:count])
        assert shares == (0.5, 0.1, 0.1)[:count]
        amounts = [budget.evaluations for budget in divided(Budget(evaluations=1000), 0.0, shares)]
        assert sum(amounts) == 1000 and len(amounts) == 1 + count
        seconds = [budget.seconds for budget in divided(Budget(seconds=10.0), 1.0, shares)]
        assert sum(seconds) == pytest.approx(9.0)
    # No share is lost to a search of nothing.
    assert divided(Budget(evaluations=3), 0.0, (0.25,)) == (Budget(evaluations=3),)


def test_what_a_searcher_reached_is_also_what_it_reached_on_a_part():
    # 11 devices are no good: the search on 10 of them finds the plan.
    result = search_offer(build("vgg16", "11x1xP100-16GB@10Gbit", 96), Budget.parse(60), searchers=WHO, tie=0.0)
    found = result.plan.search
    assert len({d for stage in result.plan.stages for d in parse_devices(stage.devices)}) < 11
    assert min(s for s in found.searchers.values() if s is not None) == pytest.approx(step_s(result.plan))
    assert set(WHO) == set(found.searchers) >= set(found.history)
    for name, moments in found.history.items():
        assert found.searchers[name] == moments[-1][1]


@pytest.mark.slow
@pytest.mark.long
def test_a_faster_part_is_searched_long_enough():
    gpt = "gpt:layers=12,hidden=1024,heads=16,seq_len=1024"
    result = search_offer(build(gpt, "23x1xT4-16GB@10Gbit", 64), Budget.parse(4000), tie=0.0)
    used = [d for stage in result.plan.stages for d in parse_devices(stage.devices)]
    # The plan takes 508 ms.
    assert len(set(used)) == 22 and step_s(result.plan) < 0.515


@pytest.mark.slow
def test_a_part_may_win_whose_template_is_not_the_fastest():
    problem = build("t5-3b", "15x1xA100@120Gbit", 48)
    parts = promising(problem)
    assert [len(part.devices) for part in parts[:2]] == [14, 12]
    result = search_offer(problem, Budget.parse(400))
    used = {d for stage in result.plan.stages for d in parse_devices(stage.devices)}
    # With 14 alone, and all 15, it ended with 470 ms.
    assert len(used) == 12 and step_s(result.plan) < 0.445
    assert result.evaluations == result.plan.search.evaluations
    assert result.record.lower_bound_s <= step_s(result.plan)


def test_degrees_of_a_plan_with_idle_devices_may_be_fixed():
    # No plan on all four devices has these degrees, and none on three has a dp of 2.
    problem = build(GPT, "2x2xV100-16GB@10Gbit", 8, fix={"dp": 2, "tp": 1, "pp": 1, "zero": 1})
    result, seen = search_offer(problem, Budget.parse(20), searchers=["expert"]), reported(problem, Budget.parse(20))
    assert seen
    for plan in (result.plan, *result.unlike(2), *(plan for _, plan in seen)):
        assert [stage.devices for stage in plan.stages] == ["0-1"]
        assert plan.cluster == problem.cluster.to_json()
        assert not verify(problem, plan)
    assert certify(problem, result.plan, 0.1).search.lower_bound_s <= step_s(result.plan)
    with pytest.raises(ProblemError, match="no plan on 4 devices"):
        search_offer(build(GPT, "2x2xV100-16GB@10Gbit", 9, fix={"dp": 2, "tp": 1, "pp": 1, "num_micro_batches": 9}),
                     Budget.parse(20))  # fmt: skip


def test_the_plans_of_all_devices_are_made_once(monkeypatch):
    """For thousands of devices, making them takes a second, as long as the shortest searches take."""
    compiled, listed = [], []
    compile_one, list_one = stepping.compile_space, template_list._made
    monkeypatch.setattr(stepping, "compile_space", lambda space: [compiled.append(space), compile_one(space)][1])
    monkeypatch.setattr(template_list, "_made", lambda space: [listed.append(space), list_one(space)][1])
    problem = build(GPT, "1x4xA100-80GB", 32)
    search_offer(problem, Budget.parse(60), searchers=["expert"])
    whole = [space for space in compiled if space.problem is problem]
    assert len(whole) == 1 and listed.count(whole[0]) == 1
    assert [*templates(whole[0])] == [*list_one(whole[0])]


@pytest.mark.parametrize(
    ("cluster", "batch", "fix", "used"),
    [
        ("7xA100-80GB", 24, {"dp": 6}, range(6)),
        ("2x8xA100-80GB", 24, {"dp": 3, "tp": 4}, range(12)),
        ("2x8xA100-80GB", 24, {"tp": 3, "pp": 1, "dp": 4}, None),
        ("3xV100-16GB+4xP100", 24, {"dp": 5, "pp": 1}, range(5)),
        ("5xV100-16GB", 24, {"dp": 2, "pp": 2}, range(4)),
    ],
)
def test_degrees_that_do_not_divide_the_devices_leave_some_idle(cluster, batch, fix, used):
    problem = build(GPT.replace("heads=4", "heads=12").replace("256", "384"), cluster, batch, fix=fix)
    check_hints(problem)
    plan = search_offer(problem, Budget.parse(40), searchers=["expert"]).plan
    devices = [d for stage in plan.stages for d in parse_devices(stage.devices)]
    assert used is None or sorted(devices) == [*used]
    idle = problem.cluster.num_devices - len({*devices})
    (told,) = [text for text in plan.warnings if text.startswith("hints.fix, ")]
    assert f"leaves {idle} of {problem.cluster.num_devices} devices idle" in told
    assert not verify(problem, plan)
    assert {axis: size for stage in plan.stages for axis, size in stage.mesh if axis in fix} == {
        axis: size for axis, size in fix.items() if axis != "pp" and size > 1
    }
    if "tp" in fix and used is None:
        # Its ranks are on one host: 15 devices are more than 12, but two hosts share three of them.
        assert {problem.cluster.node_of[d] for d in devices[: fix["tp"]]} == {0}


def test_a_plan_with_idle_devices_is_compared_at_its_own_price():
    """Four devices of each host share links to the network that seven have: alone they would be faster."""
    problem = build("gpt2", "2x7xA100-80GB@10Gbit", 56, fix={"dp": 2, "tp": 4})
    result = search_offer(problem, Budget.parse(40), searchers=["expert"], tie=0.0)
    assert len(parse_devices(result.plan.stages[0].devices)) == 8
    expert_s = result.plan.search.baselines.get("expert", step_s(result.plan))
    assert expert_s == pytest.approx(step_s(result.plan))


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "used"), [(13, 1), (16, 4), (5, 5)])
def test_a_target_without_plans_on_all_devices_leaves_some_idle(batch, used):
    """Accelerate gives equally many samples to all ranks, and splits three heads in three at most."""
    graph = zoo.build("gpt:layers=4,hidden=1536,heads=3,seq_len=1024,vocab_size=512")
    problem = Problem.build(graph, "7xA100-80GB", {"global_batch": batch, "target": "accelerate"}, {"fix": {"tp": 1}})
    free = replace(problem, hints=replace(problem.hints, fix=Fix()))
    for asked in (problem, free):
        check_hints(asked)
        plan = search_offer(asked, Budget.parse(60), searchers=["expert"]).plan
        assert not verify(asked, plan)
        devices = {d for stage in plan.stages for d in parse_devices(stage.devices)}
        assert len(devices) == used if asked is problem else len(devices) < 7
        (told,) = [text for text in plan.warnings if f"leaves {7 - len(devices)} of 7 devices idle" in text]
        assert "the target accelerate" in told and told.startswith("hints.fix") == (asked is problem)
        assert price(asked, Plan.from_json(json.loads(json.dumps(plan.to_json())))) == plan.estimate


@pytest.mark.slow
def test_a_fixed_zero_stage_asks_for_replicas_where_a_target_leaves_devices_idle():
    problem = Problem.build(
        zoo.build(GPT), "3x8xA100-80GB", {"global_batch": 7, "target": "accelerate"}, {"fix": {"zero": 3}}
    )
    plan = search_offer(problem, Budget.parse(60), searchers=["expert"]).plan
    assert [(stage.devices, stage.mesh, stage.zero.stage) for stage in plan.stages] == [("0-6", (("dp", 7),), 3)]
    with pytest.raises(ProblemError, match="accelerate"):
        search_offer(replace(problem, cluster=parse_cluster("6xA100-80GB")), Budget.parse(60), searchers=["expert"])


@pytest.mark.slow
def test_a_part_without_plans_is_not_searched():
    """Of 61 samples 61 replicas take one each; no other number of hosts or of devices in one divides them."""
    problem = Problem.build(zoo.build(RESNET), "13x8xA100-80GB", {"global_batch": 61, "target": "accelerate"})
    for stops in (False, True):  # also where no time is left to price templates
        parts = promising(problem, lambda: stops)  # noqa: B023
        assert {len(part.devices) for part in parts} == {1, 61}
    plan = search_offer(problem, Budget.parse(20), searchers=["expert"]).plan
    (told,) = [text for text in plan.warnings if "idle" in text]
    idle = 104 - len({device for stage in plan.stages for device in parse_devices(stage.devices)})
    assert told.startswith(f"the target accelerate leaves {idle} of 104 devices")
    with pytest.raises(ProblemError, match="transformers"):
        search_offer(
            Problem.build(zoo.build(RESNET), "7xA100", {"global_batch": 13, "target": "megatron-core"}),
            Budget.parse(20),
        )


MEASURED = {
    "schema": "automap.cluster/1",
    "name": "measured",
    "nodes": [
        {"device": "V100-16GB", "count": 2, "num_devices": 3, "nics": 1}
        | {"intra_node_link": "nvlink2", "inter_node_link": "ethernet-10"}
    ],
    "bandwidth_GBps": [[20.0 + a + b if a // 3 == b // 3 else 0.01 for b in range(6)] for a in range(6)],
}


@pytest.mark.parametrize(
    ("cluster", "fix"),
    [
        ("2x7xA100-80GB@10Gbit", {"dp": 2, "tp": 4, "pp": 1}),
        ("3x5xA100-80GB", {"dp": 3, "tp": 4, "pp": 1}),
        ("2x8xV100-16GB", {"dp": 12, "pp": 1}),
        ("3x8xA100-80GB@25Gbit", {"dp": 22, "pp": 1}),
        ("2x4xV100-16GB@10Gbit", {}),
        ("4xA100-40GB+2x4xP100@10Gbit", {}),
        (MEASURED, {}),
    ],
)
def test_devices_of_a_part_share_their_hosts_links_as_beside_idle_ones(cluster, fix):
    """So a plan takes as long on the part as it does with the other devices idle, and for the same reasons."""
    problem = build("gpt2", cluster, 132, fix=fix)
    evaluator = Evaluator(problem)
    parts = promising(problem)
    assert parts
    for part in parts:
        alone = search(part.problem, Budget.parse(20), searcher="expert").plan
        lifted = on_all(alone, part, problem, evaluator)
        assert not verify(problem, lifted)
        assert step_s(lifted) == pytest.approx(step_s(alone), rel=1e-12)
        assert lifted.why == alone.why


def test_of_a_part_whose_plainest_plan_is_refused_the_fastest_is_offered(monkeypatch):
    """The plan of a part is checked among all devices: what the hints forbid there is not offered."""
    problem = build(RESNET, "4x2xV100-16GB@10Gbit", 32)
    free = search_offer(problem, Budget.parse(240), searchers=WHO, tie=1.0).plan
    assert len(parse_devices(free.stages[0].devices)) < 8
    lift, refused = choice.on_all, []

    def on_all_but(plan, part, problem, evaluator):
        lifted = lift(plan, part, problem, evaluator)
        if lifted is not None and lifted.stages == free.stages:
            return refused.append(lifted)
        return lifted

    monkeypatch.setattr(choice, "on_all", on_all_but)
    found = search_offer(problem, Budget.parse(240), searchers=WHO, tie=1.0)
    assert refused and found.plan.stages != free.stages
    assert not verify(problem, found.plan)
    assert price(problem, Plan.from_json(json.loads(json.dumps(found.plan.to_json())))) == found.plan.estimate


def test_a_bound_of_a_part_holds_for_the_parts_that_were_not_searched():
    problem = build(GPT, "2x2xV100-16GB@10Gbit", 12, fix={"dp": 3, "tp": 1, "pp": 1})
    (part, *_) = promising(problem)
    found = search(part.problem, Budget.parse(20), searcher="expert")
    proof = replace(found.record, proven=True, lower_bound_s=found.step_time_s)
    found = replace(found, plan=replace(found.plan, search=proof), proven=True)
    other = replace(part, devices=(0, 1, 3), bound_s=0.5 * found.step_time_s)
    for parts, proven, bound_s in (
        ((part,), True, found.step_time_s),
        ((part, replace(other, devices=(0, 1))), True, found.step_time_s),
        ((part, other), False, other.bound_s),
        ((part, replace(other, bound_s=2.0 * found.step_time_s)), True, found.step_time_s),
    ):
        seen = _with_bound_of_parts(found, part, parts)
        assert (seen.proven, seen.record.proven, seen.record.lower_bound_s) == (proven, proven, bound_s)


def test_degrees_whose_plans_need_too_much_memory_say_so():
    problem = build("llama-7b", "7xT4", 12, fix={"dp": 3, "pp": 1})
    with pytest.raises(NothingFits) as caught:
        search_offer(problem, Budget.parse(20), searchers=["expert"])
    assert caught.value.changes and caught.value.repair


def test_degrees_that_fit_nowhere_are_refused():
    with pytest.raises(ProblemError, match=r"hints.fix.dp: needs 8 devices, and there are 7 .*cluster of 8"):
        build(GPT, "7xA100-80GB", 24, fix={"dp": 8})
    with pytest.raises(ProblemError, match=r"hints.fix: need 12 devices, and.*got dp 3 x tp 4.*cluster of 12"):
        build(GPT, "7xA100-80GB", 24, fix={"dp": 3, "tp": 4})
    nowhere = build(GPT, "7xA100-80GB", 4, fix={"dp": 5})
    for refuse in (check_hints, lambda problem: search_offer(problem, Budget.parse(20), searchers=["expert"])):
        with pytest.raises(ProblemError) as caught:
            refuse(nowhere)
        assert caught.value.field == "hints.fix" and caught.value.repair


def test_parts_that_degrees_fill_are_the_largest_of_each_kind():
    def names(text, **fix):
        return {part.name for part, _ in filled_within(parse_cluster(text), 8, Fix(**fix))}

    assert names("2x8xA100", dp=3, tp=4) == {"1x8xA100-80GB+1x4xA100-80GB"}
    assert names("3x7xA100", dp=2) >= {"2x7xA100-80GB", "1x6xA100-80GB", "3x6xA100-80GB", "2x7xA100-80GB+1x6xA100-80GB"}
    assert names("4x8xA100", dp=12, tp=1, pp=1) >= {"4x3xA100-80GB", "1x8xA100-80GB+1x4xA100-80GB"}
    assert names("3x4xA100", tp=4, dp=2) == {"2x4xA100-80GB"}
    assert names("4xP100+8xH100", dp=9) == {"1x1xP100-16GB+1x8xH100-80GB"}
    for part, devices in filled_within(parse_cluster("4xP100+8xH100"), 8, Fix(dp=9)):
        assert devices == (0, *range(4, 12)) and part.num_devices == 9


def test_while_a_part_is_searched_the_best_plan_is_one_of_all_devices():
    problem = build(RESNET, "4x2xV100-16GB@10Gbit", 64)
    seen = reported(problem, Budget.parse(40))
    assert {plan.stages[0].devices for _, plan in seen} >= {"0-7", "0-1"}
    for progress, plan in seen:
        assert plan.cluster == problem.cluster.to_json()
        assert step_s(plan) == pytest.approx(progress.best_step_time_s)


def test_a_search_that_is_stopped_early_has_the_template_of_a_part():
    """On a network of 1 Gbit/s one host is far faster than two; the user stops the search on all devices."""
    problem = build("gpt:layers=4,hidden=512,heads=8,vocab_size=4096,seq_len=256", "2x4xA100@1Gbit", 32)
    best = promising(problem)[0]
    seen = []
    found = search_offer(problem, Budget(evaluations=2000), on_progress=seen.append, should_stop=lambda: bool(seen))
    assert step_s(found.plan) <= best.template_s < 0.1 * best.reference_s
    assert not verify(problem, found.plan)
    assert step_s(found.plan) <= found.plan.search.baselines["expert"]
    assert found.evaluations < 1000


@pytest.mark.slow
def test_a_slow_network_leaves_hosts_idle():
    problem = build(RESNET, "4x2xV100-16GB@10Gbit", 32)
    parts = promising(problem)
    assert part_to_search(parts) == parts[0]
    result = search_offer(problem, Budget.parse(240), searchers=WHO)
    plan = result.plan
    used = tuple(d for stage in plan.stages for d in parse_devices(stage.devices))
    assert used in {part.devices for part in parts}
    alone = search(parts[0].problem, Budget.parse(120), searcher="mcmc").plan
    assert step_s(plan) <= step_s(alone) * (1.0 + 0.1 * error_band(problem))
    assert result.evaluations == plan.search.evaluations
    assert plan.search.baselines["expert"] == min(part.template_s for part in parts if part.template_s)
    lifted = on_all(alone, parts[0], problem, PlanSpace(problem).evaluator)
    assert step_s(lifted) == step_s(alone)
    assert lifted.estimate.mfu == alone.estimate.mfu
    others = result.unlike(3)
    assert others[0] is plan and len({(p.stages[0].devices, p.stages[0].mesh) for p in others}) > 1
    assert all(not verify(problem, replace(p, search=None)) for p in others)


@pytest.mark.slow
def test_what_searchers_have_reached_never_gets_worse():
    """This holds too if a part of the cluster, whose plans are slower, is searched after the whole."""
    seen = []
    problem = build(GPT, "2xV100-16GB+2xP100-16GB", 8)
    found = search_offer(problem, Budget(evaluations=60), on_progress=lambda progress: seen.append(progress.members))
    reached = {}
    for members in seen:
        for name, one in members.items():
            before = reached.get(name)
            if before is not None:
                assert one.evaluations >= before.evaluations
                assert (one.best_step_time_s or np.inf) <= (before.best_step_time_s or np.inf)
            reached[name] = one
        assert reached.keys() == members.keys()
    assert min(one.best_step_time_s or np.inf for one in reached.values()) <= found.step_time_s * (1 + 1e-9)


def test_parts_that_cannot_be_as_fast_are_left_alone():
    assert not promising(build("gpt2", "1x4xA100-80GB", 256))
    assert not promising(build(GPT, "1x1xA100-80GB", 4))
    fixed = build(RESNET, "4x2xV100-16GB@10Gbit", 32, fix={"dp": 8})
    assert not promising(fixed)
    assert {stage.devices for stage in search_offer(fixed, Budget.parse(50), searchers=("mcmc",)).plan.stages} == {
        "0-7"
    }


def test_a_fixed_zero_stage_keeps_replicas_on_the_part():
    found = [promising(build(GPT, "2x4xV100-16GB@10Gbit", 8, fix=fix)) for fix in ({"tp": 2}, {"tp": 2, "zero": 1})]
    devices = [{len(part.devices) for part in parts} for parts in found]
    assert devices == [{2, 4}, {4}]


@pytest.mark.slow
def test_gradients_are_reduced_in_two_levels_from_every_seed():
    problem = build("resnet50", "2x4xV100-16GB@25Gbit", 512, fix={"pp": 1})
    plans = [search_offer(problem, Budget.parse(40), searchers=WHO, seed=seed).plan for seed in range(3)]
    (mesh,) = {stage.mesh for plan in plans for stage in plan.stages}
    assert mesh == (("dp", 2), ("tp", 4))
    assert all(stage.batch_axes == ("dp", "tp") for plan in plans for stage in plan.stages)
    assert all(step_s(plan) < plan.search.baselines["dp"] for plan in plans)


@pytest.mark.slow
def test_bert_large_behind_a_slow_link_stays_on_one_host():
    problem = build("bert-large", "2x8xV100-16GB@10Gbit", 64)
    plan = search_offer(problem, Budget.parse(300), seed=0).plan
    assert {stage.devices for stage in plan.stages} == {"0-7"}
    alone = search(build("bert-large", "1x8xV100-16GB@10Gbit", 64), Budget.parse(75), searcher="expert").plan
    assert step_s(plan) <= step_s(alone) * (1.0 + 0.1 * error_band(problem))


def test_what_the_user_runs_today_is_where_the_search_begins_and_what_it_is_compared_with():
    today = {"file": "args.sh", "text": "--tensor-model-parallel-size 4 --bf16 --recompute-granularity full"}
    problem = build(GPT, "1x4xA100-80GB", 32, baseline=today)
    plan = search_offer(problem, Budget.parse(60), searchers=("random",), seed=1).plan
    record = plan.search.yours
    assert record.name == "args.sh" and record.shortage is None
    assert plan.search.baselines["yours"] == record.step_time_s >= step_s(plan)
    saved_s = sum(change.saved_s for change in record.changes)
    assert saved_s == pytest.approx(record.step_time_s - step_s(plan), rel=1e-6)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))).search.yours == record


def test_degrees_that_leave_devices_idle_go_beside_what_the_user_runs_today():
    today = {"file": "args.sh", "text": "--tensor-model-parallel-size 2 --bf16"}
    problem = build(GPT, "1x4xA100-80GB", 32, baseline=today, fix={"dp": 3, "tp": 1, "pp": 1})
    plan = search_offer(problem, Budget.parse(60), searchers=("expert",)).plan
    assert {stage.devices for stage in plan.stages} == {"0-2"}
    record = plan.search.yours
    assert record.name == "args.sh" and plan.search.baselines["yours"] == record.step_time_s
    saved_s = sum(change.saved_s for change in record.changes)
    assert saved_s == pytest.approx(record.step_time_s - step_s(plan), rel=1e-6)
    assert any("leaves 1 of 4 devices" in text for text in plan.warnings)
    # It is kept where it has these degrees and is faster.
    fixes = ({"dp": 3, "tp": 1, "pp": 1, "recompute": mode} for mode in ("none", "full"))
    fast, slow = (search_offer(build(GPT, "1x4xA100-80GB", 32, fix=f), Budget.parse(60)).plan for f in fixes)
    evaluator = Evaluator(build(GPT, "1x4xA100-80GB", 32, baseline=fast.to_json(), fix={"dp": 3, "tp": 1, "pp": 1}))
    kept = with_baseline(slow, read_baseline(evaluator), evaluator)
    assert step_s(kept) == pytest.approx(step_s(fast)) and step_s(kept) < step_s(slow)
    assert kept.search.found_by == "yours" and kept.search.yours.changes == ()


@pytest.mark.slow
def test_a_plan_that_nothing_beats_is_kept():
    where = ("bert-large", "2x4xV100-16GB@25Gbit", 64)
    best = search_offer(build(*where), Budget.parse(400), searchers=("elimination",), tie=0.0).plan
    plan = search_offer(build(*where, baseline=best.to_json()), Budget.parse(5), searchers=("expert",), tie=0.0).plan
    assert step_s(plan) == pytest.approx(step_s(best), rel=1e-9)
    assert step_s(plan) < plan.search.history["expert"][-1][1]
    assert plan.search.found_by == "yours" and plan.search.yours.changes == ()
    # Where the target cannot express it, it is not.
    best = search_offer(build(GPT, "1x4xA100-80GB", 32), Budget.parse(400), searchers=("elimination",), tie=0.0).plan
    odd = build(GPT, "1x4xA100-80GB", 32, baseline=best.to_json(), fix={"tp": 4})
    assert search_offer(odd, Budget.parse(5), searchers=("expert",)).plan.search.found_by == "expert"


@pytest.mark.slow
def test_a_target_says_what_it_costs():
    graph = zoo.build("gpt:layers=4,hidden=1024,heads=16,vocab_size=1024,seq_len=256")
    training = {"global_batch": 64, "trainer": "torchtitan"}
    problems = [
        Problem.build(graph, parse_cluster("2x4xV100-16GB@25Gbit"), {**training, "target": target})
        for target in ("torchtitan", "any")
    ]
    plan = search_offer(problems[0], Budget.parse(200), seed=1).plan
    assert not verify(problems[0], plan)
    cost, fastest_s = plan.search.any_trainer, plan.search.fastest_s or step_s(plan)
    assert cost.step_time_s < 0.99 * fastest_s
    assert cost.beyond and all("torchtitan" in what for what in cost.beyond)
    # It is the time of a plan: where nothing is asked of it, one as fast is found.
    free = search_offer(problems[1], Budget.parse(400), seed=1, tie=0.0).plan
    assert free.search.any_trainer is None
    assert step_s(free) <= cost.step_time_s * 1.02


def test_a_budget_is_shared_with_the_search_without_the_target():
    def problem(target):
        training = {"global_batch": 8, "target": target}
        return Problem.build(zoo.build(GPT), parse_cluster("1x4xA100-80GB"), training)

    for budget in (Budget.parse(1000), Budget.parse(30_000), Budget.parse("30s"), Budget.parse("300s")):
        assert set_aside(budget, problem("any")) == (budget, None)
        own, aside = set_aside(budget, problem("automap"))
        for name in ("evaluations", "seconds"):
            if getattr(budget, name) is not None:
                assert getattr(own, name) + getattr(aside, name) == getattr(budget, name)
                assert getattr(aside, name) <= 0.1 * getattr(budget, name)
    assert set_aside(Budget.parse(5), problem("automap")) == (Budget.parse(5), None)


def recommender(**training):
    """A recommender whose places in its tables are columns of one input: 22 GB of tables on devices of 24 GB."""
    builder = GraphBuilder()
    builder.input("dense", (1, 13))
    builder.input("places", (1, 3), dtype="int64")
    builder.parameter("bottom", (13, 64))
    builder.add("MatMul", ["dense", "bottom"], ["x"])
    parts = ["x"]
    for i in range(3):
        builder.parameter(f"table{i}", (28_000_000, 64))
        builder.add("Gather", ["places"], [f"place{i}"], attributes={"axis": 1, "indices": i})
        builder.add("Gather", [f"table{i}", f"place{i}"], [f"row{i}"], attributes={"axis": 0})
        parts.append(f"row{i}")
    builder.add("Concat", parts, ["all"], attributes={"axis": 1})
    builder.parameter("top", (256, 8))
    builder.add("MatMul", ["all", "top"], ["y"])
    training = {"global_batch": 64, "optimizer": "sgd", **training}
    return Problem.build(builder.finish(["y"]), "4xRTX4090", training)


def test_tables_larger_than_a_device_are_divided() -> None:
    problem = recommender()
    plan = search_offer(problem, Budget(evaluations=64), searchers=("expert",)).plan
    assert not verify(problem, plan)
    assert plan.estimate is not None
    assert max(memory.total for memory in plan.estimate.memory_bytes) < 24 * 2**30


def test_where_only_the_target_keeps_plans_out_that_is_said() -> None:
    with pytest.raises(NothingFits) as fault:
        search_offer(recommender(target="pytorch"), Budget(evaluations=8), searchers=("expert",))
    assert ("training.target", "any") in [(change["field"], change["value"]) for change in fault.value.changes]


def test_a_part_on_which_nothing_fits_is_named_as_a_part_of_the_users_cluster():
    """The fixed degrees fill two devices of each host, so that the part's devices 2 and 3 are the cluster's 3 and 4."""
    fix = {"dp": 1, "tp": 2, "pp": 2}
    problem = Problem.build(zoo.build("llama-70b"), "2x3xA100-40GB", {"global_batch": 16}, {"fix": fix})
    with pytest.raises(NothingFits) as caught:
        search_offer(problem, Budget(evaluations=8), searchers=("expert",))
    fault, nearest = caught.value, Plan.from_json(caught.value.nearest)
    assert (fault.value, nearest.cluster) == (problem.cluster.name, problem.cluster.to_json())
    assert "devices 0-1, which have" in fault.message or "devices 3-4, which have" in fault.message
    assert "it leaves 2 of the 6 devices idle" in fault.message
    assert nearest.estimate is not None
    for parts in (nearest.stages, nearest.estimate.memory_bytes):
        assert {device for part in parts for device in parse_devices(part.devices)} == {0, 1, 3, 4}


@pytest.mark.slow
def test_parts_are_searched_where_no_template_fits_on_all_devices():
    """Each of 13 layers of 3 billion parameters needs two A100-40GB. On 35 devices no number of stages gives two to
    each layer; on 30 devices 15 stages do, with the embedding and the head."""
    problem = generate(100_215).problem
    assert fastest_template_s(problem) is None
    whole = search(problem, Budget(evaluations=300))
    found = search_offer(problem, Budget(evaluations=1000))
    assert found.step_time_s < 0.5 * whole.step_time_s
    assert len({device for stage in found.plan.stages for device in parse_devices(stage.devices)}) == 30


def test_a_part_is_searched_where_nothing_fits_on_all_devices():
    """Of the same model, templates alone find nothing on all devices. The bound holds for plans on these, too."""
    problem, seen = generate(100_215).problem, []
    budget = Budget(evaluations=1000)
    with pytest.raises(NothingFits):
        search(problem, budget, searcher="expert")
    found = search_offer(problem, budget, searchers=("expert",), on_progress=lambda one: seen.append(one.fraction))
    assert len({device for stage in found.plan.stages for device in parse_devices(stage.devices)}) < 35
    assert any("idle" in warning for warning in found.plan.warnings) and not found.proven
    assert found.record.lower_bound_s <= BoundTable(PlanSpace(problem)).first.time_s
    assert seen == sorted(seen)
