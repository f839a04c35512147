"""Problems made from a few numbers: the clusters and data sets of the paper's evaluation, as far as they are known.

The sizes of the data sets are known. The number of nodes of a mini-batch, the compute times of tasks and the share of a
mini-batch on the own machine are assumed, since the paper does not state them in readable form. `profile.py` measures
them on a real graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from automap.errors import ProblemError, one_of
from automap.gnn.problem import Amount, Flow, GnnProblem, Machine, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSet:
    """The sizes of a graph that determine its mini-batches."""

    features: int
    """Features of a node, of 4 bytes each."""
    nodes: float
    """Distinct nodes in the mini-batch of one worker: 1,000 seeds with fan-outs 15, 10 and 5 (assumed)."""
    hidden: int = 256
    """Width of a GraphSAGE of three layers, whose parameters the servers hold."""
    classes: int = 47

    @property
    def batch_bytes(self) -> float:
        """Bytes of a mini-batch."""
        return 4.0 * self.features * self.nodes

    @property
    def parameter_bytes(self) -> float:
        """Bytes of the model: two matrices a layer."""
        return 4.0 * 2 * self.hidden * (self.features + self.hidden + self.classes)


DATA_SETS = {
    "reddit": DataSet(features=602, nodes=120_000, classes=41),
    "products": DataSet(features=100, nodes=400_000, classes=47),
}
"""Reddit has 232,965 nodes with 602 features and 41 classes, ogbn-products 2,449,029 with 100 and 47."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A cluster and a training."""

    machines: int = 4
    nic_Gbps: float = 25.0  # noqa: N815
    samplers: int = 2
    """Samplers of one worker; each makes an equal part of the mini-batch."""
    data_set: str = "products"
    workers: int | None = None
    """Number of workers; None = three quarters of the GPUs."""
    servers: int = 1
    reads: int | None = None
    """Stores that a sampler reads from; None = all."""
    own_share: float = 0.5
    """Share of the features in the same partition as the worker's seeds (assumed)."""
    spread: float = 0.3
    """Standard deviation of volumes and times as a share of their means."""
    train_s: float = 0.06
    """Seconds of training on a mini-batch (assumed: a GraphSAGE on a V100)."""
    sample_s: float = 0.04
    """Seconds of sampling of a whole mini-batch by one sampler (assumed)."""


def make_problem(shape: Shape, seed: int = 0) -> GnnProblem:
    """Makes a problem in which not every sampler fits beside its worker.

    Machines have 1 to 4 GPUs each, and cores for about as many samplers as an even share.

    Args:
        shape: its sizes.
        seed: seed for the resources of the machines, and for the partitions of the workers' seeds.

    Raises:
        ProblemError: the data set is unknown.
    """
    if shape.data_set not in DATA_SETS:
        raise ProblemError("unknown", field="data_set", value=shape.data_set, repair=one_of(DATA_SETS, shape.data_set))
    rng, data = np.random.default_rng(seed), DATA_SETS[shape.data_set]
    gpus = rng.choice([1, 2, 4], shape.machines, p=[0.3, 0.4, 0.3])
    workers = shape.workers or max(2, int(0.75 * gpus.sum()))
    while gpus.sum() < workers:
        gpus[gpus.argmin()] += 1
    num_samplers = workers * shape.samplers
    # Each store takes 2 cores, a server and a worker 1, a sampler 2; a quarter of the cores is left over.
    needed = 2 * shape.machines + shape.servers + workers + 2 * num_samplers
    shares = rng.dirichlet(np.full(shape.machines, 8.0))
    cpus = np.maximum(np.ceil(1.25 * needed * (0.5 / shape.machines + 0.5 * shares)), 6)
    machines = tuple(
        Machine(
            name=f"m{m}",
            gpus=int(gpus[m]),
            cpus=float(cpus[m]),
            memory_GiB=256.0,
            nic_in_Gbps=shape.nic_Gbps,
            nic_out_Gbps=shape.nic_Gbps,
        )
        for m in range(shape.machines)
    )
    tasks = [
        Task(name=f"store{m}", role="store", machine=f"m{m}", cpus=2.0, memory_GiB=64.0) for m in range(shape.machines)
    ]
    flows = []
    for w in range(workers):
        tasks.append(
            Task(
                name=f"worker{w}", role="worker", gpus=1, cpus=1.0, memory_GiB=8.0, time_s=_amount(shape, shape.train_s)
            )
        )
        home = int(rng.integers(shape.machines))
        reads = min(shape.reads or shape.machines, shape.machines)
        others = rng.permutation([m for m in range(shape.machines) if m != home])[: reads - 1]
        for s in range(shape.samplers):
            name, part = f"sampler{w}.{s}", data.batch_bytes / shape.samplers
            time_s = _amount(shape, shape.sample_s / shape.samplers)
            tasks.append(Task(name=name, role="sampler", cpus=2.0, memory_GiB=4.0, time_s=time_s))
            parts = rng.dirichlet(np.full(max(len(others), 1), 4.0))[: len(others)] * (1.0 - shape.own_share)
            flows.append(Flow(source=f"store{home}", target=name, bytes=_amount(shape, part * shape.own_share)))
            flows += [
                Flow(source=f"store{m}", target=name, bytes=_amount(shape, part * share))
                for m, share in zip(others, parts, strict=True)
            ]
            flows.append(Flow(source=name, target=f"worker{w}", bytes=_amount(shape, part)))
    for p in range(shape.servers):
        tasks.append(Task(name=f"server{p}", role="server", cpus=1.0, memory_GiB=4.0, time_s=_amount(shape, 0.002)))
        for w in range(workers):
            model = Amount(mean=data.parameter_bytes / shape.servers)
            flows.append(Flow(source=f"worker{w}", target=f"server{p}", bytes=model))
            flows.append(Flow(source=f"server{p}", target=f"worker{w}", bytes=model))
    name = f"{shape.data_set} on {shape.machines} machines"
    return GnnProblem(name=name, machines=machines, tasks=tuple(tasks), flows=tuple(flows))


def _amount(shape: Shape, mean: float) -> Amount:
    return Amount(mean=float(mean), spread=shape.spread)
