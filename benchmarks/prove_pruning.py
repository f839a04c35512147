"""Pruning and bounds against full enumeration, and how much smaller pruning makes the spaces of real models.

    python benchmarks/prove_pruning.py [PROBLEMS]

All plans of each generated problem are listed and priced; there are 200 problems unless told otherwise, each of at most
10^5 plans. The script fails unless on all of them the lossless rules together leave a plan as fast as the fastest that
fits, and no plan is faster than a bound that searchers use for its first decisions. Then it prints, for real models,
the decades of plans before and after every rule.
"""

import argparse
import math
import statistics
import time
from dataclasses import replace

import numpy as np
from problems import GIB, Case, problem_of

from automap.bounds.enumeration import Enumeration
from automap.bounds.partial_plans import BoundTable, PartialPlan
from automap.cluster import parse_cluster
from automap.problem import Problem
from automap.space.space import PlanSpace
from envs.pruning import LOSSLESS, prune, steps, symmetry_decades
from ir import zoo

PROBLEMS = 200
DECADES = 4.6
"""About the largest number of plans of a generated problem."""
BEGINNINGS = 4
"""Number of random plans of each problem whose every beginning is compared with its bounds."""
TOLERANCE = 1e-12
MODELS = (
    ("resnet50", 256),
    ("vgg19", 256),
    ("bert-large", 256),
    ("gpt2-xl", 512),
    ("llama-7b", 512),
    ("llama-70b", 1024),
    ("mixtral-8x7b", 1024),
    ("t5-11b", 512),
)
CLUSTERS = (
    "1x8xV100-16GB",
    "2x8xV100-16GB@25Gbit",
    "16x1xV100-16GB@10Gbit",
    "4x8xA100-80GB",
    "64x8xH100-80GB",
    "1x8xV100-32GB+1x8xP100@25Gbit",
)


def generated(number: int) -> PlanSpace | None:
    """A problem by its number; None where the hints leave no plan or too many."""
    rng = np.random.default_rng(number)

    def pick(*values):
        return values[int(rng.integers(len(values)))]

    width = int(pick(256, 1024, 4096))
    model = pick(
        f"random:{number},{rng.integers(1, 4)},{width}",
        f"random:{number},{rng.integers(3, 8)},{width}",
        f"gpt:layers={rng.integers(1, 4)},hidden=512,heads=8,seq_len=256,vocab_size=4096",
        f"bert:layers={rng.integers(1, 3)},hidden=512,heads=8,seq_len=256,vocab_size=4096",
        f"vgg:convolutions={rng.integers(1, 3)}-{rng.integers(1, 3)},image_size=64",
        "resnet:blocks=1-1,image_size=64",
        "moe:layers=2,hidden=512,heads=8,kv_heads=8,ffn=1024,experts=4,seq_len=256,vocab_size=4096",
    )
    cluster = pick(
        "1x2xV100-16GB",
        "1x4xV100-16GB",
        "2x2xV100-16GB@10Gbit",
        "4x1xV100-16GB@25Gbit",
        "2x1xV100-16GB+2x1xP100@10Gbit",
        "1x4xA100",
    )
    kind = pick("sharding", "pipeline", "hybrid")
    fix = {"zero": pick(0, 1, 2, 3, None), "recompute": pick("none", "full", None)}
    if kind == "sharding":
        fix |= {"pp": 1, "num_micro_batches": pick(1, 2, None)}
    elif kind == "pipeline":
        fix |= {"tp": 1, "num_micro_batches": pick(4, 8, None), "schedule": pick("1f1b", "gpipe", "zb1p", None)}
    else:
        fix |= {"num_micro_batches": pick(2, 4), "schedule": pick("1f1b", None)}
    fix = {name: value for name, value in fix.items() if value is not None}
    case = Case(kind=kind, model=model, cluster=cluster, global_batch=int(pick(8, 32)), fix=fix, decades=DECADES)
    space = PlanSpace(problem_of(replace(case, seed=number)))
    if space.decades > 5.0:
        return None
    if rng.random() < 0.4:
        # So much memory that a few of the plans fit.
        used = space.price(space.random_batch(rng, 500))[:, 1] + 1.0
        capacity = min(d.memory_bytes for d in space.problem.cluster.devices.values()) / GIB
        memory_GiB = round(capacity * float(np.quantile(used, rng.uniform(0.02, 0.5))), 3)  # noqa: N806
        space = PlanSpace(problem_of(replace(case, seed=number, memory_GiB=memory_GiB)))
    return space


def every_plan(space: PlanSpace):
    """[n, slots] all plans, and [n, 2] their prices."""
    rows = np.concatenate(list(Enumeration(space).plans()))
    return rows, np.concatenate([space.price(rows[i : i + 4096]) for i in range(0, len(rows), 4096)])


def fastest(prices) -> float:
    """Seconds of the best plan that fits."""
    return float(prices[prices[:, 1] <= 0.0, 0].min(initial=math.inf))


def broken_bounds(space: PlanSpace, rows, prices, rng) -> tuple[int, int]:
    """Number of bounds that were compared with all their completions, and number of those that a completion beats."""
    table, enumeration = BoundTable(space), Enumeration(space)
    held = broken = 0
    for number in rng.integers(len(rows), size=BEGINNINGS):
        prefix, some = PartialPlan(space, table), enumeration.root()
        mine = np.arange(len(rows))
        while not prefix.done:
            at = prefix.position
            mine = mine[(rows[mine, :at] == rows[number, :at]).all(axis=1)]
            found = [(prices[mine].min(axis=0), (prefix.bound.time_s, prefix.bound.overflow))]
            for value, bound in zip(prefix.legal(), prefix.bounds(), strict=True):
                behind = mine[rows[mine, at] == value]
                found.append((prices[behind].min(axis=0), bound))
            while some.values.shape[1] < at:
                some = enumeration.extend(some)
                some = some.take(some.values[:, -1] == rows[number, some.values.shape[1] - 1])
            found.append((prices[mine].min(axis=0), enumeration.bounded(some).bounds[0]))
            held += len(found)
            broken += sum(bool((np.asarray(bound) > best + TOLERANCE).any()) for best, bound in found)
            prefix.decide(int(rows[number, at]))
    return held, broken


def prove(total: int) -> bool:
    """Enumerates problems and prints a summary; returns whether every rule and bound held."""
    began = time.monotonic()
    count = plans = fitting = left = held = lost = broken = 0
    smaller = []
    number = -1
    while count < total:
        number += 1
        space = generated(number)
        if space is None:
            continue
        rows, prices = every_plan(space)
        best = fastest(prices)
        pruned = prune(space)
        kept, kept_prices = every_plan(pruned)
        checked, faults = broken_bounds(space, rows, prices, np.random.default_rng(number))
        if fastest(kept_prices) != best:
            print(f"problem {number}: the optimum {best} is lost: {fastest(kept_prices)}")
            lost += 1
        if faults:
            print(f"problem {number}: {faults} bounds are beaten")
        count, plans, left = count + 1, plans + len(rows), left + len(kept)
        fitting, held, broken = fitting + math.isfinite(best), held + checked, broken + faults
        smaller.append(math.log10(len(rows) / len(kept)))
        if count % 20 == 0:
            print(f"{count} problems, {plans} plans, {time.monotonic() - began:.0f} s", flush=True)
    print(
        f"{count} problems of {plans} plans in all, of {fitting} of which some plan fits: the lossless rules "
        f"({', '.join(LOSSLESS)}) leave {left} plans, {statistics.fmean(smaller):.2f} decades fewer on average, "
        f"{max(smaller):.2f} at most, and lose {lost} optima; {held} bounds held against all completions, "
        f"{broken} beaten"
    )
    return not lost and not broken


def shrinkage(word: str) -> None:
    """Prints the decades of real pairs with `word` in their names before and after each rule."""
    print("\ndecades of plans; built into the space: parameters_only, linkage_groups, repeated_blocks")
    whole, added, lossless = [], [], []
    for model, batch in MODELS:
        for cluster in CLUSTERS:
            if word not in f"{model} on {cluster}":
                continue
            space = PlanSpace(Problem.build(zoo.build(model), parse_cluster(cluster), {"global_batch": batch}))
            found = steps(space)
            text = " ".join(f"{step.rule} {step.after:.1f}" for step in found)
            print(
                f"{model} on {cluster}: {found[0].before:.1f} {text}; exchanges {symmetry_decades(space):.1f}",
                flush=True,
            )
            whole.append(found[0].before - found[-1].after)
            added.append(space.decades - found[-1].after)
            lossless.append(sum(step.before - step.after for step in found[3:] if step.lossless))
    print(
        f"median shrinkage over {len(whole)} pairs: all rules {statistics.median(whole):.1f} decades, least "
        f"{min(whole):.1f}; of the plan space {statistics.median(added):.1f}, of it without loss "
        f"{statistics.median(lossless):.1f}"
    )


def main() -> int:
    """Runs both parts; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("problems", nargs="?", type=int, default=PROBLEMS, help="number of problems to enumerate")
    parser.add_argument("--models", default="", help="only real models with these words, such as 'vgg19 on 4x8'")
    asked = parser.parse_args()
    began = time.monotonic()
    holds = prove(asked.problems)
    shrinkage(asked.models)
    print(f"{time.monotonic() - began:.0f} s")
    return int(not holds)


if __name__ == "__main__":
    raise SystemExit(main())
