"""How quiet a host was while it was measured: from what its system counts to words for a reader."""

import json
import os
from dataclasses import replace

import pytest
from made_up_host import two_ranks
from small_graphs import build_mlp

from automap.cluster import parse_cluster
from automap.errors import ClusterError
from automap.fitted_curves import QUIET, Conditions
from automap.problem import Problem
from automap.runtime.profiler import measure_host as profiler
from automap.runtime.profiler.busy_host import Meter, conditions, core_times, shares
from automap.space.space import PlanSpace

STAT = """cpu  900 90 9 9000 9 9 9 90 0 0
cpu0 100 20 30 1000 5 6 7 40 8 9
cpu1 200 0 50 900 0 0 0 10 0 0
cpu10 9000 0 0 0 0 0 0 0 0 0
intr 12 0
"""
CALM = Conditions(others=0.0, stolen=0.0, waiting=0.0, spread=0.0)


def test_only_the_own_cores_count():
    per_second = os.sysconf("SC_CLK_TCK")
    assert core_times({0, 1}, STAT) == pytest.approx((400 / per_second, 50 / per_second))
    assert core_times({1}, STAT) == pytest.approx((250 / per_second, 10 / per_second))
    assert core_times({0, 1}, "") == (0.0, 0.0), "a system that does not say"


def test_what_others_had_is_what_the_ranks_did_not():
    readings = [
        {"cores": 2, "passed_s": 10.0, "own_s": 9.0, "busy_s": 18.0, "stolen_s": 1.0},
        {"cores": 2, "passed_s": 10.0, "own_s": 5.0, "busy_s": 18.0, "stolen_s": 1.0},
    ]
    assert shares(readings) == pytest.approx((0.2, 0.05))
    results = [{"host": host, "computed_s": 8.0, "worked_s": 6.0, "spreads": [0.1, 0.2, 0.4]} for host in readings]
    assert conditions(results) == Conditions(others=0.2, stolen=0.05, waiting=0.25, spread=0.2)
    readings[1]["own_s"] = 12.0
    assert shares(readings)[0] == 0.0, "ticks are rougher than the clocks of processes"


def test_a_meter_sees_this_process_work():
    meter, total = Meter(), 0
    while meter.read()["own_s"] < 0.05:
        total += sum(range(1000))
    found = meter.read()
    assert found["passed_s"] >= found["own_s"] * 0.9
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert found["busy_s"] >= 0.0
    assert total


@pytest.fixture(scope="module")
def calm():
    return profiler.build_cluster("cpu", two_ranks(), profiler.step_plans("cpu"))


@pytest.mark.parametrize("name", QUIET)
def test_a_busy_host_is_named_wherever_its_prices_are_read(calm, name):
    assert calm.constants.conditions.seen() == calm.warnings == ()
    busy = replace(CALM, **{name: 2.0 * QUIET[name]})
    cluster = replace(calm, constants=replace(calm.constants, conditions=busy))
    (line,) = cluster.warnings
    assert f"{2.0 * QUIET[name]:.0%}" in line
    assert "`automap profile`" in line
    assert parse_cluster(json.loads(json.dumps(cluster.to_json()))).warnings == (line,)
    problem = Problem.build(build_mlp((64, 256, 32)), cluster, {"global_batch": 8}, {"fix": {"dp": 2}})
    space = PlanSpace(problem)
    plan = space.decode(space.even_values(space.meshes.shapes[0], recompute="none", zero=0))
    assert line in plan.warnings


def test_conditions_that_nothing_gives_are_refused(calm):
    document = calm.to_json()
    document["constants"]["conditions"]["others"] = -0.1
    with pytest.raises(ClusterError) as caught:
        parse_cluster(document)
    assert caught.value.field == "cluster.constants.conditions.others"
