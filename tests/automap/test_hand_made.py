"""Plans from degrees: what they become, and which are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from automap.cluster import parse_cluster
from automap.errors import PlanError
from automap.price.estimate import price
from automap.price.evaluator import Evaluator
from automap.price.lowered_plan import LoweredPlan, Segment
from automap.price.plan_reader import lower_plan
from automap.price.plan_writer import to_plan
from automap.problem import Problem
from automap.space import stated_strategy as module
from automap.space.space import PlanSpace
from automap.space.stated_parts import recompute_masks
from automap.space.stated_strategy import Strategy, recomputes_nothing, undivided
from automap.space.templates import templates
from automap.verify import verify
from ir import zoo
from ir.factors import whole_signature
from ir.zoo.net import Net
from ir.zoo.transformers import Moe

GPT = "gpt:layers=8,hidden=256,heads=4,seq_len=128,vocab_size=1024"
MOE = "moe:layers=2,hidden=128,heads=4,kv_heads=4,ffn=256,experts=4,seq_len=64,vocab_size=512"


@pytest.fixture(scope="module")
def evaluators() -> dict[tuple[str, str, int], Evaluator]:
    return {}


@pytest.fixture
def evaluator_of(evaluators: dict[tuple[str, str, int], Evaluator]) -> Any:
    def make(spec: str = GPT, cluster: str = "1x8xA100", batch: int = 64) -> Evaluator:
        key = (spec, cluster, batch)
        if key not in evaluators:
            evaluators[key] = Evaluator(Problem.build(zoo.build(spec), parse_cluster(cluster), {"global_batch": batch}))
        return evaluators[key]

    return make


def made(evaluator: Evaluator, strategy: Strategy) -> LoweredPlan:
    return module.hand_made(evaluator, strategy)


def layers(lowered: LoweredPlan, evaluator: Evaluator) -> list[int]:
    """Repeated blocks of each chunk."""
    kinds = [unit.type for unit in evaluator.blocks.units]
    repeated = max(set(kinds), key=kinds.count)
    return [sum(kinds[s.unit] == repeated for s in chunk) for chunk in lowered.chunks]


def test_a_batch_that_dp_does_not_divide_is_spread_as_evenly_as_it_goes(evaluator_of: Any) -> None:
    evaluator = evaluator_of(cluster="1x7xA100")
    space = PlanSpace(evaluator.problem, evaluator)
    for count, share in ((1, 10), (2, 5), (4, 3), (8, 2)):
        lowered = made(evaluator, Strategy(micro_batch=share))
        assert (lowered.num_micro_batches, lowered.samples) == (count, 64 // count)
        shape = next(s for s in space.shapes if (s.dp, s.num_micro_batches) == (7, count))
        values = next(v for s, v in templates(space) if s == shape and v[space.first.zero] == 0)
        assert evaluator.evaluate(lowered).step_time_s == space.price(np.array([values]))[0, 0]
    with pytest.raises(PlanError, match="Use a micro-batch of 2, 3, 5, 10"):
        made(evaluator, Strategy(micro_batch=4))


def test_samples_of_replicas_that_share_experts_are_spread_as_evenly_as_they_go(evaluator_of: Any) -> None:
    evaluator = evaluator_of(MOE, batch=30)
    space = PlanSpace(evaluator.problem, evaluator)
    # 30 samples on 4 groups of 2 ranks are 8 at most for a group, 15 are 4.
    for count, share in ((1, 4), (2, 2)):
        lowered = made(evaluator, Strategy(ep=2, micro_batch=share))
        assert (lowered.num_micro_batches, lowered.samples) == (count, 30 // count)
        assert lowered.rank_samples.tolist() == [8 * share]
        plan = to_plan(lowered, evaluator)
        assert not verify(evaluator.problem, plan)
        values = space.encode(plan)
        assert values is not None
        assert evaluator.evaluate(lowered).step_time_s == space.price(np.array([values]))[0, 0]
    with pytest.raises(PlanError, match="Use a micro-batch of 2, 4"):
        made(evaluator, Strategy(ep=2, micro_batch=3))
    lowered = made(evaluator_of(batch=30), Strategy(cp=2, micro_batch=8))
    assert lowered.rank_samples.tolist() == [32]


def test_dp_fills_up_and_layers_are_spread_evenly(evaluator_of: Any) -> None:
    lowered = made(evaluator_of(), Strategy(tp=2, pp=2, micro_batch=4, zero=1, recompute="full"))
    assert [int(a) for a in lowered.layout.stages[0].axes] == [2, 2]
    assert (lowered.num_micro_batches, lowered.samples, lowered.kind, lowered.zero) == (8, 8, "1f1b", 1)
    assert layers(lowered, evaluator_of()) == [4, 4]
    assert all(
        s.recomputed.all() for chunk in lowered.chunks for s in chunk if len(chunk) > 1 and s.unit in range(1, 9)
    )


def test_virtual_stages_go_round_the_ranks(evaluator_of: Any) -> None:
    lowered = made(evaluator_of(), Strategy(pp=2, virtual=2))
    assert (lowered.kind, layers(lowered, evaluator_of())) == ("interleaved", [2, 2, 2, 2])


@pytest.mark.parametrize(
    "stated",
    [
        {},
        {"tp": 4, "sequence_parallel": True},
        {"tp": 2, "pp": 2, "micro_batch": 2, "recompute": "full", "zero": 1},
        {"pp": 2, "virtual": 2, "zero": 2},
        {"pp": 4, "schedule": "gpipe"},
        {"cp": 2, "tp": 2, "zero": 1},
    ],
)
def test_a_hand_made_plan_is_a_plan(evaluator_of: Any, stated: dict[str, Any]) -> None:
    """Written as a document and read again, with every check of a plan, it costs the same."""
    evaluator = evaluator_of()
    lowered = module.hand_made(evaluator, Strategy(**stated))
    plan = to_plan(lowered, evaluator)
    estimate = price(evaluator.problem, plan, evaluator)
    assert estimate.step_time_s == evaluator.evaluate(lowered).step_time_s


def test_it_is_the_template_of_those_degrees(evaluator_of: Any) -> None:
    space = PlanSpace(evaluator_of().problem, evaluator_of())
    stated = Strategy(tp=4, micro_batch=8, zero=1, recompute="full")
    found = [
        space.lowered(values)
        for shape, values in templates(space)
        if (shape.pp, shape.tp, shape.num_micro_batches) == (1, 4, 4)
    ]
    mine = made(evaluator_of(), stated)
    same = [c for c in found if c.zero == 1 and all(
        np.array_equal(a.chosen, b.chosen) for a, b in zip(c.chunks[0], mine.chunks[0], strict=True)
    )]  # fmt: skip
    assert same


def test_torchtitan_recomputes_every_second_product_and_saves_attention(evaluator_of: Any) -> None:
    evaluator = evaluator_of()
    graph, kinds = evaluator.problem.graph, [unit.type for unit in evaluator.blocks.units]
    layer = max(set(kinds), key=kinds.count)
    again = recompute_masks(evaluator, "torchtitan", "selective")(layer)
    operators = graph.operators[evaluator.blocks.representative(layer).start :][: len(again)]
    linear, scores, others = list[bool](), list[bool](), dict[str, bool]()
    for op, runs_again in zip(operators, again.tolist(), strict=True):
        if op.kind == "MatMul":
            (linear if any(graph.is_weight(name) for name in op.inputs) else scores).append(runs_again)
        else:
            others[op.kind] = runs_again
    assert linear == [False, True] * (len(linear) // 2) and len(linear) > 2
    assert scores == [False, False] and not others["Softmax"]
    assert others["LayerNormalization"] and others["Gelu"]


def test_experts_are_spread_over_dp(evaluator_of: Any) -> None:
    evaluator = evaluator_of(MOE, "1x4xA100", 16)
    whole, spread = (evaluator.evaluate(made(evaluator, Strategy(ep=ep))) for ep in (1, 4))
    experts = 2 * 4 * 3 * 128 * 256
    parameter = evaluator.problem.state_bytes[0]
    # Each of four ranks holds one of the four experts of a layer.
    saved = whole.ranks[0].parameter_bytes - spread.ranks[0].parameter_bytes
    assert saved == pytest.approx(parameter * experts * 3 / 4)


def test_a_sequence_over_cp_has_less_to_compute(evaluator_of: Any) -> None:
    large = "gpt:layers=2,hidden=2048,heads=16,seq_len=4096,vocab_size=1024"
    one = evaluator_of(large, "1x1xA100", 4)
    two = evaluator_of(large, "1x2xA100", 4)
    alone, shared = (e.evaluate(made(e, Strategy(dp=1, cp=cp))) for e, cp in ((one, 1), (two, 2)))
    assert 0.4 < shared.ranks[0].compute_s / alone.ranks[0].compute_s < 0.7


def test_arithmetic_that_tp_leaves_whole_is_named(evaluator_of: Any) -> None:
    evaluator = evaluator_of(GPT, "1x8xA100", 64)
    lowered = made(evaluator, Strategy(tp=4))
    assert undivided(evaluator, lowered) == ()
    assert undivided(evaluator, made(evaluator, Strategy())) == ()

    # The same plan in which every rank does everything.
    def alike(segment: Segment) -> Segment:
        chosen = segment.chosen.copy()
        unit_type = evaluator.blocks.units[segment.unit].type
        for k, table in enumerate(evaluator.tables.linkage.types[unit_type].signatures):
            chosen[k, 1] = whole_signature(table)
        return replace(segment, chosen=chosen)

    whole = replace(lowered, chunks=tuple(tuple(map(alike, segments)) for segments in lowered.chunks))
    (text,) = undivided(evaluator, whole)
    assert text.startswith("100% of the FLOPs are not divided by tp = 4")


@pytest.mark.parametrize(
    ("stated", "field", "repair"),
    [
        ({"tp": 3}, "tp", "1, 2, 4, 8"),
        ({"tp": 8}, "tp", "1, 2, 4"),
        ({"dp": 4}, "dp", "dp = 8"),
        ({"dp": 4, "tp": 4}, "dp", "dp = 2"),
        ({"tp": 0}, "tp", "1 or more"),
        ({"micro_batch": 3}, "micro_batch", "1, 2, 4, 8"),
        ({"micro_batch": 0}, "micro_batch", "1 or more"),
        ({"pp": 8, "virtual": 2}, "virtual", "fewer"),
        ({"pp": 2, "virtual": 2, "micro_batch": 16}, "virtual", "micro-batch"),
        ({"virtual": 2}, "virtual", "pp of 2"),
        ({"pp": 2, "schedule": "interleaved"}, "schedule", "virtual"),
        ({"pp": 2, "schedule": "round"}, "schedule", "gpipe"),
        ({"zero": 4}, "zero", "0 to 3"),
        ({"recompute": "some"}, "recompute", "selective"),
        ({"ep": 8}, "ep", "Leave it out"),
        ({"ep": 3}, "ep", "1, 2, 4, 8"),
        ({"cp": 16}, "cp", "1, 2, 4, 8"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(
    evaluator_of: Any, stated: dict[str, Any], field: str, repair: str
) -> None:
    with pytest.raises(PlanError) as caught:
        made(evaluator_of(), Strategy(**stated))
    assert caught.value.field == field
    assert repair in caught.value.repair


@pytest.mark.parametrize(
    ("spec", "cluster", "stated", "field"),
    [
        ("gpt:layers=2,hidden=192,heads=3,seq_len=100,vocab_size=1024", "1x8xA100", {"cp": 8}, "cp"),
        ("gpt:layers=2,hidden=192,heads=3,seq_len=100,vocab_size=1024", "1x2xA100", {"tp": 2}, "tp"),
        ("resnet50", "1x8xA100", {"cp": 2}, "cp"),
        (MOE, "1x8xA100", {"ep": 8}, "ep"),
        (GPT, "1x6xA100", {"dp": 6}, "micro_batch"),
        (MOE, "1x6xA100", {"dp": 6, "ep": 2}, "micro_batch"),
    ],
)
def test_what_the_model_cannot_be_divided_by_is_refused(
    evaluator_of: Any, spec: str, cluster: str, stated: dict[str, Any], field: str
) -> None:
    with pytest.raises(PlanError) as caught:
        made(evaluator_of(spec, cluster, 64), Strategy(**stated))
    assert caught.value.field == field
    assert caught.value.repair


def test_plans_on_two_kinds_of_devices_and_on_measured_links() -> None:
    for document in (
        parse_cluster("4xV100-32GB+4xP100").to_json(),
        parse_cluster("1x8xA100").to_json()
        | {"bandwidth_GBps": [[0.0 if i == j else 50.0 for j in range(8)] for i in range(8)]},
    ):
        problem = Problem.build(zoo.build(GPT), parse_cluster(document), {"global_batch": 64})
        evaluator = Evaluator(problem)
        lowered = made(evaluator, Strategy(tp=2, pp=2))
        assert evaluator.evaluate(lowered).step_time_s > 0.0
        assert lower_plan(to_plan(lowered, evaluator), evaluator).samples == lowered.samples


def test_selective_recomputation_is_what_the_trainer_means_by_it() -> None:
    """Every second product for TorchTitan; for others the scores of attention, of which a fused kernel keeps none."""
    again = {}
    for trainer in ("torchtitan", "megatron-core", "deepspeed"):
        training = {"global_batch": 16, "trainer": trainer}
        evaluator = Evaluator(Problem.build(zoo.build(GPT), parse_cluster("2xV100-16GB"), training))
        strategy = Strategy(recompute="selective")
        lowered = module.hand_made(evaluator, strategy)
        plan = to_plan(lowered, evaluator)
        again[trainer] = plan.stages[0].recompute
        notes = recomputes_nothing(strategy, lowered, trainer)
        assert bool(notes) == (not again[trainer])
        assert not recomputes_nothing(Strategy(), lowered, trainer)
    assert any("mlp" in glob for glob in again["torchtitan"])
    assert again["megatron-core"] == ()


T5 = "t5:layers=4,hidden=64,heads=4,ffn=256,seq_len=32,vocab_size=128"
VGG = "vgg:convolutions=1-1-2-2,width=16,ffn=64,image_size=32,num_classes=10"


@pytest.mark.parametrize(("spec", "layers"), [(T5, 8), (VGG, 9), (GPT, 8)])
def test_all_kinds_of_layers_are_spread_and_computed_again(evaluator_of: Any, spec: str, layers: int) -> None:
    """Layers of an encoder and of a decoder count alike; in a network of unlike layers, each that has weights."""
    evaluator = evaluator_of(spec)
    strategy = Strategy(dp=4, pp=2, recompute="full")
    lowered = made(evaluator, strategy)
    counts = [sum(bool(segment.recomputed.any()) for segment in chunk) for chunk in lowered.chunks]
    assert sum(counts) == layers and max(counts) - min(counts) <= 1


def mixtures(*, in_front: bool) -> Evaluator:
    """A network of mixtures of experts alone, or each with a linear layer before it."""
    net, moe = Net(), Moe(layers=2, hidden=32, heads=4, experts=4, ffn=64, seq_len=16, vocab_size=64)
    x = net.embedding(net.builder.input("ids", (1, 16), "int64"), "wte", 64, 32)
    for layer in ("h.0", "h.1"):
        x = net.linear(x, f"{layer}.lin", 32) if in_front else x
        x = moe._mlp(net, x, f"{layer}.mlp")
    graph = net.finish(net.linear(x, "head", 64, bias=False))
    return Evaluator(Problem.build(graph, parse_cluster("4xA100"), {"global_batch": 16}))


@pytest.mark.parametrize("degrees", [{"ep": 2, "tp": 2, "sequence_parallel": True}, {"ep": 4}, {"cp": 4}])
def test_a_layer_may_begin_with_its_mixture_of_experts(degrees: dict[str, Any]) -> None:
    """Its tokens are made by the layer before; the mixture is split as it is behind a layer of its own."""
    alone, behind = (
        {
            name: sharding
            for name, sharding in to_plan(made(evaluator, Strategy(**degrees)), evaluator).stages[0].shardings.items()
            if ".mlp" in name
        }
        for evaluator in (mixtures(in_front=False), mixtures(in_front=True))
    )
    assert alone and alone == behind
