"""Costs of operators outside the table: stated by the file, overridden by the request, else named in a warning."""

import pytest
from onnx import TensorProto, helper

from automap.cluster import parse_cluster
from automap.problem import Problem
from automap.space.space import PlanSpace
from ir.errors import ModelError
from ir.graph import Amount, Graph
from ir.onnx.load import load_model
from ir.serialize import graph_from_bytes, graph_to_bytes

SEGMENT = "com.example.Segment"


def model(**costs: object) -> bytes:
    """x -> MatMul -> an operator of a custom domain -> MatMul."""
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [8, 64]) for n in ("x", "y", "b")]
    weights = [helper.make_tensor(n, TensorProto.FLOAT, [64, 64], [0.0] * 4096) for n in ("w", "v")]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Segment", ["a"], ["b"], name="segment", domain="com.example"),
        helper.make_node("MatMul", ["b", "v"], ["y"]),
    ]
    for key, value in costs.items():
        nodes[1].metadata_props.add(key=f"automap.{key}", value=str(value))
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:2], weights, value_info=ends[2:])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.example", 1)]
    return helper.make_model(graph, opset_imports=opsets).SerializeToString()


def operator(graph: Graph):
    return next(op for op in graph.operators if op.kind == SEGMENT)


def priced(data: bytes, hints: dict | None = None):
    """The row of the operator in the tables of the price."""
    problem = Problem.build(load_model(data), parse_cluster("1x2xA100-80GB"), {"global_batch": 8, "loss": "mse"}, hints)
    space = PlanSpace(problem)
    return next(
        space.evaluator.tables.arrays.kernels[i]
        for i, op in enumerate(o for u in space.linkage.blocks.units for o in problem.graph.operators[u.start : u.stop])
        if op.kind == SEGMENT
    )


def test_a_file_states_costs():
    graph = load_model(model(forward_s="0.25", flops=3e9, bytes="1e6"))
    op = operator(graph)
    assert (op.measured_forward_s, op.measured_backward_s, op.stated_bytes) == (0.25, None, 1e6)
    assert op.forward_flops == Amount(per_sample=3e9) and op.backward_flops == Amount(per_sample=6e9)
    assert graph_from_bytes(graph_to_bytes(graph)) == graph
    assert graph.warnings == (f"{op.name}: {SEGMENT} is replicated: kind is not in the table",)


def test_without_costs_it_is_named():
    (warning,) = load_model(model()).warnings
    assert SEGMENT in warning and "hints.costs" in warning


@pytest.mark.parametrize(
    ("costs", "hint", "expected"),
    [
        ({}, None, (-1, -1, -1)),
        ({"forward_s": 0.25}, None, (0.25, 0.5, -1)),
        ({"forward_s": 0.25, "backward_s": 0.1, "bytes": 7}, None, (0.25, 0.1, 7)),
        ({"forward_s": 0.25, "bytes": 7}, {"forward_s": 2.0}, (2.0, 4.0, -1)),
        ({"forward_s": 0.25}, {"flops": 1e12}, (-1, -1, -1)),
        ({}, {"bytes": 9.0}, (-1, -1, 9)),
    ],
)
def test_the_price_uses_them_and_hints_override(costs, hint, expected):
    name = operator(load_model(model())).name
    row = priced(model(**costs), None if hint is None else {"costs": {name: hint}})
    assert (row.measured_forward_s, row.measured_backward_s, row.stated_bytes) == expected


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "fast", ""])
def test_bad_costs_are_refused(value):
    with pytest.raises(ModelError, match="a cost that is not a number of 0 or more") as error:
        load_model(model(flops=value))
    assert "segment" in error.value.value and error.value.repair
