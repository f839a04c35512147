"""DAPPLE's plan over PipeDream's, both priced as synchronous training: Figure 12 of DAPPLE's paper.

    python benchmarks/dapple_figure12.py PROFILES [--models NAME,…] [--hosts 2,4]

PROFILES is the folder of DAPPLE's profiles. Both planners plan for 2 or 4 hosts (`--hosts`) of 8 V100 with NVLink and
25 Gbit/s between the hosts. Both plans are priced by DAPPLE's latency with its rates. Prints a line for each model and
cluster: the speed-ups of both plans over one device, their ratio, the paper's figures, and the replicas of both plans.
The committed figures are in benchmarks/results/.
"""

import argparse
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from dapple_table4 import CLUSTERS, MODELS, Model, best_plans, chain, layers_of

from agents.planners.dapple_formulas import latency
from agents.planners.pipedream import Level, States, best_pipeline
from ir.profile_import import batch_in_name

FIGURE = {
    "XLNet-36": (MODELS["XLNet-36"], (23.8, 15.7, 14.9, 8.6)),
    "BERT-Large": (Model("bert-24-pbs-6", 128, 1, 1736689664.0, 3.0), (24.4, 19.2, 14.5, 11.5)),
    "AmoebaNet-36": (MODELS["AmoebaNet-36"], (12.7, 7.4, 11.6, 6.3)),
    "VGG-19": (MODELS["VGG-19"]._replace(batch=1024), (16.3, 2.2, 9.6, 3.0)),
}
"""Model and speed-ups of the paper: DAPPLE 4x8, PipeDream 4x8, DAPPLE 2x8, PipeDream 2x8."""


class OneWire(NamedTuple):
    """Hosts as the released planner sees them: what leaves a host shares one connection of 1 GB/s."""

    hosts: tuple[int, ...]

    def reduce_s(self, counts):
        """See `Network`: as in Table 4."""
        return CLUSTERS["A"].reduce_s(counts)

    def send_s(self, senders, receivers):
        """See `Network`."""
        one, other = sum(senders), sum(receivers)
        leaving = sum(max(0.0, a / one - b / other) for a, b in zip(senders, receivers, strict=True))
        return max(leaving / 1e9, 1.0 / (max(one, other) * 25e9))


def pipedream(model, units, rates):
    """(end, devices of each host) of the stages of PipeDream's plan: it plans devices inside a host first, then hosts.

    Its mini-batch is that of the profile, and what crosses a cut counts as in the paper.
    """
    forward, backward, crossing, parameters = units
    samples = batch_in_name(model.profile)
    count = len(forward)
    states = States(
        seconds=np.cumsum(samples * (forward + backward)),
        weight_bytes=np.cumsum(4.0 * parameters),
        activation_bytes=np.cumsum(samples * crossing),
        crossing_bytes=samples * crossing,
        before=np.triu(np.ones((count, count), dtype=np.bool_), 1),
    )
    size, hosts = rates.hosts[0], len(rates.hosts)
    host = used = 0
    found = []
    for stage in best_pipeline(states, [Level(size, 25e9), Level(hosts, CLUSTERS["A"].reduce)]).stages:
        inner, outer = stage.replicas
        found.append((stage.end + 1, tuple(inner if host <= h < host + outer else 0 for h in range(hosts))))
        used += inner
        if used == size:
            host, used = host + outer, 0
    return found


def seconds_of(stages, model, units, rates):
    """DAPPLE's latency of given stages, with the best size of micro-batches."""
    devices = sum(rates.hosts)
    best = math.inf
    for per_replica in range(max(sum(counts) for _, counts in stages), model.batch // model.smallest + 1):
        layers = layers_of(model, units, per_replica, devices)
        forward, backward, reduce, begin, before = [], [], [], 0, None
        for end, counts in stages:
            replicas = sum(counts)
            if before is not None:
                sent = rates.send_s(before, counts) * layers.crossing_bytes[begin]
                forward, backward, reduce = [*forward, sent], [*backward, sent], [*reduce, 0.0]
            forward.append(layers.forward_s[replicas, end] - layers.forward_s[replicas, begin])
            backward.append(layers.backward_s[replicas, end] - layers.backward_s[replicas, begin])
            reduce.append(rates.reduce_s(counts) * (layers.gradient_bytes[end] - layers.gradient_bytes[begin]))
            begin, before = end, counts
        parts = [[np.array([value]) for value in of] for of in (forward, backward, reduce)]
        best = min(best, float(latency(*parts, layers.num_micro_batches)[0]))
    return best


def main() -> None:
    """Prices both plans of every model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("profiles", type=Path)
    parser.add_argument("--models", default=",".join(FIGURE))
    parser.add_argument("--hosts", default="2,4")
    given = parser.parse_args()
    for name in given.models.split(","):
        model, paper = FIGURE[name]
        if not (given.profiles / f"{model.profile}.txt").is_file():
            parser.error(f"profiles: no {model.profile}.txt in {given.profiles}: name the folder of DAPPLE's profiles")
        units = chain(given.profiles, model)
        alone = model.batch * float((units[0] + units[1]).sum())
        for hosts in map(int, given.hosts.split(",")):
            rates = OneWire((8,) * hosts)
            plan, _ = min(best_plans(model, units, rates).values(), key=lambda one: one[0].seconds)
            stages = pipedream(model, units, rates)
            ours, theirs = alone / plan.seconds, alone / seconds_of(stages, model, units, rates)
            shown = [
                ":".join(str(sum(c)) for c in cs) for cs in ([s.counts for s in plan.stages], [c for _, c in stages])
            ]
            printed = paper[:2] if hosts == 4 else paper[2:]
            print(
                f"{name:13} {hosts}x8  DAPPLE {ours:5.2f} x  PipeDream {theirs:5.2f} x  ratio {ours / theirs:5.2f}  "
                f"paper {printed[0]:4.1f} x, {printed[1]:4.1f} x, {printed[0] / printed[1]:4.2f}  "
                f"{shown[0]} | {shown[1]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
