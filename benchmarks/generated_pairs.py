"""The portfolio beside planners on generated problems, which nobody has chosen.

    python benchmarks/generated_pairs.py FIRST-LAST [--budget 4000] [--planner-budget 10s] [--memory 1]
                                         [--fix FIELD=VALUE,…] [--planners NAME,…] [--profiles FOLDER]

Problems are those of the generator (`agents.learning.problems`) with seeds FIRST to LAST. Their devices have the share
`--memory` of their memory. With --profiles, each layer profile below FOLDER in turn takes the place of the model.
Decisions can be fixed for all: `--fix schedule=1f1b,virtual_stages=1` leaves ordinary pipelines. For each problem
prints the step time of the portfolio, and those of the planners as multiples of it: below 1, the planner wins. At the
end it prints on how many problems the portfolio is slower than a planner, and by how much at most. The committed
figures are in benchmarks/results/.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from planners import PLANNERS, SAME, found_by, graph_of, short

from agents import Budget
from agents.learning.problems import outline
from automap.errors import ProblemError
from automap.problem import Problem


def profile_files(given: argparse.Namespace) -> list[Path]:
    """The layer profiles that take the place of models."""
    return sorted(given.profiles.rglob("*.txt")) if given.profiles else []


def problems(given: argparse.Namespace) -> Iterator[tuple[str, Problem]]:
    """What each problem is, and the problem; those that leave no plan are left out."""
    first, last = map(int, given.seeds.split("-"))
    files = profile_files(given)
    fixed = dict(pair.split("=") for pair in filter(None, given.fix.split(",")))
    fix = {name: int(value) if value.isdecimal() else value for name, value in fixed.items()}
    for seed in range(first, last + 1):
        drawn = outline(seed)
        problem, name = drawn.build().problem, drawn.model.text
        devices = problem.cluster.devices
        scarce = {kind: replace(one, memory_GiB=given.memory * one.memory_GiB) for kind, one in devices.items()}
        graph, hints = problem.graph, problem.hints
        if files:
            file = files[seed % len(files)]
            # Hints of a generated problem may name its operators.
            graph, hints, name = graph_of(str(file.relative_to(given.profiles)), given.profiles), None, file.stem
        elif fix:
            hints = replace(hints, fix=fix)
        try:
            yield (
                f"{seed} {name[:40]:40} {drawn.cluster.text[:40]:40}",
                Problem.build(
                    graph,
                    replace(problem.cluster, devices=scarce),
                    {"global_batch": problem.training.global_batch} if files else problem.training,
                    {"fix": fix} if hints is None else hints,
                ),
            )
        except ProblemError as error:
            print(f"{seed} left out: {error}", flush=True)


def main() -> None:
    """One line a problem, then the sums."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("seeds", metavar="FIRST-LAST")
    parser.add_argument("--budget", default="4000", help="budget of the portfolio")
    parser.add_argument("--planner-budget", default="10s")
    parser.add_argument("--memory", type=float, default=1.0, help="share of the devices' memory")
    parser.add_argument("--fix", default="")
    parser.add_argument("--planners", default=",".join(PLANNERS))
    parser.add_argument("--profiles", type=Path)
    given = parser.parse_args()
    if given.profiles is not None and not profile_files(given):
        parser.error(f"--profiles: {given.profiles} has no layer profiles: name the folder of them")
    count, slower, most = 0, 0, 1.0
    for head, problem in problems(given):
        whole, took_s = found_by(problem, "portfolio", Budget.parse(given.budget))
        steps = {}
        for name in given.planners.split(","):
            found, _ = found_by(problem, name, Budget.parse(given.planner_budget))
            if found is not None:
                steps[name] = found.step_time_s
        best_s = min(steps.values(), default=math.inf)
        if whole is None and not steps:
            print(f"{head}  nothing fits", flush=True)
            continue
        ratio = math.inf if whole is None else whole.step_time_s / best_s
        count, slower, most = count + 1, slower + (ratio > SAME), max(most, ratio)
        mark = "SLOWER" if ratio > SAME else ""
        line = "nothing found" if whole is None else f"{1e3 * whole.step_time_s:10.2f} ms {took_s:6.1f} s"
        own = math.nan if whole is None else whole.step_time_s
        line += "".join(f" {name} {step / own:.3f}" for name, step in sorted(steps.items(), key=lambda one: one[1])[:3])
        print(
            head, line, "" if whole is None else f" {short(whole.plan)}, {whole.plan.search.found_by}", mark, flush=True
        )
    print(f"{count} problems with a plan that fits: the portfolio is slower on {slower}, by {most - 1.0:.1%} at most")


if __name__ == "__main__":
    main()
