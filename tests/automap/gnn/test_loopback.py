"""Plans really run: no faster than the interfaces allow, and to the end under every schedule."""

from dataclasses import replace

import numpy as np
import pytest

from automap.gnn.loopback.controller import hosts
from automap.gnn.made_up import Shape, make_problem
from automap.gnn.problem import Amount
from automap.gnn.simulator import Simulator


@pytest.mark.slow
def test_token_buckets_hold_under_every_schedule():
    problem = make_problem(Shape(machines=3, workers=2, samplers=2, nic_Gbps=0.16, train_s=0.01, sample_s=0.01))
    small = tuple(replace(flow, bytes=Amount(mean=flow.bytes.average * 0.003)) for flow in problem.flows)
    simulator = Simulator(replace(problem, flows=small), iterations=2, seed=0)
    drawn = np.random.default_rng(1).integers(3, size=len(problem.tasks))
    place = np.where(simulator.pinned < 0, drawn, simulator.pinned)
    bound_s = simulator.bounds(place).max()
    assert bound_s > 0.05
    with hosts(simulator.arrays) as machines:
        for policy in ("priority", "fifo", "fair", "srpt"):
            seconds = machines.run(place, simulator.ranks(place), policy)
            # A bucket holds 10 ms of its rate when a run begins.
            assert bound_s - 0.02 < seconds < 20 * bound_s
