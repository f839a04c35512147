from __future__ import annotations

import itertools
import json
import signal
from dataclasses import replace

import pytest

from agents import Budget, search, search_offer
from agents.candidates import named_candidates, with_parts
from agents.recommend import DAY, Goals, recommend, sizes, steps_of
from agents.worker_processes import WorkerProcesses
from automap.cluster import parse_cluster
from automap.errors import ClusterError, NothingFits, ProblemError
from automap.price.estimate import lower_bound_s
from automap.problem import Problem
from automap.verify import Verifier
from ir import zoo

CLUSTERS = ("1xP40", "1x8xV100-16GB", "2x8xV100-16GB@25Gbit", "1x8xA100", "2x8xA100", "1x8xH100")
TRAINING = {"global_batch": 64}
PRICES = {"P40": 0.1, "V100-16GB": 0.5, "a100": 1.5, "H100": 2.5}


@pytest.fixture(scope="module")
def graph():
    return zoo.build("bert-large")


@pytest.fixture(scope="module")
def found(graph):
    return recommend(graph, CLUSTERS, TRAINING, Goals(prices=PRICES))


def test_every_candidate_has_what_a_search_finds(graph, found):
    assert [one.cluster for one in found.candidates if one.part_of is None] == list(CLUSTERS)
    for one in found.candidates:
        problem = Problem.build(graph, one.where, TRAINING)
        try:
            step_s = search(problem, Budget(), searcher="expert").step_time_s
        except NothingFits:
            step_s = None
        beaten = one.fault is not None and "which costs no more" in one.fault
        assert beaten or one.step_time_s == step_s
        if beaten:
            better = next(other for other in found.candidates if f"as {other.cluster}, " in one.fault)
            assert better.num_devices <= one.num_devices and better.cost_per_hour <= one.cost_per_hour
            assert better.step_time_s < one.lower_bound_s
        assert one.lower_bound_s is not None
        assert step_s is None or one.lower_bound_s <= step_s


def test_clusters_are_rated_by_the_plans_of_a_target():
    """Accelerate gives equally many samples to all ranks: 61 go to one or to 61, so that of two devices one is idle."""
    graph, clusters = zoo.build("gpt:layers=4,hidden=256,heads=4,seq_len=128,vocab_size=512"), ("1xL4", "2xL4", "61xL4")
    found = recommend(graph, clusters, {"global_batch": 61, "target": "accelerate"}, Goals())
    times = {candidate.cluster: candidate.step_time_s for candidate in found.candidates}
    one, two, many = (times[text] for text in clusters)
    for cluster, step_s in ((clusters[0], one), (clusters[2], many)):
        problem = Problem.build(graph, cluster, {"global_batch": 61, "target": "accelerate"})
        assert step_s == search(problem, Budget(), searcher="expert").step_time_s
    assert two == one
    assert found.fastest.plan.training.target == "accelerate"


@pytest.mark.slow
def test_devices_that_fixed_degrees_leave_idle(graph):
    """Three equal stages have no plan on four devices, and none on two."""
    hints = {"fix": {"pp": 3}}
    found = recommend(graph, ("1x4xA100", "1x2xA100"), TRAINING, Goals(), hints=hints)
    four, two = (one for one in found.candidates if one.part_of is None)
    assert two.step_time_s is None and "pp" in two.fault
    plan, problem = found.fastest.plan, Problem.build(graph, "1x4xA100", TRAINING, hints)
    assert plan.estimate.step_time_s == pytest.approx(four.step_time_s, rel=1e-9)
    assert not Verifier(problem).violations(plan)
    assert len(plan.stages) == 3 and len({device for stage in plan.stages for device in stage.devices}) == 3
    assert any("leaves 1 of 4 devices" in warning for warning in plan.warnings)
    best = search_offer(problem, Budget(evaluations=200), searchers=("expert",), tie=0.0).plan
    assert best.estimate.step_time_s == pytest.approx(four.step_time_s, rel=1e-9)


def test_no_candidate_beats_one_of_the_front_and_every_other_one_is_beaten(found):
    able = [one for one in found.candidates if one.step_time_s is not None]

    def beats(one, other):
        no_worse = one.cost_per_hour <= other.cost_per_hour and one.step_time_s <= other.step_time_s
        return no_worse and (one.cost_per_hour, one.step_time_s) != (other.cost_per_hour, other.step_time_s)

    front = [one for one in able if not any(beats(other, one) for other in able)]
    assert sorted(one.cluster for one in found.front) == sorted(one.cluster for one in front)
    assert found.fastest.step_time_s == min(one.step_time_s for one in able)
    assert found.cheapest.cost_per_step == min(one.cost_per_step for one in able)
    assert found.fewest.num_devices == min(one.num_devices for one in able)
    assert found.fastest.plan.estimate.step_time_s == found.fastest.step_time_s


def test_prices_are_those_of_all_devices(found):
    costs = {one.cluster: one.cost_per_hour for one in found.candidates}
    assert costs["2x8xV100-16GB@25Gbit"] == 16 * 0.5
    assert costs["2x8xA100"] == 16 * 1.5


def test_parts_of_the_named_clusters_are_candidates(graph, found):
    parts = [one for one in found.candidates if one.part_of is not None]
    assert {one.part_of for one in parts} <= set(CLUSTERS) and len({one.cluster for one in found.candidates}) == len(
        found.candidates
    )
    for one in parts:
        whole = next(other for other in found.candidates if other.cluster == one.part_of)
        assert one.num_devices < whole.num_devices and set(one.devices) < set(whole.devices)
        # A preset that names a part means the same devices and links.
        assert lower_bound_s(Problem.build(graph, one.cluster, TRAINING)) == one.lower_bound_s
    # No part is a cluster that is named, though a host of one may be called otherwise.
    assert {one.cluster for one in parts}.isdisjoint({"1x8xA100-80GB", "1x8xV100-16GB"})
    hours = {one.cluster: one.cost_per_hour for one in parts}
    assert hours["1x4xH100-80GB"] == 4 * 2.5


@pytest.mark.slow
def test_fewer_devices_of_the_only_cluster_are_fast_enough_or_cost_less(graph):
    """On two hosts behind a slow network, a step costs less on one of them, and one is fast enough for a long step."""
    slow = "2x8xA100-80GB@10Gbit"
    alone = search(Problem.build(graph, "1x8xA100-80GB", TRAINING), Budget(), searcher="expert").step_time_s
    found = recommend(graph, [slow], TRAINING, Goals(target_step_s=1.01 * alone))
    whole = next(one for one in found.candidates if one.cluster == slow)
    assert found.fewest.cluster == "1x8xA100-80GB" and found.fewest.part_of == slow
    assert found.fewest.step_time_s == pytest.approx(alone, rel=1e-9)
    assert found.cheapest.device_seconds == min(one.device_seconds for one in found.candidates if one.step_time_s)
    assert found.cheapest.device_seconds < whole.device_seconds
    assert found.cheapest.plan.estimate.step_time_s == found.cheapest.step_time_s


def test_a_part_that_no_preset_describes_is_called_by_its_devices(graph, tmp_path):
    """Two devices of five have fast links to each other, and slow ones to the others."""
    rows = [[0.0 if a == b else 50.0 if {a, b} <= {1, 3} else 0.1 for b in range(5)] for a in range(5)]
    document = {**parse_cluster("5x1xV100-16GB").to_json(), "bandwidth_GBps": rows}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(document))
    found = recommend(graph, [str(path)], TRAINING, Goals())
    two = next(one for one in found.candidates if one.devices == (1, 3))
    assert two.cluster == f"2x1xV100-16GB of {path}, devices 1,3"
    assert two.step_time_s == search(Problem.build(graph, two.where, TRAINING), Budget(), searcher="expert").step_time_s
    assert found.fastest == replace(two, plan=found.fastest.plan)


def test_sizes_of_one_kind_have_hardly_a_part_that_is_no_candidate():
    named = named_candidates(sizes(["H100"], 128), None)
    assert [one.cluster for one in with_parts(named, 512, None)] == [one.cluster for one in named]


@pytest.mark.slow
def test_goals_leave_out_what_does_not_meet_them(graph, found):
    limit = sorted(one.step_time_s for one in found.candidates if one.step_time_s)[2]
    met = recommend(graph, CLUSTERS, TRAINING, Goals(target_step_s=limit, prices=PRICES))
    assert all(one.step_time_s <= limit for one in met.front)
    assert met.fewest.num_devices == min(
        one.num_devices for one in found.candidates if one.step_time_s and one.step_time_s <= limit
    )
    cheap = recommend(graph, CLUSTERS, TRAINING, Goals(max_cost_per_hour=12.0, prices=PRICES))
    assert all(one.cost_per_hour <= 12.0 for one in cheap.front)


@pytest.mark.slow
def test_processes_change_nothing():
    clusters, graph = sizes(["A100"], 128), zoo.build("gpt:layers=1,hidden=64,heads=4,vocab_size=256,seq_len=32")
    one, two = (recommend(graph, clusters, TRAINING, Goals(), processes=count) for count in (1, 2))
    assert len(clusters) >= 16
    assert one.candidates == two.candidates


@pytest.mark.slow
def test_where_processes_are_killed_this_one_rates_the_rest(monkeypatch, caplog):
    def killed(count, begin, *arguments):
        return WorkerProcesses(count, signal.raise_signal, signal.SIGKILL)

    clusters, graph = sizes(["A100"], 4), zoo.build("gpt:layers=1,hidden=64,heads=4,vocab_size=256,seq_len=32")
    alone = recommend(graph, clusters, TRAINING, Goals())
    monkeypatch.setattr("agents.recommend.FEW", 1)
    monkeypatch.setattr("agents.recommend.WorkerProcesses", killed)
    assert recommend(graph, clusters, TRAINING, Goals(), processes=2).candidates == alone.candidates
    assert [record.message for record in caplog.records] == [
        "a process that rated clusters was killed: the other clusters are rated one by one"
    ]


def test_leaving_out_what_is_beaten_changes_no_answer(monkeypatch):
    clusters, graph = sizes(["A100", "P40"], 8), zoo.build("vgg19")
    answers = []
    for wave in (1, 3, len(clusters)):
        monkeypatch.setattr("agents.recommend.WAVE", wave)
        found = recommend(graph, clusters, TRAINING, Goals(prices={"A100": 2.0, "P40": 2.0}))
        standing = [one.cluster for one in (found.fewest, found.cheapest, found.fastest)]
        rated = sum(one.step_time_s is not None for one in found.candidates)
        answers.append(([one.cluster for one in found.front], standing, rated))
    assert [answer[:2] for answer in answers] == [answers[2][:2]] * 3
    # One after another, some are beaten before they are rated; all at once, none is.
    assert answers[0][2] < answers[2][2]


def test_contradictory_goals_are_told_what_is_possible(graph, found):
    steps = steps_of(graph, 64, 1e12)
    assert steps == 1e12 / (64 * 512)
    fastest_s = found.fastest.step_time_s
    goals = Goals(target_step_s=0.99 * fastest_s, steps=steps)
    with pytest.raises(ProblemError) as refused:
        recommend(graph, CLUSTERS, TRAINING, goals)
    assert refused.value.field == "target_step"
    assert found.fastest.cluster in refused.value.repair
    assert f"{steps * fastest_s / DAY:,.4g} days" in refused.value.repair
    with pytest.raises(ProblemError, match="no plan takes less than"):
        recommend(graph, CLUSTERS, TRAINING, Goals(target_step_s=1e-6))
    with pytest.raises(ProblemError, match="allow that") as dear:
        recommend(graph, CLUSTERS, TRAINING, Goals(max_cost_per_hour=0.01, prices=PRICES))
    assert dear.value.field == "max_cost_per_hour"


def test_sizes_are_parts_of_nodes_and_nodes():
    found = [parse_cluster(text).num_devices for text in sizes(["H100"], 512)]
    assert found[:4] == [1, 2, 4, 8]
    assert found[-1] == 512
    assert all(after / before <= 2.0 for before, after in itertools.pairwise(found))
    assert all(after / before <= 1.25 for before, after in itertools.pairwise(found) if before >= 64)
    assert {2**power for power in range(10)} <= set(found)
    assert len(sizes(["H100", "A100"], 512)) == 2 * len(found)


@pytest.mark.parametrize(
    ("arguments", "error", "field"),
    [
        ((["1x8xZ9000"], TRAINING, Goals()), ClusterError, "cluster"),
        ((["1x8xA100"], {"global_batch": 0}, Goals()), ProblemError, "training.global_batch"),
    ],
)
def test_wrong_goals_and_prices_are_refused(graph, arguments, error, field):
    with pytest.raises(error) as refused:
        recommend(graph, *arguments)
    assert refused.value.field == field
    with pytest.raises(ProblemError, match="Add its price"):
        recommend(graph, ["1x8xA100"], TRAINING, Goals(prices={"H100": 1.0}))
    with pytest.raises(ProblemError, match="no sequence"):
        steps_of(zoo.build("vgg19"), 64, 1e9)
    with pytest.raises(ProblemError, match="1e12"):
        steps_of(graph, 64, 0.0)
