"""Pipelines where memory is scarce: unlike stages on many devices, which recompute no more than it takes to fit."""

import itertools

import numpy as np
import pytest
from long_cases import long_but
from small_clusters import cluster_with

from agents import Budget, search
from agents.planners.span_costs import SpanCosts
from agents.planners.staged_plan import data_parallel
from agents.planners.tied_spans import TiedUnits
from agents.planners.unit_profile import UnitsInOrder
from automap.errors import NothingFits
from automap.plan import Plan
from automap.price.estimate import price
from automap.price.lowered_plan import RECOMPUTE_MODES
from automap.problem import Problem
from automap.space.space import PlanSpace
from automap.verify import Verifier
from ir import zoo
from ir.profile_import import load_profile

LAYERS = 12
MODEL = "bert:layers=4,hidden=256,heads=4,seq_len=128,vocab_size=512"


def pyramid():
    """A chain whose first layers take longest and whose last ones have most parameters."""
    nodes = [
        f"node{number} -- layer -- forward_compute_time={2 * part}, backward_compute_time={4 * part}, "
        f"activation_size={activation}, parameter_size={20_000_000 * number}"
        for number in range(1, LAYERS + 1)
        for part, activation in [(3.0 / (1 + (number - 1) // 3), 4_000_000 >> (number - 1) // 4)]
    ]
    edges = [f"\tnode{number} -- node{number + 1}" for number in range(1, LAYERS)]
    return load_profile("\n".join([*nodes, *edges]) + "\n", name="pyramid", batch=1)


@pytest.mark.parametrize(
    "cluster", long_but(["4x8xV100-16GB@100Gbit"], ["4x8xV100-16GB@100Gbit", "16x8xV100-16GB@100Gbit"])
)
def test_the_portfolio_divides_large_clusters_as_well_as_planners_do(cluster):
    fix = {"schedule": "1f1b", "virtual_stages": 1, "zero": 0}
    problem = Problem.build(pyramid(), cluster_with(2.5, cluster), {"global_batch": 512}, {"fix": fix})
    step_s = {
        name: search(problem, Budget(evaluations=1_000), searcher=name).plan.estimate.step_time_s
        for name in ("elimination", "alpa", "piper")
    }
    found = search(problem, Budget(evaluations=1_000))
    assert not Verifier(problem).violations(found.plan)
    assert found.plan.estimate.step_time_s <= 1.001 * min(step_s.values())
    # Stages of equal size, which the space has, are far behind.
    assert found.plan.estimate.step_time_s < 0.8 * step_s["elimination"]
    assert len({len(stage.devices) for stage in found.plan.stages}) > 2


def test_unlike_stages_are_found_where_no_plan_of_the_space_fits():
    """Three heavy layers fit on one, one and two devices only; the space of four devices has no three stages."""
    nodes = [
        f"node{number} -- layer -- forward_compute_time=2, backward_compute_time=4, activation_size=1000000, "
        f"parameter_size={size}"
        for number, size in enumerate((180_000_000, 180_000_000, 300_000_000), 1)
    ]
    edges = [f"\tnode{number} -- node{number + 1}" for number in (1, 2)]
    graph = load_profile("\n".join([*nodes, *edges]) + "\n", name="heavy", batch=8)
    hints = {"fix": {"zero": 1, "virtual_stages": 1, "schedule": "1f1b"}}
    problem = Problem.build(graph, cluster_with(2.13, "2x2xV100-16GB@100Gbit"), {"global_batch": 64}, hints)
    with pytest.raises(NothingFits):
        search(problem, Budget(evaluations=300), searcher="elimination")
    plan = search(problem, Budget(evaluations=300)).plan
    assert [stage.devices for stage in plan.stages] == ["0", "1", "2-3"]
    assert not Verifier(problem).violations(plan)
    assert price(problem, Plan.from_json(plan.to_json())).fits


def test_spans_recompute_as_few_units_as_fit():
    """Seconds and numbers of units are those of trying all numbers under all pairs of modes."""
    space = PlanSpace(Problem.build(zoo.build(MODEL), cluster_with(2.0, "4xA100"), {"global_batch": 4096}))
    chosen = data_parallel(space.evaluator, 2)
    units, tied = UnitsInOrder.of(space.evaluator, chosen), TiedUnits(space.evaluator, chosen)
    (layout,) = space.evaluator.layout_of([((0,), (1, 1))]).stages
    costs = SpanCosts(space, units, tied, layout, 1024.0, 0)
    costs.capacity = float(costs.used_bytes(2)[0, 0, -1])
    modes = np.flatnonzero(space.modes).tolist()
    passes, mixed = costs.forward_s + costs.backward_s, 0
    assert len(modes) > 1
    for alive in (1, 2, 3, 5):
        seconds, numbers = costs.fastest(alive, partly=True)
        for first, last in itertools.combinations(range(space.num_units + 1), 2):
            tried = []
            for light, heavy in itertools.product(modes, modes):
                for count in range(last - first + 1):
                    kept = costs.saved_bytes[[light, heavy], first : first + count]
                    of_units = np.where(kept[1] < kept[0], heavy, light).tolist() + [light] * (last - first - count)
                    saved = sum(costs.saved_bytes[m, u] for m, u in zip(of_units, range(first, last), strict=True))
                    until = np.cumsum(
                        [costs.saved_bytes[m, u] for m, u in zip(of_units, range(first, last), strict=True)]
                    )
                    needed = [costs.needed_bytes[m, u] for m, u in zip(of_units, range(first, last), strict=True)]
                    used = costs.state_bytes[first, last] + (alive - 1) * saved + max(until + needed)
                    if light <= heavy and used <= costs.capacity:
                        tried.append(sum(passes[m, u] for m, u in zip(of_units, range(first, last), strict=True)))
            assert seconds[first, last] == pytest.approx(min(tried, default=np.inf))
            recomputed = costs.recomputed(int(numbers[first, last]), first, last)
            if not isinstance(recomputed, str):
                mixed += 1
                of_units = [RECOMPUTE_MODES.index(mode) for mode in recomputed]
                own = sum(passes[m, u] for m, u in zip(of_units, range(first, last), strict=True))
                assert own == pytest.approx(seconds[first, last]) and len(set(of_units)) == 2
    assert mixed > 10
