import itertools
import json
from dataclasses import replace

import jsonschema
import numpy as np
import pytest

from automap.errors import PlanError
from automap.globs import matches
from automap.plan import Plan, Schedule, devices_in_words, format_devices, parse_devices, plan_schema
from automap.price.estimate import annotate, price
from automap.price.plan_reader import lower_plan
from automap.price.plan_writer import to_plan
from automap.schedule import write_order
from automap.space.templates import templates


@pytest.fixture(scope="module")
def sample(gpt, space):
    s = space(gpt(), "2x2xA100", 8)
    return s, s.decode(s.random(np.random.default_rng(3)))


def test_texts_of_devices_are_read_and_written():
    assert parse_devices("0-3,8") == (0, 1, 2, 3, 8)
    assert format_devices((0, 1, 2, 3, 8)) == "0-3,8"
    assert format_devices((5,)) == "5"
    assert [devices_in_words(text) for text in ("5", "0-7", "0-3,8")] == ["device 5", "devices 0-7", "devices 0-3,8"]
    assert devices_in_words("0-1,3,5,7,9,11,13,15,17") == "devices 0-1,3,5, … (10 in all)"
    with pytest.raises(PlanError):
        parse_devices("a-b")
    with pytest.raises(PlanError, match="0-3"):
        parse_devices("3-0")


def test_random_plans_survive_json_and_satisfy_the_schema(gpt, space):
    s = space(gpt(), "2x4xA100", 16)
    schema = jsonschema.Draft202012Validator(plan_schema())
    schema.check_schema(plan_schema())
    rng = np.random.default_rng(0)
    for _ in range(40):
        values = s.random(rng)
        plan = s.decode(values)
        plan = annotate(plan, s.lowered(values), s.evaluator)
        document = json.loads(json.dumps(plan.to_json()))
        schema.validate(document)
        again = Plan.from_json(document)
        assert again == Plan.from_json(json.loads(json.dumps(again.to_json())))
        assert again.to_json() == plan.to_json()
        assert price(s.problem, again, s.evaluator) == plan.estimate


def test_encode_is_the_inverse_of_decode(gpt, light_graph, space):
    rng = np.random.default_rng(1)
    for s in (space(gpt(), "2x4xA100", 16), space(light_graph("squeezenet"), "2x2xV100", 8)):
        for _ in range(40):
            plan = s.decode(s.random(rng))
            values = s.encode(plan)
            assert values is not None
            assert s.decode(values) == plan


def test_equal_blocks_at_different_depths_are_named_one_by_one(gpt, space):
    graph = gpt(layers=4)
    depths = {"h.0": "encoder.blocks.0.0", "h.1": "encoder.blocks.0.1", "h.2": "middle", "h.3": "decoder.layers.0"}

    def moved(text: str) -> str:
        module, inside = text[:3], text[3:]
        return depths.get(module, module) + inside

    operators = tuple(replace(op, name=moved(op.name), scope=moved(op.scope)) for op in graph.operators)
    graph = replace(graph, operators=operators)
    s = space(graph, "2xA100", 4, training={"trainer": "alpa"}, pp=1, recompute="selective")
    plan = s.decode(s.random(np.random.default_rng(0)))
    for module in depths.values():
        assert any(matches(glob, f"{module}.attn/Softmax") for glob in plan.stages[0].recompute), module
    assert s.encode(plan) is not None


def test_every_template_encodes(gpt, space):
    s = space(gpt(), "2x2xA100", 4)
    for _, values in templates(s):
        assert s.encode(s.decode(values)) is not None


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda d: d.update(nonsense=1), "plan.nonsense"),
        (lambda d: d.pop("stages"), "plan.stages"),
        (lambda d: d.update(num_micro_batches="8"), "plan.num_micro_batches"),
        (lambda d: d["stages"][0].update(devices=7), "plan.stages[0].devices"),
        (lambda d: d.update(schema="automap.plan/9"), "plan.schema"),
        (lambda d: d["stages"][0].update(mesh=[["dp"]]), "plan.stages[0].mesh[0]"),
    ],
)
def test_malformed_documents_name_the_path(sample, change, field):
    document = json.loads(json.dumps(sample[1].to_json()))
    change(document)
    with pytest.raises(PlanError) as caught:
        Plan.from_json(document)
    assert caught.value.field == field
    assert caught.value.repair


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda d: d["model"].update(sha256="0" * 64), "is for"),
        (lambda d: d.update(num_micro_batches=3), "add up"),
        (lambda d: d["stages"][0].update(devices="0-99"), "cluster has devices"),
        (lambda d: d["stages"][0].update(mesh=[["dp", 7]]), "places"),
        (lambda d: d["stages"][0].update(operators=["wte/Gather"] * 2, shardings={}, recompute=[]), "to no stage"),
        (lambda d: d["stages"][0].update(operators=["wte/Gather", "h.0/Add"], shardings={}), "cut inside a block"),
        (lambda d: d["stages"][0].update(shardings={"nobody": {}}), "matches no operator"),
        (lambda d: d["stages"][0].update(recompute=["h.*", "h.*.nobody"]), "matches no operator"),
        (
            lambda d: d["stages"][0].update(
                shardings={"wte/Gather": {"tensor": {"inputs": ["B", "B"], "outputs": ["B"]}}}
            ),
            "no such mesh axis",
        ),
        # The price knows an axis tp in any case; this mesh has none.
        (
            lambda d: d["stages"][0].update(
                mesh=[["dp", 4]], shardings={"wte/Gather": {"tp": {"inputs": ["B", "B"], "outputs": ["B"]}}}
            ),
            "no such mesh axis",
        ),
        (
            lambda d: d["stages"][0].update(shardings={"wte/Gather": {"dp": {"inputs": ["P", "P"], "outputs": ["P"]}}}),
            "not a legal signature",
        ),
        (
            lambda d: d["stages"][0].update(shardings={"wte/Gather": {"dp": {"inputs": ["Q", "B"], "outputs": ["B"]}}}),
            "not a placement",
        ),
        (lambda d: d.update(sync={"kind": "dasgd", "period": 4, "delay": 1}), "was not allowed"),
        (lambda d: d["schedule"].update(kind="explicit"), "does not go with the kind explicit"),
        (lambda d: d["schedule"].update(order=[["0F0", "0B0"]]), "does not go with the kind 1f1b"),
        (lambda d: d["schedule"].update(kind="explicit", order=[["0F0", "0F0"]]), "twice|too few"),
    ],
)
def test_illegal_plans_are_refused_with_a_reason(gpt, space, change, word):
    s = space(gpt(), "2x2xA100", 8, pp=1)
    document = json.loads(json.dumps(s.decode(s.random(np.random.default_rng(3))).to_json()))
    change(document)
    with pytest.raises(PlanError, match=word):
        price(s.problem, Plan.from_json(document), s.evaluator)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "eager-1f1b", "interleaved", "zb1p", "zb2p"])
def test_a_written_order_is_a_plan_of_the_same_price(gpt, space, kind):
    virtual = 2 if kind == "interleaved" else 1
    s = space(gpt(layers=6), "4xA100", 16, pp=4, num_micro_batches=8, schedule=kind, virtual_stages=virtual)
    rng = np.random.default_rng(4)
    for _ in range(5):
        plan = s.decode(s.random(rng))
        assert plan.schedule.kind == kind
        order = write_order(kind, 4, len(plan.stages), 8)
        written = replace(plan, schedule=Schedule(kind="explicit", order=order))
        again = Plan.from_json(json.loads(json.dumps(written.to_json())))
        assert again == written
        assert price(s.problem, again, s.evaluator) == price(s.problem, plan, s.evaluator)
        assert to_plan(lower_plan(again, s.evaluator), s.evaluator).schedule == written.schedule
        assert s.encode(again) is None


def test_a_stuck_order_names_rank_and_action(gpt, space):
    s = space(gpt(), "2xA100", 4, pp=2, num_micro_batches=2, virtual_stages=1)
    order = (("0F0", "0B0", "0F1", "0B1"), ("1F0", "1F1", "1B0", "1B1"))
    plan = replace(s.decode(s.random(np.random.default_rng(0))), schedule=Schedule(kind="explicit", order=order))
    with pytest.raises(PlanError, match="rank 0 waits forever: 0B0") as caught:
        price(s.problem, plan, s.evaluator)
    assert caught.value.field == "plan.schedule.order[0][1]"


@pytest.mark.parametrize("kind", ["1f1b", "eager-1f1b", "zb1p", "zb2p"])
def test_the_timeline_is_that_of_the_price(gpt, space, kind):
    s = space(gpt(layers=4), "4xA100", 16, pp=4, num_micro_batches=8, schedule=kind)
    plan = s.decode(s.random(np.random.default_rng(1)))
    bare = price(s.problem, plan, s.evaluator)
    found = price(s.problem, plan, s.evaluator, with_timeline=True)
    assert bare.timeline is None
    assert replace(found, timeline=None) == bare
    assert found.timeline is not None
    assert [[word for word, _, _ in line] for line in found.timeline] == [list(x) for x in write_order(kind, 4, 4, 8)]
    spent = 0.0
    for line in found.timeline:
        for (_, start, end), (_, after, _) in itertools.pairwise(line):
            assert start <= end <= after
        spent = max(spent, line[-1][2])
    ranks = s.evaluator.evaluate(lower_plan(plan, s.evaluator)).ranks
    last = max(ranks["end_s"] - ranks["optimizer_s"] - ranks["sync_s"] - s.evaluator.settings(0).step_s)
    if kind == "1f1b":
        assert spent == pytest.approx(last)
    else:
        assert spent >= last * (1 - 1e-12)


def test_globs_cover_equal_layers(gpt, space):
    s = space(gpt(layers=12), "4xA100", 8, pp=1, tp=4)
    _, values = next(t for t in templates(s) if t[0].tp == 4)
    (stage,) = s.decode(values).stages
    assert "h.*.mlp.up/MatMul" in stage.shardings
    assert len(stage.shardings) < 40
