"""From a PyTorch module to a plan that speaks of its modules, end to end."""

import json

import pytest
import torch
from torch import Tensor, nn

from agents import search
from agents.searcher import Budget
from automap.cluster import parse_cluster
from automap.errors import PlanError
from automap.globs import matches
from automap.plan import Plan
from automap.price.evaluator import Evaluator
from automap.price.lowered_plan import same_lowered
from automap.price.plan_reader import lower_plan
from automap.problem import Problem
from automap.runtime.torch_export import export_onnx
from automap.space.space import PlanSpace
from automap.space.templates import templates
from ir.onnx.load import load_model

WIDTH = 32


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(nn.functional.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.ln(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(64, WIDTH), "h": nn.ModuleList(Block() for _ in range(4))}
        )
        self.lm_head = nn.Linear(WIDTH, 64, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.transformer["wte"](ids)
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(x)


@pytest.mark.slow
def test_hints_and_plans_speak_of_modules():
    data = export_onnx(lambda: (Net(), (torch.zeros(1, 16, dtype=torch.long),)))
    graph = load_model(data, name="net")
    hints = {
        "constraints": [
            {"scope": "transformer.h.*.mlp.c_fc", "sharding": {"tp": "S(2)"}},
            {"scope": "transformer.wte", "replicate": True},
            {"scope": "transformer.h.1", "stage": 0},
            {"scope": "transformer.h.2", "stage": 1},
            {"scope": "transformer.h.3.mlp", "recompute": True},
        ],
        "fix": {"tp": 2, "pp": 2},
    }
    problem = Problem.build(graph, parse_cluster("8xA100-80GB"), {"global_batch": 32}, hints)
    plan = search(problem, Budget(evaluations=300), searcher="expert", seed=0).plan
    first, second = plan.stages[:2]
    assert matches("transformer.h.1", first.operators[1])
    assert matches("transformer.h.2", second.operators[0])
    for stage in (first, second):
        (key,) = [k for k in stage.shardings if "c_fc/MatMul" in k]
        assert key.startswith("transformer.h.")
        assert stage.shardings[key]["tp"].outputs == ("S(2)",)
    assert not any("wte/" in key for key in first.shardings)
    assert any(matches(glob, "transformer.h.3.mlp.c_fc/MatMul") for glob in plan.stages[-1].recompute)
    # As a document a plan may name modules where it recomputes.
    document = json.loads(json.dumps(plan.to_json()))
    document["stages"][-1]["recompute"] = ["transformer.h.*.mlp"]
    document["estimate"] = None
    evaluator = Evaluator(problem)
    segments = lower_plan(Plan.from_json(document), evaluator).chunks[-1]
    for segment in segments:
        unit = evaluator.blocks.units[segment.unit]
        for op, again in zip(graph_operators(problem, unit), segment.recomputed, strict=True):
            assert again == (".mlp." in op.name or ".mlp/" in op.name), op.name


def graph_operators(problem: Problem, unit):
    return problem.graph.operators[unit.start : unit.stop]


def build(gpt) -> tuple[PlanSpace, dict]:
    problem = Problem.build(gpt(), parse_cluster("2xA100"), {"global_batch": 4}, {"fix": {"tp": 2}})
    space = PlanSpace(problem)
    _, values = next((s, v) for s, v in templates(space) if s.num_micro_batches == 1)
    return space, space.decode(values).to_json()


def test_a_sharded_module_takes_its_followers_along(gpt):
    """`h.*.mlp.up` as one key: the product splits its columns, the bias behind it follows."""
    space, document = build(gpt)
    whole = lower_plan(Plan.from_json(document), space.evaluator)
    shardings = document["stages"][0]["shardings"]
    module = shardings["h.*.mlp.up/MatMul"]
    for key in [key for key in shardings if key.startswith("h.*.mlp.up")]:
        del shardings[key]
    shardings["h.*.mlp.up"] = module
    assert same_lowered(lower_plan(Plan.from_json(document), space.evaluator), whole)


def test_a_module_without_such_a_placement_is_refused(gpt):
    space, document = build(gpt)
    document["stages"][0]["shardings"]["h.*.mlp.up"] = {"tp": {"inputs": ["S(7)", "B"], "outputs": ["B"]}}
    del document["stages"][0]["shardings"]["h.*.mlp.up/MatMul"]
    with pytest.raises(PlanError, match="matches no operator"):
        lower_plan(Plan.from_json(document), space.evaluator)
