"""Certificates of real models on real clusters: by how much a plan may be faster than the best one known, at most.

    python benchmarks/certificates.py [--seconds 60] [--models NAME,…] [--clusters NAME,…] [--profiles FOLDER]
        [--budget 10s] [--known FILE]

Prints for each pair of `benchmarks/real_models.py` the step time of the plan found, how far the bound of the shapes and
the certificate are below it, and how many seconds of processor time the certificate took. Then it prints how many
certificates are within 5 and 20 %. If FILE, a JSON object {"model|cluster": seconds}, has the step time of a pair, it
is taken from there; others are written there. The committed figures are in benchmarks/results/.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from real_models import CLUSTERS, MODELS, graph_of

from agents import Budget, search
from agents.portfolio.certificate import certified_s
from automap.bounds.partial_plans import BoundTable
from automap.cluster import parse_cluster
from automap.errors import NothingFits
from automap.problem import Problem
from automap.space.target_limits import plan_space


def problem_of(model: str, cluster: str, profiles: Path) -> Problem:
    """The problem of a pair."""
    spec, batch, training = MODELS[model]
    return Problem.build(
        graph_of(spec, profiles), parse_cluster(CLUSTERS[cluster]), {"global_batch": batch, **training}
    )


def pair(problem: Problem, step_s: float, seconds: float) -> tuple[float, float, float]:
    """Shares by which the bound of the shapes and the certificate are below a step time; seconds of processor time."""
    space = plan_space(problem)
    began = time.process_time()
    weak_s = BoundTable(space).first.time_s
    least_s = certified_s(space, step_s, lambda: time.process_time() - began > seconds)
    return 1.0 - weak_s / step_s, 1.0 - least_s / step_s, time.process_time() - began


def main() -> None:
    """Certifies all pairs, then prints how many certificates are near the step time."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--budget", default="10s")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--clusters", default=",".join(CLUSTERS))
    parser.add_argument("--profiles", type=Path, default=Path("../data/profiles"))
    parser.add_argument("--known", type=Path)
    given = parser.parse_args()
    for spec in (MODELS[name][0] for name in given.models.split(",")):
        if spec.endswith(".txt") and not (given.profiles / spec).is_file():
            parser.error(f"--profiles: {given.profiles / spec} is no file: name the folder of the layer profiles")
    known = json.loads(given.known.read_text()) if given.known and given.known.exists() else {}
    gaps = []
    for model in given.models.split(","):
        for cluster in given.clusters.split(","):
            problem, key = problem_of(model, cluster, given.profiles), f"{model}|{cluster}"
            if key not in known:
                try:
                    known[key] = search(problem, Budget.parse(given.budget), seed=0).step_time_s
                except NothingFits:
                    known[key] = None
                if given.known:
                    given.known.write_text(json.dumps(known, indent=1))
            if known[key] is None:
                print(f"{model:13} {cluster:18} nothing fits", flush=True)
                continue
            weak, gap, taken_s = pair(problem, known[key], given.seconds)
            gaps.append(gap)
            print(
                f"{model:13} {cluster:18} step {1e3 * known[key]:10.2f} ms   shapes' bound {100 * weak:5.1f} % less   "
                f"no plan is more than {100 * gap:5.1f} % faster, after {taken_s:4.1f} s",
                flush=True,
            )
    if gaps:
        near, far = sum(gap <= 0.05 for gap in gaps), sum(gap <= 0.2 for gap in gaps)
        print(
            f"{len(gaps)} pairs: {near} within 5 %, {far} within 20 %, "
            f"the median {100 * statistics.median(gaps):.1f} %, the most {100 * max(gaps):.1f} %"
        )


if __name__ == "__main__":
    main()
