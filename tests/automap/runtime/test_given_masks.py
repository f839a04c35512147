"""Layers are split although code between them reads masks that come with the samples."""

from __future__ import annotations

import json
from pathlib import Path

import given_masks
import numpy as np
import pytest
from returning_ranks import returned

from automap.cluster import parse_cluster
from automap.export.export import export
from automap.price.estimate import annotate
from automap.problem import Problem
from automap.records import to_json
from automap.runtime.torch_export import export_onnx
from automap.space.target_limits import plan_space
from automap.verify import Verifier
from ir import zoo
from ir.onnx.load import load_model


@pytest.mark.slow
def test_split_layers_train_with_the_losses_of_one_process(tmp_path: Path) -> None:
    """By the modules, not by the graph in their place."""
    inputs = dict(zip(("tokens", "mask"), given_masks.batch(1)[:2], strict=True))
    data = export_onnx(lambda: (given_masks.build(), inputs))
    (tmp_path / "model.onnx").write_bytes(data)
    training = {"global_batch": given_masks.BATCH, "target": "automap", "precision": "fp32"}
    problem = Problem.build(load_model(data), parse_cluster("2xcpu"), training, {"fix": {"tp": 2}})
    space = plan_space(problem)
    (values,) = space.random_batch(np.random.default_rng(0), 1).tolist()
    plan = annotate(space.decode(values), space.lowered(values), space.evaluator)
    assert plan.degrees[0].tensor == 2
    (tmp_path / "plan.json").write_text(json.dumps(to_json(plan)))
    wanted = given_masks.losses_of_one()
    assert wanted[-1] < wanted[0] - 0.1
    for found in returned(given_masks.losses, 2, tmp_path, tmp_path):
        assert found == pytest.approx([*wanted, 1.0], rel=1e-4)


@pytest.mark.slow
def test_bert_of_the_zoo_may_be_split() -> None:
    """Its mask of padding is computed from an input, and has no gradient. The norm of its head stays whole for plain
    PyTorch, which cannot split it."""
    model = zoo.build("bert:layers=2,hidden=64,heads=4,seq_len=32,vocab_size=256")
    assert {"attention_mask", "ids"}.isdisjoint(model.differentiable)
    for target in ("automap", "pytorch"):
        problem = Problem.build(model, parse_cluster("2xA100"), {"global_batch": 8, "target": target})
        space = plan_space(problem)
        assert {shape.tp for shape in space.shapes} == {1, 2}
        for values in space.random_batch(np.random.default_rng(0), 20).tolist():
            plan = annotate(space.decode(values), space.lowered(values), space.evaluator)
            assert Verifier(problem).violations(plan) == ()
            assert export(plan, problem, target).files
