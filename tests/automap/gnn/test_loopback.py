"""Plans really run: no faster than the interfaces allow, and to the end under every schedule."""

import contextlib
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest

from automap.errors import ProblemError
from automap.gnn.kernels.simulation import simulate
from automap.gnn.loopback import machine, network, trial
from automap.gnn.loopback.controller import hosts
from automap.gnn.made_up import Shape, make_problem
from automap.gnn.problem import Amount, GnnProblem
from automap.gnn.simulator import POLICIES, Simulator


@pytest.fixture(scope="module")
def simulator():
    problem = make_problem(Shape(machines=3, workers=2, samplers=2, nic_Gbps=0.16, train_s=0.01, sample_s=0.01))
    small = tuple(replace(flow, bytes=Amount(mean=flow.bytes.average * 0.003)) for flow in problem.flows)
    return Simulator(replace(problem, flows=small), iterations=2, seed=0)


def allows_namespaces() -> bool:
    words = ["unshare", "--map-root-user", "--net", "true"]
    has_all = all(map(shutil.which, network.TOOLS))
    return has_all and subprocess.run(words, capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("by_kernel", [False, True])
def test_limits_hold_under_every_schedule_and_whatever_the_controller_believes(simulator, by_kernel):
    if by_kernel and not allows_namespaces():
        pytest.skip("this host allows no network namespaces")
    drawn = np.random.default_rng(1).integers(3, size=len(simulator.pinned))
    place = np.where(simulator.pinned < 0, drawn, simulator.pinned)
    arrays, bound_s = simulator.arrays, simulator.bounds(place).max()
    assert bound_s > 0.05
    with hosts(arrays, by_kernel=by_kernel) as machines:
        for policy in POLICIES:
            seconds = machines.run(place, simulator.ranks(place), policy)
            # A bucket holds 10 ms of its rate when a run begins.
            assert bound_s - 0.02 < seconds < 20 * bound_s
        machines.arrays = arrays._replace(rate_out=10 * arrays.rate_out, rate_in=10 * arrays.rate_in)
        seconds = machines.run(place, simulator.ranks(place), "priority")
        assert seconds > (bound_s - 0.02) / (network.HEADERS if by_kernel else 1.0)


def test_a_host_without_namespaces_is_named(simulator, monkeypatch):
    monkeypatch.setattr(network.shutil, "which", lambda tool: None)
    with pytest.raises(ProblemError, match="no unshare"), hosts(simulator.arrays, by_kernel=True):
        pass


def test_a_bucket_lets_a_chunk_through_that_a_slow_transfer_has_saved_up(monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(machine.time, "sleep", slept.append)
    bucket = machine.Bucket(1000.0)
    bucket.take(machine.LEAST)
    assert not slept
    bucket.take(1000)
    assert slept == [pytest.approx(1.0, abs=0.1)]


class Simulated:
    """Hosts that simulate what they are to run."""

    def __init__(self, arrays):
        self.arrays, self.seconds = arrays, 0.0

    def run(self, place, ranks, policy):
        end_s = np.empty(len(self.arrays.time_s))
        simulate(self.arrays, place, ranks, POLICIES.index(policy), np.empty((0, 5)), end_s)
        self.seconds += end_s[-1]
        return end_s[-1]


class Anywhere:
    """A plan that places tasks by turns."""

    schedule = "fair"

    def places(self, simulator):
        turns = np.arange(len(simulator.pinned)) % len(simulator.room)
        return np.where(simulator.pinned < 0, turns, simulator.pinned)

    def ranks(self, problem):
        return np.arange(len(problem.flows))


@pytest.mark.parametrize("longer", [1e-5, 1.0, 1e4])
def test_a_trial_keeps_all_ratios_and_ends_within_a_minute(longer, monkeypatch):
    document = make_problem(Shape(machines=3, workers=2, samplers=1)).to_json()
    document["machines"][0]["nic_out_Gbps"] /= 100.0
    for task in document["tasks"]:
        task["time_s"]["mean"] *= longer
    for flow in document["flows"]:
        flow["bytes"]["mean"] *= longer
    started = []

    @contextlib.contextmanager
    def simulated(arrays, **_):
        started.append(Simulated(arrays))
        yield started[0]

    monkeypatch.setattr(trial, "hosts", simulated)
    found = trial.try_plan(GnnProblem.from_json(document), Anywhere(), iterations=4)
    assert found.measured_s == pytest.approx(found.simulated_s, rel=1e-6)
    assert 0.4 * 4 < started[0].seconds < 60.0


def test_interfaces_that_are_too_unlike_for_a_trial_are_named():
    document = make_problem(Shape(machines=3, workers=2, samplers=1)).to_json()
    document["machines"][1]["nic_out_Gbps"] = 0.001
    with pytest.raises(ProblemError, match=r"machines\[1\].nic_out_Gbps: too slow.*got 0.001.*give 0.00833 or more"):
        trial.try_plan(GnnProblem.from_json(document), Anywhere(), iterations=1)
