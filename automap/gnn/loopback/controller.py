"""The controller of a real run: it starts tasks, releases flows and gives them rates whenever something ends.

Instead of computing, a task waits for the time that was drawn for it. Times are wall-clock times, so they include the
overhead of the controller and of the machines.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import select
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from automap.arrays import Ints
from automap.gnn.kernels.records import GnnArrays
from automap.gnn.loopback.machine import Lines
from automap.gnn.loopback.network import namespaces, processes

START_S = 30.0
"""Seconds that the processes may take to start."""


@dataclass(slots=True)
class Transfer:
    """A flow of one iteration that is being sent."""

    flow: int
    iteration: int
    source: int
    """Machine that sends."""
    target: int
    left: float
    since: float
    rate: float
    key: float
    """Place in the order of service; among equal ones the flow with the smaller number is first."""


class Hosts:
    """The processes of the machines, which run one plan after the other."""

    def __init__(self, lines: Sequence[Lines], arrays: GnnArrays) -> None:
        """Stores the connections to the processes, one for each machine of the problem."""
        self.lines, self.arrays = lines, arrays

    def run(self, place: Ints, ranks: Ints, policy: str) -> float:
        """Runs all iterations; returns their seconds.

        Args:
            place: [tasks] machine of each task.
            ranks: [flows] order of the flows, for the policy `priority`.
            policy: one of `automap.gnn.simulator.POLICIES`.
        """
        return _Training(self, place, ranks, policy).run()


@contextlib.contextmanager
def hosts(arrays: GnnArrays, *, by_kernel: bool = False) -> Iterator[Hosts]:
    """Starts a process for each machine of a problem; ends them at the end of the context.

    Args:
        arrays: the problem.
        by_kernel: whether the machines are network namespaces, whose interfaces the kernel limits (see `network.py`),
            instead of processes that limit themselves.

    Raises:
        ProblemError: this host allows no network namespaces, or has no `ip`, `tc` or `unshare`.
    """
    count = len(arrays.rate_out)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="automap-gnn-"))
        # A Unix socket also connects processes in network namespaces, and no rate limit applies to it.
        path = f"{folder}/controller"
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen(count)
        listener.settimeout(START_S)
        ends = {"out": arrays.rate_out.tolist(), "in": arrays.rate_in.tolist()}
        network = stack.enter_context((namespaces if by_kernel else processes)(path, ends["out"], ends["in"]))
        lines: dict[int, Lines] = {}
        ports = [0] * count
        for _ in range(count):
            connection, _address = listener.accept()
            one = Lines(stack.enter_context(connection))
            (told,) = one.receive()
            lines[int(told["machine"])] = one
            ports[int(told["machine"])] = int(told["port"])
        peers = list(zip(network.connect(), ports, strict=True))
        for number, one in lines.items():
            limits = {side: rates[number] for side, rates in ends.items()} if network.limit_themselves else {}
            one.send({"peers": peers, **limits})
        for one in lines.values():
            one.receive()
        yield Hosts([lines[number] for number in range(count)], arrays)


class _Training:
    """The tasks and flows of one run."""

    def __init__(self, hosts: Hosts, place: Ints, ranks: Ints, policy: str) -> None:
        self.hosts, self.a = hosts, hosts.arrays
        self.place, self.ranks, self.policy = place.tolist(), ranks.tolist(), policy
        tasks, flows = len(self.a.order), len(self.a.source)
        self.iterations = len(self.a.time_s)
        self.source, self.target, self.lag = self.a.source.tolist(), self.a.target.tolist(), self.a.lag.tolist()
        self.into = [[f for f in range(flows) if self.target[f] == t] for t in range(tasks)]
        self.out = [[f for f in range(flows) if self.source[f] == t] for t in range(tasks)]
        self.fed = [self.a.fed[self.a.fed_begin[t] : self.a.fed_begin[t + 1]].tolist() for t in range(tasks)]
        self.is_store = [bool(one) for one in self.a.is_store]
        self.done, self.begun = [0] * tasks, [0] * tasks
        self.running: list[tuple[float, int]] = []
        self.is_running = [False] * tasks
        self.released, self.sent = [0] * flows, [0] * flows
        self.transfers: dict[int, Transfer] = {}
        self.count = 0
        self.is_changed = False

    def run(self) -> float:
        begin = time.perf_counter()
        lines = {one.connection: one for one in self.hosts.lines}
        for task in range(len(self.done)):
            self.try_begin(task)
        while self.running or self.transfers:
            if self.is_changed:
                self.tell_rates()
            wait = max(0.0, self.running[0][0] - time.perf_counter()) if self.running else None
            for connection in select.select(list(lines), [], [], wait)[0]:
                for told in lines[connection].receive():
                    self.arrive(int(told["arrived"]))
            while self.running and self.running[0][0] <= time.perf_counter():
                self.complete(heapq.heappop(self.running)[1])
        return time.perf_counter() - begin

    def try_begin(self, task: int) -> None:
        n = self.done[task]
        if self.is_store[task] or n >= self.iterations:
            return
        if self.begun[task] == n and all(self.done[w] >= n - self.a.prefetch for w in self.fed[task]):
            self.begun[task] = n + 1
            for flow in self.into[task]:
                if self.is_store[self.source[flow]]:
                    self.release(flow)
        self.try_start(task)

    def try_start(self, task: int) -> None:
        n = self.done[task]
        if n >= self.iterations or self.begun[task] <= n or self.is_running[task]:
            return
        if all(self.sent[flow] > n - self.lag[flow] for flow in self.into[task]):
            self.is_running[task] = True
            heapq.heappush(self.running, (time.perf_counter() + self.a.time_s[n, task], task))

    def complete(self, task: int) -> None:
        n = self.done[task]
        self.done[task], self.is_running[task] = n + 1, False
        for flow in self.out[task]:
            if n + self.lag[flow] < self.iterations:
                self.release(flow)
        self.try_begin(task)
        for flow in self.into[task]:
            if self.fed[self.source[flow]]:
                self.try_begin(self.source[flow])

    def release(self, flow: int) -> None:
        self.released[flow] += 1
        if self.released[flow] == self.sent[flow] + 1:
            self.send(flow)

    def send(self, flow: int) -> None:
        """Begins the next transfer of a flow; between tasks on one machine it takes no time."""
        source, target = self.place[self.source[flow]], self.place[self.target[flow]]
        n = self.sent[flow]
        volume = math.ceil(self.a.bytes[n, flow])
        if source == target or volume == 0:
            self.end_transfer(flow)
            return
        self.count += 1
        key = float(self.count)
        if self.policy == "priority":
            key = (n + self.lag[flow]) * len(self.source) + self.ranks[flow]
        if self.policy == "coflow":
            key = self.group_s(flow, n)
        self.transfers[self.count] = Transfer(flow, n, source, target, volume, time.perf_counter(), 0.0, key)
        first = {"id": self.count, "to": target, "bytes": volume, "rate": 0.0}
        self.hosts.lines[source].send(first)
        self.is_changed = True

    def group_s(self, flow: int, n: int) -> float:
        """Seconds of the flows of a group (coflow) at their narrowest interface."""
        seconds: dict[tuple[int, int], float] = {}
        rates = self.a.rate_out, self.a.rate_in
        for other in np.flatnonzero(self.a.coflow == self.a.coflow[flow]).tolist():
            ends = self.place[self.source[other]], self.place[self.target[other]]
            if ends[0] != ends[1]:
                for side, machine in enumerate(ends):
                    more_s = float(self.a.bytes[n, other] / rates[side][machine])
                    seconds[side, machine] = seconds.get((side, machine), 0.0) + more_s
        return max(seconds.values())

    def arrive(self, number: int) -> None:
        self.is_changed = True
        self.end_transfer(self.transfers.pop(number).flow)

    def end_transfer(self, flow: int) -> None:
        self.sent[flow] += 1
        self.try_start(self.target[flow])
        if self.released[flow] > self.sent[flow]:
            self.send(flow)

    def tell_rates(self) -> None:
        """Computes the rates of all transfers, and sends those that change to the senders."""
        now, self.is_changed = time.perf_counter(), False
        for one in self.transfers.values():
            one.left, one.since = max(0.0, one.left - one.rate * (now - one.since)), now
        rates = self.fair_rates() if self.policy == "fair" else self.strict_rates()
        changes: dict[int, list[dict[str, float]]] = {}
        for number, one in self.transfers.items():
            rate = rates.get(number, 0.0)
            if rate != one.rate:
                one.rate = rate
                changes.setdefault(one.source, []).append({"id": number, "rate": rate})
        for source, told in changes.items():
            self.hosts.lines[source].send(*told)

    def strict_rates(self) -> dict[int, float]:
        out, into = self.a.rate_out.tolist(), self.a.rate_in.tolist()
        found = {}
        is_short = self.policy == "srpt"
        for number, one in sorted(
            self.transfers.items(), key=lambda item: (item[1].left if is_short else item[1].key, item[1].flow)
        ):
            rate = min(out[one.source], into[one.target])
            if rate > 1.0:
                found[number] = rate
                out[one.source] -= rate
                into[one.target] -= rate
        return found

    def fair_rates(self) -> dict[int, float]:
        left = {(side, m): rate for side in (0, 1) for m, rate in enumerate((self.a.rate_out, self.a.rate_in)[side])}
        ends = {number: ((0, one.source), (1, one.target)) for number, one in self.transfers.items()}
        found: dict[int, float] = {}
        while ends:
            users: dict[tuple[int, int], list[int]] = {}
            for number, both in ends.items():
                for end in both:
                    users.setdefault(end, []).append(number)
            narrowest = min(users, key=lambda end: left[end] / len(users[end]))
            share = float(left[narrowest] / len(users[narrowest]))
            for number in users[narrowest]:
                found[number] = share
                for end in ends.pop(number):
                    left[end] -= share
        return found
