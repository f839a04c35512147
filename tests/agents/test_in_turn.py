"""Several searchers within one budget: against the same searchers run alone, and by a clock of the test's own."""

import json
from dataclasses import replace

import pytest

from agents import Budget, search, search_in_turn
from agents.portfolio import in_turn
from agents.searcher import Progress
from automap.cluster import parse_cluster
from automap.errors import NothingFits, ProblemError
from automap.problem import Problem


def problem(graph, cluster="2x2xV100@25Gbit", global_batch=8, fix=None):
    return Problem.build(graph, parse_cluster(cluster), {"global_batch": global_batch}, {"fix": fix or {}})


def document(result):
    plan = result.plan
    return json.dumps(replace(plan, search=replace(plan.search, seconds=None, first_after_s=None)).to_json())


NAMES = ["random", "mcmc", "expert"]


def test_each_reaches_what_it_reaches_alone_with_its_share(gpt):
    p = problem(gpt())
    seen = []
    found = search_in_turn(p, Budget.parse(152), searchers=NAMES, seed=3, on_progress=seen.append)
    shares = [51, 51, 50]
    alone = [search(p, Budget.parse(share), searcher=name, seed=3) for name, share in zip(NAMES, shares, strict=True)]
    best = min(alone, key=lambda result: result.plan.estimate.step_time_s)
    record = found.plan.search
    assert record.searchers == {n: r.plan.estimate.step_time_s for n, r in zip(NAMES, alone, strict=True)}
    assert list(record.searchers) == NAMES
    assert found.plan.estimate == best.plan.estimate
    assert record.found_by == best.plan.search.found_by in NAMES
    assert found.evaluations == record.evaluations == sum(r.evaluations for r in alone)
    assert record.baselines == alone[2].plan.search.baselines
    assert record.lower_bound_s <= found.plan.estimate.step_time_s
    told = [(p.evaluations, p.fraction) for p in seen]
    assert told == sorted(told)
    assert {p.searcher for p in seen} == set(NAMES)
    for told in seen:
        assert sum(member.evaluations for member in told.members.values()) == told.evaluations
        times = [m.best_step_time_s for m in told.members.values() if m.best_step_time_s is not None]
        assert min(times, default=None) == told.best_step_time_s
    steps = [step for _, _, step in found.improvements]
    assert steps == sorted(steps, reverse=True) and steps[-1] == found.plan.estimate.step_time_s


def test_one_seed_and_one_budget_give_one_plan(gpt):
    p = problem(gpt())
    one, other = (search_in_turn(p, Budget.parse(60), searchers=["mcmc", "portfolio"], seed=2) for _ in range(2))
    assert document(one) == document(other)
    assert one.plan.search.searchers.keys() == {"mcmc", "portfolio"}
    assert one.plan.search.found_by in ("mcmc", "portfolio")


def test_a_list_of_one_searcher_is_the_search_of_this_searcher(gpt):
    p = problem(gpt())
    assert document(search_in_turn(p, Budget.parse(40), searchers=["portfolio"])) == document(
        search(p, Budget.parse(40), searcher="portfolio")
    )


def test_a_proof_ends_the_search(mlp):
    p = problem(mlp((64, 4096, 64)), "2xV100", 8, {"num_micro_batches": 2})
    found = search_in_turn(p, Budget.parse(10**6), searchers=["exhaustive", "dqn"])
    assert found.proven and found.plan.search.proven
    assert found.plan.search.searchers.keys() == {"exhaustive"}


def test_a_searcher_that_refuses_leaves_the_others_their_turn(light_graph):
    p = problem(light_graph("squeezenet"))
    found = search_in_turn(p, Budget.parse(40), searchers=["exhaustive", "random"])
    assert found.plan.search.searchers["exhaustive"] is None
    assert found.plan.search.found_by == "random"
    assert any(line.startswith("exhaustive did not search") for line in found.plan.warnings)


def test_where_nothing_fits(gpt):
    p = problem(gpt(layers=2, hidden=8192, heads=64, seq=2048, vocab=50000), "2xP100", 2)
    with pytest.raises(NothingFits) as caught:
        search_in_turn(p, Budget.parse(30), searchers=["random", "mcmc"])
    assert caught.value.nearest["stages"]


def test_after_a_stop_nobody_else_begins(gpt):
    seen = []
    found = search_in_turn(
        problem(gpt()),
        Budget.parse("600s"),
        searchers=NAMES,
        on_progress=seen.append,
        should_stop=lambda: len(seen) >= 2,
    )
    assert {p.searcher for p in seen} <= {"random", "expert"}  # which is what random falls back on
    assert list(found.plan.search.searchers) == ["random"]
    assert found.plan.estimate.fits


def test_seconds_that_are_left_over_go_to_later_searchers(gpt, monkeypatch):
    p = problem(gpt())
    plan = search(p, Budget.parse(5), searcher="expert")
    now, budgets, told = [100.0], [], []
    took = iter([1.0, 17.0, 20.0])

    def fake(problem, budget, *, on_progress, **rest):
        budgets.append(budget.seconds)
        on_progress(
            Progress(searcher="x", evaluations=1, seconds=0, best_step_time_s=None, lower_bound_s=0, fraction=1.0)
        )
        now[0] += next(took)
        return plan

    monkeypatch.setattr(in_turn, "search", fake)
    found = search_in_turn(
        p, Budget.parse("30s"), searchers=NAMES, clock=lambda: now[0], on_progress=lambda p: told.append(p.fraction)
    )
    assert budgets == [10.0, 14.5, 12.0]
    assert told == [pytest.approx(k / 3) for k in (1, 2, 3)]
    assert found.seconds == 38.0


@pytest.mark.parametrize(
    ("names", "budget", "field"),
    [
        ([], "30s", "searchers"),
        (["mcmc", "oracle"], "30s", "searchers[1]"),
        (["mcmc", "dqn", "mcmc"], "30s", "searchers[2]"),
        (["mcmc", "dqn"], 1, "budget"),
    ],
)
def test_lists_that_cannot_be_run(gpt, names, budget, field):
    with pytest.raises(ProblemError) as caught:
        search_in_turn(problem(gpt()), Budget.parse(budget), searchers=names)
    assert caught.value.field == field
    assert caught.value.repair
