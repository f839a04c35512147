"""The network's plans beside the best plans known and the best templates, on problems that it has never seen.

    python benchmarks/network_gap.py [--seeds 3] [--known benchmarks/best_known.json] [--search 20s]
                                     [--only WORD] [--untrained]

The problems are generated ones of held-out families and sizes, and real models of the zoo, none of which is trained on.
For each problem it prints four gaps to the best plan known, in the mean over seeds: those of the best template, of the
best improved template (`agents/planners/template_improvement.py`), of the network's first plan (no sampling), and of
the best of all proposals. It also prints the seconds that all this took after the templates. Seconds are processor
time, also those that limit the improvement of templates, so that other work on the host changes little.

The best plan known is the fastest that the portfolio found with the budget of `--search`, now or earlier, or that the
network found. The best plans are kept in a file and priced again. Of some only the price is known: their problems are
searched again if the best template has another price than it had then.
"""

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from agents import Budget, search
from agents.incumbent import Incumbent
from agents.learning.checkpoint import read_network
from agents.learning.network import ProposalNetwork
from agents.learning.problems import outline
from agents.learning.proposals import NETWORK
from agents.learning.proposed_skeletons import propose_and_solve
from agents.planners.template_improvement import improve_templates
from agents.sampling.expert import Grid, price_grid
from automap.cluster import parse_cluster
from automap.errors import NothingFits
from automap.problem import Problem
from automap.space.space import PlanSpace, Values
from envs.kernels import ACTION_FEATURES, STATE_FEATURES
from ir import zoo

REAL = (
    ("gpt2", "2x4xA100", 64),
    ("gpt2-xl", "4x8xA100-80GB", 128),
    ("gpt2-xl", "64x8xH100-80GB", 128),
    ("gpt2-xl", "2x8xV100-16GB@25Gbit", 128),
    ("bert-large", "2x8xV100-16GB@25Gbit", 256),
    ("bert-large", "16x1xV100-16GB@10Gbit", 256),
    ("bert-large", "64x8xH100-80GB", 256),
    ("resnet50", "16x1xV100-16GB@10Gbit", 1024),
    ("resnet50", "2x8xV100-16GB@25Gbit", 512),
    ("vgg19", "2x4xV100@25Gbit", 256),
    ("vgg19", "16x1xV100-16GB@10Gbit", 1024),
    ("vgg19", "4x8xA100-80GB", 1024),
    ("vit-h", "4x8xA100-80GB", 1024),
    ("llama-7b", "2x8xH100-80GB", 128),
    ("llama-7b", "16x1xV100-16GB@10Gbit", 256),
    ("llama3-70b", "64x8xH100-80GB", 512),
    ("llama-70b", "64x8xH100-80GB", 256),
    ("t5-3b", "4x8xA100-80GB", 256),
    ("t5-11b", "2x8xV100-16GB@25Gbit", 256),
    ("t5-11b", "64x8xH100-80GB", 256),
    ("mixtral-8x7b", "8x8xH100-80GB", 256),
    ("mixtral-8x7b", "64x8xH100-80GB", 256),
)
"""(model of the zoo, cluster, global batch). No generated problem has the depth and width of one of these models."""
UNTRAINED = ProposalNetwork(
    {
        "q_net.0.weight": np.zeros((1, STATE_FEATURES + ACTION_FEATURES), np.float32),
        "q_net.0.bias": np.zeros(1, np.float32),
    }
)
"""A network that adds nothing to what completions reach."""
FROM_SEED, GENERATED = 100_000, 60
"""First seed of the generated problems, far from those of trainings, and how many of each kind of held-out problem
are taken."""


def problems() -> Iterator[tuple[str, Callable[[], Problem]]]:
    """The name of each problem and what builds it."""
    for model, cluster, batch in REAL:
        name = f"{model} on {cluster}, batch {batch}"
        yield name, functools.partial(_real, model, cluster, batch)
    for split in ("unseen-family", "unseen-size"):
        taken, seed = 0, FROM_SEED
        while taken < GENERATED:
            if outline(seed).split == split:
                drawn = outline(seed)
                yield f"{split} {seed}: {drawn.description}", lambda drawn=drawn: drawn.build().problem
                taken += 1
            seed += 1


def _real(model: str, cluster: str, batch: int) -> Problem:
    return Problem.build(zoo.build(model), parse_cluster(cluster), {"global_batch": batch})


class Known:
    """The best plans known, kept in a file."""

    def __init__(self, path: Path, budget: Budget) -> None:
        self.path, self.budget = path, budget
        self.found = json.loads(path.read_text()) if path.exists() else {}

    def best_s(self, name: str, space: PlanSpace, template_s: float | None) -> float | None:
        """Step time of the best plan known, which is searched where none is; None where nothing fits."""
        if not self.is_of_this_price(name, space, template_s):
            try:
                plan = search(space.problem, self.budget, seed=0).plan
            except NothingFits:
                self.found[name] = None
            else:
                self._keep(name, plan.estimate.step_time_s, space.encode(plan), plan.search.baselines["expert"])
            self._write()
        entry = self.found[name]
        return None if entry is None else entry["best_s"]

    def improve(self, name: str, best_s: float, values: Values | None) -> None:
        """Takes a faster plan, of which only the step time is kept if it lies outside the space."""
        if best_s < self.found[name]["best_s"]:
            self._keep(name, best_s, values, self.found[name]["template_s"])
            self._write()

    def _keep(self, name: str, best_s: float, values: Values | None, template_s: float) -> None:
        self.found[name] = {"best_s": best_s, "template_s": template_s}
        if values is not None:
            self.found[name]["plan"] = " ".join(map(str, values))

    def is_of_this_price(self, name: str, space: PlanSpace, template_s: float | None) -> bool:
        """Whether the plan that is kept, or else the best template, still has the price that it had then."""
        if name not in self.found:
            return False
        entry = self.found[name]
        if entry is not None and "plan" in entry:
            values = tuple(map(int, entry["plan"].split()))
            if len(values) != len(space.slots) or space.repair(values) != values:
                return False
            ((seconds, overflow),) = space.price(np.array([values])).tolist()
            return overflow <= 0.0 and math.isclose(seconds, entry["best_s"], rel_tol=1e-9)
        before = None if entry is None else entry["template_s"]
        if before is None or template_s is None:
            return before is template_s
        return math.isclose(before, template_s, rel_tol=1e-9)

    def _write(self) -> None:
        self.path.write_text(json.dumps(self.found, indent=1) + "\n")


def priced(problem: Problem) -> tuple[PlanSpace, Grid, float | None]:
    """The space of a problem, its templates, and the step time of the best of these."""
    incumbent = Incumbent(PlanSpace(problem), Budget(), searcher="expert")
    grid = price_grid(incumbent)
    return incumbent.space, grid, incumbent.baselines["expert"]


class Run(NamedTuple):
    """What was found within the first second."""

    improved_s: float
    """Step time of the best improved template."""
    first_s: float
    """Of the network's first plan."""
    best_s: float
    """Of the best plan of all."""
    took_s: float
    """Seconds of processor time."""
    best: Values | None
    """The best plan; None where it lies outside the space."""


def proposed(space: PlanSpace, grid: Grid, network: ProposalNetwork, seed: int) -> Run:
    """What the improvement of templates and the network find.

    Where an improved template is as fast as the bound on all plans, nothing is proposed: it is the first plan too.
    """
    incumbent = Incumbent(space, Budget(), searcher="elimination", clock=time.process_time)
    began = time.process_time()
    skeletons = improve_templates(incumbent, grid)
    improved_s = incumbent.least_s
    propose_and_solve(skeletons, grid, network, seed=seed)
    is_proven = improved_s <= incumbent.table.first.time_s
    first_s, _ = incumbent.first_proposal or (improved_s if is_proven else math.inf, 0.0)
    took_s, is_outside = time.process_time() - began, incumbent.least_s < incumbent.best_s
    return Run(improved_s, first_s, incumbent.least_s, took_s, None if is_outside else incumbent.best)


def main() -> None:
    """One line a problem, then the means."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--known", type=Path, default=Path(__file__).parent / "best_known.json")
    parser.add_argument("--search", default="20s", help="budget of the portfolio where no plan is known")
    parser.add_argument("--only", default="", help="only problems with this word in their name")
    parser.add_argument("--untrained", action="store_true", help="judge a network that has learnt nothing")
    given = parser.parse_args()
    network = UNTRAINED if given.untrained else read_network(NETWORK)
    known = Known(given.known, Budget.parse(given.search))
    lines = []
    for name, build in problems():
        if given.only not in name:
            continue
        space, grid, template_s = priced(build())
        if known.best_s(name, space, template_s) is None:
            continue
        runs = [proposed(space, grid, network, seed) for seed in range(given.seeds)]
        fastest = min(runs, key=lambda run: run.best_s)
        known.improve(name, fastest.best_s, fastest.best)
        lines.append((name, template_s, runs))
    gaps: dict[str, list[float]] = {"template": [], "improved": [], "first": [], "best": []}
    late, lost, missed = [], 0, 0
    for name, template_s, runs in lines:
        best_s = known.found[name]["best_s"]
        template = (template_s or math.inf) / best_s - 1.0
        improved, first, best = (statistics.fmean(run[i] for run in runs) / best_s - 1.0 for i in range(3))
        seconds = statistics.fmean(run.took_s for run in runs)
        late.append(seconds)
        lost += best > template + 1e-9
        missed += math.isfinite(template) and not math.isfinite(first)
        of = {"template": template, "improved": improved, "first": first, "best": best}
        for kind, gap in of.items():
            gaps[kind].append(gap)
        texts = [f"{kind} {_percent(gap)}" for kind, gap in of.items()]
        print(f"{'  '.join(texts)}  {seconds:5.2f} s  {name}", flush=True)
    for kind, found in gaps.items():
        finite = [gap for gap in found if math.isfinite(gap)]
        if finite:
            print(
                f"{kind:8}: mean {_percent(statistics.fmean(finite))}, median {_percent(statistics.median(finite))}, "
                f"worst {_percent(max(finite))}, nothing that fits {len(found) - len(finite)} of {len(found)} times"
            )
    if lines:
        print(
            f"the best of all proposals is slower than the best template on {lost} of {len(lines)}; the first "
            f"plan does not fit where a template does on {missed}; {statistics.fmean(late):.2f} s in the mean, "
            f"{max(late):.2f} s at most"
        )


def _percent(gap: float) -> str:
    return f"{100 * gap:6.1f} %" if math.isfinite(gap) else "    none"


if __name__ == "__main__":
    main()
