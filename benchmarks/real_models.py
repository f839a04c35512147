"""Real models on real clusters: what a search gains over the best expert template, and how far it is from the bound.

    python benchmarks/real_models.py [--budget 10s] [--models NAME,…] [--clusters NAME,…] [--profiles FOLDER]

For each pair one portfolio search. Prints the step time of the best template of the whole grid, that of the plan found,
their ratio, the plan's distance from the lower bound, who found it, and after how many seconds the search was within
0.1 % of its end. "nothing fits" is a result as well. GNMT-16 is read from DAPPLE's layer profile below FOLDER.
The committed figures are in benchmarks/results/.
"""

import argparse
import statistics
from pathlib import Path

from agents import Budget, search
from automap.cluster import parse_cluster
from automap.errors import NothingFits
from automap.problem import Problem
from ir import zoo
from ir.graph import Graph
from ir.profile_import import batch_in_name, load_profile

MODELS = {
    "resnet50": ("resnet50", 1024, {}),
    "vgg19": ("vgg19", 1024, {}),
    "gnmt-16": ("dapple/gnmt-16-pbs-64.txt", 1024, {}),
    "bert-large": ("bert-large", 256, {}),
    "gpt2-xl": ("gpt2-xl", 128, {}),
    "llama-7b": ("llama-7b", 256, {}),
    "llama-70b": ("llama-70b", 256, {}),
    "mixtral-8x7b": ("mixtral-8x7b", 256, {}),
    "t5-11b": ("t5-11b", 256, {}),
}
"""Name: (model of the zoo or profile, global batch, training)."""
CLUSTERS = {
    "8 V100": "8xV100-16GB",
    "2x8 V100 25 Gbit": "2x8xV100-16GB@25Gbit",
    "16x1 V100 10 Gbit": "16x1xV100-16GB@10Gbit",
    "4x8 A100": "4x8xA100-80GB",
    "64x8 H100": "64x8xH100-80GB",
    "V100 + P100": "8xV100-32GB+8xP100",
}
NEAR = 1.001


def graph_of(spec: str, profiles: Path) -> Graph:
    """The graph of a model of the zoo or of a profile."""
    if not spec.endswith(".txt"):
        return zoo.build(spec)
    file = profiles / spec
    return load_profile(file.read_text(), name=file.stem, batch=batch_in_name(file.stem))


def pair(model: str, cluster: str, budget: Budget, profiles: Path) -> float | None:
    """Runs one search and prints its line; returns the gain over the best template, None if no template fits."""
    spec, batch, training = MODELS[model]
    head = f"{model:13} {cluster:18}"
    problem = Problem.build(
        graph_of(spec, profiles), parse_cluster(CLUSTERS[cluster]), {"global_batch": batch, **training}
    )
    try:
        result = search(problem, budget, seed=0)
    except NothingFits as fault:
        print(f"{head} nothing fits: {fault.value}", flush=True)
        return None
    record, step = result.plan.search, result.plan.estimate.step_time_s
    best = record.baselines["expert"]
    near = next((seconds for _, seconds, reached in result.improvements if reached <= NEAR * step), result.seconds)
    gap = step / record.lower_bound_s - 1.0
    if best is None:
        print(f"{head} template none fits   found {1e3 * step:9.2f} ms by {record.found_by}", flush=True)
        return None
    print(
        f"{head} template {1e3 * best:9.2f} ms   found {1e3 * step:9.2f} ms   gain {100 * (best / step - 1):5.1f} %   "
        f"above the bound {100 * gap:5.0f} %   {record.found_by:12} within 0.1 % after {near:5.1f} s   "
        f"{'proven ' if record.proven else ''}{result.evaluations} plans",
        flush=True,
    )
    return best / step - 1.0


def main() -> None:
    """Searches all pairs, then prints how many gain at least one percent."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budget", default="10s")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--clusters", default=",".join(CLUSTERS))
    parser.add_argument("--profiles", type=Path, default=Path("../data/profiles"))
    given = parser.parse_args()
    for spec in (MODELS[name][0] for name in given.models.split(",")):
        if spec.endswith(".txt") and not (given.profiles / spec).is_file():
            parser.error(f"--profiles: {given.profiles / spec} is no file: name the folder of the layer profiles")
    gains = [
        pair(model, cluster, Budget.parse(given.budget), given.profiles)
        for model in given.models.split(",")
        for cluster in given.clusters.split(",")
    ]
    known = [gain for gain in gains if gain is not None]
    if known:
        print(
            f"{len(known)} of {len(gains)} pairs with a template that fits: {sum(g >= 0.01 for g in known)} gain 1 % "
            f"or more, the median {100 * statistics.median(known):.1f} %, the least {100 * min(known):.1f} %"
        )


if __name__ == "__main__":
    main()
