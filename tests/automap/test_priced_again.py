"""Units priced again where a signature changed, against the same units priced from nothing: identical floats."""

import numpy as np
import pytest

from automap.bounds.partial_plans import BoundTable
from automap.price.kernels.collectives import UNKNOWN
from automap.price.kernels.cost_records import UNIT_COST_DTYPE
from automap.price.kernels.shard_unit import shard_unit
from automap.price.kernels.stage_records import Stage, Unit
from automap.price.kernels.unit import unit_cost
from automap.price.kernels.unit_workspace import new_operator_memory
from ir import zoo


@pytest.mark.parametrize(
    ("model", "trainer"), [("gpt2", "megatron-core"), ("resnet50", "generic"), ("mixtral-8x7b", "generic")]
)
def test_a_unit_priced_again_costs_what_it_costs_from_nothing(model, trainer, space):
    found = space(zoo.build(model), "2x4xA100-80GB@25Gbit", 32, training={"trainer": trainer}, pp=1, tp=4)
    tables, rng = found.evaluator.tables, np.random.default_rng(7)
    stage = found.layout(found.even_values(found.shapes[0], recompute="none", zero=0)).stages[0]
    arrays, num_axes = tables.arrays, len(stage.axes)
    zero_axes = np.arange(num_axes) < num_axes - 1
    stage = Stage(stage.axes, stage.links, stage.hardware, zero_axes, 32.0)
    kept = found.evaluator.new_workspace(num_axes)
    begins = arrays.operators["first_signature"]
    signatures = np.array([*begins[1:], len(arrays.signatures)]) - begins

    def cost(first, last, chosen, recomputed, incoming, again, workspace):
        out, unit = np.empty(1, dtype=UNIT_COST_DTYPE), Unit(first, last, chosen)
        shard_unit(arrays, unit, stage, again, workspace)
        unit_cost(arrays, unit, recomputed, incoming, -1, stage, workspace, out)
        return out

    changed = 0
    for kind in range(found.evaluator.blocks.num_types):
        first, last = (int(x) for x in tables.spans[kind : kind + 2])
        chosen = np.full((last - first, num_axes), -1, dtype=np.int64)
        previous = cost(first, last, chosen, np.zeros(last - first, bool), np.full(num_axes, UNKNOWN), False, kept)
        for _ in range(40):
            for _ in range(int(rng.integers(0, 4))):
                op, axis = int(rng.integers(last - first)), int(rng.integers(num_axes))
                chosen[op, axis] = rng.integers(-1, signatures[first + op])
            recomputed = rng.random(last - first) < rng.choice([0.0, 0.5, 1.0])
            incoming = rng.integers(-1, 2, num_axes)
            mine = cost(first, last, chosen, recomputed, incoming, True, kept)
            nothing = found.evaluator.new_workspace(num_axes)
            assert mine.tobytes() == cost(first, last, chosen, recomputed, incoming, False, nothing).tobytes()
            changed += not np.array_equal(mine, previous)
            previous = mine
    assert changed > 100


def test_what_is_remembered_of_operators_changes_no_price(space):
    """Bounds and prices on several meshes in turn, against those of a space that remembers no operators."""

    def new():
        return space(zoo.build("gpt2"), "2x4xA100-80GB@25Gbit", 32, num_micro_batches=4)

    used, forgetful = new(), new()
    cache = forgetful.compiled.cache._replace(operators=new_operator_memory(0))
    forgetful.__dict__["compiled"] = forgetful.compiled._replace(cache=cache)
    plans = used.random_batch(np.random.default_rng(11), 60)
    for _ in range(2):
        assert np.array_equal(BoundTable(used).shape_bounds, BoundTable(forgetful).shape_bounds)
        assert np.array_equal(used.price(plans), forgetful.price(plans))
    assert used.compiled.cache.operators.keys.any(), "nothing was remembered"
    assert len(np.unique(used.price(plans)[:, 0])) > 30
