"""How long `recommend` takes on many clusters, and whether tables agree with single commands, cell by cell.

    python benchmarks/clusters_and_tables.py [--model gpt2-xl] [--devices 512] [--kinds H100,A100] [--again 100]
                                             [--table-model llama-7b] [--tables 9] [--budget 64]

First `recommend` rates every size up to --devices of every kind of device that is known, and --again of the candidates
are searched again by `search --searcher expert`. Then --tables tables of `sweep`, each of 16 cells over tensor and
pipeline parallel degrees, are compared with `estimate`, and one table that is searched with --budget is compared with
`search`. The exit status is 1 if anything differs.
"""

import argparse
import itertools
import os
import random
import sys
import time
from dataclasses import replace

from agents import Budget, search, search_offer
from agents.recommend import Goals, recommend, sizes
from automap.device_kinds import known_devices
from automap.errors import UserError
from automap.plan import Plan
from automap.problem import Problem
from ir import zoo
from service.command.estimation import price_hand_made
from service.command.sweeping import Side, sweep
from service.jobs.run_job import JobRequest, ModelOptions

BATCH = 512
SIDES = [Side("tp", (1, 2, 4, 8)), Side("pp", (1, 2, 4, 8))]
FEW_SIDES = [Side("tp", (1, 2, 4)), Side("pp", (1, 2))]
STATED = {"micro_batch": (1, 2, 4), "zero": (0, 1, 3)}
CLUSTERS = ("1x8xA100-80GB", "4x8xA100-80GB", "2x8xH100", "2x8xV100-16GB@25Gbit")


def rated(model: str, kinds: list[str], most: int, again: int) -> list[str]:
    """Times `recommend`, and searches some of its candidates again; returns what differs."""
    graph, training = zoo.build(model), {"global_batch": BATCH}
    clusters = sizes(kinds, most)
    began, used = time.monotonic(), os.times()
    found = recommend(graph, clusters, training, Goals(), processes=len(os.sched_getaffinity(0)))
    taken, now = time.monotonic() - began, os.times()
    cpu = sum(now[:4]) - sum(used[:4])
    alone = [one for one in found.candidates if one.step_time_s is not None]
    print(f"{model}: {len(clusters)} candidates of {len(kinds)} kinds in {taken:.1f} s, {cpu:.1f} s of processor time;")
    print(f"{len(alone)} by templates, the others by bounds; {len(found.front)} on the front")
    wrong = []
    some = [alone[number * len(alone) // min(again, len(alone))] for number in range(min(again, len(alone)))]
    for one in some:
        problem = Problem.build(graph, one.cluster, training)
        step_s = search(problem, Budget(), searcher="expert").step_time_s
        if step_s != one.step_time_s:
            wrong.append(f"{one.cluster}: {one.step_time_s} and {step_s}")
    print(f"{len(some)} of them searched again, {len(wrong)} differ from `search --searcher expert`")
    return wrong


def step_s(plan: Plan | None) -> float | None:
    """Step time of a plan; None without one."""
    return None if plan is None or plan.estimate is None else plan.estimate.step_time_s


def swept(model: str, count: int) -> list[str]:
    """Prices cells as `sweep` does and as `estimate` does; returns what differs."""
    tables = random.Random(0).sample(list(itertools.product(CLUSTERS, *STATED.values())), count)
    wrong, priced, number = [], 0, 0
    for cluster, *values in tables:
        request = JobRequest(cluster=cluster, training={"global_batch": BATCH}, model=ModelOptions(zoo=model))
        stated = dict(zip(STATED, values, strict=True))
        for cell in sweep(b"", request, stated, SIDES, searched=False):
            try:
                alone, fault = step_s(price_hand_made(b"", replace(request), {**stated, **cell.at})), None
            except UserError as refused:
                alone, fault = None, str(refused)
            number, priced = number + 1, priced + (alone is not None)
            if (step_s(cell.plan), cell.fault) != (alone, fault):
                wrong.append(f"{cluster} {stated} {cell.at}: {step_s(cell.plan)} {cell.fault} and {alone} {fault}")
    print(f"{number} cells, {priced} of them plans and the others refused, {len(wrong)} differ from `estimate`")
    return wrong


def searched(model: str, budget: str) -> list[str]:
    """Searches the cells of a table as `sweep` does and as `search` does; returns what differs."""
    training, cluster = {"global_batch": BATCH}, CLUSTERS[1]
    request = JobRequest(cluster=cluster, training=training, model=ModelOptions(zoo=model), budget=budget)
    wrong, found = [], 0
    cells = sweep(b"", request, {}, FEW_SIDES, searched=True)
    for cell in cells:
        try:
            problem = Problem.build(zoo.build(model), cluster, training, {"fix": dict(cell.at)})
            alone = search_offer(problem, Budget.parse(budget)).step_time_s
        except UserError:
            alone = None
        found += alone is not None
        if step_s(cell.plan) != alone:
            wrong.append(f"{cell.at}: {step_s(cell.plan)} {cell.fault} and {alone}")
    print(f"{len(cells)} cells searched, {found} of them with a plan, {len(wrong)} differ from `search`")
    return wrong


def main() -> int:
    """Rates, sweeps and compares; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="gpt2-xl")
    parser.add_argument("--devices", type=int, default=512)
    parser.add_argument("--again", type=int, default=100)
    parser.add_argument("--table-model", default="llama-7b")
    parser.add_argument("--tables", type=int, default=9)
    parser.add_argument("--budget", default="64")
    parser.add_argument("--kinds", help="kinds of devices; default: all that are known")
    options = parser.parse_args()
    kinds = options.kinds.split(",") if options.kinds else [device.name for device in known_devices()]
    wrong = rated(options.model, kinds, options.devices, options.again)
    wrong += swept(options.table_model, options.tables) + searched(options.table_model, options.budget)
    print("\n".join(wrong) or "Nothing differs.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
