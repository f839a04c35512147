"""How long a search takes as models and clusters grow: blocks 12 to 192, devices 8 to 4,096.

    python benchmarks/search_scale.py [--budget 20s] [--blocks 12,24,48,96,192] [--devices 8,64,512,1024,4096]

For each size a portfolio searches for a GPT of 4,096 hidden units. Prints the seconds until there are the space, the
first plan that fits, and a plan within 1 % and within 0.1 % of the one at the end, and the gain over the best template.
"""

import argparse
import time

from agents import Budget, search
from automap.cluster import parse_cluster
from automap.errors import NothingFits
from automap.problem import Problem
from automap.space.space import PlanSpace
from ir import zoo

BLOCKS = (12, 24, 48, 96, 192)
DEVICES = (8, 64, 512, 1024, 4096)
MIDDLE_BLOCKS, MIDDLE_DEVICES = 48, 64


def one(blocks: int, devices: int, budget: Budget) -> None:
    """Runs one search and prints its line."""
    graph = zoo.build(f"gpt:layers={blocks},hidden=4096,heads=32,seq_len=2048,vocab_size=51200")
    cluster = parse_cluster(f"{devices // 8}x8xH100-80GB")
    problem = Problem.build(graph, cluster, {"global_batch": max(256, devices)})
    began = time.monotonic()
    space = PlanSpace(problem)
    built = time.monotonic() - began
    head = f"{blocks:4} blocks {devices:5} devices   10^{space.decades:.0f} plans   space after {built:5.2f} s"
    try:
        result = search(problem, budget, seed=0)
    except NothingFits as fault:
        print(f"{head}   nothing fits: {fault.value}", flush=True)
        return
    step, best = result.plan.estimate.step_time_s, result.plan.search.baselines["expert"]
    after = [next(s for _, s, reached in result.improvements if reached <= near * step) for near in (1.01, 1.001)]
    gain = "" if best is None else f"gain {100 * (best / step - 1):.1f} %"
    print(
        f"{head}   first plan {result.improvements[0][1]:5.2f} s   within 1 % {after[0]:5.2f} s   "
        f"within 0.1 % {after[1]:5.2f} s   {result.evaluations / result.seconds:7.0f} plans/s   {gain}",
        flush=True,
    )


def main() -> None:
    """Measures growing models, then growing clusters."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budget", default="20s")
    parser.add_argument("--blocks", default=",".join(map(str, BLOCKS)), help=f"on {MIDDLE_DEVICES} devices")
    parser.add_argument("--devices", default=",".join(map(str, DEVICES)), help=f"for {MIDDLE_BLOCKS} blocks")
    asked = parser.parse_args()
    budget = Budget.parse(asked.budget)
    for blocks in filter(None, asked.blocks.split(",")):
        one(int(blocks), MIDDLE_DEVICES, budget)
    for devices in filter(None, asked.devices.split(",")):
        one(MIDDLE_BLOCKS, int(devices), budget)


if __name__ == "__main__":
    main()
