"""The portfolio beside planners of unlike stages, on layer profiles, where memory is plenty and where it is scarce.

    python benchmarks/scarce_memory.py PROFILES [--budget 15s] [--devices 8,64,512,1024] [--memory 16,4,2.5] [--seeds 2]
                                       [--models NAME,…] [--planners alpa,piper,galvatron]

If memory is scarce, a model is cut into many stages, and unlike layers need stages of unlike size. All plans are
synchronous pipelines in 1F1B order without virtual stages and without ZeRO, so that nothing but the division of the
model and recomputation can save memory. A problem is a profile of DAPPLE's format in the folder PROFILES, a number of
V100s in servers of eight behind 100 Gbit/s, and their memory in GiB. For each problem the script prints the step time
of the portfolio, by how much its slowest seed is slower than its fastest one, and the step times of the planners as
multiples of that of its slowest seed: below 1, the planner wins. The committed figures are in benchmarks/results/.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from planners import SAME, found_by, graph_of, short

from agents import Budget
from automap.cluster import Cluster, parse_cluster
from automap.problem import Problem

MODELS = {
    "bert-48": "bert-48-pbs-2.txt",
    "xlnet-36": "xlnet-36-pbs-1.txt",
    "amoeba-36": "amoeba-36-pbs-1.txt",
    "gnmt-16": "gnmt-16-pbs-64.txt",
    "vgg-19": "vgg-19-pbs-32.txt",
}
"""Name: profile."""
SAMPLES_A_DEVICE, LEAST_SAMPLES = 4, 512
"""Global batch over the number of devices, and the smallest one."""
FIXED = {"schedule": "1f1b", "virtual_stages": 1, "zero": 0}


def cluster(devices: int, memory_gib: float) -> Cluster:
    """V100s with so much memory."""
    found = parse_cluster("8xV100-16GB" if devices == 8 else f"{devices // 8}x8xV100-16GB@100Gbit")
    return replace(found, devices={name: replace(one, memory_GiB=memory_gib) for name, one in found.devices.items()})


def main() -> None:
    """One line a problem, then how often the portfolio is slower than a planner."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("profiles", type=Path)
    parser.add_argument("--budget", default="15s")
    parser.add_argument("--devices", default="8,64,512,1024")
    parser.add_argument("--memory", default="16,4,2.5", help="memory of a device, in GiB")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--planners", default="alpa,piper,galvatron")
    given = parser.parse_args()
    budget, planners = Budget.parse(given.budget), list(filter(None, given.planners.split(",")))
    for file in (given.profiles / MODELS[name] for name in given.models.split(",")):
        if not file.is_file():
            parser.error(f"profiles: {file} is no file: name the folder of DAPPLE's profiles")
    pairs = slower = spread = 0
    for name in given.models.split(","):
        graph = graph_of(MODELS[name], given.profiles)
        for devices in map(int, given.devices.split(",")):
            for memory in map(float, given.memory.split(",")):
                batch = max(LEAST_SAMPLES, SAMPLES_A_DEVICE * devices)
                problem = Problem.build(graph, cluster(devices, memory), {"global_batch": batch}, {"fix": FIXED})
                runs = [found_by(problem, "portfolio", budget, seed)[0] for seed in range(given.seeds)]
                line = f"{name:10} {devices:5d} V100 of {memory:4g} GiB"
                if None in runs:
                    print(line, " nothing fits", flush=True)
                    continue
                steps = sorted((run.plan.estimate.step_time_s, number) for number, run in enumerate(runs) if run)
                first, last = steps[0][0], steps[-1][0]
                pairs, spread = pairs + 1, max(spread, last / first - 1.0)
                plan = runs[steps[0][1]].plan
                line += f"  {1e3 * first:10.2f} ms  seeds {100 * (last / first - 1.0):4.1f} %"
                worst = False
                for planner in planners:
                    found, _ = found_by(problem, planner, budget)
                    ratio = None if found is None else found.plan.estimate.step_time_s / last
                    worst = worst or (ratio is not None and ratio * SAME < 1.0)
                    line += f"  {planner} {'   -' if ratio is None else f'{ratio:.3f}'}"
                slower += worst
                print(line, f" {short(plan)}, {plan.search.found_by}", flush=True)
    print(
        f"{pairs} problems with a plan that fits, slower than a planner on {slower}; seeds {100 * spread:.1f} % apart"
    )


if __name__ == "__main__":
    main()
