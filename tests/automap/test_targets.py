"""Targets: spaces of plans that a trainer's configuration can express."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from crossing_graphs import towers, unet

from agents import Budget, search_offer
from automap.cluster import parse_cluster
from automap.errors import ProblemError
from automap.export.export import export
from automap.globs import most_specific
from automap.plan import AxisSharding, Plan, Schedule, Zero
from automap.price.estimate import annotate
from automap.problem import Problem
from automap.space.space import PlanSpace
from automap.space.target_limits import plan_space
from automap.space.templates import templates
from automap.targets import targets
from automap.units import units_of
from automap.verify import Verifier, verify
from ir import zoo
from ir.zoo.net import Net

GPT = "gpt:layers=4,hidden=64,heads=4,seq_len=32,vocab_size=102"
BERT = "bert:layers=2,hidden=64,heads=4,seq_len=32,vocab_size=128"
HEAD = "cls.predictions.transform.LayerNorm/LayerNormalization"
BIASES = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias/Gather"
MODELS = {
    "gpt": (GPT, {}),
    "long": (GPT, {"cp": 2}),
    "moe": ("moe:layers=2,hidden=64,heads=4,kv_heads=2,ffn=128,experts=4,seq_len=32,vocab_size=96", {}),
    "t5": ("t5:layers=2,hidden=64,heads=4,ffn=128,seq_len=32,vocab_size=96", {}),
    "resnet": ("resnet:blocks=2-2,width=8,image_size=32,num_classes=16", {}),
    "unet": ("unet:convolutions=4,width=8,levels=2,image_size=16,num_classes=3", {}),
}
CASES = [
    (model, target)
    for model in MODELS
    for target, about in targets().items()
    if not (model in ("resnet", "unet") and about.transformers)
    and not (model == "long" and "context" not in about.parallel)
    if about.patterned
]
"""Targets that express any placement of operators have nothing to be tested here."""


def problem_of(model: str, target: str, devices: str = "8xA100", **fix: Any) -> Problem:
    name, given = MODELS[model]
    training = {"global_batch": 16, "target": target}
    return Problem.build(zoo.build(name), parse_cluster(devices), training, {"fix": {**given, **fix}})


@functools.cache
def space_of(model: str, target: str) -> PlanSpace:
    return plan_space(problem_of(model, target))


def decoded(space: PlanSpace, values: Any) -> Plan:
    return annotate(space.decode(values), space.lowered(values), space.evaluator)


@pytest.mark.parametrize(("model", "target"), CASES)
def test_every_plan_of_a_target_is_one_that_it_can_express(model: str, target: str) -> None:
    """The verifier, which knows nothing of the space, checks them, and so do the degrees."""
    space, about = space_of(model, target), targets()[target]
    check = Verifier(space.problem)
    for values in space.random_batch(np.random.default_rng(1), 6).tolist():
        plan = decoded(space, values)
        assert check.violations(plan) == ()
        (degrees,) = plan.degrees
        assert degrees.other == degrees.repeated == 1
        used = {
            "tensor": degrees.tensor,
            "context": degrees.context,
            "expert": degrees.expert,
            "pipeline": degrees.pipeline,
        }
        assert {side for side, size in used.items() if size > 1} <= set(about.parallel)
        assert degrees.accumulation_steps >= degrees.pipeline or not about.fills_pipelines
        assert degrees.micro_batch * degrees.data * degrees.accumulation_steps == 16
        if degrees.tensor > 1:
            assert degrees.sequence_parallel in about.sequence_parallel
        assert len({bool(stage.recompute) for stage in plan.stages if any("/" in g for g in stage.recompute)}) < 2


@pytest.mark.parametrize(("model", "target"), CASES)
def test_templates_neighbours_and_prices_stay_inside(model: str, target: str) -> None:
    space = space_of(model, target)
    found = [values for _, values in templates(space)]
    assert found
    assert all(space.repair(values) == tuple(values) for values in found)
    start = np.array(found[:8], dtype=np.int64)
    for values in space.neighbours(np.random.default_rng(2), start, start).tolist():
        assert space.repair(values) == tuple(values)


@pytest.mark.parametrize("target", [*targets()])
def test_a_search_for_a_target_ends_with_a_plan_of_it(target: str) -> None:
    plan = search_offer(problem_of("gpt", target), Budget.parse("300")).plan
    assert plan.training.target == target
    assert plan.training.trainer == targets()[target].trainer
    assert verify(problem_of("gpt", target), plan) == ()
    # Without the target the same searcher has more to choose from.
    anything = Problem.build(
        zoo.build(GPT), parse_cluster("8xA100"), {"global_batch": 16, "trainer": targets()[target].trainer}
    )
    if targets()[target].patterned:
        assert PlanSpace(anything).decades > space_of("gpt", target).decades


def test_what_a_target_cannot_express_is_found_by_the_verifier() -> None:
    space = space_of("gpt", "megatron-core")
    check = Verifier(space.problem)
    shape = next(s for s in space.shapes if (s.pp, s.tp, s.virtual, s.num_micro_batches) == (2, 2, 1, 4))
    sound = decoded(space, next(values for s, values in templates(space) if s == shape))
    assert check.violations(sound) == ()

    def faults(plan: Plan) -> str:
        return "; ".join(violation.what for violation in check.violations(plan))

    first, second = sound.stages
    assert "no ZeRO 3" in faults(
        replace(sound, stages=tuple(replace(s, zero=Zero(stage=3, axes=("dp",))) for s in sound.stages))
    )
    assert "no schedule zb1p" in faults(replace(sound, schedule=Schedule(kind="zb1p")))
    assert "one mode for all" in faults(replace(sound, stages=(replace(first, recompute=("h.*",)), second)))
    assert "layers again" in faults(replace(sound, stages=(first, replace(second, recompute=("**",)))))
    swapped = (replace(first, devices=second.devices), replace(second, devices=first.devices))
    assert "in their order" in faults(replace(sound, stages=swapped))
    plain = {key: entry for key, entry in first.shardings.items() if "ln_" not in key}
    assert "splits the sequence in normalisations" in faults(
        replace(sound, stages=(replace(first, shardings=plain), second))
    )
    table = next(key for key in first.shardings if "wte" in key)
    columns = AxisSharding(inputs=("S(1)", "B"), outputs=("S(2)",))
    embedding = {**first.shardings, table: {**first.shardings[table], "dp": columns}}
    assert "weights of wte/Gather over replicas" in faults(
        replace(sound, stages=(replace(first, shardings=embedding), second))
    )
    up = next(key for key in first.shardings if "mlp" in key and "MatMul" in key)
    whole = {key: entry for key, entry in first.shardings.items() if key != up}
    assert "repetition and tensor" in faults(replace(sound, stages=(replace(first, shardings=whole), second)))


def test_what_is_finer_than_modules_is_found_by_the_verifier() -> None:
    def faults(model: str, change: Callable[[Plan], Plan], **fix: int) -> str:
        space = plan_space(problem_of(model, "automap", "2xA100", **fix))
        plan = decoded(space, next(values for _, values in templates(space)))
        return "; ".join(violation.what for violation in Verifier(space.problem).violations(change(plan)))

    def with_entry(name: str, axis: str, entry: AxisSharding | None) -> Callable[[Plan], Plan]:
        def change(plan: Plan) -> Plan:
            (stage,) = plan.stages
            own = {key: axes for key, axes in stage.shardings.items() if name not in key}
            return replace(plan, stages=(replace(stage, shardings=own | ({name: {axis: entry}} if entry else {})),))

        return change

    assert faults("gpt", lambda plan: plan, tp=2) == ""
    softmax = faults("gpt", with_entry("h.*.attn/Softmax", "tp", None), tp=2)
    assert "whole modules: h.0.attn/Add makes" in softmax
    assert "read as B on tp" in softmax
    table = AxisSharding(inputs=("S(0)", "B"), outputs=("P",))
    assert "wte/Gather does not split its batch on dp" in faults(
        "gpt", with_entry("wte/Gather", "dp", table), tp=1, pp=1
    )
    assert faults("gpt", lambda plan: plan, pp=2) == ""
    deep = zoo.build(MODELS["t5"][0].replace("layers=2", "layers=4"))
    space = PlanSpace(Problem.build(deep, parse_cluster("2xA100"), {"global_batch": 16}, {"fix": {"pp": 2}}))
    plan = decoded(space, next(values for _, values in templates(space)))
    beyond = Verifier(space.problem).beyond(plan, "automap")
    assert any("hand on one tensor" in violation.what for violation in beyond)
    for target in ("megatron-core", "torchtitan", "deepspeed"):
        beyond = Verifier(space.problem).beyond(plan, target)
        assert any("layers of several kinds" in violation.what for violation in beyond), target


@pytest.mark.parametrize(
    ("training", "hints", "words"),
    [
        ({"target": "megatron"}, {}, ("training.target", "megatron-core")),
        ({"target": "torchtitan", "precision": "fp16"}, {}, ("training.precision", "bf16")),
        (
            {"target": "deepspeed", "sync_modes": ["synchronous", "local_sgd"]},
            {},
            ("training.sync_modes", "another target"),
        ),
        ({"target": "automap", "batch_norm": "synchronized"}, {}, ("training.batch_norm", "Use local")),
        ({"target": "megatron-core"}, {"fix": {"zero": 3}}, ("hints.fix.zero", "0, 1")),
        ({"target": "megatron-core"}, {"fix": {"schedule": "gpipe"}}, ("hints.fix.schedule", "1f1b")),
        ({"target": "pytorch"}, {"fix": {"recompute": "selective"}}, ("hints.fix.recompute", "none, full")),
        ({"target": "accelerate"}, {"fix": {"pp": 2}}, ("hints.fix.pp", "accelerate splits data, tensor")),
        (
            {"target": "torchtitan"},
            {"fix": {"zero": 0, "tp": 2, "pp": 1}},
            ("hints.fix.zero", "Use 2, 3, or split the batch alone"),
        ),
        (
            {"target": "accelerate"},
            {"fix": {"tp": 8}},
            ("hints.fix.tp", "beside replicas alone, for which tp 8 leaves"),
        ),
        (
            {"target": "deepspeed"},
            {"fix": {"tp": 2, "pp": 2}},
            ("hints.fix.tp", "not split pipeline and tensor together"),
        ),
        ({"target": "automap"}, {"fix": {"cp": 2}}, ("hints.fix.cp", "Leave it out, or use another target")),
        ({"target": "automap"}, {"fix": {"cp": 2, "zero": 3}}, ("hints.fix.cp", "automap splits data")),
    ],
)
def test_what_does_not_go_with_a_target_is_refused(
    training: dict[str, Any], hints: dict[str, Any], words: tuple[str, str]
) -> None:
    with pytest.raises(ProblemError) as fault:
        plan_space(Problem.build(zoo.build(GPT), parse_cluster("8xA100"), {"global_batch": 16, **training}, hints))
    assert fault.value.field == words[0]
    assert words[1] in fault.value.repair


@pytest.mark.parametrize(("batch", "other"), [(127, 120), (13, 8), (7, 8)])
def test_a_batch_that_goes_with_a_target_is_named(batch: int, other: int) -> None:
    """A prime number of samples divides over no ranks, and accelerate has all ranks take equally many."""
    graph = zoo.build("gpt:layers=2,hidden=48,heads=3,seq_len=33,vocab_size=128")
    with pytest.raises(ProblemError) as fault:
        plan_space(Problem.build(graph, parse_cluster("8xA100"), {"global_batch": batch, "target": "accelerate"}))
    assert f"Use a global batch of {other}," in fault.value.repair
    plan_space(Problem.build(graph, parse_cluster("8xA100"), {"global_batch": other, "target": "accelerate"}))


def test_hints_that_a_target_obeys_neither_of_are_named_together() -> None:
    training, hints = {"global_batch": 16, "target": "automap"}, {"fix": {"cp": 2, "tp": 8}}
    with pytest.raises(ProblemError) as fault:
        plan_space(Problem.build(zoo.build(GPT), parse_cluster("2x8xA100"), training, hints))
    assert (fault.value.field, fault.value.value) == ("hints.fix", "{'tp': 8, 'cp': 2}")


def test_a_degree_that_a_target_does_not_have_is_named() -> None:
    """The trainer of modules splits the samples alone where all layers read the ALiBi of all heads."""
    training, hints = {"global_batch": 8, "target": "automap"}, {"fix": {"tp": 2}}
    model = zoo.build("gpt:layers=2,hidden=64,heads=4,seq_len=32,vocab_size=128,alibi=1")
    problem = Problem.build(model, parse_cluster("2xA100"), training, hints)
    with pytest.raises(ProblemError, match=r"hints\.fix\.tp: the target automap has no plan.*Use 1, or another"):
        plan_space(problem)


@pytest.mark.parametrize(
    ("model", "target", "wanted"),
    [
        # The position biases of a layer are those of all layers: their table is split by heads.
        ("t5", "automap", {BIASES: "S(1)"}),
        ("t5", "pytorch", {BIASES: "S(1)"}),
        # The norm between the two products of the head stays whole, and the second product shares the table's split.
        ("bert", "pytorch", {HEAD: "B", "embeddings.word_embeddings/Gather": "S(0)"}),
    ],
)
def test_models_of_two_stacks_and_of_heads_with_norms_are_split(
    model: str, target: str, wanted: dict[str, str]
) -> None:
    training = {"global_batch": 8, "target": target, "precision": "fp32"}
    graph = zoo.build(BERT if model == "bert" else MODELS[model][0])
    problem = Problem.build(graph, parse_cluster("2xA100"), training, {"fix": {"tp": 2}})
    space = plan_space(problem)
    plan = decoded(space, next(values for _, values in templates(space)))
    assert not Verifier(problem).violations(plan)
    placed = plan.stages[0].shardings
    for name, text in wanted.items():
        key = most_specific(placed, name)
        assert (placed[key]["tp"].inputs[0] if key is not None else "B") == text, (name, sorted(placed))
    assert {note.kept for note in export(plan, problem, target).notes} <= {"exact", "left to you"}


@pytest.mark.parametrize("is_computed", [False, True])
def test_constants_of_all_heads_leave_heads_whole(is_computed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """ALiBi is stored, or code computes it from sizes; in both cases every rank has that of all heads."""
    if is_computed:

        def computed(net: Net, name: str, *shape: int) -> str:
            return net.op("ConstantOfShape", [], shape=shape, value=0.0)

        monkeypatch.setattr(Net, "buffer", computed)
    sizes = "layers=2,hidden=64,heads=4,seq_len=32,vocab_size=128"
    training = {"global_batch": 8, "target": "automap"}
    for alibi, degrees in (("", {1, 2}), (",alibi=1", {1})):
        problem = Problem.build(zoo.build(f"gpt:{sizes}{alibi}"), parse_cluster("2xA100"), training)
        assert {shape.tp for shape in plan_space(problem).shapes} == degrees


def test_convolutions_before_the_layers_stay_whole() -> None:
    """No trainer of Megatron's pattern splits that of ViT's patches; the layers after it are split."""
    model = zoo.build("vit:layers=2,hidden=64,heads=4,image_size=32,patch_size=8")
    for target in ("automap", "pytorch", "accelerate", "deepspeed"):
        training = {"global_batch": 8, "target": target}
        space = plan_space(Problem.build(model, parse_cluster("4xA100"), training, {"fix": {"tp": 2}}))
        (values,) = space.random_batch(np.random.default_rng(0), 1).tolist()
        plan = decoded(space, values)
        assert Verifier(space.problem).violations(plan) == ()
        split = {name for stage in plan.stages for name in stage.shardings}
        assert not any("patch_embed" in name for name in split) and any("mlp" in name for name in split)


def test_a_model_without_attention_is_no_transformer() -> None:
    with pytest.raises(ProblemError, match="no attention") as fault:
        plan_space(problem_of("resnet", "megatron-core"))
    assert "deepspeed" in fault.value.repair


def test_a_trainer_that_is_named_stays() -> None:
    training = {"global_batch": 16, "target": "megatron-core", "trainer": "generic"}
    assert Problem.build(zoo.build(GPT), parse_cluster("8xA100"), training).training.trainer == "generic"


def test_samples_of_a_token_that_is_reshaped_first_are_split() -> None:
    """CLIP's class token: modules run on the samples that each rank has."""
    net = Net()
    x = net.linear(net.builder.input("x", (1, 4, 8)), "embedding", 8)
    token = net.op("Expand", [net.parameter("token", 8)], "tokens", shape=(1, 1, 8))
    token = net.op("Expand", [token], "tokens", shape=(1, 1, 8), batch_dim=0)
    x = net.op("Concat", [token, x], "tokens", axis=1)
    graph = net.finish(net.linear(x, "head", 8))
    problem = Problem.build(graph, parse_cluster("4xA100"), {"global_batch": 16, "target": "pytorch"})
    space, check = plan_space(problem), Verifier(problem)
    found = list(templates(space))
    assert max(shape.dp for shape, _ in found) == 4
    for _, values in found:
        assert check.violations(decoded(space, values)) == ()


@pytest.mark.parametrize("target", ["deepspeed", "pytorch", "automap"])
def test_stages_of_modules_hand_on_one_tensor(target: str) -> None:
    """Where enough cuts are left they have pipelines; where most work would be in one unit its parts may run again."""
    for graph, has_pipelines in ((towers(10), True), (unet(3), False)):
        free, bound = (
            Problem.build(graph, parse_cluster("4xA100"), {"global_batch": 16, **about})
            for about in ({}, {"target": target})
        )
        assert any(unit.beside for unit in units_of(free).units)
        assert has_pipelines == (not any(unit.beside for unit in units_of(bound).units))
        assert len(units_of(bound).units) > 8
        assert has_pipelines == any(shape.pp > 1 for shape in plan_space(bound).shapes)
        space = PlanSpace(free)
        cut = next(values for shape, values in templates(space) if shape.pp == 4)
        faults = Verifier(bound).violations(decoded(space, cut))
        assert any("hand on one tensor" in fault.what for fault in faults)


@pytest.mark.parametrize("target", ["pytorch", "automap"])
def test_stages_of_modules_share_no_layer_that_is_called_twice(target: str) -> None:
    """The model is like ALBERT, with layers of its own in between."""
    net = Net()
    x = net.builder.input("x", (1, 4, 8))
    for scope in ("first", "again", "own", "again", "last"):
        x = net.op("Gelu", [net.linear(x, scope, 8)], scope)
    graph = net.finish(x)
    free, bound = (
        Problem.build(graph, parse_cluster("2xA100"), {"global_batch": 16, **about})
        for about in ({}, {"target": target})
    )
    assert {shape.pp for shape in plan_space(bound).shapes} == {1}
    space, check = PlanSpace(free), Verifier(bound)
    found = set()
    for values in space.random_batch(np.random.default_rng(0), 60).tolist():
        plan = decoded(space, values)
        if len(plan.stages) == 2:
            shares = any("share no layer, not again" in fault.what for fault in check.beyond(plan, target))
            found.add((plan.stages[1].operators[0].partition("/")[0], shares))
    assert found >= {("own", True), ("last", False)}
