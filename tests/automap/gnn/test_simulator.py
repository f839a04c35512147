"""The simulator against a slow simulation in plain Python, and against what every schedule must keep."""

import itertools
from collections import defaultdict

import numpy as np
import pytest

from automap.errors import ProblemError
from automap.gnn.made_up import Shape, make_problem
from automap.gnn.problem import GnnProblem
from automap.gnn.simulator import POLICIES, Simulator

SHAPES = [
    Shape(machines=2, workers=2, samplers=1, spread=0.5),
    Shape(machines=3, workers=3, samplers=2, data_set="reddit", nic_Gbps=10, servers=2),
    Shape(machines=4, workers=4, samplers=2, reads=2, train_s=0.2),
]


def uneven(shape: Shape, seed: int, prefetch: int = 1) -> GnnProblem:
    """A made-up problem whose interfaces differ from each other, and in which no two flows are alike."""
    document, rng = make_problem(shape, seed).to_json(), np.random.default_rng(seed)
    for machine in document["machines"]:
        machine["nic_in_Gbps"] *= rng.uniform(0.3, 1.5)
        machine["nic_out_Gbps"] *= rng.uniform(0.3, 1.5)
    for flow in document["flows"]:
        flow["bytes"]["spread"] = 0.3
    return GnnProblem.from_json(document | {"prefetch": prefetch})


def anywhere(simulator: Simulator, seed: int) -> np.ndarray:
    """Any machine for what is not pinned."""
    drawn = np.random.default_rng(seed).integers(len(simulator.problem.machines), size=len(simulator.pinned))
    return np.where(simulator.pinned < 0, drawn, simulator.pinned)


class Slow:
    """The model written down again: at every event all conditions and all rates are found from nothing."""

    def __init__(self, simulator: Simulator, place: np.ndarray, policy: str) -> None:
        self.a, self.place, self.policy, self.n = simulator.arrays, place, policy, simulator.iterations
        self.ranks = simulator.ranks(place)
        tasks = simulator.problem.tasks
        self.roles = [task.role for task in tasks]
        self.now, self.running = 0.0, {}
        self.ended = dict.fromkeys(range(len(tasks)), 0)
        self.left: dict[tuple[int, int], float] = {}
        self.released: dict[tuple[int, int], int] = {}
        self.arrived: set[tuple[int, int]] = set()
        self.begun: dict[tuple[int, int], float] = {}
        self.size = dict(np.ndenumerate(self.a.bytes))

    def may_begin(self, task: int) -> bool:
        n = self.ended[task]
        fed = [self.a.target[f] for f in range(len(self.a.source)) if self.a.source[f] == task]
        slots = self.roles[task] != "sampler" or all(self.ended[w] >= n - self.a.prefetch for w in fed)
        return n < self.n and task not in self.running and slots

    def settle(self) -> None:
        """Releases flows and starts tasks until nothing changes."""
        changed = True
        while changed:
            changed = False
            for f, (s, t) in enumerate(zip(self.a.source, self.a.target, strict=True)):
                for n in range(self.n - self.a.lag[f]):
                    caused = (
                        (self.may_begin(t) and self.ended[t] == n) if self.roles[s] == "store" else self.ended[s] > n
                    )
                    if caused and (n, f) not in self.released:
                        self.released[n, f] = len(self.released)
                        self.left[n, f] = self.a.bytes[n, f]
                        changed = True
                    first = n == 0 or (n - 1, f) in self.arrived
                    takes_no_time = self.place[s] == self.place[t] or self.a.bytes[n, f] == 0.0
                    if (n, f) in self.left and takes_no_time and first:
                        del self.left[n, f]
                        self.arrived.add((n, f))
                        changed = True
            for task in self.ended:
                n = self.ended[task]
                into = [f for f in range(len(self.a.source)) if self.a.target[f] == task]
                has_all = all(n < self.a.lag[f] or (n - self.a.lag[f], f) in self.arrived for f in into)
                if self.roles[task] != "store" and self.may_begin(task) and has_all:
                    self.running[task] = self.now + self.a.time_s[n, task]
                    changed = True

    def rates(self) -> dict[tuple[int, int], float]:
        heads = [(n, f) for n, f in self.left if n == 0 or (n - 1, f) in self.arrived]
        out = dict(enumerate(self.a.rate_out))
        into = dict(enumerate(self.a.rate_in))
        ends = {(n, f): (self.place[self.a.source[f]], self.place[self.a.target[f]]) for n, f in heads}
        found = {}
        if self.policy == "fair":
            while heads:
                users = [(out, m, [h for h in heads if ends[h][0] == m]) for m in out]
                users += [(into, m, [h for h in heads if ends[h][1] == m]) for m in into]
                side, m, those = min((u for u in users if u[2]), key=lambda u: u[0][u[1]] / len(u[2]))
                share = side[m] / len(those)
                for h in those:
                    found[h] = share
                    out[ends[h][0]] -= share
                    into[ends[h][1]] -= share
                    heads.remove(h)
            return found
        for h in heads:
            self.begun.setdefault(h, self.now)
        keys = {
            "priority": lambda h: (h[0] + self.a.lag[h[1]], self.ranks[h[1]]),
            "fifo": lambda h: (self.begun[h], h[1]),
            "srpt": lambda h: (self.left[h], h[1]),
            "coflow": lambda h: (self.group_s(*h), h[1]),
        }
        heads.sort(key=keys[self.policy])
        for h in heads:
            rate = min(out[ends[h][0]], into[ends[h][1]])
            if rate > 1e-3:
                found[h] = rate
                out[ends[h][0]] -= rate
                into[ends[h][1]] -= rate
        return found

    def group_s(self, n: int, flow: int) -> float:
        """Seconds that the bytes which one task waits for, or which a server sends, take at the worst interface."""
        side = self.a.source if self.roles[self.a.source[flow]] == "server" else self.a.target
        seconds = defaultdict(float)
        for f, ends in enumerate(zip(self.place[self.a.source], self.place[self.a.target], strict=True)):
            of_server = self.roles[self.a.source[f]] == "server"
            if side[f] == side[flow] and of_server == (side is self.a.source) and ends[0] != ends[1]:
                seconds["out", ends[0]] += self.a.bytes[n, f] / self.a.rate_out[ends[0]]
                seconds["in", ends[1]] += self.a.bytes[n, f] / self.a.rate_in[ends[1]]
        return max(seconds.values())

    def makespan_s(self) -> float:
        self.settle()
        while self.running or self.left:
            rates = self.rates()
            arrivals = {h: self.now + self.left[h] / rate for h, rate in rates.items()}
            until = min(itertools.chain(self.running.values(), arrivals.values()))
            for h, rate in rates.items():
                self.left[h] -= rate * (until - self.now)
                if arrivals[h] <= until + 1e-12:
                    del self.left[h]
                    self.arrived.add(h)
            self.now = until
            for task in [task for task, end in self.running.items() if end <= until + 1e-12]:
                del self.running[task]
                self.ended[task] += 1
            self.settle()
        return self.now


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("number", "prefetch"), [(0, 0), (1, 1), (2, 2)])
def test_a_slow_simulation_ends_at_the_same_time(number, prefetch, policy):
    # With interfaces that are alike each serves one flow at a time, with others several.
    even = make_problem(SHAPES[number], number).to_json()
    even["flows"][1]["bytes"] = {"mean": 0.0}
    problems = [uneven(SHAPES[number], number, prefetch), GnnProblem.from_json(even)]
    for seed, problem in enumerate(problems):
        simulator = Simulator(problem, iterations=3, seed=number)
        place = anywhere(simulator, seed)
        slow = Slow(simulator, place, policy).makespan_s()
        assert simulator.run(place, policy).makespan_s == pytest.approx(slow, rel=1e-9)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_interfaces_hold_bytes_are_kept_and_causes_come_first(number, policy):
    simulator = Simulator(uneven(SHAPES[number], 10 + number), iterations=5, seed=number)
    arrays, place = simulator.arrays, anywhere(simulator, number)
    run = simulator.run(place, policy, log=100_000)
    moved, begun, ended = defaultdict(float), {}, {}
    used = defaultdict(float)
    for stretch in run.stretches:
        source, target = place[arrays.source[stretch.flow]], place[arrays.target[stretch.flow]]
        assert source != target
        transfer = stretch.iteration, stretch.flow
        moved[transfer] += stretch.rate * (stretch.end_s - stretch.begin_s)
        begun.setdefault(transfer, stretch.begin_s)
        ended[transfer] = stretch.end_s
        used[stretch.begin_s, "out", source] += stretch.rate
        used[stretch.begin_s, "in", target] += stretch.rate
    for (_, side, machine), rate in used.items():
        assert rate <= (arrays.rate_out if side == "out" else arrays.rate_in)[machine] * (1 + 1e-9)
    far = [f for f in range(len(arrays.source)) if place[arrays.source[f]] != place[arrays.target[f]]]
    assert set(moved) == {(n, f) for f in far for n in range(simulator.iterations - arrays.lag[f])}
    for (n, f), volume in moved.items():
        assert volume == pytest.approx(arrays.bytes[n, f], rel=1e-6)
        # What a task sends, it sends behind what it has received for the same iteration, and behind its computing.
        task = arrays.source[f]
        causes = [ended.get((n - arrays.lag[g], g), 0.0) for g in range(len(arrays.source)) if arrays.target[g] == task]
        if not arrays.is_store[task]:
            assert begun[n, f] >= max(causes, default=0.0) + arrays.time_s[n, task] - 1e-9
    assert run.makespan_s >= max(ended.values())
    assert (np.diff(run.end_s) >= 0).all()


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_no_schedule_is_faster_than_the_bounds(number):
    simulator = Simulator(uneven(SHAPES[number], 20 + number), iterations=6, seed=number)
    for seed in range(20):
        place = anywhere(simulator, seed)
        bound = simulator.bounds(place).max()
        assert all(simulator.run(place, policy).makespan_s >= bound * (1 - 1e-9) for policy in POLICIES)


def test_without_a_network_the_makespan_is_the_critical_path():
    simulator = Simulator(make_problem(SHAPES[0]), iterations=6, seed=0)
    document = simulator.problem.to_json()
    for machine in document["machines"]:
        machine["nic_in_Gbps"] = machine["nic_out_Gbps"] = 1e5
    for flow in document["flows"]:
        flow["bytes"]["mean"] = 1.0
    simulator = Simulator(GnnProblem.from_json(document), iterations=6, seed=0)
    place = anywhere(simulator, 1)
    assert simulator.run(place).makespan_s == pytest.approx(simulator.bounds(place)[0], rel=1e-5)


def test_one_flow_after_the_other_by_hand():
    """Two samplers of one worker, each with 1 GB to fetch over one interface of 8 Gbit/s, and 1 s of training."""
    machine = {"cpus": 8, "memory_GiB": 1, "gpus": 1, "nic_in_Gbps": 8, "nic_out_Gbps": 8}
    flows = [("store", "a"), ("store", "b"), ("a", "worker"), ("b", "worker")]
    problem = GnnProblem.from_json(
        {
            "machines": [machine | {"name": "near"}, machine | {"name": "far"}],
            "tasks": [
                {"name": "store", "role": "store", "machine": "far"},
                {"name": "a", "role": "sampler"},
                {"name": "b", "role": "sampler"},
                {"name": "worker", "role": "worker", "time_s": {"mean": 1.0}},
            ],
            "flows": [{"source": s, "target": t, "bytes": {"mean": 1e9}} for s, t in flows],
            "prefetch": 0,
        }
    )
    simulator = Simulator(problem, iterations=2, seed=0)
    # Features cross once, 2 s an iteration, and then the worker trains: nothing overlaps without prefetching.
    near = simulator.run(np.array([1, 0, 0, 0]))
    assert near.end_s.tolist() == pytest.approx([3.0, 6.0])
    # Beside the store nothing is far but the mini-batches.
    assert simulator.run(np.array([1, 1, 1, 0])).end_s.tolist() == pytest.approx([3.0, 6.0])
    assert simulator.run(np.array([1, 1, 1, 1])).end_s.tolist() == pytest.approx([1.0, 2.0])
    ahead = Simulator(GnnProblem.from_json(problem.to_json() | {"prefetch": 1}), iterations=2, seed=0)
    assert ahead.run(np.array([1, 0, 0, 0])).end_s.tolist() == pytest.approx([3.0, 5.0])


def test_an_unknown_schedule_is_named():
    simulator = Simulator(make_problem(SHAPES[0]), iterations=1, seed=0)
    with pytest.raises(ProblemError, match=r"unknown.*lifo.*priority"):
        simulator.run(anywhere(simulator, 0), "lifo")


def test_traces_are_replayed_and_means_are_kept():
    document = make_problem(SHAPES[0]).to_json()
    document["flows"][0]["bytes"] = {"trace": [1.0, 2.0, 3.0, 4.0]}
    document["flows"][1]["bytes"] = {"trace": [10.0, 20.0, 30.0, 40.0]}
    document["flows"][2]["bytes"] = {"mean": 1e6, "spread": 0.4}
    volumes = Simulator(GnnProblem.from_json(document), iterations=4000, seed=0).arrays.bytes
    assert (volumes[:, 1] == 10.0 * volumes[:, 0]).all()
    assert set(np.diff(volumes[:8, 0]).tolist()) == {1.0, -3.0}
    assert volumes[:, 2].mean() == pytest.approx(1e6, rel=0.03)
    assert volumes[:, 2].std() == pytest.approx(4e5, rel=0.1)
