"""The DQN alone on ten real models: beside the best plans known, beside a DQN without training, and in the portfolio.

    python benchmarks/dqn_alone.py [--seeds 3] [--seconds 20] [--evaluations 500] [--only WORD]
        [--parts alone,transfer,portfolio] [--known benchmarks/best_known.json] [--search 60s]

Three parts, each a table with one line a problem and then a summary:

- alone: for every seed, the gap to the best plan known of the plan that `dqn` finds in the given seconds. Beside it,
  the plans that it has priced and the completions that it has looked at.
- transfer: the number of plans that `dqn` prices until one is within 1 % of the best plan known, and the same for
  `dqn-from-scratch`, in the median over seeds; `-` if more than half of the runs do not get there in the given seconds.
  Beside it, the same for `dqn` where a network that has learnt nothing proposes, so that only learning is pretrained.
  If the part alone is not asked for, searches end when they are there.
- portfolio: the gap of the portfolio with the given evaluations, of the same with a network that has learnt nothing,
  and of the same without a network, so that nothing is proposed.

The best plan known is kept in a file, see `benchmarks/network_gap.py`; a faster plan is not written back. The seconds
of the DQN are processor time of its process, so that other work on the machine changes nothing.
"""

import argparse
import datetime
import math
import os
import platform
import statistics
import time
from pathlib import Path
from unittest.mock import patch

from network_gap import UNTRAINED, Known, priced, problems

from agents import Budget, search
from agents.incumbent import Incumbent
from agents.learning import dqn
from agents.learning.checkpoint import read_network
from agents.learning.dqn import run_dqn
from agents.learning.network import ProposalNetwork
from agents.learning.proposals import NETWORK
from agents.portfolio import portfolio
from agents.sampling.expert import price_grid
from automap.problem import Problem
from automap.space.space import PlanSpace

NAMES = (
    "gpt2-xl on 64x8xH100-80GB, batch 128",
    "gpt2-xl on 2x8xV100-16GB@25Gbit, batch 128",
    "bert-large on 16x1xV100-16GB@10Gbit, batch 256",
    "bert-large on 64x8xH100-80GB, batch 256",
    "resnet50 on 16x1xV100-16GB@10Gbit, batch 1024",
    "vgg19 on 16x1xV100-16GB@10Gbit, batch 1024",
    "llama-70b on 64x8xH100-80GB, batch 256",
    "t5-11b on 2x8xV100-16GB@25Gbit, batch 256",
    "t5-11b on 64x8xH100-80GB, batch 256",
    "mixtral-8x7b on 64x8xH100-80GB, batch 256",
)
"""Problems of `benchmarks/network_gap.py` in which the best template is furthest from the best plan known."""
NETWORKS = {"with the network": read_network(NETWORK), "with an untrained one": UNTRAINED, "without any": None}
NEAR = 0.01


def searched(problem: Problem, seconds: float, seed: int, *, pretrained: bool, enough_s: float = 0.0) -> Incumbent:
    """A search of the DQN alone, which ends early if a plan takes at most `enough_s`."""
    found: list[Incumbent] = []
    incumbent = Incumbent(
        PlanSpace(problem),
        Budget(seconds=seconds),
        searcher="expert",
        should_stop=lambda: bool(found) and found[0].best_s <= enough_s,
        clock=time.process_time,
    )
    grid = price_grid(incumbent, charged=False)
    # Only plans of the DQN are counted, not those that the search begins with.
    incumbent.evaluations, incumbent.searcher = 0, "dqn"
    incumbent.improvements = [(0, when, reached) for _, when, reached in incumbent.improvements]
    found.append(incumbent)
    run_dqn(incumbent, seed=seed, templates=grid, network=NETWORK if pretrained else None)
    return incumbent


def proposed_untrained(problem: Problem, seconds: float, seed: int, enough_s: float) -> Incumbent:
    """A search of the DQN for which a network that has learnt nothing proposes."""
    with patch.object(dqn, "readable", lambda folder: UNTRAINED):
        return searched(problem, seconds, seed, pretrained=True, enough_s=enough_s)


def plans_to(incumbent: Incumbent, step_time_s: float) -> float:
    """Plans that were priced until one was as fast; infinite where none was."""
    return next(
        (float(max(count, 0)) for count, _, reached in incumbent.improvements if reached <= step_time_s), math.inf
    )


def searched_with(problem: Problem, evaluations: int, seed: int, network: ProposalNetwork | None) -> float:
    """Step time that a portfolio reaches with a network of its own, or with none."""
    with patch.object(portfolio, "readable", lambda folder: network):
        found = search(problem, Budget(evaluations=evaluations), seed=seed).plan.search.searchers
    return min(filter(None, found.values()))


def main() -> None:
    """Prints the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--evaluations", type=int, default=500)
    parser.add_argument("--only", default="", help="only problems with this word in their name")
    parser.add_argument("--parts", default="alone,transfer,portfolio")
    parser.add_argument("--known", type=Path, default=Path(__file__).parent / "best_known.json")
    parser.add_argument("--search", default="60s", help="budget of the portfolio where no plan is known")
    given = parser.parse_args()
    print(f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, {given.seeds} seeds")
    known = Known(given.known, Budget.parse(given.search))
    parts, seeds = given.parts.split(","), range(given.seeds)
    gaps, ratios = [], []
    with_networks: dict[str, list[list[float]]] = {kind: [] for kind in NETWORKS}
    for name, build in problems():
        if name not in NAMES or given.only not in name:
            continue
        problem = build()
        space, _, template_s = priced(problem)
        best_s = known.best_s(name, space, template_s)
        line, near_s = [], (1.0 + NEAR) * best_s
        if "alone" in parts or "transfer" in parts:
            # What a search finds after the first near plan counts only for its gap.
            enough_s = 0.0 if "alone" in parts else near_s
            runs = [searched(problem, given.seconds, seed, pretrained=True, enough_s=enough_s) for seed in seeds]
        if "alone" in parts:
            reached = [run.best_s / best_s - 1.0 for run in runs]
            gaps.append(reached)
            looked = statistics.median(run.look_aheads for run in runs)
            line.append(f"alone {_percents(reached)} with {statistics.median(r.evaluations for r in runs):.0f} plans, ")
            line.append(f"{looked:.0f} completions")
        if "transfer" in parts:
            again = [searched(problem, given.seconds, s, pretrained=False, enough_s=near_s) for s in seeds]
            untrained = [proposed_untrained(problem, given.seconds, s, near_s) for s in seeds]
            fine, scratch, other = (
                statistics.median(plans_to(run, near_s) for run in some) for some in (runs, again, untrained)
            )
            if math.isfinite(fine):
                ratios.append(max(scratch, 1.0) / max(fine, 1.0))
            line.append(f"  plans to 1 %: {_count(fine)}, from scratch {_count(scratch)}, ")
            line.append(f"proposed by an untrained network {_count(other)}")
        if "portfolio" in parts:
            for kind, network in NETWORKS.items():
                reached = [searched_with(problem, given.evaluations, seed, network) / best_s - 1.0 for seed in seeds]
                with_networks[kind].append(reached)
                line.append(f"  {kind} {_percents(reached)}")
        print("".join(line), "", name, flush=True)
    if gaps:
        near = sum(statistics.median(some) <= NEAR for some in gaps)
        every = [gap for some in gaps for gap in some]
        print(
            f"alone: {100 * statistics.fmean(every):.2f} % above the best plan known in the mean, at most 1 % in the "
            f"median over seeds on {near} of {len(gaps)} problems and in {sum(gap <= NEAR for gap in every)} of "
            f"{len(every)} runs"
        )
    if ratios:
        print(
            f"transfer: {statistics.median(ratios):.1f} times as many plans from scratch in the median over "
            f"{len(ratios)} problems that get there"
        )
    for kind, runs_of in with_networks.items():
        if runs_of:
            mean = statistics.fmean(gap for some in runs_of for gap in some)
            print(f"portfolio, {kind}: {100 * mean:.2f} % in the mean")


def _percents(gaps: list[float]) -> str:
    return " ".join(f"{100 * gap:.2f}" for gap in gaps) + " %"


def _count(plans: float) -> str:
    return f"{plans:.0f}" if math.isfinite(plans) else "-"


if __name__ == "__main__":
    main()
