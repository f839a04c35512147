"""Annotations in a file become constraints, which the request overrides."""

import itertools

import numpy as np
import pytest
from onnx import TensorProto, helper

from automap.annotations import annotated
from automap.cluster import parse_cluster
from automap.hints import Constraint
from automap.problem import Problem
from automap.space.space import PlanSpace
from ir.errors import ModelError
from ir.onnx.load import load_model
from ir.onnx.strip import strip
from ir.serialize import graph_from_bytes, graph_to_bytes

LAYERS = 4


def model(notes):
    """Four linear layers in modules net.0 to net.3; `notes` are (layer, key, value)."""
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [8, 64]) for n in ("t0", f"t{LAYERS}")]
    weights = [helper.make_tensor(f"w{n}", TensorProto.FLOAT, [64, 64], [0.0] * 4096) for n in range(LAYERS)]
    nodes = []
    for n in range(LAYERS):
        nodes += [
            helper.make_node("MatMul", [f"t{n}", f"w{n}"], [f"a{n}"], name=f"/net.{n}/MatMul"),
            helper.make_node("Relu", [f"a{n}"], [f"t{n + 1}"], name=f"/net.{n}/Relu"),
        ]
        for node in nodes[-2:]:
            node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=str(["", "net", f"net.{n}", node.op_type]))
    for layer, key, value in notes:
        for node in nodes[2 * layer : 2 * layer + 2]:
            node.metadata_props.add(key=f"automap.{key}", value=value)
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]).SerializeToString()


def problem(data, hints=None):
    return Problem.build(load_model(data), parse_cluster("4xA100"), {"global_batch": 8, "loss": "mse"}, hints)


def test_modules_that_want_the_same_are_one_constraint():
    graph = load_model(model([(0, "stage", "0"), (1, "stage", "0"), (2, "stage", "1"), (3, "stage", "1")]))
    assert annotated(graph, ()) == tuple(Constraint(scope=f"net.{n}", stage=n // 2) for n in range(LAYERS))
    whole = load_model(model([(n, "replicate", "true") for n in range(LAYERS)]))
    assert annotated(whole, ()) == (Constraint(scope="net", replicate=True),)
    assert graph_from_bytes(graph_to_bytes(graph)) == graph
    assert annotated(load_model(model([])), ()) == ()


def test_plans_obey_them():
    """Every plan of the space has two stages, cut in the middle, and the second layer is split over tp only."""
    notes = [(n, "stage", str(n // 2)) for n in range(LAYERS)] + [(1, "replicate", "true")]
    space = PlanSpace(problem(model(notes)))
    for values in space.random_batch(np.random.default_rng(0), 20):
        plan = space.decode(tuple(values.tolist()))
        assert len(plan.stages) == 2
        assert plan.stages[0].operators[1].startswith("net.1")
        for glob, sharding in itertools.chain(*(stage.shardings.items() for stage in plan.stages)):
            assert not ("net.1" in glob and any("S(1)" in axis.outputs for axis in sharding.values()))


def test_the_request_overrides_them():
    data = model([(0, "stage", "0"), (3, "stage", "1")])
    own = {"constraints": [{"scope": "net.3", "stage": 2}]}
    first, second = problem(data, own).hints.constraints
    assert (first.scope, first.stage, second.scope, second.stage) == ("net.3", 2, "net.0", 0)
    again = problem(data, problem(data, own).hints)
    assert again.hints == problem(data, own).hints


def test_stripping_keeps_them():
    data = model([(0, "stage", "0")])
    assert annotated(load_model(strip(data).data), ()) == annotated(load_model(data), ())


@pytest.mark.parametrize(("key", "value"), [("stage", "-1"), ("stage", "last"), ("split", "yes"), ("replicate", "")])
def test_what_says_nothing_is_refused(key, value):
    with pytest.raises(ModelError, match=f"automap.{key}") as caught:
        load_model(model([(0, key, value)]))
    assert repr(value) in str(caught.value)
