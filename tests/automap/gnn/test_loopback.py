"""Plans really run: no faster than the interfaces allow, and to the end under every schedule."""

import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest

from automap.errors import ProblemError
from automap.gnn.loopback import network
from automap.gnn.loopback.controller import hosts
from automap.gnn.made_up import Shape, make_problem
from automap.gnn.problem import Amount
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
