"""Auto-MAP's three paradigms, each searched by the DQN alone, beside the DQN that decides everything.

    python benchmarks/auto_map.py [--budget 15s] [--models NAME,…] [--cluster 2x8xV100-16GB@25Gbit]

Auto-MAP (arXiv 2007.04069) searches operator partition, auto data parallelism and auto pipeline apart, each with a DQN.
Prints for each model the step time that each paradigm ends with, its gap to the best of the line, and after how many
seconds it was within 1 % of the step time that it ended with; "none" means that nothing that fits was found. The paper
states two hours for its searches. Its tables are not compared, since its models and devices have other prices here.
"""

import argparse

from agents import Budget, search
from automap.cluster import parse_cluster
from automap.errors import NothingFits
from automap.problem import Problem
from ir import zoo

MODELS = {"resnet50": 512, "vgg19": 512, "bert-large": 256, "t5-large": 256, "gpt2-xl": 64}
"""Model of the zoo: global batch."""
PARADIGMS = ("sharding", "replication", "pipeline", "dqn", "portfolio")
NEAR = 1.01


def searched(problem: Problem, searcher: str, budget: Budget) -> tuple[float, float] | None:
    """Step time that a searcher ends with, and the seconds after which it was near; None where nothing fits."""
    try:
        found = search(problem, budget, searcher=searcher, seed=0)
    except NothingFits:
        return None
    # Where the searcher itself found nothing, the result is the best template.
    if found.record.searchers.get(searcher, found.step_time_s) is None:
        return None
    near = next((s for _, s, reached in found.improvements if reached <= NEAR * found.step_time_s), found.seconds)
    return found.step_time_s, near


def main() -> None:
    """One line a model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budget", default="15s")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--cluster", default="2x8xV100-16GB@25Gbit")
    given = parser.parse_args()
    for model in given.models.split(","):
        cluster = parse_cluster(given.cluster)
        problem = Problem.build(zoo.build(model), cluster, {"global_batch": MODELS[model]})
        found = {name: searched(problem, name, Budget.parse(given.budget)) for name in PARADIGMS}
        best = min(result[0] for result in found.values() if result is not None)
        texts = [
            f"{name} none"
            if result is None
            else f"{name} {1e3 * result[0]:.1f} ms (+{100 * (result[0] / best - 1):.1f} %, {result[1]:.1f} s)"
            for name, result in found.items()
        ]
        print(f"{model:11} {'   '.join(texts)}", flush=True)


if __name__ == "__main__":
    main()
