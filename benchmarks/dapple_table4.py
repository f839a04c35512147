"""DAPPLE's planner on the layer profiles of its paper: our plan beside the paper's, as in its Table 4.

    python benchmarks/dapple_table4.py PROFILES [--models NAME,…] [--clusters A,B,C]

PROFILES is the folder of DAPPLE's profiles; they are planned for 16 V100 in the paper's three clusters, with its
effective rates and its formulas. Prints a line for each cell of the table: the predicted speed-up over one device,
micro-batches, replicas and last layers of the stages, and activation communication over computation (ACR); then the
paper's plan. A plan has one of three classes: data parallelism, hybrid (some replicated stages), or straight (no
replicas). If the two classes differ, the predicted speed-up of the best plan of the paper's class says how far the two
are apart. The committed figures are in benchmarks/results/.
"""

import argparse
import math
import re
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from agents.planners.dapple import DappleSearch
from agents.planners.dapple_devices import Places
from agents.planners.dapple_formulas import Layers, Planned
from agents.planners.unit_profile import unit_profile
from automap.cluster import parse_cluster
from automap.problem import Problem
from automap.space.space import PlanSpace
from ir.profile_import import batch_in_name, load_profile
from ir.profile_text import parse

DEVICES, MEMORY = 16, 16e9


class Model(NamedTuple):
    """A model of the paper."""

    profile: str
    batch: int
    """Global batch."""
    smallest: int
    """Samples that one replica computes at least (the released planner's settings)."""
    saved: float
    """Bytes of activations that one sample keeps (the released planner's settings)."""
    state: float
    """Bytes of state over those of the parameters (the released planner's settings)."""


class Rates(NamedTuple):
    """A cluster of the paper."""

    hosts: tuple[int, ...]
    stream: float
    """Bytes/s of one connection between hosts."""
    reduce: float
    """Bytes/s of all-reduces between hosts."""

    def reduce_s(self, counts):
        """See `Network`; NVLink inside a host reaches 130 GB/s."""
        total = sum(counts)
        return 2.0 * (total - 1) / total / (self.reduce if sum(map(bool, counts)) > 1 else 130e9)

    def send_s(self, senders, receivers):
        """See `Network`: each replica of the larger stage has a connection of its own."""
        one, other = sum(senders), sum(receivers)
        is_local = all(a * other <= b * one for a, b in zip(senders, receivers, strict=True))
        return 1.0 / (max(one, other) * (25e9 if is_local else self.stream))


MODELS = {
    "VGG-19": Model("vgg-19-pbs-32", 2048, 32, 70e6, 2.0),
    "GNMT-16": Model("gnmt-16-pbs-64", 1024, 64, 100e6, 3.0),
    "BERT-48": Model("bert-48-pbs-2", 64, 1, 2 * 1736689664.0, 3.0),
    "XLNet-36": Model("xlnet-36-pbs-1", 128, 1, 1.5 * 3942774528.0, 3.0),
    "AmoebaNet-36": Model("amoeba-36-pbs-1", 128, 1, 1.5 * 250845152.0, 2.0),
}
CLUSTERS = {
    "A": Rates((8, 8), 0.8e9, 3.0e9),
    "B": Rates((1,) * 16, 0.8e9, 3.0e9),
    "C": Rates((1,) * 16, 0.32e9, 1.2e9),
}
PAPER = {
    "VGG-19": ("dp", "dp", "15:1"),
    "GNMT-16": ("8:8", "8:8", "straight"),
    "BERT-48": ("8:8", "straight", "straight"),
    "XLNet-36": ("8:8", "8:8", "straight"),
    "AmoebaNet-36": ("8:8", "11:5", "11:5"),
}
"""Plans of Table 4 on A, B and C."""


def chain(profiles, model):
    """[units] forward and backward seconds, crossing bytes and parameters of one sample.

    What crosses a cut are the outputs of the last layer before it, as in the paper's ACR.
    """
    file = profiles / f"{model.profile}.txt"
    layers, batch = parse(file.read_text()), batch_in_name(file.stem)
    graph = load_profile(file.read_text(), name=file.stem)
    training = {"global_batch": model.batch, "precision": "fp32"}
    space = PlanSpace(Problem.build(graph, parse_cluster("1xV100-16GB"), training))
    parameters = unit_profile(space, 1).parameters
    units = [space.problem.graph.operators[u.start : u.stop] for u in space.linkage.blocks.units]
    forward = np.array([sum(op.measured_forward_s or 0.0 for op in ops) for ops in units])
    backward = np.array([sum(op.measured_backward_s or 0.0 for op in ops) for ops in units])
    last = [[int(found[1]) for op in ops if (found := re.match(r"node(\d+)/", op.name))][-1] for ops in units]
    crossing = np.array([sum(layers[number].sizes) / batch for number in last])
    return forward, backward, crossing, parameters


def layers_of(model, units, per_replica, devices=DEVICES):
    """The layers with micro-batches of `per_replica` times the smallest share of a replica."""
    forward, backward, crossing, parameters = units
    samples = per_replica * model.smallest
    shares = [model.smallest * math.ceil(per_replica / max(1, r)) for r in range(devices + 1)]
    spent = (forward + backward) / (forward + backward).sum()

    def summed(of_units):
        return np.concatenate([[0.0], np.cumsum(of_units)])

    return Layers(
        num_micro_batches=model.batch / samples,
        most_replicas=min(devices, per_replica),
        forward_s=np.array([share * summed(forward) for share in shares]),
        backward_s=np.array([share * summed(backward) for share in shares]),
        crossing_bytes=np.concatenate([[0.0], crossing]) * samples,
        gradient_bytes=4.0 * summed(parameters),
        state_bytes=4.0 * model.state * summed(parameters),
        saved_bytes=model.saved * samples * summed(spent),
    )


def class_of(replicas):
    """The class of a plan by the replicas of its stages."""
    if len(replicas) == 1:
        return "dp"
    return "straight" if set(replicas) == {1} else "hybrid"


def best_plans(model, units, rates):
    """Class -> the best plan of the class, with its layers."""
    most, devices = model.batch // model.smallest, sum(rates.hosts)
    sizes = sorted({n for n in [*range(1, devices + 1), 32, 64, 128] if n <= most})
    found: dict[str, tuple[Planned, Layers]] = {}

    def add(plans, layers):
        for plan in plans.values():
            name = class_of([sum(stage.counts) for stage in plan.stages])
            if name not in found or plan.seconds < found[name][0].seconds:
                found[name] = plan, layers

    made, places = [layers_of(model, units, n, devices) for n in sizes], Places(rates, rates.hosts)
    for layers in made:
        add(DappleSearch(layers, places, memory_bytes=MEMORY).uniform(), layers)
    for layers in made:
        limit = min(plan.seconds for plan, _ in found.values())
        add(DappleSearch(layers, places, memory_bytes=MEMORY, limit_s=limit).run(), layers)
    return found


def ratio(plan, layers, rates):
    """ACR: the slowest exchange of activations, there and back, over the mean time of a stage."""
    busy, sent, begin = [], [0.0], 0
    for number, stage in enumerate(plan.stages):
        replicas = sum(stage.counts)
        both = layers.forward_s[replicas] + layers.backward_s[replicas]
        busy.append(both[stage.end] - both[begin])
        if number:
            before = plan.stages[number - 1].counts
            sent.append(2.0 * rates.send_s(before, stage.counts) * layers.crossing_bytes[begin])
        begin = stage.end
    return max(sent) / float(np.mean(busy))


def main() -> None:
    """Plans every cell and counts the classes that agree."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("profiles", type=Path)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--clusters", default=",".join(CLUSTERS))
    given = parser.parse_args()
    equal = same = cells = 0
    for name in given.models.split(","):
        model = MODELS[name]
        if not (given.profiles / f"{model.profile}.txt").is_file():
            parser.error(f"profiles: no {model.profile}.txt in {given.profiles}: name the folder of DAPPLE's profiles")
        units = chain(given.profiles, model)
        alone = model.batch * float((units[0] + units[1]).sum())
        for cluster in given.clusters.split(","):
            rates, began = CLUSTERS[cluster], time.perf_counter()
            found = best_plans(model, units, rates)
            plan, layers = min(found.values(), key=lambda one: one[0].seconds)
            replicas = [sum(stage.counts) for stage in plan.stages]
            paper = PAPER[name]["ABC".index(cluster)]
            theirs = paper if paper in ("dp", "straight") else "hybrid"
            own = class_of(replicas)
            shown = own if own != "hybrid" else ":".join(map(str, replicas))
            ends = "" if own != "hybrid" else "at " + ",".join(str(stage.end) for stage in plan.stages)
            line = f"{name:13} {cluster}  {alone / plan.seconds:5.2f} x  M {layers.num_micro_batches:5.1f}  "
            line += f"{shown} {ends}".ljust(26) + f"  ACR {ratio(plan, layers, rates):4.2f}  paper {paper:9}"
            equal, same, cells = equal + (own == theirs), same + (shown == paper), cells + 1
            if own != theirs:
                line += f"  OTHER CLASS: the best {theirs} has "
                line += f"{alone / found[theirs][0].seconds:.2f} x" if theirs in found else "no plan within memory"
            print(f"{line}  {time.perf_counter() - began:5.1f} s", flush=True)
    print(f"class of {equal} of {cells} cells equal, replicas of {same}")


if __name__ == "__main__":
    main()
