"""Layouts of a GPT that a search finds from nothing: Megatron-LM's where the weights are large, others elsewhere.

The search begins with a plan that splits nothing. It knows no template.
"""

import itertools

import numpy as np
import pytest
from small_graphs import build_gpt, build_mlp

from agents import Budget
from agents.incumbent import Incumbent
from agents.planners import elimination, ilp
from agents.planners.skeletons import SkeletonSearch
from automap.cluster import parse_cluster
from automap.globs import matches
from automap.problem import Problem
from automap.space.space import PlanSpace
from automap.space.templates import megatron_signatures, templates
from ir.factors import whole_signature

COLUMN, ROW, HEADS = "B S(1) -> S(2)", "S(2) S(0) -> P", "S(1) S(1) -> S(1)"
MEGATRON = {
    "wte/Gather": "S(0) B -> P",
    **{f"h.*.{name}/MatMul": COLUMN for name in ("attn.q", "attn.k", "attn.v", "mlp.up")},
    **{f"h.*.{name}/MatMul": ROW for name in ("attn.proj", "mlp.down")},
    **{f"h.*.attn/{name}": HEADS for name in ("MatMul", "MatMul_1")},
    "h.*.attn/Softmax": "S(1) -> S(1)",
    "lm_head/MatMul": COLUMN,
    "loss": "S(2) B -> B",
}
"""Columns, then rows of attention and MLP; heads; and the vocabulary (arXiv 1909.08053, section 3)."""
OF_ONE_AXIS = {
    "a short sample": ("4xA100", 1, {"hidden": 4096, "heads": 32, "seq": 256, "vocab": 32768}),
    "a sample": ("4xA100", 1, {"hidden": 4096, "heads": 32, "seq": 1024, "vocab": 32768}),
    "two samples": ("4xA100", 2, {"hidden": 4096, "heads": 32, "seq": 1024, "vocab": 32768}),
    "two devices": ("2xA100", 1, {"hidden": 4096, "heads": 32, "seq": 512, "vocab": 32768}),
}
"""Cluster, samples, and sizes of the model."""


def begin(cluster, batch, tp, sizes):
    """A space of plans of one stage, and the plan on one of its meshes in which every device computes everything."""
    fix = {"pp": 1, "num_micro_batches": 1, "zero": 0, "recompute": "none"}
    space = PlanSpace(Problem.build(build_gpt(**sizes), parse_cluster(cluster), {"global_batch": batch}, {"fix": fix}))
    (shape,) = [shape for shape in space.shapes if (shape.middle, shape.tp) == (1, tp)]
    values = list(space.even_values(shape, recompute="none", zero=0))
    for slot in space.slots[space.first.signature :]:
        unit = space.linkage.types[slot.unit_type]
        values.append(whole_signature(unit.signatures[unit.groups[slot.group].leader]))
    assert space.repair(values) == tuple(values)
    return space, tuple(values)


def found_from(space, start, planner=elimination):
    """The best plan that the skeleton of a plan leads to from it alone."""
    search = SkeletonSearch(Incumbent(space, Budget(evaluations=10_000), searcher="elimination"), planner.propose)
    search.solve(start, rounds=10)
    return search.best[start[: space.first.signature]][1]


def layout(space, values, axis):
    """Operator -> placements on an axis, of all operators that are neither whole nor split by samples."""
    (stage,) = space.decode(values).stages
    found = {}
    for op in space.problem.graph.operators:
        mine = next((axes for glob, axes in stage.shardings.items() if matches(glob, op.name)), {}).get(axis)
        if mine is not None:
            found[op.name] = f"{' '.join(mine.inputs)} -> {' '.join(mine.outputs)}"
    return found


def assert_megatron(space, found):
    wanted = {op.name: text for op in space.problem.graph.operators for glob, text in MEGATRON.items()
              if matches(glob, op.name)}  # fmt: skip
    assert len(wanted) == 3 + 2 * 9
    assert {name: found.get(name) for name in wanted} == wanted


def assert_optimal(space, values, start):
    """Neither Megatron-LM's plan, nor any other value of one group, nor random plans are faster."""
    first, rng = space.first.signature, np.random.default_rng(0)
    plans = [
        megatron_signatures(space, space.shape(start), start[:first], sequence_parallel=way) for way in (False, True)
    ]
    for at in range(first, len(space.slots)):
        for other in np.flatnonzero(space.legal(values[:at])).tolist():
            changed = (*values[:at], other, *values[at + 1 :])
            plans += [changed] if space.repair(changed) == changed else []
    plans += [(*start[:first], *plan[first:]) for plan in space.random_batch(rng, 500).tolist()]
    plans = [space.repair(plan) for plan in plans]
    (mine, _), *others = space.price(np.array([values, *plans])).tolist()
    assert len(plans) > 550
    assert mine <= min(seconds for seconds, overflow in others if overflow <= 0.0) * (1.0 + 1e-12)


@pytest.mark.parametrize("planner", [elimination, ilp], ids=["elimination", "ilp"])
@pytest.mark.parametrize("name", OF_ONE_AXIS)
def test_on_one_axis_it_is_megatrons(name, planner):
    cluster, batch, sizes = OF_ONE_AXIS[name]
    space, start = begin(cluster, batch, int(cluster[0]), sizes)
    values = found_from(space, start, planner)
    assert space.price(np.array([values]))[0, 0] < 0.7 * space.price(np.array([start]))[0, 0]
    assert_megatron(space, layout(space, values, "tp"))
    assert_optimal(space, values, start)


def test_on_two_axes_it_is_megatrons_on_one_and_samples_on_the_other():
    sizes = {"hidden": 2048, "heads": 32, "seq": 2048, "vocab": 8192}
    space, start = begin("8xA100", 2, 4, sizes)
    values = found_from(space, start)
    assert_megatron(space, layout(space, values, "tp"))
    assert layout(space, values, "dp") == {}
    assert space.decode(values).stages[0].batch_axes == ("dp",)
    assert_optimal(space, values, start)


def test_where_samples_are_many_it_is_data_parallelism():
    space, start = begin("4xA100", 64, 4, {"hidden": 1024, "heads": 16, "seq": 512, "vocab": 8192})
    values = found_from(space, start)
    assert layout(space, values, "tp") == {}
    assert space.decode(values).stages[0].batch_axes == ("tp",)
    assert_optimal(space, values, start)


class Forgetful(dict):
    """A cache that is always empty when it is asked whether it has a key."""

    def __contains__(self, key: object) -> bool:
        return False

    def get(self, key, default=None):
        return default


def test_templates_are_the_same_whether_or_not_choices_are_kept():
    """Layers of six features are split over two ranks and not over four, and what reads them follows."""
    problem = Problem.build(build_mlp((8, 6, 8, 8, 8, 8, 8)), "8xA100", {"global_batch": 16})
    kept, chosen_anew = PlanSpace(problem), PlanSpace(problem)
    chosen_anew.chosen = Forgetful()
    assert list(itertools.islice(templates(kept), 200)) == list(itertools.islice(templates(chosen_anew), 200))
    assert kept.chosen and not chosen_anew.chosen.keys() - kept.chosen.keys()
