"""The verifier: sound plans pass, and for every rule there is a plan that breaks it and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from crossing_graphs import GRAPHS
from long_cases import long_but

from automap.cluster import parse_cluster
from automap.errors import PlanError
from automap.plan import AxisSharding, Schedule, Sync, Zero
from automap.price.estimate import estimate_lowered
from automap.price.evaluator import Evaluator
from automap.price.plan_reader import lower_plan
from automap.problem import Problem
from automap.schedule import write_order
from automap.space.space import PlanSpace
from automap.space.target_limits import plan_space
from automap.space.templates import megatron_signatures, templates
from automap.verify import Verifier, verify
from automap.verify.schedule import rank_orders
from ir import zoo
from ir.build import GraphBuilder
from ir.factors import PARTIAL
from ir.graph import Tensor
from ir.linkage import operator_signatures
from ir.loss import with_loss
from ir.zoo.net import Net

GPT = "gpt:layers=4,hidden=64,heads=4,seq_len=32,vocab_size=128"
ODD = "gpt:layers=2,hidden=64,heads=4,seq_len=32,vocab_size=2051"
T5 = "t5:layers=2,hidden=64,heads=4,seq_len=32,vocab_size=128"
MOE = "moe:layers=3,hidden=64,heads=4,kv_heads=4,ffn=128,experts=4,seq_len=32,vocab_size=128"
BATCH = 16


def build(spec, cluster="8xA100", batch=BATCH, *, trainer="generic", **hints):
    return Problem.build(
        zoo.build(spec), parse_cluster(cluster), {"global_batch": batch, "trainer": trainer}, hints or None
    )


def plan_of(space, values):
    lowered = space.lowered(values)
    return replace(space.decode(values), estimate=estimate_lowered(lowered, space.evaluator))


def wrong_plans(problem, count=20, num_templates=12):
    """Violations of random plans and of templates spread over the whole grid; `make prove` checks many more."""
    space, check = PlanSpace(problem), Verifier(problem)
    rows = [tuple(row.tolist()) for row in space.random_batch(np.random.default_rng(0), count)]
    found = [values for _, values in templates(space)]
    rows += found[:: -(-len(found) // num_templates)]
    return [(row, wrong) for row in rows if (wrong := check.violations(plan_of(space, row)))]


# -- sound plans -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trainer", ["generic", "megatron-lm"])
def test_plans_of_a_transformer_pass(trainer):
    assert not wrong_plans(build(GPT, trainer=trainer))


KINDS = [
    (GPT, "2x4xA100", 16, "generic", {}),
    (GPT, "4xV100-16GB+4xP100", 8, "deepspeed", {}),
    (GPT, "8xA100", 16, "megatron-lm", {"cp": 2}),
    (GPT, "8xA100", 16, "generic", {"schedule": "zb2p"}),
    (GPT, "8xA100", 16, "generic", {"schedule": "gpipe"}),
    ("llama:layers=3,hidden=64,heads=8,kv_heads=4,seq_len=32,vocab_size=128", "2x4xA100", 16, "megatron-core", {}),
    (MOE, "8xA100", 16, "megatron-core", {}),
    ("bert:layers=3,hidden=64,heads=4,seq_len=32,vocab_size=128", "2x2xV100@25Gbit", 8, "megatron-lm", {}),
    ("resnet:blocks=1-2-1-1,image_size=64", "2x4xA100", 16, "generic", {}),
    (T5, "2x4xA100", 16, "generic", {}),
    (GPT, "2x2xA100", 16, "oneflow", {"pp": 2}),
    (ODD, "2x2xA100", 16, "generic", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "cluster", "batch", "trainer", "fix"),
    long_but([KINDS[number] for number in (1, 2, 6, 8, 9, 11)], KINDS),
)
def test_templates_and_random_plans_pass(spec, cluster, batch, trainer, fix):
    assert not wrong_plans(build(spec, cluster, batch, trainer=trainer, fix=fix))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["squeezenet", "inception_v1"])
def test_plans_of_imported_models_pass(light_graph, name):
    problem = Problem.build(light_graph(name), parse_cluster("2x2xV100@25Gbit"), {"global_batch": 8})
    assert not wrong_plans(problem)


def test_data_added_to_a_sum_is_no_bias():
    """All that is partial becomes partial: the model's own input is added like any activation."""
    net = Net()
    x = net.builder.input("x", (1, 8, 16))
    down = net.linear(net.linear(x, "up", 64, bias=False), "down", 16, bias=False)
    graph = net.finish(net.linear(net.add(x, down, "residual"), "head", 32))
    problem = Problem.build(graph, parse_cluster("2x2xV100"), {"global_batch": 8})
    add = next(op for op in problem.graph if op.kind == "Add" and "x" in op.inputs)
    assert {s.inputs for s in operator_signatures(problem.graph, add) if PARTIAL in s.outputs} == {(PARTIAL, PARTIAL)}
    assert not wrong_plans(problem, 200, num_templates=5)


def test_a_constant_added_to_a_sum_is_a_bias():
    """A partial sum stays partial, and the constant is added once."""
    net = Net()
    x = net.builder.input("x", (1, 8, 16))
    down = net.linear(net.linear(x, "up", 64, bias=False), "down", 16, bias=False)
    constant = net.builder.add_tensor(Tensor(name="queries", shape=(1, 8, 16), dtype="float32", role="constant"))
    graph = net.finish(net.linear(net.add(constant, down, "residual"), "head", 32))
    problem = Problem.build(graph, parse_cluster("2x2xV100"), {"global_batch": 8})
    add = next(op for op in problem.graph if op.kind == "Add" and "queries" in op.inputs)
    assert [s.inputs[1] for s in operator_signatures(problem.graph, add) if PARTIAL in s.outputs] == [PARTIAL]
    assert not wrong_plans(problem, 200, num_templates=5)


def test_a_tensor_that_passes_over_a_branch_which_leads_nowhere_arrives_whole():
    b = GraphBuilder()
    x = b.input("x", (1, 16))
    (product,) = b.add("MatMul", [x, b.parameter("w", (16, 32))], ["product"], scope="head")
    (scores,) = b.add("Reshape", [product], ["scores"], scope="head", attributes={"shape": (1, 32)})
    (side,) = b.add("MatMul", [x, b.parameter("beside", (16, 32))], ["side"], scope="branch")
    (end,) = b.add("Relu", [side], ["end"], scope="branch")
    problem = Problem.build(with_loss(b.finish([scores, end])), parse_cluster("2x2xA100"), {"global_batch": 8})
    assert len(Verifier(problem)._model.blocks.units) == 3
    assert not wrong_plans(problem, 200, num_templates=5)


def test_views_of_one_tensor_that_are_as_large_may_count_once():
    """A product saves a tensor that is split by samples, another one a view of it that is split by heads."""
    b = GraphBuilder()
    x = b.input("x", (1, 4, 16, 8))
    (heads,) = b.add("MatMul", [x, b.parameter("w", (8, 8))], ["heads"])
    (one,) = b.add("MatMul", [heads, b.parameter("content", (8, 8))], ["one"])
    (view,) = b.add("Unsqueeze", [heads, b.constant("axes", np.array([3]))], ["view"], opset=20)
    (position,) = b.add("MatMul", [view, b.parameter("positions", (16, 8, 8))], ["position"])
    (other,) = b.add("Squeeze", [position, "axes"], ["other"], opset=20)
    (added,) = b.add("Add", [one, other], ["added"])
    graph = with_loss(b.finish([added], name="lambda layer"))
    problem = Problem.build(graph, parse_cluster("4xA100"), {"global_batch": 8})
    assert not wrong_plans(problem, 200, num_templates=5)


def test_groups_of_a_convolution_are_not_cut():
    """Two groups of 32 channels are 64 channels, which four ranks could share, but not by groups."""
    b = GraphBuilder()
    x = b.input("x", (1, 64, 8, 8))
    (wide,) = b.add(
        "Conv", [x, b.parameter("w", (64, 32, 3, 3))], ["wide"], attributes={"group": 2, "pads": (1, 1, 1, 1)}
    )
    (added,) = b.add("Relu", [wide], ["added"])
    (narrow,) = b.add("Conv", [added, b.parameter("v", (6, 64, 3, 3))], ["narrow"], attributes={"pads": (1, 1, 1, 1)})
    (flat,) = b.add("Flatten", [narrow], ["flat"])
    problem = Problem.build(with_loss(b.finish([flat])), parse_cluster("2x2xV100"), {"global_batch": 8})
    convolution = problem.graph.operators[0]
    assert [f.size for f in convolution.rule.factors if f.name == "g"] == [2]
    assert not wrong_plans(problem, 200, num_templates=20)


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("trainer", ["generic", "megatron-core", "oneflow"])
def test_plans_of_models_in_which_several_tensors_cross_pass(name, trainer):
    training = {"global_batch": BATCH, "trainer": trainer}
    assert not wrong_plans(Problem.build(GRAPHS[name](), parse_cluster("2x4xA100"), training))


@pytest.mark.slow
@pytest.mark.long
def test_carried_tensors_are_in_the_buffers_of_what_crosses():
    """However the stage splits them that makes them; OneFlow keeps a buffer for each micro-batch that crosses."""
    model = "t5:layers=4,hidden=64,heads=4,seq_len=32,vocab_size=128"
    assert not wrong_plans(build(model, "1x4xA100", trainer="oneflow", fix={"pp": 2, "tp": 2}), 100)


@pytest.mark.slow
def test_a_carried_tensor_is_read_whole_and_in_parts():
    """Keys and values of one block read it, and the trainer keeps its own part of what it gathers."""
    model = "t5:layers=4,hidden=64,heads=4,seq_len=32,vocab_size=128"
    assert not wrong_plans(build(model, "1x4xA100", trainer="megatron-core"), 40)


def test_plans_in_low_precision_pass():
    training = {"global_batch": 8, "precision": "fp8", "trainer": "megatron-core"}
    assert not wrong_plans(Problem.build(zoo.build(GPT), parse_cluster("4xH100"), training))


@pytest.mark.parametrize(
    "constraint",
    [
        {"scope": "h.*.mlp", "replicate": True},
        {"scope": "h.*.mlp.*/MatMul", "split": True},
        {"scope": "h.1", "stage": 1},
        {"scope": "h.0", "recompute": True},
        {"scope": "h.*.mlp", "recompute": False},
        {"scope": "h.*.mlp.c_fc/MatMul", "sharding": {"tp": "S(2)"}},
    ],
)
def test_plans_that_obey_constraints_pass(constraint):
    assert not wrong_plans(build(GPT, constraints=[constraint]))


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "eager-1f1b", "interleaved", "zb1p", "zb2p"])
@pytest.mark.parametrize(("ranks", "count"), [(1, 1), (2, 2), (3, 6), (4, 4), (4, 12), (4, 2)])
def test_the_order_of_every_kind_is_that_which_is_written(sample, kind, ranks, count):
    """Two ways of writing schedules: by rank as in the papers, and by sweeps of all ranks."""
    chunks = 2 * ranks if kind == "interleaved" else ranks
    if kind == "interleaved" and count % ranks:
        count = ranks
    stage = sample.plan.stages[0]
    plan = replace(
        sample.plan,
        stages=tuple(replace(stage, devices=str(c % ranks)) for c in range(chunks)),
        num_micro_batches=count,
        schedule=Schedule(kind=kind),
    )
    words = [tuple(f"{chunk}{letter}{m}" for letter, chunk, m in order) for order in rank_orders(plan)]
    assert tuple(words) == write_order(kind, ranks, chunks, count)


# -- memory ----------------------------------------------------------------------------------------------------------


def test_memory_of_a_perceptron_in_closed_form(mlp):
    """Two layers on four replicas, ZeRO 1, no recomputation."""
    problem = Problem.build(mlp((64, 256, 128)), parse_cluster("4xA100"), {"global_batch": 32})
    space, check = PlanSpace(problem), Verifier(problem)
    shape = next(s for s in space.shapes if (s.dp, s.num_micro_batches) == (4, 2))
    prefix = space.even_values(shape, recompute="none", zero=1)
    plan = plan_of(space, megatron_signatures(space, shape, prefix, sequence_parallel=False))
    weights, samples = 64 * 256 + 256 * 128, 16 / 4
    ((memory, bounds),) = check.memory(plan)
    parameter, gradient, optimizer = problem.state_bytes
    assert memory.parameters == parameter * weights
    assert memory.gradients == gradient * weights
    assert memory.optimizer == optimizer * weights / 4
    # Input, ReLU and logits in bf16, labels as they come: integers of eight bytes.
    assert memory.activations == samples * (2 * (64 + 256 + 128) + 8)
    # The price keeps the ReLU's result for the unit that makes it and for the one that multiplies it.
    low, counted, high = bounds.total
    assert low == counted == memory.activations + memory.gradients + memory.buffers
    assert high == pytest.approx(counted + samples * 2 * 256 * (1.0 + problem.trainer.unused_share))
    # What the loss makes of its scores is more than the largest result twice; what the allocator does not use of all;
    # and what the trainer reserves.
    own = problem.trainer
    working = own.loss_bytes * samples * 128
    assert working > 2 * samples * 2 * 256
    used = memory.parameters + memory.gradients + memory.optimizer + memory.activations + working
    assert memory.buffers == working + own.unused_share * used + own.reserved_GiB * (1 << 30)
    assert verify(problem, plan) == ()


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    ("sequence_parallel", "recompute", "expected"),
    [
        (False, "none", lambda t: 10 + (24 + 80) / t),
        (True, "none", lambda t: (34 + 80) / t),
        (True, "selective", lambda t: 34 / t),
        (False, "full", lambda t: 2.0),
        (True, "full", lambda t: 2 / t),
    ],
)
def test_memory_of_a_layer_in_the_closed_forms_of_the_literature(tp, sequence_parallel, recompute, expected):
    """Korthikanti et al., arXiv 2205.05198, Table 2, with 5 heads * length / hidden = 80: what a third layer adds."""
    found = []
    for layers in (3, 4):
        spec = f"gpt:layers={layers},hidden=256,heads=8,seq_len=512,vocab_size=1024,dropout_percent=10"
        training = {"global_batch": 4, "precision": "fp16", "trainer": "megatron-lm"}
        problem = Problem.build(zoo.build(spec), parse_cluster(f"1x{tp}xA100-80GB"), training)
        space = PlanSpace(problem)
        shape = next(s for s in space.shapes if (s.tp, s.pp, s.num_micro_batches) == (tp, 1, 1))
        prefix = space.even_values(shape, recompute=recompute, zero=0)
        plan = plan_of(space, megatron_signatures(space, shape, prefix, sequence_parallel=sequence_parallel))
        check = Verifier(problem)
        assert check.violations(plan) == ()
        found.append(check.memory(plan)[0][0].activations)
    assert (found[1] - found[0]) / (512 * 4 * 256) == pytest.approx(expected(tp))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_data_parallel_memory_is_the_price_s_to_the_byte(zero, mode):
    """Nothing is converted, no unit keeps what another one does: both counts are one."""
    problem = build(GPT)
    space = PlanSpace(problem)
    shape = next(s for s in space.shapes if (s.dp, s.pp, s.num_micro_batches) == (4, 2, 4))
    prefix = space.even_values(shape, recompute=mode, zero=zero)
    plan = plan_of(space, megatron_signatures(space, shape, prefix, sequence_parallel=False))
    for said, (mine, bounds) in zip(plan.estimate.memory_bytes, Verifier(problem).memory(plan), strict=True):
        assert bounds.total[0] == pytest.approx(bounds.total[2], rel=0.01)
        assert said.activations == pytest.approx(mine.activations, rel=0.01)
        assert (said.parameters, said.gradients, said.optimizer) == (mine.parameters, mine.gradients, mine.optimizer)
        assert said.buffers == pytest.approx(mine.buffers)


# -- broken plans ----------------------------------------------------------------------------------------------------


class Sample:
    """Four layers on 2 stages x dp 2 x tp 2, and the same interleaved."""

    def __init__(self):
        self.problem = build(GPT)
        self.check = Verifier(self.problem)
        space = PlanSpace(self.problem)
        self.plan = self._template(space, virtual=1)
        self.interleaved = self._template(space, virtual=2)

    def _template(self, space, virtual):
        shape = next(
            s for s in space.shapes if (s.dp, s.tp, s.pp, s.num_micro_batches, s.virtual) == (2, 2, 2, 4, virtual)
        )
        prefix = space.even_values(shape, recompute="none", zero=1)
        return plan_of(space, megatron_signatures(space, shape, prefix, sequence_parallel=False))

    def wrong(self, plan):
        return self.check.violations(replace(plan, estimate=None))


@pytest.fixture(scope="module")
def sample():
    return Sample()


def test_the_samples_are_sound(sample):
    assert verify(sample.problem, sample.plan) == ()
    assert verify(sample.problem, sample.interleaved) == ()


def stage(number, **changes):
    def change(plan):
        stages = list(plan.stages)
        stages[number] = replace(
            stages[number], **{k: v(stages[number]) if callable(v) else v for k, v in changes.items()}
        )
        return replace(plan, stages=tuple(stages))

    return change


def sharded(name, axis, inputs, outputs):
    def change(at):
        entry = {**at.shardings.get(name, {}), axis: AxisSharding(inputs=tuple(inputs), outputs=tuple(outputs))}
        return {**at.shardings, name: entry}

    return stage(0, shardings=change)


def swap(plan):
    """The operators of the two stages change places; their placements go with them."""
    one, two = plan.stages
    return replace(plan, stages=(replace(two, devices=one.devices), replace(one, devices=two.devices)))


BROKEN = [
    (lambda p: replace(p, model=replace(p.model, sha256="0")), "model.sha256", "the plan is for"),
    (lambda p: replace(p, stages=()), "stages", "there are none"),
    (lambda p: replace(p, num_micro_batches=8), "num_micro_batches", "8 of 4 samples are not the global batch of 16"),
    (lambda p: replace(p, num_micro_batches=16, samples_per_micro_batch=1), "stages[0].batch_axes", "1 samples do not"),
    (stage(1, batch_axes=("ep",)), "stages[1].batch_axes", "no axis 'ep'"),
    (stage(1, batch_shares=(1, 2)), "stages[1].batch_shares", "2 shares of 4 samples"),
    (stage(0, mesh=(("dp", 2), ("tp", 4))), "stages[0].mesh", "8 places for 4 devices"),
    (stage(0, mesh=(("dp", 2), ("dp", 2), ("tp", 1))), "stages[0].mesh", "axes repeat"),
    (stage(1, zero=Zero(stage=4, axes=("dp",))), "stages[1].zero.stage", "no ZeRO 4"),
    (stage(1, zero=Zero(stage=1, axes=("cp",))), "stages[1].zero.axes", "no axis 'cp'"),
    (stage(1, zero=Zero(stage=1)), "stages[1].zero.axes", "over no axis"),
    (stage(1, devices="4-6,8"), "stages[1].devices", "device 8 is not among the 8"),
    (stage(1, devices="3-6"), "stages[1].devices", "device 3 is also of pipeline rank 0"),
    (stage(1, devices="4,5,6,6"), "stages[1].devices", "a device twice"),
    (stage(1, devices="4-x"), "stages", "not a list of devices"),
    (stage(1, operators=lambda s: ("nobody", s.operators[1])), "stages[1].operators", "no operator 'nobody'"),
    (stage(1, operators=lambda s: s.operators[::-1]), "stages[1].operators", "stands after"),
    (stage(1, operators=lambda s: (s.operators[0], "lm_head/MatMul")), "stages", "1 operators are in no stage: loss"),
    (stage(1, operators=lambda s: ("h.1/Add_1", s.operators[1])), "stages", "1 operators are in more than one stage"),
    (swap, "stages[0].operators", "before it is made"),
    (stage(1, recompute=("nobody.*",)), "stages[1].recompute", "names no operator"),
    (lambda p: replace(p, sync=Sync(kind="local_sgd", period=4)), "sync.kind", "was not allowed"),
    (sharded("h.0.mlp/Gelu", "tp", ["P"], ["P"]), "stages[0].shardings.h.0.mlp/Gelu.tp", "cannot have P -> P"),
    (sharded("h.0.mlp/Gelu", "tp", ["S(2)"], ["B"]), "stages[0].shardings.h.0.mlp/Gelu.tp", "cannot have S(2) -> B"),
    (sharded("h.0.mlp/Gelu", "cp", ["S(1)"], ["S(1)"]), "stages[0].shardings.h.0.mlp/Gelu.cp", "no such axis"),
    (sharded("nobody", "tp", ["B"], ["B"]), "stages[0].shardings.nobody", "no operator of the stage has this name"),
    (lambda p: replace(p, schedule=Schedule(kind="explicit")), "schedule", "needs order"),
    (lambda p: replace(p, schedule=Schedule(kind="1f1b", order=((), ()))), "schedule", "has no order"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "where", "what"), BROKEN, ids=[f"{w}-{t}" for _, w, t in BROKEN])
def test_a_broken_plan_is_named(sample, change, where, what):
    found = sample.wrong(change(sample.plan))
    assert found, "nothing was found"
    assert {v.where.replace("stages[1].batch_axes", "stages[0].batch_axes") if "samples do" in v.what else v.where
            for v in found} == {where}  # fmt: skip
    assert what in found[0].what


def test_splits_of_several_axes_divide_by_their_product(sample):
    """Four samples go over dp 2 and tp 2 together, two samples do not."""
    change = sharded("h.0.mlp/Gelu", "tp", ["S(0)"], ["S(0)"])
    assert not sample.wrong(change(sample.plan))
    fewer = replace(sample.plan, num_micro_batches=8, samples_per_micro_batch=2)
    assert not sample.wrong(fewer)
    (fault,) = sample.wrong(change(fewer))
    assert fault.where == "stages[0].shardings.h.0.mlp/Gelu"
    assert "2 samples do not divide into 4 parts" in fault.what


def test_dims_that_do_not_divide_are_named():
    problem = build("gpt:layers=1,hidden=64,heads=4,seq_len=33,vocab_size=128", "2xA100", 2, fix={"tp": 2})
    space = PlanSpace(problem)
    plan = space.decode(space.random(np.random.default_rng(0)))
    whole = stage(0, shardings={}, batch_axes=())(plan)
    assert not verify(problem, whole)
    odd = sharded("h.0.mlp/Gelu", "tp", ["S(1)"], ["S(1)"])(whole)
    (fault,) = verify(problem, odd)
    assert "33 of factor" in fault.what
    assert "2 parts" in fault.what


@pytest.mark.parametrize(
    ("size", "target", "fault"),
    [(2051, "any", None), (2045, "any", "4 parts"), (2051, "megatron-core", None), (2051, "automap", "4 parts")],
)
def test_ranks_share_a_vocabulary_unevenly_where_parts_are_large_and_the_target_pads(size, target, fault):
    """Parts have 512 elements or more: 4 * 512 = 2048."""
    graph = zoo.build(f"gpt:layers=2,hidden=64,heads=4,seq_len=32,vocab_size={size}")
    training = {"global_batch": 4, "target": target}
    problem = Problem.build(graph, parse_cluster("4xA100"), training, {"fix": {"tp": 4}})
    space = plan_space(problem)
    plan = space.decode(space.random(np.random.default_rng(0)))
    split = sharded("wte/Gather", "tp", ["S(0)", "B"], ["P"])(plan)
    faults = [fault.what for fault in verify(problem, split) if fault.where.endswith("wte/Gather")]
    assert [fault in text for text in faults] == [True] * (fault is not None)
    if fault is None:
        lower_plan(split, space.evaluator)
    else:
        with pytest.raises(PlanError, match="cannot be shared"):
            lower_plan(split, space.evaluator)


def test_a_cut_through_a_residual_is_named(sample):
    names = [op.name for op in sample.problem.graph.operators]
    inside = names.index("h.1.mlp/Gelu")
    plan = stage(0, operators=lambda s: (s.operators[0], names[inside]))(sample.plan)
    plan = stage(1, operators=lambda s: (names[inside + 1], s.operators[1]))(plan)
    (fault,) = sample.wrong(plan)
    assert fault.where == "stages[0].operators"
    assert "cannot be cut after h.1.mlp/Gelu: 2 tensors cross" in fault.what


@pytest.mark.parametrize(
    ("change", "where", "what"),
    [
        (stage(3, devices="0-3"), "stages[3].devices", "not where stage 1"),
        (stage(3, mesh=(("dp", 4), ("tp", 1))), "stages[3].mesh", "differs from that of stage 1"),
        (lambda p: replace(p, schedule=Schedule(kind="1f1b")), "schedule", "1f1b has no virtual stages"),
    ],
)
def test_broken_virtual_stages_are_named(sample, change, where, what):
    found = sample.wrong(change(sample.interleaved))
    assert where in {v.where for v in found}
    assert what in " ".join(v.what for v in found)


def test_virtual_stages_of_another_mesh_are_not_priced(sample):
    changed = stage(3, mesh=(("dp", 4), ("tp", 1)))(sample.interleaved)
    with pytest.raises(PlanError, match=r"stages\[3\]\.mesh: differs from stages\[1\]\.mesh"):
        lower_plan(changed, Evaluator(sample.problem))


@pytest.mark.parametrize(
    ("change", "where", "what"),
    [
        (lambda a, b: (a, [*b[:-1], "1X3"]), "schedule", "'1X3' is not an action"),
        (lambda a, b: (a[:-1], b), "schedule.order[0]", "has F of micro-batch 3; it needs F and B, or F, I and W"),
        (lambda a, b: ([*a, "0B3"], b), "schedule.order[0]", "0B3 stands there twice"),
        (lambda a, b: ([*a, "1B3"], b), "schedule.order[0]", "1B3 does not belong"),
        (lambda a, b: (a, [*b[:-1], "1B4"]), "schedule.order[1]", "1B4 does not belong"),
        (lambda a, b: (a,), "schedule.order", "1 lists for 2"),
        (lambda a, b: (["0B0", "0F0", *a[3:], "0F1"], b), "schedule.order[0]", "0B0 waits forever for 0F0"),
        (lambda a, b: (["0F0", "0B0", "0F1", *a[3:]], ["1F1", "1B1", "1F0", "1B0", *b[4:]]), "schedule.order[1]", "1F1 waits forever for the result of stage 0"),  # noqa: E501 - one case a line
    ],
)  # fmt: skip
def test_broken_orders_are_named(sample, change, where, what):
    one, two = (list(line) for line in write_order("1f1b", 2, 2, 4))
    sound = replace(sample.plan, schedule=Schedule(kind="explicit", order=(tuple(one), tuple(two))))
    assert not sample.wrong(sound)
    order = tuple(tuple(line) for line in change(one, two))
    found = sample.wrong(replace(sample.plan, schedule=Schedule(kind="explicit", order=order)))
    assert where in {v.where for v in found}
    assert what in " ".join(v.what for v in found)


@pytest.mark.parametrize(
    ("hints", "where"),
    [
        ({"fix": {"dp": 4}}, "stages[0].mesh"),
        ({"fix": {"tp": 1}}, "stages[0].mesh"),
        ({"fix": {"pp": 4}}, "stages"),
        ({"fix": {"num_micro_batches": 8}}, "num_micro_batches"),
        ({"fix": {"virtual_stages": 2}}, "stages"),
        ({"fix": {"zero": 2}}, "stages[0].zero.stage"),
        ({"fix": {"recompute": "full"}}, "stages[0].recompute"),
        ({"fix": {"schedule": "gpipe"}}, "schedule.kind"),
        ({"constraints": [{"scope": "h.0.mlp", "replicate": True}]}, "stages[0].shardings, hints.constraints[0]"),
        ({"constraints": [{"scope": "h.0/Add", "split": True}]}, "stages[0].shardings, hints.constraints[0]"),
        ({"constraints": [{"scope": "h.0", "stage": 1}]}, "stages[0], hints.constraints[0]"),
        ({"constraints": [{"scope": "h.0", "recompute": True}]}, "stages[0].recompute, hints.constraints[0]"),
        (
            {"constraints": [{"scope": "h.0.mlp.c_fc/MatMul", "sharding": {"tp": "P"}}]},
            "stages[0].shardings, hints.constraints[0]",
        ),
    ],
)
def test_hints_that_a_plan_does_not_obey_are_named(sample, hints, where):
    found = verify(build(GPT, **hints), replace(sample.plan, estimate=None))
    assert found
    assert where in {v.where for v in found}
    assert all(v.where.partition("[")[0].rstrip("s") == where.partition("[")[0].rstrip("s") for v in found)


def test_operators_that_must_be_kept_are_not_run_again(sample):
    again = stage(0, recompute=("**",))(sample.plan)
    problem = build(GPT, constraints=[{"scope": "h.0", "recompute": False}])
    (fault,) = verify(problem, replace(again, estimate=None))
    assert fault.where == "stages[0].recompute, hints.constraints[0]"


@pytest.mark.parametrize(
    "field", ["parameters", "gradients", "optimizer", "activations", "buffers", "capacity", "reserve"]
)
def test_a_wrong_estimate_of_memory_is_named(sample, field):
    estimate = sample.plan.estimate
    one, two = estimate.memory_bytes
    wrong = replace(two, **{field: 1.05 * getattr(two, field)})
    plan = replace(sample.plan, estimate=replace(estimate, memory_bytes=(one, wrong)))
    (fault,) = verify(sample.problem, plan)
    together = field in ("gradients", "activations", "buffers")
    assert fault.where == ("estimate.memory_bytes[1]" if together else f"estimate.memory_bytes[1].{field}")


def test_an_estimate_of_other_devices_is_named(sample):
    estimate = sample.plan.estimate
    plan = replace(sample.plan, estimate=replace(estimate, memory_bytes=estimate.memory_bytes[::-1]))
    (fault,) = verify(sample.problem, plan)
    assert fault.where == "estimate.memory_bytes"


def test_a_plan_that_does_not_fit_is_named(sample):
    problem = build(GPT, memory_reserve_bytes=79.9 * (1 << 30))
    found = verify(problem, replace(sample.plan, estimate=None))
    assert {v.where for v in found} == {"stages[0].devices", "stages[1].devices"}
    assert "does not fit" in found[0].what


def test_a_parameter_of_several_units_is_held_once_a_rank(sample):
    """T5's embedding is read by encoder, decoder and head; the last two share a rank here."""
    problem = build(T5, "2xA100", 4, fix={"pp": 2, "num_micro_batches": 2, "virtual_stages": 1})
    assert not wrong_plans(problem, 30)
