"""Experts spread over the axis that splits the batch: all-to-alls, no gradient reduction, less memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from collective_list import list_collectives

from automap.price.explain import reasons
from automap.space.space import PlanSpace, Values
from automap.space.stated_strategy import Strategy, hand_made
from automap.space.templates import megatron_signatures, templates
from ir import zoo
from ir.factors import PARTIAL
from ir.operators.experts import COMBINE, DISPATCH, PRODUCT

SPEC = "moe:layers=2,hidden=256,heads=4,ffn=512,experts=8,seq_len=256,vocab_size=512"
MakeSpace = Callable[..., PlanSpace]


def plan(space: PlanSpace, expert_axis: str, *, dp: int = 8, ep: int = 1, zero: int = 0) -> Values:
    """All devices in one stage, one micro-batch."""
    shape = next(s for s in space.shapes if (s.dp, s.middle, s.pp, s.num_micro_batches) == (dp, ep, 1, 1))
    prefix = space.even_values(shape, recompute="none", zero=zero)
    return megatron_signatures(space, shape, prefix, sequence_parallel=False, expert_axis=expert_axis)


def test_tokens_go_to_experts_and_back(space: MakeSpace) -> None:
    s = space(zoo.build(SPEC), "8xA100-80GB", 16)
    spread = list(list_collectives(s.lowered(plan(s, "dp")), s.evaluator))
    asked = Counter((c.kind, c.operator, c.direction) for c in spread if c.operator.startswith("layers.1."))
    to, back = "layers.1.mlp.experts/automap.GroupedMatMul#0", "layers.1.mlp.experts/automap.Combine"
    assert asked == {("all_to_all", op, way): 1 for op in (to, back) for way in ("forward", "backward")}
    # Each rank holds the slots of two samples for all experts, or of all samples for one expert.
    slots = 8 * 64 * 2 * 256 * s.problem.activation_bytes
    assert {c.bytes for c in spread if c.kind == "all_to_all"} == {slots}
    assert not list(list_collectives(s.lowered(plan(s, "")), s.evaluator))


def test_weights_of_spread_experts_are_not_reduced(space: MakeSpace) -> None:
    # Large enough for bytes to outweigh latencies.
    graph = zoo.build(SPEC.replace("hidden=256", "hidden=1024").replace("ffn=512", "ffn=4096"))
    s = space(graph, "8xA100-80GB", 16)
    replicated, spread = (s.evaluator.evaluate(s.lowered(plan(s, axis))) for axis in ("", "dp"))
    experts = sum(t.num_elements for t in graph.parameters if ".experts." in t.name)
    assert experts > 0.7 * graph.num_parameters
    share = (graph.num_parameters - experts * 7 / 8) / graph.num_parameters
    for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        assert spread.ranks[name][0] == pytest.approx(share * replicated.ranks[name][0])
    # A ninth is left to be reduced over dp once a step; over a slow network latency does not matter.
    s = space(graph, "8x1xA100-80GB@10Gbit", 16)
    replicated, spread = (s.evaluator.evaluate(s.lowered(plan(s, axis))) for axis in ("", "dp"))
    assert 0 < spread.ranks[0]["sync_s"] < 0.25 * replicated.ranks[0]["sync_s"]


def test_a_plan_with_spread_experts_is_one_of_the_space(space: MakeSpace) -> None:
    s = space(zoo.build(SPEC), "8xA100-80GB", 16)
    values = plan(s, "ep", dp=2, ep=4, zero=1)
    decoded = s.decode(values)
    assert s.encode(decoded) == values
    shardings = decoded.stages[0].shardings
    product = next(v for k, v in shardings.items() if "GroupedMatMul#0" in k)
    # Everything else splits the batch over both axes: nothing needs to be said of it, or of dp.
    assert product.keys() == {"ep"} and product["ep"].inputs == ("S(0)", "S(0)") and product["ep"].outputs == ("S(0)",)
    stage = decoded.stages[0]
    assert (stage.mesh, stage.batch_axes, stage.zero.axes) == ((("dp", 2), ("ep", 4)), ("dp", "ep"), ("dp", "ep"))
    assert all(".experts" in name for name in shardings)
    every = {v for _, v in templates(s)}
    assert values in every
    rng = np.random.default_rng(0)
    spread = [value for value in (s.random(rng) for _ in range(200)) if _experts_on_dp(s, value)]
    assert spread  # it is found by chance too: no template is needed


def test_tokens_that_are_gathered_for_experts_are_not_hidden(space: MakeSpace) -> None:
    """Megatron-Core hides 70 % of what tensor parallelism sends, and nothing of what experts wait for, on any axis."""
    s = space(zoo.build(SPEC), "8xH100", 16, training={"trainer": "megatron-core", "precision": "bf16"})
    values = list(plan(s, "ep", dp=2, ep=4))
    for number, slot in enumerate(s.slots):
        if slot.kind == "signature" and slot.index == 1:
            linked = s.linkage.types[slot.unit_type]
            leader = linked.groups[slot.group].leader
            kind, made = s.operator(slot.unit_type, leader).kind, [found.outputs for found in linked.signatures[leader]]
            # From all tokens to the slots of a rank's experts, and to sums of their results.
            if kind in (DISPATCH, COMBINE):
                values[number] = made.index((0,) if kind == DISPATCH else (PARTIAL,))
    lowered = s.lowered(tuple(values))
    sent = list(list_collectives(lowered, s.evaluator))
    assert {c.kind for c in sent} == {"all_gather", "reduce_scatter"} and {c.axis for c in sent} == {"ep"}
    outcome = s.evaluator.evaluate(lowered)
    assert outcome.ranks[0].comm_s.sum() == pytest.approx(sum(c.seconds for c in sent))
    said = reasons(lowered, s.evaluator, outcome)
    assert any("nothing hides them" in reason for reason in said), said

    shape = next(t for t in s.shapes if (t.dp, t.tp, t.middle, t.pp, t.num_micro_batches) == (4, 2, 1, 1, 1))
    prefix = s.even_values(shape, recompute="none", zero=0)
    lowered = s.lowered(megatron_signatures(s, shape, prefix, sequence_parallel=True))
    sent = list(list_collectives(lowered, s.evaluator))
    assert {c.axis for c in sent} == {"tp"}
    hidden = s.problem.trainer.tensor_overlap
    assert 0.5 < hidden < 1.0
    shown = s.evaluator.evaluate(lowered).ranks[0].comm_s.sum()
    around = [c for c in sent if c.tensor.endswith((".dispatch", ".combine")) or "post_attention" in c.tensor]
    assert {c.kind for c in around} >= {"all_gather", "reduce_scatter"} and len(around) < len(sent)
    assert shown == pytest.approx(sum(c.seconds * (1.0 if c in around else 1.0 - hidden) for c in sent))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_with_the_same_tokens_send_a_part_of_them_each(space: MakeSpace, sequence_parallel: bool) -> None:
    """Megatron-Core's dispatcher sends the part of each rank of tp to the ranks with the experts, gathers the tokens
    over tp there, and scatters sums over tp before they return. AutoMAP's own trainer exchanges one axis after the
    other, so that each rank of tp sends all its tokens."""
    tp, ep, per_replica = 2, 4, 2
    slots = 8 * 64 * 256 * per_replica
    for trainer in ("megatron-core", "automap"):
        training = {"trainer": trainer, "precision": "bf16"}
        s = space(zoo.build(SPEC), "8xH100", ep * per_replica, training=training)
        strategy = Strategy(tp=tp, ep=ep, micro_batch=per_replica, sequence_parallel=sequence_parallel)
        sent = list(list_collectives(hand_made(s.evaluator, strategy), s.evaluator))
        mine = [c for c in sent if "layers.1.mlp.experts" in c.operator]
        whole = slots * s.problem.activation_bytes
        exchanged = [c.bytes for c in mine if c.kind == "all_to_all"]
        assert len(exchanged) == 4
        assert set(exchanged) == {whole / tp if trainer == "megatron-core" else whole}
        if trainer == "megatron-core":
            forward = [c.kind for c in mine if c.direction == "forward"]
            arriving = forward[: forward.index("all_to_all") + 2]
            assert arriving[-1] == "all_gather"
            # Beside these, tokens without copies may be gathered before they are dispatched.
            over_tp = {(c.kind, c.bytes) for c in mine if c.axis == "tp" and c.bytes > whole / 8}
            assert over_tp >= {("all_gather", whole), ("reduce_scatter", whole)}


def _experts_on_dp(s: PlanSpace, values: Values) -> bool:
    for slot, value in zip(s.slots, values, strict=True):
        if slot.kind != "signature" or slot.index:
            continue
        unit = s.linkage.types[slot.unit_type]
        leader = unit.groups[slot.group].leader
        if s.operator(slot.unit_type, leader).kind == PRODUCT and unit.signatures[leader][value].inputs == (0, 0):
            return s.shape(values).dp > 1
    return False


@pytest.mark.parametrize("axis", ["", "tp"])
def test_over_tp_the_sum_is_left_to_the_tokens(space: MakeSpace, axis: str) -> None:
    s = space(zoo.build(SPEC), "8xA100-80GB", 16)
    found = list(list_collectives(s.lowered(plan(s, axis, dp=2)), s.evaluator))
    forward = [c for c in found if "layers.1.mlp.experts" in c.operator and c.direction == "forward"]
    # Slices of experts, or whole experts, leave partial tokens: k times fewer than their slots.
    assert not forward
    adds = [c for c in found if c.operator == "layers.1/Add_1" and c.kind == "all_reduce"]
    assert {c.axis for c in adds} == {"tp"} and {c.bytes for c in adds} == {8 * 256 * 256 * s.problem.activation_bytes}


@pytest.mark.slow
def test_a_search_finds_a_plan() -> None:
    from agents import Budget, search
    from automap.cluster import parse_cluster
    from automap.problem import Problem

    training = {"global_batch": 64, "precision": "bf16"}
    spec = "mixtral-8x7b:layers=4,seq_len=1024"
    problem = Problem.build(zoo.build(spec), parse_cluster("8xH100-80GB"), training)
    found = search(problem, Budget.parse("3000"), searcher="expert").plan
    assert found.model.num_parameters == zoo.build(spec).num_parameters
    assert found.estimate.step_time_s >= found.estimate.lower_bound_s > 0
    for memory in found.estimate.memory_bytes:
        states = memory.parameters + memory.gradients + memory.optimizer
        # 6.1e9 parameters and their states, of 16 bytes each, are more than one device holds.
        assert states < memory.capacity < 16 * found.model.num_parameters
        assert states + memory.activations + memory.buffers <= memory.capacity
    spread = [v for k, v in found.stages[0].shardings.items() if "GroupedMatMul" in k]
    assert spread and all("S(0)" in v["ep"].inputs for v in spread)
