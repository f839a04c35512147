"""Degrees of a plan say what its axes do, whatever these are called."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from automap.cluster import parse_cluster
from automap.plan import Degrees, Plan, parse_devices
from automap.price.degrees import degrees_of, sequence_length
from automap.price.estimate import annotate
from automap.price.evaluator import Evaluator
from automap.price.plan_reader import lower_plan
from automap.price.plan_writer import to_plan
from automap.problem import Problem
from automap.space.space import PlanSpace
from automap.space.stated_strategy import Strategy, hand_made
from automap.verify.model import Model
from automap.verify.reading import layer_operators, place_chunks
from ir import zoo
from ir.build import GraphBuilder

FAMILIES = {
    "gpt": ("gpt:layers=2,hidden=64,heads=4,seq_len=16,vocab_size=64", 8, {}),
    "long": ("gpt:layers=2,hidden=64,heads=4,seq_len=16,vocab_size=64", 8, {"cp": 2}),
    "moe": ("moe:layers=2,hidden=64,heads=4,kv_heads=2,ffn=128,experts=4,seq_len=16,vocab_size=64", 8, {"ep": 2}),
    "t5": ("t5:layers=2,hidden=64,heads=4,ffn=128,seq_len=16,vocab_size=64", 6, {}),
    "resnet": ("resnet:blocks=1-1,width=8,image_size=32,num_classes=16", 4, {}),
    "vit": ("vit:layers=2,hidden=64,heads=4,image_size=32,patch_size=8,num_classes=16", 4, {}),
}


@functools.cache
def space_of(family: str) -> PlanSpace:
    model, devices, fix = FAMILIES[family]
    batch = {"global_batch": 24}
    return PlanSpace(Problem.build(zoo.build(model), parse_cluster(f"{devices}xV100-16GB"), batch, {"fix": fix}))


@functools.cache
def model_of(family: str) -> Model:
    return Model(space_of(family).problem)


def splits(family: str, plan: Plan, number: int, axis: str) -> Iterator[tuple[str, float]]:
    """What each product with a weight in the layers of a stage splits, read from the document, and its FLOPs."""
    model, graph = model_of(family), space_of(family).problem.graph
    chunk = place_chunks(plan, model)[number]
    for index in layer_operators(chunk, model):
        op, placed = graph.operators[index], chunk.placed[index]
        if op.forward_flops.at(1) == 0.0 or not any(graph.is_weight(name) for name in op.inputs):
            continue
        mine, made = placed[axis], graph.tensors[op.outputs[0]]
        if any(
            text.startswith("S") for name, text in zip(op.inputs, mine.inputs, strict=True) if graph.is_weight(name)
        ):
            is_expert = op.kind == "automap.GroupedMatMul" and mine.inputs[1] == "S(0)"
            yield "experts" if is_expert else "weights", op.forward_flops.at(1)
        elif mine.outputs[0].startswith("S"):
            is_batch = mine.outputs[0] == f"S({made.batch_dim})"
            yield "batch" if is_batch else "positions", op.forward_flops.at(1)
        else:
            yield "nothing", op.forward_flops.at(1)


def check(family: str, plan: Plan, found: tuple[Degrees, ...]) -> None:
    named = {"batch": "data", "weights": "tensor", "nothing": "repeated"}
    for number, stage in enumerate(plan.stages):
        mine = found[number if len(found) > 1 else 0]
        devices = len(parse_devices(stage.devices))
        assert mine.data * mine.tensor * mine.context * mine.other * mine.repeated == devices
        assert set(mine.axes) == {axis for axis, size in stage.mesh if size > 1}
        for axis, use in mine.axes.items():
            amounts: Counter[str] = Counter()
            for what, flops in splits(family, plan, number, axis):
                amounts[what] += flops
            assert axis in mine.expert_axes or not amounts.pop("experts", 0.0)
            if any(what != "experts" for what in amounts):  # else it is as elsewhere
                amounts.pop("experts", 0.0)
                assert amounts[max(amounts, key=lambda what: amounts[what])] == max(
                    amounts[what] for what in amounts if named.get(what, use) == use
                )
        assert mine.micro_batch * mine.data >= plan.samples_per_micro_batch
        assert mine.accumulation_steps * plan.samples_per_micro_batch == 24
        assert mine.pipeline * mine.virtual_stages == len(plan.stages)
        assert mine.expert == math.prod(dict(stage.mesh)[axis] for axis in mine.expert_axes)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_plans_are_labelled_by_what_their_operators_do(family: str) -> None:
    space = space_of(family)
    for values in space.random_batch(np.random.default_rng(3), 20).tolist():
        lowered = space.lowered(values)
        check(family, to_plan(lowered, space.evaluator), degrees_of(lowered, space.evaluator))


@pytest.mark.parametrize(
    ("family", "stated"),
    [
        ("gpt", {"tp": 2}),
        ("gpt", {"tp": 4, "sequence_parallel": True}),
        ("gpt", {"pp": 2, "tp": 2, "micro_batch": 2, "zero": 1}),
        ("long", {"cp": 4}),
        ("long", {"cp": 2, "tp": 2}),
        ("long", {"cp": 2, "tp": 2, "sequence_parallel": True}),
        ("moe", {"ep": 4, "tp": 2}),
        ("moe", {"ep": 2}),
        ("t5", {"pp": 3, "tp": 2, "sequence_parallel": True}),
        ("vit", {"tp": 2, "pp": 2}),
    ],
)
def test_stated_degrees_are_read_back(family: str, stated: dict[str, int]) -> None:
    evaluator = space_of(family).evaluator
    strategy = Strategy(**stated)  # type: ignore[arg-type]
    (found,) = degrees_of(hand_made(evaluator, strategy), evaluator)
    dp = evaluator.problem.cluster.num_devices // strategy.tp // strategy.pp // strategy.cp
    assert (found.data, found.tensor, found.context, found.expert) == (dp, strategy.tp, strategy.cp, strategy.ep)
    assert (found.pipeline, found.virtual_stages, found.zero) == (strategy.pp, strategy.virtual, strategy.zero)
    assert found.sequence_parallel == strategy.sequence_parallel
    assert found.micro_batch == strategy.micro_batch
    assert found.sequence_length == (None if family == "vit" else 16)


def test_an_axis_called_cp_that_splits_the_batch_is_data_parallelism() -> None:
    # A fixed degree would bind the axis to its name.
    long = zoo.build("gpt:layers=2,hidden=64,heads=4,seq_len=8192,vocab_size=96")
    space = PlanSpace(Problem.build(long, parse_cluster("8xV100-16GB"), {"global_batch": 24}))
    shape = next(s for s in space.shapes if (s.pp, s.tp, s.dp, s.middle) == (1, 1, 4, 2))
    values = list(space.even_values(shape, recompute="none", zero=0))
    for slot in space.slots[space.first.signature :]:
        batch = 0 if slot.index < 2 and space.legal(values)[0] else int(np.flatnonzero(space.legal(values))[-1])
        values.append(batch)
    plan = space.decode(space.repair(values))
    evaluator = Evaluator(space.problem)
    annotated = annotate(plan, lower_plan(plan, evaluator), evaluator)
    assert dict(plan.stages[0].mesh) == {"dp": 4, "cp": 2}
    (found,) = annotated.degrees
    assert (found.data, found.context, found.axes) == (8, 1, {"dp": "data", "cp": "data"})
    assert Plan.from_json(annotated.to_json()).degrees == annotated.degrees


def test_categories_that_are_read_one_by_one_are_no_tokens() -> None:
    """A recommender looks up each column of its ids in a table of its own."""
    b = GraphBuilder()
    ids = b.input("ids", (1, 3), dtype="int64")
    found = []
    for number in range(3):
        (one,) = b.add("Gather", [ids], [f"id.{number}"], attributes={"axis": 1, "indices": number})
        found += b.add("Gather", [b.parameter(f"table.{number}", (50, 8)), one], [f"row.{number}"])
    (row,) = b.add("Concat", found, ["row"], attributes={"axis": 1})
    assert sequence_length(b.finish([row])) is None
    assert sequence_length(zoo.build("gpt:layers=1,hidden=32,heads=2,seq_len=16,vocab_size=32")) == 16
