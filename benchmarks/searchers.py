"""What each searcher finds on problems whose optimum is known, and with how many plans and seconds.

    python benchmarks/searchers.py [--searchers random,mcmc] [--problems all | quick | 0-25,40] [--seeds 3]
        [--evaluations 64,500,2000] [--seconds 60] [--kinds sharding,pipeline] [--until-optimum]

For every searcher and budget it prints the share of runs that end at the optimum (within 1e-9) and within 1 % of it,
the mean gap, and the evaluations and seconds to 1 % (median and 90th percentile; a run that does not get there counts
as endless). A budget in evaluations and one seed give the same plans on every machine; seconds depend on the machine.
A run in which nothing fits counts as a gap of 100 %. With --until-optimum a run ends as soon as it has reached the
known optimum, which only saves time: no searcher knows it. `dqn-shown` is the DQN with demonstrations; a quarter of its
budget is MCMC's. When a run ends, a line on stderr says so.
"""

import argparse
import contextlib
import datetime
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from problems import CASES, QUICK, Case, optimum, problem_of

from agents.results.diverse_top_k import MOST
from agents.searcher import SEARCHERS, Budget, Progress, SearchResult, search
from automap.errors import NothingFits
from automap.plan import Plan
from automap.problem import Problem

NEAR, EXACT = 0.01, 1e-9
COUNTS = (64, 500, 2000)
"""Budgets whose results follow from runs with larger budgets: random, mcmc and dqn do not depend on the budget."""
Run = Callable[[Problem, Budget, int, float], SearchResult]
"""Problem, budget, seed, step time in seconds that ends the search."""


def variant(name: str, start: Sequence[Plan] = ()) -> Run:
    """A searcher by name, with the plans that it begins from."""

    def run(problem: Problem, budget: Budget, seed: int, enough_s: float) -> SearchResult:
        best_s = math.inf

        def note(progress: Progress) -> None:
            nonlocal best_s
            best_s = min(best_s, progress.best_step_time_s or math.inf)

        return search(
            problem,
            budget,
            searcher=name,
            seed=seed,
            on_progress=note,
            should_stop=lambda: best_s <= enough_s,
            start=start,
        )

    return run


def shown(problem: Problem, budget: Budget, seed: int, enough_s: float) -> SearchResult:
    """A DQN that begins from unlike plans of MCMC, which has a quarter of the budget."""
    first = None
    with contextlib.suppress(NothingFits):
        first = variant("mcmc")(problem, _share(budget, 0.25), seed, enough_s)
    plans = () if first is None else first.unlike(MOST)
    dqn = variant("dqn", plans)(problem, _share(budget, 0.75), seed, enough_s)
    if first is None:
        return dqn
    later = [
        (count + first.evaluations, seconds + first.seconds, reached) for count, seconds, reached in dqn.improvements
    ]
    return replace(dqn, evaluations=first.evaluations + dqn.evaluations, improvements=[*first.improvements, *later])


def _share(budget: Budget, share: float) -> Budget:
    return Budget(
        seconds=None if budget.seconds is None else share * budget.seconds,
        evaluations=None if budget.evaluations is None else int(share * budget.evaluations),
    )


VARIANTS: dict[str, Run] = {name: variant(name) for name in SEARCHERS} | {"dqn-shown": shown}
"""What `--searchers` may name; other benchmarks add their own."""


@dataclass
class Tally:
    """The runs of one searcher with one budget."""

    gaps: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    """Evaluations to within 1 %; infinite for a run that does not get there."""
    to_optimum: list[float] = field(default_factory=list)
    """Evaluations to the optimum."""
    seconds: list[float] = field(default_factory=list)
    spent: list[float] = field(default_factory=list)
    proven: int = 0

    def add(self, best: float, result: SearchResult | None, seconds: float) -> None:
        """Adds a run; None stands for a run that found nothing that fits."""
        self.spent.append(seconds)
        if result is None or result.plan.estimate is None:
            self.gaps.append(1.0)
            self.evaluations.append(math.inf)
            self.to_optimum.append(math.inf)
            self.seconds.append(math.inf)
            return
        self.gaps.append(result.plan.estimate.step_time_s / best - 1.0)
        assert self.gaps[-1] > -EXACT, "faster than the proven optimum"
        near = [(count, when) for count, when, time_s in result.improvements if time_s <= best * (1.0 + NEAR)]
        self.evaluations.append(near[0][0] if near else math.inf)
        exact = [count for count, _, time_s in result.improvements if time_s <= best * (1.0 + EXACT)]
        self.to_optimum.append(exact[0] if exact else math.inf)
        self.seconds.append(near[0][1] if near else math.inf)
        self.proven += result.proven

    def row(self) -> str:
        """One line of the table."""
        count = len(self.gaps)
        exact = sum(gap <= EXACT for gap in self.gaps) / count
        near = sum(gap <= NEAR for gap in self.gaps) / count
        return (
            f"{100 * exact:5.0f} % {100 * near:5.0f} % {100 * statistics.fmean(self.gaps):8.2f} % "
            f"{_middle(self.evaluations, 0.5):>8} {_middle(self.evaluations, 0.9):>8} "
            f"{_middle(self.seconds, 0.5, 2):>8} {_middle(self.seconds, 0.9, 2):>8} "
            f"{statistics.median(self.spent):8.2f} {100 * self.proven / count:5.0f} % {count:5}"
        )

    def within(self, evaluations: int) -> str:
        """The tally of the runs as they were after so many evaluations."""
        near, exact = (sum(n <= evaluations for n in some) for some in (self.evaluations, self.to_optimum))
        count = len(self.gaps)
        return f"{evaluations:5}: {100 * near / count:3.0f} % within 1 %, {100 * exact / count:3.0f} % exact"


HEADER = (
    f"{'':28}{'exact':>7} {'1 %':>7} {'mean gap':>10} {'plans':>8} {'p90':>8} {'s':>8} {'p90':>8} {'s a run':>8} "
    f"{'proven':>7} {'runs':>5}"
)


def _middle(values: Sequence[float], share: float, digits: int = 0) -> str:
    """A quantile as text."""
    value = sorted(values)[min(len(values) - 1, int(share * len(values)))]
    return "-" if math.isinf(value) else f"{value:.{digits}f}"


def measure(
    name: str, cases: Sequence[Case], seeds: int, budget: Budget, until_optimum: bool = False
) -> dict[str, Tally]:
    """The runs of a searcher over all problems and seeds, by kind of problem and together."""
    tallies: dict[str, Tally] = {}
    for case in cases:
        best, problem = optimum(case)["step_time_s"], problem_of(case)
        for seed in range(seeds):
            began = time.monotonic()
            try:
                result = VARIANTS[name](problem, budget, seed, (1.0 + EXACT) * best if until_optimum else 0.0)
            except NothingFits:
                result = None
            gap = math.nan if result is None else result.plan.estimate.step_time_s / best - 1.0
            print(f"{name}, seed {seed}, gap {100 * gap:.2f} %, {case.name}", file=sys.stderr, flush=True)
            for kind in (case.kind, "all"):
                tallies.setdefault(kind, Tally()).add(best, result, time.monotonic() - began)
    return tallies


def chosen(text: str, kinds: Sequence[str]) -> list[Case]:
    """Problems by number, `quick` or `all`."""
    cases: Sequence[Case] = CASES
    if text == "quick":
        cases = QUICK
    elif text != "all":
        numbers: list[int] = []
        for part in text.split(","):
            first, _, last = part.partition("-")
            numbers += range(int(first), int(last or first) + 1)
        cases = [CASES[number] for number in numbers]
    return [case for case in cases if case.kind in kinds]


def main(variants: dict[str, Run] | None = None) -> None:
    """Prints the table."""
    VARIANTS.update(variants or {})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--searchers", default=",".join(n for n in VARIANTS if n != "exhaustive"))
    parser.add_argument("--problems", default="all")
    parser.add_argument("--kinds", default="sharding,pipeline,hybrid")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--evaluations", default="64,500,2000", help="budgets; empty for none")
    parser.add_argument("--seconds", type=float, help="one more budget, in seconds")
    parser.add_argument("--until-optimum", action="store_true", help="end a run that has found the optimum")
    asked = parser.parse_args()
    cases = chosen(asked.problems, asked.kinds.split(","))
    budgets = [Budget(evaluations=int(text)) for text in asked.evaluations.split(",") if text]
    budgets += [Budget(seconds=asked.seconds)] if asked.seconds else []
    print(
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; "
        f"{len(cases)} problems, {asked.seeds} seeds"
    )
    print("plans and s: to within 1 % of the optimum, median and 90th percentile")
    for budget in budgets:
        print(f"\nbudget {budget}\n{HEADER}", flush=True)
        told_of = [count for count in COUNTS if count <= (budget.evaluations or math.inf)]
        for name in asked.searchers.split(","):
            for kind, tally in measure(name, cases, asked.seeds, budget, asked.until_optimum).items():
                print(f"{name:18}{kind:10}{tally.row()}", flush=True)
                print("   after plans  " + "   ".join(tally.within(count) for count in told_of), flush=True)


if __name__ == "__main__":
    main()
