"""Planners of the literature against the portfolio: predicted step, time of the search, and plan, on one price.

    python benchmarks/planners.py [--budget 10s] [--portfolio 10s] [--models NAME,…] [--clusters NAME,…]
                                  [--planners NAME,…] [--profiles FOLDER] [--seeds 1]
    python benchmarks/planners.py --table FILE… [--picture FILE.svg]

For each pair every planner searches alone, then the portfolio does, once for each seed. Prints a line for each pair and
planner: the step time, its ratio to that of the portfolio's plan (below 1: the planner wins), processor seconds of the
search, and the plan in short. For the portfolio it prints the plan of the first seed, and by how much the slowest
seed's plan is slower than the fastest one's. A planner that proposes nothing that fits has a dash. At the end it prints
on how many pairs the portfolio is faster than all planners, on how many it is slower than one, and on how many its
seeds are within 1 %. A, B and C are the clusters of DAPPLE's evaluation. Layer profiles are read from FOLDER. With
--planners '' the portfolio searches alone.

With --table, FILEs with lines that this script has printed become the table of docs/planners.md, and with --picture its
picture. If the files have a pair twice, the fastest line of each planner and the last one of the portfolio count. The
committed figures are in benchmarks/results/.
"""

import argparse
import itertools
import math
import re
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from agents import Budget, search
from agents.searcher import SEARCHERS, SearchResult
from automap.cluster import Cluster, parse_cluster
from automap.errors import NothingFits
from automap.plan import Plan
from automap.problem import Problem
from ir import zoo
from ir.graph import Graph
from ir.profile_import import batch_in_name, load_profile

MODELS = {
    "resnet50": ("resnet50", 1024),
    "vgg19": ("vgg19", 512),
    "bert-large": ("bert-large", 256),
    "gpt2-xl": ("gpt2-xl", 128),
    "llama-7b": ("llama-7b", 256),
    "mixtral-8x7b": ("mixtral-8x7b", 256),
    "t5-3b": ("t5-3b", 128),
    "gnmt-16": ("dapple/gnmt-16-pbs-64.txt", 1024),
}
"""Name: (model of the zoo or profile, global batch)."""
PLANNERS = ("pipedream", "dapple", "spp", "alpa", "piper", "galvatron", "aceso", "whale", "elimination", "ilp")
NAMED = {
    "A": "2x8xV100-16GB@25Gbit",
    "B": "16x1xV100-16GB@25Gbit",
    "C": "16x1xV100-16GB@10Gbit",
    "4x8 A100": "4x8xA100-80GB",
    "8x8 H100": "8x8xH100-80GB",
    "mixed": "8xV100-32GB+8xP100@50Gbit",
    "7 A100": "1x7xA100-80GB",
}
CUBE_MESH = ("X112 2SSS", "1X21 S2SS", "12X2 SS1S", "212X SSS1", "2SSS X112", "S2SS 1X21", "SS1S 12X2", "SSS1 212X")
"""Links between the eight V100s of a server: one NVLink, two, or the system's bus (DLPerf, report of 2020)."""
RATES = {"X": 0.0, "1": 22.0, "2": 44.0, "S": 9.0}
"""GB/s of one NVLink 2.0 or two, of 25 each by its data sheet, and of the bus (assumed: what is reached)."""
Steps = dict[tuple[str, str], dict[str, float | None]]
"""(model, cluster) -> milliseconds of a step by planner; None: it proposes nothing that fits."""
SAME = 1.001
"""Factor within which two plans are equally fast."""


def clusters() -> dict[str, Cluster]:
    """All clusters by name."""
    found = {name: parse_cluster(text) for name, text in NAMED.items()}
    found["cube mesh"] = _with_rates(
        "8xV100-16GB", np.array([[RATES[c] for c in r.replace(" ", "")] for r in CUBE_MESH])
    )
    rates = np.exp(np.random.default_rng(0).uniform(np.log(0.3), np.log(30.0), (12, 12)))
    found["random"] = _with_rates("12x1xV100-16GB@25Gbit", np.minimum(rates, rates.T))
    return found


def _with_rates(text: str, rates: np.ndarray) -> Cluster:
    return parse_cluster({**parse_cluster(text).to_json(), "name": text, "bandwidth_GBps": rates.tolist()})


def graph_of(spec: str, profiles: Path) -> Graph:
    """The graph of a model of the zoo or of a profile."""
    if not spec.endswith(".txt"):
        return zoo.build(spec)
    file = profiles / spec
    return load_profile(file.read_text(), name=file.stem, batch=batch_in_name(file.stem))


def short(plan: Plan) -> str:
    """Stages with their meshes, micro-batches, ZeRO and schedule of a plan."""
    meshes = ["x".join(str(size) for _, size in stage.mesh) for stage in plan.stages]
    if len(meshes) > 4:
        meshes = [f"{len(meshes)} stages", *dict.fromkeys(meshes)]
    zero = plan.stages[0].zero.stage
    words = [" ".join(meshes), f"M {plan.num_micro_batches}", f"ZeRO {zero}" if zero else "", plan.schedule.kind]
    return ", ".join(word for word in words if word)


def found_by(problem: Problem, name: str, budget: Budget, seed: int = 0) -> tuple[SearchResult | None, float]:
    """What a searcher finds by itself, and the processor seconds that it takes; None if it finds nothing that fits."""
    began = time.process_time()
    try:
        found = search(problem, budget, searcher=name, seed=seed)
    except NothingFits:
        return None, time.process_time() - began
    is_own = name == "portfolio" or found.plan.search.searchers.get(name) is not None
    return (found if is_own else None), time.process_time() - began


def steps_of(lines: list[str]) -> Steps:
    """The step times of printed lines, by model and cluster.

    If the lines have a pair twice, each planner has its fastest plan, since it depends on the host how far a planner
    gets in its seconds; the portfolio has its last plan.
    """
    found: Steps = {}
    names = (*PLANNERS, "portfolio")
    pattern = re.compile(rf"(\S+) +(\S.*?) +({'|'.join(names)}) +([\d.]+|-) ")
    for match in filter(None, map(pattern.match, lines)):
        model, cluster, name, step = match.groups()
        steps = found.setdefault((model, cluster), {})
        before, step_ms = steps.get(name), None if step == "-" else float(step)
        is_kept = name != "portfolio" and before is not None and (step_ms is None or before <= step_ms)
        steps[name] = before if is_kept else step_ms
    order = [*itertools.product(MODELS, clusters())]
    return {pair: found[pair] for pair in order if "portfolio" in found.get(pair, {})}


def sums(found: Steps, lines: list[str]) -> list[str]:
    """How often the portfolio is faster than all planners, and slower than one, and how near its seeds are."""
    faster, slower = 0, []
    for (model, cluster), steps in found.items():
        others = [(step, name) for name, step in steps.items() if step is not None and name != "portfolio"]
        best, by = min(others, default=(math.inf, ""))
        ratio = steps["portfolio"] / best
        faster += ratio < 1.0 / SAME
        slower += [f"  {model} on {cluster}: {by} by {100 * (ratio - 1):.1f} %"] if ratio > SAME else []
    said = [
        f"{len(found)} pairs: the portfolio is faster than every planner on {faster}, slower than one on {len(slower)}"
    ]
    spreads = {}
    for match in filter(None, (re.match(r"(\S+) +(\S.*?) +portfolio .* seeds ([\d.]+)%", line) for line in lines)):
        spreads[match[1], match[2]] = float(match[3])
    if spreads:
        said.append(f"its seeds are within 1 % on {sum(s <= 1.0 for s in spreads.values())} of {len(spreads)} pairs")
    return said + slower


def table(found: Steps) -> None:
    """Prints step times as a table, each as a multiple of the portfolio's."""
    there = [name for name in PLANNERS if any(name in steps for steps in found.values())]
    print(f"| model | cluster | {' | '.join(there)} | portfolio |")
    print("|---" * (len(there) + 3) + "|")
    for (model, cluster), steps in found.items():
        whole = steps["portfolio"]
        cells = [None if steps.get(name) is None else f"{steps[name] / whole:.2f}" for name in there]
        print(f"| {model} | {cluster} | {' | '.join(cell or '–' for cell in cells)} | {whole:.1f} ms |")


def picture(found: Steps, file: Path) -> None:
    """Draws step times as multiples of the portfolio's: a row for each planner, the best on top, a mark a pair."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    ratios = {
        name: sorted(steps[name] / steps["portfolio"] for steps in found.values() if steps.get(name))
        for name in PLANNERS
    }
    there = sorted(
        (name for name in PLANNERS if ratios[name]), key=lambda name: float(np.median(ratios[name])), reverse=True
    )
    figure = Figure(figsize=(8.0, 0.45 * len(there) + 1.2), layout="constrained")
    axes = figure.subplots()
    for row, name in enumerate(there):
        # One path a row: a picture with a mark for each pair is several times as large.
        x = np.repeat(ratios[name], 3)
        axes.plot(x, np.tile((row - 0.3, row + 0.3, np.nan), len(ratios[name])), color="#1f5fa8", linewidth=1.0)
        axes.plot(float(np.median(ratios[name])), row, "o", color="#b3261e", markersize=5)
    axes.axvline(1.0, color="#444444", linewidth=0.8)
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xticks((1, 1.5, 2, 3, 5), ("1", "1.5", "2", "3", "5"))
    axes.set_yticks(range(len(there)), there)
    axes.set_xlabel(f"step time over the portfolio's; a line each of {len(found)} pairs, a dot their median")
    # Letters as text, and the same names in every file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "planners"}):
        figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Searches all pairs with all planners."""
    known = clusters()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budget", default="10s")
    parser.add_argument("--portfolio", default="10s")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--clusters", default=",".join(known))
    parser.add_argument("--planners", default=",".join(name for name in PLANNERS if name in SEARCHERS))
    parser.add_argument("--profiles", type=Path, default=Path("../data/profiles"))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--table", type=Path, nargs="+")
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    if given.table is not None:
        lines = [line for file in given.table for line in file.read_text().splitlines()]
        found = steps_of(lines)
        table(found)
        print("", *sums(found, lines), sep="\n")
        if given.picture is not None:
            picture(found, given.picture)
        return
    for spec in (MODELS[name][0] for name in given.models.split(",")):
        if spec.endswith(".txt") and not (given.profiles / spec).is_file():
            parser.error(f"--profiles: {given.profiles / spec} is no file: name the folder of the layer profiles")
    compare(given, known)


def compare(given: argparse.Namespace, known: Mapping[str, Cluster]) -> None:
    """Searches the pairs, and prints their lines and the sums."""
    print("model        cluster    planner      step ms  portfolio  seconds  plan")
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    budgets = Budget.parse(given.budget), Budget.parse(given.portfolio)
    for model in given.models.split(","):
        spec, batch = MODELS[model]
        graph = graph_of(spec, given.profiles)
        for cluster in given.clusters.split(","):
            problem = Problem.build(graph, known[cluster], {"global_batch": batch})
            whole, took_s = found_by(problem, "portfolio", budgets[1])
            if whole is None:
                print(f"{model:12} {cluster:10} nothing fits", flush=True)
                continue
            for name in filter(None, given.planners.split(",")):
                found, seconds = found_by(problem, name, budgets[0])
                head = f"{model:12} {cluster:10} {name:12}"
                if found is None:
                    say(f"{head} {'-':>8} {'-':>10} {seconds:8.1f}")
                    continue
                gain = found.step_time_s / whole.step_time_s
                say(f"{head} {1e3 * found.step_time_s:8.2f} {gain:9.3f}x {seconds:8.1f}  {short(found.plan)}")
            others = [found_by(problem, "portfolio", budgets[1], seed)[0] for seed in range(1, given.seeds)]
            times = [found.step_time_s for found in (whole, *others) if found is not None]
            name = f"({whole.plan.search.found_by})"
            say(
                f"{model:12} {cluster:10} portfolio    {1e3 * whole.step_time_s:8.2f} {name:>10} {took_s:8.1f}  "
                f"{short(whole.plan)}" + (f"  seeds {max(times) / min(times) - 1.0:.1%}" if given.seeds > 1 else "")
            )
    print(*sums(steps_of(lines), lines), sep="\n")


if __name__ == "__main__":
    main()
