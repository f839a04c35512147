"""What pruning saves the DQN: plans to within 1 % of the optimum with repeated blocks decided once, and one by one.

    python benchmarks/dqn_pruning.py [--evaluations 8000] [--seeds 5] [--models WORD]

Sharding problems on models of equal blocks. With pruning their blocks share one decision a linkage group; without it
every block decides for itself, so the space holds all plans of the pruned one and many more. Both searches have equal
hyperparameters and the same aim: within 1 % of the proven optimum of the pruned space.
"""

import argparse
import datetime
import math
import os
import platform
import statistics
from dataclasses import replace

from problems import CASES, Case, optimum, problem_of

from agents.incumbent import Incumbent
from agents.learning.dqn import run_dqn
from agents.sampling.expert import grid_of
from agents.searcher import Budget
from automap.hints import Constraint
from automap.price.evaluator import Evaluator
from automap.price.tables import build_tables
from automap.space.space import PlanSpace
from ir.linkage import link

NEAR = 0.01
MODELS = ("gpt:", "bert:", "llama:", "t5:", "vit:", "moe:")
"""Small models of four equal blocks: each of them decided alone still ends within minutes."""


def one_by_one(case: Case) -> PlanSpace:
    """The space in which no two blocks share a decision; a constraint on one block holds for all equal blocks."""
    problem = problem_of(case)
    graph = problem.graph
    blocks = PlanSpace(problem).linkage.blocks
    unit_of = {i: unit for unit in blocks.units for i in range(unit.start, unit.stop)}
    index = {op.name: i for i, op in enumerate(graph.operators)}

    def spread(constraint: Constraint) -> list[Constraint]:
        at = index[constraint.scope]
        own = unit_of[at]
        alike = [unit.start + at - own.start for unit in blocks.units if unit.type == own.type]
        return [replace(constraint, scope=graph.operators[i].name) for i in alike]

    constraints = tuple(c for constraint in problem.hints.constraints for c in spread(constraint))
    problem = replace(problem, hints=replace(problem.hints, constraints=constraints))
    units = tuple(replace(unit, type=number) for number, unit in enumerate(blocks.units))
    handed_on = tuple(blocks.handed_on[unit.type] for unit in blocks.units)
    apart = replace(blocks, units=units, num_types=len(units), handed_on=handed_on)
    return PlanSpace(problem, Evaluator(problem, build_tables(problem, link(graph, apart))))


def plans_needed(space: PlanSpace, aim_s: float, evaluations: int, seed: int) -> float:
    """Number of plans that one DQN prices until a plan takes at most `aim_s` seconds; infinite if none does."""

    def reached() -> bool:
        return incumbent.best_s <= aim_s

    incumbent = Incumbent(space, Budget(evaluations=evaluations), searcher="dqn", should_stop=reached)
    run_dqn(incumbent, seed=seed, templates=grid_of(incumbent.space))
    return next((count for count, _, best_s in incumbent.improvements if best_s <= aim_s), math.inf)


def main() -> None:
    """Prints one line for each problem, and the median ratio."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--evaluations", type=int, default=8000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--models", default="", help="only problems with this word in their name")
    asked = parser.parse_args()
    print(f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores; {asked.seeds} seeds")
    ratios = []
    for case in (c for c in CASES if c.kind == "sharding" and c.model.startswith(MODELS) and asked.models in c.name):
        aim_s = (1.0 + NEAR) * optimum(case)["step_time_s"]
        spaces = [PlanSpace(problem_of(case)), one_by_one(case)]
        found = [
            statistics.median(plans_needed(space, aim_s, asked.evaluations, seed) for seed in range(asked.seeds))
            for space in spaces
        ]
        ratios.append(found[1] / found[0])
        print(
            f"{case.name}: {spaces[0].decades:.1f} and {spaces[1].decades:.1f} decades, "
            f"{found[0]:.0f} and {found[1]:.0f} plans, {ratios[-1]:.1f} times",
            flush=True,
        )
    print(f"median of {len(ratios)} problems: {statistics.median(ratios):.1f} times the plans without pruning")


if __name__ == "__main__":
    main()
