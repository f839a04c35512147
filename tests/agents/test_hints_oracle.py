"""A search with hints finds the fastest of all plans that obey them: small random problems, random hints.

The oracle does not use what hints do to a space. It enumerates the plans of the problem *without* hints, sorts them by
their price, and asks the verifier of plan documents which is the first one that obeys the hints.
"""

import itertools
import math

import numpy as np
import pytest
from small_graphs import build_mlp

from agents import Budget, search
from automap.cluster import parse_cluster
from automap.errors import NothingFits, ProblemError
from automap.problem import Problem
from automap.space.space import PlanSpace
from automap.verify import Verifier

CLUSTERS = ("2xV100", "2x1xV100@10Gbit", "3xV100", "1xA100+1xV100", "4xV100", "2x2xV100@10Gbit")
FIXED = {
    "dp": (1, 2, 4),
    "tp": (1, 2, 4),
    "pp": (1, 2, 3),
    "num_micro_batches": (1, 2, 4),
    "virtual_stages": (1, 2),
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "full"),
    "schedule": ("1f1b", "gpipe"),
    "batch_shares": ("even",),
}
ASKED = {"replicate": (True,), "split": (True,), "stage": (0, 1, 2), "recompute": (True, False)}
MOST_DECADES = 3.6
"""Problems with more plans are left out: where no plan obeys, all of them are verified."""
EVALUATIONS = 1_500
"""Budget of a search; from 2,000 on a portfolio would start processes."""
TRIES = 4
"""Draws of hints for each problem."""


def drawn_problem(rng):
    """Graph, cluster and training of a random problem, and its number of layers."""
    layers = int(rng.integers(1, 4))
    widths = tuple(int(2 ** rng.integers(5, 14)) for _ in range(layers + 1))
    cluster = parse_cluster(CLUSTERS[rng.integers(len(CLUSTERS))])
    return build_mlp(widths), cluster, {"global_batch": int(2 ** rng.integers(0, 3))}, layers


def drawn_hints(rng, layers):
    """Random hints: each decision is fixed with a probability of a fifth, and up to two constraints are asked."""
    fix = {name: values[rng.integers(len(values))] for name, values in FIXED.items() if rng.random() < 0.2}
    if fix.get("pp", 1) == 1:
        # A plan of one stage has one order of its passes, which a document may call by several names.
        fix.pop("schedule", None)
    if fix.get("zero"):
        # A stage of ZeRO excludes plans without replicas where there are others; the verifier knows no other plans.
        fix["dp"] = 2
    constraints = []
    for _ in range(rng.integers(0, 3)):
        name = list(ASKED)[rng.integers(len(ASKED))]
        scope = "layers.*" if rng.random() < 0.2 else f"layers.{rng.integers(layers)}"
        constraints.append({"scope": scope, name: ASKED[name][rng.integers(len(ASKED[name]))]})
    return {"fix": fix, "constraints": constraints}


def every_plan(space):
    """[n, slots] all plans of a space."""
    rows, pending = [], [()]
    while pending:
        prefix = pending.pop()
        if len(prefix) < len(space.slots):
            pending += [(*prefix, int(value)) for value in np.flatnonzero(space.legal(prefix))]
        else:
            rows.append(prefix)
    return np.array(rows)


def fastest_that_obeys(space, rows, problem):
    """Step time of the fastest plan among `rows` that obeys the hints of `problem`; infinity where none does."""
    prices, verifier = space.price(rows), Verifier(problem)
    fitting = np.flatnonzero(prices[:, 1] <= 0.0)
    ranked = fitting[np.argsort(prices[fitting, 0], kind="stable")]
    obeying = (row for row in ranked if not verifier.violations(space.decode(tuple(rows[row].tolist()))))
    return float(prices[first, 0]) if (first := next(obeying, None)) is not None else math.inf


def found(problem, searcher):
    """The plan that a searcher finds; None where no plan obeys or fits."""
    try:
        plan = search(problem, Budget(evaluations=EVALUATIONS), searcher=searcher).plan
    except (NothingFits, ProblemError):
        return None
    assert not Verifier(problem).violations(plan)
    return plan


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 17))])
def test_the_fastest_plan_that_obeys_random_hints_is_found(seed):
    rng = np.random.default_rng(seed)
    spaces = ((*given, PlanSpace(Problem.build(*given[:3]))) for given in map(drawn_problem, itertools.repeat(rng)))
    graph, cluster, training, layers, space = next(one for one in spaces if one[-1].decades <= MOST_DECADES)
    rows, compared = every_plan(space), 0
    while compared < TRIES:
        hints = drawn_hints(rng, layers)
        try:
            problem = Problem.build(graph, cluster, training, hints)
        except ProblemError:
            continue  # Hints that contradict each other.
        best_s = fastest_that_obeys(space, rows, problem)
        for searcher in ("exhaustive", "portfolio"):
            plan = found(problem, searcher)
            step_s = math.inf if plan is None else plan.estimate.step_time_s
            # A portfolio may return a plan outside of the space, with unlike stages, if it is faster.
            is_outside = searcher == "portfolio" and plan is not None and space.encode(plan) is None
            assert step_s < best_s if is_outside else step_s == best_s, (hints, searcher)
        compared += math.isfinite(best_s)
