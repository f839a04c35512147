"""Plans that are run and compared with one process: expert, uneven and random ones, and pipelines of unlike meshes."""

import functools
from dataclasses import replace
from pathlib import Path

import crossing_graphs
import numpy as np
import onnx
from runtime_ranks import Case, expert_plan, make_problem, with_stages
from small_graphs import build_gpt, build_shared

from automap.globs import matches
from automap.plan import AxisSharding, Plan, Schedule, Stage, Zero, model_ref
from automap.space.space import PlanSpace
from ir import zoo
from ir.alike_order import alike_order
from ir.build import GraphBuilder
from ir.factors import whole_signature
from ir.onnx.load import load_model

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"

SIZES = "layers=2,hidden=16,heads=4,seq_len=8,vocab_size=24"
MODELS = {
    "gpt": f"gpt:{SIZES}",
    "deep": f"gpt:{SIZES.replace('layers=2', 'layers=4')}",
    "odd": f"gpt:{SIZES.replace('vocab_size=24', 'vocab_size=2051')}",
    "bert": f"bert:{SIZES}",
    "moe": f"moe:{SIZES},kv_heads=2,ffn=32,experts=4",
    "dropout": f"gpt:{SIZES},dropout_percent=20",
    "resnet": "resnet:blocks=1-1,width=8,image_size=32,num_classes=12",
}


def lstm():
    """An LSTM over features, a linear layer over its states, cross-entropy."""
    builder = GraphBuilder()
    builder.input("x", (1, 5, 6))
    for name, shape in (("w", (1, 32, 6)), ("r", (1, 32, 8)), ("b", (1, 64)), ("head", (8, 10))):
        builder.parameter(name, shape)
    builder.add("LSTM", ["x", "w", "r", "b"], ["y"], attributes={"layout": 1, "hidden_size": 8})
    builder.add("Reshape", ["y"], ["z"], attributes={"shape": (1, 5, 8)})
    builder.add("MatMul", ["z", "head"], ["scores"])
    return builder.finish(["scores"])


def resnet50():
    """The one of the onnx package, without its weights."""
    return load_model((LIGHT / "light_resnet50.onnx").read_bytes(), name="resnet50")


GRAPHS = {
    "lstm": lstm,
    "resnet50": resnet50,
    "plain": lambda: build_gpt(hidden=16, seq=8, vocab=32),
    "plain of four": lambda: build_gpt(layers=4, hidden=16, seq=8, vocab=32),
    "shared weights": lambda: alike_order(build_shared(4, turned=True)),
    **crossing_graphs.GRAPHS,
}


@functools.cache
def problem_of(model, cluster, batch=8, batch_norm="synchronized", fix=(("pp", 1),)):
    """The problem of plans with these settings, made once; `cluster` may be a number of devices."""
    graph = GRAPHS[model]() if model in GRAPHS else zoo.build(MODELS[model])
    # Rounding grows through batch normalisation of few samples: in one process that trains ResNet-50 with momentum, a
    # change of 1e-7 in all weights is one of 1e-3 in the loss ten steps later.
    optimizer = "sgd" if model.startswith("resnet") else "adam"
    return make_problem(graph, cluster, batch, {"fix": dict(fix)}, batch_norm=batch_norm, optimizer=optimizer)


def random_plans(model, cluster, count, seed, **more):
    """Plans drawn from the space."""
    problem = problem_of(model, cluster, **more)
    space = PlanSpace(problem)
    drawn = space.random_batch(np.random.default_rng(seed), count).tolist()
    return [Case(f"{model}, random {i} on {cluster}", problem, space.decode(v)) for i, v in enumerate(drawn)]


def expert(name, model, devices, *, batch=8, steps=0, batch_norm="synchronized", fix=(), **how):
    """An expert plan as a case; under `local` statistics all its ranks are replicas."""
    problem = problem_of(model, devices, batch, batch_norm, (("pp", how.get("pp", 1)), *fix))
    plan = expert_plan(problem, **how)
    replicas = devices // how.get("pp", 1)
    parts = (plan.samples_per_micro_batch // replicas,) * replicas if batch_norm == "local" else ()
    return Case(f"{model}, {name}", problem, plan, steps, parts=parts)


def partly(case, *modules):
    """The case with some of its blocks computed again."""
    stages = tuple(replace(stage, recompute=modules) for stage in case.plan.stages)
    name = f"{case.name}, {' and '.join(modules)} computed again"
    return replace(case, name=name, plan=replace(case.plan, stages=stages))


def idle(case, devices):
    """The plan of a case on a cluster with more devices, the last ones idle."""
    problem = replace(case.problem, cluster=problem_of("gpt", devices).cluster)
    plan = replace(case.plan, cluster=problem.cluster.to_json())
    return replace(case, name=f"{case.name}, of {devices}", problem=problem, plan=plan)


def spatial(name, model, devices, *, batch=8, batch_norm):
    """A plan that splits samples over dp and rows of pixels over tp, wherever that is possible."""
    problem = problem_of(model, devices, batch, batch_norm)
    space = PlanSpace(problem)
    shape = next(s for s in space.shapes if (s.tp, s.num_micro_batches) == (2, 2))
    values = list(space.even_values(shape, recompute="none", zero=0))
    for slot in space.slots[space.first.signature :]:
        unit = space.linkage.types[slot.unit_type]
        table, legal = unit.signatures[unit.groups[slot.group].leader], space.legal(values)
        wanted = 0 if space.axes[slot.index] == "dp" else 2
        fitting = [i for i, signature in enumerate(table) if legal[i] and signature.outputs[0] == wanted]
        values.append(fitting[0] if fitting else whole_signature(table))
    plan = space.decode(values)
    parts = (plan.samples_per_micro_batch // 2,) * 2 if batch_norm == "local" else ()
    return Case(f"{model}, {name}", problem, plan, parts=parts)


def uneven(case, shares):
    """The case with micro-batches of `sum(shares)` samples, which the ranks of every stage share in this way."""
    samples = sum(shares)
    count = case.problem.training.global_batch // samples
    plan = replace(case.plan, num_micro_batches=count, samples_per_micro_batch=samples)
    parts = shares if case.parts else ()
    return replace(case, name=f"{case.name}, shares {shares}", plan=with_stages(plan, batch_shares=shares), parts=parts)


COUNT, SAMPLES = 4, 7
"""Micro-batches; samples of each, which two and three ranks share unevenly."""
MEGATRON = {
    "wte/Gather": "S(0) B -> P",
    **{f"h.*.{up}/{kind}": f"{first} S(2)" for up in ("attn.q", "attn.k", "attn.v", "mlp.up")
       for kind, first in (("MatMul", "B S(1) ->"), ("Add", "S(2) S(0) ->"))},
    **{f"h.*.attn.{x}/Reshape": "S(2) -> S(2)" for x in "qkv"},
    **{f"h.*.attn.{x}/Transpose": "S(2) -> S(1)" for x in "qkv"},
    "h.*.attn/MatMul": "S(1) S(1) -> S(1)",
    "h.*.attn/Softmax": "S(1) -> S(1)",
    "h.*.attn/MatMul_1": "S(1) S(1) -> S(1)",
    "h.*.attn/Transpose": "S(1) -> S(2)",
    "h.*.attn/Reshape": "S(2) -> S(2)",
    "h.*.mlp/Gelu": "S(2) -> S(2)",
    **{f"h.*.{down}/{kind}": f"{first} P" for down in ("attn.proj", "mlp.down")
       for kind, first in (("MatMul", "S(2) S(0) ->"), ("Add", "P B ->"))},
    "lm_head/Transpose": "S(0) -> S(1)",
    "lm_head/MatMul": "B S(1) -> S(2)",
    "loss": "S(2) B -> B",
}  # fmt: skip
SEQUENCE = {**MEGATRON, **{f"h.*.ln_{n}/LayerNormalization": "S(1) B B -> S(1)" for n in (1, 2)},
            "h.*/Add": "S(1) S(1) -> S(1)", "h.*/Add_1": "S(1) S(1) -> S(1)"}  # fmt: skip
ZERO = [Zero(stage=level, axes=("dp",)) for level in range(4)]
TWO = ["h.0/Add_1"]
FOUR = ["h.0/Add_1", "h.1/Add_1", "h.2/Add_1"]


def stage(devices, *, dp=1, tp=1, how=MEGATRON, **more):
    """A stage without its operators."""
    return {"devices": devices, "mesh": (("dp", dp), ("tp", tp)), "batch_axes": ("dp",), "how": how, **more}


CASES = {
    "dp2 -> tp2": (TWO, [stage("0-1", dp=2), stage("2-3", tp=2)], "1f1b"),
    "tp2 -> dp2": (TWO, [stage("2-3", tp=2), stage("0-1", dp=2)], "1f1b"),
    "dp2 -> 1, eager 1f1b": (TWO, [stage("0-1", dp=2), stage("2")], "eager-1f1b"),
    "dp3 -> 1": (TWO, [stage("0-2", dp=3), stage("3")], "gpipe"),
    "1 -> tp2 with a split sequence": (TWO, [stage("0"), stage("1-2", tp=2, how=SEQUENCE)], "1f1b"),
    "split sequence -> dp2": (TWO, [stage("1,3", tp=2, how=SEQUENCE), stage("0,2", dp=2)], "1f1b"),
    "tp2 -> 1, zero-bubble, recompute": (TWO, [stage("0-1", tp=2, recompute=("h.*",)), stage("2")], "zb1p"),
    "dp2 with ZeRO 1 -> tp2, zero-bubble": (
        TWO, [stage("0-1", dp=2, zero=ZERO[1]), stage("2-3", tp=2, zero=ZERO[1])], "zb1p"),
    "dp2 with ZeRO 2, zero-bubble": (TWO, [stage("0-1", dp=2, zero=ZERO[2]), stage("2-3", dp=2, zero=ZERO[2])], "zb1p"),
    "dp2 with ZeRO 3, zero-bubble": (TWO, [stage("0-1", dp=2, zero=ZERO[3]), stage("2-3", dp=2, zero=ZERO[3])], "zb1p"),
    "interleaved tp2 and dp2": (FOUR, [stage("0-1", tp=2), stage("2-3", dp=2)] * 2, "interleaved"),
    "tp2 x dp2": ([], [stage("0-3", dp=2, tp=2, how=SEQUENCE)], "1f1b"),
}  # fmt: skip
"""Name -> operators after which it is cut, stages, kind of schedule."""


def plan_of(case, problem):
    """The plan of a case."""
    cuts, parts, kind = case
    names = [op.name for op in problem.graph.operators]
    ends = [names.index(cut) + 1 for cut in cuts]
    stages = []
    for part, first, end in zip(parts, [0, *ends], [*ends, len(names)], strict=True):
        fields = {key: value for key, value in part.items() if key != "how"}
        used = {g: text for g, text in part["how"].items() if any(matches(g, n) for n in names[first:end])}
        shardings = {}
        for glob, text in used.items():
            inputs, outputs = (tuple(side.split()) for side in text.split("->"))
            shardings[glob] = {"tp": AxisSharding(inputs=inputs, outputs=outputs)}
        if dict(part["mesh"])["tp"] == 1:
            shardings = {}
        stages.append(Stage(operators=(names[first], names[end - 1]), shardings=shardings, **fields))
    return Plan(
        model=model_ref(problem.graph),
        cluster=problem.cluster.to_json(),
        training=problem.training,
        num_micro_batches=COUNT,
        samples_per_micro_batch=SAMPLES,
        schedule=Schedule(kind=kind),
        stages=tuple(stages),
    )


def unlike(name, *, steps=0):
    """A case of `CASES`."""
    problem = problem_of("plain of four" if CASES[name][0] is FOUR else "plain", 4, COUNT * SAMPLES, fix=())
    return Case(name, problem, plan_of(CASES[name], problem), steps)
