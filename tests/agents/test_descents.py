"""Descents: what is tried at the end of one gains where it should, and no plan gets worse."""

import numpy as np
import pytest
from small_clusters import cluster_with

from agents import Budget
from agents.incumbent import Incumbent
from agents.learning.checkpoint import read_network
from agents.learning.problems import generate
from agents.learning.proposals import NETWORK
from agents.learning.proposed_skeletons import propose_and_solve
from agents.planners import descents
from agents.planners.descents import descend
from agents.planners.elimination import propose
from agents.planners.linearization import worth_of
from agents.planners.neighbouring_skeletons import (
    with_other_micro_batches,
    with_other_schedule,
    with_other_virtual_stages,
)
from agents.planners.pipeline_cuts import cut_anew
from agents.planners.promising_templates import like_the_best, promising_meshes
from agents.planners.skeletons import SkeletonSearch
from agents.planners.template_improvement import improve_templates
from agents.sampling.expert import grid_of, price_grid
from automap.cluster import parse_cluster
from automap.problem import Problem
from automap.space.space import PlanSpace
from ir import zoo


def reached(space, row):
    """The best plan of a descent in a search of its own, and its step time."""
    search = SkeletonSearch(Incumbent(space, Budget(), searcher="elimination"), propose)
    descend(search, row)
    return search.incumbent.best, search.incumbent.best_s


def leave_out(monkeypatch, name):
    """Leaves out what descents do in the function of this name."""
    monkeypatch.setattr(descents, name, lambda search, values: values)


def test_orders_of_micro_batches_are_tried_with_the_recomputation_that_they_need(monkeypatch):
    """Zero-bubble orders keep activations longer; eight stages with few micro-batches gain by them all the same."""
    cluster = cluster_with(5, "8x1xV100-16GB@10Gbit")
    graph = zoo.build("gpt:layers=24,hidden=1024,heads=8,seq_len=1024,vocab_size=8192")
    training = {"global_batch": 16, "trainer": "automap"}
    space = PlanSpace(Problem.build(graph, cluster, training, {"fix": {"pp": 8}}))
    rows = list(map(tuple, promising_meshes(space, grid_of(space))[:4].tolist()))
    leave_out(monkeypatch, "_with_virtual_stages")
    leave_out(monkeypatch, "_with_micro_batches")
    found = [reached(space, row) for row in rows]
    leave_out(monkeypatch, "_with_other_schedule")
    usual = [reached(space, row) for row in rows]
    first = space.first
    gains = [before / after for (_, after), (_, before) in zip(found, usual, strict=True)]
    assert min(gains) > 1.05
    kinds = {space.schedules[plan[first.schedule]] for plan, _ in found}
    assert kinds <= {"zb1p", "zb2p"}
    assert {space.schedules[plan[first.schedule]] for plan, _ in usual} == {"1f1b"}
    assert any(any(plan[first.recompute : first.recompute + 8]) for plan, _ in found)


def test_virtual_stages_are_tried_in_the_first_descent(monkeypatch):
    """No template has any; with 16 stages behind a slow network they gain at once, with cuts that suit them."""
    space = PlanSpace(
        Problem.build(
            zoo.build("gpt:layers=24,hidden=1024,heads=16,seq_len=512,vocab_size=8192"),
            parse_cluster("8x1xV100-16GB@25Gbit"),
            {"global_batch": 64},
        )
    )
    grid = grid_of(space)
    rows = [row for row in map(tuple, promising_meshes(space, grid).tolist()) if space.shape(row).pp > 2][:4]
    assert {space.shape(row).virtual for row in map(tuple, grid.values.tolist())} == {1}
    found = [reached(space, row) for row in rows]
    leave_out(monkeypatch, "_with_virtual_stages")
    usual = [reached(space, row) for row in rows]
    gains = [before / after for (_, after), (_, before) in zip(found, usual, strict=True)]
    assert len(rows) == 4 and min(gains) >= 1.0 and max(gains) > 1.03
    assert space.shape(min(found, key=lambda one: one[1])[0]).virtual > 1
    for plan, seconds in found:
        others = with_other_virtual_stages(space, plan)
        assert {space.shape(one).virtual for one in others}.isdisjoint({space.shape(plan).virtual})
        assert all(space.repair(one, 0) == one for one in others)
        assert seconds <= 1.02 * space.price(np.array(others))[:, 0].min()


def test_virtual_stages_are_left_where_no_waiting_would_be_too_slow():
    """Ranks that are equally fast wait (pp - 1) of (micro-batches + pp - 1) parts of a step."""
    problem = Problem.build(
        zoo.build("gpt:layers=8,hidden=512,heads=8,seq_len=128,vocab_size=1024"),
        parse_cluster("4x1xV100-16GB@25Gbit"),
        {"global_batch": 16},
        {"fix": {"pp": 4, "num_micro_batches": 4}},
    )
    space = PlanSpace(problem)
    row = min(map(tuple, grid_of(space).values.tolist()), key=lambda one: space.price(np.array([one]))[0, 0])
    for share, tries in ((0.56, False), (0.58, True)):
        search = SkeletonSearch(Incumbent(space, Budget(), searcher="elimination"), propose)
        ((_, step_s),) = search.price(np.array([row]))
        search.incumbent.best_s = share * step_s  # 4 / 7 is without any waiting
        before = search.incumbent.evaluations
        descents._with_virtual_stages(search, row)
        assert (search.incumbent.evaluations > before) == tries


@pytest.mark.slow
def test_signatures_make_fit_what_templates_recompute_for(monkeypatch):
    """The signatures of other meshes make 112 layers fit on this one with recomputation; its own ones do without."""
    space = PlanSpace(generate(100_134).problem)
    incumbent = Incumbent(space, Budget(evaluations=20_000), searcher="expert")
    grid = price_grid(incumbent, charged=False)
    first, solved = space.first, improve_templates(incumbent, grid).plans(None).values
    row = next(
        row
        for row in map(tuple, like_the_best(space, grid, solved).values.tolist())
        if (lambda s: (s.pp, s.tp, s.num_micro_batches, s.virtual))(space.shape(row)) == (8, 4, 32, 14)
    )
    assert all(row[first.recompute : first.recompute + 8])
    plan, best_s = reached(space, row)
    leave_out(monkeypatch, "_lightened")
    before, before_s = reached(space, row)
    assert best_s < 0.9 * before_s
    assert sum(plan[first.recompute : first.zero]) < sum(before[first.recompute : first.zero])


def test_less_of_zero_is_solved_with_signatures_that_make_it_fit(monkeypatch):
    """Gathering gradients and parameters over a slow network costs more than signatures that save as much memory."""
    cluster = cluster_with(1.8, "4x2xV100-16GB@10Gbit")
    graph = zoo.build("gpt:layers=12,hidden=768,heads=12,seq_len=512,vocab_size=32000")
    space = PlanSpace(Problem.build(graph, cluster, {"global_batch": 32}))
    rows = list(map(tuple, promising_meshes(space, grid_of(space))[:8].tolist()))
    leave_out(monkeypatch, "_with_micro_batches")
    found = [reached(space, row) for row in rows]
    leave_out(monkeypatch, "_lightened")
    usual = [reached(space, row) for row in rows]
    gains = [before / after for (_, after), (_, before) in zip(found, usual, strict=True) if np.isfinite(after)]
    assert min(gains) >= 1.0 and max(gains) > 1.01
    best = gains.index(max(gains))
    assert found[best][0][space.first.zero] < usual[best][0][space.first.zero]


def test_stages_of_unlike_size_are_neighbours():
    """Twelve hosts of three devices: a small encoder is cut best into 12 devices and 24, which no template is."""
    space = PlanSpace(generate(100_335).problem)
    values, prices = grid_of(space)
    alike = [
        at
        for at, row in enumerate(values.tolist())
        if space.stage_devices(row) == (18, 18) and space.shape(row).tp == 3
    ]
    row = tuple(values[min(alike, key=lambda at: prices[at, 0])].tolist())
    search = SkeletonSearch(Incumbent(space, Budget(), searcher="elimination"), propose)
    found = {space.stage_devices(plan) for plan in map(tuple, search.neighbours(row).tolist())}
    assert {(18, 18), (12, 24), (24, 12)} <= found and all(sum(devices) == 36 for devices in found)
    incumbent = Incumbent(space, Budget(evaluations=8_000), searcher="expert")
    grid = price_grid(incumbent, charged=False)
    propose_and_solve(improve_templates(incumbent, grid), grid, read_network(NETWORK), seed=0)
    assert space.stage_devices(incumbent.best) == (12, 24)
    assert incumbent.best_s < 0.8 * prices[prices[:, 1] <= 0.0, 0].min()


def test_a_faster_plan_that_does_not_fit_is_cut_anew_and_recomputes():
    """Where memory binds, a solve tells of its fastest plans; a descent makes them fit, and is never slower for it."""
    cluster = cluster_with(2.2, "2x4xV100-16GB@25Gbit")
    graph = zoo.build("gpt:layers=8,hidden=1024,heads=16,seq_len=512,vocab_size=32000")
    space = PlanSpace(Problem.build(graph, cluster, {"global_batch": 32}))
    gains = []
    for row in map(tuple, promising_meshes(space, grid_of(space))[:12].tolist()):
        search = SkeletonSearch(Incumbent(space, Budget(), searcher="elimination"), propose)
        beyond = search.solve(row, rounds=1)
        (is_over, _), plan = search.best[row[: space.first.signature]]
        if not beyond or is_over:
            continue
        seconds, overflow = space.price(np.array(beyond)).T
        assert (overflow > 0.0).all() and (seconds < search.incumbent.best_s).all()
        tried = space.price(np.array(descents._cut_and_fitted(search, [plan, *beyond])))
        usual = space.price(np.array(descents._cut_and_fitted(search, [plan])))
        best_s, usual_s = (some[some[:, 1] <= 0.0, 0].min() for some in (tried, usual))
        gains.append(usual_s / best_s)
        assert reached(space, row)[1] <= search.incumbent.best_s
    assert min(gains) >= 1.0 and max(gains) > 1.02


def test_the_highest_zero_stage_is_solved_in_place_of_recomputation():
    """What ZeRO 3 gathers depends on signatures, so that only a solve tells that it is faster than to recompute."""
    cluster, training = parse_cluster("16x2xA100-40GB@25Gbit"), {"global_batch": 32, "trainer": "torchtitan"}
    space = PlanSpace(Problem.build(generate(100_215).problem.graph, cluster, training))
    first = space.first
    rows = map(tuple, promising_meshes(space, grid_of(space)).tolist())
    shapes = {(shape.pp, shape.tp, shape.num_micro_batches): row for row in rows for shape in [space.shape(row)]}
    row = shapes[2, 4, 1]
    search = SkeletonSearch(Incumbent(space, Budget(), searcher="elimination"), propose)
    search.solve(row, rounds=1)
    (_, before_s), solved = search.best[row[: first.signature]]
    ranks = slice(first.recompute, first.recompute + 2)
    assert all(solved[ranks]) and solved[first.zero] < 3
    lightened = descents._lightened(search, solved)
    ((after_s, overflow),) = space.price(np.array([lightened])).tolist()
    assert overflow <= 0.0 and after_s < 0.9 * before_s
    assert lightened[first.zero] == 3 and not any(lightened[ranks])


def test_signatures_are_tried_with_other_numbers_of_micro_batches(monkeypatch):
    """What a descent finds with 20 micro-batches suits more of them even better."""
    space = PlanSpace(generate(100_310).problem)
    templates = map(tuple, grid_of(space).values.tolist())
    shapes = [(row, space.shape(row)) for row in templates if row[space.first.zero] == 0]
    rows = {shape.num_micro_batches: row for row, shape in shapes if (shape.pp, shape.tp, shape.middle) == (8, 8, 2)}
    found, found_s = reached(space, rows[20])
    assert space.shape(found).num_micro_batches > 20
    others = np.array(with_other_micro_batches(space, found))
    shapes = [space.shape(row) for row in map(tuple, others.tolist())]
    assert {(shape.pp, shape.tp, shape.middle, shape.virtual) for shape in shapes} == {(8, 8, 2, 1)}
    seconds, overflow = space.price(others).T
    assert not ((overflow <= 0.0) & (seconds < found_s)).any()
    leave_out(monkeypatch, "_with_micro_batches")
    assert found_s < 0.9 * reached(space, rows[20])[1]


def test_orders_that_overflow_by_more_than_half_are_made_to_fit_by_recomputation():
    """ZB-2P holds twice as many micro-batches as 1F1B; where it recomputes some it is faster than 1F1B that recomputes
    everything."""
    graph = zoo.build("gpt:layers=24,hidden=1024,heads=8,seq_len=2048,vocab_size=8192")
    training, hints = {"global_batch": 16, "trainer": "automap"}, {"fix": {"pp": 8}}
    space = PlanSpace(Problem.build(graph, cluster_with(5.4, "8x1xV100-16GB@10Gbit"), training, hints))
    first, (values, prices) = space.first, grid_of(space)
    ranks = slice(first.recompute, first.recompute + 8)
    plain = prices[:, 1] <= 0.0
    fitting = [row for row in map(tuple, values[plain].tolist()) if space.schedules[row[first.schedule]] == "1f1b"]
    heavy = max(fitting, key=lambda row: (sum(row[ranks]), -space.price(np.array([row]))[0, 0]))
    (light,) = (
        one
        for one in with_other_schedule(space, (*heavy[: ranks.start], *[0] * 8, *heavy[ranks.stop :]))
        if space.schedules[one[first.schedule]] == "zb2p"
    )
    ((heavy_s, _), (light_s, overflow)) = space.price(np.array([heavy, light])).tolist()
    assert overflow > 0.5 and light_s < heavy_s
    search = SkeletonSearch(Incumbent(space, Budget(), searcher="elimination"), propose)
    search.price(np.array([heavy]))
    found = descents._fastest_of(search, heavy, [light])
    ((found_s, over),) = space.price(np.array([found])).tolist()
    assert space.schedules[found[first.schedule]] == "zb2p" and any(found[ranks])
    assert over <= 0.0 and light_s < found_s < heavy_s


def test_descents_go_on_while_they_gain_much():
    """A GPT on 256 devices of which no template fits. Those of one mesh with ZeRO 0 and 2 lead to the same plan, though
    the first plan that fits of the latter is three times slower: ZeRO 2 makes one rank wait for its gradients, and at
    its sensitivities the time of the other ranks costs nothing."""
    space = PlanSpace(generate(100_011).problem)
    grid = grid_of(space)
    assert (grid.prices[:, 1] > 0.0).all()
    found = []
    for zero in (0, 2):
        alike = [
            row
            for row in map(tuple, grid.values.tolist())
            if (lambda s: (s.pp, s.tp, s.middle, s.num_micro_batches))(space.shape(row)) == (16, 8, 1, 2048)
            and row[space.first.zero] == zero
        ]
        nearest = alike[int(space.price(np.array(alike))[:, 1].argmin())]
        found.append(reached(space, nearest)[1])
    assert max(found) < 1.01 * min(found)


def test_no_further_plan_is_cut_once_time_is_over(monkeypatch):
    space = PlanSpace(
        Problem.build(
            zoo.build("gpt:layers=8,hidden=512,heads=8,seq_len=128,vocab_size=1024"),
            parse_cluster("4x1xV100@25Gbit"),
            {"global_batch": 16},
            {"fix": {"pp": 4}},
        )
    )
    begins = list(map(tuple, promising_meshes(space, grid_of(space))[:4].tolist()))
    cut, limit = [], 2

    def noting(space, values):
        cut.append(values)
        return cut_anew(space, values)

    monkeypatch.setattr(descents, "cut_anew", noting)
    incumbent = Incumbent(space, Budget(), searcher="elimination", should_stop=lambda: len(cut) >= limit)
    search = SkeletonSearch(incumbent, propose)
    found = descents._cut_and_fitted(search, begins)
    assert cut == begins[:2] and set(begins[:2]) <= set(found) and not set(begins[2:]) & set(found)
    limit = 0
    assert descents._cut_and_fitted(search, begins) == [] and len(cut) == 2
    cut.clear()
    limit = 5
    assert set(begins) <= set(descents._cut_and_fitted(search, begins)) and cut == begins


def test_a_descent_from_a_plan_that_was_priced_counts_it_no_more(gpt, space):
    s = space(gpt(layers=4), "2x2xA100", 16)
    values = tuple(grid_of(s).values[0].tolist())
    counts, ends = [], []
    for worth in (None, worth_of(*s.price(np.array([values]))[0].tolist())):
        search = SkeletonSearch(Incumbent(s, Budget(), searcher="dqn"), propose)
        ends.append(descend(search, values, worth))
        counts.append(search.incumbent.evaluations)
    assert ends[0] == ends[1]
    assert counts[1] == counts[0] - 1
