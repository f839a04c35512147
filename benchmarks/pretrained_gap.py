"""The pretrained network on models and clusters that it has not seen, beside others with as few evaluations.

    python benchmarks/pretrained_gap.py [--evaluations 64] [--seeds 3] [--known 5000] [--models WORD]

The gap of each searcher's best plan to the best plan known, that of a portfolio with so many evaluations; in the mean
over seeds, and over all. "none" where no plan that fits was found.
"""

import argparse
import statistics

from agents import Budget, search
from automap.cluster import parse_cluster
from automap.errors import NothingFits
from automap.problem import Problem
from ir import zoo

UNSEEN = (
    ("gpt2", "2x4xA100", 64),
    ("gpt2-xl", "4x8xA100-80GB", 128),
    ("bert-large", "2x8xV100-16GB@25Gbit", 256),
    ("resnet50", "16x1xV100-16GB@10Gbit", 1024),
    ("vgg19", "2x4xV100@25Gbit", 256),
    ("llama-7b", "2x8xH100-80GB", 128),
    ("t5-3b", "4x8xA100-80GB", 256),
    ("mixtral-8x7b", "8x8xH100-80GB", 256),
)
"""None of these pairs is in `agents.pretraining.FAMILY`; neither are the sizes of these models but VGG's layers."""
COMPARED = ("dqn-pretrained", "mcmc", "random", "dqn")
KNOWN = 5000


def gap(problem: Problem, searcher: str, evaluations: int, seed: int, best_s: float) -> float | None:
    """Over the best known step time; None where nothing fits."""
    try:
        found = search(problem, Budget(evaluations=evaluations), searcher=searcher, seed=seed)
    except NothingFits:
        return None
    return found.plan.estimate.step_time_s / best_s - 1.0


def main() -> None:
    """One line a problem."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--evaluations", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--known", type=int, default=KNOWN, help="evaluations of the portfolio")
    parser.add_argument("--models", default="", help="a word in the names of those that are planned")
    given = parser.parse_args()
    every: dict[str, list[float | None]] = {name: [] for name in COMPARED}
    for spec, cluster, batch in UNSEEN:
        if given.models not in spec:
            continue
        problem = Problem.build(zoo.build(spec), parse_cluster(cluster), {"global_batch": batch})
        best_s = search(problem, Budget(evaluations=given.known), seed=0).plan.estimate.step_time_s
        line = []
        for name in COMPARED:
            gaps = [gap(problem, name, given.evaluations, seed, best_s) for seed in range(given.seeds)]
            every[name] += gaps
            line.append(f"{name} {_mean(gaps)}")
        print(f"{spec:13} {cluster:22} {'   '.join(line)}", flush=True)
    print("all: " + "   ".join(f"{name} {_mean(gaps)}" for name, gaps in every.items()))


def _mean(gaps: list[float | None]) -> str:
    known = [100 * one for one in gaps if one is not None]
    missing = f" (none {len(gaps) - len(known)} of {len(gaps)} times)" if len(known) < len(gaps) else ""
    return (f"{statistics.mean(known):7.1f} %" if known else "      none") + missing


if __name__ == "__main__":
    main()
