"""The portfolio against brute force, its members and its promises; members are real processes here."""

import bisect
import itertools
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from all_plans import every_plan
from child_processes import called

from agents import Budget, search
from agents.incumbent import IllegalPlan, Incumbent
from agents.portfolio import portfolio
from agents.results.infeasibility_advice import fastest_template_s
from agents.sampling.expert import price_grid
from automap.bounds.partial_plans import BoundTable
from automap.cluster import parse_cluster
from automap.errors import NothingFits
from automap.families import families
from automap.problem import Problem
from automap.space.space import PlanSpace


def problem(graph, cluster="2x2xV100@25Gbit", global_batch=8, fix=None, **training):
    return Problem.build(graph, parse_cluster(cluster), {"global_batch": global_batch, **training}, {"fix": fix or {}})


def fastest(space):
    prices = space.price(np.array(list(every_plan(space))))
    return prices[prices[:, 1] <= 0.0, 0].min()


def document(result):
    plan = result.plan.to_json()
    for name in ("seconds", "first_after_s"):
        plan["search"].pop(name)
    return json.dumps(plan)


@pytest.fixture
def small_crew(monkeypatch):
    """Members begin at once, two annealing ones and nobody else."""
    monkeypatch.setattr(portfolio, "LEAST_S", 0.0)
    monkeypatch.setattr(portfolio, "PLACES", ())
    monkeypatch.setattr(portfolio, "cores", lambda: 3)


@pytest.mark.parametrize(
    ("widths", "cluster", "fix"),
    [
        ((64, 4096, 64), "2xV100", {"num_micro_batches": 2}),
        ((512, 512, 512), "2x1xV100@10Gbit", {"num_micro_batches": 1}),
        ((64, 8192), "4xV100", {"pp": 1, "num_micro_batches": 1}),
    ],
)
def test_small_spaces_are_proven_and_the_search_ends(mlp, widths, cluster, fix):
    p = problem(mlp(widths), cluster, 8, fix)
    # Without a proof this would not end.
    result = search(p, Budget.parse("10000h"))
    assert result.proven and result.plan.search.proven
    optimum = fastest(PlanSpace(p))
    assert result.plan.estimate.step_time_s == result.plan.search.lower_bound_s == optimum
    # What is said of any plan of the model, and of the space before it was searched, holds for the optimum.
    assert 0.0 < result.plan.estimate.lower_bound_s <= optimum
    assert BoundTable(PlanSpace(p)).first.time_s <= optimum


@pytest.mark.parametrize("evaluations", [1, 40, 300])
def test_it_is_never_worse_than_templates_or_what_was_given(light_graph, evaluations):
    p = problem(light_graph("vgg19"), "2x4xV100@25Gbit", 256)
    good = search(p, Budget.parse(4000), searcher="mcmc", seed=1).plan
    result = search(p, Budget.parse(evaluations), start=[good])
    record = result.plan.search
    assert result.plan.estimate.step_time_s <= good.estimate.step_time_s
    assert record.searchers["start"] == good.estimate.step_time_s
    assert record.baselines["expert"] == record.searchers["expert"]
    assert result.plan.estimate.step_time_s == min(filter(None, record.searchers.values()))
    assert not result.proven


def test_a_share_ends_inside_the_budget(gpt):
    space = PlanSpace(problem(gpt()))
    incumbent = Incumbent(space, Budget(evaluations=50), searcher="a")
    rng = np.random.default_rng(0)
    with incumbent.share(evaluations=20):
        incumbent.price(space.random_batch(rng, 20))
        assert incumbent.finished and incumbent.left == 0
    assert not incumbent.finished and incumbent.left == 30
    with incumbent.share(evaluations=100):
        assert incumbent.left == 30
    price_grid(incumbent)
    # Of 50 evaluations a quarter is charged for the grid, behind the 20 that were priced.
    assert incumbent.charged == 32 < incumbent.evaluations


def test_a_plan_says_which_searcher_found_what(gpt):
    space = PlanSpace(problem(gpt()))
    incumbent = Incumbent(space, Budget(evaluations=50), searcher="a")
    plan = space.random(np.random.default_rng(0))
    incumbent.add(plan, 3.0, 0.0)
    incumbent.searcher = "b"
    incumbent.add(plan, 4.0, 0.0)
    incumbent.add_from("c", plan, 2.0, 0.0)
    incumbent.add(plan, 2.0, 0.0)
    assert incumbent.best_by == "c"
    assert incumbent.reached == {"a": 3.0, "b": 2.0, "c": 2.0}
    assert (incumbent.evaluations, [seconds for _, _, seconds in incumbent.improvements]) == (3, [3.0, 2.0])


@pytest.mark.slow
def test_every_search_begins_with_the_network_under_any_budget(light_graph, monkeypatch, caplog):
    p = problem(light_graph("vgg19"), "2x4xV100@25Gbit", 256)
    first, second = (search(p, Budget.parse(64), seed=1) for _ in range(2))
    assert document(first) == document(second)
    for found in (first, search(p, Budget.parse("3s"), seed=1)):
        record = found.plan.search
        assert record.searchers["dqn"] < record.baselines["expert"]
        assert record.look_aheads > 0
    # Without a network that can be read the search goes on.
    monkeypatch.setattr(portfolio, "NETWORK", Path("nowhere"))
    without = search(p, Budget.parse(64), seed=1)
    assert "without the network's proposals" in caplog.text
    assert without.plan.search.searchers["dqn"] is None
    assert first.plan.estimate.step_time_s <= without.plan.estimate.step_time_s


def by_seed(tasks):
    return [list(same) for _, same in itertools.groupby(tasks, lambda task: task.seed)]


def test_further_processors_anneal_and_learn_with_seeds_of_their_own():
    known, wide = np.arange(40).reshape(20, 2), np.arange(60).reshape(30, 2)
    first, *tasks = by_seed(portfolio.member_tasks(None, 30.0, 8, seed=7, known=known, wide=wide))
    assert [task.kind for task in first] == ["elimination", "dqn", "ilp"]
    # Planners, which solve a mesh at once, begin with plans of many meshes.
    assert [len(task.start) for task in first] == [30, 16, 30]
    assert [task.kind for (task,) in tasks] == ["mcmc", "dqn", "mcmc", "dqn"]
    # 7 is the seed of the members of `PLACES`, 8 of the annealing beside them.
    assert [task.seed for (task,) in tasks] == [9, 10, 11, 12]
    assert [len(task.start) for (task,) in tasks] == [20, 16, 20, 16]
    assert {task.evaluations for (task,) in tasks} == {None}
    # A DQN takes seconds to begin.
    _, *short = by_seed(portfolio.member_tasks(None, 6.0, 5, seed=7, known=known, wide=wide))
    assert [task.kind for (task,) in short] == ["mcmc"] * 3


def test_an_illegal_plan_is_never_returned(gpt, monkeypatch):
    from automap import verify

    broken = verify.Violation(where="stages[0]", what="twice")
    monkeypatch.setattr(verify.Verifier, "violations", lambda self, plan: (broken,))
    with pytest.raises(IllegalPlan, match="twice"):
        search(problem(gpt()), Budget.parse(5), searcher="random")


@pytest.mark.parametrize("searcher", ["random", "mcmc", "hill-climbing", "portfolio"])
def test_one_evaluation_is_enough_for_the_best_template(gpt, searcher):
    # So tight that a plan drawn at random does not fit.
    p = problem(gpt(layers=2, hidden=4096, heads=32, seq=1024, vocab=50000), "2xV100-16GB", 8)
    expert = search(p, Budget.parse(1), searcher="expert").plan.estimate
    found = search(p, Budget.parse(1), searcher=searcher)
    assert found.plan.estimate.step_time_s <= 10 * expert.step_time_s
    assert found.plan.estimate.fits


# -- nothing fits ----------------------------------------------------------------------------------------------------

BIG = {"layers": 2, "hidden": 8192, "heads": 64, "seq": 2048, "vocab": 50000}


def changed(p, change):
    cluster, hints = p.cluster, {"fix": {}}
    training = {"global_batch": p.training.global_batch, "precision": p.precision}
    fixed = {k: v for k in ("num_micro_batches", "recompute", "zero") if (v := getattr(p.hints.fix, k)) is not None}
    root, _, name = change["field"].partition(".")
    if root == "cluster":
        cluster = parse_cluster(change["value"])
    elif root == "training":
        training[name] = int(change["value"]) if name == "global_batch" else change["value"]
    else:
        fixed.pop(name.removeprefix("fix."))
    return Problem.build(p.graph, cluster, training, {**hints, "fix": fixed})


@pytest.mark.parametrize(
    ("size", "cluster", "batch", "fix", "fields"),
    [
        (BIG, "2xP100", 2, {}, {"training.optimizer", "cluster"}),
        (
            {**BIG, "hidden": 2048, "heads": 16, "layers": 4},
            "2xV100-16GB",
            64,
            {"num_micro_batches": 1, "recompute": "none"},
            {"hints.fix.num_micro_batches", "training.global_batch", "cluster"},
        ),
    ],
)
@pytest.mark.parametrize("searcher", ["portfolio", "mcmc"])
def test_nothing_fits_names_what_really_helps(gpt, size, cluster, batch, fix, fields, searcher):
    p = problem(gpt(**size), cluster, batch, fix)
    with pytest.raises(NothingFits) as caught:
        search(p, Budget.parse(60), searcher=searcher)
    fault = caught.value
    assert "GiB are missing" in fault.message and fault.value == p.cluster.name
    assert fault.nearest["stages"]
    assert {change["field"] for change in fault.changes} >= fields
    family = next(names for names in families().values() if p.cluster.nodes[0].device in names)
    for change in fault.changes:
        assert change["about"] in fault.repair
        if change["field"] == "cluster":
            assert set(parse_cluster(change["value"]).devices) <= set(family)
        found = search(changed(p, change), Budget.parse(1), searcher="expert").plan.estimate
        assert found.step_time_s == change["step_time_s"]


def measured(text):
    """A cluster all of whose bandwidths were measured, and are alike."""
    document = parse_cluster(text).to_json()
    count = parse_cluster(text).num_devices
    rows = [[0.0 if one == other else 1.0 for other in range(count)] for one in range(count)]
    return parse_cluster({**document, "bandwidth_GBps": rows})


@pytest.mark.parametrize("cluster", [measured("2x1xP100"), "1xP40+1xP100"])
def test_larger_and_more_devices_are_advised_on_any_cluster(gpt, cluster):
    """If bandwidths are measured, or devices are of several kinds, only memory decides what fits."""
    p = Problem.build(gpt(**BIG), cluster, {"global_batch": 2})
    with pytest.raises(NothingFits) as caught:
        search(p, Budget.parse(1), searcher="expert")
    clusters = [change for change in caught.value.changes if change["field"] == "cluster"]
    larger, more = sorted(clusters, key=lambda change: parse_cluster(change["value"]).num_devices)
    assert parse_cluster(larger["value"]).num_devices == p.cluster.num_devices
    assert parse_cluster(more["value"]).num_devices > p.cluster.num_devices
    for change in clusters:
        found = search(changed(p, change), Budget.parse(1), searcher="expert").plan.estimate
        assert found.step_time_s == change["step_time_s"]


def test_half_precision_is_advised_beside_another_optimizer(gpt):
    """Where hardly a tenth of a GiB is missing, both save it."""
    graph = gpt(layers=2, hidden=512, heads=8, seq=4096, vocab=50000)
    training = {"global_batch": 1, "precision": "fp32"}

    def reserving(tenths, **more):
        hints = {"memory_reserve_bytes": tenths / 10 * 2**30}
        return Problem.build(graph, "1xV100-16GB", {**training, **more}, hints)

    # Tenths of a GiB of the 16, of which the first are free.
    least = bisect.bisect_left(range(160), True, key=lambda tenths: fastest_template_s(reserving(tenths)) is None)
    p = reserving(least)
    with pytest.raises(NothingFits) as caught:
        search(p, Budget.parse(1), searcher="expert")
    changes = {change["field"]: change for change in caught.value.changes}
    for name in ("precision", "optimizer"):
        change = changes[f"training.{name}"]
        fits = reserving(least, **{name: change["value"]})
        assert search(fits, Budget.parse(1), searcher="expert").step_time_s == change["step_time_s"]


def test_no_fewer_devices_would_do(gpt):
    p = problem(gpt(**BIG), "2xP100", 12)
    with pytest.raises(NothingFits) as caught:
        search(p, Budget.parse(60), searcher="expert")
    grown = next(c for c in caught.value.changes if c["field"] == "cluster" and "P100" in c["value"])
    devices = parse_cluster(grown["value"]).num_devices
    for fewer in range(3, devices):
        if np.gcd(fewer, 12) > 1:
            with pytest.raises(NothingFits):
                search(problem(gpt(**BIG), f"{fewer}xP100", 12), Budget.parse(1), searcher="expert")


def test_the_nearest_plan_travels_with_the_error(gpt):
    from service.problems import error_of, problem_of

    with pytest.raises(NothingFits) as caught:
        search(problem(gpt(**BIG), "2xP100", 2), Budget.parse(1), searcher="expert")
    again = error_of(json.loads(json.dumps(problem_of(caught.value))))
    assert isinstance(again, NothingFits)
    assert again.nearest == caught.value.nearest
    assert list(again.changes) == list(caught.value.changes)


# -- members ---------------------------------------------------------------------------------------------------------


def mine():
    return called("agents.portfolio.members", psutil.Process().children(recursive=True))


def looking(every_s=0.05):
    """A function that returns `mine()`, but nothing within `every_s` of its last look: a look reads all processes."""
    last = [-math.inf]

    def look():
        if time.monotonic() - last[0] < every_s:
            return []
        last[0] = time.monotonic()
        return mine()

    return look


@pytest.mark.slow
def test_members_are_gone_within_a_second_of_a_cancel(gpt, small_crew):
    asked, look = {"since": None}, looking()

    def stop():
        if asked["since"] is None and len(look()) == 2:
            asked["since"] = time.process_time()
        return asked["since"] is not None

    result = search(problem(gpt(layers=4), "2x4xV100@25Gbit", 32), Budget.parse("600s"), should_stop=stop)
    # Of the processor's time: others may be using it.
    assert time.process_time() - asked["since"] < 1.0
    assert not mine()
    assert result.plan.estimate.fits


@pytest.mark.slow
def test_members_die_with_their_parent(gpt):
    code = (
        "import sys; sys.path.insert(0, 'tests'); from small_graphs import build_gpt; "
        "from agents import Budget, search; from agents.portfolio import portfolio; "
        "from automap.cluster import parse_cluster; from automap.problem import Problem; "
        "portfolio.cores = lambda: 3; portfolio.PLACES = (); "
        "p = Problem.build(build_gpt(), parse_cluster('2x4xV100@25Gbit'), {'global_batch': 32}, {}); "
        "search(p, Budget.parse('600s'))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        members = []
        while len(members) < 2:
            assert parent.poll() is None
            members = psutil.Process(parent.pid).children()
            time.sleep(0.05)
        # A member asks for its parent's signal, and then moves its own output away from that of its libraries.
        while not all(str(Path(f"/proc/{member.pid}/fd/1").readlink()) == os.devnull for member in members):
            assert parent.poll() is None
            time.sleep(0.01)
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    _, alive = psutil.wait_procs(members, timeout=20)
    assert not alive


@pytest.mark.slow
def test_a_forked_daemon_may_search_with_members(gpt, small_crew):
    def run(queue):
        result = search(problem(gpt(layers=4), "2x4xV100@25Gbit", 32), Budget.parse("6s"))
        queue.put((result.plan.estimate.step_time_s, result.plan.search.evaluations, len(mine())))

    forking = multiprocessing.get_context("fork")
    queue = forking.Queue()
    process = forking.Process(target=run, args=(queue,), daemon=True)
    process.start()
    seconds, evaluations, left = queue.get(timeout=120)
    process.join(30)
    assert seconds > 0 and evaluations > 490 and left == 0


@pytest.mark.slow
def test_a_member_that_dies_harms_nobody(gpt, small_crew, caplog):
    killed, look = [], looking()

    def stop():
        if not killed:
            for child in look()[:1]:
                child.kill()
                killed.append(child.pid)
        return False

    result = search(problem(gpt(layers=4), "2x4xV100@25Gbit", 32), Budget.parse("4s"), should_stop=stop)
    assert killed
    assert result.plan.estimate.fits
    assert "ended early" in caplog.text


@pytest.mark.slow
def test_cores_change_nothing_but_the_time(gpt, monkeypatch):
    monkeypatch.setattr(portfolio, "LEAST_EVALUATIONS", 300)
    p = problem(gpt(), "2x2xV100@25Gbit", 32)
    num_templates = search(p, Budget.parse(1), searcher="expert").evaluations
    found = []
    for count in (1, 8):
        monkeypatch.setattr(portfolio, "cores", lambda count=count: count)
        result = search(p, Budget.parse(800), seed=3)
        # Planners of unlike stages may have plans too.
        assert result.plan.search.searchers.keys() >= {"expert", "dqn", "mcmc", "elimination"}
        assert result.plan.search.searchers["dqn"] is not None
        # A member that has explored all that may be faster ends before its share is used.
        assert result.evaluations <= 800 + num_templates - min(num_templates, 200)
        found.append(document(result))
    assert found[0] == found[1]
