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


def first_stage(space):
    """The first stage of the first shape of a space, with ZeRO over all axes but the last and 32 samples."""
    stage = space.layout(space.even_values(space.shapes[0], recompute="none", zero=0)).stages[0]
    zero_axes = np.arange(len(stage.axes)) < len(stage.axes) - 1
    return Stage(stage.axes, stage.links, stage.hardware, zero_axes, 32.0)


@pytest.mark.parametrize(
    ("model", "trainer"), [("gpt2", "megatron-core"), ("resnet50", "generic"), ("mixtral-8x7b", "generic")]
)
def test_a_unit_priced_again_costs_what_it_costs_from_nothing(model, trainer, space):
    found = space(zoo.build(model), "2x4xA100-80GB@25Gbit", 32, training={"trainer": trainer}, pp=1, tp=4)
    tables, rng = found.evaluator.tables, np.random.default_rng(7)
    stage, arrays = first_stage(found), tables.arrays
    num_axes = len(stage.axes)
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


def test_operators_are_priced_again_where_a_neighbour_changed_and_hardly_elsewhere(space):
    """What operators add by their neighbours, from nothing, while the signature of each other operator varies."""
    found = space(zoo.build("gpt2"), "2x4xA100-80GB@25Gbit", 32, training={"trainer": "megatron-core"}, pp=1, tp=4)
    stage, arrays, rng = first_stage(found), found.evaluator.tables.arrays, np.random.default_rng(3)
    begins = arrays.operators["first_signature"]
    signatures = np.array([*begins[1:], len(arrays.signatures)]) - begins
    kind = int(np.diff(found.evaluator.tables.spans).argmax())
    first, last = (int(x) for x in found.evaluator.tables.spans[kind : kind + 2])
    count, workspace = last - first, found.evaluator.new_workspace(len(stage.axes))

    def joined(chosen):
        shard_unit(arrays, Unit(first, last, chosen), stage, False, workspace)
        return np.where(workspace.joins[first:last, None], workspace.joined_numbers[first:last], 0.0)

    depends = np.zeros((count, count), dtype=bool)
    for _ in range(30):
        chosen = rng.integers(0, signatures[first:last, None], (count, len(stage.axes)))
        before = joined(chosen)
        for other in range(count):
            varied = chosen.copy()
            varied[other] = rng.integers(0, signatures[first + other], len(stage.axes))
            depends[:, other] |= (joined(varied) != before).any(axis=1)
    np.fill_diagonal(depends, False)
    told = (arrays.operators["neighbours"][first:last, None] >> np.arange(count)) & 1 == 1
    np.fill_diagonal(told, False)
    assert depends.sum() > 20
    assert not (depends & ~told).any()
    assert told.sum() < 1.5 * depends.sum(), (told.sum(), depends.sum())
