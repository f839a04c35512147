"""Frozen parameters, against torch: what is computed, saved and held for them, and what their plans cost."""

import dataclasses

import numpy as np
import pytest
import torch
from adapted_networks import LAYERS, RANK, SIZE, TOKENS, Encoded, Transformer, freeze
from long_cases import long_but
from torch.utils.flop_counter import FlopCounterMode

from agents.searcher import Budget, search
from automap.bounds.partial_plans import BoundTable, PartialPlan
from automap.cost_graph.families import families, parts
from automap.cost_graph.family_bounds import FamilyBounds
from automap.errors import ProblemError
from automap.globs import most_specific, select
from automap.plan import model_ref
from automap.price.estimate import estimate_lowered, price
from automap.problem import Problem
from automap.records import to_json
from automap.runtime.torch_export import export_onnx
from automap.space.space import PlanSpace
from automap.space.target_limits import plan_space
from automap.space.templates import templates
from automap.stated_model import frozen_as_stated
from automap.verify import Verifier
from ir import zoo
from ir.onnx.sandbox import import_model
from ir.serialize import graph_digest, graph_from_bytes, graph_to_bytes
from ir.zoo.net import Net

LLAMA = "llama:layers=4,hidden=64,heads=8,kv_heads=4,ffn=128,seq_len=32,vocab_size=128"
TIED = "gpt:layers=3,hidden=64,heads=4,seq_len=32,vocab_size=1024"
MOE = "moe:layers=2,hidden=64,heads=4,ffn=64,experts=4,seq_len=32,vocab_size=128"


def words(samples):
    return torch.randint(0, 64, (samples, TOKENS))


NETWORKS = {
    "adapters": (lambda: freeze(Transformer(), "lora"), words),
    "adapters and a tied head": (lambda: freeze(Transformer(tied=True), "lora"), words),
    "the last layer": (lambda: freeze(Transformer(), "layers.2", "head"), words),
    "biases": (lambda: freeze(Transformer(), "bias"), words),
    "a head behind an encoder": (lambda: freeze(Encoded(), "head"), lambda n: torch.randn(n, 16)),
    "an encoder before a head": (lambda: freeze(Encoded(), "encoder"), lambda n: torch.randn(n, 16)),
    "all": (lambda: freeze(Encoded(), ""), lambda n: torch.randn(n, 16)),
}  # fmt: skip


def exported(name):
    build, inputs = NETWORKS[name]
    return import_model(export_onnx(lambda: (build(), inputs(1).to("meta"))))


def problem_of(graph, cluster="8xA100", batch=16, hints=None, **training):
    return Problem.build(graph, cluster, {"global_batch": batch, **training}, hints)


# -- what is computed and saved ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
def test_products_of_both_passes_are_those_that_torch_computes(name):
    build, inputs = NETWORKS[name]
    graph, network = exported(name), build()
    with FlopCounterMode(display=False) as forward:
        loss = network(inputs(2)).sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert sum(op.forward_flops.at(2) for op in graph) == forward.get_total_flops()
    assert sum(op.backward_flops.at(2) for op in graph) == backward.get_total_flops()


@pytest.mark.parametrize("name", ["a head behind an encoder", "an encoder before a head", "all"])
def test_what_is_saved_is_what_torch_saves(name):
    build, inputs = NETWORKS[name]
    graph, network = exported(name), build()
    weights, saved = {p.untyped_storage().data_ptr() for p in network.parameters()}, {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in weights:
            saved[x.untyped_storage().data_ptr()] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        kept = network(inputs(2))
    assert kept.requires_grad
    names = {name for op in graph for name in op.saved if not graph.is_weight(name)}
    assert sum(graph.tensors[name].elements.at(2) for name in names) == sum(saved.values())


def test_trained_parameters_are_those_of_the_module():
    for name, (build, _) in NETWORKS.items():
        graph, module = exported(name), build()
        assert graph.num_parameters == sum(p.numel() for p in module.parameters())
        assert graph.num_trained == sum(p.numel() for p in module.parameters() if p.requires_grad)


# -- the source -------------------------------------------------------------------------------------------------------


def test_patterns_freeze_as_the_metadata_of_the_file_does():
    whole = import_model(export_onnx(lambda: (Transformer(), torch.zeros(1, TOKENS, dtype=torch.long))))
    of_file, of_patterns = problem_of(exported("adapters")), problem_of(whole, frozen=["*", "!*lora*"])
    assert of_file.graph.operators == of_patterns.graph.operators
    assert of_file.graph.tensors == of_patterns.graph.tensors
    assert of_file.graph.num_trained == 2 * LAYERS * 2 * RANK * SIZE


def test_a_pattern_without_a_parameter_is_refused():
    with pytest.raises(ProblemError, match="no parameter has such a name") as caught:
        problem_of(zoo.build(LLAMA), frozen=["*", "!*lora*"])
    assert (caught.value.field, caught.value.value) == ("training.frozen[1]", "!*lora*")
    assert "embed_tokens.weight" in str(caught.value)


def test_a_model_without_trained_parameters_is_refused():
    with pytest.raises(ProblemError, match="no parameter is left to be trained"):
        problem_of(zoo.build(LLAMA), frozen=["*"])


def test_pieces_of_a_fused_weight_are_frozen_by_its_name_and_experts_together():
    fused = zoo.build(TIED)
    assert fused.pieces
    (whole, *_) = next(iter(fused.pieces.values()))
    graph = problem_of(fused, frozen=[whole]).graph
    assert {t.name for t in graph.tensors.values() if t.frozen} == {
        n for n, (w, *_) in fused.pieces.items() if w == whole
    }


@pytest.mark.parametrize("pattern", ["wte.weight", "lm_head*"])
def test_a_tied_parameter_is_frozen_by_the_name_of_each_module_that_reads_it(pattern):
    """It is so in torch too, whichever of the names the file has."""
    graph = problem_of(zoo.build(TIED), frozen=[pattern]).graph
    assert {t.name for t in graph.tensors.values() if t.frozen} == {"wte.weight"}
    assert not problem_of(zoo.build(TIED), frozen=["wte*", "h.0.*", "!lm_head*"]).graph.tensors["wte.weight"].frozen


def test_code_that_reads_a_parameter_of_a_module_gives_it_no_other_name():
    net = Net()
    x = net.linear(net.builder.input("x", (1, 4, 8)), "encoder.first", 8)
    x = net.linear(net.product(x, net.parameter("encoder.first.weight"), "decoder"), "decoder.last", 8)
    graph = net.finish(x)
    assert frozen_as_stated(graph, ["decoder.*"]).tensors["decoder.last.weight"].frozen
    assert not frozen_as_stated(graph, ["decoder.*"]).tensors["encoder.first.weight"].frozen


def test_digests_and_documents_know_frozen_parameters_alone():
    plain, frozen = problem_of(zoo.build(LLAMA)), problem_of(zoo.build(LLAMA), frozen=["layers.0.*"])
    assert graph_digest(plain.graph) != graph_digest(frozen.graph)
    assert graph_from_bytes(graph_to_bytes(frozen.graph)) == frozen.graph
    assert b"frozen" not in graph_to_bytes(plain.graph)
    assert "frozen" not in to_json(plain.training)
    assert to_json(frozen.training)["frozen"] == ["layers.0.*"]


# -- the price --------------------------------------------------------------------------------------------------------


def plans_of(space, count, seed=0):
    rows = [tuple(row) for row in space.random_batch(np.random.default_rng(seed), count).tolist()]
    found = [values for _, values in templates(space)]
    return rows + found[:: -(-len(found) // count)]


FROZEN = {
    "adapters": lambda: (exported("adapters"), []),
    "tied": lambda: (zoo.build(TIED), ["wte*", "h.0.*", "h.1.mlp*"]),
    "not the table": lambda: (zoo.build(TIED), ["h.*"]),
    "first layers": lambda: (zoo.build(LLAMA), ["embed*", "layers.[01].*"]),
    "experts": lambda: (zoo.build(MOE), ["*experts*"]),
    "head alone": lambda: (zoo.build(LLAMA), ["*", "!lm_head*"]),
}
CASES = [
    ("adapters", "2x2xA100", "generic", {}),
    ("tied", "2x2xV100@25Gbit", "generic", {}),
    ("not the table", "4xA100", "deepspeed", {}),
    ("first layers", "2x4xA100", "megatron-core", {}),
    ("first layers", "8xA100", "torchtitan", {}),
    ("experts", "4xA100", "megatron-core", {}),
    ("head alone", "4xV100-16GB+4xP100-16GB", "generic", {}),
    ("adapters", "4xA100", "ddp", {"schedule": "zb1p"}),
]


@pytest.mark.parametrize(("name", "cluster", "trainer", "fix"), long_but(CASES[::4], CASES))
def test_all_ways_of_pricing_agree_and_no_plan_beats_its_bounds(name, cluster, trainer, fix):
    graph, patterns = FROZEN[name]()
    problem = problem_of(graph, cluster, 16, {"fix": fix}, trainer=trainer, frozen=patterns)
    space, check = PlanSpace(problem), Verifier(problem)
    rows = plans_of(space, 20)
    table, bounds, known = BoundTable(space), FamilyBounds(space), {}
    for values, (seconds, over) in zip(rows, space.price(np.array(rows)).tolist(), strict=True):
        lowered = space.lowered(values)
        outcome = space.evaluator.evaluate(lowered)
        assert (outcome.step_time_s, outcome.overflow) == (seconds, over)
        plan = dataclasses.replace(space.decode(values), estimate=estimate_lowered(lowered, space.evaluator))
        assert not check.violations(plan)
        prefix = PartialPlan(space, table)
        while not prefix.done:
            assert prefix.bound.time_s <= seconds * (1 + 1e-12)
            assert prefix.bound.overflow <= over + 1e-12
            prefix.decide(values[prefix.position])
        for family in families(space, [space.shape(values)]) if over <= 0.0 and "P100" not in cluster else ():
            for each in (family, *parts(family)):
                if values[space.first.zero] in each.zeros and not each.is_unlike:
                    known.setdefault(each, bounds.bound(each, np.inf))
                    assert known[each] <= seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    "hints",
    [
        {"fix": {"recompute": "full"}},
        {"fix": {"recompute": "selective"}},
        {"constraints": [{"scope": "layers.*", "recompute": True}]},
    ],
)
def test_wanted_recomputation_binds_what_has_a_backward_pass(hints):
    """Frozen layers in front run nothing again; a search finds plans all the same, which pass."""
    problem = problem_of(zoo.build(LLAMA), "2xA100", 16, hints, trainer="ddp", frozen=["embed*", "layers.[01].*"])
    (stage,) = search(problem, Budget(evaluations=10)).plan.stages
    found = {name for glob in stage.recompute for name in select(glob, [op.name for op in problem.graph])}
    scopes = {name.partition("/")[0][: len("layers.0")] for name in found}
    assert not scopes & {"layers.0", "layers.1"}
    assert found or hints["fix"] == {"recompute": "selective"}, "a kernel may fuse all that this mode runs again"


@pytest.mark.parametrize(
    ("trainer", "precision", "master"),
    [
        ("megatron-lm", "bf16", 0),
        ("deepspeed", "bf16", 0),
        ("torchtitan", "bf16", 4),
        ("ddp", "bf16", 4),
        ("ddp", "fp32", 0),
    ],
)
def test_memory_and_optimizer_in_closed_form(trainer, precision, master):
    """The cluster is one device. A trainer that converts float32 weights has a master of frozen ones as well."""
    more = {"trainer": trainer, "precision": precision}
    problem = problem_of(zoo.build(LLAMA), "1xA100", 4, frozen=["*", "!*mlp*"], **more)
    graph = problem.graph
    trained = sum(t.num_elements for t in graph.parameters if "mlp" in t.name)
    frozen = graph.num_parameters - trained
    assert trained > 0
    assert frozen > 0
    (memory,) = priced(problem).memory_bytes
    parameter, gradient, optimizer = problem.state_bytes
    assert memory.parameters == parameter * graph.num_parameters
    kept = problem.trainer.keeps_gradients
    assert memory.gradients == gradient * trained if kept else memory.gradients <= gradient * trained
    assert memory.optimizer == optimizer * trained + master * frozen
    assert problem.whole_state_bytes == memory.parameters + gradient * trained + memory.optimizer
    whole = problem_of(zoo.build(LLAMA), "1xA100", 4, **more)
    share = priced(problem).breakdown_s["optimizer"] / priced(whole).breakdown_s["optimizer"]
    assert share == pytest.approx(trained / graph.num_parameters)


def priced(problem):
    """The estimate of pure data parallelism in one micro-batch, without ZeRO and recomputation."""
    space = PlanSpace(problem)
    for shape, values in templates(space):
        plan = space.decode(values)
        is_plain = (shape.tp, shape.pp, shape.num_micro_batches, values[space.first.zero]) == (1, 1, 1, 0)
        if is_plain and not plan.stages[0].recompute:
            return price(problem, plan)
    raise AssertionError("no such template")


def test_a_frozen_encoder_saves_nothing_and_has_no_backward_pass():
    problem = problem_of(exported("a head behind an encoder"), "1xA100", 4)
    tables = PlanSpace(problem).evaluator.tables
    arrays, graph = tables.arrays, problem.graph
    before = [op for op in graph if op.is_live and not graph.runs_backward(op)]
    assert {op.scope.partition(".")[0] for op in before} == {"encoder"}
    assert all(op.backward_flops.at(1) == 0.0 and not op.saved for op in before)
    frozen = np.flatnonzero(arrays.kernels["is_frozen"])
    assert len(frozen) > 0
    for row in frozen:
        operator = arrays.operators[row]
        operands = arrays.operands[operator.first_operand : operator.end]
        assert not operands["is_saved"].any()
        assert not arrays.tensors["has_gradient"][operands["tensor"]].any()


def test_freezing_no_parameter_makes_no_difference():
    """Costs of all units are equal to the last bit in all columns."""
    for spec in (LLAMA, TIED, MOE):
        plain, same = (PlanSpace(problem_of(zoo.build(spec), **more)) for more in ({}, {"frozen": []}))
        rows = plain.random_batch(np.random.default_rng(0), 50)
        assert plain.price(rows).tobytes() == same.price(rows).tobytes()


def test_the_less_is_trained_the_less_a_step_costs():
    """Each pattern more makes the step of every plan shorter, and the state of its parameters less, or leaves them."""
    patterns = ["embed*", "layers.0.*", "layers.1.mlp*", "layers.*", "norm*"]
    spaces = [PlanSpace(problem_of(zoo.build(LLAMA), "4xA100", frozen=patterns[:n])) for n in range(len(patterns) + 1)]
    decoded = [spaces[0].decode(values) for values in plans_of(spaces[0], 60)]
    # Unlike layers are cut, and run again, at other places than like ones.
    plans = [plan for plan in decoded if len(plan.stages) == 1 and not plan.stages[0].recompute]
    assert len(plans) > 10
    before = np.full((len(plans), 2), np.inf)
    for space in spaces:
        same = [dataclasses.replace(plan, model=model_ref(space.problem.graph)) for plan in plans]
        estimates = [price(space.problem, plan, space.evaluator) for plan in same]
        held = [max(m.parameters + m.gradients + m.optimizer for m in one.memory_bytes) for one in estimates]
        found = np.array([[one.step_time_s, most] for one, most in zip(estimates, held, strict=True)])
        assert (found <= before * (1 + 1e-9)).all()
        before = found


def test_ranks_split_layers_with_adapters():
    """Their thin dim stays whole, and both products of a head's part are on the rank that has it."""
    problem = problem_of(
        exported("adapters"), "2xcpu", 8, {"fix": {"tp": 2, "pp": 1}}, target="automap", precision="fp32"
    )
    space = plan_space(problem)
    (stage,) = space.decode(space.random(np.random.default_rng(0))).stages

    def made(name):
        entry = stage.shardings.get(most_specific(stage.shardings, name) or "", {})
        return entry["tp"].outputs if "tp" in entry else ("B",)

    for path in (f"layers.{layer}.{part}" for layer in range(LAYERS) for part in ("q", "v")):
        parts = [made(f"{path}.{name}/MatMul") for name in ("base", "lora_a", "lora_b")]
        assert parts == [("S(2)",), ("B",), ("S(2)",)]


def test_a_target_takes_plans_whose_adapters_are_whole_beside_split_layers():
    """Their products, large beside those of this network, have no dim that two ranks split."""
    problem = problem_of(exported("adapters"), "2xcpu", 8, {"fix": {"tp": 2}}, target="automap", precision="fp32")
    plan = search(problem, Budget(evaluations=8), seed=0).plan
    assert not Verifier(problem).violations(plan)
    assert plan.degrees[0].tensor == 2
