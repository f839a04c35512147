"""A problem profiled from a graph: the graph is partitioned and sampled, and the bytes of each iteration are counted.

Volumes become traces, which keeps their correlation within an iteration. Compute times are stated, or measured on this
host, which may have other devices than the cluster.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from automap.errors import ProblemError
from automap.gnn.graphs import Graph, partition, sample
from automap.gnn.problem import RESOURCES, Amount, Flow, GnnProblem, Machine, Task
from automap.gnn.training_time import BATCHES, linear_sizes, seconds_a_node

NODE_BYTES = 8.0
"""Bytes of a node's number, which are sent with its features."""
SAMPLE_S = 2e-7
"""Seconds of a sampler's core for a node of the mini-batch (assumed: five million nodes a second)."""
FEATURE_BYTES = 4.0
"""Bytes of a feature, and of a parameter."""
EDGE_BYTES = 8.0
"""Bytes of an edge in a store: the number of the node at its other end."""
GIB = float(1 << 30)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A cluster and a training, for which a graph is profiled."""

    machines: int = 4
    """Machines, each with one partition."""
    gpus: int = 2
    cpus: float = 16.0
    memory_GiB: float = 256.0  # noqa: N815
    nic_Gbps: float = 25.0  # noqa: N815
    workers: int = 6
    samplers: int = 2
    """Samplers of one worker."""
    servers: int = 1
    batch: int = 1000
    """Seeds of one worker's mini-batch."""
    fan_outs: tuple[int, ...] = (15, 10, 5)
    features: int = 100
    hidden: int = 256
    classes: int = 47
    train_s: float | None = 0.06
    """Seconds of training on a mini-batch (assumed: a GraphSAGE on a V100); None = this and sampling are measured."""
    iterations: int = 20
    """Iterations of the traces."""

    @property
    def widths(self) -> tuple[int, int, int]:
        """Widths of the network, see `automap.gnn.training_time.linear_sizes`."""
        return self.features, self.hidden, self.classes


@dataclass(frozen=True, kw_only=True, slots=True)
class Profiled:
    """A profiled problem, with figures from its profile."""

    problem: GnnProblem
    nodes: int
    edges: int
    partitioner: str
    cut: float
    """Share of the edges that connect two parts."""
    batch_nodes: float
    """Mean number of nodes of a worker's mini-batch; nodes that several samplers found count several times."""
    own_share: float
    """Share of them in the partition of their seeds."""
    measured: str = ""
    """Text about the measured compute times; empty if none were measured."""


def profile_graph(graph: Graph, setting: Setting, rng: np.random.Generator) -> Profiled:
    """Partitions a graph, samples mini-batches for every worker, and builds the problem from them.

    The seeds of a worker are from one partition, and workers are assigned to partitions in turn, as in DistDGL.

    Args:
        graph: the graph.
        setting: cluster and training.
        rng: where randomness comes from.

    Raises:
        ProblemError: the graph has fewer nodes than machines, or the tasks do not fit (see `GnnProblem`).
    """
    nodes = graph.shape[0]
    if nodes < setting.machines:
        repair = f"Use at most {nodes} machines, one node each."
        raise ProblemError(
            "more machines than nodes of the graph", field="machines", value=setting.machines, repair=repair
        )
    # An early check before minutes of sampling, with equal parts and without mini-batches.
    nothing = np.zeros((1, setting.workers, setting.samplers, setting.machines))
    mean_GiB = np.full(setting.machines, _stored_bytes(nodes, graph.nnz, setting) / setting.machines / GIB)  # noqa: N806
    no_time = np.zeros(nothing.shape[:3])
    _check_room(_problem(nothing, _homes(setting), setting, (no_time[:, :, 0], no_time), mean_GiB))
    part, partitioner = partition(graph, setting.machines)
    rows = np.repeat(part, np.diff(graph.indptr))
    cut = float((rows != part[graph.indices]).mean()) if graph.nnz else 0.0
    home = _homes(setting)
    members = [np.flatnonzero(part == m) for m in range(setting.machines)]
    members = [own if len(own) else np.arange(nodes) for own in members]
    count = np.zeros((setting.iterations, setting.workers, setting.samplers, setting.machines))
    sample_s = np.zeros(count.shape[:3])
    seeds = -(-setting.batch // setting.samplers)
    for iteration in range(setting.iterations):
        for worker in range(setting.workers):
            own = members[home[worker]]
            for sampler in range(setting.samplers):
                drawn = rng.choice(own, min(seeds, len(own)), replace=False)
                begin = time.perf_counter()
                found = sample(graph, drawn, setting.fan_outs, rng)
                sample_s[iteration, worker, sampler] = time.perf_counter() - begin
                count[iteration, worker, sampler] = np.bincount(part[found], minlength=setting.machines)
    owned = np.bincount(part, minlength=setting.machines)
    stored = _stored_bytes(owned, np.bincount(rows, minlength=setting.machines), setting)
    batch_nodes = float(count.sum(axis=(2, 3)).mean())
    own_share = float(sum(count[:, w, :, home[w]].sum() for w in range(setting.workers)) / count.sum())
    sizes = count.sum(axis=3)
    train_s, measured = np.full(sizes.shape[:2], setting.train_s or 0.0), ""
    if setting.train_s is None:
        batches = [members[home[n % len(home)]] for n in range(1 + BATCHES)]
        batches = [rng.choice(own, min(setting.batch, len(own)), replace=False) for own in batches]
        node_s, device = seconds_a_node(graph, batches, setting.fan_outs, setting.widths, rng)
        train_s = node_s * sizes.sum(axis=2)
        measured = f"training takes {train_s.mean():.3g} s on {device}, sampling {sample_s.mean():.3g} s in the mean"
    else:
        sample_s = SAMPLE_S * sizes
    return Profiled(
        problem=_problem(count, home, setting, (train_s, sample_s), stored / GIB),
        nodes=nodes,
        edges=graph.nnz // 2,
        partitioner=partitioner,
        cut=cut,
        batch_nodes=batch_nodes,
        own_share=own_share,
        measured=measured,
    )


def _check_room(problem: GnnProblem) -> None:
    """Checks that all machines together have the resources of all tasks; `GnnProblem` checks each task alone.

    Raises:
        ProblemError: names the resource that is short.
    """
    for resource in RESOURCES:
        there, demanded = (
            sum(getattr(one, resource) for one in all_of) for all_of in (problem.machines, problem.tasks)
        )
        if demanded > there * (1.0 + 1e-9):
            raise ProblemError(
                "the tasks need more than all machines have",
                field=f"tasks.{resource}",
                value=f"{demanded:g} {resource}",
                repair=f"Give machines more, add machines, or use fewer workers: all together have {there:g}.",
            )


def _homes(setting: Setting) -> list[int]:
    """[workers] the partition of the seeds of each worker."""
    return [worker % setting.machines for worker in range(setting.workers)]


def _node_bytes(setting: Setting) -> float:
    """Bytes of a node with its features."""
    return NODE_BYTES + FEATURE_BYTES * setting.features


def _stored_bytes(nodes: Any, edges: Any, setting: Setting) -> Any:
    """Bytes of a part of the graph: numbers, or [parts]."""
    return _node_bytes(setting) * nodes + EDGE_BYTES * edges


def _problem(
    count: np.ndarray,
    home: list[int],
    setting: Setting,
    seconds: tuple[np.ndarray, np.ndarray],
    stored_GiB: np.ndarray,  # noqa: N803
) -> GnnProblem:
    """The problem with the sampled volumes. A store holds its part of the graph, a sampler and a worker a mini-batch.

    Args:
        count: [iterations, workers, samplers, machines] numbers of nodes.
        home: [workers] the partition of the seeds of each worker.
        setting: cluster and training.
        seconds: [iterations, workers] of training, and [iterations, workers, samplers] of sampling.
        stored_GiB: [machines] memory of each part of the graph.
    """
    (train_s, sample_s), node_bytes = seconds, _node_bytes(setting)
    held_GiB = node_bytes * count.sum(axis=3).max(axis=0) / GIB  # noqa: N806
    weights = sum((inputs + 1) * outputs for inputs, outputs in linear_sizes(setting.widths, len(setting.fan_outs)))
    model_bytes = FEATURE_BYTES * weights
    machines = tuple(
        Machine(
            name=f"m{m}",
            gpus=setting.gpus,
            cpus=setting.cpus,
            memory_GiB=setting.memory_GiB,
            nic_in_Gbps=setting.nic_Gbps,
            nic_out_Gbps=setting.nic_Gbps,
        )
        for m in range(setting.machines)
    )
    tasks = [
        Task(name=f"store{m}", role="store", machine=f"m{m}", cpus=2.0, memory_GiB=float(stored_GiB[m]))
        for m in range(setting.machines)
    ]
    flows: list[Flow] = []

    def trace(values: np.ndarray) -> Amount:
        if (values == values[0]).all():
            return Amount(mean=float(values[0]))
        return Amount(trace=tuple(float(value) for value in values))

    for w in range(setting.workers):
        batch_GiB, own_s = float(held_GiB[w].sum()), trace(train_s[:, w])  # noqa: N806
        tasks.append(Task(name=f"worker{w}", role="worker", gpus=1, cpus=1.0, memory_GiB=batch_GiB, time_s=own_s))
        for s in range(setting.samplers):
            name, read = f"sampler{w}.{s}", count[:, w, s]
            part_GiB, own_s = float(held_GiB[w, s]), trace(sample_s[:, w, s])  # noqa: N806
            tasks.append(Task(name=name, role="sampler", cpus=2.0, memory_GiB=part_GiB, time_s=own_s))
            flows += [
                Flow(source=f"store{m}", target=name, bytes=trace(node_bytes * read[:, m]))
                for m in sorted(range(setting.machines), key=lambda m: m != home[w])
                if read[:, m].any()
            ]
            flows.append(Flow(source=name, target=f"worker{w}", bytes=trace(node_bytes * read.sum(axis=1))))
    for p in range(setting.servers):
        tasks.append(Task(name=f"server{p}", role="server", cpus=1.0, time_s=Amount(mean=0.002)))
        model = Amount(mean=model_bytes / setting.servers)
        for w in range(setting.workers):
            flows.append(Flow(source=f"worker{w}", target=f"server{p}", bytes=model))
            flows.append(Flow(source=f"server{p}", target=f"worker{w}", bytes=model))
    return GnnProblem(name="profiled", machines=machines, tasks=tuple(tasks), flows=tuple(flows))


def parse_made_up(text: str) -> tuple[int, float]:
    """Nodes and mean degree of a text such as `100000x15`.

    Raises:
        ProblemError: the text has another form.
    """
    nodes, _, degree = text.partition("x")
    try:
        found = int(nodes), float(degree)
    except ValueError:
        found = 0, 0.0
    if not (2 <= found[0] <= 100_000_000 and 0.0 < found[1] <= 10_000.0):
        repair = "Give nodes and mean degree as in 100000x15."
        raise ProblemError("not a graph", field="graph", value=text, repair=repair)
    return found


def summary(found: Profiled) -> Mapping[str, str]:
    """The figures of a profile, in words."""
    return {
        "graph": f"{found.nodes:,} nodes, {found.edges:,} edges",
        "parts": f"by {found.partitioner}, {found.cut:.0%} of the edges are cut",
        **({"measured": found.measured} if found.measured else {}),
        "batch": f"{found.batch_nodes:,.0f} nodes a worker, {found.own_share:.0%} in the partition of its seeds",
    }
