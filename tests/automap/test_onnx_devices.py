"""The annotation of ONNX models: read by the onnx checker and by onnx_ir, and compared with the plan."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import loader_ranks
import numpy as np
import onnx
import onnx_ir
import pytest
import torch

from automap.cluster import parse_cluster
from automap.export.annotate_model import annotate
from automap.export.export import export
from automap.plan import Plan, parse_devices
from automap.price.estimate import annotate as priced
from automap.problem import Problem
from automap.runtime.torch_export import export_onnx
from automap.space.space import PlanSpace
from automap.space.target_limits import plan_space
from ir.onnx.load import load_model

SIZES = loader_ranks.SIZES


@functools.cache
def model_file() -> bytes:
    return export_onnx(lambda: (loader_ranks.build(layers=2), (torch.zeros(1, SIZES["seq_len"], dtype=torch.int64),)))


@functools.cache
def space(target: str = "onnx") -> PlanSpace:
    training = {"global_batch": 8, "target": target}
    return plan_space(Problem.build(load_model(model_file()), parse_cluster("2x2xA100"), training))


def annotated(values: Any, space: PlanSpace) -> tuple[Plan, dict[str, Any], onnx.ModelProto]:
    plan = priced(space.decode(values), space.lowered(values), space.evaluator)
    document = json.loads(export(plan, space.problem, "onnx").files["onnx_devices.json"])
    model = onnx.load_from_string(model_file())
    annotate(model, document)
    return plan, document, model


def test_annotated_models_are_valid_and_say_what_the_plan_says() -> None:
    for values in space().random_batch(np.random.default_rng(0), 12).tolist():
        plan, document, model = annotated(values, space())
        onnx.checker.check_model(model)
        again = onnx_ir.to_proto(onnx_ir.from_proto(model))
        assert [n.device_configurations for n in again.graph.node] == [
            n.device_configurations for n in model.graph.node
        ]
        sizes = {t.name: list(t.dims) for t in model.graph.initializer}
        sizes |= {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
        stages = []
        for node in model.graph.node:
            for found in node.device_configurations:
                stages.append(found.pipeline_stage)
                devices = sorted(parse_devices(plan.stages[found.pipeline_stage].devices))
                for spec in found.sharding_spec:
                    groups = {entry.key: list(entry.value) for entry in spec.index_to_device_group_map}
                    held = [groups.get(number, [number]) for number in spec.device]
                    # Each device holds one shard, and there are as many shards as the dims are cut into.
                    assert sorted(device for group in held for device in group) == devices
                    counts = [part.num_shards for dim in spec.sharded_dim for part in dim.simple_sharding]
                    assert math.prod(counts) == len(held)
                    for dim in spec.sharded_dim:
                        parts = [part.dim_value for part in dim.simple_sharding]
                        assert math.prod(parts) in (0, sizes[spec.tensor_name][dim.axis])
        assert stages == sorted(stages)
        assert set(stages) <= set(range(len(plan.stages)))
        assert {p.key: p.value for p in model.metadata_props}["automap.zero"] == str(plan.degrees[0].zero)
        assert document["configuration"]["num_devices"] == 4


def test_shards_of_a_plan_in_megatrons_pattern() -> None:
    patterned = space("pytorch")
    shape = next(s for s in patterned.shapes if (s.dp, s.tp, s.pp) == (2, 2, 1))
    rows = patterned.random_batch(np.random.default_rng(1), 400).tolist()
    plan, document, _ = annotated(next(row for row in rows if patterned.shape(row) == shape), patterned)
    assert plan.stages[0].mesh == (("dp", 2), ("tp", 2))
    # tp runs over neighbours; replicas hold the same shard. Each piece of a fused weight is cut.
    shards = [[0, 2], [1, 3]]
    for name, axis, parts in (
        ("h.0.mlp.c_fc.weight", 0, [{"num_shards": 2, "dim_value": 64}]),
        ("h.0.mlp.c_proj.weight", 1, [{"num_shards": 2, "dim_value": 64}]),
        ("h.1.attn.c_attn.weight", 0, [{"num_shards": 1, "dim_value": 3}, {"num_shards": 2, "dim_value": 16}]),
    ):
        assert document["tensors"][name] == [{"stage": 0, "dims": [{"axis": axis, "parts": parts}], "shards": shards}]
    assert document["tensors"]["ln_f.weight"] == [{"stage": 0, "dims": [], "shards": [[0, 1, 2, 3]]}]
    (ids,) = document["tensors"]["ids"]
    assert ids == {"stage": 0, "dims": [{"axis": 0, "parts": [{"num_shards": 2}]}], "shards": [[0, 1], [2, 3]]}


def test_another_model_is_refused() -> None:
    _, document, model = annotated(space().random(np.random.default_rng(0)), space())
    other = onnx.ModelProto()
    other.CopyFrom(model)
    other.graph.ClearField("initializer")
    other.graph.ClearField("input")
    with pytest.raises(ValueError, match=r"no weight or input \S+ of onnx_devices\.json"):
        annotate(other, document)


def test_the_script_reads_and_writes_files(tmp_path: Path) -> None:
    plan = priced(
        *(f(space().random(np.random.default_rng(0))) for f in (space().decode, space().lowered)), space().evaluator
    )
    for name, text in export(plan, space().problem, "onnx").files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "model.onnx").write_bytes(model_file())
    spec = importlib.util.spec_from_file_location("annotate_model", tmp_path / "annotate_model.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main(str(tmp_path / "model.onnx"), str(tmp_path / "annotated.onnx"))
    made = onnx.load(tmp_path / "annotated.onnx")
    assert made.ir_version >= 11
    assert [conf.name for conf in made.configuration] == ["automap"]
