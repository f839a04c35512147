"""The pretrained network beside the best template, and beside others with as few evaluations.

    python benchmarks/pretrained_gap.py [--evaluations 64] [--seeds 3] [--known 5000] [--models WORD]

The gap of each searcher's best plan to the best plan known, that of a portfolio with so many evaluations; in the mean
over seeds, and over all. "none" where no plan that fits was found. The best template costs the whole grid of templates,
hundreds to thousands of prices, some milliseconds in all: it is what the network would have to beat to be of use.

What this does not show is how the network does on models that are strange to it. None of the pairs of model and cluster
is in the family that it was trained on, but most of the models' blocks are: ResNet-50 as a whole, the blocks of
Llama-7B, Mixtral and BERT-large. And the noise with which plans are drawn from it was chosen on these very problems.
"""

import argparse
import statistics

from agents import Budget, search
from automap.cluster import parse_cluster
from automap.errors import NothingFits
from automap.problem import Problem
from ir import zoo

PROBLEMS = (
    ("gpt2", "2x4xA100", 64),
    ("gpt2-xl", "4x8xA100-80GB", 128),
    ("bert-large", "2x8xV100-16GB@25Gbit", 256),
    ("resnet50", "16x1xV100-16GB@10Gbit", 1024),
    ("vgg19", "2x4xV100@25Gbit", 256),
    ("llama-7b", "2x8xH100-80GB", 128),
    ("t5-3b", "4x8xA100-80GB", 256),
    ("mixtral-8x7b", "8x8xH100-80GB", 256),
)
"""None of these pairs is in `agents.learning.pretraining.FAMILY`; blocks of most of these models are."""
TEMPLATE, NETWORK = "template", "dqn-pretrained"
COMPARED = (NETWORK, "mcmc", "random", "dqn")
KNOWN = 5000


def step_time(problem: Problem, searcher: str, evaluations: int, seed: int) -> float | None:
    """Step time of the best plan that a searcher finds; None if nothing fits."""
    try:
        return search(problem, Budget(evaluations=evaluations), searcher=searcher, seed=seed).plan.estimate.step_time_s
    except NothingFits:
        return None


def main() -> None:
    """Prints one line for each problem."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--evaluations", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--known", type=int, default=KNOWN, help="evaluations of the portfolio")
    parser.add_argument("--models", default="", help="a word in the names of those that are planned")
    given = parser.parse_args()
    every: dict[str, list[float | None]] = {name: [] for name in (TEMPLATE, *COMPARED)}
    lost = 0
    planned = [problem for problem in PROBLEMS if given.models in problem[0]]
    for spec, cluster, batch in planned:
        problem = Problem.build(zoo.build(spec), parse_cluster(cluster), {"global_batch": batch})
        known = search(problem, Budget(evaluations=given.known), seed=0).plan
        times: dict[str, list[float | None]] = {TEMPLATE: [known.search.baselines["expert"]]}
        for name in COMPARED:
            times[name] = [step_time(problem, name, given.evaluations, seed) for seed in range(given.seeds)]
        best_s = known.estimate.step_time_s
        gaps = {name: [None if s is None else s / best_s - 1.0 for s in found] for name, found in times.items()}
        lost += _loses(gaps[NETWORK], gaps[TEMPLATE])
        for name, found in gaps.items():
            every[name] += found
        print(f"{spec:13} {cluster:22} {_line(gaps)}", flush=True)
    print(f"all: {_line(every)}")
    print(f"{NETWORK}, in the mean over seeds, is slower than the best template on {lost} of {len(planned)}")


def _loses(network: list[float | None], template: list[float | None]) -> bool:
    """Whether plans are slower than the best template in the mean over seeds, or some seed found no plan that fits."""
    (other,) = template
    known = [one for one in network if one is not None]
    return other is not None and (len(known) < len(network) or statistics.mean(known) > other)


def _line(gaps: dict[str, list[float | None]]) -> str:
    return "   ".join(f"{name} {_mean(found)}" for name, found in gaps.items())


def _mean(gaps: list[float | None]) -> str:
    known = [100 * one for one in gaps if one is not None]
    missing = f" (none {len(gaps) - len(known)} of {len(gaps)} times)" if len(known) < len(gaps) else ""
    return (f"{statistics.mean(known):7.1f} %" if known else "      none") + missing


if __name__ == "__main__":
    main()
