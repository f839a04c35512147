"""Division of pipelines: unlike stages in long pipelines, which the plan space does not have."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from long_cases import long_but
from small_clusters import cluster_with

from agents import Budget, search
from agents.incumbent import Incumbent, Outside
from agents.learning.problems import generate
from agents.planners import divided_settings, division_effort
from agents.planners.division_effort import Effort
from agents.planners.moved_stages import moved
from agents.planners.pipeline_division import LEAST_EVALUATIONS, MOVED_S, NEAR, SHARE, divide_pipelines, divide_quickly
from agents.planners.piper import piper_partitions
from agents.planners.solved_strategies import with_solved
from agents.planners.stage_strategies import Strategy, megatron_strategies
from agents.planners.stage_table import StageTable
from agents.planners.staged_plan import StageChoice, StagedPlan, fastest_staged, lower_staged
from agents.planners.template_improvement import improve_templates
from agents.sampling.expert import Grid, grid_of, price_grid
from automap.cluster import parse_cluster
from automap.plan import Plan
from automap.price.estimate import price
from automap.price.plan_writer import to_plan
from automap.problem import Problem
from automap.space.space import PlanSpace
from automap.verify import Verifier
from ir import zoo
from ir.profile_import import load_profile

MODEL = "bert:layers=8,hidden=1024,heads=16,seq_len=128,vocab_size=8192"
"""Ten units."""
SMALL_VOCABULARY = "bert:layers=8,hidden=1024,heads=16,seq_len=128,vocab_size=512"
"""The same with an embedding so small that stages exchange next to nothing of it."""
ONE_ORDER = {"fix": {"schedule": "1f1b", "zero": 0}}


def opened(evaluations=4_000, hints=None, devices=6, **training):
    """The incumbent and its plans before pipelines are divided."""
    cluster = parse_cluster(f"{devices}x1xV100@10Gbit")
    space = PlanSpace(Problem.build(zoo.build(MODEL), cluster, {"global_batch": 128, **training}, hints))
    incumbent = Incumbent(space, Budget(evaluations=evaluations), searcher="expert")
    grid = price_grid(incumbent)
    return incumbent, grid.joined(improve_templates(incumbent, grid).plans())


@pytest.mark.slow
@pytest.mark.parametrize("hints", [None, ONE_ORDER])
def test_a_long_pipeline_of_unlike_stages_is_the_best_plan(hints):
    incumbent, grid = opened(hints=hints, devices=8)
    before_s, charged = incumbent.best_s, incumbent.charged
    left, reached = incumbent.left, dict(incumbent.reached)
    divide_pipelines(incumbent, grid)
    assert incumbent.charged - charged <= SHARE * left + 1
    # What is found counts for the planners whose programs found it, and not for earlier searchers.
    assert {name: incumbent.reached[name] for name in reached} == reached and "piper" in incumbent.reached
    result = incumbent.result(seed=0)
    plan, problem = result.plan, incumbent.space.problem
    assert result.step_time_s < 0.995 * before_s
    name = plan.search.found_by
    assert plan.search.searchers[name] == result.step_time_s
    if hints is None:
        assert name in ("dapple", "piper", "spp") and plan.schedule.kind in ("eager-1f1b", "explicit")
    else:
        assert name == "piper" and plan.schedule.kind == "1f1b" and "spp" not in plan.search.searchers
    sizes = Counter(dict(stage.mesh).get("dp", 1) for stage in plan.stages)
    assert len(plan.stages) > 3 and len(sizes) > 1
    assert not Verifier(problem).violations(plan)
    again = price(problem, Plan.from_json(plan.to_json()))
    assert again.step_time_s == pytest.approx(result.step_time_s, rel=1e-9)
    if hints is not None:
        assert result.step_time_s == incumbent.least_s
        return
    # Behind it come the best plans of the space; dividing may have found the best of these too.
    assert before_s >= incumbent.best_s
    first, *others = result.unlike(3)
    assert first == plan and len(others) == 2
    assert others[0].estimate.step_time_s == incumbent.best_s
    assert all(one.schedule.kind != "explicit" and len(one.stages) <= 8 for one in others)
    assert all(incumbent.space.encode(one) is not None for one in others)


@pytest.mark.slow
def test_a_budget_in_evaluations_limits_the_entries_of_tables(monkeypatch):
    """Their number is what takes time on large clusters; a division that is under way ends at its limit."""
    tables = []

    class Counted(StageTable):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            tables.append(self)

    def entries(an_evaluation):
        monkeypatch.setattr(division_effort, "ENTRIES_AN_EVALUATION", an_evaluation)
        tables.clear()
        incumbent, grid = opened(evaluations=800, devices=8)
        allowed = an_evaluation * int(SHARE * incumbent.left)
        divide_pipelines(incumbent, grid)
        return allowed, [table.entries for table in tables if table.partly], incumbent.least_s

    monkeypatch.setattr(divided_settings, "StageTable", Counted)
    _, all_entries, _ = entries(division_effort.ENTRIES_AN_EVALUATION)
    few = sum(all_entries) // 4 // int(SHARE * 600)
    allowed, some, least_s = entries(few)
    assert 0 < allowed < sum(all_entries) / 2
    assert sum(some[:-1]) < allowed and sum(some) < sum(all_entries) / 2
    assert entries(few) == (allowed, some, least_s)
    _, one, _ = entries(1)
    assert len(one) == 1 and 0 < one[0] < all_entries[0]


@pytest.mark.parametrize(
    "changes", [{"evaluations": LEAST_EVALUATIONS // 2}, {"sync_modes": ("synchronous", "local_sgd")}]
)
def test_small_budgets_and_other_sync_modes_divide_no_pipelines(changes):
    incumbent, grid = opened(**changes)
    before = incumbent.evaluations
    divide_pipelines(incumbent, grid)
    assert incumbent.evaluations == before and incumbent.outside is None
    assert "piper" not in incumbent.reached


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes, lists",
    long_but(
        [({"trainer": "automap"}, True), ({"trainer": "deepspeed"}, False), ({"hints": ONE_ORDER}, False)],
        [
            ({"trainer": "automap"}, True),
            ({"trainer": "generic"}, True),
            ({"trainer": "deepspeed"}, False),
            ({"target": "automap"}, False),
            ({"hints": ONE_ORDER}, False),
        ],
    ),
)
def test_orders_are_listed_where_they_may_be_run(changes, lists):
    incumbent, grid = opened(**changes)
    divide_pipelines(incumbent, grid)
    assert ("spp" in incumbent.reached) == lists
    if lists:
        assert incumbent.reached["spp"] < 1.2 * incumbent.reached["piper"] < 1.2 * incumbent.reached["expert"]


@pytest.mark.slow
def test_a_portfolio_is_no_slower_than_spp_on_links_that_are_not_uniform():
    """SPP's orders of the devices and of the passes, and moves of units, have their share of a small budget."""
    rates = np.exp(np.random.default_rng(11).uniform(np.log(0.3), np.log(30.0), (7, 7)))
    cluster = parse_cluster("7x1xA100@25Gbit")
    cluster = replace(cluster, bandwidth_GBps=tuple(map(tuple, np.minimum(rates, rates.T).tolist())))
    problem = Problem.build(zoo.build("gpt2-xl"), cluster, {"global_batch": 70})
    mine = search(problem, Budget(evaluations=900))
    assert mine.step_time_s < 0.995 * search(problem, Budget(evaluations=900), searcher="spp").step_time_s


@pytest.mark.slow
def test_no_partition_is_priced_twice(monkeypatch):
    """Most partitions of all strategies are those of fewer strategies."""
    priced = []

    def noting(incumbent, plans, count):
        plans = list(plans)
        priced.extend(map(divided_settings._key, plans))
        return fastest_staged(incumbent, plans, count)

    monkeypatch.setattr(divided_settings, "fastest_staged", noting)
    incumbent, grid = opened()
    divide_pipelines(incumbent, grid)
    assert len(set(priced)) == len(priced) > 40


def test_stages_recompute_what_a_schedule_holds():
    """Where the memory is that of 1F1B without recomputation, GPipe holds more micro-batches, and fits with some."""
    training = {"global_batch": 128, "trainer": "generic", "memory_confidence": 0.5}
    cluster = parse_cluster("4x1xV100@10Gbit")

    def partitioned(reserve_bytes):
        hints = {"memory_reserve_bytes": reserve_bytes}
        space = PlanSpace(Problem.build(zoo.build(SMALL_VOCABULARY), cluster, training, hints))
        plain = [way for way in megatron_strategies(space) if way.tp == 1]
        table = StageTable(space, tuple(range(4)), 16, plain, partly=True)
        *_, longest = piper_partitions(table)
        return space, table, longest

    def overflow(space, plan):
        return space.evaluator.evaluate(lower_staged(space, plan)).overflow

    space, table, partition = partitioned(0)
    assert len(partition.stages) == 4
    plan = table.staged(partition)
    capacity = float(space.evaluator.layout((1, 1), 4).stages[0].capacity)
    space, table, _ = partitioned(int(-0.99 * overflow(space, plan) * capacity))
    plan, held = table.staged(partition), table.staged(partition, "gpipe")
    assert held.schedule == "gpipe" and overflow(space, plan) <= 0.0 < overflow(space, replace(plan, schedule="gpipe"))
    assert overflow(space, held) <= 0.0
    assert any(stage.recompute != "none" for stage in held.stages)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_partitions_are_the_best_of_all_under_a_schedule(schedule):
    """The slowest stage is as fast as in the best of all ways to cut ten units and four devices; memory binds, so that
    the best cuts under GPipe are others than under 1F1B."""
    training = {"global_batch": 128, "trainer": "generic"}
    cluster = cluster_with(3, "4x1xV100@10Gbit")
    space = PlanSpace(Problem.build(zoo.build(SMALL_VOCABULARY), cluster, training))
    table = StageTable(space, tuple(range(4)), 16, [one for one in megatron_strategies(space) if one.tp == 1])

    def load_s(stages):
        count = len(stages)
        held = [16 if schedule == "gpipe" else count - number for number in range(count)]
        return max(
            float(table.seconds(alive, place, size)[first, last])
            for alive, (first, last, place, size) in zip(held, stages, strict=True)
        )

    def ways(total, count):
        ends = ((0, *inner, total) for inner in itertools.combinations(range(1, total), count - 1))
        return [list(itertools.pairwise(one)) for one in ends]

    found = {len(one.stages): one for one in piper_partitions(table, schedule)}
    assert found
    for count in (1, 2, 3, 4):
        best_s = min(
            load_s([(*layers, a, b - a) for layers, (a, b) in zip(of_layers, of_devices, strict=True)])
            for of_layers in ways(space.num_units, count)
            for of_devices in ways(4, count)
        )
        if count not in found:
            assert best_s == float("inf")
            continue
        assert found[count].load_s == pytest.approx(load_s(found[count].stages), rel=1e-12) == pytest.approx(best_s)
        assert np.isfinite(table.latency_s(found[count], schedule))
    others = {len(one.stages): one for one in piper_partitions(table, "gpipe" if schedule == "1f1b" else "1f1b")}
    assert any(found[count].stages != others[count].stages for count in found.keys() & others.keys())


def test_units_and_devices_move_as_long_as_that_gains():
    incumbent, _ = opened(hints=ONE_ORDER, devices=11)
    even = [StageChoice(end=end, devices=(rank,)) for rank, end in enumerate((1, 2, 3, 4, 5, 6, 7))]
    last = StageChoice(end=incumbent.space.num_units, devices=tuple(range(7, 11)))
    plan = StagedPlan(stages=(*even, last), num_micro_batches=8)
    found = moved(incumbent, plan)

    def seconds(one):
        return incumbent.space.evaluator.evaluate(lower_staged(incumbent.space, one)).step_time_s

    assert seconds(found) < seconds(plan)
    ends = [stage.end for stage in found.stages]
    assert ends == sorted(set(ends)) and ends[-1] == incumbent.space.num_units
    assert [device for stage in found.stages for device in stage.devices] == list(range(11))


def measured_layers(cluster, batch, seed=0):
    """The space of a chain of measured layers whose plans have 1F1B order and no ZeRO."""
    rng = np.random.default_rng(seed)
    nodes = [
        f"node{number} -- layer -- forward_compute_time={spent:.3f}, backward_compute_time={2 * spent:.3f}, "
        f"activation_size={kept:.0f}, parameter_size={state:.0f}"
        for number, (spent, kept, state) in enumerate(np.exp(rng.normal((0.5, 15.5, 18.0), 0.7, (12, 3))), 1)
    ]
    edges = [f"\tnode{number} -- node{number + 1}" for number in range(1, 12)]
    graph = load_profile("\n".join([*nodes, *edges]) + "\n", name="chain", batch=8)
    fix = {"schedule": "1f1b", "virtual_stages": 1, "zero": 0}
    return PlanSpace(Problem.build(graph, parse_cluster(cluster), {"global_batch": batch}, {"fix": fix}))


def test_after_moves_everywhere_no_single_move_gains():
    """Every unit, and every device or as many as a sample less takes, from one stage to any other."""
    space = measured_layers("8x1xV100-16GB@25Gbit", 64)
    incumbent = Incumbent(space, Budget(evaluations=10_000), searcher="piper")

    def plan_of(ends, counts):
        places = np.cumsum([0, *counts]).tolist()
        devices = [tuple(range(a, b)) for a, b in itertools.pairwise(places)]
        stages = tuple(StageChoice(end=e, devices=d) for e, d in zip(ends, devices, strict=True))
        return StagedPlan(stages=stages, num_micro_batches=4)

    def seconds(plan):
        return space.evaluator.evaluate(lower_staged(space, plan)).step_time_s

    begin = plan_of((3, 6, 9, 12), (2, 2, 2, 2))
    found = moved(incumbent, begin, everywhere=True)
    assert seconds(found) <= seconds(moved(incumbent, begin)) < seconds(begin)
    ends, counts = [s.end for s in found.stages], [len(s.devices) for s in found.stages]
    tried = 0
    for a, b in itertools.permutations(range(4), 2):
        for units, devices in itertools.product((0, 1), (0, 1, 2, 3)):
            lengths, others = np.diff([0, *ends]), np.array(counts)
            lengths[a], lengths[b] = lengths[a] - units, lengths[b] + units
            others[a], others[b] = others[a] + devices, others[b] - devices
            fewer_samples = devices in (0, 1, -(-16 // max(-(-16 // counts[a]) - 1, 1)) - counts[a])
            if lengths.min() > 0 and others.min() > 0 and others.max() <= 16 and fewer_samples:
                tried += 1
                other = plan_of(np.cumsum(lengths).tolist(), others.tolist())
                assert seconds(other) >= seconds(found) * (1.0 - 1e-9)
    assert tried > 10


@pytest.mark.slow
def test_moves_leave_no_plan_that_breaks_rules():
    """Two axes split the samples of a stage, which divide over them with some numbers of devices only."""
    space = measured_layers("6x4xV100-16GB@120Gbit", 240)
    two_level = [one for one in megatron_strategies(space) if one.splits_batch]
    assert two_level
    (signatures,) = {id(one.signatures): one.signatures for one in two_level if one.tp == 4}.values()
    incumbent = Incumbent(space, Budget(evaluations=10_000), searcher="piper")
    changed = 0
    for ends in itertools.combinations(range(2, 11), 2):
        stages = [
            StageChoice(end=end, devices=tuple(range(first, first + 8)), tp=4, signatures=signatures)
            for first, end in zip((0, 8, 16), (*ends, 12), strict=True)
        ]
        found = moved(incumbent, StagedPlan(stages=tuple(stages), num_micro_batches=6), everywhere=True)
        changed += [len(stage.devices) for stage in found.stages] != [8, 8, 8]
        plan = to_plan(lower_staged(space, found), space.evaluator)
        assert not incumbent.verifier.violations(plan, memory=False)
    assert changed > 3


def counts_tried(monkeypatch, batch, settings, seconds, *, at_length=True):
    """The settings that a division tries, each when it is first asked for, and its best one.

    Args:
        batch: the batch, whose divisors are the numbers of micro-batches.
        settings: where the division begins.
        seconds: step time of the best plan of a setting.
    """
    tried = []

    def step_s(self, setting, strategies=None):
        if setting not in tried:
            tried.append(setting)
        return self._best_s.setdefault(setting, seconds(setting))

    monkeypatch.setattr(divided_settings.DividedSettings, "_try", step_s)
    space = measured_layers("6x4xV100-16GB@10Gbit", batch)
    incumbent = Incumbent(space, Budget(evaluations=10_000), searcher="piper")
    effort = Effort(incumbent, float("inf"), float("inf"))
    division = divided_settings.DividedSettings(incumbent, [], effort, at_length=at_length)
    division.run([divided_settings.Setting(*setting) for setting in settings])
    return [tuple(setting) for setting in tried], division._best


def test_numbers_of_micro_batches_between_those_that_were_tried_have_a_turn(monkeypatch):
    """From 2, numbers that grow by half lead over 3, 6 and 12 to 24; the best number, 8, is behind 12."""
    tried, best = counts_tried(
        monkeypatch, 768, [(2, 0), (2, 1)], lambda one: abs(np.log(one.num_micro_batches / 9.0)) + one.zero
    )
    assert tried[:4] == [(2, 0), (3, 0), (6, 0), (12, 0)] and (2, 1) in tried
    assert best == (8, 0)


@pytest.mark.parametrize(("at_length", "best"), [(True, 6), (False, 2)])
def test_a_slower_number_of_micro_batches_does_not_hide_a_faster_one_behind_it(at_length, best, monkeypatch):
    """From 2, numbers that grow by half lead over 3 to 6; two numbers in a row are slower behind 6."""
    seconds = {2: 1.0, 3: 1.2, 6: 0.9, 9: 1.1, 16: 1.0, 24: 0.1}
    tried, found = counts_tried(
        monkeypatch, 144, [(2, 0)], lambda one: seconds.get(one.num_micro_batches, 2.0), at_length=at_length
    )
    assert found == (best, 0) and ((16, 0) in tried) == at_length and (24, 0) not in tried


def test_numbers_of_micro_batches_next_to_the_best_one_are_tried_at_last(monkeypatch):
    """From 2, numbers that grow by half lead over 3, 5, 8 and 12 to 18; the best number is 10."""
    tried, best = counts_tried(monkeypatch, 720, [(2, 0)], lambda one: abs(np.log(one.num_micro_batches / 10.0)) + 1e-9)
    assert tried[:5] == [(2, 0), (3, 0), (5, 0), (8, 0), (12, 0)] and best == (10, 0)


def test_no_two_strategies_are_alike(gpt):
    """Sequence parallelism changes nothing where no inner axis splits an operator; in a transformer it does."""
    measured = measured_layers("6x4xV100-16GB@10Gbit", 288)
    problem = Problem.build(gpt(layers=4), parse_cluster("2x4xV100"), {"global_batch": 32})
    counts = []
    for space in (measured, PlanSpace(problem)):
        offered = megatron_strategies(space)
        assert not any(one.is_like(other) for one, other in itertools.combinations(offered, 2))
        counts.append(Counter(one.tp for one in offered))
    # With an inner axis of a host, whose devices may also split the batch.
    assert counts[0][2] == 1 and counts[0][4] == 2 and counts[1][2] == 2 and counts[1][4] == 3


def test_strategies_are_those_solved_with_any_number_of_micro_batches():
    space = measured_layers("6x4xV100-16GB@10Gbit", 288)
    megatron = megatron_strategies(space)
    own, best, other = (
        Strategy(tp=tp, signatures=megatron[0].signatures + number) for number, tp in ((1, 2), (2, 2), (3, 4))
    )
    solved = [(4, best), (8, own), (16, other), (32, megatron[-1])]
    assert with_solved(megatron, solved, 8) == [*megatron, own, best, other]
    assert with_solved(megatron, solved, 4) == [*megatron, best, other]


@pytest.mark.slow
def test_pipelines_are_found_where_the_space_has_only_slow_ones():
    """Pipelines of 2 and 7 stages are slower than replicas."""
    space = PlanSpace(
        Problem.build(zoo.build(MODEL), parse_cluster("14x1xV100@10Gbit"), {"global_batch": 35}, {"fix": {"zero": 0}})
    )
    incumbent = Incumbent(space, Budget(evaluations=4_000), searcher="expert")
    grid = price_grid(incumbent)
    long = [space.shape(row).pp > 1 for row in grid.values.tolist()]
    assert min(grid.prices[long, 0], default=float("inf")) > NEAR * grid.prices[:, 0].min()
    divide_pipelines(incumbent, grid)
    plan = incumbent.result(seed=0).plan
    assert plan.estimate.step_time_s < 0.95 * incumbent.best_s and len(plan.stages) > 1
    assert not Verifier(space.problem).violations(plan)


def test_divisions_have_longer_while_they_give_nothing_near_the_best_plan():
    now = [0.0]
    space = PlanSpace(Problem.build(zoo.build(MODEL), parse_cluster("4xV100"), {"global_batch": 8}))
    incumbent = Incumbent(space, Budget(seconds=100.0), searcher="expert", clock=lambda: now[0])
    price_grid(incumbent)
    effort = Effort(incumbent, 2.0, 2.0)
    near_s = incumbent.least_s * division_effort.FAR
    found = []
    for now[0] in (1.9, 2.1, 2.0 * division_effort.LONGER + 0.1):
        found.append((effort.is_spent(near_s), effort.is_spent(1.01 * near_s), effort.is_spent(float("inf"))))
    assert found == [(False, False, False), (True, False, False), (True, True, True)]


def test_divisions_have_longer_while_their_plan_leads():
    now = [0.0]
    space = PlanSpace(Problem.build(zoo.build(MODEL), parse_cluster("4xV100"), {"global_batch": 8}))
    incumbent = Incumbent(space, Budget(seconds=100.0), searcher="expert", clock=lambda: now[0])
    price_grid(incumbent)
    effort, best_s = Effort(incumbent, 2.0, 5.0), incumbent.best_s
    now[0] = 3.0
    assert effort.is_spent(best_s)
    incumbent._outside.append(Outside(0.9 * best_s, None, None, "piper"))
    assert not effort.is_spent(0.9 * best_s)
    now[0] = 5.1
    assert effort.is_spent(0.9 * best_s)


def test_units_and_devices_move_also_where_pipelines_are_divided_quickly(monkeypatch):
    """On 37 devices; the clock stands still, so that nothing ends early."""
    space = PlanSpace(generate(100_404).problem)
    grid = grid_of(space)
    move, until = divided_settings.DividedSettings.move, []

    def divided(budget, *, moves, seconds=1.0):
        """Step time of the best plan, outside of the space too; `until` has the end of each call of moves."""

        def until_then(division, until_s):
            until.append(until_s)
            if moves:
                move(division, until_s)

        incumbent = Incumbent(space, budget, searcher="expert", clock=lambda: 0.0)
        incumbent.price(grid.values)
        monkeypatch.setattr(divided_settings.DividedSettings, "move", until_then)
        divide_quickly(incumbent, grid, seconds)
        return incumbent.least_s

    assert divided(Budget(), moves=True) < 0.95 * divided(Budget(), moves=False)
    assert until == [1.0 + MOVED_S] * 2
    # A budget in evaluations has no seconds to end at.
    divided(Budget(evaluations=10_000), moves=True, seconds=float("inf"))
    assert len(until) == 2


def test_the_best_plan_is_divided_though_the_given_plans_lack_it():
    """The time of a searcher may end between the price of its last plan and its own list of plans."""
    incumbent, grid = opened()
    before_s = incumbent.best_s
    assert incumbent.space.shape(incumbent.best).pp > 1
    divide_quickly(incumbent, Grid(*(part[:0] for part in grid)), float("inf"))
    assert incumbent.least_s < before_s


def test_moves_end_with_the_seconds_they_have(monkeypatch):
    space = PlanSpace(generate(100_404).problem)
    grid, now = grid_of(space), [0.0]
    incumbent = Incumbent(space, Budget(), searcher="expert", clock=lambda: now[0])
    incumbent.price(grid.values)
    division = divided_settings.DividedSettings(incumbent, [], Effort(incumbent, 10.0, 10.0), at_length=False)
    division.run([divided_settings.Setting(3, 0)])
    best, begun = divided_settings.Moves.best, []

    def counted(moves, *given):
        begun.append(now[0])
        now[0] += 1.0
        return best(moves, *given)

    monkeypatch.setattr(divided_settings.Moves, "best", counted)
    division.move(2.5)
    assert begun == [0.0, 1.0, 2.0]


def test_no_pipeline_is_divided_where_the_user_wants_none():
    problem = Problem.build(
        zoo.build(MODEL), parse_cluster("11x1xV100@10Gbit"), {"global_batch": 8}, {"fix": {"pp": 1}}
    )
    incumbent = Incumbent(PlanSpace(problem), Budget(evaluations=4_000), searcher="expert")
    grid = price_grid(incumbent)
    before = incumbent.evaluations
    divide_pipelines(incumbent, grid)
    assert incumbent.evaluations == before and len(incumbent.result(seed=0).plan.stages) == 1
