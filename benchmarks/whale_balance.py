"""Whale's balance on devices of two kinds, compared with equal batches, and with equal layers in a pipeline.

    python benchmarks/whale_balance.py [--models NAME,…] [--precision fp32]

Data parallelism on 8 V100-32GB and 8 P100-16GB behind 50 Gbit/s, as in section 5.3.1 of the paper (USENIX ATC 2022):
1.3 to 1.4 times the speed of equal batches for ResNet-50, GNMT and BERT-large. Pipelines of four stages on 4 + 4
(section 5.3.2): about 1.2 times that of stages with equal numbers of layers for BERT-large and T5-large. Both plans
have the number of micro-batches and the recomputation that are best for them. The paper does not say which P100 it has:
the module for servers has 10.6 TFLOP/s in fp32, the card 9.3. If only arithmetic took time, shares in proportion to it
would be (15.7 / 10.6 + 1) / 2 = 1.24 times as fast, or 1.34 times with the card. A layer profile has one time for all
devices, so there is no GNMT here. The committed figures are in benchmarks/results/.
"""

import argparse
from collections.abc import Iterator

import numpy as np

from agents.planners.staged_plan import StageChoice, StagedPlan, lower_staged
from agents.planners.whale import Balance
from automap.cluster import Cluster, parse_cluster
from automap.price.lowered_plan import RECOMPUTE_MODES
from automap.problem import Problem
from automap.space.space import PlanSpace
from ir import zoo

BATCHES = {"resnet50": 2048, "bert-large": 512, "t5-large": 512, "vgg19": 1024}
"""Global batch of each model (assumed; the paper does not say)."""
REPLICAS, PIPELINES = "8xV100-32GB+8xP100@50Gbit", "4xV100-32GB+4xP100@50Gbit"
STAGES = 4
P100_TFLOPS = {"P100 module": 10.6, "P100 card": 9.3}
"""Peak in fp32 by NVIDIA's data sheets."""


def equal(space: PlanSpace, count: int, num_micro_batches: int, mode: str) -> StagedPlan:
    """Stages with equal numbers of layers and devices in the order of their numbers, and equal batches."""
    size = space.problem.cluster.num_devices // count
    ends = np.rint(np.linspace(0, space.num_units, count + 1)).astype(int)[1:].tolist()
    stages = [
        StageChoice(end=end, devices=tuple(range(rank * size, (rank + 1) * size)), recompute=mode)
        for rank, end in enumerate(ends)
    ]
    return StagedPlan(stages=tuple(stages), num_micro_batches=num_micro_batches)


def speed(space: PlanSpace, plans: Iterator[StagedPlan | None]) -> float | None:
    """Samples a second of the fastest plan that fits."""
    outcomes = [space.evaluator.evaluate(lower_staged(space, plan)) for plan in plans if plan is not None]
    steps = [outcome.step_time_s for outcome in outcomes if outcome.fits]
    return space.problem.training.global_batch / min(steps) if steps else None


def with_p100(cluster: str, kind: str) -> Cluster:
    """A cluster whose P100s are of a kind."""
    document = parse_cluster(cluster).to_json()
    document["devices"]["P100-16GB"]["peak_TFLOPs"]["fp32"] = P100_TFLOPS[kind]
    return parse_cluster(document)


def compared(model: str, cluster: str, kind: str, count: int) -> None:
    """Prints the speed of both."""
    training = {"global_batch": BATCHES[model], "precision": "fp32"}
    space = PlanSpace(Problem.build(zoo.build(model), with_p100(cluster, kind), training))
    devices = space.problem.cluster.num_devices // count
    counts = [n for n in space.meshes.micro_batches if BATCHES[model] // n >= devices]
    modes = range(len(RECOMPUTE_MODES))
    plain = speed(space, (equal(space, count, n, RECOMPUTE_MODES[mode]) for n in counts for mode in modes))
    balance = Balance(space)
    balanced = speed(space, (balance.pipeline(count, n, mode) for n in counts for mode in modes))
    what = "data parallelism" if count == 1 else f"{count} stages"
    head = f"{model:11} {what:16} {cluster} ({kind})"
    if plain is None or balanced is None:
        print(f"{head}  {'equal shares do' if plain is None else 'balanced shares do'} not fit")
        return
    print(f"{head:75} equal {plain:7.1f} samples/s   balanced {balanced:7.1f}   {balanced / plain:.2f} x", flush=True)


def main() -> None:
    """Compares all models."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="resnet50,bert-large,t5-large")
    given = parser.parse_args()
    for cluster, count in ((REPLICAS, 1), (PIPELINES, STAGES)):
        for model in given.models.split(","):
            for kind in P100_TFLOPS:
                compared(model, cluster, kind, count)


if __name__ == "__main__":
    main()
