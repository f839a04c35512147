"""Plans of a small decoder that every rank of a launch executes, one after the other, and compares with one process."""

import functools

import stage_cases
from small_graphs import build_gpt
from stage_cases import VOCAB, one_process, worst
from stage_programs import random_data, random_values

from automap.cluster import parse_cluster
from automap.names import matches
from automap.plan import AxisSharding, Plan, Schedule, Stage, Zero, model_ref
from automap.price.evaluator import Evaluator
from automap.problem import Problem
from automap.runtime.groups import Groups
from automap.runtime.optimizer import Optimizer
from automap.runtime.runner import join

COUNT, SAMPLES, TOKENS = 4, 7, 8
"""Micro-batches; samples of each, which two and three ranks share unevenly; tokens of each."""
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
"""Name -> operators behind which it is cut, stages, kind of schedule."""


TRAINED, STEPS = ("dp2 with ZeRO 1 -> tp2, zero-bubble",), 10
"""Cases that are trained further, and for how many steps."""


class Setting:
    """A model with values and data, and what one process makes of them."""

    def __init__(self, layers):
        problem = Problem.build(
            build_gpt(layers=layers, hidden=16, seq=TOKENS, vocab=VOCAB),
            parse_cluster("4xA100-80GB"),
            {"global_batch": COUNT * SAMPLES, "precision": "fp32"},
        )
        self.evaluator, self.graph = Evaluator(problem), problem.graph
        self.values = random_values(self.graph)
        self.data = random_data(self.graph, SAMPLES, COUNT, VOCAB)
        self.loss, self.gradients = one_process(self.graph, self.values, self.data, SAMPLES, TOKENS)

    def part(self, tensor, box, micro_batch):
        return self.data[micro_batch][tensor][tuple(slice(*span) for span in box)]

    @functools.cached_property
    def trained_loss(self):
        """Behind steps of Adam."""
        leaves = {t.name: self.values[t.name].clone().requires_grad_() for t in self.graph.parameters}
        optimizer, gradients = Optimizer(leaves, "adam"), self.gradients
        for _ in range(STEPS):
            for key, leaf in leaves.items():
                leaf.grad = gradients[key].clone()
            optimizer.step()
            loss, gradients = one_process(self.graph, {**self.values, **leaves}, self.data, SAMPLES, TOKENS)
        return loss


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


def run_case(name, rank, setting, groups):
    """See `stage_cases.run_case`; and the loss behind steps of Adam where the case asks for it."""
    plan = plan_of(CASES[name], setting.evaluator.problem)
    pipeline, programs = join(setting.evaluator, plan, rank, setting.values, groups)
    for _ in range(2):
        for program in programs.values():
            for leaf in program.parameters.values():
                leaf.grad = None
        loss = pipeline.step(setting.part)
    found = {}
    for program in programs.values():
        found.update(program.whole_gradients())
    errors = worst(loss, found, setting.loss, setting.gradients)
    if name in TRAINED:
        optimizer = Optimizer({f"{n}.{k}": v for n, p in programs.items() for k, v in p.parameters.items()}, "adam")
        for _ in range(STEPS):
            optimizer.step()
            pipeline.refresh()
            loss = pipeline.step(setting.part)
        if loss is not None:
            errors["trained"] = abs(loss - setting.trained_loss) / abs(setting.trained_loss)
    return errors


def compare(folder, rank, num_ranks, argument):
    """Both kinds of cases: name -> errors."""
    found = stage_cases.compare(folder, rank, num_ranks, {"cases": argument["pipelines"]})
    small, large, groups = Setting(2), Setting(4), Groups()
    for name in argument["plans"]:
        found[name] = run_case(name, rank, large if CASES[name][0] is FOUR else small, groups)
    return found
