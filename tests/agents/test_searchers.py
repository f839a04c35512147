"""Searchers against brute force, each other and their promises."""

import dataclasses
import json
import subprocess
import sys
import time

import numpy as np
import pytest

from agents import Budget, search
from agents.incumbent import Incumbent
from automap.cluster import parse_cluster
from automap.errors import NothingFits, ProblemError
from automap.plan import Plan
from automap.price.estimate import price
from automap.problem import Problem
from automap.space.space import PlanSpace
from automap.space.templates import templates


def problem(graph, cluster="2x2xV100@25Gbit", global_batch=8, fix=None, **training):
    return Problem.build(graph, parse_cluster(cluster), {"global_batch": global_batch, **training}, {"fix": fix or {}})


def brute_force(space):
    best, pending = float("inf"), [()]
    while pending:
        prefix = pending.pop()
        if len(prefix) < len(space.slots):
            pending += [(*prefix, int(v)) for v in np.flatnonzero(space.legal(prefix))]
            continue
        outcome = space.evaluator.evaluate(space.lowered(prefix))
        if outcome.fits:
            best = min(best, outcome.step_time_s)
    return best


@pytest.mark.parametrize("text", ["30s", "2m", "1.5h", "2000", 64])
def test_a_budget_is_a_time_or_a_number_of_evaluations(text):
    budget = Budget.parse(text)
    assert (budget.seconds is None) != (budget.evaluations is None)


@pytest.mark.parametrize(
    "searcher", ["elimination", "ilp", "spp", "piper", "alpa", "dapple", "mcmc", "hill-climbing", "expert", "portfolio"]
)
def test_no_searcher_prices_more_than_its_budget(mlp, monkeypatch, searcher):
    """Templates apart: all are priced, and a quarter of the budget at most is charged for them."""
    spent = []
    result = Incumbent.result

    def noted(self, **known):
        spent.append(self.charged)
        return result(self, **known)

    monkeypatch.setattr(Incumbent, "result", noted)
    for most in (1, 2, 3, 13):
        assert search(problem(mlp()), Budget(evaluations=most), searcher=searcher).plan.estimate is not None
        assert spent.pop() <= most


@pytest.mark.parametrize("text", ["", "0", "-5", "1.5", "ten", "5 parsecs", "0s"])
def test_texts_that_are_no_budget_are_refused(text):
    with pytest.raises(ProblemError) as caught:
        Budget.parse(text)
    assert caught.value.field == "budget"


@pytest.mark.parametrize(
    ("widths", "cluster", "fix"),
    [
        ((64, 4096, 64), "2xV100", {"num_micro_batches": 2}),
        ((512, 512, 512), "2x1xV100@10Gbit", {"num_micro_batches": 1}),
        ((64, 8192), "4xV100", {"pp": 1, "num_micro_batches": 1}),
    ],
)
def test_exhaustive_finds_the_optimum(mlp, widths, cluster, fix):
    p = problem(mlp(widths), cluster, 8, fix)
    result = search(p, Budget.parse(10**7), searcher="exhaustive")
    space = PlanSpace(p)
    assert result.plan.estimate.step_time_s == brute_force(space)
    assert result.evaluations < 10**space.decades


def test_exhaustive_refuses_large_spaces(light_graph):
    with pytest.raises(ProblemError, match="more than"):
        search(problem(light_graph("resnet50")), Budget.parse(10), searcher="exhaustive")


@pytest.mark.slow
def test_dqn_alone_finds_the_optimum_of_a_small_space(mlp):
    p = problem(mlp((512, 512, 512)), "2x2xV100@10Gbit", 8, {"num_micro_batches": 1})
    optimum = search(p, Budget.parse(10**7), searcher="exhaustive").plan.estimate.step_time_s
    found = search(p, Budget.parse(400), searcher="dqn", seed=0)
    assert found.plan.estimate.step_time_s <= 1.01 * optimum
    assert found.plan.search.found_by == "dqn"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1])
def test_dqn_alone_beats_as_many_random_plans(light_graph, seed):
    p = problem(light_graph("vgg19"), "2x4xV100@25Gbit", 256)
    dqn = search(p, Budget.parse(300), searcher="dqn", seed=seed)
    random = search(p, Budget.parse(300), searcher="random", seed=seed)
    templates = search(p, Budget.parse(1), searcher="expert")
    assert dqn.evaluations == random.evaluations + templates.evaluations
    assert dqn.plan.search.found_by == "dqn"
    assert dqn.plan.estimate.step_time_s < min(random.plan.estimate.step_time_s, templates.plan.estimate.step_time_s)


@pytest.mark.slow
@pytest.mark.parametrize("searcher", ["dqn", "portfolio", "random", "expert"])
def test_one_seed_and_one_budget_give_one_plan(gpt, searcher):
    def run():
        plan = search(problem(gpt()), Budget.parse(150), searcher=searcher, seed=3).plan
        return json.dumps(
            dataclasses.replace(
                plan, search=dataclasses.replace(plan.search, seconds=None, first_after_s=None)
            ).to_json()
        )

    assert run() == run()


@pytest.mark.slow
def test_portfolio_is_never_worse_than_any_template(gpt, light_graph):
    for graph in (gpt(layers=4), light_graph("squeezenet")):
        p = problem(graph, "2x2xV100@25Gbit", 32)
        result = search(p, Budget.parse(100), seed=0)
        space = PlanSpace(p)
        outcomes = [space.evaluator.evaluate(space.lowered(v)) for _, v in templates(space)]
        best = min(o.step_time_s for o in outcomes if o.fits)
        record = result.plan.search
        assert result.plan.estimate.step_time_s <= best
        assert record.baselines["expert"] == best
        assert record.baselines["dp"] >= best
        assert record.found_by in ("expert", "elimination", "dqn", "mcmc")
        assert (record.found_by == "expert") == (result.plan.estimate.step_time_s == best)
        assert record.lower_bound_s <= result.plan.estimate.step_time_s


def test_plan_carries_everything_a_user_reads(gpt):
    p = problem(gpt())
    plan = search(p, Budget.parse(50), searcher="expert").plan
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert price(p, again) == plan.estimate
    assert plan.launch.startswith("torchrun")
    assert 0 < plan.search.num_operator_decisions < plan.search.num_decisions
    assert plan.why
    assert plan.estimate.error_band_s[0] < plan.estimate.step_time_s < plan.estimate.error_band_s[1]
    assert plan.estimate.tokens_per_s_per_device > 0


def test_progress_is_told_and_stop_is_heard(gpt):
    seen = []

    def stop():
        return len(seen) >= 2

    began = time.monotonic()
    result = search(problem(gpt()), Budget.parse("600s"), searcher="random", on_progress=seen.append, should_stop=stop)
    assert time.monotonic() - began < 60
    assert result.plan.estimate.fits
    fractions = [p.fraction for p in seen]
    assert fractions == sorted(fractions)
    assert all(p.lower_bound_s <= (p.best_step_time_s or float("inf")) for p in seen)


def test_a_given_plan_is_a_start(gpt):
    p = problem(gpt())
    start = search(p, Budget.parse(20), searcher="expert").plan
    result = search(p, Budget.parse(5), searcher="random", start=[start])
    assert result.plan.estimate.step_time_s <= start.estimate.step_time_s


@pytest.mark.parametrize("searcher", ["expert", "random", "portfolio"])
def test_templates_are_priced_once_where_nothing_fits(gpt, searcher, monkeypatch):
    listed, whole = [], Incumbent.price_templates
    monkeypatch.setattr(Incumbent, "price_templates", lambda self: listed.append(self) or whole(self))
    large = problem(gpt(layers=2, hidden=8192, heads=64, seq=2048), "2xP100", 2)
    with pytest.raises(NothingFits):
        search(large, Budget.parse(20), searcher=searcher)
    assert len(listed) == 1


@pytest.mark.parametrize("searcher", ["expert", "random"])
def test_nothing_fits_says_by_how_much_and_what_helps(gpt, searcher):
    p = problem(gpt(layers=2, hidden=8192, heads=64, seq=2048, vocab=50000), "2xP100", 2)
    with pytest.raises(NothingFits) as caught:
        search(p, Budget.parse(30), searcher=searcher)
    assert "GiB are missing" in caught.value.message
    assert "such devices" in caught.value.repair


def test_more_devices_that_help_need_not_divide_the_batch(gpt):
    """An odd batch, such as a prime one, has no factor in common with 2 devices, which a pipeline of 2 still uses."""
    large = gpt(layers=2, hidden=8192, heads=64, seq=128, vocab=8192)
    with pytest.raises(NothingFits) as caught:
        search(problem(large, "1xV100-32GB", 127), Budget.parse(30), searcher="expert")
    assert search(problem(large, "1x2xV100-32GB", 127), Budget.parse(30), searcher="expert").plan.estimate.fits
    assert "2 such devices (1x2xV100-32GB)" in caught.value.repair


def test_unknown_searcher(gpt):
    with pytest.raises(ProblemError) as caught:
        search(problem(gpt()), Budget.parse(1), searcher="oracle")
    assert caught.value.field == "searcher"


def test_searching_without_the_dqn_never_imports_torch():
    code = (
        "import sys, agents, agents.sampling.expert\n"
        "sys.exit('torch' in sys.modules or 'stable_baselines3' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
